"""The shape of a model: the numbers from which parameters, cache rows, bytes and FLOPs follow.

It holds no weights and knows no device. Names follow the design of Llama; `head_dim` is a number of its own,
because `dim // n_heads` is not the head size of every public model (Gemma-7B, Qwen3-0.6B).
"""

from dataclasses import asdict, dataclass
from typing import NamedTuple


class KVShape(NamedTuple):
    """What one token leaves in the cache of one layer: `heads` keys of `key_dim` and values of `value_dim` elements.

    This is all that a cache needs to know about the attention layer above it.
    """

    heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        """Elements per token and layer."""
        return self.heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-style decoder. All sizes are counts of elements, `max_seq_len` is in tokens.

    Raises ValueError when the numbers contradict each other.
    """

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    max_seq_len: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name not in ("rope_theta", "norm_eps") and not isinstance(value, int):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
            if not 0 < value < 2**40:
                raise ValueError(f"{name} must be positive and below 2**40, got {value}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE rotates pairs of elements")

    @property
    def kv_shape(self) -> KVShape:
        """The row that attention leaves in the cache for each token and layer."""
        return KVShape(self.n_kv_heads, self.head_dim, self.head_dim)


# The two models of the course. Deep rather than wide: on a CPU a small step costs by its number of layers, and
# chapter 6 needs a target that is many times slower than its draft.
CONFIGS = {
    "tiny": ModelConfig(
        vocab_size=256, dim=192, n_layers=12, n_heads=6, n_kv_heads=6, head_dim=32, hidden_dim=384, max_seq_len=2048
    ),
    "draft": ModelConfig(
        vocab_size=256, dim=96, n_layers=1, n_heads=3, n_kv_heads=3, head_dim=32, hidden_dim=256, max_seq_len=2048
    ),
}
