"""Speculation in chapter 5's engine: one step verifies the guesses of a whole ragged batch.

The engine already runs "n tokens of this sequence" for any n; a sequence with three guesses runs four. So speculation
is only another `propose` and `accept`.
"""

from collections.abc import Sequence

from torch import Tensor

from minillm.continuous_batching import Sample
from minillm.model.transformer import Transformer
from minillm.speculative_decoding.acceptance import Guesses, accept
from minillm.speculative_decoding.drafts import Draft, DraftModel, Text
from minillm.speculative_decoding.loop import Round, Rounds, agreement, check_draft, check_pools


class Speculative:
    """What `Engine(..., decoding=Speculative(model, draft))` does with logits: up to `gamma` guesses a sample and step.

    The scheduler may let fewer run. Greedy answers are those of plain decoding. Sampled ones have its distribution;
    which draw they are depends on where rounds begin, and so on the company. `rounds` are all samples' rounds, each
    there once it is known what was emitted. If the draft fails, the step does. Raises ValueError for gamma below 1, a
    draft with another vocabulary, and a `DraftModel` without a pool, or at the first guess with the target's own.
    """

    def __init__(self, target: Transformer, draft: Draft, gamma: int = 4) -> None:
        check_draft(target, draft, gamma)
        if isinstance(draft, DraftModel) and draft.pool is None:
            raise ValueError("a DraftModel needs a pool to guess for several samples")
        self.draft, self.gamma, self.rounds = draft, gamma, Rounds()
        self._guesses: dict[Sample, Guesses] = {}
        self._running: dict[Sample, tuple[list[int], int]] = {}  # guesses that ran, tokens before them

    def propose(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Guesses of the draft, never more than could still be emitted."""
        for sample in samples:
            check_pools(self.draft, sample.sequence)
            self._note(sample)
        rooms = [s.request.max_new_tokens - len(s.token_ids) - 1 for s in samples]  # the target adds one itself
        texts = [Text(s, s.ids, min(self.gamma, n), s.sampling) for s, n in zip(samples, rooms, strict=True) if n]
        self._guesses = dict(zip((t.key for t in texts), self.draft.propose(texts), strict=True))
        return [self._guesses[s].ids if s in self._guesses else [] for s in samples]

    def accept(self, sample: Sample, logits: Tensor) -> list[int]:
        """The guesses that are kept, and one token of the target's own."""
        guesses = self._guesses.get(sample, Guesses([])).first(len(sample.drafts))
        self._running[sample] = guesses.ids, len(sample.ids)
        return accept(logits, guesses, sample.sampling, position=len(sample.ids))

    def forget(self, sample: Sample) -> None:
        """Its blocks in the draft's pool are free again."""
        self._note(sample)
        self._guesses.pop(sample, None)
        self.draft.forget(sample)

    def _note(self, sample: Sample) -> None:
        """Only now is it known where the engine ended the answer: at a stop string, at `eos`."""
        if sample in self._running:
            guesses, before = self._running.pop(sample)
            emitted = sample.ids[before:]
            if emitted:
                self.rounds.append(Round(tuple(guesses), tuple(emitted), agreement(guesses, emitted)))
