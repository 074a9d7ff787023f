"""Causal attention of whole sequences in one pass over their keys: the Triton kernel behind chapter 4.

The bottleneck: naive attention writes a score for every pair of tokens to the GPU's memory and reads it back, twice.
The idea: keep a tile of queries on the chip, stream tiles of keys and values past it, and carry a running softmax
along, so that a score never leaves the chip. The invariant: after any number of key tiles `acc / total` is the exact
attention over the keys seen so far.

Forward only. Scores are computed in float32 and must be finite there. Decoding through a block table is
`paged_attention`. Dao 2023, "FlashAttention-2", section 3.1 (the loop order, whole tiles skipped, one mask a row).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import INTERPRETED, check_integers, check_operands, softmax_scale, tensor_cores
from kernels.online_softmax import LOG2_E, finish, online_softmax


def _tile(block_m: int, block_n: int, warps: int, stages: int) -> triton.Config:
    return triton.Config({"BLOCK_M": block_m, "BLOCK_N": block_n}, num_warps=warps, num_stages=stages)


# What the tuner tries: queries and keys of a tile, warps, tiles in flight. Without tensor cores products run in
# registers, and a larger tile spills; this one also fits the 64 KiB of shared memory of a T4.
WITHOUT_TENSOR_CORES = [_tile(16, 32, 8, 1)]
AMPERE = [_tile(64, 32, 4, 4), _tile(64, 64, 4, 3), _tile(128, 64, 8, 3)]
HOPPER = [_tile(64, 64, 4, 3), _tile(128, 64, 8, 3), _tile(128, 128, 8, 2)]


def candidates(_: list[triton.Config], arguments: dict, **_constants: object) -> list[triton.Config]:
    """The tiles worth trying on this GPU for this element type. (The tuner drops one that does not fit the GPU.)"""
    if not tensor_cores(arguments["q_ptr"]):
        return WITHOUT_TENSOR_CORES
    arch = triton.runtime.driver.active.get_current_target().arch
    return HOPPER if 90 <= arch < 120 else AMPERE  # from 120 on it is GeForce again, with Ampere's instructions


@triton.jit
def _attend(
    acc, top, total, q, k_ptr, v_ptr, k_row, v_row, first, last, diagonal, m, scale,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Stream the key tiles from `first` to `last` past the queries. Only MASKED tiles look where a row must stop: the
    i-th query of the tile sees the keys 0 .. diagonal + i, and behind m there is none.
    """
    rows, keys = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    # A tile's offsets stay, int32; the pointers move on. Moving every element's pointer costs twice the registers.
    k_tile = keys[:, None] * k_row + tl.arange(0, D)[None, :]
    v_tile = keys[:, None] * v_row + tl.arange(0, D_V)[None, :]
    k_ptr += tl.cast(first, tl.int64) * k_row
    v_ptr += tl.cast(first, tl.int64) * v_row
    for start in range(first, last, BLOCK_N):
        if MASKED:
            inside = (keys < m - start)[:, None]
            k = tl.load(k_ptr + k_tile, mask=inside, other=0.0)  # [BLOCK_N, D]
            v = tl.load(v_ptr + v_tile, mask=inside, other=0.0)  # [BLOCK_N, D_V]
        else:
            k = tl.load(k_ptr + k_tile)
            v = tl.load(v_ptr + v_tile)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N], float32
        if MASKED:
            scores = tl.where((start + keys)[None, :] <= (diagonal + rows)[:, None], scores, float("-inf"))
        weights, factor, top, total = online_softmax(scores, scale, top, total)
        acc = tl.dot(weights.to(v.dtype), v, acc * factor[:, None], input_precision="ieee")
        k_ptr += BLOCK_N * k_row
        v_ptr += BLOCK_N * v_row
    return acc, top, total


# The tiles of one head of one sequence, n = 6 tiles of queries, m = 6 of keys. A program owns a row of tiles:
#
#              keys ->
#            +---+---+---+---+---+---+
#   queries  | \ |   |   |   |   |   |     its queries are read once and stay in registers or SRAM, as do acc
#      |     +---+---+---+---+---+---+     [BLOCK_M, D_V], top and total [BLOCK_M]
#      v     | o | \ |   |   |   |   |
#            +---+---+---+---+---+---+     o  every query sees every key: no mask
#            | o | o | \ |   |   |   |     \  the diagonal, or the end of the keys: masked
#   program  +---+---+---+---+---+---+        above the diagonal: skipped, neither read nor computed
#   ------>  | o | o | o | \ |   |   |
#            +---+---+---+---+---+---+     k and v tiles pass through SRAM, num_stages of them in flight
#
# Coalesced: every load and store runs along the head dimension, whose stride is 1; the rows of a tile are D or D_V
# elements of consecutive memory, wherever the strides put the next row. Programs of one head run next to each other
# and find each other's keys in the L2 cache; the longest rows of tiles start first, so that no long one runs alone at
# the end.
@triton.autotune(
    configs=WITHOUT_TENSOR_CORES if INTERPRETED else [*WITHOUT_TENSOR_CORES, *AMPERE, *HOPPER],
    key=["length_class", "D", "D_V"],
    prune_configs_by={"early_config_prune": candidates},
)
@triton.jit(do_not_specialize=["n", "m", "groups", "length_class"])
def _flash_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, n, m, groups, scale, length_class,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head, lse_row,
    D: tl.constexpr, D_V: tl.constexpr, VARLEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head of one sequence. `length_class` is only a key of the tuner."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2)
    q_start = tl.cast(0, tl.int64)
    k_start = tl.cast(0, tl.int64)
    if VARLEN:  # rows of this sequence: n and m become its own lengths
        q_start = tl.load(cu_q_ptr + sequence).to(tl.int64)
        k_start = tl.load(cu_k_ptr + sequence).to(tl.int64)
        n = (tl.load(cu_q_ptr + sequence + 1) - q_start).to(tl.int32)
        m = (tl.load(cu_k_ptr + sequence + 1) - k_start).to(tl.int32)
    first_row = tile * BLOCK_M
    if first_row >= n:
        return
    kv_head = head // groups

    # Pointers are moved to this tile in int64, since a row times its stride may exceed 2^31; offsets in it are int32.
    rows = tl.arange(0, BLOCK_M)
    row_mask = first_row + rows < n
    q_start += first_row
    q_tile = rows[:, None] * q_row + tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + q_start * q_row + head * q_head + q_tile, mask=row_mask[:, None], other=0.0)  # [BLOCK_M, D]
    k_ptr += k_start * k_row + kv_head * k_head
    v_ptr += k_start * v_row + kv_head * v_head

    # The n queries are the last n of m positions: query i of the sequence sees the keys 0 .. m - n + i.
    diagonal = m - n + first_row
    unmasked = tl.maximum(diagonal + 1, 0) // BLOCK_N * BLOCK_N  # whole tiles that the first query sees
    last = tl.minimum(diagonal + BLOCK_M, m)  # the last query sees no key from here on
    acc = tl.zeros([BLOCK_M, D_V], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc, top, total = _attend(
        acc, top, total, q, k_ptr, v_ptr, k_row, v_row, 0, unmasked, diagonal, m, scale,
        D, D_V, BLOCK_M, BLOCK_N, MASKED=False,
    )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, q, k_ptr, v_ptr, k_row, v_row, unmasked, last, diagonal, m, scale,
        D, D_V, BLOCK_M, BLOCK_N, MASKED=True,
    )  # fmt: skip
    out, lse = finish(acc, top, total)
    out_tile = rows[:, None] * out_row + tl.arange(0, D_V)[None, :]
    out_ptr += q_start * out_row + head * out_head
    tl.store(out_ptr + out_tile, out.to(out_ptr.dtype.element_ty), mask=row_mask[:, None])
    tl.store(lse_ptr + (q_start + rows) * lse_row + head, lse, mask=row_mask)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention: out `[N, H, d_v]` in q's type, and the logarithm `lse` `[N, H]` of each row's softmax sum.

    q `[N, H, d]`, k `[M, K, d]`, v `[M, K, d_v]`, float32, float16 or bfloat16, any strides but 1 for the last
    dimension; d and d_v from 16, 32, 64, 128; H a multiple of K: query head h reads key head `h // (H / K)`. The N
    queries are the last N of the M positions; a row without a key is 0 and its lse -inf. `scale` is 1/sqrt(d) when
    None.

    Many sequences, one after another: `cu_seqlens_q` and `cu_seqlens_k`, int32 `[B + 1]`, say that sequence i has the
    queries `cu_seqlens_q[i]` .. `cu_seqlens_q[i + 1]` - 1 and likewise its keys. Say `max_seqlen_q` too, the most
    queries of a sequence: without it the host waits for the device to tell. Raises ValueError for what is not
    supported.
    """
    check_operands(q, k, v)
    scale = softmax_scale(scale, q.shape[2])
    (n, n_heads, d), (m, n_kv_heads, d_v) = q.shape, v.shape
    varlen = cu_seqlens_q is not None
    n_sequences, longest = 1, n
    if varlen != (cu_seqlens_k is not None):
        raise ValueError("cu_seqlens_q and cu_seqlens_k go together: one of them is None")
    if varlen:
        n_sequences = max(0, cu_seqlens_q.numel() - 1)
        check_integers("cu_seqlens_q", cu_seqlens_q, (n_sequences + 1,), q)
        check_integers("cu_seqlens_k", cu_seqlens_k, (n_sequences + 1,), q)
        longest = max_seqlen_q
        if longest is None:
            longest = int(cu_seqlens_q.diff().max()) if n_sequences else 0  # waits for the device
    out = q.new_empty(n, n_heads, d_v)
    lse = torch.empty(n, n_heads, dtype=torch.float32, device=q.device)
    if n == 0 or n_heads == 0 or longest == 0:
        return out, lse
    with torch.cuda.device_of(q):
        _flash_kernel[lambda meta: (triton.cdiv(longest, meta["BLOCK_M"]), n_heads, n_sequences)](
            q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, n, m, n_heads // n_kv_heads, scale * LOG2_E.value,
            0 if longest <= 128 else 1 if longest <= 1024 else 2,  # length_class: short prompts want other tiles
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2], lse.stride(0),
            D=d, D_V=d_v, VARLEN=varlen,
        )  # fmt: skip
    return out, lse
