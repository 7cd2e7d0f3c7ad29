"""megatron-vshape schedule: generate a schedule; print, draw, export or compare it."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
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
from megatron_vshape.cli.help import OUTPUT, SCHEDULE, group
from megatron_vshape.cli.options import (
    add_cost_arguments,
    add_size_arguments,
    count,
    ends_of,
    stage_cost_function,
)
from megatron_vshape.cli.progress import report_progress
from megatron_vshape.cli.torch_export import (
    add_export_arguments,
    check_export,
    export_output,
    print_settings,
)
from megatron_vshape.core.budget import Budget
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.evaluation import find_schedule
from megatron_vshape.core.model.amounts import STATE_BYTES
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.schedule import Schedule, Timeline
from megatron_vshape.core.paper.blocks import BuildingBlock
from megatron_vshape.core.paper.catalogue import EVERY_NAME, OPTIONS, canonical_name
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.core.schedule_names import (
    NOT_STOCK,
    PLUS_NAMES,
    SCHEDULE_NAMES,
    SUFFIXES,
    why_not_stock,
)
from megatron_vshape.view.chrome_trace import write_trace
from megatron_vshape.view.names import plain
from megatron_vshape.view.numbers import (
    GIB,
    RunNumbers,
    base_peak,
    comparison_rows,
    fixed,
    idle_lines,
    labelled,
    layer_lines,
    messages_per_microbatch,
    note,
    numbers_of,
    peak_lines,
    percent,
    table,
    time_text,
)
from megatron_vshape.view.text import columns, picture, wants_colour

_TARGETS = {
    "export": SUFFIXES,
    "figure": FIGURE_SUFFIXES,
    "trace": (".json",),
    "html": (".html",),
}


@dataclass(frozen=True, slots=True)
class _Result:
    """A schedule with its times and costs; `measured` is the costs file, if any."""

    block: BuildingBlock | None
    timeline: Timeline
    costs: Costs
    numbers: RunNumbers
    measured: Costs | None

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "megatron-vshape schedule NAME|FILE --devices D --microbatches M [OPTIONS]"
    add_size_arguments(parser)
    add_cost_arguments(parser)
    schedule = group(parser, SCHEDULE)
    schedule.add_argument(
        "name",
        nargs="?",
        type=canonical_name,
        metavar="NAME|FILE",
        help=f"{', '.join(SCHEDULE_NAMES)}; interleaved schedules with C chunks per rank as "
        "interleaved-1f1b:C (default: 2); or a schedule file",
    )
    schedule.add_argument(
        "--compare",
        nargs="+",
        type=canonical_name,
        default=[],
        metavar="NAME",
        help="Further schedules for one table, and with --figure one figure",
    )
    # Of 0.2.0, for one release: now part of the name.
    schedule.add_argument("--chunks", type=count, metavar="C", help=argparse.SUPPRESS)
    schedule.add_argument(
        "--slices",
        type=count,
        metavar="K",
        help="Sequence slices per microbatch (default: 1)",
    )
    output = group(parser, OUTPUT)
    add_export_arguments(output)
    for name, help_text in (
        ("--figure", "Figure to write (.svg, .png or .pdf)"),
        ("--trace", "Perfetto trace to write (.json)"),
        ("--html", "Interactive page to write (.html)"),
    ):
        output.add_argument(name, type=Path, metavar="FILE", help=help_text)


def run(options: argparse.Namespace) -> int:
    """Print the schedules or their comparison, write the files, and return 0."""
    _check(options)
    measured = None if options.costs is None else Costs.load(options.costs)
    names = list(dict.fromkeys([*filter(None, [options.name]), *options.compare]))
    if options.chunks is not None:
        names = [f"{name}:{options.chunks}" if name in OPTIONS else name for name in names]
    time = partial(time_text, in_us=measured is not None)
    with report_progress(time) as progress:
        requests = _requests(names, options, measured)
        results = []
        for request in requests:
            result = plan_request(request, Budget(report=progress.search))
            timeline = simulate(result.schedule, result.costs)
            numbers = numbers_of(timeline, None if measured is None else result.costs)
            results.append(_Result(result.block, timeline, result.costs, numbers, measured))
    outputs = _outputs(options, results)
    write_all(outputs)
    if options.compare:
        print(table(comparison_rows([result.numbers for result in results])))
    else:
        _print(results[0])
    for name in names:
        schedule = results[names.index(name)].schedule
        why = why_not_stock(name, schedule.num_devices, schedule.num_microbatches)
        if why:
            print(f"{plain(name)}: {NOT_STOCK} ({why})")
    report_written(outputs)
    print_settings(options, results[0].timeline, results[0].costs, time)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raise ScheduleError for invalid options before any work."""
    check_targets(options, _TARGETS)
    check_export(options)
    if options.name is None and not options.compare:
        raise ScheduleError(
            f"no schedule given: name one of {', '.join(EVERY_NAME)}, or a schedule file"
        )
    if options.name is None:
        for name in _TARGETS:
            if name != "figure" and getattr(options, name) is not None:
                raise ScheduleError(f"--{name} needs a NAME before --compare, for one schedule")
    if options.figure is not None:
        check_can_draw("--figure")


def _requests(
    names: Sequence[str], options: argparse.Namespace, measured: Costs | None
) -> list[PlanRequest]:
    """Return the plan requests for the schedules of these names.

    A schedule file determines the sizes of all names, and its number of slices.

    Raises:
        ScheduleError: a schedule does not exist, or a size is missing or contradicts the file.
    """
    schedules = {name: find_schedule(name, (*EVERY_NAME, *PLUS_NAMES)) for name in names}
    sizes = {"--devices": options.devices, "--microbatches": options.microbatches}
    for name, schedule in schedules.items():
        if isinstance(schedule, Schedule):
            file_sizes = {
                "--devices": schedule.num_devices,
                "--microbatches": schedule.unsliced_microbatches,
            }
            file_sizes["--slices"] = schedule.slices
            for option, size in (*sizes.items(), ("--slices", options.slices)):
                if size not in (None, file_sizes[option]):
                    raise ScheduleError(f"{name} is for {option} {file_sizes[option]}, not {size}")
            sizes = {option: file_sizes[option] for option in sizes}
    for option, size in sizes.items():
        if size is None:
            raise ScheduleError(f"{names[0]} needs {option}, as in --devices 4 --microbatches 8")
    devices, microbatches = sizes.values()
    costs_of_stages = stage_cost_function(devices, options.cost, measured, ends=ends_of(options))
    return [
        PlanRequest(
            schedule, devices, microbatches, measured, costs_of_stages, slices=options.slices or 1
        )
        for schedule in schedules.values()
    ]


def _outputs(options: argparse.Namespace, results: Sequence[_Result]) -> list[Output]:
    first, outputs = results[0], []
    if options.export is not None:
        outputs.append(export_output(options, first.schedule))
    if options.trace is not None:
        outputs.append(Output("--trace", options.trace, lambda path: _write_trace(path, first)))
    if options.html is not None:
        outputs.append(Output("--html", options.html, lambda path: _write_html(path, first)))
    if options.figure is not None:
        compared = results if options.compare else results[:1]
        outputs.append(Output("--figure", options.figure, lambda path: _draw(path, compared)))
    return outputs


def _write_trace(path: Path, result: _Result) -> None:
    unit = "chunks" if result.measured is None else "bytes"
    with path.open("w", encoding="utf-8") as stream:
        write_trace(result.timeline, stream, result.costs, unit)


def _write_html(path: Path, result: _Result) -> None:
    from megatron_vshape.playground.html import plain_facts, write_html

    peaks = peak_held(result.schedule, result.costs)
    facts = plain_facts(
        result.timeline,
        in_bytes=result.measured is not None,
        base_peak=max(peaks) / result.numbers.relative_peak,
    )
    write_html(path, result.timeline, result.costs, facts)


def _draw(path: Path, results: Sequence[_Result]) -> None:
    from megatron_vshape.view import figure

    first = results[0]
    units = figure.CHUNKS if first.measured is None else figure.MILLISECONDS_AND_GIB
    if len(results) > 1:
        drawn = figure.comparison_figure(
            [result.timeline for result in results],
            [result.schedule.name for result in results],
            [note(result.numbers) for result in results],
            units,
        )
    else:
        base = base_peak(first.schedule.num_devices, first.measured)
        drawn = figure.schedule_figure(
            first.timeline,
            first.costs,
            block=_drawn_block(first),
            note=f"{first.schedule.size_text} · {note(first.numbers)}",
            limit=figure.Limit(base, "peak of 1F1B"),
            units=units,
        )
    figure.save(drawn, path)


def _drawn_block(result: _Result) -> BuildingBlock | None:
    """Return the building block, unless it is the whole schedule (GPipe) or sliced."""
    block, num_microbatches = result.block, result.schedule.num_microbatches
    if block is None or block.slices > 1 or block.num_microbatches == num_microbatches > 1:
        return None
    return block


def _print(result: _Result) -> None:
    """Print the picture and the numbers."""
    colour = wants_colour(sys.stdout)
    unit = ", times in --cost units" if result.measured is None else ""
    print(f"{plain(result.schedule.name)}, {result.schedule.size_text}{unit}\n")
    print(picture(result.timeline, columns(), colour))
    print()
    for label, value in _lines(result):
        print(f"{label:<14}{value}")


def _lines(result: _Result) -> list[tuple[str, str]]:
    """Return the numbers with their names."""
    numbers, timeline = result.numbers, result.timeline
    messages, share = messages_per_microbatch(timeline.schedule)

    time = partial(time_text, in_us=result.measured is not None)
    chunks = (
        f"{fixed(max(numbers.peak_chunks))} chunks of 1/{2 * result.schedule.num_devices} model"
    )
    peaks = [fixed(num_chunks) for num_chunks in numbers.peak_chunks]
    by_device = [" ".join(peaks) if len(set(peaks)) > 1 else f"{peaks[0]} on every rank"]
    peak = [chunks]
    if numbers.peak_bytes is not None:
        peak.insert(0, f"{fixed(max(numbers.peak_bytes) / GIB)} GiB")
    if STATE_BYTES in result.costs.by_stage:
        peak[1:] = ["largest rank, with model states"]
        by_device = peak_lines(result.schedule, result.costs)
    return [
        ("makespan", f"{time(timeline.makespan)}; work of the busiest rank {time(timeline.busy)}"),
        ("bubble", percent(timeline.bubble)),
        *labelled("idle", idle_lines(timeline)),
        ("span bubble", f"{percent(timeline.span_bubble)} (no barrier between steps)"),
        ("peak memory", f"{', '.join(peak)}: {percent(numbers.relative_peak)} of 1F1B"),
        *labelled("per rank", by_device),
        (
            "communication",
            f"{messages} P2P messages per microbatch, {share:.3g}x 1F1B",
        ),
        *labelled("layers", layer_lines(result.costs)),
    ]
