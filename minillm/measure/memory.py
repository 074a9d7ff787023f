"""Bytes of tensors: what a call needs at its peak, and what a set of tensors occupies.

Both are measured, on CPU and on CUDA, because a formula forgets temporaries. They count what PyTorch's allocators
were asked for: every tensor, every scratch buffer that an operator takes from them, even the few bytes that hold the
1 of `x + 1` on a CPU. They do not count memory taken past them: libraries' own buffers, NumPy's, the CUDA context,
allocators' rounding and their unused pools.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.profiler import profile

T = TypeVar("T")


def storage_bytes(*tensors: Tensor) -> int:
    """Bytes of the distinct storages behind `tensors`: a view adds nothing, a view of a part costs the whole."""
    return sum(storage.nbytes() for storage in {tensor.untyped_storage() for tensor in tensors})


def peak_bytes(f: Callable[[], T], device: torch.device | str = "cpu") -> tuple[T, int]:
    """Call f; return its result and the most bytes on `device` that were live at once above those live before.

    The result counts, since it is live at the end. f should free only what it allocates: of an older tensor's end
    the CPU's count takes no notice, while CUDA's falls. On CPU: memory taken by the calling thread, and not inside
    another profiler; every operator is recorded, so measure a step rather than a long text. On CUDA: run f once
    before, or the workspace that cuBLAS keeps for ever counts as f's.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return _peak_cuda(f, device)
    if device.type == "cpu":
        return _peak_cpu(f)
    raise ValueError(f"peak memory is measured on cpu and cuda, not on {device.type}")


def _peak_cuda(f: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """The allocator keeps the maximum itself. `requested_bytes` are those asked for, before rounding to blocks."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    result = f()
    return result, torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before


def _peak_cpu(f: Callable[[], T]) -> tuple[T, int]:
    """The CPU allocator keeps no maximum, but reports every allocation and free to the profiler: add them up."""
    with _recording() as profiler:
        result = f()
    return result, _peak(_allocations(profiler.kineto_results.experimental_event_tree()))


@contextmanager
def _recording() -> Iterator[profile]:
    """A memory profiler around the body, without the lines its C++ code prints at start and stop."""
    if torch.autograd._profiler_enabled():
        raise RuntimeError("a profiler is running on this thread already: peak memory cannot be measured inside it")
    profiler = profile(profile_memory=True)
    with _quiet_stderr():
        profiler.__enter__()
    try:
        yield profiler
    finally:
        with _quiet_stderr():
            profiler.__exit__(None, None, None)


def _allocations(events: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """(time, address, signed bytes) of every CPU allocation and free in a tree of profiler events."""
    for event in events:
        if event.tag.name == "Allocation" and event.extra_fields.device.type == "cpu":
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
        yield from _allocations(event.children)


def _peak(allocations: Iterable[tuple[int, int, int]]) -> int:
    """The maximum of the running sum, in time order."""
    live: dict[int, int] = {}  # address -> bytes
    total = peak = 0
    for _, address, nbytes in sorted(allocations, key=lambda allocation: allocation[0]):
        if nbytes > 0:
            live[address] = nbytes
            total += nbytes
            peak = max(peak, total)
        else:
            # Only what was allocated while recording: the profiler may know an older block by an outdated size.
            total -= live.pop(address, 0)
    return peak


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """File descriptor 2 to nowhere: C++ writes there and does not ask Python's sys.stderr."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
