"""What "equal" means in this suite: tolerances by element type, a cache in plain lists, and three ways to break it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minillm.generate import Cache, generate, run
from minillm.model.transformer import Transformer
from minillm.naive_attention import naive_attention

# Largest absolute and relative difference between two correct computations of one quantity of size about 1.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def assert_close(actual: Tensor, expected: Tensor, case: str = "", dtype: torch.dtype | None = None) -> None:
    """Equal within the tolerance of `dtype` (that of `actual` when None), compared in float64."""
    tolerance = TOLERANCE[dtype or actual.dtype]
    assert actual.shape == expected.shape, f"{case}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    torch.testing.assert_close(
        actual.double(), expected.double(), atol=tolerance, rtol=tolerance, msg=lambda m: f"{case}: {m}"
    )


class ListCache:
    """The cache as one would explain it: a list of keys and values per layer, joined at every step.

    `damage` changes the keys that are read back: the suite must notice.
    """

    nbytes = 0

    def __init__(self, n_layers: int, damage: Callable[[Tensor], Tensor] | None = None) -> None:
        self.rows: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(n_layers)]
        self.length = 0
        self.damage = damage

    def reserve(self, n: int) -> None:
        """A list grows by itself."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """Join everything kept with what is new, damage what was kept, attend."""
        kept = self.rows[layer][: self.length]
        self.rows[layer] = kept + list(zip(k, v, strict=True))
        if kept and self.damage:
            keys, values = (torch.stack(x) for x in zip(*kept, strict=True))
            k, v = torch.cat([self.damage(keys), k]), torch.cat([values, v])
        else:
            k, v = (torch.stack(x) for x in zip(*self.rows[layer], strict=True))
        return naive_attention(q, k, v, scale)

    def advance(self, ids: Sequence[int]) -> None:
        """Keep the first of the new rows."""
        self.length += len(ids)

    def truncate(self, length: int) -> None:
        """Forget the tail."""
        self.length = length


# What a wrong cache may do to the keys it kept, `[m, K, d]`. Only the keys: attention is a sum over pairs (key, value)
# and a key's position is in its rotation, so moving both together would change nothing.
DAMAGES = {
    "zeroed": torch.zeros_like,
    "shifted by one position": lambda x: x.roll(1, dims=0),
    "reversed": lambda x: x.flip(0),
}


def feed(model: Transformer, ids: Sequence[int], pieces: Sequence[int], cache: Cache) -> Tensor:
    """Logits `[len(ids), vocab]` of `ids` run through `cache` in `pieces` of the given lengths."""
    assert sum(pieces) == len(ids)
    starts = [sum(pieces[:i]) for i in range(len(pieces))]
    return torch.cat([run(model, ids[s : s + n], cache) for s, n in zip(starts, pieces, strict=True)])


def greedy(model: Transformer, prompt: Sequence[int], n: int, cache: Cache | None = None) -> list[int]:
    """The n ids that plain greedy generation gives."""
    return list(generate(model, prompt, n, cache))
