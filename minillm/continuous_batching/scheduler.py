"""Who runs in the next step, and how many tokens of each: a decision, nothing else.

The rules, in this order:
1. Every running sample that decodes gets one token.
2. What is left of the token budget goes to prompts, the oldest first, in slices.
3. Samples wait in order of arrival. The first enters if a place, budget and blocks for all its known tokens are free.
   A sibling of a sample that still runs their prompt keeps a place: it will be forked, and others go on meanwhile.
4. If blocks run out, the newest running sample gives all of its back and waits in front of the queue again.
5. Budget and blocks that nobody wants go to guesses (chapter 6), the oldest sample first.

So nobody starves. The oldest unfinished sample is never preempted and advances in every step: by a token if it
decodes, else by a slice of at least C = token_budget - max_batch + 1 tokens. Hence, numbered in order of arrival,
sample k is done at most sum over i <= k of (ceil(known_i / C) + new_i) steps after it arrived.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from minillm.continuous_batching.request import Sample
from minillm.paged_cache import PagedKVCache


class _Room:
    """Blocks during a decision: what is free, and what preempted samples will have given back."""

    def __init__(self, pool: PagedKVCache) -> None:
        self.pool, self.free = pool, pool.num_free_blocks
        self._leaving: Counter[int] = Counter()  # owners that a block is about to lose

    def needed(self, sample: Sample, n: int) -> int:
        """Blocks for n more tokens of a running sample: new ones, and a copy of its last if that is shared."""
        return sample.sequence.blocks_needed(n, self._leaving)

    def give_back(self, sample: Sample) -> None:
        """Count the blocks of a sample that will be preempted: a shared one is free when its last owner leaves."""
        for block in sample.sequence.block_table:
            self._leaving[block] += 1
            self.free += self._leaving[block] == self.pool.allocator.owners[block]


@dataclass
class Plan:
    """`preempt` first, then admit those of `counts` that have no sequence, then run n tokens of each in `counts`."""

    counts: list[tuple[Sample, int]] = field(default_factory=list)
    preempt: list[Sample] = field(default_factory=list)


class Scheduler:
    """Continuous batching: at most `max_batch` samples and `token_budget` tokens a step.

    Raises ValueError for a batch below 1 and a budget that decoding alone could use up.
    """

    whole_groups = False  # whether samples enter an empty engine only, as many as there are places

    def __init__(self, max_batch: int = 16, token_budget: int = 256) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        if token_budget < max_batch:
            raise ValueError(f"token_budget={token_budget} is below max_batch={max_batch}: decoding would starve")
        self.max_batch, self.token_budget = max_batch, token_budget

    def plan(self, running: Sequence[Sample], waiting: Sequence[Sample], pool: PagedKVCache) -> Plan:
        """The next step for `running` and `waiting` samples, both in order of arrival. Changes nothing."""
        plan, budget, kept = Plan(), self.token_budget, list(running)
        wanted: dict[Sample, int] = {}
        for sample in sorted(kept, key=lambda s: not s.decodes):  # those that decode first, then by arrival
            wanted[sample] = min(budget, len(sample.pending))
            budget -= wanted[sample]
        room = _Room(pool)
        for sample in running:  # the oldest first: who is left without blocks is the newest
            if sample not in kept:
                break
            while room.needed(sample, wanted[sample]) > room.free:
                newest = kept.pop()
                plan.preempt.append(newest)
                budget += wanted[newest]
                if newest is sample:
                    break
                room.give_back(newest)
            else:
                room.free -= room.needed(sample, wanted[sample])
        plan.counts = [(s, wanted[s]) for s in kept if wanted[s]]
        if not plan.preempt:
            budget -= self._admit(plan, kept, waiting, budget, room)
        self._add_guesses(plan, budget, room)
        return plan

    def _admit(self, plan: Plan, kept: Sequence[Sample], waiting: Sequence[Sample], budget: int, room: _Room) -> int:
        """Put those who enter into the plan; the tokens they take of the budget."""
        left, places = budget, self.max_batch - len(kept)
        prompts = {s.submission for s in kept if not s.token_ids}  # still running their prompt
        for sample in waiting if not (self.whole_groups and kept) else ():
            if places < 1:
                break
            if sample.submission in prompts and not sample.token_ids:
                places -= 1
                continue
            blocks = room.pool.blocks_for(len(sample.ids))
            if blocks > room.free or (left < 1 and not self.whole_groups):
                break  # nobody overtakes
            n = min(left, len(sample.pending))
            plan.counts.append((sample, n))
            if not sample.token_ids:
                prompts.add(sample.submission)
            places, left, room.free = places - 1, left - n, room.free - blocks
        return budget - left

    def _add_guesses(self, plan: Plan, budget: int, room: _Room) -> None:
        """Guesses take nobody's place: they never preempt, and never make a prompt wait."""
        for i, (sample, n) in enumerate(plan.counts):
            guesses = min(budget, len(sample.drafts))
            while guesses and (more := room.needed(sample, n + guesses) - room.needed(sample, n)) > room.free:
                guesses -= 1
            if guesses:
                plan.counts[i] = (sample, n + guesses)
                budget, room.free = budget - guesses, room.free - more


class StaticScheduler(Scheduler):
    """Static batching: a group enters together, and the next when all of it has left. Rows that are finished are not
    computed, so the comparison is fair; their places stay empty.
    """

    whole_groups = True
