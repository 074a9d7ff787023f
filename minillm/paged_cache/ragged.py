"""A ragged step: n_i new tokens for sequence i, where they go, and attention straight over blocks.

Prefill, decode, a slice of a prompt, a few guesses to verify: to a step they are counts. On a GPU one kernel will
read the blocks in place (chapter 4). Here blocks are gathered into rows first, a copy: predicted three times the
bytes of reading in place, since each row is read, written and read again.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minillm.kv_cache import AttentionFunction, PlainBuffer
from minillm.naive_attention import attention_scores, naive_attention

# Short sequences that decode are gathered together, up to so many rows: the calls are fewer, and the copy still fits
# a core's cache. Measured: 16 sequences of 128 tokens take half the time, 16 of 1,024 in one piece five times as long.
ROWS_TOGETHER = 1024


class Part(NamedTuple):
    """Sequences of a step that attend in one call: one with any number of new tokens, or several with one each.

    `rows` of the step's N, `blocks` of all tables one after another, each padded to the longest; `hidden` `[B, m]`
    marks what lies behind the end of each sequence, None for one sequence, whose `length` says it.
    """

    rows: slice | Tensor
    blocks: Tensor
    length: int
    hidden: Tensor | None


class RaggedStep(NamedTuple):
    """Where the N new tokens of B sequences, one after another, go and what they see.

    `counts` new tokens and `lengths` tokens in all, the new ones included, of each sequence; `tables` `[B, longest]`
    block numbers, filled up with 0 (never read); `positions` and `slots` `[N]` of the new tokens; `parts` to attend.
    """

    counts: list[int]
    lengths: list[int]
    tables: Tensor
    positions: Tensor
    slots: Tensor
    parts: list[Part]


def ragged_step(
    sequences: Sequence[tuple[Sequence[int], int, int]], block_size: int, device: torch.device
) -> RaggedStep:
    """The step for (block table, length before it, new tokens) of each sequence."""
    new = [(table, p) for table, length, n in sequences for p in range(length, length + n)]
    slots = [table[p // block_size] * block_size + p % block_size for table, p in new]
    longest = max(len(table) for table, _, _ in sequences)
    padded = [[*table, *[0] * (longest - len(table))] for table, _, _ in sequences]
    tables = torch.tensor(padded, dtype=torch.int32, device=device)
    counts = [n for _, _, n in sequences]
    lengths = [length + n for _, length, n in sequences]
    return RaggedStep(
        counts,
        lengths,
        tables,
        positions=torch.tensor([p for _, p in new], dtype=torch.int64, device=device),
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        parts=list(_parts(counts, lengths, tables, block_size)),
    )


def _parts(counts: list[int], lengths: list[int], tables: Tensor, block_size: int) -> Iterator[Part]:
    """Split a step: what decodes in groups of similar length, everything else alone. Rows without a token: nowhere."""
    starts = [sum(counts[:i]) for i in range(len(counts))]
    blocks = [-(-m // block_size) for m in lengths]
    decoding = sorted((i for i, n in enumerate(counts) if n == 1), key=lambda i: -blocks[i])
    while decoding:
        width = blocks[decoding[0]]  # the longest left: the group is padded to it
        size = max(1, ROWS_TOGETHER // (width * block_size))
        group, decoding = decoding[:size], decoding[size:]
        if len(group) == 1:
            yield _alone(group[0], counts, lengths, starts, blocks, tables)
            continue
        chosen = torch.tensor(group, device=tables.device)
        ends = torch.tensor([lengths[i] for i in group], device=tables.device)
        hidden = torch.arange(width * block_size, device=tables.device) >= ends[:, None]
        rows = torch.tensor([starts[i] for i in group], device=tables.device)
        yield Part(rows, tables[chosen, :width].flatten(), max(lengths[i] for i in group), hidden)
    for i, n in enumerate(counts):
        if n > 1:
            yield _alone(i, counts, lengths, starts, blocks, tables)


def _alone(i: int, counts: list[int], lengths: list[int], starts: list[int], blocks: list[int], tables: Tensor) -> Part:
    return Part(slice(starts[i], starts[i] + counts[i]), tables[i, : blocks[i]], lengths[i], hidden=None)


def ragged_attention(
    q: Tensor,
    layer: int,
    keys: PlainBuffer,
    values: PlainBuffer,
    step: RaggedStep,
    block_size: int,
    scale: float | None = None,
    attention: AttentionFunction = naive_attention,
) -> Tensor:
    """Every sequence's new queries over its own blocks of a layer: q `[N, H, d]` -> `[N, H, d_v]`."""
    outs = []
    for part in step.parts:
        k = keys.read_blocks(layer, part.blocks, block_size)
        v = values.read_blocks(layer, part.blocks, block_size)
        if part.hidden is None:
            outs.append(attention(q[part.rows], k[: part.length], v[: part.length], scale))
        else:
            outs.append(_decode_together(q[part.rows], k, v, part.hidden, scale))
    if len(outs) == 1 and isinstance(step.parts[0].rows, slice):
        return outs[0]
    out = outs[0].new_empty(len(q), *outs[0].shape[1:])
    for part, rows in zip(step.parts, outs, strict=True):
        out[part.rows] = rows
    return out


def _decode_together(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float | None) -> Tensor:
    """One query each of B sequences, q `[B, H, d]`, over their gathered rows k, v `[B·m, K, d]` -> `[B, H, d_v]`.

    Heads never mix, so the heads of B sequences are B times as many heads of one.
    """
    (n_sequences, n_heads, d), (n_kv_heads, d_v) = q.shape, v.shape[1:]
    m, heads, groups = hidden.shape[1], n_kv_heads * n_sequences, n_heads // n_kv_heads
    q = q.view(n_sequences, n_kv_heads, groups, d).transpose(0, 1).reshape(1, heads * groups, d)
    k = k.transpose(0, 1).reshape(heads, m, d).transpose(0, 1)  # [m, K·B, d]
    scores = attention_scores(q, k, scale).view(n_kv_heads, n_sequences, groups, m)
    weights = scores.masked_fill_(hidden[:, None], -math.inf).softmax(-1)
    # The rows behind a sequence's end hold anything, NaN too, and zero times NaN is NaN.
    v = v.transpose(0, 1).view(n_kv_heads, n_sequences, m, d_v).masked_fill_(hidden[:, :, None], 0.0)
    out = torch.bmm(weights.view(heads, groups, m), v.view(heads, m, d_v))
    return out.view(n_kv_heads, n_sequences, groups, d_v).transpose(0, 1).reshape(n_sequences, n_heads, d_v)
