"""Chapter 2: the cache gives the logits of the loop without one, however the prompt is fed."""

import pytest
import torch
from equality import assert_close, feed, greedy
from hypothesis import given, settings
from hypothesis import strategies as st

import minillm
from minillm.course.tour import disagreement
from minillm.generate import run
from minillm.kv_cache import KVCache, PlainBuffer
from minillm.measure.cost_model import kv_bytes_per_token
from minillm.model.config import ModelConfig
from minillm.model.sampling import SamplingParams
from minillm.model.transformer import Transformer, init_weights
from minillm.naive_attention import NoCache, naive_attention
from minillm.torch_attention import torch_attention

IDS = [(7 * i * i + 3) % 64 for i in range(64)]


def cache_for(model: Transformer, max_seq_len: int = 64, **arguments) -> KVCache:
    return KVCache(model.config, max_seq_len, "cpu", model.dtype, **arguments)


@pytest.fixture(scope="module")
def uncached(small):
    return run(small, IDS, NoCache())


@pytest.mark.parametrize(
    "pieces", [[64], [1] * 64, [63, 1], [1, 63], [16] * 4, [7, 9, 48], [1, 2, 5, 9, 47], [33, 30, 1]], ids=str
)
@pytest.mark.parametrize("attention", [naive_attention, torch_attention])
def test_logits_equal_the_uncached_ones_in_any_pieces(small, uncached, pieces, attention):
    cache = cache_for(small, attention=attention)
    assert_close(feed(small, IDS, pieces, cache), uncached, f"fed in pieces {pieces}")
    assert cache.length == 64


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=12))
def test_logits_equal_the_uncached_ones_in_random_pieces(small, uncached, pieces):
    ids = IDS[: sum(pieces)][:64]
    pieces = [min(n, len(ids) - sum(pieces[:i])) for i, n in enumerate(pieces) if sum(pieces[:i]) < len(ids)]
    assert_close(feed(small, ids, pieces, cache_for(small)), uncached[: len(ids)], f"fed in pieces {pieces}")


@pytest.mark.parametrize(("n_heads", "n_kv_heads", "head_dim"), [(4, 4, 8), (4, 1, 8), (6, 3, 16)])
def test_every_way_to_share_heads(n_heads, n_kv_heads, head_dim):
    config = ModelConfig(64, 32, 2, n_heads, n_kv_heads, head_dim, hidden_dim=48, max_seq_len=64)
    model = Transformer(config).double().requires_grad_(False)
    init_weights(model, std=0.3, generator=torch.Generator().manual_seed(1))
    pieces = [5, 1, 1, 20, 1]
    assert_close(
        feed(model, IDS[:28], pieces, cache_for(model)),
        run(model, IDS[:28], NoCache()),
        f"{n_heads} query heads on {n_kv_heads} key heads of {head_dim}",
    )


@pytest.mark.parametrize("n_prompt", [1, 2, 31, 60])
def test_tokens_equal_those_of_chapter_1(small, n_prompt):
    prompt = IDS[:n_prompt]
    n = min(20, 128 - n_prompt)
    assert greedy(small, prompt, n, cache_for(small, 128)) == greedy(small, prompt, n)


def test_sampled_tokens_equal_those_of_chapter_1(small):
    sampling = SamplingParams(temperature=1.5, top_k=20, seed=3)
    expected = list(minillm.generate(small, IDS[:5], 30, None, sampling))
    assert list(minillm.generate(small, IDS[:5], 30, cache_for(small), sampling)) == expected


def test_the_trained_model_agrees_within_single_precision(tiny):
    ids = list(minillm.held_out_text()[0][:300].encode())
    actual = feed(tiny, ids, [100, 1, 1, 98, 100], cache_for(tiny, 300))
    assert_close(actual, run(tiny, ids, NoCache()), "300 bytes of a tale in pieces, float32")


def test_twenty_prompts_of_1_to_600_tokens_give_the_tokens_of_chapter_1(tiny):
    text = "\n".join(minillm.held_out_text()).encode()
    lengths = [1, 2, 3, 5, 8, 13, 15, 16, 17, 33, 63, 64, 65, 100, 127, 128, 129, 257, 400, 600]
    for i, n_prompt in enumerate(lengths):
        prompt = list(text[1000 * i : 1000 * i + n_prompt])
        expected, actual = greedy(tiny, prompt, 6), greedy(tiny, prompt, 6, cache_for(tiny, n_prompt + 6))
        first = disagreement(tiny, prompt, expected, actual)
        assert first is None, f"prompt of {n_prompt} tokens: token {first} of {actual}, expected {expected}"


# What it holds and costs


def test_storage_is_reserved_once_and_counted(small):
    cache = cache_for(small, 50)
    assert cache.nbytes == 50 * kv_bytes_per_token(small.config, 8)
    feed(small, IDS[:40], [39, 1], cache)
    assert cache.nbytes == 50 * kv_bytes_per_token(small.config, 8), "it does not grow"


def test_what_was_never_written_is_never_read(small, uncached):
    cache = cache_for(small, 64)
    for buffer in (cache.keys, cache.values):
        buffer.data.fill_(torch.nan)
    assert_close(feed(small, IDS[:20], [10, 1, 9], cache), uncached[:20], "unwritten rows hold NaN")


def test_the_last_slot_can_be_used(small, uncached):
    assert_close(feed(small, IDS, [63, 1], cache_for(small, 64)), uncached, "64 tokens in 64 slots")


def test_going_past_the_end_is_refused_and_leaves_the_cache_usable(small, uncached):
    cache = cache_for(small, 20)
    run(small, IDS[:18], cache)
    with pytest.raises(ValueError, match="the cache holds 18 of max_seq_len=20 tokens: no room for 3 more"):
        run(small, IDS[18:21], cache)
    assert cache.length == 18
    assert_close(run(small, IDS[18:20], cache), uncached[18:20], "the two that fit, afterwards")
    with pytest.raises(ValueError, match="the cache holds 20 of max_seq_len=20 tokens: no room for 1 more"):
        cache.reserve(1)
    for n in (0, -1):
        with pytest.raises(ValueError, match=f"a step runs at least one token, not {n}"):
            cache.reserve(n)


def test_generation_that_outgrows_the_cache_gives_what_fits_and_then_the_error(small):
    stream = minillm.generate(small, IDS[:5], 20, cache_for(small, 8))
    assert [next(stream) for _ in range(4)] == greedy(small, IDS[:5], 4), "5 + 3 tokens run in 8 slots, and give a 4th"
    with pytest.raises(ValueError, match="the cache holds 8 of max_seq_len=8"):
        next(stream)


# The protocol


def test_a_rejected_tail_is_overwritten(small, uncached):
    """Verification of guesses: run five, keep two, go on with others."""
    cache = cache_for(small)
    run(small, IDS[:10], cache)
    cache.reserve(5)
    with torch.inference_mode():
        small(torch.tensor([*IDS[10:12], 1, 2, 3]), torch.arange(10, 15), cache)
    cache.advance(IDS[10:12])
    assert cache.length == 12
    assert_close(feed(small, IDS[12:20], [3, 5], cache), uncached[12:20], "after two of five were kept")


def test_truncate_forgets_and_undoes_a_reservation(small, uncached):
    cache = cache_for(small)
    run(small, IDS[:30], cache)
    cache.truncate(12)
    assert_close(run(small, IDS[12:20], cache), uncached[12:20], "after going back from 30 to 12")
    cache.reserve(3)
    cache.truncate(cache.length)
    with pytest.raises(ValueError, match="3 tokens to commit, 0 are reserved"):
        cache.advance([1, 2, 3])
    for length in (-1, 21):
        with pytest.raises(ValueError, match=f"cannot truncate to {length}: the cache holds 20 tokens"):
            cache.truncate(length)


def test_attending_needs_a_reservation(small):
    cache = cache_for(small)
    with pytest.raises(ValueError, match="2 tokens attend, 0 are reserved: call reserve first"), torch.inference_mode():
        small(torch.tensor([1, 2]), torch.arange(2), cache)


def test_a_cache_of_another_type_is_refused_by_name(small, uncached):
    cache = KVCache(small.config, 16, "cpu", torch.float32)
    with pytest.raises(ValueError, match=r"a cache of torch\.float32 on cpu met a model of torch\.float64 on cpu"):
        run(small, IDS[:4], cache)
    assert cache.length == 0
    with pytest.raises(ValueError, match="max_seq_len must be at least 1, got 0"):
        KVCache(small.config, 0)


def test_values_may_be_smaller_than_keys(small):
    class Shape(ModelConfig):
        kv_shape = type(small.config.kv_shape)(2, 24, 16)

    cache = KVCache(Shape(**small.config.__dict__), 8, "cpu", torch.float64)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, h, d, dtype=torch.float64, generator=g) for h, d in ((4, 24), (2, 24), (2, 16)))
    cache.reserve(5)
    assert_close(cache.attend(0, q, k, v, 0.2), naive_attention(q, k, v, 0.2), "d=24, d_v=16, its own scale")


def test_rows_can_be_found_by_slot_numbers_too():
    """The buffer is ready for chapter 3, where a sequence's slots are scattered."""
    buffer = PlainBuffer(n_layers=2, n_slots=10, heads=3, dim=4, device=torch.device("cpu"), dtype=torch.float32)
    x = torch.arange(36.0).view(3, 3, 4)
    slots = torch.tensor([7, 2, 5])
    buffer.write(1, slots, x)
    assert torch.equal(buffer.read(1, slots), x)
    assert torch.equal(buffer.read(1, torch.tensor([5, 7])), x[[2, 0]])
    assert torch.equal(buffer.read(1, slice(2, 3)), x[1:2])
    assert buffer.nbytes == 2 * 10 * 3 * 4 * 4


# PyTorch's attention behind the same signature


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 20), (2, 5), (5, 5), (5, 2), (17, 64), (3, 0)])
@pytest.mark.parametrize(("heads", "kv_heads", "d_v"), [(4, 4, 8), (4, 2, 8), (4, 1, 6)])
def test_torch_attention_equals_naive_attention(n, m, heads, kv_heads, d_v):
    g = torch.Generator().manual_seed(0)
    shapes = (n, heads, 8), (m, kv_heads, 8), (m, kv_heads, d_v)
    q, k, v = (torch.randn(s, dtype=torch.float64, generator=g) for s in shapes)
    for scale in (None, 0.7):
        assert_close(torch_attention(q, k, v, scale), naive_attention(q, k, v, scale), f"n={n}, m={m}, scale={scale}")
