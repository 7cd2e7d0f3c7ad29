"""The picture of the frontier: step time over memory, the published schedules as points."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_vshape.core.frontier import Point
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.view.names import display_name
from megatron_vshape.view.palette import HELD_COLOUR

_REACH = 2.0  # schedules that hold more than so many times the highest limit are left out
_LINE = 7.5  # points from one name's line to the next
_NAME = 95.0  # points that a name may be wide


def frontier_figure(
    planned: Sequence[Point], published: Sequence[Point], memory_label: str, scale: float = 1.0
) -> Figure:
    """Return the plans as steps, since more memory never hurts, and each schedule as a mark.

    `scale` turns the points' unit of memory into the label's. Times are told by what they are above
    the fastest, of plans and schedules alike: a bubble is a share of a device's own work, and the
    work of the busiest device differs from placement to placement.
    """
    fastest = min(point.value for point in (*planned, *published))

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
    near = [point for point in published if point.peak * scale <= _REACH * limits[-1]]
    for point in near:
        axes.plot(point.peak * scale, slower(point), "D", color=HELD_COLOUR, markersize=4)
    axes.plot([], [], "D", color=HELD_COLOUR, markersize=4, label="published schedules")
    axes.set_xlabel(memory_label)
    axes.set_ylabel("step time, % above the fastest")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    _name_points(axes, [(point, point.peak * scale, slower(point)) for point in near])
    return figure


def _name_points(axes: Axes, points: Sequence[tuple[Point, float, float]]) -> None:
    """Write each schedule's name beside its mark, higher where another name is in the way."""
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]
    per_point = axes.figure.dpi / 72
    taken: list[tuple[float, float]] = []
    for point, memory, slower in sorted(points, key=lambda each: (each[2], each[1])):
        place = memory, slower
        x, y = axes.transData.transform(place) / per_point
        up = 0.0
        while any(abs(x - a) < _NAME and abs(y + up - b) < _LINE for a, b in taken):
            up += 1.0
        taken.append((x, y + up))
        axes.annotate(
            display_name(point.schedule.name),
            place,
            textcoords="offset points",
            xytext=(6, up - 2),
            fontsize=7,
        )
