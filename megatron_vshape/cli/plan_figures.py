"""Figures of `plan`: step time against memory limit (--frontier), interactive page (--html)."""

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron_vshape.cli.files import Output, report_written, write_all
from megatron_vshape.cli.options import format_limit_errors
from megatron_vshape.cli.progress import Progress, report_progress
from megatron_vshape.core.budget import Budget
from megatron_vshape.core.evaluated_schedule import EvaluatedSchedule
from megatron_vshape.core.plan import Point, frontier, published_schedules
from megatron_vshape.core.request import PlanRequest, PlanResult
from megatron_vshape.view.names import plain
from megatron_vshape.view.numbers import GIB, UnitFormat, base_peak, fixed, percent, table

_LAST_LIMIT_S = 30.0
"""Seconds for the search of a frontier's current limit to end after Ctrl-C."""


def run_frontier(request: PlanRequest, path: Path, seconds: float | None, units: UnitFormat) -> int:
    """Plan at every whole number of chunks up to 1F1B's, print the table and write the files.

    Args:
        request: the plan request; its memory limit is ignored.
        path: file of the figure; the table has the same name and the suffix .csv.
        seconds: time limit of all searches together.
        units: formats times and memory.
    """
    from megatron_vshape.view.figure import save
    from megatron_vshape.view.frontier import frontier_figure

    limits = [units.chunk * chunks for chunks in range(2, 2 * request.num_devices + 1)]
    if seconds is not None:
        request = replace(request, seconds=seconds / len(limits))
    with report_progress(units.time) as progress, format_limit_errors(units):
        points = _followed(request, limits, units.chunk, progress)
        published = list(published_schedules(request))
    rows = _frontier_rows(points, published, units)
    unit, size = ("GiB", GIB) if units.in_bytes else ("chunks", units.chunk)
    drawn = frontier_figure(points, published, f"memory limit, {unit}", 1 / size)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    outputs = [
        Output("--frontier", path, partial(save, drawn)),
        Output(
            "--frontier",
            path.with_suffix(".csv"),
            lambda target: target.write_text(text.getvalue(), encoding="utf-8", newline=""),
        ),
    ]
    write_all(outputs)
    print(table(rows))
    report_written(outputs)
    return 0


def _followed(
    request: PlanRequest, limits: Sequence[float], chunk: float, progress: Progress
) -> list[Point]:
    """Return the frontier, with a report per limit; Ctrl-C ends it after the current limit."""
    budget, points = Budget(report=progress.search), list[Point]()

    def report(point: Point) -> None:
        points.append(point)
        text = f"limit {point.limit / chunk:g} of {limits[-1] / chunk:g} chunks: bubble"
        progress.print_line(f"{text} {percent(point.plan.bubble)}")

    work = partial(frontier, request, limits, report, budget)
    budget.run(work, lambda best: None, grace_s=_LAST_LIMIT_S)
    if budget.interrupted and not points:
        raise KeyboardInterrupt
    if budget.interrupted:
        progress.print_line("interrupted: the output ends at this limit")
    return points


def _frontier_rows(
    points: Sequence[Point], published: Sequence[EvaluatedSchedule], units: UnitFormat
) -> list[list[str]]:
    """Return a heading, a row per limit, and a row per published schedule, by memory.

    Numbers have the format of spreadsheets.
    """
    fastest = min(plan.value for plan in (*(point.plan for point in points), *published))
    unit, times = (", ms", 1000.0) if units.in_bytes else ("", 1.0)
    heading = ["schedule", "limit, chunks", "peak, chunks", f"step time{unit}", "above the fastest"]
    rows = [[*heading, f"lower bound{unit}"]]

    def number(value: float, digits: int = 4) -> str:
        return fixed(value, digits).replace(",", "")

    def cells(plan: EvaluatedSchedule, limit: str = "", bound: str = "") -> list[str]:
        peak, value = number(max(plan.peak) / units.chunk), number(plan.value / times, 6)
        name, slower = plain(plan.schedule.name), percent(plan.value / fastest - 1)
        return [name, limit, peak, value, slower, bound]

    by_memory = [(max(plan.peak), plan.value, cells(plan)) for plan in published]
    for limit, plan in points:
        bound = number(plan.lower_bound / times, 6)
        by_memory.append((limit, plan.value, cells(plan, number(limit / units.chunk), bound)))
    return rows + [row for *_, row in sorted(by_memory, key=lambda row: row[:2])]


def write_page(
    path: Path, *, result: PlanResult, limit: float, units: UnitFormat, command: str
) -> None:
    """Write the plan as an interactive page, with the command that reproduces it."""
    from megatron_vshape.playground.html import plain_facts, write_html

    plan, costs = result.plan, result.costs
    timeline = plan.timeline
    base = base_peak(plan.schedule.num_devices, costs)
    facts = replace(
        plain_facts(timeline, in_bytes=units.in_bytes, base_peak=base),
        limit=limit,
        lower_bound=plan.lower_bound,
        bounded=str(plan.objective),
        title=f"Plan within {units.memory(limit)}",
        recipe=command,
    )
    write_html(path, timeline, costs, facts)
