"""Tiles of an attention matrix as a picture: what is worked on, what is masked, what is skipped."""

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from minillm.flash_attention import tiles
from minillm.measure import plots


def draw_tiles(ax: Axes, n: int, m: int, query_tile: int, key_tile: int) -> None:
    """The n x m scores in the tiles of `tiled_attention`, numbered in the order of work: filled where every query
    sees every key, hatched where the diagonal runs through, empty where the tile is skipped.
    """
    color = plots.COLORS["flash_attention"]
    for i in range(0, n, query_tile):
        for j in range(0, m, key_tile):
            size = min(key_tile, m - j), min(query_tile, n - i)
            ax.add_patch(Rectangle((j, i), *size, facecolor="white", edgecolor="#CCCCCC", lw=0.8))
    for number, tile in enumerate(tiles(n, m, query_tile, key_tile), 1):
        x, y = tile.columns.start, tile.rows.start
        width, height = tile.columns.stop - x, tile.rows.stop - y
        masked = tile.diagonal < width - 1
        look = {"hatch": "////", "facecolor": "white"} if masked else {"facecolor": color, "alpha": 0.45}
        ax.add_patch(Rectangle((x, y), width, height, edgecolor=color, lw=1.2, **look))
        ax.text(x + width / 2, y + height / 2, str(number), ha="center", va="center", fontsize=9,
                bbox={"fc": "white", "ec": "none", "pad": 1.5})  # fmt: skip
    for i in range(n):  # the staircase: query i sees the keys before this line
        edge = m - n + i + 1
        ax.plot([edge, edge], [i, i + 1], color="black", lw=1)
        if i < n - 1:
            ax.plot([edge, edge + 1], [i + 1, i + 1], color="black", lw=1)
    ax.set(xlim=(-0.2, m + 0.2), ylim=(n + 0.2, -0.2), aspect="equal", xlabel="key", ylabel="query")
    ax.grid(False)
