"""Where the time of one engine step goes: `python -m minillm.measure.profile_engine`.

Scheduling is everything between two forward passes but the choice of tokens: the plan, admissions, tables, commits.
"""

import argparse

import torch

import minillm
from minillm.continuous_batching import Engine, OneToken, Request, Scheduler
from minillm.measure.metrics import environment
from minillm.measure.profile_decode import Stopwatch, in_words, medians
from minillm.paged_cache import PagedKVCache


def engine_times(model: torch.nn.Module, n_running: int, prompt: int, steps: int = 40) -> dict[str, float]:
    """Median seconds of a step in which `n_running` samples decode on a CPU: whole, model, choice of tokens, rest."""
    decoding = OneToken()
    cache = PagedKVCache(model.config, n_running * (-(-(prompt + steps + 10) // 16)), 16, "cpu")
    engine = Engine(model, cache, Scheduler(n_running, n_running + 1024), decoding)
    forward, accept = Stopwatch(model.forward), Stopwatch(decoding.accept)
    engine.model.forward, decoding.accept = forward, accept
    step = Stopwatch(engine.step)
    for i in range(n_running):
        engine.add(Request([(i + j) % 255 + 1 for j in range(prompt)], steps + 10))
    while any(not s.decodes for s in engine.running) or engine.waiting:
        engine.step()
    splits = []
    for _ in range(steps):
        forward.seconds = accept.seconds = step.seconds = 0.0
        step()
        rest = step.seconds - forward.seconds - accept.seconds
        splits.append((step.seconds, forward.seconds, accept.seconds, rest))
    del model.forward
    return medians(("step", "model", "choice of tokens", "scheduling"), splits)


def main() -> None:
    """Print the times for a few numbers of running samples."""
    parser = argparse.ArgumentParser(prog="python -m minillm.measure.profile_engine", description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 16, 64], help="(default 1 16 64)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="(default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, _ = minillm.load("tiny", device="cpu")
    print(f"one step at context {args.prompt_tokens} and more, {environment()}")
    for n in args.running:
        print(f"{n:3} running: {in_words(engine_times(model, n, args.prompt_tokens))}")


if __name__ == "__main__":
    main()
