"""Chapter 1: attention from its formula, and generation without a cache.

The bottleneck: training sees a whole text at once, generation makes one token at a time, and without a memory every
token means running the whole text again. The idea: none yet. This is the formula, `softmax(q kᵀ scale + mask) v`,
written to be read, and the oracle for every faster chapter. The invariant: query i of n sees the keys 0 .. m-n+i
of m, because the n queries are the *last* n of the m positions.

Vaswani et al. 2017, "Attention is all you need", section 3.2.1. Grouped queries: Ainslie et al. 2023, section 2.2.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def naive_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Causal attention of one sequence, with all scores in memory at once.

    q `[n, H, d]` are the last n of m positions; k `[m, K, d]` and v `[m, K, d_v]` are all of them. H is a multiple
    of K, and query head h reads key head `h // (H / K)`. `scale` is 1/sqrt(d) when None. Returns `[n, H, d_v]`.
    With n > m the first n - m rows have no key: they are zero. Any finite input gives a finite output.
    """
    (n, n_heads, _), (m, n_kv_heads, _) = q.shape, k.shape
    groups = n_heads // n_kv_heads
    weights = torch.softmax(attention_scores(q, k, scale), dim=-1)  # [K, G, n, m]
    if n > m:
        weights[:, :, : n - m] = 0.0  # no key to see: softmax made 0/0 of them
    out = torch.bmm(weights.view(n_kv_heads, groups * n, m), v.transpose(0, 1))  # [K, G·n, d_v]
    # A weighted mean of finite values is finite, its rounded sum need not be.
    largest = torch.finfo(out.dtype).max
    return by_head_groups(out.clamp_(-largest, largest), n, groups)


def attention_scores(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """`q kᵀ scale` with what a query may not see at minus infinity: `[K, G, n, m]`, G = H / K query heads to a key
    head. Shapes as in `naive_attention`; its softmax over the last dimension is the attention map.
    """
    n, m = len(q), len(k)
    scores = scaled_products(q, k, scale)
    if n == 1:
        return scores  # a single query is the last position: it sees every key
    return scores.masked_fill_(~causal_mask(n, m, q.device), -math.inf)


def scaled_products(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """`q kᵀ scale` for every query and key, finite for finite input: q `[n, H, d]`, k `[m, K, d]` ->
    `[K, G, n, m]`.
    """
    (n, n_heads, d), (m, n_kv_heads, _) = q.shape, k.shape
    groups = n_heads // n_kv_heads
    scale = 1 / math.sqrt(d) if scale is None else scale
    limits = torch.finfo(q.dtype)
    # The query heads that share a key head become rows of one matrix product: [n, H, d] -> [K, G·n, d].
    rows = q.view(n, n_kv_heads, groups, d).permute(1, 2, 0, 3).reshape(n_kv_heads, groups * n, d)
    # Rows are brought to elements of at most 1/d, so that |row·k| <= max|k|: no product overflows on its way. Their
    # size comes back as a factor, and only then can a score reach infinity, where it is clamped.
    size = rows.abs().amax(-1, keepdim=True).clamp_(min=limits.tiny)  # [K, G·n, 1]
    products = torch.bmm((rows / size).div_(d), k.permute(1, 2, 0))  # [K, G·n, m]
    scores = products.mul_(size.mul_(d * scale).clamp_(max=limits.max)).clamp_(limits.min, limits.max)
    return scores.view(n_kv_heads, groups, n, m)


def by_head_groups(out: Tensor, n: int, groups: int) -> Tensor:
    """Rows back in their places: `[K, G·n, d_v]` -> `[n, H, d_v]`."""
    n_kv_heads, _, d_v = out.shape
    return out.view(n_kv_heads, groups, n, d_v).permute(2, 0, 1, 3).reshape(n, n_kv_heads * groups, d_v)


def causal_mask(n: int, m: int, device: torch.device | str = "cpu") -> Tensor:
    """`[n, m]` booleans: may query i see key j? Yes if j <= m - n + i: aligned at the bottom right corner."""
    return torch.ones(n, m, dtype=torch.bool, device=device).tril_(m - n)


class NoCache:
    """Holds nothing: every step runs the whole text from position 0. The protocol of all caches, at its simplest."""

    length = 0
    nbytes = 0

    def reserve(self, n: int) -> None:
        """Nothing to make room for."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """The tokens of this step are all there are."""
        return naive_attention(q, k, v, scale)

    def advance(self, ids: Sequence[int]) -> None:
        """Nothing to commit."""

    def truncate(self, length: int) -> None:
        """Nothing to forget."""
