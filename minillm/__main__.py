"""How language models are made fast at inference, in stages. Without a command: the tour."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

import minillm
from minillm.course.chapters import CHAPTERS
from minillm.course.tour import disagreement, figure, header, pool_figure, row, run_tour
from minillm.generate import check_request
from minillm.measure import plots
from minillm.measure.metrics import environment, record
from minillm.model.config import CONFIGS
from minillm.model.sampling import SamplingParams
from minillm.model.tokenizer import StreamDecoder
from minillm.model.train import TrainSettings, train

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def parser() -> argparse.ArgumentParser:
    """The commands and their arguments."""
    top = argparse.ArgumentParser(prog="python -m minillm", description=__doc__)
    commands = top.add_subparsers(dest="command", metavar="{tour,generate,train}")

    tour = commands.add_parser("tour", help="every stage of the course on one prompt (what runs without a command)")
    tour.set_defaults(run=run_tour_command)
    tour.add_argument("--prompt-tokens", type=int, default=384, help="length of the prompt (default %(default)s)")

    gen = commands.add_parser("generate", help="continue a text, token by token")
    gen.set_defaults(run=run_generate)
    gen.add_argument("prompt", help="the text to continue")
    gen.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default %(default)s)")
    gen.add_argument("--top-k", type=int, help="sample among the k most likely tokens")
    gen.add_argument("--top-p", type=float, help="sample among the most likely tokens that reach probability p")
    gen.add_argument("--seed", type=int, default=0, help="decides every draw of a stage (default %(default)s)")
    names = [c.name for c in CHAPTERS if c.cache]
    gen.add_argument(
        "--stage",
        choices=names,
        default="kv_cache",
        help="whose cache and loop to use; speculative_decoding samples from the same distribution as the others, "
        "with other draws (default %(default)s)",
    )

    for command, new_tokens in ((tour, 64), (gen, 256)):
        command.add_argument(
            "--max-new-tokens", type=int, default=new_tokens, help="where to stop at the latest (default %(default)s)"
        )
        command.add_argument("--model", default="tiny", help="a shipped model or a safetensors file (default tiny)")
        command.add_argument("--device", help="cpu or cuda (default: the best one present)")
        command.add_argument(
            "--threads", type=int, default=1, help="CPU threads; this model's steps are small (default %(default)s)"
        )
        command.add_argument("--dtype", choices=DTYPES, default="float32", help="element type (default %(default)s)")

    defaults = TrainSettings()
    fit = commands.add_parser("train", help="train a model on a text")
    fit.set_defaults(run=run_train)
    fit.add_argument("--corpus", type=Path, required=True, help="a UTF-8 text; blank lines separate its stories")
    fit.add_argument("--config", choices=sorted(CONFIGS), required=True, help="the shape of the model")
    fit.add_argument("--out", type=Path, help="folder for checkpoint and state (default: runs/CONFIG)")
    fit.add_argument("--resume", action="store_true", help="go on from the state in that folder")
    fit.add_argument("--held-out", type=float, default=0.1, help="share of the text kept for judging (default 0.1)")
    fit.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's choice)")
    fit.add_argument("--steps", type=int, default=defaults.steps, help="updates (default %(default)s)")
    fit.add_argument("--lr", type=float, default=defaults.lr, help="highest learning rate (default %(default)s)")
    fit.add_argument("--seed", type=int, default=defaults.seed, help="weights and batches (default %(default)s)")
    return top


def use_threads(n: int) -> None:
    """Compute with n CPU threads. Raises ValueError below 1."""
    if n < 1:
        raise ValueError(f"--threads must be at least 1, got {n}")
    torch.set_num_threads(n)


def run_tour_command(args: argparse.Namespace) -> int:
    """Run every stage, print the table, write figures/tour.png; 1 if a lossless stage changed the tokens."""
    if args.prompt_tokens < 1:
        raise ValueError(f"--prompt-tokens must be at least 1, got {args.prompt_tokens}")
    if args.max_new_tokens < 2:
        raise ValueError(f"the tour measures the time between tokens: it needs 2 new ones, got {args.max_new_tokens}")
    use_threads(args.threads)
    model, tokenizer = minillm.load(args.model, args.device, DTYPES[args.dtype])
    prompt_ids = tokenizer.encode(minillm.held_out_text()[0])[: args.prompt_tokens]
    where = environment(model.device, model.dtype)
    task = f"{len(prompt_ids)} prompt tokens, {args.max_new_tokens} new ones, greedy"
    stages = run_tour(model, prompt_ids, args.max_new_tokens)
    print(f"{args.model} on {where}\n{task}\n\n{header()}", flush=True)
    results = []
    for result in stages:
        print(row(result, results, model, prompt_ids), flush=True)
        results.append(result)
    paths = [plots.save(figure(results, f"{task}; {where}"), "tour"), plots.save(pool_figure(results), "tour_pool")]
    print(f"\n{tokenizer.decode(results[0].token_ids)!r}\n\nwrote {' and '.join(map(str, paths))}")
    lossless = [r for r in results if r.chapter.lossless]
    wrong = [r for r in lossless if disagreement(model, prompt_ids, results[0].token_ids, r.token_ids) is not None]
    for r in wrong:
        print(f"stage {r.chapter.number} promises the tokens of stage 1 and gave others", file=sys.stderr)
    return 1 if wrong else 0


def run_generate(args: argparse.Namespace) -> int:
    """Print the text as its characters become certain, then the times on standard error."""
    use_threads(args.threads)
    sampling = SamplingParams(args.temperature, args.top_k, args.top_p, args.seed)
    model, tokenizer = minillm.load(args.model, args.device, DTYPES[args.dtype])
    prompt_ids = tokenizer.encode(args.prompt)
    check_request(model, prompt_ids, args.max_new_tokens)  # before memory is reserved for it
    chapter = next(c for c in CHAPTERS if c.name == args.stage)
    cache = chapter.cache(model, len(prompt_ids) + args.max_new_tokens)
    ids = chapter.generate(model, prompt_ids, args.max_new_tokens, cache, sampling, tokenizer.eos_id)
    print(args.prompt, end="", flush=True)
    _, times = record(stream_text(ids, tokenizer.eos_id), model.device)
    tpot = "-" if times.tpot is None else f"{times.tpot * 1e3:.2f} ms"
    print(
        f"{len(times.token_times)} tokens: TTFT {times.ttft * 1e3:.1f} ms, TPOT {tpot}, "
        f"{times.tokens_per_second:.1f} tokens/s ({args.stage}, {environment(model.device, model.dtype)})",
        file=sys.stderr,
    )
    return 0


def stream_text(ids: Iterator[int], eos_id: int) -> Iterator[int]:
    """Pass `ids` through and print their text as it becomes certain."""
    decoder = StreamDecoder()
    for token in ids:
        if token != eos_id:
            print(decoder.push(token), end="", flush=True)
        yield token
    print(decoder.finish(), flush=True)


def run_train(args: argparse.Namespace) -> int:
    """Train, report the losses, write the checkpoint."""
    if args.threads is not None:
        use_threads(args.threads)
    settings = replace(TrainSettings(), steps=args.steps, lr=args.lr, seed=args.seed)
    train(
        args.corpus, CONFIGS[args.config], settings, args.out or Path("runs") / args.config, args.held_out, args.resume
    )
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Bad input is one line on standard error and status 2, not a traceback."""
    top = parser()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    args = top.parse_args(arguments or ["tour"])
    try:
        return args.run(args)
    except BrokenPipeError:  # whoever read our output has seen enough; what is left in the buffer must go nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"python -m minillm {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
