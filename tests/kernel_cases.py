"""Inputs for the attention kernels, and what is expected of their outputs, for one function or another.

The functions under test are arguments, so that the same checks can be shown to notice a faulty kernel.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from triton_checks import bfloat16_repaired, memory_checked

from minillm.naive_attention import naive_attention
from minillm.torch_attention import torch_attention

Attention = Callable[..., tuple[Tensor, Tensor]]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Heads(NamedTuple):
    """H query heads on K key heads, key size d, value size d_v."""

    n_heads: int = 4
    n_kv_heads: int = 2
    d: int = 32
    d_v: int = 16


GROUPED = Heads()


class QKV(NamedTuple):
    """The queries `[n, H, d]`, keys `[m, K, d]` and values `[m, K, d_v]` of one sequence."""

    q: Tensor
    k: Tensor
    v: Tensor


def random_sequence(n: int, m: int, heads: Heads, dtype: torch.dtype, generator: torch.Generator) -> QKV:
    shapes = ((n, heads.n_heads, heads.d), (m, heads.n_kv_heads, heads.d), (m, heads.n_kv_heads, heads.d_v))
    return QKV(*(torch.randn(s, generator=generator).to(DEVICE, dtype) for s in shapes))


def exact(sequence: QKV, scale: float | None) -> tuple[Tensor, Tensor]:
    """Out and lse in float64, on the CPU: chapter 1's attention, and the logarithm of its softmax sums."""
    q, k, v = (x.cpu().double() for x in sequence)
    (n, n_heads, d), m = q.shape, len(k)
    scores = torch.einsum("nhd,mhd->nhm", q, k.repeat_interleave(n_heads // k.shape[1], 1))
    scores = scores * (1 / math.sqrt(d) if scale is None else scale)
    hidden = torch.arange(m) > m - n + torch.arange(n)[:, None]
    lse = scores.masked_fill(hidden[:, None], -math.inf).logsumexp(-1)
    return naive_attention(q, k, v, scale) if m else q.new_zeros(n, n_heads, v.shape[2]), lse


def check_outputs(
    out: Tensor, lse: Tensor, sequences: Sequence[QKV], scale: float | None = None, case: str = ""
) -> None:
    """The error may be three times PyTorch's own at the same precision, and rounding the largest result."""
    out, lse = out.cpu(), lse.cpu()
    expected, expected_lse = (torch.cat(x) for x in zip(*(exact(s, scale) for s in sequences), strict=True))
    assert out.shape == expected.shape, f"{case}: out {list(out.shape)}, expected {list(expected.shape)}"
    assert out.dtype == sequences[0][0].dtype, f"{case}: out is {out.dtype}"
    assert lse.dtype == torch.float32, f"{case}: lse is {lse.dtype}"
    assert out.isfinite().all(), f"{case}: {int((~out.isfinite()).sum())} values are not finite"
    torch_out = torch.cat([torch_attention(*(x.cpu() for x in s), scale) for s in sequences])
    error, torch_error = ((x.double() - expected).abs() for x in (out, torch_out))
    if out.numel():
        limit = 3 * torch_error.max() + torch.finfo(out.dtype).eps / 2 * expected.abs().max()
        assert error.max() <= limit, f"{case}: error {error.max():.2e}, PyTorch's {torch_error.max():.2e}"
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5, msg=lambda m: f"{case}: lse: {m}")
    assert (out[lse.isinf().all(-1)] == 0).all(), f"{case}: a row without a key is not exactly zero"


def check_flash(attention: Attention, n: int, m: int, heads: Heads = GROUPED, dtype: torch.dtype = torch.float32):
    """One sequence whose keys and values are views into a cache whose other slots hold NaN."""
    generator = torch.Generator().manual_seed(n + 1000 * m)
    sequence = random_sequence(n, m, heads, dtype, generator)
    kept, unused = [], []
    for x in (sequence.k, sequence.v):  # [m, K, d] -> a view of [K, m + 5, d]: heads outside, slots inside
        buffer = x.new_full((x.shape[1], m + 5, x.shape[2]), torch.nan)
        buffer[:, :m] = x.transpose(0, 1)
        kept.append(buffer[:, :m].transpose(0, 1))
        unused.append(buffer[:, m:])
    with bfloat16_repaired(), memory_checked((sequence.q, *kept), unused):
        out, lse = attention(sequence.q, *kept)
    check_outputs(out, lse, [sequence], None, f"{n} queries, {m} keys, {heads}, {dtype}")


def check_varlen(attention: Attention, lengths: Sequence[tuple[int, int]], dtype: torch.dtype = torch.float32, **more):
    """Sequences of (queries, keys), one after another, in one launch."""
    generator = torch.Generator().manual_seed(len(lengths))
    sequences = [random_sequence(n, m, GROUPED, dtype, generator) for n, m in lengths]
    q, k, v = (torch.cat(x) for x in zip(*sequences, strict=True))
    cu_q, cu_k = (torch.tensor([0, *x], device=DEVICE).cumsum(0).int() for x in zip(*lengths, strict=True))
    with memory_checked((q, k, v, cu_q, cu_k)):
        out, lse = attention(q, k, v, 0.3, cu_q, cu_k, **more)
    check_outputs(out, lse, sequences, 0.3, f"sequences of (queries, keys) {lengths}")


class PagedCase(NamedTuple):
    """Sequences, and the arguments of `paged_attention` that hold them; `unused` memory holds no data of theirs."""

    sequences: list[QKV]
    arguments: tuple[Tensor, ...]
    unused: list[Tensor]


def paged_case(
    lengths: Sequence[int],
    counts: Sequence[int],
    block_size: int = 16,
    heads: Heads = GROUPED,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PagedCase:
    """A pool `[K, blocks * block_size, d]` seen as blocks, in random order, with more blocks than needed. Unused slots
    hold NaN, unused entries of the block tables a number far outside the pool.
    """
    generator = torch.Generator().manual_seed(seed)
    sequences = [random_sequence(c, m, heads, dtype, generator) for m, c in zip(lengths, counts, strict=True)]
    needed = [-(-m // block_size) for m in lengths]
    num_blocks = sum(needed) + 2
    order = iter(torch.randperm(num_blocks, generator=generator).tolist())
    tables = torch.full((len(lengths), max(needed) + 2), 2**30, dtype=torch.int32, device=DEVICE)
    for table, n in zip(tables, needed, strict=True):
        table[:n] = torch.tensor([next(order) for _ in range(n)], dtype=torch.int32)
    pools, unused = [], [table[n:] for table, n in zip(tables, needed, strict=True)]
    for rows in ([s.k for s in sequences], [s.v for s in sequences]):
        heads_outside = rows[0].new_full((heads.n_kv_heads, num_blocks, block_size, rows[0].shape[2]), torch.nan)
        pool = heads_outside.permute(1, 2, 0, 3)  # [blocks, block_size, K, d]
        used = [0] * num_blocks
        for table, n, x in zip(tables.tolist(), needed, rows, strict=True):
            for i, block in enumerate(table[:n]):
                piece = x[i * block_size : (i + 1) * block_size]
                pool[block, : len(piece)] = piece
                used[block] = len(piece)
        pools.append(pool)
        unused += [pool[block, n:] for block, n in enumerate(used)]
    integers = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (lengths, counts)]
    return PagedCase(sequences, (torch.cat([s.q for s in sequences]), *pools, tables, *integers), unused)


def check_paged(attention: Attention, case: PagedCase, scale: float | None = None, **more) -> Tensor:
    """The output, after it and lse were compared."""
    with bfloat16_repaired(), memory_checked(case.arguments, case.unused):
        out, lse = attention(*case.arguments, scale, **more)
    lengths, counts = (x.tolist() for x in case.arguments[-2:])
    check_outputs(out, lse, case.sequences, scale, f"lengths {lengths}, counts {counts}, {more}")
    return out
