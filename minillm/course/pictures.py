"""Pictures that several notebooks draw: which work a step does, who attends to whom, what may come next."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.patches import Rectangle
from torch import Tensor

from minillm.generate import run
from minillm.measure import plots
from minillm.model.transformer import Transformer
from minillm.naive_attention import NoCache, attention_scores


class AttentionMaps(NoCache):
    """Chapter 1's cache, which also keeps what each layer attended to: `maps[layer]` `[H, n, m]`, rows sum to 1."""

    def __init__(self) -> None:
        self.maps: dict[int, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """Attend as usual, and keep the softmax of the scores."""
        self.maps[layer] = attention_scores(q, k, scale).softmax(-1).flatten(0, 1)
        return super().attend(layer, q, k, v, scale)


def attention_maps(model: Transformer, ids: Sequence[int]) -> dict[int, Tensor]:
    """What every layer attends to while `ids` run: layer -> `[H, n, n]`."""
    cache = AttentionMaps()
    run(model, ids, cache)
    return cache.maps


def letter(token: int) -> str:
    """One character for a byte in a picture: itself, or ␣ for a space and for what cannot be shown."""
    character = chr(token)
    return character if character.isprintable() and character != " " else "␣"


def draw_attention(ax: Axes, weights: Tensor, ids: Sequence[int], title: str) -> None:
    """One head's map `[n, n]`: row i shows how position i shares its attention out over positions 0..i."""
    labels = [letter(i) for i in ids]
    hidden = np.triu(np.ones(weights.shape, dtype=bool), 1)
    image = ax.imshow(np.ma.array(weights.numpy(), mask=hidden), norm=PowerNorm(0.5, 0, 1))
    ax.figure.colorbar(image, ax=ax, shrink=0.6, ticks=[0, 0.1, 0.3, 0.6, 1], label="share of attention")
    ax.set(xticks=range(len(ids)), yticks=range(len(ids)), title=title, xlabel="key: byte looked at")
    ax.set_xticklabels(labels, fontsize=7, family="monospace")
    ax.set_yticklabels(labels, fontsize=7, family="monospace")
    ax.grid(False)


def draw_next_token(ax: Axes, probabilities: Tensor, top: int = 12) -> None:
    """The `top` most likely next bytes of a distribution `[vocab]` as bars."""
    p, ids = probabilities.sort(descending=True)
    names = [repr(chr(i))[1:-1] if i != 32 else "␣" for i in ids[:top].tolist()]
    bars = ax.bar(range(top), p[:top], color=plots.COLORS["naive_attention"], width=0.7)
    ax.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    ax.set_xticks(range(top), names, family="monospace")
    ax.set(ylabel="probability", xlabel=f"next byte (the {top} most likely of {len(p)})")
    ax.grid(axis="x", visible=False)


def work_grid(prompt: int, new: int, cached: bool) -> np.ndarray:
    """Which (forward pass, position) pairs run: 1 where a position runs for the first time, 2 where it runs again.

    `[new, prompt + new - 1]`: one row a forward pass, the first of which runs the prompt.
    """
    grid = np.zeros((new, prompt + new - 1), dtype=int)
    for step in range(new):
        seen, end = (prompt + step - 1 if step else 0), prompt + step
        grid[step, :seen] = 0 if cached else 2
        grid[step, seen:end] = 1
    return grid


def draw_work(ax: Axes, grid: np.ndarray, title: str) -> None:
    """A `work_grid`: filled where a position runs for the first time, hatched where the same work is done again."""
    color = plots.COLORS["naive_attention"]
    for row, column in np.argwhere(grid > 0):
        style = (
            {"facecolor": plots.COLORS["kv_cache"]}
            if grid[row, column] == 1
            else {"facecolor": "none", "hatch": "////"}
        )
        ax.add_patch(
            Rectangle((column, row), 1, 1, edgecolor=color if grid[row, column] == 2 else "white", lw=0.5, **style)
        )
    ax.set(xlim=(0, grid.shape[1]), ylim=(grid.shape[0], 0), aspect="equal", title=title)
    ax.set(xlabel="position in the text", ylabel="forward pass")
    ax.set_yticks(np.arange(len(grid)) + 0.5, range(1, len(grid) + 1))
    ax.grid(False)


def count_runs(grid: np.ndarray) -> tuple[int, int]:
    """(token runs in all, those of them that repeat earlier work) of a `work_grid`."""
    return int((grid > 0).sum()), int((grid == 2).sum())
