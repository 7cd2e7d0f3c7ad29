"""megatron-vshape plan: the adaptive scheduler on the command line."""

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megatron_vshape.cli import layer_costs
from megatron_vshape.cli.files import (
    FIGURE_SUFFIXES,
    Output,
    check_can_draw,
    check_targets,
    report_written,
    write_all,
)
from megatron_vshape.cli.help import MEMORY, MODEL, OUTPUT, SCHEDULE, SEARCH, group
from megatron_vshape.cli.options import (
    ABOVE_0,
    UNITS,
    UnitFormat,
    add_cost_arguments,
    add_size_arguments,
    chunks,
    count,
    decimal_unit_hint,
    ends_of,
    float_or_nan,
    format_limit_errors,
    headroom_of,
    nonnegative_time,
    number_of,
    stage_cost_function,
)
from megatron_vshape.cli.plan_figures import run_frontier, write_page
from megatron_vshape.cli.progress import report_progress
from megatron_vshape.cli.torch_export import (
    add_export_arguments,
    check_export,
    export_output,
    print_settings,
)
from megatron_vshape.core.budget import Budget
from megatron_vshape.core.check.bounds import fits
from megatron_vshape.core.check.simulate import simulate, usable_host_bytes
from megatron_vshape.core.model.costs import Costs, chunk_of, with_copies
from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.layers import AUTO_SPLIT
from megatron_vshape.core.model.pieces import Pieces
from megatron_vshape.core.model.placement import looping
from megatron_vshape.core.model.schedule import Objective, Schedule, check_size
from megatron_vshape.core.paper.catalogue import EVERY_NAME, canonical_name
from megatron_vshape.core.plan import (
    compare_baselines,
    no_worse_than_published,
    plan_request,
)
from megatron_vshape.core.planner.result import Plan
from megatron_vshape.core.planner.vocabulary import ALL_REDUCE_TIME
from megatron_vshape.core.program.torch_file import find_torch_name
from megatron_vshape.core.request import (
    AUTO,
    MEGATRONS_OWN,
    NOT_STOCK,
    SAME,
    SLICES,
    SUFFIXES,
    EvaluatedSchedule,
    PlanRequest,
    PlanResult,
    StageCostFunction,
    limits_of,
    why_not_stock,
)
from megatron_vshape.view.names import placement_text
from megatron_vshape.view.numbers import (
    GIB,
    idle_lines,
    labelled,
    layer_lines,
    overhead_lines,
    peak_lines,
    percent,
    table,
    trade_lines,
)
from megatron_vshape.view.text import columns, picture, wants_colour

MOST_CHUNKS = 12
"""Default maximum of chunks per rank."""

_BASE_CHUNKS = 4
"""Chunks per rank of the searched plan, if the layers allow."""

_FIRST_SHARE = 0.5
"""Share of --seconds for the search; the comparison needs the rest."""

Text = Callable[[float], str]

HEADING = ["schedule", "chunks per rank", "peak", "step time", "mean idle", ""]
TIME = HEADING.index("step time")
_RUNNERS_UP = 3
"""Number of rows within the limit below the recommended one."""

_TARGETS = {"export": SUFFIXES, "html": (".html",), "frontier": FIGURE_SUFFIXES}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "megatron-vshape plan --devices D --microbatches M [OPTIONS]"
    add_size_arguments(parser)
    model = group(parser, MODEL)
    model.add_argument("--layers", type=count, metavar="N", help="Layers of the model")
    add_cost_arguments(parser)
    _add_memory(parser)
    _add_schedule(parser)
    _add_search(parser)
    _add_outputs(parser)


def _add_memory(parser: argparse.ArgumentParser) -> None:
    add = group(parser, MEMORY).add_argument
    add(
        "--memory-limit",
        type=canonical_name,
        metavar="LIMIT",
        help="Limit per rank: chunks of activations (1F1B needs 2D); XGiB with --costs, of all "
        "tensors if the file has state_bytes; or the peak of a schedule (default: 1f1b)",
    )
    add(
        "--headroom",
        metavar="SHARE",
        help="Part of the limit to keep free: 5%%, 0.05 or 2GiB (default: 0)",
    )
    add(
        "--offload",
        type=number_of("a time above 0, as in 1.5", ABOVE_0),
        metavar="T",
        help="Allow offloading to host memory; time to copy a chunk in one direction, in F",
    )
    add(
        "--host-memory-limit",
        metavar="LIMIT",
        help="Host memory limit per rank, in chunks or XGiB (default: none)",
    )


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    add = group(parser, SCHEDULE).add_argument
    add(
        "--chunks",
        type=chunks,
        metavar="N",
        help=f"Maximum chunks per rank (default: by the number of layers, at most {MOST_CHUNKS})",
    )
    add(
        "--layer-split",
        choices=(AUTO_SPLIT,),
        help="Balance the work of the stages by moving layers; needs --layers or --costs",
    )
    add(
        "--slices",
        type=_slice_counts,
        metavar="K|auto",
        help="Sequence slices per microbatch, or several numbers to choose from, as in 1,2,4; "
        f"auto: {', '.join(map(str, SLICES))} (default: 1)",
    )
    add(
        "--host",
        type=float_or_nan,
        metavar="X",
        help="Fixed launch overhead per pass, in --cost units (default: 0); host_us in a costs "
        "file",
    )
    add(
        "--objective",
        type=Objective,
        choices=list(Objective),
        default=Objective.MAKESPAN,
        help="makespan: time of a step; span: the same without a barrier between steps "
        "(default: makespan)",
    )
    add(
        "--vocab-parallel",
        nargs="?",
        type=nonnegative_time,
        const=math.nan,
        metavar="T",
        help="Use vocabulary parallelism; needs --head or --costs. T: time of an all-reduce in "
        f"cost units (default: {ALL_REDUCE_TIME:g} F)",
    )


def _slice_counts(text: str) -> int | tuple[int, ...]:
    """Parse the slices per microbatch: a number, several to choose from, or `auto`."""
    if text == AUTO:
        return SLICES
    slice_counts = tuple(dict.fromkeys(map(count, text.split(","))))
    return slice_counts[0] if len(slice_counts) == 1 else slice_counts


def _add_search(parser: argparse.ArgumentParser) -> None:
    add = group(parser, SEARCH).add_argument
    add(
        "--seconds",
        type=number_of("a number of seconds above 0", ABOVE_0),
        metavar="S",
        help="Total time limit in seconds, including the comparison; Ctrl-C returns the best so "
        "far (default: none)",
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    output = group(parser, OUTPUT)
    add_export_arguments(output)
    output.add_argument(
        "--html", type=Path, metavar="FILE", help="Interactive page to write (.html)"
    )
    output.add_argument(
        "--frontier",
        type=Path,
        metavar="FILE",
        help="Figure of the step time at every memory limit up to 1F1B's to write (.svg, .png, "
        ".pdf), with its table (.csv)",
    )
    output.add_argument(
        "--all", action="store_true", help="Compare with all schedules, not only the best"
    )


def run(options: argparse.Namespace) -> int:
    """Plan, compare, write the files, and return 0."""
    _check(options)
    measured = None if options.costs is None else _measured(options.costs, options.layers)
    is_in_chunks = (options.memory_limit or "").lower().endswith(_CHUNKS)
    if measured is not None and (options.frontier is not None or is_in_chunks):
        # Limits in chunks are of activations: costs without static memory are used.
        measured = measured.of_activations()
    costs = _costs(options, measured)
    request, units = _request(options, costs, measured), UnitFormat.of(costs, options)
    if options.frontier is not None:
        return run_frontier(request, options.frontier, options.seconds, units)
    limit = _limit(options, request, measured is not None)
    request = replace(request, limit=limit)
    with report_progress(units.time) as progress, format_limit_errors(units):
        budget = Budget(options.seconds, progress.search)

        def report_best(best: PlanResult | None) -> None:
            text = "none yet; the best published schedule follows"
            if best is not None:
                text = f"{units.time(best.plan.value)}, peak {units.memory(max(best.plan.peak))}"
            progress.print_line(f"interrupted; the best so far: {text}")

        work = partial(_searched, request, budget, units, options.all)
        # The search runs in a thread: None means that the time limit or Ctrl-C stopped it early.
        searched = budget.run(work, report_best)
        result, compared = searched or _best_so_far(request, budget)
        # A search that was stopped may be slower than a published schedule that fits.
        if searched and budget.stopped():
            result = no_worse_than_published(request, result) or result
    # Files first: if one cannot be written, nothing has been printed.
    outputs = _outputs(options, result, limit, units)
    write_all(outputs)
    _print(request, result, limit, units)
    print(f"\n{compared}\n")
    print(_recommended(result) if searched else _format_best_so_far(result))
    report_written(outputs)
    print_settings(options, simulate(result.schedule, result.costs), result.costs, units.time)
    return 0


def _format_best_so_far(result: PlanResult) -> str:
    name = "the plan" if result.baseline is None else f"{result.baseline}, as published"
    is_optimal = percent(result.plan.gap) == percent(0.0)  # for its placement
    better = "plan with another placement" if is_optimal else "plan"
    return f"best so far: {name}; more time may find a better {better}"


def _outputs(
    options: argparse.Namespace, result: PlanResult, limit: float, units: UnitFormat
) -> list[Output]:
    outputs = []
    if options.export is not None:
        outputs.append(export_output(options, result.schedule))
    if options.html is not None:
        command = _command_without_outputs(options.words)
        page = partial(write_page, result=result, limit=limit, units=units, command=command)
        outputs.append(Output("--html", options.html, page))
    return outputs


def _searched(
    request: PlanRequest, budget: Budget, units: UnitFormat, every: bool
) -> tuple[PlanResult, str]:
    """Search for the best plan; return it with its comparison table."""
    result = plan_request(request, budget)
    budget.register_result(lambda: result)
    rows, num_omitted = _comparison_rows(request, result, budget, units.memory, units.time, every)
    compared = table(rows)
    if num_omitted:
        compared += (
            f"\n{num_omitted} more rows with --all: slower, or above the limit and not faster"
        )
    if budget.stopped():
        compared += "\nfurther rows skipped (time limit)"
    return result, compared


def _best_so_far(request: PlanRequest, budget: Budget) -> tuple[PlanResult, str]:
    """Return the best plan found so far, or a published schedule if faster, and a remark.

    Raises:
        KeyboardInterrupt: interrupted before anything was found.
        ScheduleError: nothing was found within the time limit.
    """
    result = no_worse_than_published(request, budget.best())
    if result is None and budget.interrupted:
        raise KeyboardInterrupt
    if result is None:
        raise ScheduleError(
            f"no plan was found in --seconds {budget.seconds}: increase --seconds or --memory-limit"
        )
    skipped = "comparison table skipped (time limit); no published schedule that fits is faster"
    return result, skipped


def _measured(file: str, layers: int | None) -> Costs:
    """Load a costs file.

    Raises:
        ScheduleError: --layers contradicts the file.
    """
    costs = Costs.load(file)
    of_file = sum(costs.layers or ()) or layers
    if layers is not None and layers != of_file:
        raise ScheduleError(
            f"--layers {layers} contradicts --costs {file}, which is for {of_file} layers: remove "
            "--layers"
        )
    return costs


def _request(
    options: argparse.Namespace, costs: Costs | None, measured: Costs | None
) -> PlanRequest:
    request = PlanRequest(
        AUTO,
        options.devices,
        options.microbatches,
        costs or _costs(options, measured),
        _cost_function(options, measured),
        chunks=tuple(range(1, (options.chunks or MOST_CHUNKS) + 1)),
        objective=options.objective,
        slices=options.slices or 1,
        seconds=None if options.seconds is None else options.seconds * _FIRST_SHARE,
        layers=_pieces(options, measured),
    )
    if options.format:
        # torchtitan and NeMo Automodel derive the stages of a rank from a schedule name.
        placements = request.searched_placements()
        named = tuple(shape for shape in placements if find_torch_name(shape, options.devices))
        request = replace(request, placements=named)
    return replace(request, moved_limit=_in_host(options, request))


def _cost_function(options: argparse.Namespace, measured: Costs | None) -> StageCostFunction:
    if options.vocab_parallel is not None:
        return layer_costs.stage_cost_function(options, measured)
    ends = ends_of(options, options.layers)
    base = stage_cost_function(options.devices, options.cost, measured, options.layers, ends)

    def costs_of_stages(num_stages: int, name: str) -> Costs:
        costs = base(num_stages, name)
        if options.offload is not None:
            costs = with_copies(costs, options.offload)
        return costs if options.host is None else replace(costs, host_us=options.host)

    return costs_of_stages


def _pieces(options: argparse.Namespace, measured: Costs | None) -> tuple[Pieces, int] | None:
    """Return the costs of a layer, the embedding and the output layer, and the number of layers.

    None without --layer-split.
    """
    if options.layer_split is None:
        return None
    if measured is None and options.layers is None:
        raise ScheduleError("--layer-split auto needs --layers N or --costs FILE")
    pieces, layers = layer_costs.pieces_of(options, measured, "--layer-split auto")
    if options.offload is not None:
        pieces = pieces.with_copies(options.offload)
    return pieces, round(layers)


def _check(options: argparse.Namespace) -> None:
    for name in ("devices", "microbatches"):
        if getattr(options, name) is None:
            raise ScheduleError(f"plan requires --{name}, as in --devices 8 --microbatches 64")
    check_targets(options, _TARGETS)
    check_export(options)
    if options.offload is not None and options.costs:
        raise ScheduleError(
            "--offload and --costs exclude each other, because a costs file contains the copy "
            "times: remove one of them"
        )
    if options.offload is not None and options.vocab_parallel is not None:
        raise ScheduleError("--offload does not support --vocab-parallel: remove --offload")
    if options.host is not None and (options.costs or not 0 <= options.host < math.inf):
        raise ScheduleError(
            f"--host {options.host:g} must be finite, at least 0, and without --costs FILE, which "
            "contains host_us"
        )
    if options.frontier is not None:
        check_can_draw("--frontier")
    for name in ("memory_limit", "headroom", "export", "html", "all"):
        if options.frontier is not None and getattr(options, name):
            flag = f"--{name.replace('_', '-')}"
            raise ScheduleError(f"--frontier plans at every limit: remove {flag}")


def _costs(options: argparse.Namespace, measured: Costs | None) -> Costs:
    """Return the costs of the stages that the search distributes."""
    devices, max_chunks = options.devices, options.chunks
    split = _pieces(options, measured)
    if split is not None:
        pieces, num_layers = split
        counts = (
            num_chunks
            for num_chunks in (_BASE_CHUNKS, 2)
            if num_chunks <= (max_chunks or _BASE_CHUNKS)
        )
        chunks = next(
            (num_chunks for num_chunks in counts if num_chunks * devices <= num_layers + 2), 1
        )
        return pieces.costs(pieces.balanced(num_layers, looping(devices, chunks)))
    costs_of_stages = _cost_function(options, measured)
    if measured is not None:
        if max_chunks is None or measured.num_stages <= max_chunks * devices:
            shares = options.vocab_parallel is not None
            return costs_of_stages(measured.num_stages, "a plan") if shares else measured
    total = options.layers if measured is None else measured.num_stages
    # even numbers first: the V placement needs one
    for chunks in (_BASE_CHUNKS, 2, *range(6, MOST_CHUNKS + 1, 2), 3, 1):
        if chunks <= (max_chunks or MOST_CHUNKS) and (total or 0) % (chunks * devices) == 0:
            check_size(chunks * devices, options.microbatches)
            return costs_of_stages(chunks * devices, "a plan")
    raise ScheduleError(
        f"--layers {options.layers} is not a multiple of {devices} ranks: change --layers, or add "
        f"--layer-split {AUTO_SPLIT}"
    )


def _limit(options: argparse.Namespace, request: PlanRequest, in_bytes: bool) -> float:
    """Return the memory limit without the headroom, in the unit of the costs' memory.

    Raises:
        ScheduleError: not a limit, GiB without a costs file, or nothing is left.
    """
    text: str | None = options.memory_limit
    name = (text or "1f1b").partition(":")[0]
    if text is None or name in EVERY_NAME or Path(name).suffix in SUFFIXES:
        limit = max(limits_of(replace(request, limit=text)))
    else:
        alternative = ", nor a schedule such as interleaved-1f1b:4"
        limit = _memory("--memory-limit", text, request, in_bytes, alternative)
    return limit - headroom_of(options.headroom, limit, in_bytes)


def _memory(
    option: str, text: str, request: PlanRequest, in_bytes: bool, alternative: str = ""
) -> float:
    """Parse chunks or GiB of an option, to the unit of the costs' memory."""
    lowered = text.lower().strip()
    unit = next((name for name in (*UNITS, _CHUNKS) if lowered.endswith(name)), "")
    value = float_or_nan(lowered.removesuffix(unit))
    chunk = chunk_of(request.full_costs(), request.num_devices)
    if not 0 < value < math.inf:
        raise ScheduleError(
            f"{option} {text!r:.40} is neither chunks above 0, such as {request.num_devices + 2}, "
            f"nor GiB such as 12.5GiB{alternative}{decimal_unit_hint(text)}"
        )
    if in_bytes and not unit:
        raise ScheduleError(
            f"{option} {text} has no unit: use {text}GiB, or {text}{_CHUNKS} of activations, which "
            f"are {value * chunk / GIB:.1f} GiB with these costs"
        )
    if unit in UNITS and not in_bytes:
        raise ScheduleError(f"{option} {text} needs --costs FILE; without it, use chunks")
    return value * UNITS.get(unit, chunk)


_CHUNKS = "chunks"
"""Unit of a limit: a chunk is the activations of 1 / (2 x ranks) of the model."""


def _in_host(options: argparse.Namespace, request: PlanRequest) -> float:
    """Return the host memory limit per rank, in the unit of the costs' memory.

    Raises:
        ScheduleError: not a limit, or offloading is not enabled.
    """
    text = options.host_memory_limit
    if text is None:
        return math.inf
    if not request.full_costs().copies:
        raise ScheduleError(
            f"--host-memory-limit {text:.40} needs --offload T, or --costs FILE with copy times"
        )
    in_bytes = options.costs is not None
    limit = _memory("--host-memory-limit", text, request, in_bytes)
    return usable_host_bytes(limit) if in_bytes else limit


def _command_without_outputs(words: Sequence[str]) -> str:
    """Format the given command line without output options, which reproduces the plan."""
    outputs = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_outputs(outputs)
    return shlex.join(outputs.parse_known_args(words)[1])


def _split_text(schedule: Schedule) -> str:
    """Format the share of the backward passes that are split into B and W."""
    kinds = [work.kind for row in schedule.order for work in row if Kind.B in work.kind.does]
    split = kinds.count(Kind.B)
    if split in (0, len(kinds)):
        return "all stages" if split else "none"
    return f"{100 * split / len(kinds):.0f} % of the backward passes"


def _print(request: PlanRequest, result: PlanResult, limit: float, units: UnitFormat) -> None:
    plan, slices = result.plan, result.schedule.slices
    timeline = simulate(plan.schedule, result.costs)
    if plan.schedule.num_devices * plan.schedule.num_microbatches <= 256:
        print(picture(timeline, columns(), wants_colour(sys.stdout)) + "\n")
    time, memory, unit = units.time, units.memory, "" if units.in_bytes else " in --cost units"
    lines = [
        (str(plan.objective), f"{time(plan.value)}{unit}"),
        ("busy time", f"{time(plan.busy)} (busiest rank)"),
        ("bubble", f"{percent(plan.bubble)} ({time(_without_rounding_error(plan))})"),
        *labelled("idle", idle_lines(timeline)),
        ("lower bound", f"{time(plan.lower_bound)} for this placement"),
        ("optimality gap", _gap_text(result)),
        ("placement", placement_text(plan.schedule)),
        *([("slices", f"{slices} per microbatch")] if slices > 1 else []),
        ("peak memory", f"{memory(max(plan.peak))}, limit {memory(limit)}"),
        *labelled("per rank", peak_lines(plan.schedule, result.costs)),
        ("split backward", _split_text(plan.schedule)),
        *trade_lines(timeline, result.costs, memory),
    ]
    if units.in_bytes:
        lines += labelled("costs", overhead_lines(result.costs))
    lines += labelled("layers", layer_lines(result.costs))
    for label, value in lines:
        print(f"{label:<16}{value}")


def _without_rounding_error(plan: Plan) -> float:
    """Return the idle time of the busiest rank; 0 if it is a rounding error of the step time."""
    return plan.overhead if abs(plan.overhead) > 1e-9 * plan.value else 0.0


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


def _comparison_rows(
    request: PlanRequest,
    result: PlanResult,
    budget: Budget,
    memory: Text,
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
        memory: formats memory.
        time: formats times.
        every: return all rows.
    """
    idle = simulate(result.schedule, result.costs).mean_idle
    best = result.plan
    name = "plan" if result.baseline is None else str(result.baseline)
    table_rows: list[_TableRow] = []
    for evaluated in compare_baselines(request, result, budget):
        if evaluated.baseline is not None and evaluated.baseline == result.baseline:
            continue
        value, within = (
            request.objective.of(evaluated.timeline),
            fits(evaluated.peak, result.limits),
        )
        cells = _row(evaluated, value, within, result, memory, time)
        family = cells[0] if evaluated.baseline is None else evaluated.baseline.name
        table_rows.append(_TableRow(not within, value, family, cells))
    table_rows += _strategy_rows(result, time)
    table_rows.sort(key=lambda row: row[:2])
    shown = table_rows if every else _worth_showing(table_rows, best.value)
    plan_row = [name, str(result.schedule.num_chunks), memory(max(best.peak)), time(best.value)]
    rows = [HEADING, [*plan_row, percent(idle), "recommended"], *(row.cells for row in shown)]
    return rows, len(table_rows) - len(shown)


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


def _strategy_rows(result: PlanResult, time: Text) -> Iterator[_TableRow]:
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
            row[TIME:] = [f">= {time(value)}", "", f"at least {why}"]
        yield _TableRow(False, value, words, row)


def _row(
    evaluated: EvaluatedSchedule,
    value: float,
    within: bool,
    result: PlanResult,
    memory: Text,
    time: Text,
) -> list[str]:
    slower = value / result.plan.value - 1
    if within:
        why = f"{percent(slower)} slower" if slower > 1e-9 else "as fast"
    else:
        over = max(peak - limit for peak, limit in zip(evaluated.peak, result.limits, strict=True))
        why = f"{memory(over)} above the limit"
    baseline, schedule = evaluated.baseline, result.schedule
    is_rejected = baseline and why_not_stock(
        baseline.name, schedule.num_devices, schedule.unsliced_microbatches
    )
    peak, idle = memory(max(evaluated.peak)), percent(evaluated.timeline.mean_idle)
    return [
        str(baseline),
        str(evaluated.schedule.num_chunks),
        peak,
        time(value),
        idle,
        why + (f"; {NOT_STOCK}" if is_rejected else ""),
    ]


def _recommended(result: PlanResult) -> str:
    """Format the recommendation as one sentence."""
    baseline, chunks = result.baseline, result.schedule.num_chunks
    if baseline is not None and result.is_megatrons:
        stages = f" with {chunks} virtual stages per rank" if chunks > 1 else ""
        name = f"stock Megatron's {baseline.name}{stages}"
        return f"recommended: {name}; no plan within the limit is faster"
    if baseline is not None:
        return f"recommended: {baseline}, as published; no plan within the limit is faster"
    unit = "chunk" if chunks == 1 else "chunks"
    return f"recommended: the plan, with {chunks} {unit} per rank"
