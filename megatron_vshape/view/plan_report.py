"""Text of a plan: its figures, its comparison with other schedules, the recommendation."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron_vshape.core.check.bounds import fits
from megatron_vshape.core.evaluated_schedule import EvaluatedSchedule
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.request import SAME, PlanResult
from megatron_vshape.core.schedule_names import MEGATRONS_OWN, NOT_STOCK, why_not_stock
from megatron_vshape.view.names import placement_text
from megatron_vshape.view.numbers import (
    UnitFormat,
    idle_lines,
    labelled,
    layer_lines,
    overhead_lines,
    peak_lines,
    percent,
    table,
    trade_lines,
)

_HEADING = ["schedule", "chunks per rank", "peak", "step time", "mean idle", ""]
_TIME = _HEADING.index("step time")
_RUNNERS_UP = 3
"""Number of rows within the limit below the recommended one."""


def format_best_so_far(result: PlanResult) -> str:
    """Format the result of a search that was stopped."""
    name = "the plan" if result.plan.baseline is None else f"{result.plan.baseline}, as published"
    is_optimal = percent(result.plan.gap) == percent(0.0)  # for its placement
    better = "plan with another placement" if is_optimal else "plan"
    return f"best so far: {name}; more time may find a better {better}"


def _split_text(schedule: Schedule) -> str:
    """Format the share of the backward passes that are split into B and W."""
    kinds = [work.kind for row in schedule.order for work in row if Kind.B in work.kind.does]
    split = kinds.count(Kind.B)
    if split in (0, len(kinds)):
        return "all stages" if split else "none"
    return f"{100 * split / len(kinds):.0f} % of the backward passes"


def plan_lines(result: PlanResult, limit: float, units: UnitFormat) -> list[str]:
    """Format the figures of a plan within a memory limit, one per line."""
    plan, slices = result.plan, result.schedule.slices
    time, memory, unit = units.time, units.memory, "" if units.in_bytes else " in --cost units"
    lines = [
        (str(plan.objective), f"{time(plan.value)}{unit}"),
        ("busy time", f"{time(plan.busy)} (busiest rank)"),
        ("bubble", f"{percent(plan.bubble)} ({time(plan.overhead)})"),
        *labelled("idle", idle_lines(plan.timeline)),
        ("lower bound", f"{time(plan.lower_bound)} for this placement"),
        ("optimality gap", _gap_text(result)),
        ("placement", placement_text(plan.schedule)),
        *([("slices", f"{slices} per microbatch")] if slices > 1 else []),
        ("peak memory", f"{memory(max(plan.peak))}, limit {memory(limit)}"),
        *labelled("per rank", peak_lines(plan.schedule, result.costs)),
        ("split backward", _split_text(plan.schedule)),
        *trade_lines(plan.timeline, result.costs, memory),
    ]
    if units.in_bytes:
        lines += labelled("costs", overhead_lines(result.costs))
    lines += labelled("layers", layer_lines(result.costs))
    return [f"{label:<16}{value}" for label, value in lines]


def _gap_text(result: PlanResult) -> str:
    value, gap = result.plan.value, result.plan.gap
    if not result.searched_bound:  # cut short
        return f"at most {percent(gap)} for this placement"
    searched = value / result.searched_bound - 1
    return (
        f"at most {percent(gap)} for this placement, {percent(max(searched, gap))} for all "
        "searched placements"
    )


class _TableRow(NamedTuple):
    """A row of the table, with its sort key and its family."""

    out: bool  # above the limit
    value: float
    family: str
    cells: list[str]


def comparison_table(
    result: PlanResult,
    evaluated_schedules: Iterable[EvaluatedSchedule],
    units: UnitFormat,
    every: bool = False,
) -> str:
    """Format a row per schedule.

    The recommended schedule comes first, then the others by step time; rows above the limit come
    last. Without `every`, the rows are the runners-up, the schedules of Megatron, and of each
    family above the limit the fastest, if it is faster than the plan; a line counts the others.

    Args:
        result: the plan result.
        evaluated_schedules: the schedules to compare with it.
        units: formats times and memory.
        every: format all rows.
    """
    best = result.plan
    name = "plan" if best.baseline is None else str(best.baseline)
    table_rows: list[_TableRow] = []
    for evaluated in evaluated_schedules:
        if evaluated.baseline is not None and evaluated.baseline == best.baseline:
            continue
        within = fits(evaluated.peak, result.limits)
        cells = _cells(evaluated, within, result, units)
        family = cells[0] if evaluated.baseline is None else evaluated.baseline.name
        table_rows.append(_TableRow(not within, evaluated.value, family, cells))
    table_rows += _strategy_rows(result, units.time)
    table_rows.sort(key=lambda row: row[:2])
    shown = table_rows if every else _worth_showing(table_rows, best.value)
    plan_row = [name, str(result.schedule.num_chunks), units.memory(max(best.peak))]
    plan_row += [units.time(best.value), percent(best.timeline.mean_idle), "recommended"]
    text = table([_HEADING, plan_row, *(row.cells for row in shown)])
    if num_omitted := len(table_rows) - len(shown):
        text += f"\n{num_omitted} more rows with --all: slower, or above the limit and not faster"
    return text


def _worth_showing(rows: Sequence[_TableRow], best: float) -> list[_TableRow]:
    """Return the rows that help to choose, in order."""
    families: set[str] = set()
    shown: list[_TableRow] = []
    for row in rows:
        first = row.family not in families
        helps = first and row.value < best if row.out else len(shown) < _RUNNERS_UP
        if helps or (first and row.family in MEGATRONS_OWN):
            shown.append(row)
            families.add(row.family)
    return shown


def _strategy_rows(result: PlanResult, time: Callable[[float], str]) -> Iterator[_TableRow]:
    """Yield the plans of the other strategies to save memory, or their lower bounds."""
    best = result.plan
    by_words: dict[str, tuple[float, bool]] = {}
    # A single strategy is the searched plan before its B and W are fused.
    for strategy, value, bound in (
        best.evaluated_strategies if len(best.evaluated_strategies) > 1 else ()
    ):
        words = f"plan: {strategy.text}"
        estimate = (bound, True) if value is None else (value, False)
        by_words[words] = min(estimate, by_words.get(words, estimate))
    for words, (value, is_bound) in by_words.items():
        slower = value / best.value - 1
        if slower <= SAME:  # the plan itself, or an equal one
            continue
        why = f"{percent(slower)} slower"
        row = [words, "", "", time(value), "", why]
        if is_bound:
            row[_TIME:] = [f">= {time(value)}", "", f"at least {why}"]
        yield _TableRow(False, value, words, row)


def _cells(
    evaluated: EvaluatedSchedule, within: bool, result: PlanResult, units: UnitFormat
) -> list[str]:
    slower = evaluated.value / result.plan.value - 1
    if within:
        why = f"{percent(slower)} slower" if slower > 1e-9 else "as fast"
    else:
        over = max(peak - limit for peak, limit in zip(evaluated.peak, result.limits, strict=True))
        why = f"{units.memory(over)} above the limit"
    baseline, schedule = evaluated.baseline, result.schedule
    is_rejected = baseline and why_not_stock(
        baseline.name, schedule.num_devices, schedule.unsliced_microbatches
    )
    peak, idle = units.memory(max(evaluated.peak)), percent(evaluated.timeline.mean_idle)
    return [
        str(baseline),
        str(evaluated.schedule.num_chunks),
        peak,
        units.time(evaluated.value),
        idle,
        why + (f"; {NOT_STOCK}" if is_rejected else ""),
    ]


def format_recommendation(result: PlanResult) -> str:
    """Format the recommendation as one sentence."""
    baseline, chunks = result.plan.baseline, result.schedule.num_chunks
    if baseline is not None and result.plan.is_megatrons:
        stages = f" with {chunks} virtual stages per rank" if chunks > 1 else ""
        name = f"stock Megatron's {baseline.name}{stages}"
        return f"recommended: {name}; no plan within the limit is faster"
    if baseline is not None:
        return f"recommended: {baseline}, as published; no plan within the limit is faster"
    unit = "chunk" if chunks == 1 else "chunks"
    return f"recommended: the plan, with {chunks} {unit} per rank"
