"""Who guesses: a small model, or the text itself."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from minillm.generate import Cache, run
from minillm.kv_cache import KVCache
from minillm.model.sampling import SamplingParams, best_tokens, draw, probabilities, uniform
from minillm.model.transformer import Transformer
from minillm.paged_cache import PagedKVCache, forward_batch
from minillm.speculative_decoding.acceptance import DRAFT, Guesses


class Text(NamedTuple):
    """A text that wants at most n guesses. `key` names it from call to call."""

    key: Hashable
    ids: Sequence[int]
    n: int
    sampling: SamplingParams | None = None


class Draft(Protocol):
    """Guesses how texts go on."""

    vocab_size: int | None  # None: it guesses tokens of the text only

    def propose(self, texts: Sequence[Text]) -> list[Guesses]:
        """At most n guesses for each text; fewer, or none, is always right."""
        ...

    def forget(self, key: Hashable) -> None:
        """This text does not come again: keep nothing for it."""
        ...


class NGrams:
    """Prompt lookup: find the text's last few tokens earlier in the text, and guess what followed them there.

    Looks for the last `longest` tokens, then for fewer, down to `shortest`, and takes the latest place; where the end
    is reached it goes on as if the repetition repeated. Needs no model. Saxena 2023, "Prompt lookup decoding". Raises
    ValueError unless 1 <= shortest <= longest.
    """

    vocab_size = None

    def __init__(self, longest: int = 8, shortest: int = 3) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams need 1 <= shortest <= longest, got {shortest} and {longest}")
        self.longest, self.shortest = longest, shortest

    def propose(self, texts: Sequence[Text]) -> list[Guesses]:
        """What followed the longest repetition, if there is one."""
        return [Guesses(self._look_up(list(text.ids), text.n)) for text in texts]

    def forget(self, key: Hashable) -> None:
        """Nothing is kept."""

    def _look_up(self, ids: list[int], n: int) -> list[int]:
        text = "".join(map(chr, ids))  # a token is a character: Python's search for substrings is fast
        for size in range(min(self.longest, len(ids) - 1), self.shortest - 1, -1):
            found = text.rfind(text[-size:], 0, len(text) - 1)  # earlier than at the end
            if found >= 0:
                followed = ids[found + size :]
                return [followed[i % len(followed)] for i in range(n)]
        return []


class _Held(NamedTuple):
    cache: Cache
    ids: list[int]  # the tokens in it


class DraftModel:
    """A small model that guesses with its own cache; sampled guesses are drawn from exactly the q they are judged by.

    It runs what its cache does not hold of a text. So whatever the target refused is forgotten, and whatever the
    target added (the bonus token, and the last guess, which the draft never ran itself) is caught up on.
    Without a `pool` it serves one text at a time; with one, many in one batch, each with blocks of its own. A text
    for which the pool has no room, or the model no context, gets no guesses.
    """

    def __init__(self, model: Transformer, pool: PagedKVCache | None = None) -> None:
        self.model, self.pool = model, pool
        self.vocab_size = model.config.vocab_size
        self._held: dict[Hashable, _Held] = {}

    def propose(self, texts: Sequence[Text]) -> list[Guesses]:
        """At most n guesses for each text, in n steps over all texts. Raises ValueError for several without a pool."""
        if self.pool is None and len(texts) > 1:
            raise ValueError(f"{len(texts)} texts at once need a DraftModel with a pool")
        counts = self._counts(texts)
        held = {t.key: self._fit(t) for t in texts if counts[t.key]}
        # What runs in the first step: at least the last token, whose logits are the first guess's.
        new = {t.key: list(t.ids[len(held[t.key].ids) :]) for t in texts if counts[t.key]}
        ids: dict[Hashable, list[int]] = {t.key: [] for t in texts}
        q: dict[Hashable, list[Tensor]] = {t.key: [] for t in texts}
        for step in range(max(counts.values(), default=0)):
            active = [t for t in texts if counts[t.key] > step]
            rows = self._run([(held[t.key], new[t.key]) for t in active])
            for text, logits, best in zip(active, rows, best_tokens(rows), strict=True):
                token = best
                if text.sampling and not text.sampling.is_greedy:
                    q[text.key].append(probabilities(logits, text.sampling))
                    token = draw(q[text.key][-1], uniform(text.sampling.seed, len(text.ids) + step, DRAFT))
                ids[text.key].append(token)
                new[text.key] = [token]
        return [Guesses(ids[t.key], torch.stack(q[t.key]) if q[t.key] else None) for t in texts]

    def forget(self, key: Hashable) -> None:
        """Give its blocks back."""
        held = self._held.pop(key, None)
        if held and self.pool:
            held.cache.free()

    def _counts(self, texts: Sequence[Text]) -> dict[Hashable, int]:
        """How many guesses each text can get: the context and the pool may not allow n."""
        for text in texts:
            self._trim(text)
        counts, free = {}, self.pool.num_free_blocks if self.pool else 0
        for text in texts:
            # The last guess is not run, so it needs no place.
            n = max(0, min(text.n, self.model.config.max_seq_len - len(text.ids) + 1))
            while self.pool and n and self._blocks(text, n) > free:
                n -= 1
            free -= self._blocks(text, n) if self.pool and n else 0
            counts[text.key] = n
        return counts

    def _blocks(self, text: Text, n: int) -> int:
        """The most blocks that n guesses take from the pool."""
        n_tokens = len(text.ids) + n - 1
        if text.key not in self._held:
            return self.pool.blocks_for(n_tokens)
        sequence = self._held[text.key].cache
        return sequence.blocks_needed(n_tokens - sequence.length)

    def _trim(self, text: Text) -> None:
        """Forget what a text no longer begins with; its last token is left to run."""
        if text.key in self._held:
            cache, ids = self._held[text.key]
            keep = min(len(ids), len(text.ids) - 1)
            while ids[:keep] != list(text.ids[:keep]):
                keep -= 1
            cache.truncate(keep)
            del ids[keep:]

    def _fit(self, text: Text) -> _Held:
        """The cache of a text, trimmed; a new one holds what the pool remembers of its beginning."""
        if text.key not in self._held and self.pool is None:  # one text at a time
            config = self.model.config
            cache = KVCache(config, config.max_seq_len, self.model.device, self.model.dtype)
            self._held = {text.key: _Held(cache, [])}
        elif text.key not in self._held:
            sequence = self.pool.sequence(text.ids)
            self._held[text.key] = _Held(sequence, list(sequence.token_ids))
        return self._held[text.key]

    def _run(self, steps: list[tuple[_Held, list[int]]]) -> Tensor:
        """Run and commit new tokens of each text; the logits `[texts, vocab]` behind the last of each."""
        if len(steps) == 1:
            [(held, new)] = steps
            last = run(self.model, new, held.cache)[-1:]
        else:
            logits = forward_batch(self.model, self.pool, [(held.cache, new) for held, new in steps])
            for held, new in steps:
                held.cache.advance(new)
            ends = torch.tensor([len(new) for _, new in steps], device=self.model.device).cumsum(0)
            last = logits[ends - 1]
        for held, new in steps:
            held.ids.extend(new)
        return last
