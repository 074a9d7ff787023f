"""Times of generation, as serving systems define them, and how they are taken.

Every clock reading comes after the device has finished: a GPU works asynchronously, and a clock read too early
measures the launch, not the work. What was not measured is None, never 0.
"""

import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

T = TypeVar("T")


@dataclass(frozen=True)
class Timeline:
    """When a request was submitted and when each of its tokens was on the host, in seconds of one clock."""

    submitted: float
    token_times: tuple[float, ...] = ()

    @property
    def ttft(self) -> float | None:
        """Time to first token in seconds; None without a token."""
        return self.token_times[0] - self.submitted if self.token_times else None

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies in seconds: n tokens have n - 1. TTFT plus their sum is the latency."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Time per output token in seconds: the mean gap; None for fewer than two tokens."""
        return statistics.fmean(self.gaps) if self.gaps else None

    @property
    def latency(self) -> float | None:
        """End-to-end latency in seconds; None without a token."""
        return self.token_times[-1] - self.submitted if self.token_times else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens produced over the end-to-end latency; None without a token, or if the clock did not move."""
        return len(self.token_times) / self.latency if self.latency else None


def record(stream: Iterable[int], device: torch.device | str = "cpu") -> tuple[list[int], Timeline]:
    """Exhaust `stream`, an iterator of ids that does its work when asked, and note when each id came."""
    ids, times = [], []
    synchronize(device)
    submitted = time.perf_counter()
    for token in stream:
        synchronize(device)
        times.append(time.perf_counter())
        ids.append(token)
    return ids, Timeline(submitted, tuple(times))


def synchronize(device: torch.device | str) -> None:
    """Wait until `device` has finished everything it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Spread:
    """Repeated measurements: the median, the smallest and the largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """The spread of `values`, at least one."""
        values = list(values)
        return cls(statistics.median(values), min(values), max(values))


def time_call(f: Callable[[], object], repeats: int = 5, warmup: int = 1, device: torch.device | str = "cpu") -> Spread:
    """Seconds that `f()` takes: `warmup` calls unmeasured, then `repeats` measured one by one."""
    for _ in range(warmup):
        f()
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        f()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return Spread.of(seconds)


def count_flops(f: Callable[[], T]) -> tuple[T, int]:
    """Call f; its result, and the FLOPs of the matrix products and attention kernels in it, counted by PyTorch."""
    with FlopCounterMode(display=False) as counter:
        result = f()
    return result, counter.get_total_flops()


def environment(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> str:
    """One line that belongs beside every measurement: device, threads, element type, versions."""
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    threads = torch.get_num_threads()
    return (
        f"{device.type} ({name}), {threads} thread{'s' if threads > 1 else ''}, {str(dtype).removeprefix('torch.')}, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
