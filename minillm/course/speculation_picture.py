"""A text with the fate of its guesses in colours."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from minillm.course.pictures import letter
from minillm.speculative_decoding import Round

KEPT, BONUS = "#B9DDF3", "#1F5F8B"
_FONT = {"family": "monospace", "ha": "center", "va": "center"}


def draw_rounds(ax: Axes, rounds: Sequence[Round], width: int = 64, title: str = "") -> None:
    """The text that rounds emitted, `width` bytes a line. Over a token of the target's own that stands in place of a
    guess stands the refused guess; a tick below marks where a round begins.
    """
    place = 0
    for r in rounds:
        for i, token in enumerate(r.emitted):
            line, column = divmod(place, width)
            own, refused = i >= r.accepted, i < len(r.guesses)
            ground = KEPT if not own else "white" if refused else BONUS
            frame = {"edgecolor": "black", "zorder": 3} if own and refused else {"edgecolor": "none"}
            ax.add_patch(Rectangle((column, line), 0.94, 0.55, facecolor=ground, lw=0.8, **frame))
            ink = "white" if own and not refused else "black"
            ax.text(column + 0.47, line + 0.29, letter(token), color=ink, fontsize=8, zorder=4, **_FONT)
            if own and refused:
                ax.text(column + 0.47, line - 0.17, letter(r.guesses[i]), color="#333333", fontsize=7, **_FONT)
            if i == 0:
                ax.plot([column + 0.05] * 2, [line + 0.6, line + 0.72], color="black", lw=1)
            place += 1
    lines = -(-place // width)
    ax.set(xlim=(0, width), ylim=(lines, -0.4), title=title)
    ax.axis("off")
    ax.legend(
        handles=[
            Patch(facecolor=KEPT, label="a guess, kept"),
            Patch(facecolor="white", edgecolor="black", label="the target's own, above it the guess it refused"),
            Patch(facecolor=BONUS, label="the target's own, after guesses all kept (bonus)"),
        ],
        ncols=3,
        fontsize=8,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.02),
    )
