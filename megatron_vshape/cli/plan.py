"""megatron-vshape plan: the adaptive scheduler on the command line."""

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

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
    add_cost_arguments,
    add_size_arguments,
    chunks,
    count,
    float_or_nan,
    format_limit_errors,
    nonnegative_time,
    number_of,
)
from megatron_vshape.cli.plan_figures import run_frontier, write_page
from megatron_vshape.cli.plan_options import (
    CHUNKS,
    MOST_CHUNKS,
    costs_of,
    load_costs,
    memory_limit_of,
    request_of,
)
from megatron_vshape.cli.progress import report_progress
from megatron_vshape.cli.torch_export import (
    add_export_arguments,
    check_export,
    export_output,
    print_settings,
)
from megatron_vshape.core.budget import Budget
from megatron_vshape.core.evaluation import compare_baselines, no_worse_than_published
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import AUTO_SPLIT
from megatron_vshape.core.model.schedule import Objective
from megatron_vshape.core.paper.catalogue import canonical_name
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.planner.vocabulary import ALL_REDUCE_TIME
from megatron_vshape.core.request import SLICES, PlanRequest, PlanResult
from megatron_vshape.core.schedule_names import AUTO, SUFFIXES
from megatron_vshape.view.numbers import UnitFormat
from megatron_vshape.view.plan_report import (
    comparison_table,
    format_best_so_far,
    format_recommendation,
    plan_lines,
)
from megatron_vshape.view.text import columns, picture, wants_colour

_MAX_DRAWN = 256
"""Maximum ranks x microbatches of a plan that is drawn."""

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
    measured = None if options.costs is None else load_costs(options.costs, options.layers)
    is_in_chunks = (options.memory_limit or "").lower().endswith(CHUNKS)
    if measured is not None and (options.frontier is not None or is_in_chunks):
        # Limits in chunks are of activations: costs without static memory are used.
        measured = measured.of_activations()
    costs = costs_of(options, measured)
    request = request_of(options, costs, measured)
    units = UnitFormat.of(costs, options.devices, in_bytes=options.costs is not None)
    if options.frontier is not None:
        return run_frontier(request, options.frontier, options.seconds, units)
    limit = memory_limit_of(options, request, measured is not None)
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
    timeline = result.plan.timeline
    if request.num_devices * result.schedule.num_microbatches <= _MAX_DRAWN:
        print(picture(timeline, columns(), wants_colour(sys.stdout)) + "\n")
    print("\n".join(plan_lines(result, limit, units)))
    print(f"\n{compared}\n")
    print(format_recommendation(result) if searched else format_best_so_far(result))
    report_written(outputs)
    print_settings(options, timeline, result.costs, units.time)
    return 0


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
    baselines = compare_baselines(request, result, budget)
    compared = comparison_table(result, baselines, units, every)
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


def _command_without_outputs(words: Sequence[str]) -> str:
    """Format the given command line without output options, which reproduces the plan."""
    outputs = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_outputs(outputs)
    return shlex.join(outputs.parse_known_args(words)[1])
