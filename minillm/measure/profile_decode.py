"""Where the time of one decode step goes: `python -m minillm.measure.profile_decode`.

A step of a small model is some hundreds of small calls, and most of them compute next to nothing. This splits a
step into matrix products (`nn.Linear`), attention (`cache.attend`: keep k and v, attend) and all the rest, by the
clock: a profiler's own cost would fall on the small calls and overstate them by half.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import minillm
from minillm.generate import run
from minillm.kv_cache import AttentionFunction, KVCache
from minillm.measure.metrics import environment
from minillm.model.transformer import Transformer
from minillm.naive_attention import naive_attention
from minillm.torch_attention import torch_attention


class Stopwatch:
    """Adds up the seconds spent inside a function."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self.f, self.seconds = f, 0.0

    def __call__(self, *args: Any) -> Any:
        """Call the function, and count its time."""
        start = time.perf_counter()
        result = self.f(*args)
        self.seconds += time.perf_counter() - start
        return result


def decode_times(
    model: Transformer, context: int, steps: int = 100, attention: AttentionFunction = naive_attention
) -> dict[str, float]:
    """Median seconds of a decode step that ends at `context` tokens on a CPU: whole, linear layers, attention, rest."""
    cache = KVCache(model.config, context, model.device, model.dtype, attention)
    linear, attend = Stopwatch(nn.Linear.__call__), Stopwatch(cache.attend)
    cache.attend = attend
    run(model, [i % model.config.vocab_size for i in range(context - 1)], cache)
    splits = []
    with patch.object(nn.Linear, "__call__", lambda self, x: linear(self, x)):
        for _ in range(steps + 5):
            linear.seconds = attend.seconds = 0.0
            start = time.perf_counter()
            run(model, [1], cache)
            whole = time.perf_counter() - start
            splits.append((whole, linear.seconds, attend.seconds, whole - linear.seconds - attend.seconds))
            cache.truncate(context - 1)
    return medians(("step", "linear layers", "attention", "rest"), splits[5:])


def medians(names: Sequence[str], splits: Sequence[Sequence[float]]) -> dict[str, float]:
    """The median of each part over many measured steps."""
    return {name: statistics.median(x) for name, x in zip(names, zip(*splits, strict=True), strict=True)}


def in_words(times: dict[str, float]) -> str:
    """Milliseconds of each part, and its share of the first, the whole."""
    whole = next(iter(times.values()))
    return ", ".join(f"{name} {t * 1e3:.2f} ms ({t / whole:.0%})" for name, t in times.items())


def main() -> None:
    """Print the times with both attention functions."""
    parser = argparse.ArgumentParser(prog="python -m minillm.measure.profile_decode", description=__doc__)
    parser.add_argument("--context", type=int, default=512, help="tokens attended to (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, _ = minillm.load("tiny", device="cpu")
    print(f"one decode step at context {args.context}, {environment()}")
    for attention in (naive_attention, torch_attention):
        print(f"{attention.__name__:16} {in_words(decode_times(model, args.context, attention=attention))}")


if __name__ == "__main__":
    main()
