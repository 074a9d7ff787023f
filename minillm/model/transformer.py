"""The one transformer that every chapter runs: RMSNorm, RoPE, attention, SwiGLU, tied embeddings (Llama's design).

There is **no batch axis**. A forward pass takes N tokens with their positions, whether they are one prompt, one new
token, or new tokens of fifty sequences: embeddings, norms and linear layers treat every row alike. Only attention
mixes rows, and attention belongs to the cache: the layer computes q, k, v and calls
`cache.attend(layer, q, k, v, scale)`. Which tokens q may see, and where their keys and values lie, is the cache's
business. So this file stays the same from chapter 1 to chapter 8.

It does not sample, does not loop, does not know which cache it is given.
Touvron et al. 2023, "LLaMA", section 2.2; Su et al. 2021, "RoFormer" (RoPE, half-split layout of Hugging Face).
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.model.config import ModelConfig


class AttendsTo(Protocol):
    """The part of a cache that the model sees."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """Take q `[N, H, d]`, k, v `[N, K, d]` of layer `layer`; return the attended values `[N, H, d_v]`."""
        ...


def rope_factors(positions: Tensor, config: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rotations at `positions` `[N]`: cos, and sin with the sign of each half, both `[N, 1, head_dim]`.

    Element i of the first half of a head and element i of its second half form a pair that turns by
    `position * theta^(-2i/head_dim)` radians. Angles reach thousands of radians: they are computed in float64.
    """
    half = torch.arange(config.head_dim // 2, dtype=torch.float64, device=positions.device)
    angle = positions[:, None] * config.rope_theta ** (half * (-2 / config.head_dim))  # [N, d/2]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1).to(dtype)[:, None], torch.cat([-sin, sin], -1).to(dtype)[:, None]


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs of every head of x `[N, heads, d]` by `rope`, a (cos, sin) of `[N, 1, d]` each.

    (a, b) -> (a cos - b sin, b cos + a sin): rolling by half a head puts each element's partner in its place.
    """
    cos, sin = rope
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class Attention(nn.Module):
    """Grouped-query attention: projections and RoPE here, the attending in the cache.

    q, k and v come from one matrix product: three small ones would read the input three times and pay three calls.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = (config.n_heads, config.n_kv_heads, config.n_kv_heads)
        self.qkv = nn.Linear(config.dim, sum(self.heads) * config.head_dim, bias=False)
        self.out = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: AttendsTo) -> Tensor:
        n_rows, (n_q, n_k, n_v) = x.shape[0], self.heads
        qkv = self.qkv(x).view(n_rows, n_q + n_k + n_v, -1)  # [N, H + 2K, d]
        qk, v = qkv.split((n_q + n_k, n_v), dim=1)
        q, k = rotate(qk, rope).split((n_q, n_k), dim=1)  # q and k turn together: half the calls
        return self.out(cache.attend(self.layer, q, k, v).reshape(n_rows, -1))


class MLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`, gate and up from one matrix product (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One layer: attention, then MLP, each on the normed stream and added back to it."""

    def __init__(self, config: ModelConfig, attention: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = attention
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: AttendsTo) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, cache)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """A decoder over token ids. `attention_layer(config, layer)` builds the attention of each layer (chapter 7)."""

    def __init__(
        self, config: ModelConfig, attention_layer: Callable[[ModelConfig, int], nn.Module] = Attention
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, attention_layer(config, layer)) for layer in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The element type of the weights, and so of q, k, v and the logits."""
        return self.embedding.weight.dtype

    def forward(self, tokens: Tensor, positions: Tensor, cache: AttendsTo) -> Tensor:
        """Logits `[N, vocab_size]` of N tokens `[N]` at `positions` `[N]`, both integer tensors.

        Row i holds the scores of the token after token i. The model has learnt positions below `max_seq_len`.
        """
        x = self.embedding(tokens)  # [N, dim]
        rope = rope_factors(positions, self.config, x.dtype)  # once for all layers
        for block in self.blocks:
            x = block(x, rope, cache)
        return F.linear(self.norm(x), self.embedding.weight)


def init_weights(model: Transformer, std: float, generator: torch.Generator) -> None:
    """Fill every matrix from N(0, std²) and set the norms to one, in place; the same generator gives the same model."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, std, generator=generator)
            else:
                parameter.fill_(1.0)
