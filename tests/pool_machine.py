"""Random use of a block pool, with a plain list of tokens beside every sequence: what must hold after every call.

The contents are checked without a model: like a real one, a token's "key" depends on every token before it (it is a
hash of them), so a row that was overwritten, copied wrongly or found behind another prefix shows at once.
For more examples than the suite runs: `python tests/pool_machine.py 50000`.
"""

import random
import sys
from collections import Counter

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minillm.model.config import ModelConfig
from minillm.paged_cache import OutOfBlocks, PagedKVCache, PagedSequence

CONFIG = ModelConfig(8, dim=2, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=2, hidden_dim=1, max_seq_len=64)


def row(prefix: list[int]) -> list[float]:
    """What the last token of `prefix` leaves in the cache."""
    return [float(prefix[-1]), float(hash(tuple(prefix)) % 1_000_003)]


def check_pool(cache: PagedKVCache, sequences: list[PagedSequence], extra_owners: int = 0) -> None:
    """The invariants of blocks, given every living sequence (and how many owners of blocks are not among them)."""
    a = cache.allocator
    owners = Counter(block for s in sequences for block in s.block_table)
    free, kept = set(a._free), set(a.kept)
    used = {b for b, n in enumerate(a.owners) if n}
    assert len(free) == len(a._free), "a block stands twice in the free list"
    assert len(free) + len(kept) + len(used) == cache.num_blocks, "free, kept and used blocks are the pool"
    assert not free & kept, "a block is both free and kept"
    assert not used & (free | kept), "a used block is up for taking"
    assert sum(a.owners) - sum(owners.values()) == extra_owners, "owners counted and tables do not match"
    if not extra_owners:
        assert {b: a.owners[b] for b in used} == owners, "each block's count is the number of tables it stands in"
    assert all(a.is_registered(b) for b in kept), "a block without a name is kept"
    assert all(not a.is_registered(b) for b in free), "a free block still has a name"
    assert {a._prefix_of[b]: b for b in a._prefix_of} == a._block_of, "names and blocks are each other's inverse"


class PoolMachine(RuleBasedStateMachine):
    """create (with and without prefix hit), step, fork, truncate, free, failed reserve, aborted forward."""

    @initialize(block_size=st.integers(1, 4), num_blocks=st.integers(1, 12), seed=st.integers(0, 99))
    def start(self, block_size, num_blocks, seed):
        self.cache = PagedKVCache(CONFIG, num_blocks, block_size, "cpu", attention=lambda q, k, v, scale: q)
        random.Random(seed).shuffle(self.cache.allocator._free)
        self.cache.keys.data.fill_(torch.nan)
        self.alive: list[tuple[PagedSequence, list[int]]] = []

    def pick(self, i):
        return self.alive[i % len(self.alive)]

    def write(self, sequence, start, ids):
        """What a forward pass does to the pool: each new token's row says which token it is, and where."""
        step = sequence._step
        known = sequence.token_ids[:start]
        rows = torch.tensor([[row([*known, *ids[: j + 1]])] for j in range(len(ids))])
        self.cache.keys.write(0, step.step.slots, rows)
        self.cache.values.write(0, step.step.slots, rows)

    @rule(ids=st.lists(st.integers(0, 1), max_size=10), limit=st.none() | st.integers(0, 60))
    def create(self, ids, limit):
        before = self.cache.num_free_blocks
        longest = max(len(ids), limit or 0)
        try:
            sequence = self.cache.sequence(ids, limit)
        except ValueError:
            assert self.cache.blocks_for(longest) > self.cache.num_blocks
            assert self.cache.num_free_blocks == before
            return
        assert self.cache.blocks_for(longest) <= self.cache.num_blocks
        assert sequence.length < max(1, len(ids)), "one prompt token at least is left to run"
        self.alive.append((sequence, ids[: sequence.length]))

    @precondition(lambda self: self.alive)
    @rule(i=st.integers(0, 99), ids=st.lists(st.integers(0, 1), min_size=1, max_size=7), keep=st.integers(0, 7))
    def step(self, i, ids, keep):
        """Reserve, write, commit all or the first of them."""
        sequence, tokens = self.pick(i)
        table, available = list(sequence.block_table), self.cache.num_free_blocks
        try:
            sequence.reserve(len(ids))
        except OutOfBlocks:
            assert sequence.block_table == table
            assert self.cache.num_free_blocks == available
            return
        size = self.cache.block_size
        assert len(sequence.block_table) == -(-(len(tokens) + len(ids)) // size), "ceil((length + n) / block_size)"
        for block in sequence.block_table[len(tokens) // size :]:
            assert self.cache.allocator.owners[block] == 1, "a block about to be written has one owner"
            assert not self.cache.allocator.is_registered(block), "a block about to be written has no name"
        self.write(sequence, len(tokens), ids)
        sequence.advance(ids[:keep])
        tokens.extend(ids[:keep])

    @precondition(lambda self: self.alive)
    @rule(i=st.integers(0, 99), ids=st.lists(st.integers(0, 1), min_size=1, max_size=7), written=st.integers(0, 7))
    def aborted_forward(self, i, ids, written):
        sequence, tokens = self.pick(i)
        try:
            sequence.reserve(len(ids))
        except OutOfBlocks:
            return
        if written:
            self.write(sequence, len(tokens), ids)
        sequence.truncate(sequence.length)

    @precondition(lambda self: self.alive)
    @rule(
        picks=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 3)), min_size=1, max_size=4),
        token=st.integers(0, 1),
    )
    def batch(self, picks, token):
        chosen = {id(self.pick(i)[0]): (*self.pick(i), n) for i, n in picks}.values()
        if not any(n for _, _, n in chosen):
            return
        tables = [list(s.block_table) for s, _, _ in chosen]
        try:
            step = self.cache.batch([(s, n) for s, _, n in chosen])
        except OutOfBlocks:
            assert [s.block_table for s, _, _ in chosen] == tables, "all or none"
            return
        rows = torch.tensor([[row([*s.token_ids, *[token] * (j + 1)])] for s, _, n in chosen for j in range(n)])
        step.attend(0, rows, rows, rows)
        for sequence, tokens, n in chosen:
            sequence.advance([token] * n)
            tokens.extend([token] * n)

    @precondition(lambda self: 0 < len(self.alive) < 8)
    @rule(i=st.integers(0, 99))
    def fork(self, i):
        sequence, tokens = self.pick(i)
        self.alive.append((sequence.fork(), list(tokens)))

    @precondition(lambda self: self.alive)
    @rule(i=st.integers(0, 99), share=st.floats(0, 1))
    def truncate(self, i, share):
        sequence, tokens = self.pick(i)
        length = int(share * len(tokens))
        sequence.truncate(length)
        del tokens[length:]

    @precondition(lambda self: self.alive)
    @rule(i=st.integers(0, 99))
    def free(self, i):
        sequence, _ = self.pick(i)
        sequence.free()
        self.alive = [pair for pair in self.alive if pair[0] is not sequence]

    @invariant()
    def blocks_add_up(self):
        if hasattr(self, "cache"):
            check_pool(self.cache, [s for s, _ in self.alive])

    @invariant()
    def contents_equal_the_plain_lists(self):
        if not hasattr(self, "cache"):
            return
        for sequence, tokens in self.alive:
            assert sequence.token_ids == tokens
            assert len(sequence.block_table) == self.cache.blocks_for(len(tokens)), "ceil(length / block_size) at rest"
            size, blocks = self.cache.block_size, torch.tensor(sequence.block_table, dtype=torch.int32)
            for buffer in (self.cache.keys, self.cache.values):
                rows = buffer.read_blocks(0, buffer.block_rows(blocks, size), size)[: len(tokens), 0]
                expected = [row(tokens[: p + 1]) for p in range(len(tokens))]
                assert rows.tolist() == expected, f"rows {rows.tolist()} of a sequence that wrote {expected}"

    def teardown(self):
        if hasattr(self, "cache"):
            for sequence, _ in self.alive:
                sequence.free()
            check_pool(self.cache, [])
            assert self.cache.num_free_blocks == self.cache.num_blocks, "the whole pool is there at the end"


if __name__ == "__main__":
    torch.set_num_threads(1)
    PoolMachine.TestCase.settings = settings(
        max_examples=int(sys.argv[1]), stateful_step_count=40, deadline=None, database=None
    )
    PoolMachine.TestCase("runTest").runTest()
    print(f"{sys.argv[1]} random programs: every invariant held")
