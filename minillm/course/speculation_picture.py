"""A text with the fate of its guesses in colours."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from minillm.course.pictures import letter
from minillm.measure import plots
from minillm.speculative_decoding import Round

KEPT, BONUS = "#B9DDF3", "#1F5F8B"


def draw_rounds(ax: Axes, rounds: Sequence[Round], width: int = 64, title: str = "") -> None:
    """The text that rounds emitted, `width` bytes a line: guesses that were kept on light ground, bonus tokens on dark
    ground, a token of the target's own in place of a guess framed, with the refused guess small and grey above it. A
    tick below marks where a step of the target begins.
    """
    place = 0
    for r in rounds:
        for i, token in enumerate(r.emitted):
            line, column = divmod(place, width)
            own, refused = i >= r.accepted, i < len(r.guesses)
            ground = KEPT if not own else "white" if refused else BONUS
            frame = "black" if own and refused else "none"
            ax.add_patch(Rectangle((column, line), 0.94, 0.55, facecolor=ground, edgecolor=frame, lw=0.8))
            ink = "white" if own and not refused else "black"
            ax.text(column + 0.47, line + 0.29, letter(token), color=ink, **_FONT, fontsize=8)
            if own and refused:
                ax.text(column + 0.47, line - 0.17, letter(r.guesses[i]), color=plots.GREY, **_FONT, fontsize=6)
            if i == 0:
                ax.plot([column + 0.05] * 2, [line + 0.6, line + 0.72], color="black", lw=1)
            place += 1
    lines = -(-place // width)
    ax.set(xlim=(0, width), ylim=(lines, -0.4), title=title)
    ax.axis("off")


_FONT = {"family": "monospace", "ha": "center", "va": "center"}
