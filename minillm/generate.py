"""The autoregressive loop, one for every cache of the course.

Run the tokens the cache does not hold yet, take the next token from the last row of logits, repeat. With `NoCache`
the cache never holds anything and every step runs the whole text; with a real cache only the first step does.
The loop knows one sequence; many at once are chapter 5's.
"""

import operator
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from minillm.model.sampling import SamplingParams, sample
from minillm.model.transformer import Transformer
from minillm.naive_attention import NoCache


class Cache(Protocol):
    """A cache for one sequence. `reserve`, run the model, `advance`; `truncate(length)` undoes a reservation."""

    @property
    def length(self) -> int:
        """Tokens it holds."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of storage it occupies."""
        ...

    def reserve(self, n: int) -> None:
        """Make room for n more tokens, all or nothing."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """Store k and v of the new tokens and attend over everything the sequence holds."""
        ...

    def advance(self, ids: Sequence[int]) -> None:
        """Commit the tokens that count: all that ran, or the first of them."""
        ...

    def truncate(self, length: int) -> None:
        """Forget everything from `length` on."""
        ...


def generate(
    model: Transformer,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    cache: Cache | None = None,
    sampling: SamplingParams | None = None,
    eos: int | None = None,
) -> Iterator[int]:
    """Yield the ids that follow `prompt_ids`, one as soon as it is known; stops after `max_new_tokens` or `eos`.

    Greedy when `sampling` is None. `cache=None` means `NoCache`. A cache that already holds the first tokens of the
    prompt is gone on from; it must leave at least one prompt token to run. The last token is yielded but not run.
    Raises ValueError at the call, before anything runs, for an empty prompt, ids outside the vocabulary,
    `max_new_tokens` below 1, a text longer than the model's context, or a cache that holds the whole prompt.
    """
    cache = NoCache() if cache is None else cache
    prompt = [operator.index(i) for i in prompt_ids]
    check_request(model, prompt, max_new_tokens)
    check_prompt_is_new(prompt, cache)
    return generation_loop(model, prompt, max_new_tokens, cache, sampling, eos)


def check_request(model: Transformer, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
    """Raise ValueError for a prompt or a length that the model cannot serve."""
    config = model.config
    if not prompt_ids:
        raise ValueError("the prompt is empty: at least one token is needed")
    if bad := [i for i in prompt_ids if not 0 <= i < config.vocab_size]:
        raise ValueError(f"token id {bad[0]} is outside the vocabulary 0..{config.vocab_size - 1}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if len(prompt_ids) + max_new_tokens > config.max_seq_len:
        raise ValueError(
            f"{len(prompt_ids)} prompt tokens and {max_new_tokens} new ones exceed max_seq_len={config.max_seq_len}"
        )


def check_prompt_is_new(prompt_ids: Sequence[int], cache: Cache) -> None:
    """Raise ValueError for a cache that holds the whole prompt: its last token must run."""
    if cache.length >= len(prompt_ids):
        raise ValueError(
            f"the cache holds {cache.length} tokens, the prompt has {len(prompt_ids)}: none is left to run"
        )


def generation_loop(
    model: Transformer,
    tokens: list[int],
    max_new_tokens: int,
    cache: Cache,
    sampling: SamplingParams | None,
    eos: int | None,
) -> Iterator[int]:
    """The loop itself, for a request that was checked; `tokens` grows by what it yields."""
    end = len(tokens) + max_new_tokens
    while len(tokens) < end:
        logits = run(model, tokens[cache.length :], cache)
        token = sample(logits[-1], sampling, position=len(tokens))
        tokens.append(token)
        yield token
        if token == eos:
            return


def run(model: Transformer, new: Sequence[int], cache: Cache) -> Tensor:
    """Run the tokens `new` behind what `cache` holds and commit them; their logits `[n, vocab]`.

    After any exception the cache is as it was before.
    """
    logits = forward(model, new, cache)
    cache.advance(new)
    return logits


@torch.inference_mode()
def forward(model: Transformer, new: Sequence[int], cache: Cache) -> Tensor:
    """Run `new` without committing them: to be followed by `advance` with those that count, or `truncate`."""
    start = cache.length
    try:
        cache.reserve(len(new))
        tokens = torch.tensor(new, device=model.device)
        return model(tokens, torch.arange(start, start + len(new), device=model.device), cache)
    except BaseException:
        cache.truncate(start)
        raise
