"""Speculation for one text, on any cache: guess, run, keep what the target agrees with, repeat."""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from minillm.generate import Cache, check_prompt_is_new, check_request, forward
from minillm.kv_cache import KVCache
from minillm.model.sampling import SamplingParams
from minillm.model.transformer import Transformer
from minillm.speculative_decoding.acceptance import Guesses, accept
from minillm.speculative_decoding.drafts import Draft, DraftModel, Text


@dataclass(frozen=True)
class Round:
    """One step of the target: the guesses it ran, and the tokens it emitted. The first `accepted` of these were
    guesses; another one, if there is one, is the target's own.
    """

    guesses: tuple[int, ...]
    emitted: tuple[int, ...]
    accepted: int


class Rounds(list[Round]):
    """Rounds in order; `append` is what `on_round` takes."""

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the judged guesses that were kept; those behind the first refused one were not judged. None
        without a guess.
        """
        kept = sum(r.accepted for r in self)
        # A round that ended with `eos` among its guesses refused none.
        refused = sum(r.accepted < len(r.guesses) and len(r.emitted) > r.accepted for r in self)
        return kept / (kept + refused) if kept + refused else None

    @property
    def tokens_per_round(self) -> float | None:
        """Emitted tokens for each step of the target; None without a round."""
        return sum(len(r.emitted) for r in self) / len(self) if self else None


def check_draft(target: Transformer, draft: Draft, gamma: int) -> None:
    """Raise ValueError for a draft that speaks of other tokens than the target, and for gamma below 1."""
    if operator.index(gamma) < 1:
        raise ValueError(f"gamma must be at least 1, got {gamma}")
    if draft.vocab_size not in (None, target.config.vocab_size):
        raise ValueError(
            f"the draft's vocabulary has {draft.vocab_size} tokens, the target's {target.config.vocab_size}: "
            "their ids do not mean the same"
        )


def check_pools(draft: Draft, cache: Cache) -> None:
    """Raise ValueError if draft and target share a pool: one would find the other's blocks by their tokens."""
    if isinstance(draft, DraftModel) and draft.pool and draft.pool is getattr(cache, "cache", None):
        raise ValueError("the draft's pool is the target's own: the two models' keys and values would be mixed up")


def speculative_generate(
    target: Transformer,
    draft: Draft | Transformer,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    gamma: int = 4,
    cache: Cache | None = None,
    sampling: SamplingParams | None = None,
    eos: int | None = None,
    on_round: Callable[[Round], None] | None = None,
) -> Iterator[int]:
    """Yield the ids that follow `prompt_ids`, several for a step of the target where guesses are right.

    The same tokens as `generate` when greedy, the same distribution when sampled. `draft` makes up to `gamma` guesses
    a step; a Transformer is taken as a `DraftModel`. `cache` is any cache for one sequence, None a `KVCache` of the
    right size; it holds what was yielded but the newest token, also if the iterator is closed early. `on_round` hears
    what each step of the target did. Raises ValueError at the call as `generate` does, for gamma below 1, and for a
    draft with another vocabulary.
    """
    draft = DraftModel(draft) if isinstance(draft, Transformer) else draft
    prompt = [operator.index(i) for i in prompt_ids]
    check_request(target, prompt, max_new_tokens)
    check_draft(target, draft, gamma)
    if cache is None:
        cache = KVCache(target.config, len(prompt) + max_new_tokens, target.device, target.dtype)
    check_prompt_is_new(prompt, cache)
    check_pools(draft, cache)
    return _loop(target, draft, prompt, max_new_tokens, gamma, cache, sampling, eos, on_round or (lambda r: None))


def _loop(
    target: Transformer,
    draft: Draft,
    tokens: list[int],
    max_new_tokens: int,
    gamma: int,
    cache: Cache,
    sampling: SamplingParams | None,
    eos: int | None,
    on_round: Callable[[Round], None],
) -> Iterator[int]:
    end, key = len(tokens) + max_new_tokens, object()
    try:
        while len(tokens) < end:
            room = end - len(tokens) - 1  # the target adds one token itself
            n = min(gamma, room)
            guesses = draft.propose([Text(key, tokens, n, sampling)])[0].first(n) if n else Guesses([])
            new = verify(target, tokens, guesses, cache, sampling, eos)
            on_round(Round(tuple(guesses.ids), tuple(new), agreement(guesses.ids, new)))
            for token in new:
                tokens.append(token)
                yield token
            if new[-1] == eos:
                return
    except BaseException:  # closed in the middle of a round, for example: what was not yielded does not count
        cache.truncate(min(cache.length, len(tokens) - 1))
        raise
    finally:
        draft.forget(key)


def verify(
    target: Transformer,
    tokens: list[int],
    guesses: Guesses,
    cache: Cache,
    sampling: SamplingParams | None,
    eos: int | None = None,
) -> list[int]:
    """One step of the target over the tokens that `cache` does not hold and the guesses behind them: the tokens that
    follow `tokens`, up to `eos`. All but the last of them are in the cache then. After any exception it is as before.
    """
    start = cache.length
    pending = tokens[start:]
    logits = forward(target, pending + guesses.ids, cache)
    try:
        new = accept(logits[len(pending) - 1 :], guesses, sampling, position=len(tokens))
    except BaseException:
        cache.truncate(start)
        raise
    if eos in new:
        new = new[: new.index(eos) + 1]
    cache.advance(pending + new[:-1])  # the rows of refused guesses, behind these, are given back
    return new


def agreement(guesses: Sequence[int], emitted: Sequence[int]) -> int:
    """How many of the emitted tokens are guesses."""
    differing = (i for i, (guess, token) in enumerate(zip(guesses, emitted, strict=False)) if guess != token)
    return next(differing, min(len(guesses), len(emitted)))
