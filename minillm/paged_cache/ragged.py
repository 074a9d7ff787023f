"""A ragged step: n_i new tokens for sequence i, where they go, and attention straight over blocks.

Prefill, decode, a slice of a prompt, a few guesses to verify: to a step they are counts. On a CPU blocks are gathered
into rows first, a copy: predicted three times the bytes of reading in place, since each row is read, written and read
again. On a GPU chapter 4's kernels read the blocks where they lie.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from minillm.device import use_kernels
from minillm.kv_cache import AttentionFunction, PlainBuffer
from minillm.naive_attention import naive_attention, scaled_products
from minillm.paged_cache.in_place import KernelGroup, attend_in_place, kernel_groups

# Sequences with few new tokens attend together, padded to the longest and to the most tokens among them: one call
# costs about as much as PADDING gathered rows more. ROWS_TOGETHER bounds the copy. Measured with 11 sequences of 140
# tokens on two threads: 6.0 ms a step, in pieces of 1,024 rows 7.3.
PADDING, ROWS_TOGETHER = 1024, 8192
FEW = (1, 8, 64)  # a sequence joins others that have at most so many new tokens too; with more it attends alone


class Part(NamedTuple):
    """Sequences of a step that attend in one call: one with any number of new tokens, or B with few each.

    One: `rows` is a slice of the step's N, and `length` its tokens, the new ones included. B of them: `rows` `[B, n]`
    are padded, each sequence's last one repeated; `hidden` `[B, n, m]` marks what a row must not see, and `unused`
    are the numbers of those among the B·m gathered keys that none of its sequence's rows sees. `block_rows` say where
    to gather the blocks of all tables, one after another, each padded to the longest.
    """

    rows: slice | Tensor
    block_rows: Tensor
    length: int = 0
    hidden: Tensor | None = None
    unused: Tensor | None = None


@dataclass
class RaggedStep:
    """Where the N new tokens of B sequences, one after another, go and what they see.

    `counts` new tokens and `lengths` tokens in all, the new ones included, of each sequence; `tables` `[B, longest]`
    block numbers, filled up with the first; `positions` and `slots` `[N]` of the new tokens.
    """

    counts: list[int]
    lengths: list[int]
    tables: Tensor
    positions: Tensor
    slots: Tensor
    block_size: int
    pool: PlainBuffer  # any that the step reads: blocks lie alike in all

    @classmethod
    def of(
        cls,
        sequences: Sequence[tuple[Sequence[int], int, int]],
        block_size: int,
        pool: PlainBuffer,
        device: torch.device,
    ) -> "RaggedStep":
        """The step for (block table, length before it, new tokens) of each sequence."""
        new = [(table, p) for table, length, n in sequences for p in range(length, length + n)]
        slots = [table[p // block_size] * block_size + p % block_size for table, p in new]
        longest = max(len(table) for table, _, _ in sequences)
        padded = [[*table, *(table[:1] or [0]) * (longest - len(table))] for table, _, _ in sequences]
        return cls(
            counts=[n for _, _, n in sequences],
            lengths=[length + n for _, length, n in sequences],
            tables=torch.tensor(padded, dtype=torch.int32, device=device),
            positions=torch.tensor([p for _, p in new], dtype=torch.int64, device=device),
            slots=torch.tensor(slots, dtype=torch.int64, device=device),
            block_size=block_size,
            pool=pool,
        )

    @cached_property
    def starts(self) -> list[int]:
        """The first row of each sequence."""
        return [0, *itertools.accumulate(self.counts)][:-1]

    @cached_property
    def parts(self) -> list[Part]:
        """What attends in one call: sequences of similar length with few new tokens in groups, the others alone."""
        n_blocks = [-(-m // self.block_size) for m in self.lengths]
        parts = [self._alone(i, n_blocks[i]) for i, n in enumerate(self.counts) if n > FEW[-1]]
        for least, most in itertools.pairwise((0, *FEW)):
            few = sorted((i for i, n in enumerate(self.counts) if least < n <= most), key=lambda i: -n_blocks[i])
            while few:
                width = n_blocks[few[0]]  # the longest left: the group is padded to it
                padding, size = 0, 1
                while size < min(len(few), ROWS_TOGETHER // (width * self.block_size)) and padding <= PADDING:
                    padding += (width - n_blocks[few[size]]) * self.block_size
                    size += 1
                group, few = few[:size], few[size:]
                parts.append(self._together(group, width) if size > 1 else self._alone(group[0], width))
        return parts

    @cached_property
    def kernel_groups(self) -> list[KernelGroup]:
        """The same for the kernels of a GPU."""
        return kernel_groups(self.counts, self.lengths, self.tables, self.block_size)

    def _alone(self, i: int, n_blocks: int) -> Part:
        rows = slice(self.starts[i], self.starts[i] + self.counts[i])
        return Part(rows, self.pool.block_rows(self.tables[i, :n_blocks], self.block_size), self.lengths[i])

    def _together(self, group: list[int], width: int) -> Part:
        device = self.tables.device
        most = max(self.counts[i] for i in group)
        rows = [[self.starts[i] + min(j, self.counts[i] - 1) for j in range(most)] for i in group]
        rows = torch.tensor(rows, device=device)
        hidden = torch.arange(width * self.block_size, device=device) > self.positions[rows][:, :, None]
        blocks = self.tables[torch.tensor(group, device=device), :width].flatten()
        block_rows = self.pool.block_rows(blocks, self.block_size)
        # A sequence's last row sees most of it.
        return Part(rows, block_rows, hidden=hidden, unused=hidden[:, -1].flatten().nonzero()[:, 0])


def ragged_attention(
    q: Tensor,
    layer: int,
    keys: PlainBuffer,
    values: PlainBuffer,
    step: RaggedStep,
    scale: float | None = None,
    attention: AttentionFunction = naive_attention,
) -> Tensor:
    """Every sequence's new queries over its own blocks of a layer: q `[N, H, d]` -> `[N, H, d_v]`.

    On a GPU the kernels of chapter 4 read the blocks in place, and `attention` is not asked.
    """
    if use_kernels(q, values.data.shape[-1], step.block_size):
        return attend_in_place(q, layer, keys, values, step.kernel_groups, step.block_size, scale)
    outs = []
    for part in step.parts:
        k, v = (partial(buffer.read_blocks, layer, part.block_rows, step.block_size) for buffer in (keys, values))
        if part.hidden is None:
            outs.append(attention(q[part.rows], k()[: part.length], v()[: part.length], scale))
        else:
            outs.append(_attend_together(q[part.rows], k, v, part, scale).flatten(0, 1))
    if len(outs) == 1 and step.parts[0].hidden is None:
        return outs[0]
    out = outs[0].new_empty(len(q), *outs[0].shape[1:])
    for part, rows in zip(step.parts, outs, strict=True):
        out[part.rows if part.hidden is None else part.rows.flatten()] = rows  # what was repeated is written again
    return out


def _attend_together(
    q: Tensor, read_k: Callable[[], Tensor], read_v: Callable[[], Tensor], part: Part, scale: float | None
) -> Tensor:
    """n queries each of B sequences, q `[B, n, H, d]`, over their gathered rows `[B·m, K, d]` -> `[B, n, H, d_v]`.

    Heads never mix, so the heads of B sequences are B times as many heads of one. Values are gathered when keys are
    done with: one of them fits a core's cache, both may not.
    """
    (n_sequences, n, n_heads, d), m = q.shape, part.hidden.shape[-1]
    k = read_k()
    n_kv_heads = k.shape[1]
    groups = n_heads // n_kv_heads
    q = q.view(n_sequences, n, n_kv_heads, groups, d).permute(1, 2, 0, 3, 4).reshape(n, -1, d)  # [n, K·B·G, d]
    k = k.transpose(0, 1).reshape(n_kv_heads * n_sequences, m, d).transpose(0, 1)  # [m, K·B, d]
    scores = scaled_products(q, k, scale).view(n_kv_heads, n_sequences, groups, n, m)
    weights = scores.masked_fill_(part.hidden[:, None], -math.inf).softmax(-1)
    # The rows behind a sequence's end hold anything, NaN too, and zero times NaN is NaN.
    v = read_v().index_fill_(0, part.unused, 0.0).transpose(0, 1)  # [K, B·m, d_v]
    out = torch.bmm(weights.view(-1, groups * n, m), v.reshape(n_kv_heads * n_sequences, m, -1))
    largest = torch.finfo(out.dtype).max  # as in `naive_attention`
    out = out.clamp_(-largest, largest)
    return out.view(n_kv_heads, n_sequences, groups, n, -1).permute(1, 3, 0, 2, 4).reshape(n_sequences, n, n_heads, -1)
