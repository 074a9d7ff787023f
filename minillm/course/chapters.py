"""The one table of chapters: the tour runs it, the README and the notebooks are checked against it."""

from collections.abc import Callable
from dataclasses import dataclass

from minillm.flash_attention import flash_attention
from minillm.generate import Cache
from minillm.kv_cache import AttentionFunction, KVCache
from minillm.model.transformer import Transformer
from minillm.naive_attention import NoCache, naive_attention
from minillm.paged_cache import PagedKVCache


@dataclass(frozen=True)
class Chapter:
    """One bottleneck and the module that removes it. `name` is the module, the notebook, the test and the figure.

    `cache(model, max_tokens)` makes the cache under which one sequence of at most `max_tokens` is generated; None for
    a chapter about many sequences, which the tour runs in an engine. A lossless chapter gives the tokens of chapter 1.
    """

    number: int
    name: str
    title: str
    bottleneck: str
    idea: str
    cache: Callable[[Transformer, int], Cache] | None
    lossless: bool = True

    @property
    def stem(self) -> str:
        """`01_naive_attention`: what notebook, test and figure are called."""
        return f"{self.number:02d}_{self.name}"


BLOCK_SIZE = 16


def _pool(model: Transformer, max_tokens: int, attention: AttentionFunction = naive_attention) -> PagedKVCache:
    """A pool with just the blocks that one sequence of `max_tokens` needs."""
    n_blocks = -(-max_tokens // BLOCK_SIZE)
    return PagedKVCache(model.config, n_blocks, BLOCK_SIZE, model.device, model.dtype, attention)


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
        cache=lambda model, max_tokens: KVCache(model.config, max_tokens, model.device, model.dtype),
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
)
