"""Chapter 5: what a request is answered does not depend on who else is served, nobody starves, no block is lost."""

import itertools
import math
import random

import pytest
import torch
from equality import assert_close, feed
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_machine import check_pool

from minillm.continuous_batching import Engine, OneToken, Request, Scheduler, StaticScheduler
from minillm.continuous_batching.request import TextStream
from minillm.generate import generate
from minillm.kv_cache import KVCache
from minillm.measure.traces import poisson_arrivals, skewed
from minillm.model.sampling import SamplingParams
from minillm.paged_cache import PagedKVCache


class StepClock:
    """Time that passes by one second a step: `engine.on_step` moves it."""

    def __init__(self):
        self.time = 0.0

    def now(self):
        return self.time

    def wait(self, seconds):
        self.time += seconds


class Remembering(OneToken):
    """Plain decoding that keeps the logits of every token it gave."""

    def __init__(self):
        self.logits = {}

    def accept(self, sample, logits):
        self.logits.setdefault(sample, []).append(logits[-1])
        return super().accept(sample, logits)


def check_engine(engine: Engine) -> None:
    """Chapter 3's invariants, and the engine's own."""
    check_pool(engine.cache, [s.sequence for s in engine.running])
    assert all(s.sequence is None for s in engine.waiting)
    assert len(engine.running) <= engine.scheduler.max_batch
    prompts = {s.submission for s in engine.running if not s.token_ids}
    waiting = [s for s in engine.waiting if s.token_ids or s.submission not in prompts]  # the others keep a place
    order = [s.order() for s in engine.running + waiting]
    assert order == sorted(order), "in order of arrival, running before waiting: nobody was overtaken"


def make_engine(model, blocks=64, block_size=4, scheduler=None, **arguments) -> Engine:
    """An engine whose invariants are checked after every step, and whose clock counts steps."""
    clock = StepClock()

    def on_step(engine, plan):
        clock.time += 1
        check_engine(engine)
        assert sum(n for _, n in plan.counts) <= engine.scheduler.token_budget

    cache = PagedKVCache(model.config, blocks, block_size, "cpu", model.dtype)
    return Engine(model, cache, scheduler or Scheduler(4, 16), clock=clock, on_step=on_step, **arguments)


def alone(model, request: Request, index: int = 0) -> list[int]:
    """The tokens of one sample when nobody else is there."""
    cache = KVCache(model.config, len(request.prompt_ids) + request.max_new_tokens, "cpu", model.dtype)
    sampling = request.sampling_of(index)
    return list(generate(model, request.prompt_ids, request.max_new_tokens, cache, sampling, request.eos))


def mixed_requests(seed: int, n: int = 8) -> list[Request]:
    """Prompts of 1 to 30 tokens, some beginning alike, greedy and sampled, arriving at different steps."""
    rng = random.Random(seed)
    start = [rng.randrange(64) for _ in range(12)]
    requests = []
    for i in range(n):
        own = [rng.randrange(64) for _ in range(rng.randrange(1, 18))]
        sampling = SamplingParams(1.5, rng.choice([None, 20]), seed=rng.randrange(99)) if i % 2 else None
        prompt = start + own if rng.random() < 0.5 else own
        requests.append(
            Request(prompt, rng.randrange(1, 14), sampling, n=rng.choice([1, 1, 3]), arrival=rng.choice([0, 0, 2, 7]))
        )
    return requests


# Equality


@pytest.mark.parametrize("scheduler", [Scheduler, StaticScheduler])
@pytest.mark.parametrize(("max_batch", "budget"), [(1, 1), (3, 3), (4, 7), (8, 64)])
@pytest.mark.parametrize("blocks", [12, 100])
def test_every_answer_is_the_one_given_alone(small, scheduler, max_batch, budget, blocks):
    requests = mixed_requests(seed=max_batch)
    engine = make_engine(small, blocks, scheduler=scheduler(max_batch, budget))
    for request, result in zip(requests, engine.run(requests), strict=True):
        assert result.request is request, "results come in the order given"
        assert result.finish_reason == "length"
        for sample in result.samples:
            expected = alone(small, request, sample.index)
            assert sample.token_ids == expected, f"sample {sample.index} of {request}"
    assert engine.cache.num_free_blocks == blocks, "the whole pool is there at the end"


def test_logits_too_are_those_of_a_solo_run_even_after_preemption(small):
    requests = [Request([i * 5 + j for j in range(10)], 12) for i in range(5)]
    remembering = Remembering()
    engine = make_engine(small, blocks=11, decoding=remembering)
    results = engine.run(requests)
    assert sum(s.preemptions for r in results for s in r.samples) > 0, "the pool was meant to be too small"
    for result in results:
        ids = [*result.request.prompt_ids, *result.token_ids]
        solo = feed(small, ids, [len(ids)], KVCache(small.config, len(ids), "cpu", torch.float64))
        given_ = torch.stack(remembering.logits[result.samples[0]])
        assert_close(given_, solo[9:-1], f"logits of {result.request}")


def test_a_tiny_pool_gives_the_text_of_a_large_one_and_preemption_is_bounded(small):
    requests = mixed_requests(seed=5, n=10)
    large, tiny = (make_engine(small, blocks) for blocks in (200, 11))
    texts = [[[s.token_ids for s in r.samples] for r in e.run(requests)] for e in (large, tiny)]
    assert texts[0] == texts[1]


def test_preemptions_are_bounded_by_the_blocks_that_were_needed(small):
    requests = [Request([i], 40) for i in range(6)]
    engine = make_engine(small, blocks=12)
    results = engine.run(requests)
    preemptions = sum(r.samples[0].preemptions for r in results)
    assert 0 < preemptions <= sum(engine.cache.blocks_for(41) for _ in requests), "at most one for each block taken"


def test_prefixes_are_found_across_requests(small):
    shared = list(range(40, 60))
    counts = []
    engine = make_engine(small, scheduler=Scheduler(1, 64))
    model_forward = small.forward

    def counting(tokens, positions, cache):
        counts.append(len(tokens))
        return model_forward(tokens, positions, cache)

    small.forward = counting
    try:
        results = engine.run([Request([*shared, i], 2) for i in range(3)])
    finally:
        del small.forward
    assert counts == [21, 1, 1, 1, 1, 1], "the first prompt runs whole, of the others one token: 20 are in 5 blocks"
    assert [r.token_ids for r in results] == [alone(small, r.request) for r in results]


# Who runs


def test_decoding_comes_first_and_prompts_share_the_rest_of_the_budget(small):
    plans = []
    engine = make_engine(small, scheduler=Scheduler(4, 8))
    check = engine.on_step
    engine.on_step = lambda e, plan: (check(e, plan), plans.append([n for _, n in plan.counts]))
    engine.run([Request([1], 6), Request([2], 6), Request(list(range(20)), 2, arrival=2), Request([3], 2, arrival=2)])
    assert plans[:2] == [[1, 1], [1, 1]]
    assert plans[2] == [1, 1, 6], "6 of 20 prompt tokens beside two that decode; the fourth request must wait"
    assert plans[3] == [1, 1, 6]
    assert plans[4] == [1, 1, 6]
    assert plans[5] == [1, 1, 2, 1], "the rest of the prompt, and then the next"


def test_a_sibling_that_waits_for_its_prompt_keeps_a_place_and_holds_nobody_up(small):
    ran = []
    engine = make_engine(small, scheduler=Scheduler(3, 8))
    check = engine.on_step
    engine.on_step = lambda e, plan: (check(e, plan), ran.append([s.order() for s, _ in plan.counts]))
    engine.run([Request(list(range(12)), 3, n=2), Request([3], 3), Request([4], 3)])
    assert ran[0] == [(1, 0)], "the budget ends inside the prompt"
    assert ran[1] == [(1, 0), (2, 0)], "the third place is its sibling's, and the third request waits"
    assert ran[2] == [(1, 0), (1, 1), (2, 0)]


def test_guesses_take_only_what_nobody_wants(small):
    class Eager(OneToken):
        def propose(self, samples):
            return [[0] * 5 for _ in samples]

        def accept(self, sample, logits):
            return super().accept(sample, logits[:1])

    plans = []
    engine = make_engine(small, scheduler=Scheduler(3, 8), decoding=Eager())
    check = engine.on_step
    engine.on_step = lambda e, plan: (check(e, plan), plans.append([n for _, n in plan.counts]))
    requests = [Request([1, 2], 5), Request([3], 5), Request(list(range(10)), 2, arrival=2)]
    assert [r.token_ids for r in engine.run(requests)] == [alone(small, r) for r in requests]
    assert plans[:4] == [[2, 1], [6, 2], [1, 1, 6], [3, 1, 4]], "the oldest guesses first, prompts before guesses"
    tight = make_engine(small, blocks=4, scheduler=Scheduler(2, 16), decoding=Eager())
    results = tight.run([Request([1, 2, 3, 4], 4), Request([5, 6, 7, 8], 4)])
    assert not sum(s.preemptions for r in results for s in r.samples), "guesses never preempt"


def test_the_oldest_is_never_preempted_and_the_newest_is_first(small):
    engine = make_engine(small, blocks=10)
    victims = []
    check = engine.on_step

    def on_step(e, plan):
        check(e, plan)
        for sample in plan.preempt:
            victims.append(sample.submission)
            others = [s.submission for s in e.running]
            assert all(sample.submission > other for other in others), "an older one was preempted before a newer one"

    engine.on_step = on_step
    engine.run([Request([i], 30) for i in range(4)])
    assert victims
    assert 1 not in victims


def step_bound(engine: Engine, requests: list[Request]) -> list[int]:
    """The bound of the scheduler's docstring for requests that are all there at the start."""
    slice_ = engine.scheduler.token_budget - engine.scheduler.max_batch + 1
    steps = [math.ceil((len(r.prompt_ids) + r.max_new_tokens) / slice_) + r.max_new_tokens for r in requests]
    return list(itertools.accumulate(n * r.n for n, r in zip(steps, requests, strict=True)))


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=7),
    blocks=st.integers(8, 24),
    block_size=st.sampled_from([1, 4, 5]),
    max_batch=st.integers(1, 5),
    spare=st.integers(0, 12),
    static=st.booleans(),
    cancel=st.integers(0, 12),
)
def test_random_workloads_keep_the_invariants_and_nobody_starves(
    small, shapes, blocks, block_size, max_batch, spare, static, cancel
):
    blocks = max(blocks, 32 // block_size + 1)
    scheduler = (StaticScheduler if static else Scheduler)(max_batch, max_batch + spare)
    engine = make_engine(small, blocks, block_size, scheduler)
    requests = [Request([(3 * i + j) % 64 for j in range(p)], o, n=n) for i, (p, o, n) in enumerate(shapes)]
    results = [engine.add(r) for r in requests]
    bounds, done = step_bound(engine, requests), {}
    while engine.waiting or engine.running:
        if engine.steps == cancel:
            engine.cancel(results[-1])
            check_engine(engine)
        if engine.waiting or engine.running:
            engine.step()
        for i, result in enumerate(results):
            if all(s.finish_reason for s in result.samples):
                done.setdefault(i, engine.steps)
    for i, result in enumerate(results):
        assert done[i] <= bounds[i], f"request {i} took {done[i]} steps, the bound is {bounds[i]}"
        for sample in result.samples:
            if sample.finish_reason != "cancelled":
                assert sample.token_ids == alone(small, result.request, sample.index)
    assert engine.cache.num_free_blocks == blocks


# n samples, ends, stop strings


def test_samples_of_one_request_differ_and_repeat_on_a_rerun(small):
    request = Request([1, 2, 3, 4, 5, 6], 10, SamplingParams(2.0, seed=7), n=4)
    runs = [[s.token_ids for s in make_engine(small).run([request])[0].samples] for _ in range(2)]
    assert runs[0] == runs[1]
    assert len({tuple(ids) for ids in runs[0]}) == 4
    again = make_engine(small).run([request, request])
    assert [s.token_ids for s in again[0].samples] == [s.token_ids for s in again[1].samples], "equal seeds are equal"


def test_samples_of_one_request_share_their_prompt_by_fork(small):
    engine = make_engine(small, scheduler=Scheduler(8, 64))
    engine.add(Request(list(range(10)), 5, n=4))
    engine.step()
    tables = [s.sequence.block_table for s in engine.running]
    assert len(tables) == 4, "all four run after the step in which the prompt ran once"
    assert all(t == tables[0] for t in tables)
    engine.step()
    assert len({b for s in engine.running for b in s.sequence.block_table}) == 2 + 4, "two full blocks, four tails"


def test_requests_are_served_in_the_order_of_their_arrival(small):
    engine = make_engine(small, scheduler=Scheduler(1, 8))
    late, early = engine.run([Request([1], 2, arrival=3.0), Request([2], 9)])
    assert early.timeline.token_times[-1] < late.timeline.token_times[0]


def test_callbacks_hear_the_first_sample_only_and_never_the_eos_byte(small):
    heard = []
    plain = alone(small, Request([9, 30, 2], 6))
    request = Request([9, 30, 2], 6, eos=plain[3], n=3, on_token=lambda token, text: heard.append((token, text)))
    result = make_engine(small).run([request])[0]
    assert [token for token, _ in heard] == result.token_ids
    assert "".join(text for _, text in heard) == result.text == bytes(result.token_ids[:-1]).decode("utf-8", "replace")


def test_an_answer_ends_with_eos(small):
    plain = alone(small, Request([9, 30, 2], 12))
    eos = plain[5]
    result = make_engine(small).run([Request([9, 30, 2], 12, eos=eos)])[0]
    assert result.token_ids == plain[: plain.index(eos) + 1]
    assert result.finish_reason == "eos"


@pytest.mark.parametrize(
    ("pieces", "stop", "released", "stopped"),
    [
        (["ab", "cd"], ["bc"], ["a", ""], True),
        (["ab", "xd"], ["bc"], ["a", "bxd"], False),
        (["<", "/", "s>x"], ["</s>"], ["", "", ""], True),
        (["<", "/", "t>"], ["</s>"], ["", "", "</t>"], False),
        (["aab"], ["ab"], ["a"], True),
        (["a", "a", "a", "b"], ["aab"], ["", "", "a", ""], True),
        (["one two"], ["two", "one"], [""], True),
        (["é"], ["é"], [""], True),
        (["x"], [], ["x"], False),
    ],
)
def test_nothing_of_a_stop_string_is_released_and_what_only_looked_like_it_is(pieces, stop, released, stopped):
    stream = TextStream(stop)
    out = ["".join(stream.push(b) for b in piece.encode()) for piece in pieces]
    assert out == released
    assert stream.stopped == stopped
    assert stream.text == "".join(out)


def test_held_back_text_comes_at_the_end():
    stream = TextStream(["ending"])
    assert [stream.push(b) for b in b"the end"] == ["t", "h", "", "e ", "", "", ""]
    assert stream.finish() == "end"
    assert stream.text == "the end"
    assert not stream.stopped


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_streamed_text_ends_where_the_first_stop_string_begins(text, stop):
    stream = TextStream(stop)
    out = ""
    for byte in text.encode():
        if not stream.stopped:
            out += stream.push(byte)
    out += stream.finish()
    # The first to be complete ends the text; of several that are complete at once the earliest beginning counts.
    ends = [i for i in range(len(text) + 1) if any(text[:i].endswith(s) for s in stop)]
    if ends:
        seen = text[: ends[0]]
        assert out == seen[: min(seen.find(s) for s in stop if s in seen)]
    else:
        assert out == text
    assert stream.text == out
    assert stream.stopped == bool(ends)


def test_a_stop_string_ends_the_answer_of_the_model(tiny):
    request = Request(list(b"Once upon a time"), 60)
    engine = Engine(tiny, PagedKVCache(tiny.config, 40, 16, "cpu"))
    text = engine.run([request])[0].text
    stop = text[20:24]
    pieces = []
    request = Request(request.prompt_ids, 60, stop=[stop], on_token=lambda token, piece: pieces.append(piece))
    result = engine.run([request])[0]
    assert result.text == text[: text.index(stop)] == "".join(pieces)
    assert result.finish_reason == "stop"


# What goes wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 3), "the prompt is empty"),
        (([1], 0), "max_new_tokens must be at least 1, got 0"),
        (([64], 3), r"token id 64 is outside the vocabulary 0\.\.63"),
        (([1], 128), "1 prompt tokens and 128 new ones exceed max_seq_len=128"),
        (([1] * 30, 20), "30 prompt tokens and 20 new ones may need 13 blocks of 4, the whole pool has 12"),
        (([1], 3, None, None, ("a", "")), "stop must be a sequence of strings, none empty, got .*''"),
        (([1], 3, None, None, "END"), "stop must be a sequence of strings, none empty, got 'END'"),
        (([1], 3, None, None, (b"a",)), "stop must be a sequence of strings"),
        (([1], 3, None, None, (), 1, math.nan), "arrival must be finite and at least 0, got nan"),
        (([1], 3, None, None, (), 1, -5.0), "arrival must be finite and at least 0, got -5.0"),
        (([1], 3, None, None, (), 0), "n must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_served_is_refused_and_the_others_go_on(small, arguments, message):
    engine = make_engine(small, blocks=12)
    good = Request([1, 2], 3)
    first = engine.add(good)
    with pytest.raises(ValueError, match=message):
        engine.add(Request(*arguments))
    while engine.running or engine.waiting:
        engine.step()
    assert first.token_ids == alone(small, good)
    results = engine.run([good, Request(*arguments), good])
    assert [r.finish_reason for r in results] == ["length", "error", "length"]
    assert str(results[1].error)
    assert results[1].token_ids == []


def test_a_callback_that_fails_ends_its_own_request_only(small):
    def broken(token, text):
        raise OSError("the connection is gone")

    requests = [Request([i, 5], 6, on_token=broken if i == 1 else None) for i in range(3)]
    engine = make_engine(small)
    results = engine.run(requests)
    assert [r.finish_reason for r in results] == ["length", "error", "length"]
    assert str(results[1].error) == "the connection is gone"
    assert [r.token_ids for r in results[::2]] == [alone(small, r) for r in requests[::2]]


def test_a_sibling_that_cannot_start_ends_alone(small):
    class Broken(OneToken):
        def accept(self, sample, logits):
            if sample.index == 1:
                raise RuntimeError("no token")
            return super().accept(sample, logits)

    request = Request([1, 2, 3], 4, n=3)
    result = make_engine(small, decoding=Broken()).run([request])[0]
    assert [s.finish_reason for s in result.samples] == ["length", "error", "length"]
    assert result.samples[2].token_ids == alone(small, request)


def test_right_guesses_change_no_answer_even_beside_forks(small):
    """Chapter 6's pieces in small: a decoding that knows what will come, for samples that share a prompt."""

    class Oracle(OneToken):
        def propose(self, samples):
            return [alone(small, s.request, s.index)[len(s.token_ids) :][:2] for s in samples]

        def accept(self, sample, logits):
            new = []
            for row, guess in zip(logits, [*sample.drafts, None], strict=True):
                new.append(OneToken().accept(_Shifted(sample, len(new)), row[None])[0])
                if new[-1] != guess:
                    break
            return new

    class _Shifted:
        def __init__(self, sample, by):
            self.sampling, self.ids = sample.sampling, [*sample.ids, *[0] * by]

    requests = [Request([1, 2, 3, 4, 5], 6, SamplingParams(2.0, seed=1), n=2), Request([7], 9)]
    engine = make_engine(small, scheduler=Scheduler(3, 16), decoding=Oracle())
    for request, result in zip(requests, engine.run(requests), strict=True):
        for sample in result.samples:
            assert sample.token_ids == alone(small, request, sample.index)
    assert engine.cache.num_free_blocks == 64


def test_the_callers_list_may_change_while_it_is_answered(small):
    prompt = [1, 2, 3]
    request = Request(prompt, 5, on_token=lambda token, text: prompt.append(token))
    expected = alone(small, Request([1, 2, 3], 5))
    assert make_engine(small).run([request])[0].token_ids == expected


def test_run_ends_those_who_were_in_a_step_that_failed_and_serves_the_others(small):
    engine = make_engine(small, scheduler=Scheduler(1, 16))
    attention, calls = engine.cache.attention, itertools.count()

    def failing(*arguments):
        if next(calls) == 3:
            raise RuntimeError("half way")
        return attention(*arguments)

    engine.cache.attention = failing
    requests = [Request([i, 5, 6], 4) for i in range(3)]
    results = engine.run([*requests, Request([1], 2.5)])
    assert [r.finish_reason for r in results] == ["error", "length", "length", "error"]
    assert [r.token_ids for r in results[1:3]] == [alone(small, r) for r in requests[1:]]
    assert isinstance(results[3].error, TypeError)
    assert engine.cache.num_free_blocks == 64


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 10), st.integers(2, 4)), min_size=2, max_size=4))
def test_forks_in_a_pool_that_preempts_give_the_answers_given_alone(small, shapes):
    engine = make_engine(small, blocks=6, scheduler=Scheduler(5, 9))
    requests = [
        Request([(3 * i + j) % 64 for j in range(p)], o, SamplingParams(1.5, seed=i), n=n)
        for i, (p, o, n) in enumerate(shapes)
    ]
    for request, result in zip(requests, engine.run(requests), strict=True):
        for sample in result.samples:
            assert sample.token_ids == alone(small, request, sample.index)
    assert engine.cache.num_free_blocks == 6


def test_a_step_that_fails_loses_nothing(small):
    engine = make_engine(small)
    requests = [Request([i, 5, 6, 7, 8], 6) for i in range(3)]
    results = [engine.add(r) for r in requests]
    write, calls = engine.cache.values.write, itertools.count()

    def failing(*arguments):
        if next(calls) in (3, 5, 9):
            raise RuntimeError("half way")
        return write(*arguments)

    engine.cache.values.write = failing
    failures = 0
    while engine.running or engine.waiting:
        try:
            engine.step()
        except RuntimeError as error:
            assert str(error) == "half way"  # noqa: PT017
            failures += 1
            check_engine(engine)
    assert failures > 0
    assert [r.token_ids for r in results] == [alone(small, r) for r in requests]
    assert engine.cache.num_free_blocks == 64


def test_a_request_can_be_cancelled_from_a_callback_of_another(small):
    engine = make_engine(small)
    results = []

    def on_token(token, text):
        if len(results[0].token_ids) == 2:
            engine.cancel(results[1])

    requests = [Request([1, 2], 8, on_token=on_token), Request([3, 4], 8), Request([5, 6], 8)]
    results.extend(engine.add(r) for r in requests)
    while engine.running or engine.waiting:
        engine.step()
    assert [r.finish_reason for r in results] == ["length", "cancelled", "length"]
    assert results[1].token_ids == alone(small, requests[1])[:1], "what came before it was cancelled stays"
    assert engine.cache.num_free_blocks == 64


def test_blocks_held_by_others_are_named_instead_of_waiting_for_ever(small):
    engine = make_engine(small, blocks=4)
    mine = engine.cache.sequence()
    mine.reserve(16)
    engine.add(Request([1], 3))
    with pytest.raises(RuntimeError, match="4 blocks of the pool are held by sequences outside this engine"):
        engine.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0, 4), "max_batch must be at least 1"), ((8, 7), "token_budget=7 is below max_batch=8: decoding would starve")],
)
def test_schedulers_that_would_starve_somebody_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Scheduler(*arguments)


# Times and counts


def test_queue_time_ttft_and_gaps_are_counted_from_the_arrival(small):
    engine = make_engine(small, scheduler=Scheduler(1, 8))
    first, second = engine.run([Request([1] * 20, 3), Request([2], 2, arrival=1.0)])
    assert first.samples[0].queue_time == 0
    assert first.timeline.ttft == 2.0, "three slices of 8, 8 and 4: the token comes in the third step, at time 2"
    assert second.samples[0].queue_time == 4.0, "arrived at 1, the first was done when the clock said 5"
    assert second.timeline.gaps == [1.0]
    assert second.timeline.tpot == 1.0


def simulated(small, scheduler, requests):
    """(steps, mean number of samples in a step) of serving `requests`."""
    occupancy = []
    cache = PagedKVCache(small.config, 16 * 32, 4, "cpu", torch.float64)
    engine = Engine(small, cache, scheduler, on_step=lambda e, plan: occupancy.append(len(plan.counts)))
    engine.run(requests)
    return engine.steps, sum(occupancy) / len(occupancy)


def test_continuous_batching_takes_less_than_half_the_steps_of_static_batching_on_a_skewed_trace(small):
    trace = skewed(128, seed=0, longest=100)
    requests = [Request([i % 64] * min(10, r.prompt), r.output) for i, r in enumerate(trace)]
    static = simulated(small, StaticScheduler(16, 64), requests)
    continuous = simulated(small, Scheduler(16, 64), requests)
    assert static[0] > 1.8 * continuous[0], f"steps: static {static[0]}, continuous {continuous[0]}"
    assert continuous[1] > 1.8 * static[1], f"samples in a step: static {static[1]:.1f}, continuous {continuous[1]:.1f}"


@pytest.mark.parametrize(("budget", "largest"), [(64, 62), (12, 12)])
def test_slices_bound_what_a_long_prompt_adds_to_a_step(small, budget, largest):
    seen = []
    cache = PagedKVCache(small.config, 200, 4, "cpu", torch.float64)
    engine = Engine(small, cache, Scheduler(4, budget), on_step=lambda e, p: seen.append(sum(n for _, n in p.counts)))
    engine.run([Request([1], 20), Request([2], 20), Request(list(range(60)), 2)])
    assert max(seen) == largest


def test_traces_are_skewed_and_arrivals_have_their_rate():
    trace = skewed(400, seed=1)
    outputs = sorted(r.output for r in trace)
    assert outputs[len(outputs) // 2] * 8 < outputs[-1], "most answers are short, some are long"
    assert all(sum(r.output == 256 for r in trace[i : i + 16]) == 1 for i in range(0, 400, 16))
    anywhere = skewed(400, seed=1, spread=False)
    assert sum(r.output == 256 for r in anywhere) == 25
    assert not all(any(r.output == 256 for r in anywhere[i : i + 16]) for i in range(0, 400, 16))
    times = poisson_arrivals(4000, rate=5.0, seed=2)
    assert times == sorted(times)
    assert times[-1] / 4000 == pytest.approx(1 / 5.0, rel=0.05)
    assert poisson_arrivals(5, 1.0, seed=3) == poisson_arrivals(5, 1.0, seed=3)
