"""Requests as they come in practice: many short, some long, all from a seed.

Real logs may not be shipped; what matters for memory and scheduling is the shape: lengths are skewed, and few long
answers hold most of the tokens.
"""

from typing import NamedTuple

import numpy as np


class RequestLengths(NamedTuple):
    """Tokens of one request: its prompt, and the answer it will turn out to have."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        """Tokens it holds at its end."""
        return self.prompt + self.output


def sharegpt_like(n: int, seed: int = 0, longest: int = 2048) -> list[RequestLengths]:
    """n requests with the mean lengths of ShareGPT, 161 in and 338 out (Kwon et al. 2023, section 6.1).

    Both log-normal with sigma 1, cut to at least 1 token and at most `longest` in all. Cutting lowers the mean, so
    the scale is raised until the means of what is left are right (within a token for large n). Raises ValueError if
    `longest` leaves no room for them.
    """
    if longest < 1024:
        raise ValueError(f"longest={longest} is too short for requests of 499 tokens on average: 1,024 at least")
    rng = np.random.default_rng(seed)
    shapes = np.exp(rng.standard_normal((2, n)))
    means = np.array([161.31, 337.99])
    scale = means.copy()
    for _ in range(50):
        prompt, output = np.maximum(1, np.rint(shapes * scale[:, None])).astype(int)
        prompt = np.minimum(prompt, longest - 1)
        output = np.minimum(output, longest - prompt)
        scale *= means / np.array([prompt.mean(), output.mean()])
    return [RequestLengths(int(p), int(o)) for p, o in zip(prompt, output, strict=True)]


def skewed(n: int, seed: int = 0, longest: int = 256, spread: bool = True) -> list[RequestLengths]:
    """n requests of which one in sixteen has an answer of `longest` tokens and the others of 2 to 8; prompts of 8 to
    24. Of every sixteen in a row one is long, if `spread`; else the long ones stand anywhere. The seed decides.
    """
    rng = np.random.default_rng(seed)
    prompts = rng.integers(8, 25, n)
    outputs = rng.integers(2, 9, n)
    starts = np.arange(0, n, 16)
    long = starts + rng.integers(0, np.minimum(16, n - starts)) if spread else rng.permutation(n)[: len(starts)]
    outputs[long] = longest
    return [RequestLengths(int(p), int(o)) for p, o in zip(prompts, outputs, strict=True)]


def poisson_arrivals(n: int, rate: float, seed: int = 0) -> list[float]:
    """Arrival times in seconds of n requests that come independently, `rate` a second on average."""
    return np.random.default_rng(seed).exponential(1 / rate, n).cumsum().tolist()
