"""Attention of a few new tokens straight over a pool of blocks: the Triton kernels behind paged decoding.

The bottleneck: one new token per sequence attends to thousands, so decoding is reading keys and values, and gathering
them from their blocks into rows first reads them, writes them and reads them again. The ideas: find each tile of keys
through the block table, in place; take all query heads that share a key head in one program, so that it is read once;
and cut a long context into parts for several programs, since one sequence alone would occupy a few of a GPU's hundred
processors. The invariant: a part's `(out, lse)` is the exact attention over its keys, and parts are merged by the
rule that merges tiles (`online_softmax`).

Forward only, at most 16 new tokens a sequence (a longer step is a prefill). Kwon et al. 2023, section 4.3 (blocks);
Dao et al. 2023, "Flash-Decoding" (parts).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import INTERPRETED, check_integers, check_operands, softmax_scale, tensor_cores
from kernels.online_softmax import LOG2_E, finish, online_softmax

MAX_COUNT = 16  # new tokens of one sequence
MAX_ROWS = 64  # query heads of a group x new tokens in one program; 16 where products run in registers
PROGRAMS_PER_SM = 4  # wanted: about as many fit on a multiprocessor at a time; chosen by reasoning, not measured
SHORTEST_PART = 128  # keys: a shorter part spends more on its merge than it hides; not measured either
MAX_SPLITS = 128


def _tile(block_n: int, warps: int, stages: int) -> triton.Config:
    return triton.Config({"BLOCK_N": block_n}, num_warps=warps, num_stages=stages)


# What the tuner tries: keys of a tile, warps, stages of the pipeline. A tile's addresses come out of the table, so the
# pipeline has two loads behind one another, and 3 stages are one tile in flight, 7 are three.
WITHOUT_TENSOR_CORES = [_tile(32, 8, 1)]
WITH_TENSOR_CORES = [_tile(32, 4, 7), _tile(64, 4, 3), _tile(128, 8, 3)]


def candidates(_: list[triton.Config], arguments: dict, **_constants: object) -> list[triton.Config]:
    """The tiles worth trying on this GPU for this element type. (The tuner drops one that does not fit the GPU.)"""
    return WITH_TENSOR_CORES if tensor_cores(arguments["q_ptr"]) else WITHOUT_TENSOR_CORES


# One sequence of 9 tokens, 2 of them new, blocks of 4 tokens, 2 query heads to a key head, num_splits = 2:
#
#   block table  | 7 | 2 | 5 |          position p lies in block table[p // 4], slot p % 4
#                  |   |   |
#   keys         0 1 2 3 | 4 5 6 7 | 8 . . .      . unused slots: never read
#   row 0  token 0, head 0    x x x x | x x x x |           rows: the query heads of one key head, token by token,
#   row 1  token 0, head 1    x x x x | x x x x |           padded to BLOCK_R >= 16 for the tensor cores
#   row 2  token 1, head 0    x x x x | x x x x | x
#   row 3  token 1, head 1    x x x x | x x x x | x         x seen: token j sees the keys 0 .. length - count + j
#                             part 0 ->           part 1 ->   a program each: whole tiles of BLOCK_N keys
#
# q [BLOCK_R, D], acc [BLOCK_R, D_V], top and total [BLOCK_R] stay in registers or SRAM; tiles of keys and values pass
# through SRAM. Coalesced: the head dimension, stride 1, so that a slot is D consecutive elements; in a pool with heads
# outside and slots inside, a whole block of one head is. The table is read once a tile: BLOCK_N / block_size entries.
# Up to MAX_ROWS rows share one reading of keys and values.
@triton.autotune(
    configs=WITHOUT_TENSOR_CORES if INTERPRETED else [*WITHOUT_TENSOR_CORES, *WITH_TENSOR_CORES],
    key=["length_class", "D", "D_V", "BLOCK_R", "BLOCK_SIZE"],
    prune_configs_by={"early_config_prune": candidates},
)
@triton.jit(
    do_not_specialize=["groups", "num_splits", "row_tiles", "length_class"],
    do_not_specialize_on_alignment=["table_row", "lse_row", "lse_head", "lse_split"],
)
def _part_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, counts_ptr, out_ptr, lse_ptr,
    groups, num_splits, row_tiles, scale, length_class,
    q_row, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, table_row,
    out_row, out_head, out_split, lse_row, lse_head, lse_split,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The rows of one key head of one sequence over one part of its context. `length_class`: a key of the tuner."""
    split, sequence = tl.program_id(0), tl.program_id(2)
    kv_head, row_tile = (tl.program_id(1) // row_tiles).to(tl.int64), tl.program_id(1) % row_tiles
    count = tl.load(counts_ptr + sequence)
    length = tl.load(lengths_ptr + sequence)
    if row_tile * BLOCK_R >= count * groups:
        return
    q_start = tl.cast(0, tl.int32)  # the new tokens of the sequences before this one
    for first_sequence in range(0, sequence, 128):
        before = first_sequence + tl.arange(0, 128)
        q_start += tl.sum(tl.load(counts_ptr + before, mask=before < sequence, other=0), 0)

    rows = row_tile * BLOCK_R + tl.arange(0, BLOCK_R)
    token, head = rows // groups, kv_head * groups + rows % groups
    row_mask = token < count
    visible = length - count + token + 1  # keys 0 .. length - count + token
    q_rows = (q_start + token).to(tl.int64)
    q = tl.load(
        q_ptr + (q_rows * q_row + head * q_head)[:, None] + tl.arange(0, D)[None, :], mask=row_mask[:, None], other=0.0
    )  # [BLOCK_R, D]
    k_ptr += kv_head * k_head
    v_ptr += kv_head * v_head
    table_ptr += tl.cast(sequence, tl.int64) * table_row

    # Parts are whole tiles long, so that only the last tile of the sequence is ragged. A part may be empty.
    part = tl.cdiv(tl.cdiv(length, num_splits), BLOCK_N) * BLOCK_N
    first = split * part
    last = tl.minimum(first + part, length)
    acc = tl.zeros([BLOCK_R, D_V], dtype=tl.float32)
    top = tl.full([BLOCK_R], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_R], dtype=tl.float32)
    for start in range(first, last, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        inside = position < last
        block = tl.load(table_ptr + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slot = position % BLOCK_SIZE
        k_rows = (block * k_block + slot * k_slot)[:, None]
        v_rows = (block * v_block + slot * v_slot)[:, None]
        k = tl.load(k_ptr + k_rows + tl.arange(0, D)[None, :], mask=inside[:, None], other=0.0)  # [BLOCK_N, D]
        v = tl.load(v_ptr + v_rows + tl.arange(0, D_V)[None, :], mask=inside[:, None], other=0.0)  # [BLOCK_N, D_V]
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_R, BLOCK_N], float32
        scores = tl.where(position[None, :] < visible[:, None], scores, float("-inf"))
        weights, factor, top, total = online_softmax(scores, scale, top, total)
        acc = tl.dot(weights.to(v.dtype), v, acc * factor[:, None], input_precision="ieee")

    out, lse = finish(acc, top, total)
    out_ptr += split * out_split
    lse_ptr += split * lse_split
    out_tile = out_ptr + (q_rows * out_row + head * out_head)[:, None] + tl.arange(0, D_V)[None, :]
    tl.store(out_tile, out.to(out_ptr.dtype.element_ty), mask=row_mask[:, None])
    tl.store(lse_ptr + q_rows * lse_row + head * lse_head, lse, mask=row_mask)


# One program a row (token, head). Its parts lie behind one another, [num_splits, D_V] and [num_splits], so both loads
# are coalesced; acc stays in registers. A part counts as one key: its score is its lse, its value its out.
@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(part_out_ptr, part_lse_ptr, out_ptr, lse_ptr, num_splits, D_V: tl.constexpr, BLOCK_S: tl.constexpr):
    """Merge the parts of one row; all tensors are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, D_V)
    acc = tl.zeros([1, D_V], dtype=tl.float32)
    top = tl.full([1], float("-inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        inside = split < num_splits
        parts = row * num_splits + split
        lse = tl.load(part_lse_ptr + parts, mask=inside, other=float("-inf"))
        out = tl.load(part_out_ptr + parts[:, None] * D_V + dims[None, :], mask=inside[:, None], other=0.0)
        weights, factor, top, total = online_softmax(lse[None, :], LOG2_E, top, total)
        acc = acc * factor[:, None] + tl.sum(tl.trans(weights) * out, 0)[None, :]
    merged, merged_lse = finish(acc, top, total)
    tl.store(out_ptr + row * D_V + dims[None, :], merged.to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + row + tl.arange(0, 1), merged_lse)


def choose_splits(programs: int, longest: int, num_sms: int) -> int:
    """Parts to cut every context into, where one part would give `programs` programs and no context has more than
    `longest` keys: enough programs for `num_sms` multiprocessors, no part shorter than SHORTEST_PART keys.
    """
    wanted = triton.cdiv(PROGRAMS_PER_SM * num_sms, max(1, programs))
    return max(1, min(wanted, longest // SHORTEST_PART, MAX_SPLITS))


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    counts: Tensor,
    scale: float | None = None,
    num_splits: int | None = None,
    max_count: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the newest tokens of B sequences over their blocks: out `[N, H, d_v]` and lse `[N, H]`.

    q `[N, H, d]`: the `counts[i]` new tokens of sequence i, one sequence after another, N in all. k_pool `[blocks,
    block_size, K, d]` and v_pool `[blocks, block_size, K, d_v]`, block_size a power of two, any strides but 1 for the
    last dimension. Position p of sequence i lies in block `block_tables[i, p // block_size]`, slot `p % block_size`.
    Its new token j sees the keys 0 .. `lengths[i] - counts[i] + j`: `lengths` counts the new tokens too. Element
    types, head sizes and grouped heads as in `flash_attention`. block_tables `[B, max_blocks]`, lengths and counts
    `[B]` are int32; what they name is trusted, unused entries and slots may hold anything.

    `num_splits` parts of each context run side by side (None: `choose_splits`). Say `max_count`, the largest count:
    without it the host waits for the device to tell. Raises ValueError for what is not supported.
    """
    max_count = _check(q, k_pool, v_pool, block_tables, lengths, counts, num_splits, max_count)
    scale = softmax_scale(scale, q.shape[2])
    (n, n_heads, d), (_, block_size, n_kv_heads, d_v) = q.shape, v_pool.shape
    out = q.new_empty(n, n_heads, d_v)
    lse = torch.empty(n, n_heads, dtype=torch.float32, device=q.device)
    if n == 0 or n_heads == 0 or max_count == 0:
        return out, lse
    groups, longest = n_heads // n_kv_heads, block_tables.shape[1] * block_size  # no context is longer
    block_r = min(MAX_ROWS if tensor_cores(q) else 16, max(16, triton.next_power_of_2(groups * max_count)))
    row_tiles = triton.cdiv(groups * max_count, block_r)
    if num_splits is None:
        sms = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        num_splits = choose_splits(len(counts) * n_kv_heads * row_tiles, longest, sms)
    part_out, part_lse = out.unsqueeze(2), lse.unsqueeze(2)  # one part is the whole
    if num_splits > 1:
        part_out = torch.empty(n, n_heads, num_splits, d_v, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(n, n_heads, num_splits, dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        _part_kernel[num_splits, n_kv_heads * row_tiles, len(counts)](
            q, k_pool, v_pool, block_tables, lengths, counts, part_out, part_lse,
            groups, num_splits, row_tiles, scale * LOG2_E.value, 0 if longest <= 1024 else 1,
            *q.stride()[:2], *k_pool.stride()[:3], *v_pool.stride()[:3], block_tables.stride(0),
            *part_out.stride()[:3], *part_lse.stride(),
            D=d, D_V=d_v, BLOCK_SIZE=block_size, BLOCK_R=block_r,
        )  # fmt: skip
        if num_splits > 1:
            _merge_kernel[n * n_heads,](part_out, part_lse, out, lse, num_splits, D_V=d_v, BLOCK_S=16)
    return out, lse


def _check(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    counts: Tensor,
    num_splits: int | None,
    max_count: int | None,
) -> int:
    """Raise ValueError for what `paged_attention` does not take; return the largest count."""
    check_operands(q, k_pool, v_pool, "k_pool", "v_pool", "[blocks, block_size, K, d]")
    block_size = k_pool.shape[1]
    if block_size < 1 or block_size & (block_size - 1):
        raise ValueError(f"block_size={block_size} is not supported: it must be a power of two")
    check_integers("counts", counts, (counts.numel(),), q)
    check_integers("lengths", lengths, (len(counts),), q)
    check_integers("block_tables", block_tables, (len(counts), block_tables.shape[-1]), q)
    if num_splits is not None and num_splits < 1:
        raise ValueError(f"num_splits={num_splits} is not supported: it must be at least 1")
    if max_count is None:
        max_count = int(counts.max()) if len(counts) else 0  # waits for the device
    if max_count > MAX_COUNT:
        raise ValueError(f"{max_count} new tokens of one sequence are not supported: the kernel takes {MAX_COUNT}")
    return max_count
