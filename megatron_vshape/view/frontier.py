"""Figure of the memory-time frontier, with the published schedules as points."""

from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_vshape.core.evaluated_schedule import EvaluatedSchedule
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.plan import Point
from megatron_vshape.view.names import display_name

_REACH = 2.0  # omit schedules with more memory than this multiple of the highest limit

_TICKS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500)
"""Percent."""

_PUBLISHED = "#333333"
"""Color of published schedules, whose names are next to their points."""


def frontier_figure(
    planned: Sequence[Point],
    published: Sequence[EvaluatedSchedule],
    memory_label: str,
    scale: float = 1.0,
) -> Figure:
    """Draw the plans as steps, since more memory never hurts, and each schedule as a point.

    `scale` converts the points' unit of memory to the label's. Times are relative to the fastest
    plan or schedule rather than bubbles: a bubble is relative to the work of the busiest device,
    which depends on the placement.
    """
    plans = [point.plan for point in planned]
    fastest = min(plan.value for plan in (*plans, *published))

    def slower(plan: EvaluatedSchedule) -> float:
        return 100 * (plan.value / fastest - 1)

    figure = Figure(figsize=(6.8, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.margins(x=0.08)
    limits = [point.limit * scale for point in planned]
    axes.step(
        limits,
        [*map(slower, plans)],
        where="post",
        color=Kind.F.colour,
        marker="o",
        markersize=3,
        label="plan at this limit",
    )
    nearby = [
        schedule for schedule in published if max(schedule.peak) * scale <= _REACH * limits[-1]
    ]
    for evaluated in nearby:
        place = max(evaluated.peak) * scale, slower(evaluated)
        axes.plot(*place, marker="D", markersize=4, linestyle="", color=_PUBLISHED)
        name = display_name(evaluated.schedule.name)
        axes.annotate(name, place, xytext=(6, 0), textcoords="offset points", va="center")
    axes.set_xlabel(memory_label)
    axes.set_ylabel("step time, % above the fastest")
    # The lowest limits are several times slower; most useful plans are close to the fastest.
    axes.set_yscale("symlog", linthresh=1, linscale=0.5, subs=range(2, 10))
    axes.set_yticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    axes.set_ylim(0, 1.1 * max(*map(slower, (*plans, *nearby)), 1.0))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    return figure
