"""Who owns which block, and which blocks are remembered for their content.

It knows numbers only, no tensors. A block is in exactly one of three states:
  used    one or more owners; owners are counted, and a block with two is shared
  kept    no owner, but registered: it holds the keys and values of a known prefix, and can be found again for as
          long as the blocks before it can
  free    no owner, no memory
`used + kept + free = num_blocks` at all times. Kept blocks are given away, least recently used first, when no free
one is left: keeping them costs nothing.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class OutOfBlocks(RuntimeError):
    """A step needs more blocks than are free or kept; `missing` says how many more."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} blocks needed, {available} available: {needed - available} missing")
        self.missing = needed - available


class Prefix(NamedTuple):
    """The content of a full block: its tokens, and the number of the prefix before it. Equal only if both are.

    Keys and values of a token depend on every token before it, so the same tokens behind another prefix are another
    content. A dict finds a Prefix by hash and then compares tokens and parent themselves: no collision can lie.
    """

    parent: int
    tokens: tuple[int, ...]


NO_PREFIX = 0  # the parent of a sequence's first block


class BlockAllocator:
    """Blocks 0 .. num_blocks-1. Raises ValueError for fewer than one."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.owners = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the last is taken first
        self._kept: dict[int, None] = {}  # in the order in which their last owner left
        self._block_of: dict[Prefix, int] = {}
        self._prefix_of: dict[int, Prefix] = {}  # the inverse
        self._number_of: dict[int, int] = {}  # registered block -> number of its prefix, never used twice
        self._last_number = NO_PREFIX

    @property
    def num_available(self) -> int:
        """Blocks that can be taken: free or kept."""
        return len(self._free) + len(self._kept)

    @property
    def kept(self) -> Sequence[int]:
        """Blocks without an owner whose content is remembered, the next to be given away first."""
        return tuple(self._kept)

    def remembered_tokens(self, block: int) -> tuple[int, ...]:
        """The tokens of a registered block."""
        return self._prefix_of[block].tokens

    def is_registered(self, block: int) -> bool:
        """Whether a prefix names this block."""
        return block in self._prefix_of

    def take(self) -> int:
        """A block for one owner; its old content, if remembered, is forgotten. Raises OutOfBlocks."""
        if not self.num_available:
            raise OutOfBlocks(1, 0)
        if self._free:
            block = self._free.pop()
        else:
            block = next(iter(self._kept))
            del self._kept[block]
            self.forget(block)
        self.owners[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each of `blocks`, which are used or kept."""
        for block in blocks:
            self._kept.pop(block, None)
            self.owners[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less for each of a sequence's `blocks`, the last first: what follows a prefix goes before it."""
        for block in reversed(blocks):
            self.owners[block] -= 1
            if self.owners[block] == 0:
                if self.is_registered(block):
                    self._kept[block] = None
                else:
                    self._free.append(block)

    def register(self, block: int, prefix: Prefix) -> int:
        """Remember that `block` holds `prefix`; returns the number of that prefix, the parent of the next block's.

        If another block already holds it, that one stays the one to be found.
        """
        known = self._block_of.setdefault(prefix, block)
        if known == block and block not in self._number_of:
            self._prefix_of[block] = prefix
            self._last_number += 1
            self._number_of[block] = self._last_number
        return self._number_of[known]

    def forget(self, block: int) -> None:
        """The content of `block` is about to change: no prefix names it any more."""
        if prefix := self._prefix_of.pop(block, None):
            del self._block_of[prefix]
            del self._number_of[block]

    def find(self, tokens: Sequence[int], block_size: int) -> tuple[list[int], list[int]]:
        """The longest remembered prefix of `tokens` in whole blocks: the blocks, and the numbers of their prefixes."""
        blocks: list[int] = []
        numbers: list[int] = []
        for start in range(0, len(tokens) - block_size + 1, block_size):
            parent = numbers[-1] if numbers else NO_PREFIX
            block = self._block_of.get(Prefix(parent, tuple(tokens[start : start + block_size])))
            if block is None:
                break
            blocks.append(block)
            numbers.append(self._number_of[block])
        return blocks, numbers
