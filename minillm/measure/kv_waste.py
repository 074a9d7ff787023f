"""How much of the memory reserved for keys and values holds a token: three ways to reserve, on the same requests.

Slots are counted, not bytes: a slot is room for one token. The definitions are the vLLM paper's (Kwon et al. 2023,
section 3.1): of a request's reserved slots some hold a token, some will hold one later (*reserved*), some never will
(*internal* fragmentation); free slots that lie in holes too small for the next request are *external* fragmentation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from minillm.measure.traces import RequestLengths


class Slots(NamedTuple):
    """What slots are used for at one moment; sums and shares of these are taken over time."""

    used: float
    reserved: float
    internal: float
    external: float

    @property
    def share_used_of_reserved(self) -> float:
        """Slots that hold a token over all slots given to requests."""
        return self.used / (self.used + self.reserved + self.internal)

    def shares(self) -> "Slots":
        """The same in parts of their sum."""
        total = sum(self)
        return Slots(*(x / total for x in self))


def request_slots(capacity: int, held: int, final: int) -> Slots:
    """The slots of one request that was given `capacity` of them, holds `held` tokens and will hold `final`.

    The token being written counts as held.
    """
    if not 0 <= held <= final <= capacity:
        raise ValueError(f"held={held}, final={final}, capacity={capacity}: must not decrease in this order")
    return Slots(used=held, reserved=final - held, internal=capacity - final, external=0)


class Policy(Protocol):
    """A way to reserve memory for requests."""

    def start(self, request: RequestLengths) -> int | None:
        """Reserve for a request with its prompt; a handle, or None if there is no room now."""
        ...

    def grow(self, handle: int, held: int) -> bool:
        """Make room for `held` tokens; False if there is none."""
        ...

    def stop(self, handle: int) -> None:
        """Give back what the request had."""
        ...

    def capacity(self, handle: int) -> int:
        """Slots the request has."""
        ...


class Contiguous:
    """One run of slots a request, first fit. `longest` tokens for each, or with None the prompt and the next power of
    two above the answer (which a real system would have to guess).
    """

    def __init__(self, n_slots: int, longest: int | None) -> None:
        self.longest = longest
        self.holes = [(0, n_slots)]  # (start, size), ascending
        self.runs: dict[int, int] = {}  # start -> size

    def start(self, request: RequestLengths) -> int | None:
        """Reserve everything at once, in the first hole that is large enough."""
        size = self.longest or request.prompt + 2 ** math.ceil(math.log2(request.output))
        for i, (start, hole) in enumerate(self.holes):
            if hole >= size:
                self.holes[i : i + 1] = [(start + size, hole - size)] if hole > size else []
                self.runs[start] = size
                return start
        return None

    def grow(self, handle: int, held: int) -> bool:
        """It was all reserved at the start."""
        return held <= self.runs[handle]

    def stop(self, handle: int) -> None:
        """Give the run back, joined with holes beside it."""
        joined: list[tuple[int, int]] = []
        for start, size in sorted([*self.holes, (handle, self.runs.pop(handle))]):
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((start, size))
        self.holes = joined

    def capacity(self, handle: int) -> int:
        """The size of the run."""
        return self.runs[handle]


class Paged:
    """Blocks of `block_size` slots, one more when the last is full."""

    def __init__(self, n_slots: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = n_slots // block_size
        self.blocks: dict[int, int] = {}  # handle -> blocks
        self._next = 0

    def start(self, request: RequestLengths) -> int | None:
        """Blocks for the prompt and the token after it."""
        handle, self._next = self._next, self._next + 1
        self.blocks[handle] = 0
        if self.grow(handle, request.prompt + 1):
            return handle
        del self.blocks[handle]
        return None

    def grow(self, handle: int, held: int) -> bool:
        """Take the blocks that `held` tokens need more."""
        more = -(-held // self.block_size) - self.blocks[handle]
        if more > self.free:
            return False
        self.free -= max(0, more)
        self.blocks[handle] += max(0, more)
        return True

    def stop(self, handle: int) -> None:
        """Give the blocks back."""
        self.free += self.blocks.pop(handle)

    def capacity(self, handle: int) -> int:
        """Slots of its blocks."""
        return self.blocks[handle] * self.block_size


@dataclass
class _Running:
    request: RequestLengths
    handle: int
    held: int


class Occupancy(NamedTuple):
    """What a run of `simulate` saw, averaged over the steps in which requests were waiting."""

    slots: Slots
    mean_running: float
    steps: int


def simulate(policy: Policy, n_slots: int, requests: Sequence[RequestLengths]) -> Occupancy:
    """Serve `requests`, all waiting at the start, first come first served; each running one grows a token a step.

    When a policy cannot grow a request, the newest running one gives everything back and waits in front again.
    Averages are taken while requests wait, so that memory and not the lack of work is the limit. Raises ValueError
    if a request fits nowhere.
    """
    waiting, running = list(reversed(requests)), []
    sums, counted, n_running, steps = [0.0] * 4, 0, 0, 0
    while waiting or running:
        while waiting and (handle := policy.start(waiting[-1])) is not None:
            request = waiting.pop()
            running.append(_Running(request, handle, request.prompt + 1))
        if not running:
            raise ValueError(f"{waiting[-1]} does not fit into {n_slots} slots")
        if waiting:
            counted, n_running = counted + 1, n_running + len(running)
            for r in running:
                for i, x in enumerate(request_slots(*_state(policy, r))):
                    sums[i] += x
            sums[3] += n_slots - sum(policy.capacity(r.handle) for r in running)
        steps += 1
        _advance(policy, running, waiting)
    counted = max(1, counted)
    return Occupancy(Slots(*(x / counted for x in sums)), n_running / counted, steps)


def _state(policy: Policy, r: _Running) -> tuple[int, int, int]:
    """(capacity, held, final): a paged request has reserved nothing for later, so its capacity bounds what counts."""
    capacity = policy.capacity(r.handle)
    return capacity, r.held, min(r.request.total, capacity)


def _advance(policy: Policy, running: list[_Running], waiting: list[RequestLengths]) -> None:
    """One token more for everybody; finished requests leave, and if need be the newest."""
    for r in [r for r in running if r.held >= r.request.total]:
        policy.stop(r.handle)
        running.remove(r)
    i = 0
    while i < len(running):
        if policy.grow(running[i].handle, running[i].held + 1):
            running[i].held += 1
            i += 1
        elif len(running) == 1:
            raise ValueError(f"{running[0].request} fits nowhere, not even alone")
        else:
            newest = running.pop()
            policy.stop(newest.handle)
            waiting.append(newest.request)
