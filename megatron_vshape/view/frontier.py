"""Figure of the memory-time frontier, with the published schedules as points."""

from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.plan import Point
from megatron_vshape.view.labels import Mark, name_marks
from megatron_vshape.view.names import HELD_COLOUR, display_name

_REACH = 2.0  # omit schedules with more memory than this multiple of the highest limit

_TICKS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500)
"""Percent."""

_LESS = (Kind.B, Kind.W, Kind.BW)  # colors of the plans in `less`


def frontier_figure(
    planned: Sequence[Point],
    published: Sequence[Point],
    memory_label: str,
    scale: float = 1.0,
    less: Mapping[str, Sequence[Point]] = MappingProxyType({}),
) -> Figure:
    """Draw the plans as steps, since more memory never hurts, and each schedule as a point.

    `less` has plans with strategies that save memory, by name. `scale` converts the points' unit of
    memory to the label's. Times are relative to the fastest plan or schedule rather than bubbles: a
    bubble is relative to the work of the busiest device, which depends on the placement.
    """
    fastest = min(point.value for point in (*planned, *published))  # plans with less are no faster

    def slower(point: Point) -> float:
        return 100 * (point.value / fastest - 1)

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colour = Kind.F.colour
    limits = [point.limit * scale for point in planned]
    times = [slower(point) for point in planned]
    axes.step(limits, times, where="post", color=colour, label="adaptive plan at this limit")
    axes.plot(limits, times, "o", color=colour, markersize=3)
    for (name, points), other in zip(less.items(), _LESS, strict=False):
        memory = [point.limit * scale for point in points]
        axes.step(memory, [*map(slower, points)], where="post", color=other.colour, label=name)
    near = [point for point in published if point.peak * scale <= _REACH * limits[-1]]
    for point in near:
        axes.plot(point.peak * scale, slower(point), "D", color=HELD_COLOUR, markersize=4)
    axes.plot([], [], "D", color=HELD_COLOUR, markersize=4, label="published schedules")
    axes.set_xlabel(memory_label)
    axes.set_ylabel("step time, % above the fastest")
    # The lowest limits are several times slower; most useful plans are close to the fastest.
    axes.set_yscale("symlog", linthresh=1, linscale=0.5, subs=range(2, 10))
    axes.set_yticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    slowest = max(map(slower, (*planned, *near, *chain.from_iterable(less.values()))))
    axes.set_ylim(0, 1.1 * max(slowest, 1.0))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="outside upper center", ncols=3)
    name_marks(
        axes,
        [
            Mark(point.peak * scale, slower(point), display_name(point.schedule.name))
            for point in near
        ],
    )
    return figure
