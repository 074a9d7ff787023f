"""A block pool as a picture: who owns which block, what is shared, what is kept, what is wasted."""

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from minillm.course.pictures import letter
from minillm.measure import plots
from minillm.paged_cache import PagedKVCache, PagedSequence

# Light enough for black letters; owners are named in every block, so the picture reads without colour.
OWNER_COLORS = ["#F2B48F", "#9CC9E8", "#9ADBC4", "#F3D98B", "#E3B9D3", "#C9B8A8", "#D5D5D5", "#B8D98B"]


def draw_pool(
    ax: Axes, cache: PagedKVCache, sequences: Mapping[str, PagedSequence], title: str = "", columns: int = 6
) -> None:
    """Every block of the pool as a row of slots with the bytes they hold; `sequences` gives the living ones names.

    Above a block stands its number and its owners; a shared block has several and its count. Slots that an owned
    block has and nobody uses are hatched (waste); a kept block is dashed: nobody owns it, its prefix can be found.
    """
    size = cache.block_size
    for block in range(cache.num_blocks):
        row, column = divmod(block, columns)
        x, y = column * (size + 1.2), row * 2.2
        owners = [name for name, s in sequences.items() if block in s.block_table]
        tokens = _tokens(cache, block, [sequences[name] for name in owners])
        kept = not owners and bool(tokens)
        for i in range(size):
            holds = i < len(tokens)
            style = {"facecolor": "white", "edgecolor": "#BBBBBB", "lw": 0.8}
            if owners:
                color = OWNER_COLORS[list(sequences).index(owners[0]) % len(OWNER_COLORS)]
                style = {"facecolor": color if holds else "white", "edgecolor": plots.GREY, "lw": 0.8}
                style |= {} if holds else {"hatch": "/////"}
            elif kept:
                style = {"facecolor": "#EFEFEF", "edgecolor": plots.GREY, "lw": 0.8, "ls": "--"}
            ax.add_patch(Rectangle((x + i, y), 1, 1, **style))
            if holds:
                ax.text(
                    x + i + 0.5, y + 0.5, letter(tokens[i]), ha="center", va="center", fontsize=8, family="monospace"
                )
        shared = f" ({len(owners)} owners)" if len(owners) > 1 else ""
        state = ", ".join(owners) + shared if owners else ("kept" if kept else "free")
        ax.text(x, y - 0.12, f"{block}: {state}", fontsize=7, va="bottom", color="black" if owners else plots.GREY)
    rows = -(-cache.num_blocks // columns)
    ax.set(xlim=(-0.3, columns * (size + 1.2)), ylim=(rows * 2.2 - 1, -0.9), title=title, aspect="equal")
    ax.axis("off")


def _tokens(cache: PagedKVCache, block: int, owners: list[PagedSequence]) -> list[int]:
    """What a block holds as far as anybody may read it: the most that one of its owners does, or a kept prefix."""
    if not owners:
        return list(cache.allocator.remembered_tokens(block)) if cache.allocator.is_registered(block) else []
    size = cache.block_size
    starts = [s.block_table.index(block) * size for s in owners]
    return max((s.token_ids[a : a + size] for s, a in zip(owners, starts, strict=True)), key=len)


def pool_figure_size(cache: PagedKVCache, columns: int) -> tuple[float, float]:
    """Inches for one `draw_pool`."""
    rows = -(-cache.num_blocks // columns)
    return columns * (cache.block_size + 1.2) * 0.24, rows * 2.2 * 0.24 + 0.5
