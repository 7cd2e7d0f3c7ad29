"""Comparison of a plan with Megatron's and published schedules: table of `plan`."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from megatron_vshape.core.baselines import (
    MEGATRONS_OWN,
    NOT_STOCK,
    SAME,
    BaselineSpec,
    EvaluatedSchedule,
    why_not_stock,
)
from megatron_vshape.core.budget import Budget
from megatron_vshape.core.check.bounds import fits
from megatron_vshape.core.check.simulate import peak_moved, simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import FROM_HOST, MOVING_NAME, TO_HOST
from megatron_vshape.core.model.placement import chunks_of
from megatron_vshape.core.model.schedule import Timeline
from megatron_vshape.core.plan import compare
from megatron_vshape.core.request import PlanRequest, PlanResult
from megatron_vshape.view.numbers import percent

Text = Callable[[float], str]

HEADING = ["schedule", "chunks per rank", "peak", "step time", "mean idle", ""]
TIME = HEADING.index("step time")
RUNNERS_UP = 3
"""Number of rows within the limit below the recommended one."""


class _TableRow(NamedTuple):
    """A row of the table, with its sort key and its family."""

    out: bool  # above the limit
    value: float
    family: str
    cells: list[str]


def comparison_rows(
    request: PlanRequest,
    result: PlanResult,
    budget: Budget,
    held: Text,
    time: Text,
    every: bool = False,
) -> tuple[list[list[str]], int]:
    """Return a heading and a row per schedule, and the number of omitted rows.

    The recommended schedule comes first, then the others by step time; rows above the limit come
    last. Without `every`, the rows are the runners-up, the schedules of Megatron, and of each
    family above the limit the fastest, if it is faster than the plan.

    Args:
        request: the plan request.
        result: the plan result.
        budget: after it is used up, no further schedule is generated.
        held: formats memory.
        time: formats times.
        every: return all rows.
    """
    idle = simulate(result.schedule, result.costs).mean_idle
    best = result.plan
    name = "plan" if result.baseline is None else str(result.baseline)
    rest: list[_TableRow] = []
    for each in compare(request, result, budget):
        if each.baseline is not None and each.baseline == result.baseline:
            continue
        value, within = request.objective.of(each.timeline), fits(each.peak, result.limits)
        cells = _row(each, value, within, result, held, time)
        family = cells[0] if each.baseline is None else each.baseline.name
        rest.append(_TableRow(not within, value, family, cells))
    rest += _tried_rows(result, time)
    rest.sort(key=lambda each: each[:2])
    shown = rest if every else _worth_showing(rest, best.value)
    own = [name, str(result.schedule.num_chunks), held(max(best.peak)), time(best.value)]
    rows = [HEADING, [*own, percent(idle), "recommended"], *(each.cells for each in shown)]
    return rows, len(rest) - len(shown)


def _worth_showing(rows: Sequence[_TableRow], best: float) -> list[_TableRow]:
    """Return the rows that help to choose, in order."""
    families: set[str] = set()
    shown: list[_TableRow] = []
    for each in rows:
        first = each.family not in families
        helps = first and each.value < best if each.out else len(shown) < RUNNERS_UP
        if helps or (first and each.family in MEGATRONS_OWN):
            shown.append(each)
            families.add(each.family)
    return shown


def _tried_rows(result: PlanResult, time: Text) -> Iterator[_TableRow]:
    """Yield the plans of the other strategies to save memory, or their lower bounds."""
    best = result.plan
    by_words: dict[str, tuple[float, bool]] = {}
    for way, value, bound in best.tried:
        words = f"plan: {way.text}"
        found = (bound, True) if value is None else (value, False)
        by_words[words] = min(found, by_words.get(words, found))
    for words, (value, least) in by_words.items():
        slower = value / best.value - 1
        if slower <= SAME:  # the plan itself, or an equal one
            continue
        why = f"{percent(slower)} slower"
        row = [words, "", "", time(value), "", why]
        if least:
            row[TIME:] = [f">= {time(value)}", "", f"at least {why}"]
        yield _TableRow(False, value, words, row)


def _row(
    each: EvaluatedSchedule,
    value: float,
    within: bool,
    result: PlanResult,
    held: Text,
    time: Text,
) -> list[str]:
    slower = value / result.plan.value - 1
    if within:
        why = f"{percent(slower)} slower" if slower > 1e-9 else "as fast"
    else:
        over = max(peak - limit for peak, limit in zip(each.peak, result.limits, strict=True))
        why = f"{held(over)} above the limit"
    peak, idle = held(max(each.peak)), percent(each.timeline.mean_idle)
    return [
        str(each.baseline),
        str(each.schedule.num_chunks),
        peak,
        time(value),
        idle,
        why + _note(each.baseline, result),
    ]


def _note(baseline: BaselineSpec | None, result: PlanResult) -> str:
    """Return a remark if stock Megatron rejects the schedule for these sizes."""
    schedule = result.schedule
    microbatches = schedule.whole_microbatches
    rejected = baseline and why_not_stock(baseline.name, schedule.num_devices, microbatches)
    return f"; {NOT_STOCK}" if rejected else ""


def recommended(result: PlanResult) -> str:
    """Format the recommendation as one sentence."""
    known, chunks = result.baseline, result.schedule.num_chunks
    if known is not None and result.is_megatrons:
        stages = f" with {chunks} virtual stages per rank" if chunks > 1 else ""
        name = f"stock Megatron's {known.name}{stages}"
        return f"recommended: {name}; no plan within the limit is faster"
    if known is not None:
        return f"recommended: {known}, as published; no plan within the limit is faster"
    each = "chunk" if chunks == 1 else "chunks"
    return f"recommended: the plan, with {chunks} {each} per rank"


def trades_told(
    timeline: Timeline, costs: Costs, held: Callable[[float], str]
) -> Iterator[tuple[str, str]]:
    """Yield a label and a line about moved memory, if the costs have it; `held` formats memory."""
    schedule = timeline.schedule
    if costs.copies:
        copied = Counter(work.stage for work in schedule.copied())
        share = sum(copied.values()) / (schedule.num_stages * schedule.num_microbatches)
        chunks = chunks_of(schedule.placement)
        by_chunk = Counter[int]()
        for stage, count in copied.items():
            by_chunk[chunks[stage]] += count
        of_chunk = schedule.num_devices * schedule.num_microbatches
        each = ", ".join(
            f"{percent(by_chunk[c] / of_chunk)} of chunk {c}" for c in sorted(by_chunk)
        )
        busy = percent(link_share(timeline))
        most = held(max(peak_moved(schedule, costs)))
        line = f"{percent(share)} of the activations ({each}); at most {most} of host memory per "
        line += f"rank; host link busy {busy}"
        yield MOVING_NAME, line if copied else "none (no gain)"


def link_share(timeline: Timeline) -> float:
    """Return the share of the step in which the busiest host link copies."""
    busiest = 0.0
    for lane in timeline.schedule.lanes():
        if any(work.kind.resource in (TO_HOST, FROM_HOST) for work in lane.passes):
            starts, ends = timeline.starts[lane.device], timeline.ends[lane.device]
            busiest = max(busiest, sum(ends[at] - starts[at] for at in lane.places))
    return busiest / timeline.makespan
