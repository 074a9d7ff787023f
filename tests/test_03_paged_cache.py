"""Chapter 3: blocks give the logits of contiguous rows, and no block is ever lost, doubled or written by two."""

import random
from collections import Counter

import pytest
import torch
from equality import assert_close, feed, greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_machine import PoolMachine, check_pool

import minillm
from minillm.generate import run
from minillm.kv_cache import KVCache
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer, init_weights
from minillm.naive_attention import NoCache
from minillm.paged_cache import BlockAllocator, OutOfBlocks, PagedKVCache, PagedSequence, Prefix
from minillm.torch_attention import torch_attention

IDS = [(7 * i * i + 3) % 64 for i in range(200)]


def pool(model: Transformer, num_blocks: int, block_size: int, seed: int = 0, **arguments) -> PagedKVCache:
    """A pool that hands its blocks out in random order and holds NaN in every slot."""
    cache = PagedKVCache(model.config, num_blocks, block_size, "cpu", model.dtype, **arguments)
    random.Random(seed).shuffle(cache.allocator._free)
    cache.keys.data.fill_(torch.nan)
    cache.values.data.fill_(torch.nan)
    return cache


def run_batch(model: Transformer, steps: list[tuple[PagedSequence, list[int]]]) -> list[torch.Tensor]:
    """One ragged step: the logits of each sequence's new tokens, which are committed."""
    batch = steps[0][0].cache.batch([(s, len(ids)) for s, ids in steps])
    tokens = torch.tensor([i for _, ids in steps for i in ids])
    with torch.inference_mode():
        logits = model(tokens, batch.positions, batch)
    for sequence, ids in steps:
        sequence.advance(ids)
    return list(logits.split([len(ids) for _, ids in steps]))


@pytest.fixture(scope="module")
def uncached(small):
    return run(small, IDS[:140], NoCache())


# Equality with the chapters before


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("attention", ["naive", "torch"])
def test_logits_equal_the_contiguous_cache_around_every_boundary(small, uncached, block_size, attention):
    arguments = {"attention": torch_attention} if attention == "torch" else {}
    for n in sorted({1, *(m for k in (1, 2) for m in range(k * block_size - 1, k * block_size + 2) if m > 0)}):
        cache = pool(small, 200, block_size, seed=n, **arguments)
        ids = IDS[: n + 6]
        pieces = [n, 1, 1, 2, 1, 1]
        contiguous = feed(small, ids, pieces, KVCache(small.config, len(ids), "cpu", torch.float64))
        actual = feed(small, ids, pieces, cache.sequence())
        assert_close(actual, contiguous, f"block size {block_size}, prompt of {n}, then {pieces[1:]}")
        assert_close(actual, uncached[: len(ids)], "and chapter 1")


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_ragged_batches_of_mixed_counts_equal_every_sequence_alone(small, block_size):
    rng = random.Random(block_size)
    cache = pool(small, 700 // block_size + 8, block_size, seed=1)
    texts = [[rng.randrange(64) for _ in range(rng.randrange(40, 100))] for _ in range(6)]
    expected = [run(small, text, NoCache()) for text in texts]
    sequences, done = [cache.sequence() for _ in texts], [0] * 6
    while any(d < len(t) for d, t in zip(done, texts, strict=True)):
        counts = [
            min(rng.choice([0, 1, 1, 1, 2, 5, block_size, 30]), len(t) - d) for d, t in zip(done, texts, strict=True)
        ]
        if not any(counts):
            continue
        steps = [(s, t[d : d + n]) for s, t, d, n in zip(sequences, texts, done, counts, strict=True)]
        for i, logits in enumerate(run_batch(small, steps)):
            assert_close(
                logits, expected[i][done[i] : done[i] + counts[i]], f"sequence {i} at {done[i]}, counts {counts}"
            )
            done[i] += counts[i]
        check_pool(cache, sequences)


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(4, 4), (4, 1), (6, 3)])
@pytest.mark.parametrize("lengths", [[1, 1, 1], [3, 30, 17, 16, 15, 1], [100, 2, 99, 50]], ids=str)
def test_sequences_that_decode_together_equal_each_alone(n_heads, n_kv_heads, lengths):
    config = ModelConfig(64, 32, 2, n_heads, n_kv_heads, 8, hidden_dim=48, max_seq_len=128)
    model = Transformer(config).double().requires_grad_(False)
    init_weights(model, 0.3, torch.Generator().manual_seed(2))
    cache = pool(model, 60, 8)
    texts = [[(i * 11 + j) % 64 for j in range(n)] for i, n in enumerate(lengths)]
    sequences = [cache.sequence() for _ in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        if text[:-1]:
            run(model, text[:-1], sequence)
    batch = run_batch(model, [(s, t[-1:]) for s, t in zip(sequences, texts, strict=True)])
    for text, logits in zip(texts, batch, strict=True):
        assert_close(logits[0], run(model, text, NoCache())[-1], f"{len(text)} of {lengths} tokens")


@pytest.mark.parametrize("n", [1, 3])
def test_finite_values_stay_finite_in_company(n):
    config = ModelConfig(64, 32, 2, 4, 2, 8, hidden_dim=48, max_seq_len=128)
    cache = PagedKVCache(config, 20, 4, "cpu", torch.float32)
    generator = torch.Generator().manual_seed(0)
    sequences = [cache.sequence() for _ in range(3)]
    for _ in range(5):
        batch = cache.batch([(s, n) for s in sequences])
        q, k = (10 * torch.randn(3 * n, heads, 8, generator=generator) for heads in (4, 2))
        values = torch.full((3 * n, 2, 8), torch.finfo(torch.float32).max)
        assert batch.attend(0, q, k, values).isfinite().all()
        for sequence in sequences:
            sequence.advance([1] * n)


def test_generate_runs_unchanged_on_a_sequence(small):
    for block_size in (1, 3, 16):
        cache = pool(small, 60, block_size)
        assert greedy(small, IDS[:11], 20, cache.sequence(IDS[:11])) == greedy(small, IDS[:11], 20)


def test_the_trained_model_agrees_within_single_precision(tiny):
    text = minillm.held_out_text()[2][:200].encode()
    expected = run(tiny, list(text), NoCache())
    cache = PagedKVCache(tiny.config, 20, 16, "cpu")
    assert_close(feed(tiny, list(text), [150, 1, 49], cache.sequence()), expected, "200 bytes of a tale")


# Tables at the moment of the forward pass


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("length", range(1, 10))
def test_a_table_holds_the_blocks_of_length_plus_n_during_a_step(small, block_size, length):
    cache = pool(small, 40, block_size)
    sequence = cache.sequence()
    run(small, IDS[:length], sequence)
    for n in (1, 2, 5):
        sequence.reserve(n)
        assert len(sequence.block_table) == -(-(length + n) // block_size), f"length {length}, {n} tokens reserved"
        sequence.truncate(length)
        assert len(sequence.block_table) == -(-length // block_size), "and of `length` alone once it is undone"


# Sharing


def test_a_prompt_sent_twice_runs_one_block_at_least_and_writes_none_that_is_shared(small, uncached):
    cache = pool(small, 20, 4)
    first, second = cache.sequence(IDS[:8]), None
    expected = run(small, IDS[:8], first)
    written = cache.keys.data[:, :, [b * 4 + i for b in first.block_table for i in range(4)]].clone()
    second = cache.sequence(IDS[:8])
    assert second.length == 4, "all 8 tokens are known, but the last one must run"
    assert second.block_table == first.block_table[:1]
    assert_close(run(small, IDS[4:8], second), expected[4:], "what ran")
    assert second.block_table[1] != first.block_table[1], "the second block was computed into a block of its own"
    slots = [b * 4 + i for b in first.block_table for i in range(4)]
    assert torch.equal(cache.keys.data[:, :, slots], written), "the first sequence's rows were not touched"
    check_pool(cache, [first, second])


def test_prefixes_stay_findable_after_their_sequence_is_freed(small, uncached):
    cache = pool(small, 20, 4)
    sequence = cache.sequence(IDS[:18])
    run(small, IDS[:18], sequence)
    sequence.free()
    assert cache.num_free_blocks == 20, "kept blocks count as free: they are given away when needed"
    again = cache.sequence(IDS[:18])
    assert again.length == 16
    assert_close(run(small, IDS[16:18], again), uncached[16:18], "on keys and values of a sequence that is gone")


def test_the_same_tokens_behind_another_prefix_are_not_found(small):
    cache = pool(small, 20, 4)
    run(small, [1, 2, 3, 4, 9, 9, 9, 9], cache.sequence())
    assert cache.sequence([9, 9, 9, 9, 1]).length == 0, "a block's content depends on everything before it"
    assert cache.sequence([1, 2, 3, 4, 9, 9, 9, 8, 0]).length == 4
    assert cache.sequence([1, 2, 3, 4, 9, 9, 9, 9, 0]).length == 8


def test_tokens_with_equal_hashes_are_told_apart():
    assert hash((-1,)) == hash((-2,)), "two contents that only comparing can tell apart"
    allocator = BlockAllocator(4)
    block = allocator.take()
    allocator.register(block, Prefix(0, (-1,)))
    assert allocator.find([-1], 1)[0] == [block]
    assert allocator.find([-2], 1)[0] == []


def test_a_block_that_is_used_again_loses_its_old_name(small):
    cache = pool(small, 2, 4)
    x, y = IDS[:8], IDS[50:58]
    first = cache.sequence(x)
    run(small, x, first)
    first.free()
    second = cache.sequence(y)
    run(small, y, second)  # needs both blocks: X is evicted
    second.free()
    assert cache.sequence(x).length == 0, "X was evicted and must not be found"
    assert cache.sequence(y).length == 4


def test_the_least_recently_used_prefix_goes_first_and_children_before_parents(small):
    cache = pool(small, 6, 4)
    a, b = [1] * 8, [2] * 8
    for ids in (a, b):
        sequence = cache.sequence(ids)
        run(small, ids, sequence)
        sequence.free()
    cache.sequence([1] * 9).free()  # A is used again: now B is the older one
    other = cache.sequence([3] * 12)
    run(small, [3] * 12, other)  # two free blocks, then one kept one
    assert cache.sequence([1] * 9).length == 8, "A is still there"
    assert cache.sequence([2] * 9).length == 4, "B lost its last block, not its first: a tail without a head is useless"


def test_two_equal_prompts_in_flight(small):
    """Both compute the same blocks; when the one that registered them goes, the other's stay its own."""
    cache = pool(small, 20, 4)
    one, two = cache.sequence(IDS[:9]), cache.sequence(IDS[:9])
    run_batch(small, [(one, IDS[:9]), (two, IDS[:9])])
    assert not set(one.block_table) & set(two.block_table)
    one.free()
    check_pool(cache, [two])
    assert_close(run(small, [5], two), run(small, [*IDS[:9], 5], NoCache())[-1:], "the survivor goes on")
    two.free()
    check_pool(cache, [])
    assert cache.num_free_blocks == 20


def test_a_fork_shares_everything_and_copies_one_block_once(small):
    """Prompt of 5, block size 4, two continuations: block 0 stays shared, block 1 is copied for one of them."""
    cache = pool(small, 10, 4)
    parent = cache.sequence()
    run(small, IDS[:5], parent)
    child = parent.fork()
    first, second = parent.block_table
    assert child.block_table == [first, second]
    assert [cache.allocator.owners[b] for b in (first, second)] == [2, 2]
    logits = run_batch(small, [(parent, [10]), (child, [20])])
    assert parent.block_table[0] == child.block_table[0] == first
    assert parent.block_table[1] != child.block_table[1]
    assert second in (parent.block_table[1], child.block_table[1]), "the last owner writes in place"
    assert [cache.allocator.owners[b] for b in (first, second)] == [2, 1]
    for ids, out in (([10], logits[0]), ([20], logits[1])):
        assert_close(out, run(small, IDS[:5] + ids, NoCache())[-1:], f"continuation {ids}")
    assert cache.num_free_blocks == 10 - 3


def test_a_registered_block_is_forgotten_before_it_is_written(small, uncached):
    cache = pool(small, 10, 4)
    sequence = cache.sequence()
    run(small, IDS[:8], sequence)
    sequence.truncate(6)  # back into a full, registered block
    table = list(sequence.block_table)
    run(small, [1, 2], sequence)
    assert sequence.block_table == table, "a sole owner writes in place"
    assert cache.sequence(IDS[:9]).length == 4, "the old content of block 1 is not found any more"
    other = cache.sequence([*IDS[:6], 1, 2, 0])
    assert other.length == 8, "the new one is"
    assert_close(run(small, [0], other), run(small, [*IDS[:6], 1, 2, 0], NoCache())[-1:], "and it is right")


def test_a_shared_prompt_is_stored_once_and_runs_once(tiny):
    shared = (minillm.held_out_text()[0] * 2).encode()[:512]
    cache = PagedKVCache(tiny.config, 64, 16, "cpu")
    ran, sequences = [], []
    for i in range(8):
        prompt = [*shared, *f" Part {i}: the".encode()]
        sequence = cache.sequence(prompt)
        ran.append(len(prompt) - sequence.length)
        run(tiny, prompt[sequence.length :], sequence)
        sequences.append(sequence)
    assert ran == [524] + [12] * 7, "the first runs everything, the others only their tail"
    assert len({b for s in sequences for b in s.block_table}) == 32 + 8, "512 tokens in 32 blocks, one tail block each"
    prompt = [*shared, *b" Part 7: the"]
    assert_close(run(tiny, [65], sequences[7]), run(tiny, [*prompt, 65], NoCache())[-1:], "the last one")


# All or nothing


def test_a_step_that_cannot_be_served_changes_nothing_and_says_what_is_missing(small):
    cache = pool(small, 5, 4)
    old = cache.sequence(IDS[:4])
    run(small, IDS[:4], old)
    old.free()  # one kept block
    one, two = cache.sequence(), cache.sequence()
    run(small, IDS[100:104], one)
    before = (list(one.block_table), list(two.block_table), cache.num_free_blocks, cache.allocator.kept)
    with pytest.raises(OutOfBlocks, match="6 blocks needed, 4 available: 2 missing") as error:
        cache.batch([(one, 9), (two, 9)])
    assert error.value.missing == 2
    assert (one.block_table, two.block_table, cache.num_free_blocks, cache.allocator.kept) == before
    assert cache.sequence(IDS[:5]).length == 4, "the kept prefix was not evicted for a step that failed"
    run_batch(small, [(one, IDS[104:108]), (two, IDS[:4])])  # what fits still runs
    check_pool(cache, [one, two], extra_owners=1)


def test_copies_are_counted_before_anything_is_taken(small):
    cache = pool(small, 3, 4)
    parent = cache.sequence()
    run(small, IDS[:6], parent)
    twins = [parent, parent.fork(), parent.fork()]
    with pytest.raises(OutOfBlocks, match="2 blocks needed, 1 available: 1 missing"):
        cache.batch([(s, 1) for s in twins])
    assert all(s.block_table == parent.block_table for s in twins)
    run_batch(small, [(twins[0], [1])])
    assert twins[0].block_table[1] != twins[1].block_table[1]


def test_an_aborted_forward_is_undone(small, uncached):
    cache = pool(small, 10, 4)
    sequence = cache.sequence()
    run(small, IDS[:6], sequence)
    attention, calls = cache.attention, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("half way")
        return attention(*arguments)

    cache.attention = failing
    with pytest.raises(RuntimeError, match="half way"):
        run(small, IDS[6:20], sequence)
    cache.attention = attention
    assert (sequence.length, len(sequence.block_table), cache.num_free_blocks) == (6, 2, 8)
    check_pool(cache, [sequence])
    assert_close(run(small, IDS[6:20], sequence), uncached[6:20], "the same step again")


def test_a_sequence_that_can_never_fit_is_refused_when_it_is_made(small):
    cache = pool(small, 49, 4)
    with pytest.raises(ValueError, match="a sequence of 250 tokens needs 63 blocks of 4, the whole pool has 49"):
        cache.sequence([1], max_tokens=250)
    with pytest.raises(ValueError, match="a sequence of 197 tokens needs 50 blocks"):
        cache.sequence([1] * 197)
    assert greedy(small, [1, 2], 5, cache.sequence([1, 2], max_tokens=49 * 4)) == greedy(small, [1, 2], 5), "the next"


def test_wrong_use_is_refused_by_name(small):
    cache, other = pool(small, 4, 4), pool(small, 4, 4)
    sequence = cache.sequence()
    for steps, message in (
        ([], "a step runs at least one token"),
        ([(sequence, 0)], "a step runs at least one token"),
        ([(sequence, 1), (sequence, 1)], "a sequence stands twice in one step"),
        ([(other.sequence(), 1)], "a sequence of another cache"),
        ([(sequence, -1)], "a step cannot run -1 tokens of a sequence"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.batch(steps)
    sequence.reserve(2)
    with pytest.raises(ValueError, match="3 tokens to commit, 2 are reserved"):
        sequence.advance([1, 2, 3])
    with pytest.raises(ValueError, match="cannot be forked in the middle of a step"):
        sequence.fork()
    with pytest.raises(ValueError, match="cannot truncate to 1: the sequence holds 0 tokens"):
        sequence.truncate(1)
    sequence.free()
    for call in (sequence.free, sequence.fork, lambda: sequence.reserve(1), lambda: sequence.truncate(0)):
        with pytest.raises(ValueError, match="the sequence was freed"):
            call()
    unreserved = cache.sequence()
    with pytest.raises(ValueError, match="1 tokens attend, 0 are reserved"):
        unreserved.attend(0, *(torch.zeros(1, h, 8, dtype=torch.float64) for h in (4, 2, 2)))
    with pytest.raises(ValueError, match=r"a cache of torch\.float32 on cpu met a model of torch\.float64"):
        run(small, [1], PagedKVCache(small.config, 4, 4, "cpu").sequence())
    for arguments, message in (
        ((0, 4), "num_blocks must be at least 1, got 0"),
        ((4, 0), "block_size must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            PagedKVCache(small.config, *arguments)


def test_bytes_are_those_of_the_pool_and_of_the_table(small):
    cache = pool(small, 10, 4)
    assert cache.nbytes == 2 * 2 * 2 * 8 * 40 * 8, "2 (k, v) · 2 layers · 2 heads · 8 · 40 slots · 8 bytes"
    sequence = cache.sequence()
    run(small, IDS[:5], sequence)
    assert sequence.nbytes == cache.nbytes // 5, "2 of 10 blocks"


# Any order of calls

TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=1000, stateful_step_count=40, deadline=None)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release", "register"]), st.integers(0, 9)), max_size=60))
def test_the_allocator_keeps_count_under_any_calls(calls):
    allocator, held = BlockAllocator(5), []
    for action, i in calls:
        if action == "take" and allocator.num_available:
            held.append(allocator.take())
        elif held and action == "share":
            block = held[i % len(held)]
            allocator.share([block])
            held.append(block)
        elif held and action == "release":
            allocator.release([held.pop(i % len(held))])
        elif held and action == "register":
            allocator.register(held[i % len(held)], Prefix(0, (i,)))
        assert allocator.owners == [Counter(held)[b] for b in range(5)]
        assert allocator.num_available == 5 - len(set(held))
