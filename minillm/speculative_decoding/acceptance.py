"""Which guesses are kept, and what replaces the first one that is not.

p is the target's distribution and q the draft's, both as they are sampled: after temperature, top-k and top-p. The
guess was drawn from q. Keep it with probability min(1, p/q); else draw from max(0, p - q), normalised. Then token x
comes out with probability min(p(x), q(x)) + (1 - sum of min(p, q)) residual(x) = p(x).
Leviathan et al. 2023, "Fast inference from transformers via speculative decoding", algorithm 1 and appendix A.1.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from minillm.model.sampling import SamplingParams, best_tokens, draw, probabilities, uniform

# Streams of uniforms for one position. A token that is not guessed, or replaces a guess, takes stream 0, as in plain
# sampling; so without guesses the text is that of plain sampling. After a refusal the positions behind it are guessed
# anew with the same uniforms: those had decided nothing yet, since the guesses there were never judged.
OWN, DRAFT, ACCEPT = 0, 1, 2


@dataclass(frozen=True)
class Guesses:
    """Tokens that may follow a text, and the distributions they were drawn from, float64 `[len(ids), vocab]`.

    `probabilities` is None for guesses that were not drawn: all of q is then on the guess.
    """

    ids: list[int]
    probabilities: Tensor | None = None

    def first(self, n: int) -> "Guesses":
        """The first n of them."""
        return Guesses(self.ids[:n], None if self.probabilities is None else self.probabilities[:n])


def accept(logits: Tensor, guesses: Guesses, sampling: SamplingParams | None, position: int) -> list[int]:
    """The tokens from `position` on, at least one: the guesses that are kept, and one of the target's own.

    `logits` `[1 + guesses, vocab]` are the target's for `position` and behind each guess. The last token returned
    replaces the first guess that is not kept, or follows them all (the bonus token). Raises ValueError for another
    number of rows, and for logits that are not finite.
    """
    if len(logits) != 1 + len(guesses.ids):
        raise ValueError(f"{len(guesses.ids)} guesses need {1 + len(guesses.ids)} rows of logits, got {len(logits)}")
    if sampling is None or sampling.is_greedy:
        return _accept_greedy(logits, guesses.ids)
    p = probabilities(logits, sampling)
    return accept_sampled(p, guesses, lambda i, stream: uniform(sampling.seed, position + i, stream))


def _accept_greedy(logits: Tensor, guesses: list[int]) -> list[int]:
    """Keep guesses as long as they are what greedy decoding gives."""
    best = best_tokens(logits)
    kept = next((i for i, guess in enumerate(guesses) if guess != best[i]), len(guesses))
    return best[: kept + 1]


def accept_sampled(p: Tensor, guesses: Guesses, u: Callable[[int, int], float]) -> list[int]:
    """The rule itself, for the target's distributions p `[1 + guesses, vocab]`; `u(i, stream)` is uniform in [0, 1)."""
    new = []
    for i, guess in enumerate(guesses.ids):
        q = None if guesses.probabilities is None else guesses.probabilities[i].to(p.device)
        if u(i, ACCEPT) * (1.0 if q is None else float(q[guess])) >= float(p[i, guess]):  # u >= p/q
            return [*new, draw(residual(p[i], q, guess), u(i, OWN))]
        new.append(guess)
    return [*new, draw(p[-1], u(len(new), OWN))]


def residual(p: Tensor, q: Tensor | None, guess: int) -> Tensor:
    """What p `[vocab]` has more than q, not normalised (`draw` does not ask for it). q None: all of it on `guess`."""
    if q is None:
        rest = p.clone()
        rest[guess] = 0.0
    else:
        rest = (p - q).clamp_(min=0.0)
    return rest if rest.any() else p  # p equals q but for rounding, which alone refused the guess
