"""What speculation should gain, from how often guesses are right and what they cost.

Leviathan et al. 2023, sections 3.1 to 3.4. There a step of the target costs the same for one token and for γ + 1; on a
CPU it does not, so `speed_up` also takes what it costs.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from minillm.generate import forward, run
from minillm.kv_cache import KVCache
from minillm.measure.metrics import Spread, time_call
from minillm.model.sampling import SamplingParams, probabilities
from minillm.model.transformer import Transformer
from minillm.paged_cache import PagedKVCache, forward_batch


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens for each step of the target if every guess is right with probability alpha: 1 + α + ... + α^γ."""
    return sum(alpha**i for i in range(gamma + 1))


def speed_up(alpha: float, gamma: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """How many times faster than plain decoding. A step of the draft costs `draft_cost`, the target's step over
    γ + 1 tokens `verify_cost`, both in plain steps of the target.
    """
    return expected_tokens(alpha, gamma) / (gamma * draft_cost + verify_cost)


def operations(alpha: float, gamma: int, draft_cost: float) -> float:
    """Arithmetic for a token, in that of plain decoding; `draft_cost` is the draft's share of the target's for one."""
    return (gamma * draft_cost + gamma + 1) / expected_tokens(alpha, gamma)


def best_gamma(alpha: float, draft_cost: float, verify_costs: Sequence[float] | None = None, most: int = 16) -> int:
    """The γ from 0 (do not speculate) on that gains most; `verify_costs[γ]` is the cost of a step over γ + 1 tokens."""
    costs = [1.0] * (most + 1) if verify_costs is None else list(verify_costs)
    return max(range(len(costs)), key=lambda gamma: speed_up(alpha, gamma, draft_cost, costs[gamma]))


def break_even(draft_cost: float, gamma: int, verify_cost: float = 1.0) -> float | None:
    """The smallest α, in hundredths, at which γ guesses gain; None if none does. γ = 1 with verification for nothing:
    the draft's cost.
    """
    hundredths = range(1, 101)
    return next((a / 100 for a in hundredths if speed_up(a / 100, gamma, draft_cost, verify_cost) > 1.0), None)


def overlap(
    target: Transformer, draft: Transformer, ids: Sequence[int], sampling: SamplingParams, skip: int = 0
) -> Tensor:
    """Sum of min(p, q) at every position of a given text but the first `skip`: `[len(ids) - skip]`, float64.

    Its mean is α: the probability that a guess is kept, with both models reading the same text (teacher forcing).
    """
    p, q = (
        probabilities(run(m, ids, KVCache(m.config, len(ids), m.device, m.dtype)), sampling) for m in (target, draft)
    )
    return torch.minimum(p, q.to(p.device)).sum(-1)[skip:]


def step_seconds(
    model: Transformer, ids: Sequence[int], counts: Sequence[int], context: int, n_sequences: int = 1, repeats: int = 15
) -> list[float]:
    """Median seconds of a step over n tokens of each of `n_sequences`, behind `context` tokens each, for n in `counts`.

    The tokens are taken from `ids`. On a contiguous cache for one sequence, on a paged one for several. Measured in
    turns, so that a change of the machine's speed meets all of them.
    """
    size = context + max(counts)
    if n_sequences == 1:
        caches = [KVCache(model.config, size, model.device, model.dtype)]
    else:
        pool = PagedKVCache(model.config, n_sequences * -(-size // 16), 16, model.device, model.dtype)
        caches = [pool.sequence() for _ in range(n_sequences)]
    for i, cache in enumerate(caches):
        run(model, [(token + i) % model.config.vocab_size for token in ids[:context]], cache)

    def step(n: int) -> None:
        more = ids[context : context + n]
        if n_sequences == 1:
            forward(model, more, caches[0])
        else:
            forward_batch(model, pool, [(cache, more) for cache in caches])
        for cache in caches:
            cache.truncate(context)

    turns = [[time_call(lambda n=n: step(n), 1, 1, model.device).median for n in counts] for _ in range(repeats)]
    return [Spread.of(times).median for times in zip(*turns, strict=True)]


def repeated_share(ids: Sequence[int], n: int = 4) -> float | None:
    """Share of a text's n-grams that came before in it; None for a text without one."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else None


def run_lengths(accepted: Sequence[int], gamma: int) -> list[int]:
    """How many rounds kept 0, 1, ... gamma guesses."""
    return [sum(a == k for a in accepted) for k in range(gamma + 1)]


def predicted_run_lengths(alpha: float, gamma: int) -> list[float]:
    """The share of rounds that keep 0, 1, ... gamma guesses, if every guess is right with probability alpha."""
    reach = [alpha**k for k in range(gamma + 1)] + [0.0]
    return [a - b for a, b in pairwise(reach)]
