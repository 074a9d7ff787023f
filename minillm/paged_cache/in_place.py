"""A ragged step through the Triton kernels of chapter 4, where a GPU is.

Sequences with a few new tokens are read through their tables, in place. Of a sequence with many (prefill) each key
serves many queries: its rows are gathered once, which then hardly counts, and the kernel for whole sequences runs.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from minillm.kv_cache import PlainBuffer

MOST_IN_PLACE = 16  # new tokens of a sequence that `kernels.paged_attention` takes


class KernelGroup(NamedTuple):
    """Sequences of a step that go into one launch.

    `rows` `[n]` of the step's N; `counts`, `lengths`, `tables` of these sequences; `most` the largest count.
    `gathered` is None for those read in place, else the slots `[M]` of all their tokens, and the cumulative counts
    and lengths from 0, int32 `[B + 1]` each.
    """

    rows: Tensor
    counts: Tensor
    lengths: Tensor
    tables: Tensor
    most: int
    gathered: tuple[Tensor, Tensor, Tensor] | None


def kernel_groups(counts: list[int], lengths: list[int], tables: Tensor, block_size: int) -> list[KernelGroup]:
    """At most two: sequences read in place, and sequences gathered."""
    device = tables.device

    def integers(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    starts = [0, *itertools.accumulate(counts)]
    few = [i for i, n in enumerate(counts) if 0 < n <= MOST_IN_PLACE]
    many = [i for i, n in enumerate(counts) if n > MOST_IN_PLACE]
    groups = []
    for chosen in filter(None, (few, many)):
        n, m = [counts[i] for i in chosen], [lengths[i] for i in chosen]
        own_tables = tables[integers(chosen)]
        gathered = None
        if chosen is many:
            slots = own_tables.long()[:, :, None] * block_size + torch.arange(block_size, device=device)
            flat = slots.flatten(1)
            ends = (integers([0, *itertools.accumulate(x)]) for x in (n, m))
            gathered = (torch.cat([row[:length] for row, length in zip(flat, m, strict=True)]), *ends)
        rows = integers([r for i in chosen for r in range(starts[i], starts[i] + counts[i])], torch.int64)
        groups.append(KernelGroup(rows, integers(n), integers(m), own_tables, max(n), gathered))
    return groups


def attend_in_place(
    q: Tensor,
    layer: int,
    keys: PlainBuffer,
    values: PlainBuffer,
    groups: list[KernelGroup],
    block_size: int,
    scale: float | None,
) -> Tensor:
    """q `[N, H, d]` of a step over its sequences' blocks: `[N, H, d_v]`."""
    from kernels.flash_attention import flash_attention  # Triton is optional
    from kernels.paged_attention import paged_attention

    out = None
    for group in groups:
        rows = q if len(group.rows) == len(q) else q[group.rows]
        if group.gathered is None:
            pools = keys.blocks(layer, block_size), values.blocks(layer, block_size)
            part, _ = paged_attention(
                rows, *pools, group.tables, group.lengths, group.counts, scale, max_count=group.most
            )
        else:
            slots, query_ends, key_ends = group.gathered
            k, v = keys.read(layer, slots), values.read(layer, slots)
            part, _ = flash_attention(rows, k, v, scale, query_ends, key_ends, group.most)
        if len(groups) == 1:
            return part
        out = part.new_empty(len(q), *part.shape[1:]) if out is None else out
        out[group.rows] = part
    return out
