"""Chapter 6: guesses save steps of the target and change nothing: the same greedy tokens, the same distribution."""

import itertools
import math
from collections import Counter

import pytest
import torch
from equality import greedy
from speculation_sweep import check_alone, check_engine, model, near, prompts

import minillm
from minillm.continuous_batching import Engine, Request, Scheduler
from minillm.generate import generate, run
from minillm.kv_cache import KVCache
from minillm.measure.speculation import (
    best_gamma,
    break_even,
    expected_tokens,
    operations,
    overlap,
    predicted_run_lengths,
    repeated_share,
    run_lengths,
    speed_up,
    step_seconds,
)
from minillm.model.sampling import SamplingParams, draw, probabilities, uniform
from minillm.model.tokenizer import ByteTokenizer
from minillm.naive_attention import NoCache
from minillm.paged_cache import PagedKVCache
from minillm.speculative_decoding import (
    DraftModel,
    Guesses,
    NGrams,
    Rounds,
    Speculative,
    Text,
    accept,
    accept_sampled,
    residual,
    speculative_generate,
)
from minillm.speculative_decoding.acceptance import ACCEPT, DRAFT, OWN

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


@pytest.fixture(scope="module")
def target():
    return model()


def pool(model_, blocks=40, block_size=4):
    return PagedKVCache(model_.config, blocks, block_size, "cpu", model_.dtype)


def scores(distribution: torch.Tensor) -> torch.Tensor:
    """Logits whose softmax it is."""
    return distribution.log()


def p_value(counts: list[int], expected: torch.Tensor) -> float:
    """Chi-square test of counts against probabilities; rare outcomes (expected below 5) count as one."""
    expected = expected * sum(counts)
    observed = torch.tensor(counts, dtype=torch.float64)
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
    if expected[-1] < 5:  # nothing may be hidden in an outcome that hardly comes
        assert observed[-1] <= 15 + 3 * expected[-1]
        expected, observed = expected[:-1], observed[:-1]
    chi2 = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2), chi2.float() / 2))


# The rule


def test_the_smallest_case_by_hand():
    assert float(torch.minimum(P, Q).sum()) == pytest.approx(0.7)
    rest = residual(P, Q, 1)
    assert (rest / rest.sum()).tolist() == [1.0, 0.0, 0.0], "what is refused becomes token 0, which q gives too rarely"


@pytest.mark.parametrize(("u", "token"), [(0.0, 1), (0.59, 1), (0.61, 0), (0.99, 0)])
def test_a_guess_is_kept_with_probability_p_over_q(u, token):
    """p/q of token 1 is 0.6."""
    p = torch.stack([P, P])
    new = accept_sampled(p, Guesses([1], Q[None]), lambda i, stream: u if stream == ACCEPT else 0.5)
    assert new[0] == token
    assert len(new) == 1 + (token == 1), "after a guess that is kept comes the bonus token"


@pytest.mark.parametrize(
    ("guesses", "new"),
    [([], [2]), ([1], [2]), ([2], [2, 0]), ([2, 0, 1], [2, 0, 1, 1]), ([2, 1, 1], [2, 0]), ([0, 0, 1], [2])],
    ids=str,
)
def test_greedy_keeps_guesses_as_long_as_they_are_its_own(guesses, new):
    """The target's best are 2, 0, 1, 1, whatever the draft holds for likely."""
    logits = torch.eye(3)[torch.tensor([2, 0, 1, 1])][: len(guesses) + 1]
    for sampling in (None, SamplingParams(0.0), SamplingParams(1e-6), SamplingParams(1e-5)):
        assert accept(logits, Guesses(guesses), sampling, position=9) == new


def test_the_targets_best_is_emitted_where_the_drafts_best_is_another():
    assert accept(scores(torch.tensor([[0.3, 0.5, 0.2]] * 2)), Guesses([0]), None, position=0) == [1]


def test_a_guess_the_target_never_makes_is_never_kept_and_a_certain_one_always():
    for u in (0.0, 0.3, 1 - 2**-53):
        p = torch.tensor([[0.0, 1.0]] * 2, dtype=torch.float64)
        assert accept_sampled(p, Guesses([0]), lambda i, stream, u=u: u) == [1]
        assert accept_sampled(p, Guesses([1]), lambda i, stream, u=u: u) == [1, 1]
        assert accept_sampled(torch.stack([Q, Q]), Guesses([1], Q[None]), lambda i, s, u=u: u)[0] == 1, "p = q"


def test_each_decision_takes_the_uniform_of_its_own_position():
    asked = []

    def u(i, stream):
        asked.append((i, stream))
        return 0.55

    rows = torch.stack([P, P, P])
    assert accept_sampled(rows, Guesses([1, 1], torch.stack([Q, Q])), u) == [1, 1, 1]
    assert asked == [(0, ACCEPT), (1, ACCEPT), (2, OWN)], "two guesses and the bonus token"
    asked.clear()
    assert accept_sampled(rows, Guesses([1, 2], torch.stack([Q, P])), u) == [1, 2, 1]
    assert accept_sampled(rows, Guesses([2, 1], torch.stack([Q * 0.9, Q])), lambda i, stream: 0.9) == [0]


def test_where_p_equals_q_but_for_rounding_the_replacement_is_drawn_from_p():
    assert residual(P, P, 1).tolist() == P.tolist()
    assert residual(P, P + 1e-17, 1).tolist() == P.tolist()
    one = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert residual(one, None, 1).tolist() == one.tolist()


def test_without_guesses_a_sampled_text_is_that_of_plain_decoding(target):
    class Silent(NGrams):
        def propose(self, texts):
            return [Guesses([]) for _ in texts]

    sampling = SamplingParams(1.1, seed=5)
    plain = list(generate(target, [1, 2, 3], 30, sampling=sampling))
    assert list(speculative_generate(target, Silent(), [1, 2, 3], 30, sampling=sampling)) == plain
    cache = PagedKVCache(target.config, 20, 4, "cpu", target.dtype)
    engine = Engine(target, cache, decoding=Speculative(target, Silent()))
    assert engine.run([Request([1, 2, 3], 30, sampling)])[0].token_ids == plain


def test_rows_must_match_guesses_and_be_finite():
    with pytest.raises(ValueError, match="2 guesses need 3 rows of logits, got 2"):
        accept(torch.zeros(2, 5), Guesses([1, 2]), None, position=0)
    for sampling in (None, SamplingParams(1.0)):
        with pytest.raises(ValueError, match="not a finite number"):
            accept(torch.tensor([[math.nan, 0.0]]), Guesses([]), sampling, position=0)


# Lossless

TARGET_LOGITS = torch.tensor([1.0, 0.4, -0.3, 0.2, -1.2], dtype=torch.float64)
DRAFT_LOGITS = torch.tensor([-0.5, 0.9, -1.5, 0.6, -0.4], dtype=torch.float64)
SAMPLINGS = [
    SamplingParams(0.7),
    SamplingParams(1.0),
    SamplingParams(1.3),
    SamplingParams(1.3, top_k=3),
    SamplingParams(1.0, top_p=0.8),
]


def resample_from_p(p, guesses, u):
    """Wrong: what replaces a guess is drawn from p."""
    new = accept_sampled(p, guesses, u)
    return new if new[0] == guesses.ids[0] else [draw(p[0], u(0, OWN))]


def q_not_renormalised(p, guesses, u):
    """Wrong: the draft drew from a filtered distribution, and is judged by the one before the filter."""
    raw = DRAFT_LOGITS.softmax(-1)[None]
    return accept_sampled(p, Guesses(guesses.ids, raw), u)


def one_uniform_twice(p, guesses, u):
    """Wrong: the same uniform decides whether to keep the guess and what replaces it."""
    return accept_sampled(p, guesses, lambda i, stream: u(i, ACCEPT))


def first_tokens(rule, sampling: SamplingParams, n: int) -> tuple[list[int], torch.Tensor, int]:
    """Counts of the first token over n draws of a guess and the rule; p; how many guesses were kept."""
    p, q = probabilities(TARGET_LOGITS, sampling), probabilities(DRAFT_LOGITS, sampling)
    counts, kept, rows = [0] * 5, 0, torch.stack([p, p])
    for seed in range(n):
        guess = draw(q, uniform(seed, 7, DRAFT))
        new = rule(rows, Guesses([guess], q[None]), lambda i, stream, seed=seed: uniform(seed, 7 + i, stream))
        counts[new[0]] += 1
        kept += len(new) == 2
    return counts, p, kept


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_rule_gives_the_targets_distribution(sampling):
    n = 100_000
    counts, p, kept = first_tokens(accept_sampled, sampling, n)
    assert p_value(counts, p) > 1e-4
    alpha = float(torch.minimum(p, probabilities(DRAFT_LOGITS, sampling)).sum())
    assert kept / n == pytest.approx(alpha, abs=4 * math.sqrt(alpha * (1 - alpha) / n)), "kept with probability alpha"


@pytest.mark.parametrize(
    ("rule", "sampling"),
    [(resample_from_p, SAMPLINGS[1]), (q_not_renormalised, SAMPLINGS[3]), (one_uniform_twice, SAMPLINGS[1])],
)
def test_the_same_test_notices_wrong_rules(rule, sampling):
    counts, p, _ = first_tokens(rule, sampling, 20_000)
    assert p_value(counts, p) < 1e-4


def test_guesses_that_were_not_drawn_are_lossless_too():
    p = probabilities(TARGET_LOGITS, SAMPLINGS[1])
    counts = [0] * 5
    for seed in range(20_000):
        counts[accept_sampled(torch.stack([p, p]), Guesses([2]), lambda i, s, seed=seed: uniform(seed, i, s))[0]] += 1
    assert p_value(counts, p) > 1e-4


@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[2], SamplingParams(1.0, top_k=3, top_p=0.9)], ids=str)
@pytest.mark.parametrize("kind", ["model", "n-grams", "engine"])
def test_sampled_texts_have_the_targets_distribution_end_to_end(sampling, kind):
    """2,000 texts of three tokens from a pair of models over five, against the probabilities of all 125."""
    target, draft = model(2, vocab_size=5, dim=8), model(4, vocab_size=5, dim=8)
    prompt = [1, 3, 1, 3, 1]
    counts = Counter()
    for seed in range(2_000 if kind == "model" else 700):
        params = SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p, seed)
        pool = PagedKVCache(draft.config, 4, 4, "cpu", draft.dtype) if kind == "engine" else None
        guesser = NGrams(2, 1) if kind == "n-grams" else DraftModel(draft, pool)
        if kind == "engine":
            decoding = Speculative(target, guesser, 2)
            engine = Engine(target, PagedKVCache(target.config, 4, 4, "cpu", target.dtype), decoding=decoding)
            new = engine.run([Request(prompt, 3, params)])[0].token_ids
        else:
            new = speculative_generate(target, guesser, prompt, 3, 2, sampling=params)
        counts[tuple(new)] += 1
    outcomes = list(itertools.product(range(5), repeat=3))
    expected = [1.0] * len(outcomes)
    for i, outcome in enumerate(outcomes):
        rows = run(target, [*prompt, *outcome], NoCache())
        p = probabilities(rows[len(prompt) - 1 : -1], sampling)
        expected[i] = math.prod(float(p[j, token]) for j, token in enumerate(outcome))
    assert sum(expected) == pytest.approx(1.0)
    assert p_value([counts[o] for o in outcomes], torch.tensor(expected, dtype=torch.float64)) > 1e-4


# Greedy equality


def test_greedy_tokens_are_those_of_plain_decoding(target):
    check_alone(target, prompts(3), (1, 3, 8), n=14)


def test_greedy_answers_of_the_engine_are_those_of_plain_decoding_also_with_preemption(target):
    rounds, preemptions = check_engine(target, prompts(5), (1, 4), n=14)
    assert preemptions > 0
    assert 0.1 < rounds.acceptance_rate < 0.95, "some guesses are kept and some are not"


def test_the_trained_pair_gives_the_tokens_of_plain_decoding(tiny):
    target, tokenizer = tiny, ByteTokenizer()
    draft, _ = minillm.load("draft", device="cpu")
    prompt = tokenizer.encode(minillm.held_out_text()[1])[:150]
    expected = list(generate(target, prompt, 60, KVCache(target.config, 210, "cpu")))
    rounds = Rounds()
    assert list(speculative_generate(target, draft, prompt, 60, 4, on_round=rounds.append)) == expected
    assert rounds.tokens_per_round > 1.6
    assert len(rounds) < 38


# Acceptance


@pytest.mark.parametrize(
    "sampling", [None, SamplingParams(1.2, seed=3), SamplingParams(0.8, top_k=9, top_p=0.9)], ids=str
)
@pytest.mark.parametrize("gamma", range(1, 9))
def test_the_target_as_its_own_draft_is_always_right(target, gamma, sampling):
    rounds = Rounds()
    new = list(speculative_generate(target, target, [5, 6, 7], 40, gamma, sampling=sampling, on_round=rounds.append))
    assert len(new) == 40
    assert all(r.accepted == len(r.guesses) for r in rounds), [(r.accepted, len(r.guesses)) for r in rounds]
    assert all(len(r.guesses) == gamma for r in rounds[:-1])
    assert rounds.acceptance_rate == 1.0
    assert len(rounds) == math.ceil(40 / (gamma + 1))


@pytest.mark.parametrize("sampling", [None, SamplingParams(1.2, seed=3)], ids=str)
def test_the_target_as_its_own_draft_is_always_right_in_the_engine(target, sampling):
    decoding = Speculative(target, DraftModel(target, pool(target)), 3)
    engine = Engine(target, pool(target), Scheduler(4, 64), decoding)
    engine.run([Request([i, 2, 3], 17, sampling, n=1 + i % 2) for i in range(3)])
    rounds = decoding.rounds
    assert all(r.accepted == len(r.guesses) for r in rounds)
    assert sum(len(r.emitted) for r in rounds) == 4 * 17
    assert engine.steps < 17


def test_a_draft_that_misses_the_bonus_token_is_noticed(target):
    """The test of the tests: a draft whose cache lacks a token is not always right."""

    class Forgetful(DraftModel):
        def propose(self, texts):
            return super().propose([t._replace(ids=[*t.ids[:-2], t.ids[-1]]) for t in texts])

    rounds = Rounds()
    assert list(speculative_generate(target, Forgetful(target), [5, 6, 7], 40, 3, on_round=rounds.append)) == greedy(
        target, [5, 6, 7], 40
    )
    assert rounds.acceptance_rate < 0.9


def test_the_draft_runs_only_what_it_does_not_hold(target):
    counts = []
    draft = near(target)
    forward = draft.forward
    draft.forward = lambda tokens, *rest: (counts.append(len(tokens)), forward(tokens, *rest))[1]
    rounds = Rounds()
    list(speculative_generate(target, DraftModel(draft), list(range(20)), 30, 3, on_round=rounds.append))
    assert counts[0] == 20
    assert set(counts[1:]) == {1, 2}, "after a whole round the last guess and the bonus token are caught up on"


# Ends


@pytest.mark.parametrize("n", range(1, 8))
@pytest.mark.parametrize("gamma", [1, 3, 5])
def test_exactly_as_many_tokens_as_asked_for_although_all_guesses_are_right(target, n, gamma):
    rounds = Rounds()
    cache = KVCache(target.config, 3 + n, "cpu", target.dtype)
    new = list(speculative_generate(target, target, [1, 2, 3], n, gamma, cache, on_round=rounds.append))
    assert new == greedy(target, [1, 2, 3], n)
    assert sum(len(r.emitted) for r in rounds) == n
    assert cache.length == 3 + n - 1


@pytest.mark.parametrize("gamma", [1, 2, 3, 6])
def test_the_text_ends_with_eos_wherever_in_a_round_it_comes(target, gamma):
    plain = greedy(target, [1, 2, 3], 12)
    for eos in sorted(set(plain)):
        expected = plain[: plain.index(eos) + 1]
        rounds = Rounds()
        cache = PagedKVCache(target.config, 8, 4, "cpu", target.dtype).sequence()
        got = list(speculative_generate(target, target, [1, 2, 3], 12, gamma, cache, eos=eos, on_round=rounds.append))
        assert got == expected
        assert cache.token_ids == [1, 2, 3, *expected[:-1]]
        assert [i for r in rounds for i in r.emitted] == expected, "statistics count what was emitted"
        assert all(r.accepted <= len(r.emitted) for r in rounds)


def test_the_engine_ends_at_eos_and_at_stop_strings_inside_a_round(tiny):
    target, tokenizer = tiny, ByteTokenizer()
    prompt = tokenizer.encode("Once upon a time")
    plain = list(generate(target, prompt, 40, KVCache(target.config, 60, "cpu")))
    text = tokenizer.decode(plain)
    requests = [Request(prompt, 40, stop=[text[i : i + 3]]) for i in (5, 6, 7, 8, 17)]
    requests += [Request(prompt, 40, eos=plain[i]) for i in (9, 10, 11)]
    cache, draft = pool(target, 60, 16), DraftModel(target, pool(target, 60, 16))
    decoding = Speculative(target, draft, 3)
    engine = Engine(target, cache, Scheduler(8, 64), decoding)
    results = engine.run(requests)
    for request, result in zip(requests, results, strict=True):
        if request.stop:
            assert result.text == text[: text.index(request.stop[0])]
            assert result.finish_reason == "stop"
        else:
            assert result.token_ids == plain[: plain.index(request.eos) + 1]
    assert sum(len(r.emitted) for r in decoding.rounds) == sum(len(r.token_ids) for r in results)
    assert draft.pool.num_free_blocks == cache.num_free_blocks == 60


def test_an_iterator_that_is_closed_early_leaves_what_was_yielded(target):
    cache = KVCache(target.config, 40, "cpu", target.dtype)
    stream = speculative_generate(target, target, [1, 2, 3], 30, 5, cache)
    first = list(itertools.islice(stream, 8))
    stream.close()
    assert cache.length == 3 + 8 - 1
    assert [*first, *generate(target, [1, 2, 3, *first], 10, cache)] == greedy(target, [1, 2, 3], 18)


def test_a_target_that_fails_leaves_the_cache_as_it_was(target):
    class Broken(NGrams):
        def propose(self, texts):
            return [Guesses([99])]

    cache = PagedKVCache(target.config, 8, 4, "cpu", target.dtype).sequence()
    with pytest.raises(IndexError):
        list(speculative_generate(target, Broken(), [1, 2, 3], 9, cache=cache))
    assert cache.length == 0
    assert cache.cache.num_free_blocks == 8


# Drafts


@pytest.mark.parametrize(
    ("ids", "n", "guesses"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, [9, 1]),
        ([1, 2, 3, 9, 1, 2, 3], 9, [9, 1, 2, 3, 9, 1, 2, 3, 9]),  # as if it went on repeating
        ([1, 2, 9, 1, 2, 8, 1, 2], 1, [8]),  # the latest place
        ([5, 1, 2, 9, 7, 1, 2, 8, 5, 1, 2], 1, [9]),  # the longest repetition first
        ([7, 7, 7], 4, [7, 7, 7, 7]),
        ([1, 2, 3], 4, []),
        ([1], 4, []),
    ],
    ids=str,
)
def test_prompt_lookup_guesses_what_followed_last_time(ids, n, guesses):
    assert NGrams(3, 1).propose([Text(0, ids, n)]) == [Guesses(guesses)]


def test_a_repetition_that_is_too_short_is_none():
    assert NGrams(3, 2).propose([Text(0, [4, 9, 4], 3)]) == [Guesses([])]


@pytest.mark.parametrize("pool", [False, True])
def test_a_draft_with_a_shorter_context_stops_guessing(target, pool):
    short = model(max_seq_len=32)
    draft = DraftModel(short, PagedKVCache(short.config, 40, 4, "cpu", short.dtype) if pool else None)
    rounds = Rounds()
    assert list(speculative_generate(target, draft, [1, 2, 3], 60, 4, on_round=rounds.append)) == greedy(
        target, [1, 2, 3], 60
    )
    assert any(r.guesses for r in rounds)
    assert not rounds[-1].guesses
    if pool:
        assert draft.pool.num_free_blocks == 40


def test_a_draft_in_another_element_type_is_only_less_often_right(target):
    draft = model().float()
    rounds = Rounds()
    new = list(speculative_generate(target, draft, [1, 2, 3], 30, 4, on_round=rounds.append))
    assert new == greedy(target, [1, 2, 3], 30)
    assert rounds.acceptance_rate > 0.9
    params = SamplingParams(1.0, seed=1)
    assert len(list(speculative_generate(target, draft, [1, 2, 3], 30, 4, sampling=params))) == 30


def test_drafts_of_several_texts_are_those_of_each_alone(target):
    draft = near(target)
    texts = [Text(i, p, 1 + i % 4, SamplingParams(1.0, seed=i) if i % 2 else None) for i, p in enumerate(prompts(6))]
    together = DraftModel(draft, PagedKVCache(draft.config, 90, 4, "cpu", draft.dtype)).propose(texts)
    for text, guesses in zip(texts, together, strict=True):
        [alone] = DraftModel(draft).propose([text])
        assert guesses.ids == alone.ids
        assert len(guesses.ids) == text.n
    with pytest.raises(ValueError, match="6 texts at once need a DraftModel with a pool"):
        DraftModel(draft).propose(texts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gamma": 0}, "gamma must be at least 1, got 0"),
        ({"draft": model(vocab_size=60)}, "the draft's vocabulary has 60 tokens, the target's 64"),
        ({"prompt_ids": []}, "the prompt is empty"),
        ({"prompt_ids": [64]}, "token id 64 is outside"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"max_new_tokens": 126}, "exceed max_seq_len=128"),
    ],
    ids=str,
)
def test_bad_input_is_refused_at_the_call(target, arguments, message):
    with pytest.raises(ValueError, match=message):
        speculative_generate(
            **{"target": target, "draft": target, "prompt_ids": [1, 2, 3], "max_new_tokens": 5, **arguments}
        )


def test_the_engine_and_n_grams_refuse_what_cannot_be(target):
    with pytest.raises(ValueError, match="the draft's vocabulary has 60 tokens"):
        Speculative(target, DraftModel(model(vocab_size=60)))
    with pytest.raises(ValueError, match="a DraftModel needs a pool"):
        Speculative(target, DraftModel(target))
    with pytest.raises(ValueError, match="gamma must be at least 1"):
        Speculative(target, NGrams(), 0)
    with pytest.raises(ValueError, match="1 <= shortest <= longest, got 0 and 3"):
        NGrams(3, 0)


def test_draft_and_target_cannot_share_a_pool(target):
    shared = pool(target)
    draft = DraftModel(near(target), shared)
    with pytest.raises(ValueError, match="the draft's pool is the target's own"):
        speculative_generate(target, draft, [1, 2, 3], 5, cache=shared.sequence())
    [result] = Engine(target, shared, decoding=Speculative(target, draft)).run([Request([1, 2, 3], 5)])
    assert "the draft's pool is the target's own" in str(result.error)


def test_a_draft_that_guesses_more_than_it_is_asked_for_is_cut(target):
    class Talkative(NGrams):
        def propose(self, texts):
            return [Guesses([1] * 20) for _ in texts]

    assert list(speculative_generate(target, Talkative(), [1, 2, 3], 9)) == greedy(target, [1, 2, 3], 9)
    engine = Engine(target, pool(target), decoding=Speculative(target, Talkative()))
    assert engine.run([Request([1, 2, 3], 9)])[0].token_ids == greedy(target, [1, 2, 3], 9)


def test_a_callback_that_fails_leaves_what_was_yielded(target):
    cache, rounds, got = KVCache(target.config, 40, "cpu", target.dtype), Rounds(), []

    def on_round(r):
        rounds.append(r)
        if len(rounds) == 3:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        got.extend(speculative_generate(target, target, [1, 2, 3], 30, 3, cache, on_round=on_round))
    assert cache.length == 3 + 8 - 1, "two rounds of four were yielded"


def test_a_target_with_broken_logits_leaves_the_cache_as_it_was():
    class Certain(NGrams):
        def propose(self, texts):
            return [Guesses([1, 2])]

    broken = model()
    forward = broken.forward
    broken.forward = lambda *arguments: forward(*arguments) * math.nan
    cache = pool(broken, 8).sequence()
    with pytest.raises(ValueError, match="not a finite number"):
        list(speculative_generate(broken, Certain(), [1, 2, 3], 9, cache=cache))
    assert cache.length == 0
    assert cache.cache.num_free_blocks == 8


def test_a_draft_uses_its_whole_context_and_no_more(target):
    draft = DraftModel(model(max_seq_len=8))
    assert [len(draft.propose([Text(n, list(range(n)), 9)])[0].ids) for n in (6, 8, 9)] == [3, 1, 0]


def test_a_draft_guesses_as_much_as_its_pool_allows_and_never_fails_for_it(target):
    def lengths(guesses):
        return [len(g.ids) for g in guesses]

    assert lengths(DraftModel(target, pool(target, 3)).propose([Text(0, list(range(5)), 4)])) == [4]
    assert lengths(DraftModel(target, pool(target, 2)).propose([Text(0, list(range(7)), 4)])) == [2], "fewer, not none"
    two = [Text(i, [i, *range(8)], 3) for i in range(2)]
    assert lengths(DraftModel(target, pool(target, 4)).propose(two)) == [3, 0]
    draft = DraftModel(target, pool(target, 6))
    [first, second] = draft.propose(two)
    again = [t._replace(ids=[*t.ids, g.ids[0]]) for t, g in zip(two, (first, second), strict=True)]
    assert lengths(draft.propose(again)) == [3, 3], "what it holds already needs no new blocks"


@pytest.mark.parametrize("block_size", [1, 4])
def test_blocks_of_refused_guesses_that_another_text_shares_are_not_counted_as_free(target, block_size):
    draft = DraftModel(target, pool(target, 40, block_size))
    text = list(range(6))
    [guesses] = draft.propose([Text("a", text, 4)])
    draft.propose([Text("b", [*text, *guesses.ids[:3], 60], 1)])
    hog = draft.pool.sequence()
    hog.reserve(draft.pool.num_free_blocks * block_size)
    wrong = (guesses.ids[0] + 1) % 64
    [again] = draft.propose([Text("a", [*text, wrong], 1)])  # one block is free in blocks of 4, none in blocks of 1
    assert again.ids == ([] if block_size == 1 else DraftModel(target).propose([Text(0, [*text, wrong], 1)])[0].ids)


def test_a_draft_finds_prefixes_and_forgets_what_a_text_no_longer_says(target):
    small, counts = near(target), []
    forward = small.forward
    small.forward = lambda tokens, *rest: (counts.append(len(tokens)), forward(tokens, *rest))[1]
    draft = DraftModel(small, pool(small))
    draft.propose([Text(0, list(range(20)), 2)])
    counts.clear()
    draft.propose([Text(1, list(range(20)), 1)])
    assert counts == [4], "16 of 20 tokens are in four blocks"
    [guesses] = draft.propose([Text(2, list(range(9)), 4)])
    other = [*range(9), (guesses.ids[0] + 1) % 64, 5]
    assert draft.propose([Text(2, other, 4)]) == DraftModel(near(target)).propose([Text(2, other, 4)])


def test_rounds_hold_only_guesses_that_ran_and_that_could_still_be_emitted(target):
    decoding = Speculative(target, DraftModel(target, pool(target)), 4)
    Engine(target, pool(target), Scheduler(1, 3), decoding).run([Request([1, 2, 3], 20)])
    assert max(len(r.guesses) for r in decoding.rounds) == 2, "the budget allows two"
    decoding = Speculative(target, DraftModel(target, pool(target)), 4)
    Engine(target, pool(target), decoding=decoding).run([Request([1, 2, 3], n) for n in range(1, 9)])
    assert all(len(r.guesses) < len(r.emitted) for r in decoding.rounds), "the target always adds one itself"


def test_a_cancelled_request_leaves_nothing_behind(target):
    draft, cache = DraftModel(near(target), pool(target)), pool(target)
    engine = Engine(target, cache, decoding=Speculative(target, draft, 3))
    results = [engine.add(Request([i, 1, 2], 30)) for i in range(3)]
    for _ in range(4):
        engine.step()
    for result in results:
        engine.cancel(result)
    assert draft.pool.num_free_blocks == cache.num_free_blocks == 40


# Formulas


@pytest.mark.parametrize(
    ("alpha", "gamma", "factor", "faster"),
    [
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)
def test_the_formulas_give_the_published_table(alpha, gamma, factor, faster):
    """Leviathan et al. 2023, table 1, where the draft costs nothing."""
    assert operations(alpha, gamma, 0.0) == pytest.approx(factor, abs=0.006)
    assert speed_up(alpha, gamma, 0.0) == pytest.approx(faster, abs=0.006)


def test_speculation_gains_exactly_if_guesses_are_right_more_often_than_they_cost():
    for alpha, cost in itertools.product((0.1, 0.3, 0.5, 0.9), (0.05, 0.2, 0.4, 0.95)):
        assert (best_gamma(alpha, cost) > 0) == (alpha > cost)
    assert break_even(0.2, 1) == pytest.approx(0.2, abs=0.011)
    assert break_even(0.0, 3, 2.0) == pytest.approx(0.55, abs=0.011), "1 + a + a^2 + a^3 = 2"
    assert break_even(0.2, 2, 3.0) is None, "where a step over n tokens costs n steps nothing is gained"
    assert expected_tokens(1.0, 4) == 5
    assert expected_tokens(0.0, 4) == 1


def test_tokens_per_step_follow_the_formula():
    """Guesses that are right with probability alpha, independently: draws through the rule itself."""
    alpha, gamma, n = float(torch.minimum(P, Q).sum()), 4, 4_000
    p, q = P.repeat(gamma + 1, 1), Q.repeat(gamma, 1)
    lengths = []
    for seed in range(n):
        ids = [draw(Q, uniform(seed, i, DRAFT)) for i in range(gamma)]
        lengths.append(len(accept_sampled(p, Guesses(ids, q), lambda i, s, seed=seed: uniform(seed, i, s))))
    assert sum(lengths) / n == pytest.approx(expected_tokens(alpha, gamma), rel=0.03)
    shares = predicted_run_lengths(alpha, gamma)
    assert sum(shares) == pytest.approx(1.0)
    assert p_value(run_lengths([k - 1 for k in lengths], gamma), torch.tensor(shares, dtype=torch.float64)) > 1e-4


def test_overlap_is_one_for_equal_models_and_less_for_others(target):
    ids, sampling = list(range(30)), SamplingParams(1.0)
    assert overlap(target, target, ids, sampling).tolist() == pytest.approx([1.0] * 30)
    other = overlap(target, near(target), ids, sampling, skip=10)
    assert len(other) == 20
    assert 0.3 < float(other.mean()) < 0.999


@pytest.mark.parametrize("n_sequences", [1, 3])
def test_a_timed_step_runs_what_it_says(target, n_sequences):
    counts = []
    forward = target.forward
    try:
        target.forward = lambda tokens, *rest: (counts.append(len(tokens)), forward(tokens, *rest))[1]
        assert all(s > 0 for s in step_seconds(target, list(range(40)), [1, 4], 20, n_sequences, repeats=2))
    finally:
        del target.forward
    in_turns = [n_sequences * n for n in (1, 1, 4, 4)]  # each once to warm up and once against the clock
    assert counts == [20] * n_sequences + 2 * in_turns


def test_repetition_is_the_share_of_n_grams_that_came_before():
    assert repeated_share([1, 2, 3, 4, 5]) == 0.0
    assert repeated_share([1, 1, 1, 1, 1, 1]) == pytest.approx(2 / 3)
    assert repeated_share([1, 2, 3]) is None
