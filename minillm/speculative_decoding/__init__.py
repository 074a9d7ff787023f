"""Chapter 6: speculative decoding.

The bottleneck: a step that makes one token reads all weights and the whole cache for it, and computes next to nothing.
The idea: something cheap guesses the next γ tokens, and one step of the target runs them all at once; it costs little
more than a step for one, and each guess that the target agrees with saves a step (Leviathan et al. 2023; Chen et al.
2023). The invariant: the text is the target's own. Greedy: the same tokens. Sampled: the same distribution, whatever
the guesses, because a guess x is kept with probability min(1, p(x) / q(x)) and otherwise replaced by a draw from what
p has more than q.

Read `acceptance` (the rule), `drafts` (who guesses: a small model, or the text itself), `loop`
(one text on any cache), `batch` (the same in chapter 5's engine), in this order. There are no trees of guesses in it,
and γ does not adapt.
"""

from minillm.speculative_decoding.acceptance import Guesses, accept, accept_sampled, residual
from minillm.speculative_decoding.batch import Speculative
from minillm.speculative_decoding.drafts import Draft, DraftModel, NGrams, Text
from minillm.speculative_decoding.loop import Round, Rounds, speculative_generate

__all__ = [
    "Draft",
    "DraftModel",
    "Guesses",
    "NGrams",
    "Round",
    "Rounds",
    "Speculative",
    "Text",
    "accept",
    "accept_sampled",
    "residual",
    "speculative_generate",
]
