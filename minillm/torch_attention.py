"""PyTorch's own attention behind the signature of `naive_attention`: the yardstick, and a fast path on any device.

Not a chapter: `scaled_dot_product_attention` is a library's kernel. Chapter 4 builds what it does inside.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.naive_attention import causal_mask


def torch_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Causal attention of one sequence: shapes, alignment and rows without a key as in `naive_attention`."""
    n, m = len(q), len(k)
    if n > m:  # rows without a key: zero
        without_key = q.new_zeros(n - m, q.shape[1], v.shape[2])
        return torch.cat([without_key, torch_attention(q[n - m :], k, v, scale)]) if m else without_key
    # A boolean mask costs up to three times `is_causal`, which aligns top-left: right only where n = m.
    mask = None if n in (1, m) else causal_mask(n, m, q.device)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, rows, d]
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=1 < n == m, scale=scale, enable_gqa=grouped)
    return out[0].transpose(0, 1)
