"""One look for every figure of the course.

A technique has one colour and one marker everywhere, a prediction is dashed, a measurement solid with markers, so a
reader learns the code once and can read it in grey. Lines carry their names themselves where there is room.
"""

import os
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Tests that run the notebooks send their pictures elsewhere: the committed ones were looked at.
FIGURES = Path(os.environ.get("MINILLM_FIGURES") or Path(__file__).parents[2] / "figures")

# Okabe and Ito's palette: distinct for colour-blind readers; neighbours in the course differ in lightness too.
COLORS = {
    "naive_attention": "#D55E00",
    "kv_cache": "#0072B2",
    "paged_cache": "#009E73",
    "flash_attention": "#CC79A7",
    "continuous_batching": "#E69F00",
    "speculative_decoding": "#56B4E9",
    "attention_variants": "#7A4B2A",
    "quantization": "#000000",
}
MARKERS = dict(zip(COLORS, "osD^vP*X", strict=True))
GREY = "#666666"

STYLE = {
    "figure.figsize": (7.0, 3.8),
    "figure.dpi": 110,
    "savefig.dpi": 150,
    "savefig.bbox": "tight",
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.grid.which": "major",
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "legend.frameon": False,
    "image.cmap": "Blues",
}


def use_style() -> None:
    """Give every figure made from now on the style of the course."""
    mpl.rcParams.update(STYLE)


def measured(technique: str) -> dict[str, object]:
    """Keyword arguments of `plot` for a measured series of `technique` (a chapter's name)."""
    return {"color": COLORS[technique], "marker": MARKERS[technique], "linestyle": "-"}


def predicted(technique: str) -> dict[str, object]:
    """Keyword arguments of `plot` for a predicted series of `technique` (a chapter's name)."""
    return {"color": COLORS[technique], "linestyle": (0, (4, 2)), "alpha": 0.8}


def label_end(ax: Axes, x: float, y: float, text: str, color: str, dy: float = 0.0) -> None:
    """Write the name of a line beside its last point (x, y), `dy` points higher."""
    ax.annotate(text, (x, y), xytext=(6, dy), textcoords="offset points", color=color, va="center", fontsize=9)


def save(fig: Figure, name: str) -> Path:
    """Write `fig` to figures/`name`.png and return the path."""
    FIGURES.mkdir(parents=True, exist_ok=True)
    path = FIGURES / f"{name}.png"
    fig.savefig(path)
    return path


def show_and_save(fig: Figure, name: str) -> None:
    """For notebooks: keep the figure on disk and show it under the cell."""
    save(fig, name)
    plt.show()
