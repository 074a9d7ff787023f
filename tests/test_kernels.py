"""The Triton attention kernels against chapter 1 in float64: interpreted without a GPU, compiled with one."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    DEVICE,
    Heads,
    check_flash,
    check_outputs,
    check_paged,
    check_varlen,
    paged_case,
    random_sequence,
)
from triton_checks import memory_checked

from kernels import flash_attention as flash
from kernels import paged_attention as paged
from kernels.checks import INTERPRETED
from kernels.flash_attention import flash_attention
from kernels.paged_attention import choose_splits, paged_attention

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EDGES = [1, 15, 16, 17, 63, 64, 65, 127, 129]


def test_the_interpreter_runs_exactly_where_there_is_no_gpu():
    assert torch.cuda.is_available() != INTERPRETED


# Whole sequences


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", EDGES)
def test_prefill_of_any_length(n, dtype):
    check_flash(flash_attention, n, n, dtype=dtype)


@pytest.mark.parametrize(("n", "m"), [(1, 20), (2, 5), (1, 129), (17, 64), (63, 65), (16, 100), (3, 33)])
def test_fewer_queries_than_keys_are_the_last_positions(n, m):
    check_flash(flash_attention, n, m)


@pytest.mark.parametrize(("n", "m"), [(5, 2), (40, 1), (64, 17), (3, 0), (0, 3), (0, 0)])
def test_rows_without_a_key_are_zero(n, m):
    check_flash(flash_attention, n, m)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("d", [16, 32, 64, 128])
@pytest.mark.parametrize("d_v", [16, 128])
def test_every_head_size(d, d_v, dtype):
    check_flash(flash_attention, 17, 40, Heads(d=d, d_v=d_v), dtype)


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(4, 4), (4, 1), (6, 2), (3, 1), (1, 1)])
def test_query_heads_share_key_heads(n_heads, n_kv_heads):
    check_flash(flash_attention, 7, 30, Heads(n_heads, n_kv_heads))


def prefill_tiles() -> list:
    """Without a GPU tiles higher and wider than each other; with one every tile that its tuner may choose."""
    if INTERPRETED:
        return [flash._tile(*sides, 4, 1) for sides in ((16, 64), (64, 16), (64, 64), (128, 32))]
    if torch.cuda.get_device_capability() < (8, 0):
        return flash.WITHOUT_TENSOR_CORES
    return flash.HOPPER if torch.cuda.get_device_capability() >= (9, 0) else flash.AMPERE


@pytest.mark.parametrize("tile", prefill_tiles(), ids=str)
@pytest.mark.parametrize(("n", "m"), [(129, 129), (65, 200), (70, 40)])
def test_every_tile_of_prefill(monkeypatch, tile, n, m):
    monkeypatch.setattr(flash._flash_kernel, "configs", [tile])
    check_flash(flash_attention, n, m, dtype=torch.float16)


@pytest.mark.parametrize(
    "lengths",
    [
        [(5, 5)],
        [(1, 1), (17, 17), (64, 64), (33, 33)],
        [(1, 20), (16, 40), (1, 1), (0, 7), (5, 2), (3, 0), (40, 70)],
        [(0, 0), (0, 3), (2, 2)],
    ],
    ids=str,
)
def test_many_sequences_in_one_launch(lengths):
    check_varlen(flash_attention, lengths)
    check_varlen(flash_attention, lengths, max_seqlen_q=max(n for n, _ in lengths))


@settings(deadline=None, max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=4))
def test_any_batch_of_sequences(lengths):
    check_varlen(flash_attention, lengths)


def test_strided_queries_are_read_in_place():
    generator = torch.Generator().manual_seed(0)
    q, k, v = random_sequence(20, 20, Heads(2, 2, 32, 32), torch.float32, generator)
    together = torch.cat([q, k, v], dim=1)  # as one projection makes them: [n, 3 H, d]
    parts = together[:, 0:2], together[:, 2:4], together[:, 4:6]
    assert not parts[0].is_contiguous()
    with memory_checked([together]):
        out, lse = flash_attention(*parts)
    check_outputs(out, lse, [(q, k, v)], None, "slices of one tensor")


def test_parts_merge_by_their_lse():
    sequence = random_sequence(1, 50, Heads(), torch.float32, torch.Generator().manual_seed(3))
    q, k, v = sequence
    parts = [flash_attention(q, k[s], v[s]) for s in (slice(0, 13), slice(13, 50))]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    merged = (lses.softmax(0)[..., None] * outs).sum(0)
    check_outputs(merged, lses.logsumexp(0), [sequence], None, "one query, keys 0 .. 12 and 13 .. 49")


def test_large_scores_do_not_overflow():
    q = torch.full((3, 1, 16), 200.0, device=DEVICE)
    k, v = torch.randn(2, 3, 1, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE) * 100
    out, lse = flash_attention(q, k, v)
    assert lse.abs().max() > 1000, "the case is meant to be one in which e^score overflows"
    check_outputs(out, lse, [(q, k, v)], None, "scores in the thousands")


# Blocks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_decode_through_shuffled_blocks(block_size, dtype):
    check_paged(paged_attention, paged_case([5, 65, 64, 1], [1, 1, 1, 1], block_size, dtype=dtype), num_splits=2)


@pytest.mark.parametrize("length", EDGES)
def test_decode_of_any_length(length):
    check_paged(paged_attention, paged_case([length, 20], [1, 1], 4))


@pytest.mark.parametrize("counts", [[1, 3, 2], [16, 1, 5], [0, 4, 1], [1, 0, 0]], ids=str)
@pytest.mark.parametrize("heads", [Heads(), Heads(16, 1)], ids=str)
def test_a_few_new_tokens_see_what_lies_before_each(counts, heads):
    check_paged(paged_attention, paged_case([40, 33, 70], counts, heads=heads), num_splits=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_more_rows_than_one_program_takes(dtype):
    check_paged(paged_attention, paged_case([40, 20], [16, 3], heads=Heads(6, 1), dtype=dtype))


def test_any_number_of_parts_gives_the_same():
    case = paged_case([200, 33, 1, 64], [1, 2, 1, 3], block_size=4)
    whole = check_paged(paged_attention, case, num_splits=1)
    for n in (2, 3, 7, 20):
        torch.testing.assert_close(check_paged(paged_attention, case, num_splits=n), whole, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(check_paged(paged_attention, case), whole, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("tile", paged.WITH_TENSOR_CORES, ids=str)
def test_every_tile_of_decode(monkeypatch, tile):
    if not INTERPRETED and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("not a tile for this GPU")
    monkeypatch.setattr(paged._part_kernel, "configs", [tile])
    case = paged_case([200, 33, 130], [1, 2, 5], 16, Heads(8, 1), torch.float16)
    check_paged(paged_attention, case, num_splits=2)


def test_more_parts_than_the_merge_takes_at_once():
    check_paged(paged_attention, paged_case([640, 40], [1, 1], 64, Heads(16, 1, 16, 16)), num_splits=20)  # takes 16


@pytest.mark.parametrize(("d", "d_v"), [(16, 16), (32, 128), (64, 64), (128, 32)])
def test_every_head_size_through_blocks(d, d_v):
    check_paged(paged_attention, paged_case([37, 12], [1, 2], heads=Heads(d=d, d_v=d_v), dtype=torch.float16))


def test_max_count_may_be_said_and_the_scale_too():
    check_paged(paged_attention, paged_case([30, 20], [3, 1]), 0.7, max_count=3, num_splits=3)


def test_more_new_tokens_than_tokens_leave_rows_without_a_key():
    check_paged(paged_attention, paged_case([2, 0, 5], [4, 3, 1]), num_splits=2)


def test_an_empty_batch_has_an_empty_result():
    case = paged_case([4, 9], [0, 0])
    assert check_paged(paged_attention, case).shape == (0, 4, 16)


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(0, 5)), min_size=1, max_size=4),
    st.sampled_from([1, 4, 16, 64]),
    st.integers(1, 4),
)
def test_any_batch_of_tables(sequences, block_size, num_splits):
    lengths, counts = zip(*sequences, strict=True)
    counts = [min(x) for x in zip(lengths, counts, strict=True)]
    check_paged(paged_attention, paged_case(lengths, counts, block_size), num_splits=num_splits)


def test_a_block_beyond_2_to_the_31_elements_is_found(tmp_path):
    block_size, d = 256, 128
    block = 2**31 // (block_size * d) + 1
    elements = (block + 1) * block_size * d
    if DEVICE == "cuda":
        if torch.cuda.mem_get_info()[0] < 6e9:
            pytest.skip("needs 6 GB of free GPU memory")
        flat = torch.empty(elements, dtype=torch.float16, device=DEVICE)
    else:  # a sparse file: only what is touched takes room
        flat = torch.from_numpy(np.memmap(tmp_path / "pool", np.float16, "w+", shape=elements))
    pool = flat.view(block + 1, block_size, 1, d)
    small = paged_case([20], [1], block_size, Heads(1, 1, d, d), torch.float16)
    sequence = small.sequences[0]
    pool[block, :20] = sequence.k
    table, integers = torch.tensor([[block]], dtype=torch.int32, device=DEVICE), small.arguments[-2:]
    out, lse = paged_attention(sequence.q, pool, pool, table, *integers, num_splits=1)
    check_outputs(out, lse, [(sequence.q, sequence.k, sequence.k)], None, f"block {block}")


# How many parts, and what is refused


@pytest.mark.parametrize(
    ("programs", "longest", "num_sms", "expected"),
    [
        (512, 4096, 132, 2),  # batch 64 on 8 key heads of an H100: 512 programs, 528 wanted
        (8, 4096, 132, 32),  # batch 1: 66 would be wanted, but a part has at least 128 keys
        (8, 200, 132, 1),
        (1, 10**6, 132, 128),  # never more than 128
        (600, 10**6, 132, 1),
        (1, 0, 132, 1),
    ],
)
def test_parts_fill_the_gpu_and_stay_long_enough(programs, longest, num_sms, expected):
    assert choose_splits(programs, longest, num_sms) == expected


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=DEVICE)


BOUNDS = torch.tensor([0, 3], dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": ones(3, 4, 80), "k": ones(3, 2, 80)}, r"head size d=80 is not supported: the kernel takes \(16, 32, 64"),
        ({"v": ones(3, 2, 24)}, "head size d_v=24 is not supported"),
        ({"q": ones(3, 4, 16, dtype=torch.float64)}, "q is torch.float64: the kernel takes torch.float32"),
        (
            {"k": ones(3, 2, 16, dtype=torch.float16)},
            "k is torch.float16, q is torch.float32: they must be",
        ),
        ({"v": ones(3, 2, 16).to("meta")}, "v is on meta, q is on c"),
        ({"q": ones(3, 4, 32)}, r"shapes do not fit: q \[3, 4, 32\], k \[3, 2, 16\]"),
        ({"v": ones(4, 2, 16)}, r"shapes do not fit: .* v \[4, 2, 16\]"),
        ({"q": ones(3, 5, 16)}, "5 query heads are not a multiple of 2 key heads"),
        ({"q": ones(1, 3, 4, 16)}, r"q must be \[N, H, d\], got the shape \[1, 3, 4, 16\]"),
        ({"v": ones(1, 3, 2, 16)}, r"v must be \[M, K, d_v\], got the shape \[1, 3, 2, 16\]"),
        ({"k": ones(3, 2, 32)[..., ::2]}, "the last dimension of k must have stride 1, got 2"),
        ({"scale": 0.0}, "scale=0.0 is not supported: it must be positive"),
        ({"scale": math.nan}, "scale=nan is not supported"),
        ({"cu_seqlens_q": BOUNDS}, "cu_seqlens_q and cu_seqlens_k go together"),
        (
            {"cu_seqlens_q": BOUNDS.long(), "cu_seqlens_k": BOUNDS},
            "cu_seqlens_q is torch.int64: it must be",
        ),
        ({"cu_seqlens_q": BOUNDS, "cu_seqlens_k": BOUNDS[:1]}, r"cu_seqlens_k must have the shape \[2\], got \[1\]"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_flash_attention_refuses_by_name(changed, message):
    arguments = {"q": ones(3, 4, 16), "k": ones(3, 2, 16), "v": ones(3, 2, 16), **changed}
    with pytest.raises(ValueError, match=message):
        flash_attention(**arguments)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"k_pool": ones(5, 12, 2, 16), "v_pool": ones(5, 12, 2, 16)},
            "block_size=12 is not supported: .* a power",
        ),
        ({"k_pool": ones(5, 2, 16), "v_pool": ones(5, 2, 16)}, r"k_pool must be \[blocks, block_size, K, d\]"),
        ({"max_count": 17}, "17 new tokens of one sequence are not supported: the kernel takes 16"),
        ({"counts": ones(2, dtype=torch.int32) * 20}, "20 new tokens of one sequence are not supported"),
        ({"num_splits": 0}, "num_splits=0 is not supported: it must be at least 1"),
        ({"lengths": ones(2, dtype=torch.int64)}, "lengths is torch.int64: it must be torch.int32"),
        ({"lengths": ones(3, dtype=torch.int32)}, r"lengths must have the shape \[2\], got \[3\]"),
        ({"block_tables": ones(3, 4, dtype=torch.int32)}, r"block_tables must have the shape \[2, 4\], got \[3, 4\]"),
        ({"v_pool": ones(5, 4, 2, 48)}, "head size d_v=48 is not supported"),
        ({"scale": -1.0}, "scale=-1.0 is not supported: it must be positive"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_paged_attention_refuses_by_name(changed, message):
    integers = {name: ones(2, dtype=torch.int32) for name in ("lengths", "counts")}
    arguments = {"q": ones(2, 4, 16), "k_pool": ones(5, 4, 2, 16), "v_pool": ones(5, 4, 2, 16), **integers}
    arguments = {**arguments, "block_tables": ones(2, 4, dtype=torch.int32), **changed}
    with pytest.raises(ValueError, match=message):
        paged_attention(**arguments)
