"""The pool of blocks, the sequences that hold tables into it, and the step that runs several of them at once."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from minillm.device import pick_device
from minillm.kv_cache import AttentionFunction, PlainBuffer, check_kind
from minillm.model.config import ModelConfig
from minillm.model.transformer import Transformer
from minillm.naive_attention import naive_attention
from minillm.paged_cache.allocator import NO_PREFIX, BlockAllocator, OutOfBlocks, Prefix
from minillm.paged_cache.ragged import RaggedStep, ragged_attention


class PagedKVCache:
    """`num_blocks` blocks of `block_size` tokens in every layer, for any number of sequences.

    A block number means the same block in all layers. Raises ValueError for sizes below 1.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int = 16,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        attention: AttentionFunction = naive_attention,
        buffer: Callable[..., PlainBuffer] = PlainBuffer,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.allocator = BlockAllocator(num_blocks)
        self.num_blocks, self.block_size, self.attention = num_blocks, block_size, attention
        device, n_slots = pick_device(device), num_blocks * block_size
        heads, key_dim, value_dim = config.kv_shape
        self.keys = buffer(config.n_layers, n_slots, heads, key_dim, device, dtype)
        self.values = buffer(config.n_layers, n_slots, heads, value_dim, device, dtype)
        self.dtype, self.device = dtype, device

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a step can take: free ones, and those kept for a prefix that nobody uses now."""
        return self.allocator.num_available

    @property
    def nbytes(self) -> int:
        """Bytes of storage of the whole pool."""
        return self.keys.nbytes + self.values.nbytes

    def blocks_for(self, n_tokens: int) -> int:
        """`ceil(n_tokens / block_size)`."""
        return -(-n_tokens // self.block_size)

    def sequence(self, prompt_ids: Sequence[int] = (), max_tokens: int | None = None) -> "PagedSequence":
        """A new sequence. It already holds the longest remembered prefix of `prompt_ids` in whole blocks, but never
        all of the prompt: the last token must run, since its logits are the next token's.

        `max_tokens` is the most tokens it will ever hold. Raises ValueError if the whole pool has no room for them.
        """
        longest = max(len(prompt_ids), max_tokens or 0)
        if self.blocks_for(longest) > self.num_blocks:
            raise ValueError(
                f"a sequence of {longest} tokens needs {self.blocks_for(longest)} blocks of {self.block_size}, "
                f"the whole pool has {self.num_blocks}"
            )
        sequence = PagedSequence(self)
        blocks, numbers = self.allocator.find(prompt_ids[: max(0, len(prompt_ids) - 1)], self.block_size)
        self.allocator.share(blocks)
        sequence.block_table, sequence._prefix_numbers = blocks, numbers
        sequence.token_ids = list(prompt_ids[: len(blocks) * self.block_size])
        return sequence

    def batch(self, steps: Sequence[tuple["PagedSequence", int]]) -> "PagedStep":
        """Reserve n tokens for every (sequence, n), all or none, and return the cache for one forward pass over them.

        Then run the model on the new tokens, sequence after sequence, at the step's `positions`, and `advance` each
        sequence. Raises OutOfBlocks, or ValueError for a sequence that is freed, foreign or named twice; in both
        cases nothing has changed.
        """
        self._reserve(steps)
        return PagedStep(self, steps)

    def _reserve(self, steps: Sequence[tuple["PagedSequence", int]]) -> None:
        self._check(steps)
        # Count first, then act: a step that fails must not have evicted, copied or taken anything.
        grown = sum(max(0, self.blocks_for(s.length + n) - len(s.block_table)) for s, n in steps)
        # A shared tail is copied by each writer but the last owner, who writes in place.
        writers = Counter(tail for s, n in steps if n and (tail := s.partial_block) is not None)
        copied = sum(min(count, self.allocator.owners[block] - 1) for block, count in writers.items())
        if grown + copied > self.num_free_blocks:
            raise OutOfBlocks(grown + copied, self.num_free_blocks)
        for sequence, n in steps:
            sequence._resize(sequence.length + n)
            if n and sequence.partial_block is not None:
                self._make_writable(sequence)
            sequence._reserved = sequence.length + n

    def _check(self, steps: Sequence[tuple["PagedSequence", int]]) -> None:
        if not any(n for _, n in steps):
            raise ValueError("a step runs at least one token")
        if len({id(s) for s, _ in steps}) < len(steps):
            raise ValueError("a sequence stands twice in one step")
        for sequence, n in steps:
            sequence._check_alive()
            if sequence.cache is not self:
                raise ValueError("a sequence of another cache cannot run in this one")
            if n < 0:
                raise ValueError(f"a step cannot run {n} tokens of a sequence")

    def _make_writable(self, sequence: "PagedSequence") -> None:
        """Copy-on-write: before anything is written behind the tokens of its last block, the block is its own."""
        block = sequence.partial_block
        if self.allocator.owners[block] == 1:
            self.allocator.forget(block)  # a prefix that names it would soon name other tokens
            return
        copy = self.allocator.take()
        for buffer in (self.keys, self.values):
            buffer.copy(self._slots_of(block), self._slots_of(copy))
        sequence.block_table[sequence.length // self.block_size] = copy
        self.allocator.release([block])

    def _slots_of(self, block: int) -> slice:
        return slice(block * self.block_size, (block + 1) * self.block_size)


class PagedStep:
    """The cache of one forward pass over a batch; it holds no more than what the pass needs."""

    def __init__(self, cache: PagedKVCache, steps: Sequence[tuple["PagedSequence", int]]) -> None:
        self.cache = cache
        tables = [(s.block_table, s.length, n) for s, n in steps]
        # Here, between reserve and advance, a table has ceil((length + n) / block_size) blocks, `length` without the
        # n tokens being run. Before reserve and after advance it is ceil(length / block_size).
        assert all(len(table) == cache.blocks_for(length + n) for table, length, n in tables)
        self.step = RaggedStep.of(tables, cache.block_size, cache.keys, cache.device)
        self.positions = self.step.positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """Write k, v `[N, K, d]` into their slots, attend q `[N, H, d]` through the tables."""
        c, step = self.cache, self.step
        check_kind(c.dtype, c.device, k)
        if len(k) != len(step.slots):
            raise ValueError(f"{len(k)} tokens attend, {len(step.slots)} are reserved")
        c.keys.write(layer, step.slots, k)
        c.values.write(layer, step.slots, v)
        return ragged_attention(q, layer, c.keys, c.values, step, scale, c.attention)


@torch.inference_mode()
def forward_batch(
    model: Transformer, cache: PagedKVCache, steps: Sequence[tuple["PagedSequence", Sequence[int]]]
) -> Tensor:
    """Run the new tokens of every sequence in one pass without committing them: logits `[N, vocab]`, sequence after
    sequence. To be followed by `advance`, or `truncate`; after any exception every sequence is as it was before.
    """
    try:
        batch = cache.batch([(sequence, len(new)) for sequence, new in steps])
        tokens = torch.tensor([i for _, new in steps for i in new], device=model.device)
        return model(tokens, batch.positions, batch)
    except BaseException:
        for sequence, _ in steps:
            sequence.truncate(sequence.length)
        raise


class PagedSequence:
    """One sequence: the tokens it holds and the numbers of the blocks that hold them. A cache for `generate`.

    Made by `PagedKVCache.sequence` and `fork`; to be given back with `free`.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache
        self.block_table: list[int] = []
        self.token_ids: list[int] = []
        self._prefix_numbers: list[int] = []  # of its full blocks
        self._reserved = 0
        self._step: PagedStep | None = None
        self._alive = True

    @property
    def length(self) -> int:
        """Tokens it holds."""
        return len(self.token_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks in its table, shared ones counted in full."""
        return len(self.block_table) * self.cache.nbytes // self.cache.num_blocks

    def reserve(self, n: int) -> None:
        """Take the blocks for n more tokens. Raises OutOfBlocks, and changes nothing, if there are too few."""
        self._step = self.cache.batch([(self, n)])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """A step of one sequence."""
        if self._step is None:
            raise ValueError(f"{len(k)} tokens attend, 0 are reserved: call reserve first")
        return self._step.attend(layer, q, k, v, scale)

    def advance(self, ids: Sequence[int]) -> None:
        """Commit the first `len(ids)` of the reserved tokens; blocks that only the others needed are given back.

        Blocks that became full are registered: from now on a prompt that begins like this one finds them.
        """
        self._check_alive()
        if len(ids) > self._reserved - self.length:
            raise ValueError(f"{len(ids)} tokens to commit, {self._reserved - self.length} are reserved")
        self.token_ids.extend(ids)
        self._resize(self.length)
        size = self.cache.block_size
        for i in range(len(self._prefix_numbers), self.length // size):
            parent = self._prefix_numbers[-1] if self._prefix_numbers else NO_PREFIX
            prefix = Prefix(parent, tuple(self.token_ids[i * size : (i + 1) * size]))
            self._prefix_numbers.append(self.cache.allocator.register(self.block_table[i], prefix))

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on and any reservation, and give their blocks back."""
        self._check_alive()
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate to {length}: the sequence holds {self.length} tokens")
        del self.token_ids[length:]
        del self._prefix_numbers[length // self.cache.block_size :]
        self._resize(length)

    def fork(self) -> "PagedSequence":
        """Another sequence with the same tokens in the same blocks; whoever writes first copies the shared last one.

        Raises ValueError in the middle of a step.
        """
        self._check_alive()
        if self._reserved > self.length:
            raise ValueError("a sequence cannot be forked in the middle of a step: advance or truncate it first")
        twin = PagedSequence(self.cache)
        twin.block_table = self.block_table[: self.cache.blocks_for(self.length)]
        twin.token_ids, twin._prefix_numbers = list(self.token_ids), list(self._prefix_numbers)
        self.cache.allocator.share(twin.block_table)
        return twin

    def free(self) -> None:
        """Give every block back; the sequence is of no use any more. Full blocks stay findable until needed."""
        self._check_alive()
        self.cache.allocator.release(self.block_table)
        self.block_table, self._alive, self._step = [], False, None

    @property
    def partial_block(self) -> int | None:
        """The block into which the next token goes, if it already holds tokens."""
        index, inside = divmod(self.length, self.cache.block_size)
        return self.block_table[index] if inside else None

    def blocks_needed(self, n: int, leaving: Mapping[int, int] | None = None) -> int:
        """Blocks that n more tokens take from the pool: new ones, and a copy of the last one if others share it.

        `leaving` counts the owners that a block is about to lose.
        """
        tail = self.partial_block
        shared = n and tail is not None and self.cache.allocator.owners[tail] - (leaving or {}).get(tail, 0) > 1
        return self.cache.blocks_for(self.length + n) - len(self.block_table) + bool(shared)

    def _resize(self, n_tokens: int) -> None:
        """Hold exactly the blocks for `n_tokens`, reserve nothing."""
        n_blocks = self.cache.blocks_for(n_tokens)
        self.cache.allocator.release(self.block_table[n_blocks:])
        del self.block_table[n_blocks:]
        while len(self.block_table) < n_blocks:
            self.block_table.append(self.cache.allocator.take())
        self._reserved, self._step = self.length, None

    def _check_alive(self) -> None:
        if not self._alive:
            raise ValueError("the sequence was freed")
