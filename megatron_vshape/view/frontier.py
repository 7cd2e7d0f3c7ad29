"""The picture of the frontier: bubble over memory, the published schedules as points."""

from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_vshape.core.frontier import Point
from megatron_vshape.core.passes import Kind
from megatron_vshape.view.names import display_name
from megatron_vshape.view.palette import HELD_COLOUR, PASS_COLOURS

_OFFSET = (5, 4)  # points, from a mark to its name


def frontier_figure(
    planned: Sequence[Point], published: Sequence[Point], memory_label: str, scale: float = 1.0
) -> Figure:
    """Return the plans as steps, since more memory never hurts, and each schedule as a mark.

    `scale` turns the points' unit of memory into the label's.
    """
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colour = PASS_COLOURS[Kind.F]
    limits = [point.limit * scale for point in planned]
    bubbles = [100 * point.bubble for point in planned]
    axes.step(limits, bubbles, where="post", color=colour, label="adaptive plan at this limit")
    axes.plot(limits, bubbles, "o", color=colour, markersize=3)
    for point in published:
        place = (point.peak * scale, 100 * point.bubble)
        axes.plot(*place, "D", color=HELD_COLOUR, markersize=4)
        name = display_name(point.schedule.name)
        axes.annotate(name, place, textcoords="offset points", xytext=_OFFSET, fontsize=7)
    axes.plot([], [], "D", color=HELD_COLOUR, markersize=4, label="published schedules")
    axes.set_xlabel(memory_label)
    axes.set_ylabel("bubble, % of the step")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return figure
