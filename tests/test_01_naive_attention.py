"""Chapter 1: attention from its formula, and the loop without a cache."""

import math

import pytest
import torch
from equality import DAMAGES, ListCache, assert_close, feed, greedy
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minillm.generate import generate, run
from minillm.naive_attention import NoCache, attention_scores, causal_mask, naive_attention


def by_hand(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """The formula in Python loops over numbers: an oracle that shares no line with the code under test."""
    (n, n_heads, d), (m, n_kv_heads, d_v) = q.shape, v.shape
    scale = 1 / math.sqrt(d) if scale is None else scale
    out = torch.zeros(n, n_heads, d_v, dtype=torch.float64)
    for i in range(n):
        visible = range(m - n + i + 1)
        for h in range(n_heads):
            head = h * n_kv_heads // n_heads
            scores = [
                scale * math.fsum(float(x * y) for x, y in zip(q[i, h], k[j, head], strict=True)) for j in visible
            ]
            weights = [math.exp(s - max(scores)) for s in scores]
            for w, j in zip(weights, visible, strict=True):
                out[i, h] += w / math.fsum(weights) * v[j, head].double()
    return out


def random_qkv(n: int, m: int, heads: int = 4, kv_heads: int = 2, d: int = 8, d_v: int = 8, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    shapes = (n, heads, d), (m, kv_heads, d), (m, kv_heads, d_v)
    return tuple(torch.randn(s, dtype=torch.float64, generator=g) for s in shapes)


@pytest.mark.parametrize("m", [1, 2, 15, 16, 17, 33])
@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_equals_the_formula_by_hand(n, m):
    q, k, v = random_qkv(n, m)
    assert_close(naive_attention(q, k, v), by_hand(q, k, v), f"n={n} queries, m={m} keys")


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 2), (4, 1)])
def test_query_heads_share_key_heads_in_order(heads, kv_heads):
    q, k, v = random_qkv(3, 7, heads, kv_heads)
    assert_close(naive_attention(q, k, v), by_hand(q, k, v), f"{heads} query heads on {kv_heads} key heads")


def test_grouped_heads_are_repeated_not_tiled():
    # 4 query heads on 2 key heads read key heads 0, 0, 1, 1; T=3 differs from H=4, so that no axis is confused.
    q = torch.zeros(3, 4, 2)
    k = torch.zeros(3, 2, 2)
    v = torch.tensor([0.0, 1.0]).view(1, 2, 1).expand(3, 2, 2)
    assert naive_attention(q, k, v)[:, :, 0].tolist() == [[0, 0, 1, 1]] * 3


def test_value_size_may_differ_from_key_size():
    q, k, v = random_qkv(3, 5, d=24, d_v=16)
    assert_close(naive_attention(q, k, v), by_hand(q, k, v), "d=24, d_v=16")


def test_scale_is_an_argument():
    q, k, v = random_qkv(3, 5)
    assert_close(naive_attention(q, k, v, scale=0.3), by_hand(q, k, v, scale=0.3), "scale=0.3")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_precision_stays_close_to_the_formula(dtype):
    q, k, v = (x.to(dtype) for x in random_qkv(5, 20))
    assert_close(naive_attention(q, k, v), by_hand(q, k, v), str(dtype))


def test_mask_is_aligned_bottom_right():
    assert causal_mask(2, 5).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert causal_mask(1, 3).int().tolist() == [[1, 1, 1]]
    assert causal_mask(3, 2).int().tolist() == [[0, 0], [1, 0], [1, 1]]


def test_rows_without_a_key_are_zero():
    q, k, v = random_qkv(5, 2)
    out = naive_attention(q, k, v)
    assert torch.equal(out[:3], torch.zeros_like(out[:3])), "5 queries, 2 keys: the first three rows see nothing"
    assert_close(out[3:], by_hand(q[3:], k, v), "the rows that do see keys")
    assert torch.equal(naive_attention(*random_qkv(3, 0)), torch.zeros(3, 4, 8, dtype=torch.float64)), "no key at all"


def test_masked_scores_are_minus_infinity_not_a_large_number():
    # The one visible key scores -20000: with -10000 in the place of minus infinity the masked key would win.
    q = torch.tensor([[-20000.0, 0.0], [0.0, 0.0]]).view(2, 1, 2)
    k = torch.tensor([[1.0, 0.0], [0.0, 0.0]]).view(2, 1, 2)
    v = torch.tensor([[1.0], [100.0]]).view(2, 1, 1)
    assert naive_attention(q, k, v)[0].item() == 1.0


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(finite, min_size=28, max_size=28), st.integers(1, 4))
def test_finite_input_gives_finite_output(numbers, n):
    x = torch.tensor(numbers, dtype=torch.float32)
    q, k, v = x[: 4 * n].view(n, 2, 2), x[16:22].view(3, 1, 2), x[22:28].view(3, 1, 2)
    assert naive_attention(q, k, v).isfinite().all(), f"q={q.tolist()} k={k.tolist()} v={v.tolist()}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_largest_numbers_neither_overflow_nor_turn_into_nan(dtype):
    big = torch.finfo(dtype).max
    q = torch.tensor([big, big], dtype=dtype).view(1, 1, 2)
    k = torch.tensor([[big, -big], [big, big], [0, 0]], dtype=dtype).view(3, 1, 2)
    v = torch.tensor([[1.0], [2.0], [3.0]], dtype=dtype).view(3, 1, 1)
    assert naive_attention(q, k, v).item() == 2.0, "key 1 has by far the largest score"
    assert naive_attention(q, k, torch.full_like(v, big)).isfinite().all(), "a mean of the largest number"


def test_attention_map_rows_sum_to_one():
    q, k, _ = random_qkv(4, 9)
    weights = attention_scores(q, k).softmax(-1)
    assert weights.shape == (2, 2, 4, 9), "[K, G, n, m]"
    assert_close(weights.sum(-1), torch.ones(2, 2, 4, dtype=torch.float64), "each query shares out one")


# The loop


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_equality_model_notices_a_damaged_cache(small, damage):
    ids = list(range(10, 30))
    right = feed(small, ids, [20], NoCache())
    wrong = feed(small, ids, [12, 8], ListCache(2, DAMAGES[damage]))
    gap = (wrong[12:] - right[12:]).abs().max()
    assert gap > 0.1, f"keys and values {damage} moved the logits by {gap} only"


def test_generate_is_the_arg_max_of_the_whole_text_at_every_step(small):
    prompt = [9, 30, 2]
    ids = list(prompt)
    for _ in range(10):
        ids.append(int(run(small, ids, NoCache())[-1].argmax()))
    assert greedy(small, prompt, 10) == ids[3:]


def test_generate_yields_each_token_before_the_next_is_computed(small):
    class Counting(NoCache):
        calls = 0

        def attend(self, layer, q, k, v, scale=None):
            self.calls += 1
            return super().attend(layer, q, k, v, scale)

    cache = Counting()
    stream = generate(small, [1, 2], 5, cache)
    assert cache.calls == 0, "nothing runs before a token is asked for"
    for i in range(1, 4):
        next(stream)
        assert cache.calls == i * small.config.n_layers, "one forward pass a token"


def test_generate_stops_after_eos(small):
    plain = greedy(small, [9, 30, 2], 10)
    eos = plain[4]
    assert list(generate(small, [9, 30, 2], 10, eos=eos)) == plain[: plain.index(eos) + 1]


def test_generate_goes_on_from_a_cache_that_holds_the_start(small):
    prompt = list(range(20, 30))
    cache = ListCache(2)
    run(small, prompt[:6], cache)
    assert greedy(small, prompt, 8, cache) == greedy(small, prompt, 8)
    with pytest.raises(ValueError, match="the cache holds 17 tokens, the prompt has 10: none is left to run"):
        generate(small, prompt, 8, cache)


@pytest.mark.parametrize(
    ("prompt", "n", "message"),
    [
        ([], 1, "the prompt is empty"),
        ([1, 64], 1, r"token id 64 is outside the vocabulary 0\.\.63"),
        ([-1], 1, r"token id -1 is outside the vocabulary 0\.\.63"),
        ([1], 0, "max_new_tokens must be at least 1, got 0"),
        ([1] * 100, 29, "100 prompt tokens and 29 new ones exceed max_seq_len=128"),
    ],
)
def test_bad_requests_are_refused_at_the_call(small, prompt, n, message):
    with pytest.raises(ValueError, match=message):
        generate(small, prompt, n)  # not even iterated over


def test_the_context_can_be_filled_to_the_last_position(small):
    assert len(greedy(small, [1] * 126, 2)) == 2


def test_an_exception_in_the_forward_pass_is_undone(small):
    class Failing(ListCache):
        fail = False

        def attend(self, layer, q, k, v, scale=None):
            if self.fail and layer == 1:
                raise RuntimeError("half way")
            return super().attend(layer, q, k, v, scale)

    ids = list(range(12))
    cache = Failing(2)
    run(small, ids[:5], cache)
    cache.fail = True
    with pytest.raises(RuntimeError, match="half way"):
        run(small, ids[5:], cache)
    cache.fail = False
    assert cache.length == 5
    assert_close(run(small, ids[5:], cache), run(small, ids, NoCache())[5:], "after the failed step")
