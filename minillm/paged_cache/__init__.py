"""Chapter 3: the paged KV cache.

The bottleneck: a contiguous cache reserves the longest text a sequence might become, so most of a GPU's memory holds
no token, and two sequences with the same beginning store it twice. The idea: cut the memory into blocks of a few
tokens and give every sequence a table of block numbers, as an operating system gives a process pages; a block may
stand in many tables. The invariants: at the moment of a forward pass a sequence holds ceil((length + n) / block_size)
blocks, and a block is written only by its single owner and only while no prefix names it.

Read `allocator` (who owns which block), `cache` (sequences), `ragged` (a step over many sequences), in this order;
`in_place` is the same step on a GPU.
It does not decide who runs (chapter 5), and on a CPU it pays for its tables with a copy (chapter 4 reads blocks in
place). Kwon et al. 2023, "Efficient memory management for large language model serving with PagedAttention".
"""

from minillm.paged_cache.allocator import BlockAllocator, OutOfBlocks, Prefix
from minillm.paged_cache.cache import PagedKVCache, PagedSequence, forward_batch
from minillm.paged_cache.ragged import RaggedStep, ragged_attention

__all__ = [
    "BlockAllocator",
    "OutOfBlocks",
    "PagedKVCache",
    "PagedSequence",
    "Prefix",
    "RaggedStep",
    "forward_batch",
    "ragged_attention",
]
