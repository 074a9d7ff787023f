"""Chapter 4: tiles give the formula's result, in memory that grows with the text and not with its square."""

import itertools
import random
import sys
from types import SimpleNamespace

import pytest
import torch
from equality import assert_close, feed
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import flash_attention as chapter
from minillm.device import use_kernels
from minillm.flash_attention import (
    attend_tile,
    merge,
    naive_bytes,
    one_pass_softmax,
    tiled_attention,
    tiled_attention_lse,
    tiled_bytes,
    tiled_flops,
    tiles,
)
from minillm.generate import run
from minillm.kv_cache import KVCache
from minillm.measure.memory import peak_bytes
from minillm.measure.metrics import count_flops
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer, init_weights
from minillm.naive_attention import NoCache, attention_scores, naive_attention, scaled_products
from minillm.paged_cache import PagedKVCache, ragged
from minillm.paged_cache.in_place import MOST_IN_PLACE
from minillm.torch_attention import torch_attention


def random_qkv(n, m, heads=4, kv_heads=2, d=16, d_v=16, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (n, heads, d), (m, kv_heads, d), (m, kv_heads, d_v)
    return tuple(torch.randn(s, dtype=torch.float64, generator=g).to(dtype) for s in shapes)


# Softmax in one pass, and the merge


def test_one_pass_gives_the_softmax_of_the_whole():
    x = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 30
    for sizes in ([50], [1] * 50, [7, 13, 30]):
        result, trace = one_pass_softmax(x.split(sizes))
        assert_close(result, x.softmax(0), f"pieces {sizes}")
        assert [largest for largest, _ in trace] == [x[:i].max().item() for i in itertools.accumulate(sizes)]


def test_a_larger_maximum_rescales_the_sum():
    _, trace = one_pass_softmax([torch.tensor([0.0, 0.0]), torch.tensor([1000.0])])
    assert trace == [(0.0, 2.0), (1000.0, 1.0)], "beside exp(1000) the first two vanish, and nothing overflows"


def partial(q, k, v, keys):
    """(out, lse) of one query over a subset of keys, from the formula."""
    scores = scaled_products(q, k[keys])[:, :, 0]  # [K, G, m]
    out = (scores.softmax(-1) @ v[keys].transpose(0, 1)).flatten(0, 1)  # [H, d_v]
    return out[None], scores.logsumexp(-1).flatten()[None]


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_partial_results_can_be_merged_in_any_order_and_grouping(sizes, rng):
    q, k, v = random_qkv(1, sum(sizes))
    keys = list(range(sum(sizes)))
    rng.shuffle(keys)
    parts = [partial(q, k, v, keys[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(len(sizes))]
    while len(parts) > 1:  # join two neighbours, anywhere
        i = rng.randrange(len(parts) - 1)
        parts[i : i + 2] = [merge(*parts[i], *parts[i + 1])]
    assert_close(parts[0][0], naive_attention(q, k, v), f"subsets of {sizes} keys")
    assert_close(parts[0][1], attention_scores(q, k).logsumexp(-1).flatten()[None], "and the weight of the whole")


def test_a_part_without_keys_counts_nothing():
    q, k, v = random_qkv(1, 5)
    some = partial(q, k, v, list(range(5)))
    none = torch.full_like(some[0], 7.0), torch.full_like(some[1], -torch.inf)
    for a, b in ((some, none), (none, some)):
        out, lse = merge(*a, *b)
        assert_close(out, some[0], "one side without keys")
        assert_close(lse, some[1], "its weight")
    out, lse = merge(*none, *none)
    assert torch.equal(out, torch.zeros_like(out)), "no key at all: zero, not NaN"
    assert torch.equal(lse, none[1])


# Tiles


@pytest.mark.parametrize("n", [1, 15, 16, 17, 63, 64, 65, 127, 129])
@pytest.mark.parametrize("extra", [0, 1, 20, 100])
def test_tiles_give_the_formula_at_every_edge(n, extra):
    q, k, v = random_qkv(n, n + extra)
    assert_close(tiled_attention(q, k, v), naive_attention(q, k, v), f"n={n}, m={n + extra}, tiles of 128")
    for query_tile, key_tile in ((16, 16), (32, 8), (8, 64)):
        out, lse = tiled_attention_lse(q, k, v, None, query_tile, key_tile)
        case = f"n={n}, m={n + extra}, tiles {query_tile} x {key_tile}"
        assert_close(out, naive_attention(q, k, v), case)
        expected = attention_scores(q, k).logsumexp(-1).permute(2, 0, 1).flatten(1)
        assert_close(lse, expected, f"lse, {case}")


def test_rows_without_a_key_are_zero():
    q, k, v = random_qkv(5, 2)
    out, lse = tiled_attention_lse(q, k, v, None, 2, 2)
    assert torch.equal(out[:3], torch.zeros_like(out[:3]))
    assert (lse[:3] == -torch.inf).all()
    assert_close(out, naive_attention(q, k, v), "5 queries, 2 keys")
    assert torch.equal(tiled_attention(*random_qkv(3, 0)), torch.zeros(3, 4, 16, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 50.0, 1e4])
def test_weights_sum_to_one_in_low_precision_too(dtype, size):
    q, k = torch.ones(1, 1, 4, dtype=dtype), torch.full((100, 1, 4), size / 4, dtype=dtype)
    out = tiled_attention_lse(q, k, torch.ones(100, 1, 1, dtype=dtype), 1.0, 16, 2)[0]
    assert abs(out.item() - 1) < 0.02, f"{dtype}: a mean of ones is {out.item()} where all scores are {size}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_as_close_to_the_formula_as_naive_attention(dtype):
    q, k, v = (4 * x for x in random_qkv(40, 300, dtype=dtype))
    expected = naive_attention(q.double(), k.double(), v.double())
    naive, tiled = ((f(q, k, v) - expected).abs().max() for f in (naive_attention, tiled_attention))
    assert tiled < 2 * naive + 1e-3, f"{dtype}: error {tiled}, naive has {naive}"


@pytest.mark.parametrize(("heads", "kv_heads", "d", "d_v"), [(1, 1, 8, 8), (6, 2, 24, 16), (4, 1, 16, 32)])
def test_shapes_scale_and_heads_are_those_of_naive_attention(heads, kv_heads, d, d_v):
    q, k, v = random_qkv(40, 70, heads, kv_heads, d, d_v)
    for scale in (None, 0.3):
        actual = tiled_attention_lse(q, k, v, scale, 16, 16)[0]
        assert_close(actual, naive_attention(q, k, v, scale), f"{heads}/{kv_heads} heads, d={d}, d_v={d_v}")


def test_every_visible_pair_lies_in_one_tile_and_tiles_above_the_diagonal_are_skipped():
    for n, m, a, b in ((10, 10, 4, 3), (3, 11, 2, 4), (7, 3, 2, 2), (1, 9, 4, 4), (16, 16, 4, 4)):
        seen = torch.zeros(n, m, dtype=torch.int)
        for tile in tiles(n, m, a, b):
            seen[tile.rows, tile.columns] += 1
        visible = torch.ones(n, m).tril(m - n).bool()
        assert (seen[visible] == 1).all(), f"n={n}, m={m}, tiles {a} x {b}: each visible pair once"
        assert seen.max() <= 1
        for tile in tiles(n, m, a, b):
            assert visible[tile.rows, tile.columns].any(), "a tile with nothing to see is not worked on"
    assert len(list(tiles(16, 16, 4, 4))) == 10, "4 + 3 + 2 + 1 of 16 tiles"


# What moves and what is held


def test_bytes_are_those_of_the_paper():
    """N=1,024, d=64, fp16, one head (references of FlashAttention): 8,912,896 against 2,359,296 bytes."""
    assert naive_bytes(1024, 1024, 64, 64) == 8_912_896
    assert tiled_bytes(1024, 1024, 64, 64, causal=False) == 2_359_296
    assert tiled_bytes(1024, 1024, 64, 64, query_tile=1024, causal=False) == 524_288, "each of q, k, v, out once"
    assert tiled_bytes(1024, 1024, 64, 64) == 2 * (2 * 1024 * 64 + 2 * 64 * 128 * sum(range(1, 9))), (
        "causal: 36 of 64 tiles"
    )


@pytest.mark.parametrize(("n", "m"), [(512, 512), (300, 700), (128, 128)])
def test_counted_flops_are_those_that_run(n, m):
    q, k, v = random_qkv(n, m, heads=1, kv_heads=1)
    _, flops = count_flops(lambda: tiled_attention(q, k, v))
    assert flops == tiled_flops(n, m, 16, 16)
    _, naive = count_flops(lambda: naive_attention(q, k, v))
    assert naive == 4 * n * m * 16


def test_skipping_the_upper_triangle_halves_the_work_of_whole_tiles():
    for n in (1024, 4096):
        whole = 4 * n * n * 64
        assert tiled_flops(n, n, 64, 64) == whole * (n // 128 + 1) // (2 * (n // 128))


def test_peak_memory_is_linear_where_naive_is_quadratic():
    lengths = [256, 512, 1024, 2048, 4096, 8192]
    peaks = {}
    for attention in (naive_attention, tiled_attention):
        q, k, v = random_qkv(8192, 8192, heads=1, kv_heads=1, dtype=torch.float32)
        reach = lengths[:5] if attention is naive_attention else lengths  # 8,192² scores several times: 1 GiB
        peaks[attention] = [peak_bytes(lambda n=n: attention(q[:n], k[:n], v[:n]))[1] for n in reach]  # noqa: B023
    naive, tiled = peaks[naive_attention], peaks[tiled_attention]
    for n, peak in zip(lengths, naive, strict=False):
        assert peak >= 4 * n * n, f"all scores of {n} tokens are held at once"
    assert [round(b / a, 1) for a, b in itertools.pairwise(naive[1:])] == [4.0, 4.0, 4.0], (
        f"doubling quadruples: {naive}"
    )
    growth = [(b - a) / (lengths[i + 1] - lengths[i]) for i, (a, b) in enumerate(itertools.pairwise(tiled))]
    assert max(growth) < 2 * 4 * (2 * 16 + 4), f"bytes per token more, a few times out and lse: {growth}"
    assert tiled[4] < naive[4] / 50


# Plugged into any cache


@pytest.mark.parametrize("attention", [tiled_attention, torch_attention, naive_attention], ids=lambda f: f.__name__)
def test_any_attention_in_any_cache_gives_the_same_logits(small, attention):
    ids = [(7 * i * i + 3) % 64 for i in range(100)]
    expected = run(small, ids, NoCache())
    pieces = [60, 1, 1, 30, 8]
    contiguous = KVCache(small.config, 100, "cpu", torch.float64, attention)
    paged = PagedKVCache(small.config, 30, 4, "cpu", torch.float64, attention)
    random.Random(0).shuffle(paged.allocator._free)
    for cache in (contiguous, paged.sequence()):
        assert_close(feed(small, ids, pieces, cache), expected, f"{attention.__name__} in {type(cache).__name__}")


@pytest.fixture
def kernels_everywhere(monkeypatch):
    """The path that a GPU takes; without one its kernels run in Triton's interpreter."""
    for module in (chapter, ragged):
        monkeypatch.setattr(module, "use_kernels", lambda q, value_dim, block_size=1: True)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux only")
@pytest.mark.usefixtures("kernels_everywhere")
def test_the_paged_cache_gives_the_same_logits_through_the_kernels():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = ModelConfig(64, 32, 2, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=48, max_seq_len=128)
    model = Transformer(config).requires_grad_(False)
    init_weights(model, 0.3, torch.Generator().manual_seed(0))
    model.to(device)
    cache = PagedKVCache(config, 30, 16, device)
    random.Random(0).shuffle(cache.allocator._free)
    texts = [[(i * 7 + j * j) % 64 for j in range(60)] for i in range(3)]
    sequences = [cache.sequence() for _ in texts]
    for counts in ((20, 3, 1), (1, 30, 1), (5, 2, 17)):  # prefill, decode and guesses in one step
        new = [t[s.length : s.length + n] for t, s, n in zip(texts, sequences, counts, strict=True)]
        batch = cache.batch(list(zip(sequences, counts, strict=True)))
        tokens = torch.tensor([i for ids in new for i in ids], device=device)
        with torch.inference_mode():
            logits = model(tokens, batch.positions, batch).split(counts)
        for i, (sequence, ids) in enumerate(zip(sequences, new, strict=True)):
            sequence.advance(ids)
            expected = run(model, texts[i][: sequence.length], NoCache())[-len(ids) :]
            assert_close(logits[i], expected, f"sequence {i} of a step with counts {counts}")


@pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux only")
def test_the_cache_and_the_kernel_agree_on_how_many_new_tokens_are_few():
    from kernels.paged_attention import MAX_COUNT

    assert MOST_IN_PLACE == MAX_COUNT


@pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux only")
@pytest.mark.usefixtures("kernels_everywhere")
def test_flash_attention_is_the_kernel_where_there_is_one():
    q, k, v = random_qkv(17, 40, dtype=torch.float32)
    assert_close(chapter.flash_attention(q, k, v), naive_attention(q, k, v), "17 queries, 40 keys")


def test_what_the_kernels_do_not_support_takes_the_pytorch_path():
    """A head size that they refuse by name, a type, or a device."""
    q = torch.zeros(1, 2, 24)
    assert not use_kernels(q, 24), "not on a GPU"
    assert_close(chapter.flash_attention(*random_qkv(3, 5, d=24)), naive_attention(*random_qkv(3, 5, d=24)), "d=24")
    on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.float32, shape=(1, 2, 32))
    assert use_kernels(on_gpu, 32) == (sys.platform == "linux")
    assert not use_kernels(on_gpu, 32, block_size=3), "not a power of two"
    for change, value_dim in (({"shape": (1, 2, 24)}, 32), ({"dtype": torch.float64}, 32), ({}, 24)):
        assert not use_kernels(SimpleNamespace(**(on_gpu.__dict__ | change)), value_dim), (change, value_dim)


# Seeded faults: each of these mistakes must be noticed by the comparison with the formula


def no_rescale(out_a, lse_a, out_b, lse_b):
    total = lse_a.exp() + lse_b.exp()
    return (out_a + out_b) / 2, total.log()


def ignores_lse(out_a, lse_a, out_b, lse_b):
    return (out_a + out_b) / 2, torch.maximum(lse_a, lse_b)


@pytest.mark.parametrize(
    "fault", ["merge without weights", "merge that ignores lse", "diagonal one late", "diagonal one early"]
)
def test_seeded_faults_are_noticed(fault, monkeypatch):
    q, k, v = random_qkv(40, 60)
    expected = naive_attention(q, k, v)
    assert_close(tiled_attention_lse(q, k, v, None, 16, 16)[0], expected, "before the fault")
    if fault.startswith("merge"):
        monkeypatch.setattr(chapter, "merge", no_rescale if "without" in fault else ignores_lse)
    else:
        off = 1 if "late" in fault else -1
        monkeypatch.setattr(
            chapter, "attend_tile", lambda q, k, v, diagonal, s: attend_tile(q, k, v, diagonal + off, s)
        )
    with pytest.raises(AssertionError):
        assert_close(tiled_attention_lse(q, k, v, None, 16, 16)[0], expected, fault)
