"""How fast the attention kernels are on the GPU that is here: `python -m kernels.bench`.

Prefill in TFLOP/s, beside every backend of PyTorch's `scaled_dot_product_attention`; decoding through a block table
in GB/s of keys and values, beside a copy on the device in the same run, the most that reading memory can reach. Every
output is compared with float64 before its time counts. Times are medians of replayed CUDA graphs with the L2 cache
emptied in between: what the device needs, without the host's launches, which a step of a small model waits for longer.

Writes figures/kernels_<gpu>.json and .png. Without a GPU it says so: an interpreter's time means nothing.
"""

import argparse
import json
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.flash_attention import flash_attention
from kernels.paged_attention import paged_attention

FIGURES = Path(__file__).parents[1] / "figures"
OURS = "this kernel"
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}

Timer = Callable[[Callable[[], object]], float]  # seconds of one call


@dataclass(frozen=True)
class Prefill:
    """Causal attention of `sequences` sequences of `length` tokens; `tflops` by implementation, None where it does
    not run. FLOPs: 4 d for every query, head and key that the query sees.
    """

    length: int
    sequences: int
    head_size: int
    tflops: dict[str, float | None]


@dataclass(frozen=True)
class Decode:
    """One new token for each of `batch` sequences of `context` tokens; `gb_per_s` counts keys and values, read once."""

    context: int
    batch: int
    seconds: float
    gb_per_s: float


def graph_timer(f: Callable[[], object]) -> float:
    """Seconds of one call of f on the GPU: f becomes a CUDA graph, which is replayed. f is called before, so tuned."""
    f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    return triton.testing.do_bench(graph.replay, warmup=20, rep=40, return_mode="median") / 1e3


def bench_prefill(
    lengths: Sequence[int],
    head_size: int,
    timer: Timer,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    tokens: int = 16_384,
    width: int = 2_048,
    largest_math: int = 4_096,
) -> list[Prefill]:
    """`tokens` tokens in sequences of each length, `width / head_size` heads. The math backend writes all scores to
    memory: it runs up to `largest_math` only.
    """
    rows = []
    for n in lengths:
        batch, heads = max(1, tokens // n), width // head_size
        generator = torch.Generator(device).manual_seed(n)
        q, k, v = torch.randn(3, batch * n, heads, head_size, device=device, generator=generator).to(dtype)
        bounds = torch.arange(batch + 1, device=device, dtype=torch.int32) * n

        def ours(q=q, k=k, v=v, bounds=bounds, n=n) -> Tensor:
            return flash_attention(q, k, v, None, bounds, bounds, n)[0]

        flops = 4 * head_size * heads * batch * n * (n + 1) / 2
        check_last_rows(ours()[-n:], q[-n:], k[-n:], v[-n:], f"{OURS}, {n} tokens")
        tflops: dict[str, float | None] = {OURS: flops / timer(ours) / 1e12}
        batched = [x.view(batch, n, heads, head_size).transpose(1, 2) for x in (q, k, v)]  # [batch, heads, n, d]
        for name, backend in BACKENDS.items():
            tflops[name] = None
            if name != "math" or n <= largest_math:
                seconds = _time_backend(backend, batched, timer)
                tflops[name] = flops / seconds / 1e12 if seconds else None
        rows.append(Prefill(n, batch, head_size, tflops))
    return rows


def _time_backend(backend: SDPBackend, qkv: Sequence[Tensor], timer: Timer) -> float | None:
    """Seconds; None where the backend does not run on this device or this shape."""

    def attention() -> Tensor:
        return F.scaled_dot_product_attention(*qkv, is_causal=True)

    with warnings.catch_warnings(), sdpa_kernel(backend):
        warnings.simplefilter("ignore")  # PyTorch warns of every reason for which a backend does not run
        try:
            attention()
        except RuntimeError:
            return None
        return timer(attention)


def bench_decode(
    batches: Sequence[int],
    context: int,
    timer: Timer,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    heads: tuple[int, int] = (32, 8),
    head_size: int = 128,
    block_size: int = 16,
) -> list[Decode]:
    """`heads` query heads and key heads; the pool's blocks are handed out in random order. A batch whose keys and
    values would not fit into half of the GPU's free memory is left out.
    """
    rows = []
    n_heads, n_kv_heads = heads
    for batch in batches:
        per_sequence = triton.cdiv(context, block_size)
        nbytes = 2 * batch * context * n_kv_heads * head_size * dtype.itemsize
        if device == "cuda" and nbytes > torch.cuda.mem_get_info()[0] / 2:
            continue
        generator = torch.Generator(device).manual_seed(batch)
        shape = (n_kv_heads, batch * per_sequence, block_size, head_size)  # heads outside, slots inside
        k, v = (torch.empty(shape, device=device, dtype=dtype).normal_(generator=generator) for _ in range(2))
        k, v = k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)
        tables = torch.randperm(batch * per_sequence, device=device, generator=generator).int().view(batch, -1)
        q = torch.randn(batch, n_heads, head_size, device=device, generator=generator).to(dtype)
        lengths, counts = (torch.full((batch,), x, dtype=torch.int32, device=device) for x in (context, 1))

        def ours(arguments=(q, k, v, tables, lengths, counts)) -> Tensor:
            return paged_attention(*arguments, max_count=1)[0]

        keys, values = (x[tables[-1].long()].flatten(0, 1)[:context] for x in (k, v))
        check_last_rows(ours()[-1:], q[-1:], keys, values, f"{OURS}, batch {batch}, context {context}")
        seconds = timer(ours)
        rows.append(Decode(context, batch, seconds, nbytes / seconds / 1e9))
    return rows


def copy_bandwidth(timer: Timer, device: str = "cuda", nbytes: int = 2**30) -> float:
    """GB/s of a copy on the device, bytes read and bytes written both counted."""
    source, target = torch.empty(2, nbytes, dtype=torch.uint8, device=device)
    return 2 * nbytes / timer(lambda: target.copy_(source)) / 1e9


def check_last_rows(out: Tensor, q: Tensor, k: Tensor, v: Tensor, case: str, rows: int = 32) -> None:
    """Raise RuntimeError if the last rows of out `[n, H, d]` differ from attention in float64 by more than a few
    roundings of the element type.
    """
    rows, m, groups = min(rows, len(q)), len(k), q.shape[1] // k.shape[1]
    last = q[-rows:].double().unflatten(1, (-1, groups))  # [rows, K, G, d]
    scores = torch.einsum("nkgd,mkd->kgnm", last, k.double()) / math.sqrt(q.shape[2])
    hidden = torch.ones(rows, m, dtype=torch.bool, device=q.device).triu(m - rows + 1)
    weights = scores.masked_fill_(hidden, -math.inf).softmax(-1)
    exact = torch.einsum("kgnm,mkd->nkgd", weights, v.double()).flatten(1, 2)
    error = (out[-rows:].double() - exact).abs().max().item()
    limit = 4 * torch.finfo(out.dtype).eps * exact.abs().max().item()
    if not error <= limit:
        raise RuntimeError(f"{case}: the output is off by {error:.1e}, {limit:.1e} is allowed. No time is reported")


def save(
    gpu: str, dtype: torch.dtype, copy: float, prefill: Sequence[Prefill], decode: Sequence[Decode], folder: Path
) -> Path:
    """Write everything as JSON, and the plot beside it; returns the JSON's path."""
    path = folder / f"kernels_{re.sub('[^a-z0-9]+', '_', gpu.lower()).strip('_')}.json"
    folder.mkdir(exist_ok=True)
    content = {
        "gpu": gpu,
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "dtype": str(dtype).removeprefix("torch."),
        "copy_gb_per_s": copy,
        "prefill": [asdict(x) for x in prefill],
        "decode": [asdict(x) for x in decode],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    plot(f"{gpu}, {content['dtype']}", copy, prefill, decode, path.with_suffix(".png"))
    return path


def plot(title: str, copy: float, prefill: Sequence[Prefill], decode: Sequence[Decode], path: Path) -> None:
    """Prefill by length, one panel a head size; decoding by batch, one line a context."""
    from matplotlib.figure import Figure  # optional: only this function draws

    sizes = sorted({x.head_size for x in prefill})
    figure = Figure(figsize=(4.2 * (len(sizes) + 1), 4.0), layout="constrained")
    axes = figure.subplots(1, len(sizes) + 1)
    for ax, size in zip(axes, sizes, strict=False):
        rows = [x for x in prefill if x.head_size == size]
        for name, marker in zip((OURS, *BACKENDS), "Dosv^", strict=True):
            points = [(x.length, x.tflops[name]) for x in rows if x.tflops[name]]
            if points:
                color, width = ("#CC79A7", 2.2) if name == OURS else ("#666666", 1)
                ax.plot(*zip(*points, strict=True), marker=marker, color=color, linewidth=width, label=name)
        _label(ax, "tokens of a sequence", "TFLOP/s", f"prefill, head size {size}", [x.length for x in rows])
    for context, marker in zip(sorted({x.context for x in decode}), "osDv^", strict=False):
        points = [(x.batch, x.gb_per_s) for x in decode if x.context == context]
        axes[-1].plot(*zip(*points, strict=True), marker=marker, label=f"context {context}")
    axes[-1].axhline(copy, color="#666666", linestyle="--", label="copy on the device")
    _label(axes[-1], "sequences", "GB/s", "decoding through a block table", sorted({x.batch for x in decode}))
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def _label(ax, x: str, y: str, title: str, ticks: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, labels=[str(t) for t in ticks])
    ax.set(xlabel=x, ylabel=y, title=title)
    ax.set_ylim(bottom=0)
    ax.grid(color="#DDDDDD", linewidth=0.6)
    ax.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, fontsize=8)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**i for i in range(9, 15)], help="for prefill")
    parser.add_argument("--head-sizes", type=int, nargs="+", default=[64, 128], help="for prefill")
    parser.add_argument("--batches", type=int, nargs="+", default=[2**i for i in range(7)], help="for decoding")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16_384], help="for decoding")
    parser.add_argument("--out", type=Path, default=FIGURES, help="folder for JSON and plot (default figures/)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("No GPU here: nothing is measured. (The kernels run on a CPU too, interpreted, for tests only.)")
        return
    gpu = torch.cuda.get_device_name()
    dtype = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16
    copy = copy_bandwidth(graph_timer)
    print(f"{gpu}, {dtype}, torch {torch.__version__}, triton {triton.__version__}; copy on the device {copy:.0f} GB/s")
    prefill, decode = [], []
    for size in args.head_sizes:
        for x in bench_prefill(args.lengths, size, graph_timer, dtype=dtype):
            values = ", ".join(f"{name} {t:.0f}" if t else f"{name} -" for name, t in x.tflops.items())
            print(f"prefill, head size {size}, {x.sequences} x {x.length} tokens, TFLOP/s: {values}", flush=True)
            prefill.append(x)
    for context in args.contexts:
        for x in bench_decode(args.batches, context, graph_timer, dtype=dtype):
            rate = f"{x.gb_per_s:.0f} GB/s, {x.gb_per_s / copy:.2f} of a copy"
            print(f"decode, context {context}, batch {x.batch}: {rate}", flush=True)
            decode.append(x)
    print(f"wrote {save(gpu, dtype, copy, prefill, decode, args.out)} and the plot beside it")


if __name__ == "__main__":
    main()
