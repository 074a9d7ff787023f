"""From logits to the next token: greedy, temperature, top-k, top-p.

`probabilities` is the one place that turns logits into the distribution that is sampled; speculative decoding compares
exactly these distributions. Randomness has no state: the uniform behind a sampled token is a function of
(seed, position), so a token does not depend on what else is in the batch, on preemption or on a rollback.
Nucleus sampling: Holtzman et al. 2020, "The curious case of neural text degeneration", section 3.1.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

# At this temperature a logit gap of 0.001 already means odds of e^100: sampling is arg-max, computed as such.
GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. Temperature up to 1e-5 is greedy; None switches a filter off; `seed` decides every draw.

    Raises ValueError for a temperature below 0, top_k below 1, or top_p outside (0, 1].
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1 (None keeps all), got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken without a draw."""
        return self.temperature <= GREEDY_TEMPERATURE


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution that is sampled: logits `[..., vocab]` -> float64 of the same shape, rows sum to 1.

    Temperature first, then top-k, then top-p on what is left: the smallest set of most likely tokens whose
    probability reaches top_p, the token that crosses it included. Of equal logits the lower id comes first.
    Raises ValueError for a row whose largest logit is not finite: it comes from a broken model. (Minus infinity for
    some tokens is a token that cannot come.)
    """
    if not logits.amax(-1).isfinite().all():
        raise ValueError("the largest logit of a row is not a finite number: the model is broken")
    logits = logits.double()
    if params.is_greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    # The largest becomes 0 before the division, so no temperature overflows.
    scaled = (logits - logits.amax(-1, keepdim=True)) / params.temperature
    if params.top_k is None and params.top_p is None:
        return scaled.softmax(-1)
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    if params.top_k is not None:
        ordered[..., params.top_k :] = -torch.inf
    p = ordered.softmax(-1)
    if params.top_p is not None:
        before = p.cumsum(-1) - p  # probability of all more likely tokens: 0 for the first, which always stays
        p = p.masked_fill(before >= params.top_p, 0.0)
        p = p / p.sum(-1, keepdim=True)
    return torch.zeros_like(p).scatter_(-1, ids, p)


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1), 53 random bits, the same for ever for the same (seed, position, stream).

    A hash in counter mode; `stream` tells apart several draws for one position (speculation needs them).
    """
    digest = hashlib.blake2b(f"{seed}/{position}/{stream}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw(p: Tensor, u: float) -> int:
    """The token at quantile `u` in [0, 1) of the distribution p `[vocab]`: never one of probability 0."""
    cumulative = p.cumsum(-1)
    # u scaled by the actual sum, so that rounding of the sum cannot push the draw past the last token.
    index = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    return min(index, int(p.nonzero()[-1]))


def sample(logits: Tensor, params: SamplingParams | None, position: int) -> int:
    """The token for `position` of a sequence, from the logits `[vocab]` of the position before it.

    Greedy when params is None: the arg-max, the lowest id among equals. Waits for the device (one number comes back).
    """
    if params is None or params.is_greedy:
        return best_tokens(logits[None])[0]
    return draw(probabilities(logits, params), uniform(params.seed, position))


def best_tokens(logits: Tensor) -> list[int]:
    """The arg-max of every row of logits `[n, vocab]`, the lowest id among equals. Raises ValueError as
    `probabilities` does.
    """
    values, ids = logits.max(-1)  # of NaN and numbers the maximum is NaN
    if not values.isfinite().all():
        raise ValueError("the largest logit of a row is not a finite number: the model is broken")
    return ids.tolist()
