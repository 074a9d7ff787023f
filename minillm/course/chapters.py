"""The one table of chapters: the tour runs it, the README and the notebooks are checked against it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import minillm
from minillm.flash_attention import flash_attention
from minillm.generate import Cache, generate
from minillm.kv_cache import AttentionFunction, KVCache
from minillm.model.sampling import SamplingParams
from minillm.model.transformer import Transformer
from minillm.naive_attention import NoCache, naive_attention
from minillm.paged_cache import PagedKVCache
from minillm.speculative_decoding import NGrams, speculative_generate


@dataclass(frozen=True)
class Chapter:
    """One bottleneck and the module that removes it. `name` is the module, the notebook, the test and the figure.

    `cache(model, max_tokens)` makes the cache under which one sequence of at most `max_tokens` is generated; None for
    a chapter about many sequences, which the tour runs in an engine. `generate` is the loop over it, called like
    `minillm.generate`. A lossless chapter gives the tokens of chapter 1. `builds_on` is the number of the chapter its
    gain is counted from, None for the one before; `note` is what a table should say of its stage.
    """

    number: int
    name: str
    title: str
    bottleneck: str
    idea: str
    cache: Callable[[Transformer, int], Cache] | None
    lossless: bool = True
    generate: Callable[..., Iterator[int]] = generate
    builds_on: int | None = None
    note: str = ""

    @property
    def stem(self) -> str:
        """`01_naive_attention`: what notebook, test and figure are called."""
        return f"{self.number:02d}_{self.name}"


BLOCK_SIZE = 16
GAMMA = 3  # guesses a step of chapter 6's stage


def _contiguous(model: Transformer, max_tokens: int) -> KVCache:
    """Rows for one sequence of `max_tokens`."""
    return KVCache(model.config, max_tokens, model.device, model.dtype)


def _pool(model: Transformer, max_tokens: int, attention: AttentionFunction = naive_attention) -> PagedKVCache:
    """A pool with just the blocks that one sequence of `max_tokens` needs."""
    n_blocks = -(-max_tokens // BLOCK_SIZE)
    return PagedKVCache(model.config, n_blocks, BLOCK_SIZE, model.device, model.dtype, attention)


def _speculate(
    model: Transformer,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    cache: Cache,
    sampling: SamplingParams | None = None,
    eos: int | None = None,
) -> Iterator[int]:
    """With the shipped draft model; with n-grams for a model that speaks of other tokens."""
    small, _ = minillm.load("draft", model.device, model.dtype)
    draft = small if small.config.vocab_size == model.config.vocab_size else NGrams()
    return speculative_generate(model, draft, prompt_ids, max_new_tokens, GAMMA, cache, sampling, eos)


CHAPTERS = (
    Chapter(
        number=1,
        name="naive_attention",
        title="Naive attention",
        bottleneck="every new token runs the whole text again",
        idea="none yet: the formula, the loop, and what they cost",
        cache=lambda model, max_tokens: NoCache(),
    ),
    Chapter(
        number=2,
        name="kv_cache",
        title="KV cache",
        bottleneck="old tokens run again for every new one",
        idea="keep each token's key and value, in rows reserved once",
        cache=_contiguous,
    ),
    Chapter(
        number=3,
        name="paged_cache",
        title="Paged KV cache",
        bottleneck="memory is reserved for texts that never come, and shared beginnings are stored twice",
        idea="blocks of a few tokens, and a table of block numbers for every sequence",
        cache=lambda model, max_tokens: _pool(model, max_tokens).sequence(max_tokens=max_tokens),
    ),
    Chapter(
        number=4,
        name="flash_attention",
        title="FlashAttention",
        bottleneck="all scores are written to memory and read back",
        idea="softmax in one pass over tiles that fit fast memory; in Triton on a GPU",
        cache=lambda model, max_tokens: _pool(model, max_tokens, flash_attention).sequence(max_tokens=max_tokens),
    ),
    Chapter(
        number=5,
        name="continuous_batching",
        title="Continuous batching",
        bottleneck="a batch waits for its longest answer while others queue",
        idea="decide before every step who is in it",
        cache=None,
    ),
    Chapter(
        number=6,
        name="speculative_decoding",
        title="Speculative decoding",
        bottleneck="a step reads all weights to make one token",
        idea="a cheap draft guesses, one step checks several guesses at once",
        cache=_contiguous,
        generate=_speculate,
        builds_on=2,
        note=f"{GAMMA} guesses",
    ),
)
