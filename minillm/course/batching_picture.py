"""What an engine did, step by step, and a Gantt chart of it."""

from matplotlib.axes import Axes

from minillm.continuous_batching import Engine, Plan, Sample
from minillm.measure import plots


class Recorder:
    """An engine's `on_step`: keeps who ran how many tokens in each step, and the blocks in use after it."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[Sample, int]]] = []
        self.used_blocks: list[int] = []

    def __call__(self, engine: Engine, plan: Plan) -> None:
        """Note one step."""
        self.steps.append(list(plan.counts))
        self.used_blocks.append(engine.cache.num_blocks - engine.cache.num_free_blocks)

    @property
    def occupancy(self) -> list[int]:
        """Samples in each step."""
        return [len(step) for step in self.steps]

    @property
    def mean_occupancy(self) -> float:
        """Samples in a step, on average."""
        return sum(self.occupancy) / len(self.steps)


def draw_gantt(ax: Axes, recorder: Recorder, title: str) -> None:
    """One row a sample in order of arrival: a thin line while it waits from the start, hatched while its prompt runs,
    filled while it decodes.
    """
    rows: dict[Sample, int] = {}
    color = plots.COLORS["continuous_batching"]
    for number, step in enumerate(recorder.steps):
        for sample, n in step:
            if sample not in rows:
                rows[sample] = len(rows)
                ax.hlines(rows[sample], 0, number, color="#CCCCCC", lw=1)
            look = {"facecolor": color} if n == 1 else {"facecolor": "white", "hatch": "/////"}
            ax.barh(rows[sample], 1, 0.8, left=number, edgecolor=color, lw=0.3, **look)
    ax.set(ylabel="request", title=title, ylim=(len(rows) - 0.3, -0.7))
    ax.grid(axis="y", visible=False)
