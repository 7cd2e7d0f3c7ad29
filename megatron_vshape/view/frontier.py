"""Figure of the memory-time frontier, with the published schedules as points."""

from collections.abc import Sequence

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.plan import Point
from megatron_vshape.view.names import display_name

_REACH = 2.0  # omit schedules with more memory than this multiple of the highest limit

_TICKS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500)
"""Percent."""

_MARKERS = "Ds^v"


def frontier_figure(
    planned: Sequence[Point], published: Sequence[Point], memory_label: str, scale: float = 1.0
) -> Figure:
    """Draw the plans as steps, since more memory never hurts, and each schedule as a point.

    `scale` converts the points' unit of memory to the label's. Times are relative to the fastest
    plan or schedule rather than bubbles: a bubble is relative to the work of the busiest device,
    which depends on the placement.
    """
    fastest = min(point.value for point in (*planned, *published))

    def slower(point: Point) -> float:
        return 100 * (point.value / fastest - 1)

    figure = Figure(figsize=(6.8, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    limits = [point.limit * scale for point in planned]
    (steps,) = axes.step(limits, [*map(slower, planned)], where="post")
    steps.set_label("adaptive plan at this limit")
    steps.set(color=Kind.F.colour, marker="o", markersize=3)
    nearby_points = [point for point in published if point.peak * scale <= _REACH * limits[-1]]
    colours = matplotlib.color_sequences["tab20"]
    for index, point in enumerate(nearby_points):
        (mark,) = axes.plot(point.peak * scale, slower(point), markersize=5, linestyle="")
        mark.set_label(display_name(point.schedule.name))
        mark.set(color=colours[index % len(colours)], marker=_MARKERS[index % len(_MARKERS)])
    axes.set_xlabel(memory_label)
    axes.set_ylabel("step time, % above the fastest")
    # The lowest limits are several times slower; most useful plans are close to the fastest.
    axes.set_yscale("symlog", linthresh=1, linscale=0.5, subs=range(2, 10))
    axes.set_yticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    axes.set_ylim(0, 1.1 * max(*map(slower, (*planned, *nearby_points)), 1.0))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=7, loc="outside right upper")
    return figure
