"""The tour: every stage of the course on the same model and the same prompt, in one table and one picture.

Times are measured, FLOPs are counted by PyTorch while the stage warms up, and stages that promise the same tokens
are checked against chapter 1.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from minillm.continuous_batching import Engine, Request, Result
from minillm.course.chapters import BLOCK_SIZE, CHAPTERS, Chapter
from minillm.course.pool_picture import draw_pool, pool_figure_size
from minillm.generate import Cache, check_request
from minillm.measure import plots
from minillm.measure.metrics import Timeline, count_flops, record
from minillm.model.transformer import Transformer
from minillm.naive_attention import NoCache
from minillm.paged_cache import PagedKVCache, PagedSequence

# Two correct implementations round differently; where the two best logits lie closer than this, either may win.
NEAR_TIE = 1e-4


@dataclass(frozen=True)
class StageResult:
    """What one stage did with the prompt; `cache` is as the run left it, `note` says what was different about it."""

    chapter: Chapter
    token_ids: list[int]
    timeline: Timeline
    cache: Cache
    flops_per_token: float
    tokens_per_second: float
    note: str = ""

    @property
    def kv_bytes(self) -> int:
        """Bytes of storage for keys and values."""
        return self.cache.nbytes


def run_stage(chapter: Chapter, model: Transformer, prompt_ids: Sequence[int], max_new_tokens: int) -> StageResult:
    """Generate once to warm up, counting matrix-product FLOPs, and once against the clock."""
    if chapter.cache is None:
        return run_batch_stage(chapter, model, prompt_ids, max_new_tokens)

    def stream() -> tuple[Iterator[int], Cache]:
        cache = chapter.cache(model, len(prompt_ids) + max_new_tokens)
        return chapter.generate(model, prompt_ids, max_new_tokens, cache), cache

    warm_up, flops = count_flops(lambda: list(stream()[0]))
    ids, cache = stream()
    token_ids, timeline = record(ids, model.device)
    return StageResult(
        chapter, token_ids, timeline, cache, flops / len(warm_up), timeline.tokens_per_second, chapter.note
    )


def run_batch_stage(
    chapter: Chapter, model: Transformer, prompt_ids: Sequence[int], max_new_tokens: int, copies: int = 8
) -> StageResult:
    """The prompt asked `copies` times at once: times of the first answer, tokens per second of all of them."""
    request = Request(prompt_ids, max_new_tokens)

    def serve() -> tuple[list[Result], PagedKVCache]:
        n_blocks = copies * -(-(len(prompt_ids) + max_new_tokens) // BLOCK_SIZE)
        cache = PagedKVCache(model.config, n_blocks, BLOCK_SIZE, model.device, model.dtype)
        return Engine(model, cache).run([request] * copies), cache

    (results, cache), flops = count_flops(serve)
    warm_up = sum(len(r.token_ids) for r in results)
    start = time.perf_counter()
    results, cache = serve()
    seconds = time.perf_counter() - start
    n_tokens = sum(len(r.token_ids) for r in results)
    different = next((r.token_ids for r in results if r.token_ids != results[0].token_ids), results[0].token_ids)
    return StageResult(
        chapter, different, results[0].timeline, cache, flops / warm_up, n_tokens / seconds, f"{copies} at once"
    )


def run_tour(model: Transformer, prompt_ids: Sequence[int], max_new_tokens: int) -> Iterator[StageResult]:
    """Every chapter's stage in order, one when it is asked for. Raises ValueError at the call for a prompt that the
    model cannot serve.
    """
    check_request(model, prompt_ids, max_new_tokens)
    return (run_stage(chapter, model, prompt_ids, max_new_tokens) for chapter in CHAPTERS)


def disagreement(
    model: Transformer, prompt_ids: Sequence[int], expected: Sequence[int], actual: Sequence[int]
) -> int | None:
    """The first index at which two greedy outputs differ without a near tie to excuse it; None if they agree."""
    differing = (i for i, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b)
    first = next(differing, None)
    if first is None:
        return None if len(expected) == len(actual) else min(len(expected), len(actual))
    ids = torch.tensor([*prompt_ids, *expected[:first]], device=model.device)
    with torch.inference_mode():
        best = model(ids, torch.arange(len(ids), device=model.device), NoCache())[-1].topk(2).values
    return None if float(best[0] - best[1]) < NEAR_TIE else first


def header() -> str:
    """The first two lines of the table."""
    columns = f"{'TTFT':>9} {'TPOT':>10} {'tokens/s':>9} {'KV memory':>11} {'FLOPs/token':>12} {'gain':>12}"
    line = f"{'stage':24} {columns}  tokens"
    return f"{line}\n{'-' * len(line)}"


def row(r: StageResult, earlier: Sequence[StageResult], model: Transformer, prompt_ids: Sequence[int]) -> str:
    """One stage as a line of the table; its last column says whether the tokens are those of chapter 1."""
    t = r.timeline
    first = earlier[0] if earlier else r
    wrong = disagreement(model, prompt_ids, first.token_ids, r.token_ids)
    verdict = "as stage 1" if wrong is None else f"differ at {wrong}"
    gain = "-"
    if earlier:
        base = next((e for e in earlier if e.chapter.number == r.chapter.builds_on), earlier[-1])
        gain = f"{r.tokens_per_second / base.tokens_per_second:.2f}x over {base.chapter.number}"
    return (
        f"{r.chapter.number} {r.chapter.title:22} {t.ttft * 1e3:6.1f} ms {t.tpot * 1e3:7.2f} ms "
        f"{r.tokens_per_second:9.1f} {r.kv_bytes / 2**20:7.2f} MiB {r.flops_per_token / 1e6:9.1f} M {gain:>12}  "
        f"{verdict if r.chapter.lossless else 'lossy'}{', ' if r.note else ''}{r.note}"
    )


def pool_figure(results: Sequence[StageResult]) -> Figure:
    """The block pool of the paged stage as it ends."""
    plots.use_style()
    sequence = next(r.cache for r in results if isinstance(r.cache, PagedSequence))
    columns = 3
    fig, ax = plt.subplots(figsize=pool_figure_size(sequence.cache, columns))
    draw_pool(ax, sequence.cache, {"the text": sequence}, "Stage 3: one sequence in its blocks", columns)
    return fig


def figure(results: Sequence[StageResult], subtitle: str) -> Figure:
    """Tokens per second and KV memory of every stage, as bars with their numbers."""
    plots.use_style()
    names = [f"{r.chapter.number} {r.chapter.title}{f' ({r.note})' if r.note else ''}" for r in results]
    colors = [plots.COLORS[r.chapter.name] for r in results]
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 1.6 + 0.4 * len(results)), sharey=True)
    left.barh(names, [r.tokens_per_second for r in results], color=colors, height=0.6)
    left.bar_label(left.containers[0], fmt="%.0f", padding=3, fontsize=9)
    left.set(xlabel="tokens per second", title="Throughput, prompt included")
    right.barh(names, [r.kv_bytes / 2**20 for r in results], color=colors, height=0.6)
    right.bar_label(right.containers[0], fmt="%.2f", padding=3, fontsize=9)
    right.set(xlabel="KV memory (MiB)", title="Memory reserved for keys and values")
    for ax in (left, right):
        ax.margins(x=0.15)
        ax.grid(axis="y", visible=False)
    left.invert_yaxis()
    fig.suptitle(subtitle, fontsize=8, color=plots.GREY, x=0.01, ha="left")
    return fig
