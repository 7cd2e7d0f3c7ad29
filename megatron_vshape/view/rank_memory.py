"""The picture of a rehearsed step: what each rank holds over time."""

from collections.abc import Mapping, Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.view.palette import HELD_COLOUR

GIB = 2**30

Point = Sequence[float]
"""(seconds, bytes then): a curve of what a rank holds."""


def memory_figure(curves: Mapping[str, Sequence[Point]], limit_bytes: float, title: str) -> Figure:
    """Return a panel per rank: what it holds over its own work, and the GPU's memory."""
    figure = Figure(figsize=(7.2, 1.2 + 1.1 * len(curves)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(curves), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, curve) in zip(panels, curves.items(), strict=True):
        times = [point[0] for point in curve]
        held = [point[1] / GIB for point in curve]
        axes.fill_between(times, held, color=HELD_COLOUR, alpha=0.35, linewidth=0)
        axes.plot(times, held, color=HELD_COLOUR, linewidth=0.8)
        axes.axhline(limit_bytes / GIB, color=Kind.B.colour, linewidth=0.8, linestyle="--")
        axes.set_ylabel(f"{name}\nGiB", fontsize=8)
        axes.set_ylim(0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("seconds of a rank's own work in a step, by counted work")
    figure.suptitle(title, fontsize=9)
    return figure
