"""Chapter 4: FlashAttention. The same result without ever holding all the scores.

The bottleneck: naive attention writes n x m scores to memory and reads them back, twice; for long texts these bytes
are what attention waits for, and they do not fit. The idea: softmax can be computed in one pass. Work on tiles that
fit into fast memory, and merge what a tile found with what the tiles before it found. The invariant: a partial
result (out, lse) over any set of keys is exact for these keys, and `merge` of two disjoint sets is exact for both, in
any order. (lse is log-sum-exp, what softmax divided by: the running maximum plus the logarithm of the running sum.)

Here the tiles are PyTorch tensors: it saves memory, not time, and shows what moves. `kernels.flash_attention` is the
same loop in Triton, where a tile really stays on the chip. Milakov and Gimelshein 2018 (one-pass softmax); Dao et al.
2022, "FlashAttention", algorithm 1; the merge: Rabe and Staats 2021.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from minillm.device import use_kernels
from minillm.naive_attention import by_head_groups, scaled_products

QUERY_TILE = KEY_TILE = 128  # 64 KiB of float32 scores a head: fast memory of a GPU's processor holds about 200 KiB


def one_pass_softmax(pieces: Iterable[Tensor]) -> tuple[Tensor, list[tuple[float, float]]]:
    """Softmax of a vector that arrives in `pieces` `[m_i]`, seen once; and (running maximum, running sum) after each.

    When a larger maximum turns up, the sum so far is rescaled by exp(old - new): nothing is read again. The numbers
    themselves are kept here only to return the softmax; attention multiplies them with v at once instead.
    """
    largest, total, seen, trace = -math.inf, 0.0, [], []
    for piece in pieces:
        new = max(largest, piece.max().item())
        total = total * math.exp(largest - new) + (piece - new).exp().sum().item()
        largest = new
        seen.append(piece)
        trace.append((largest, total))
    return (torch.cat(seen) - largest).exp() / total, trace


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from the attention over each: out `[..., d_v]`, lse `[...]`.

    `lse` is the natural logarithm of the sum of exponentiated scores: what softmax divided by, and so the weight of a
    partial result. Minus infinity: no key seen, whose `out` counts nothing. Associative and commutative, so tiles,
    splits of a long context, and shared prefixes can all be joined in any order.
    """
    largest = torch.maximum(lse_a, lse_b)
    shift = largest.masked_fill(largest == -math.inf, 0.0)  # no key on either side: -inf minus -inf is no number
    weight_a, weight_b = (lse_a - shift).exp(), (lse_b - shift).exp()
    total = weight_a + weight_b
    safe = total.masked_fill(total == 0, 1.0)
    out = out_a * (weight_a / safe)[..., None] + out_b * (weight_b / safe)[..., None]
    return out.to(out_a.dtype), total.log() + shift


class Tile(NamedTuple):
    """Queries `rows` against keys `columns`; `diagonal` is m - n shifted to the tile: row r sees column c if
    c <= r + diagonal.
    """

    rows: slice
    columns: slice
    diagonal: int


def tiles(n: int, m: int, query_tile: int = QUERY_TILE, key_tile: int = KEY_TILE) -> Iterator[Tile]:
    """The tiles of n queries (the last of m positions) with anything to see; those above the diagonal are skipped."""
    for i in range(0, n, query_tile):
        last = min(i + query_tile, n)
        for j in range(0, m - n + last, key_tile):  # the last row of the tile sees keys below m - n + last
            yield Tile(slice(i, last), slice(j, min(j + key_tile, m)), m - n + i - j)


def attend_tile(q: Tensor, k: Tensor, v: Tensor, diagonal: int, scale: float | None) -> tuple[Tensor, Tensor]:
    """(out `[n, H, d_v]`, lse `[n, H]`) of one tile: q `[n, H, d]`, k `[m, K, d]`, v `[m, K, d_v]`."""
    (n, n_heads, _), (m, n_kv_heads, _) = q.shape, v.shape
    groups = n_heads // n_kv_heads
    scores = scaled_products(q, k, scale)  # [K, G, n, m]: the only ones that exist
    if diagonal < m - 1:  # else even the first row sees every key
        scores.masked_fill_(torch.ones(n, m, dtype=torch.bool, device=q.device).triu_(diagonal + 1), -math.inf)
    # In 16 bits lse would be rounded by more than what it weighs: it has 32 at least, and the weights their own sum.
    lse = scores.to(torch.promote_types(scores.dtype, torch.float32)).logsumexp(-1)  # [K, G, n]
    weights = scores.softmax(-1).masked_fill_((lse == -math.inf)[..., None], 0.0)
    out = torch.bmm(weights.view(n_kv_heads, groups * n, m), v.transpose(0, 1))
    return by_head_groups(out, n, groups), lse.permute(2, 0, 1).reshape(n, n_heads)


def tiled_attention_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    query_tile: int = QUERY_TILE,
    key_tile: int = KEY_TILE,
) -> tuple[Tensor, Tensor]:
    """(out `[n, H, d_v]`, lse `[n, H]`): shapes, causality and rows without a key as in `naive_attention`."""
    n, n_heads, _ = q.shape
    if n < query_tile:  # a tile of fewer queries has room for more keys, and one query needs hardly any tiles
        key_tile = key_tile * query_tile // max(1, n)
    out = q.new_zeros(n, n_heads, v.shape[2])
    lse = q.new_full((n, n_heads), -math.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for rows, columns, diagonal in tiles(n, len(k), query_tile, key_tile):
        part = attend_tile(q[rows], k[columns], v[columns], diagonal, scale)
        first = columns.start == 0
        out[rows], lse[rows] = part if first else merge(out[rows], lse[rows], *part)
    return out, lse


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """As `naive_attention`, in memory linear in n and m: q `[n, H, d]`, k `[m, K, d]`, v `[m, K, d_v]` ->
    `[n, H, d_v]`.
    """
    return tiled_attention_lse(q, k, v, scale)[0]


def flash_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """As `tiled_attention`; by the Triton kernel where the tensors are on a GPU and it supports them."""
    if not use_kernels(q, v.shape[-1]):
        return tiled_attention(q, k, v, scale)
    from kernels import flash_attention as triton  # Triton is optional

    return triton.flash_attention(q, k, v, scale)[0]


# What moves between large and fast memory, counted for one head that shares its keys with no other.


def naive_bytes(n: int, m: int, d: int, d_v: int, bytes_per_element: float = 2) -> float:
    """Bytes that the plain formula moves: q, k, v and out once, and the n x m scores four times (products written,
    softmax read and written, weights read). Dao et al. 2022, section 2.2.
    """
    return (n * d + m * d + m * d_v + n * d_v + 4 * n * m) * bytes_per_element


def tiled_bytes(
    n: int,
    m: int,
    d: int,
    d_v: int,
    bytes_per_element: float = 2,
    query_tile: int = QUERY_TILE,
    key_tile: int = KEY_TILE,
    causal: bool = True,
) -> float:
    """Bytes that tiles move: q and out once, and keys and values once for every tile that is worked on, counted over
    the very `tiles` of `tiled_attention` (all of them when not `causal`).
    """
    if causal:
        keys = sum(tile.columns.stop - tile.columns.start for tile in tiles(n, m, query_tile, key_tile))
    else:
        keys = -(-n // query_tile) * m
    return (n * (d + d_v) + keys * (d + d_v)) * bytes_per_element


def tiled_flops(n: int, m: int, d: int, d_v: int, query_tile: int = QUERY_TILE, key_tile: int = KEY_TILE) -> int:
    """FLOPs of the tiles that are worked on: near half of `2 n m (d + d_v)` for n = m."""
    areas = (
        (t.rows.stop - t.rows.start) * (t.columns.stop - t.columns.start) for t in tiles(n, m, query_tile, key_tile)
    )
    return 2 * (d + d_v) * sum(areas)
