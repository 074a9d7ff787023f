"""A ragged step: n_i new tokens for sequence i, where they go, and attention straight over blocks.

Prefill, decode, a slice of a prompt, a few guesses to verify: to a step they are counts. On a CPU blocks are gathered
into rows first, a copy: predicted three times the bytes of reading in place, since each row is read, written and read
again. On a GPU chapter 4's kernels read the blocks where they lie.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from minillm.device import use_kernels
from minillm.kv_cache import AttentionFunction, PlainBuffer
from minillm.naive_attention import attention_scores, naive_attention
from minillm.paged_cache.in_place import KernelGroup, attend_in_place, kernel_groups

# Short sequences that decode are gathered together, up to so many rows: the calls are fewer, and the copy still fits
# a core's cache. Measured: 16 sequences of 128 tokens take half the time, 16 of 1,024 in one piece five times as long.
ROWS_TOGETHER = 1024


class Part(NamedTuple):
    """Sequences of a step that attend in one call: one with any number of new tokens, or several with one each.

    `rows` of the step's N, `blocks` of all tables one after another, each padded to the longest; `hidden` `[B, m]`
    marks what lies behind the end of each sequence, None for one sequence, whose `length` says it. `unused` are the
    numbers of these rows among the B·m gathered ones.
    """

    rows: slice | Tensor
    blocks: Tensor
    length: int
    hidden: Tensor | None = None
    unused: Tensor | None = None


@dataclass
class RaggedStep:
    """Where the N new tokens of B sequences, one after another, go and what they see.

    `counts` new tokens and `lengths` tokens in all, the new ones included, of each sequence; `tables` `[B, longest]`
    block numbers, filled up with 0 (never read); `positions` and `slots` `[N]` of the new tokens.
    """

    counts: list[int]
    lengths: list[int]
    tables: Tensor
    positions: Tensor
    slots: Tensor
    block_size: int

    @classmethod
    def of(
        cls, sequences: Sequence[tuple[Sequence[int], int, int]], block_size: int, device: torch.device
    ) -> "RaggedStep":
        """The step for (block table, length before it, new tokens) of each sequence."""
        new = [(table, p) for table, length, n in sequences for p in range(length, length + n)]
        slots = [table[p // block_size] * block_size + p % block_size for table, p in new]
        longest = max(len(table) for table, _, _ in sequences)
        padded = [[*table, *[0] * (longest - len(table))] for table, _, _ in sequences]
        return cls(
            counts=[n for _, _, n in sequences],
            lengths=[length + n for _, length, n in sequences],
            tables=torch.tensor(padded, dtype=torch.int32, device=device),
            positions=torch.tensor([p for _, p in new], dtype=torch.int64, device=device),
            slots=torch.tensor(slots, dtype=torch.int64, device=device),
            block_size=block_size,
        )

    @cached_property
    def starts(self) -> list[int]:
        """The first row of each sequence."""
        return [0, *itertools.accumulate(self.counts)][:-1]

    @cached_property
    def parts(self) -> list[Part]:
        """What attends in one call: what decodes in groups of similar length, everything else alone."""
        n_blocks = [-(-m // self.block_size) for m in self.lengths]
        parts = [self._alone(i, n_blocks[i]) for i, n in enumerate(self.counts) if n > 1]
        decoding = sorted((i for i, n in enumerate(self.counts) if n == 1), key=lambda i: -n_blocks[i])
        while decoding:
            width = n_blocks[decoding[0]]  # the longest left: the group is padded to it
            size = max(1, ROWS_TOGETHER // (width * self.block_size))
            group, decoding = decoding[:size], decoding[size:]
            parts.append(self._together(group, width) if len(group) > 1 else self._alone(group[0], width))
        return parts

    @cached_property
    def kernel_groups(self) -> list[KernelGroup]:
        """The same for the kernels of a GPU."""
        return kernel_groups(self.counts, self.lengths, self.tables, self.block_size)

    def _alone(self, i: int, n_blocks: int) -> Part:
        rows = slice(self.starts[i], self.starts[i] + self.counts[i])
        return Part(rows, self.tables[i, :n_blocks], self.lengths[i])

    def _together(self, group: list[int], width: int) -> Part:
        device = self.tables.device
        ends = torch.tensor([self.lengths[i] for i in group], device=device)
        hidden = torch.arange(width * self.block_size, device=device) >= ends[:, None]
        rows = torch.tensor([self.starts[i] for i in group], device=device)
        blocks = self.tables[torch.tensor(group, device=device), :width].flatten()
        return Part(rows, blocks, max(self.lengths[i] for i in group), hidden, hidden.flatten().nonzero()[:, 0])


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
        k = keys.read_blocks(layer, part.blocks, step.block_size)
        v = values.read_blocks(layer, part.blocks, step.block_size)
        if part.hidden is None:
            outs.append(attention(q[part.rows], k[: part.length], v[: part.length], scale))
        else:
            outs.append(_decode_together(q[part.rows], k, v, part, scale))
    if len(outs) == 1 and isinstance(step.parts[0].rows, slice):
        return outs[0]
    out = outs[0].new_empty(len(q), *outs[0].shape[1:])
    for part, rows in zip(step.parts, outs, strict=True):
        out[part.rows] = rows
    return out


def _decode_together(q: Tensor, k: Tensor, v: Tensor, part: Part, scale: float | None) -> Tensor:
    """One query each of B sequences, q `[B, H, d]`, over their gathered rows k, v `[B·m, K, d]` -> `[B, H, d_v]`.

    Heads never mix, so the heads of B sequences are B times as many heads of one.
    """
    (n_sequences, n_heads, d), (n_kv_heads, d_v) = q.shape, v.shape[1:]
    m, heads, groups = part.hidden.shape[1], n_kv_heads * n_sequences, n_heads // n_kv_heads
    q = q.view(n_sequences, n_kv_heads, groups, d).transpose(0, 1).reshape(1, heads * groups, d)
    k = k.transpose(0, 1).reshape(heads, m, d).transpose(0, 1)  # [m, K·B, d]
    scores = attention_scores(q, k, scale).view(n_kv_heads, n_sequences, groups, m)
    weights = scores.masked_fill_(part.hidden[:, None], -math.inf).softmax(-1)
    # The rows behind a sequence's end hold anything, NaN too, and zero times NaN is NaN.
    v = v.index_fill_(0, part.unused, 0.0).transpose(0, 1)
    out = torch.bmm(weights.view(heads, groups, m), v.reshape(heads, m, d_v))
    return out.view(n_kv_heads, n_sequences, groups, d_v).transpose(0, 1).reshape(n_sequences, n_heads, d_v)
