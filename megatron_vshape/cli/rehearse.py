"""megatron-vshape rehearse: memory and step time of a training command, without a GPU."""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_vshape.cli.dry_run import (
    add_cluster_argument,
    add_gpus_argument,
    add_headroom_argument,
    add_program_arguments,
    command_with_model,
    dry_run_config,
    fetch_missing,
    gpu_name,
    headroom_bytes_of,
    of_cluster,
    with_batch,
)
from megatron_vshape.cli.files import (
    FIGURE_SUFFIXES,
    Output,
    check_can_draw,
    check_installed,
    check_target,
    report_written,
    write_all,
)
from megatron_vshape.cli.help import MODEL, OUTPUT, SEARCH, group
from megatron_vshape.cli.progress import report_progress
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal import report
from megatron_vshape.rehearsal.accuracy import RELEASES
from megatron_vshape.rehearsal.command import (
    SCHEDULE,
    Command,
    Sizes,
    launched_gpus,
    parse_ranks,
    sizes_of,
)
from megatron_vshape.rehearsal.configuration_costs import counting_schedule
from megatron_vshape.rehearsal.costs_from_reports import counted_costs, with_measured
from megatron_vshape.rehearsal.gpus import GPUS, Gpu
from megatron_vshape.rehearsal.measurement import format_passes, measure_ranks
from megatron_vshape.rehearsal.rank_job import RankJob
from megatron_vshape.rehearsal.rank_report import FailedRank, RankReport, notes_of_ignored
from megatron_vshape.rehearsal.ranks import DryRunConfig, check_all, rehearse_all
from megatron_vshape.rehearsal.remedies import remedy_lines
from megatron_vshape.rehearsal.simulated import StepTime, estimate_step
from megatron_vshape.rehearsal.start_rules import (
    Violation,
    check_model,
    check_required_flags,
    violations_of,
)
from megatron_vshape.view.numbers import source_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "megatron-vshape rehearse [OPTIONS] -- pretrain_gpt.py FLAGS..."
    model = group(parser, MODEL)
    model.add_argument(  # an alias for one release
        "--gpu", type=gpu_name, metavar="NAME", help=argparse.SUPPRESS
    )
    add_gpus_argument(
        parser,
        "or 128 (default: H100, and the number that torchrun or SLURM starts, or the minimum for "
        f"the sizes). Types: {', '.join(sorted(GPUS))}",
    )
    add_cluster_argument(parser)
    add_headroom_argument(parser)
    model.add_argument(
        "--ranks",
        default="all",
        metavar="WHICH",
        help="Pipeline ranks to estimate: all; or first, last and numbers, as in first,3 "
        "(default: all)",
    )
    group(parser, SEARCH).add_argument(
        "--alone",
        action="store_true",
        help="Estimate the command only, without other schedules",
    )
    output = group(parser, OUTPUT)
    output.add_argument(
        "--costs",
        type=Path,
        metavar="FILE.json",
        help="Costs file to write, instead of the estimate: time and memory of every stage of a "
        "V-shaped schedule, for plan, auto and sweep",
    )
    output.add_argument(
        "--measure",
        action="store_true",
        help="Run each rank on the GPU or CPU of this machine, one at a time, and write measured "
        "times of its passes to --costs; communication stays estimated, and memory on a CPU",
    )
    output.add_argument(
        "--check",
        action="store_true",
        help="Run only the start-up checks; exit with 1 if the command does not start",
    )
    output.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        help="Figure of memory over time to write (.svg, .png or .pdf)",
    )
    add_program_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Estimate, print the table and the verdict, write the files, and return 0."""
    if options.fetch and not options.command and options.model is None:  # only the download
        fetch_missing(options, Command("pretrain_gpt.py", ()))
        return 0
    _check_files(options)
    command, sizes = _read_sized_command(options)
    if violations := violations_of(command, sizes):
        return _reject(command, violations, options.check)
    check_required_flags(command)
    fetch_missing(options, command)
    gpu = _gpu(options)
    headroom_bytes = headroom_bytes_of(options.headroom, gpu.memory_bytes)
    stages = parse_ranks(options.ranks, sizes.pipeline)
    config = dry_run_config(options, command, gpu)
    if options.check:
        return _check(command, config, sizes, stages)
    _check_costs_are_known(command)
    if options.costs is not None:
        return _write_costs(command, config, sizes, stages, options)
    runs = {"": command}
    if command.has(SCHEDULE) and not options.alone and sizes.pipeline > 1:
        runs["Megatron's own schedule"] = command.of_megatron()  # the baseline
    jobs = [
        config.job(run_command, sizes, stage, name)
        for name, run_command in runs.items()
        for stage in stages
    ]
    with report_progress(lambda us: f"{us:.0f} us"):
        baselines = _group_by_run(rehearse_all(config.programs, jobs))
        reports = baselines.pop("")
        helps = _routing_lines(command, config, sizes, reports)
        if not options.alone:
            helps += remedy_lines(command, config, sizes, reports, headroom_bytes)
    step = estimate_step(reports, command, gpu, sizes.stage_stride)
    for note in notes_of_ignored(reports):
        print(report.wrap_text(note))
    heading = _heading(command, reports[0], gpu, sizes)
    print(f"{heading}. Estimated, not measured.\nGiB by pipeline rank:")
    _print(reports, baselines, gpu, step)
    verdict = report.format_verdict(reports, gpu, headroom_bytes)
    for line in (verdict, *helps):
        print(report.wrap_text(line))
    texts = {"run": heading, "verdict": verdict, "remedies": helps}
    _write(reports, baselines, command, options, gpu, step, texts)
    return 0


def _routing_lines(
    command: Command, config: DryRunConfig, sizes: Sizes, reports: Sequence[RankReport]
) -> list[str]:
    """Format which routing the peaks assume, and the largest one with 10% more tokens."""
    if not command.has("--num-experts"):
        return []
    if config.imbalance != 1:
        tokens = f"{config.imbalance:g} times the mean number of tokens (--imbalance)"
        return [f"Routing: the experts of each rank get {tokens}."]
    largest = max(reports, key=lambda rank_report: rank_report.memory.peak_bytes)
    uneven = replace(config, imbalance=1.1)
    (result,) = rehearse_all(config.programs, [uneven.job(command, sizes, largest.stage, "")])
    if isinstance(result, FailedRank):
        return ["Balanced routing: the experts of all ranks get equally many tokens."]
    return [
        f"Balanced routing. With --imbalance 1.1 (10% more tokens for the experts of rank "
        f"{largest.stage}), its peak is {report.gib(result.memory.peak_bytes)} GiB instead of "
        f"{report.gib(largest.memory.peak_bytes)} GiB."
    ]


def _gpu(options: argparse.Namespace) -> Gpu:
    """Return the GPU of --gpus, --gpu or --cluster, by default an H100."""
    name = None if options.gpus is None else options.gpus.name
    if name and options.gpu:
        raise ScheduleError(f"--gpu {options.gpu} and --gpus both have a type: remove --gpu")
    if options.cluster is not None:
        return of_cluster(options.cluster).gpu
    return GPUS[name or options.gpu or "h100"]


def _read_sized_command(options: argparse.Namespace) -> tuple[Command, Sizes]:
    """Read the command and its sizes; with a named model, it gets a batch unless it has one."""
    command = command_with_model(options)
    for note in command.notes:
        print(report.wrap_text(note))
    check_model(command)
    gpus, unknown = launched_gpus(command)
    if options.gpus is None and unknown:
        print(report.wrap_text(unknown))
    sizes = sizes_of(command, gpus if options.gpus is None else options.gpus.number)
    if command.model_name:
        command = with_batch(command, sizes.world)
    return command, sizes


def _check_files(options: argparse.Namespace) -> None:
    for flag, path in (("--json", options.json), ("--costs", options.costs)):
        if path is not None:
            check_target(flag, path, (".json",))
    if options.save is not None:
        check_target("--save", options.save, FIGURE_SUFFIXES)
        check_can_draw("--save")
    check_installed("rehearse", "estimate", "torch")
    if options.measure and options.costs is None:
        raise ScheduleError("--measure writes a costs file: add --costs FILE.json")
    if options.imbalance <= 0:
        raise ScheduleError(
            f"--imbalance {options.imbalance} is not above 0: use 1.0 for balanced routing"
        )


def _reject(command: Command, violations: Sequence[Violation], check: bool) -> int:
    """Print the rules that a command violates and return 1; raise them without --check."""
    if not check:
        raise ScheduleError(". ".join(map(str, violations)))
    for violation in violations:
        print(f"does not start with {_schedule_name(command)}: {violation}")
    return 1


def _check(command: Command, config: DryRunConfig, sizes: Sizes, stages: Sequence[int]) -> int:
    """Run the start-up checks of these ranks, print the result, and return the exit status."""
    jobs = [config.job(command, sizes, stage, "", check=True) for stage in stages]
    if 0 in stages:  # rank 0 logs for all
        index = stages.index(0)
        jobs[index] = replace(jobs[index], rank=0)
    schedule = _schedule_name(command)
    results = list(check_all(config.programs, jobs))
    for note in notes_of_ignored(results):
        print(report.wrap_text(note))
    for result in results:
        if isinstance(result, FailedRank):
            print(f"does not start with {schedule}: {result.error}")
            return 1
        for notice in result.notices:
            print(report.wrap_text(notice))
    print(f"starts with {schedule}")
    return 0


def _schedule_name(command: Command) -> str:
    return command.value(SCHEDULE) or "Megatron's own schedule"


def _check_costs_are_known(command: Command) -> None:
    if command.value(SCHEDULE) == "auto" and not command.has("--pipeline-costs"):
        raise ScheduleError(
            "--pipeline-schedule auto measures its costs in a run, and nothing is "
            "measured here: add --pipeline-costs FILE, or name a schedule"
        )


def _group_by_run(results: Iterable[RankReport | FailedRank]) -> dict[str, list[RankReport]]:
    """Group the reports by run, sorted by rank.

    Raises:
        ScheduleError: a rank could not be estimated.
    """
    by_run: dict[str, list[RankReport]] = {}
    for result in results:
        if isinstance(result, FailedRank):
            raise ScheduleError(f"the command could not be rehearsed: {result.error}")
        by_run.setdefault(result.name, []).append(result)
    for reports in by_run.values():
        reports.sort(key=lambda rank_report: rank_report.stage)
    if "" not in by_run:
        raise ScheduleError(
            "the estimate ended without a result: try --jobs 1, which needs less memory"
        )
    return by_run


def _heading(command: Command, first: RankReport, gpu: Gpu, sizes: Sizes) -> str:
    """Format the schedule, the parallel sizes and the GPUs of the estimated run."""
    shape = first.sizes
    return (
        f"{_schedule_name(command)}, TP {shape.tp} x "
        f"PP {shape.pp} x CP {sizes.context} x DP {shape.dp}: {sizes.world} "
        f"{gpu.name.upper()} with {report.gib(gpu.memory_bytes)} GiB, "
        f"{first.step.microbatches_text}"
    )


def _print(
    reports: Sequence[RankReport],
    baselines: Mapping[str, Sequence[RankReport]],
    gpu: Gpu,
    step: StepTime,
) -> None:
    print("\n".join(report.table(reports, gpu)))
    for rank_report in reports:
        print(report.wrap_text(report.format_peak(rank_report)))
        graphs = rank_report.memory.graph_bytes
        if graphs is not None:
            print(report.wrap_text(report.format_graphs(rank_report, graphs)))
    for name, baseline in baselines.items():
        peaks = ", ".join(report.gib(rank_report.memory.peak_bytes) for rank_report in baseline)
        stages = "" if len(baseline) == len(reports) else " on " + _stages(baseline)
        print(f"{name}: peak {peaks} GiB{stages}")
    programs = reports[0].provenance
    print(
        report.wrap_text(
            f"step time {step.seconds:.2f} s: {step.how}. Megatron {programs.megatron}, "
            f"Transformer Engine {programs.transformer_engine or 'none'}; rates of {RELEASES}"
        )
    )


def _stages(reports: Sequence[RankReport]) -> str:
    return "rank " + ", ".join(str(rank_report.stage) for rank_report in reports)


def _write(
    reports: Sequence[RankReport],
    baselines: Mapping[str, Sequence[RankReport]],
    command: Command,
    options: argparse.Namespace,
    gpu: Gpu,
    step: StepTime,
    texts: Mapping[str, Any],
) -> None:
    fused = command.value("--attention-backend") not in ("unfused", "local")
    programs = reports[0].provenance
    versions = {"megatron": programs.megatron, "transformer_engine": programs.transformer_engine}
    content = {
        "ranks": [
            {**_rank(rank_report), "spare_bytes": report.spare_bytes(rank_report, gpu)}
            for rank_report in reports
        ],
        "step_s": step.seconds,
        "step_estimate": step.how,
        **texts,
        "assumed": report.assumptions(gpu, options.imbalance, fused, versions),
        "beside": {
            name: [_rank(rank_report) for rank_report in baseline]
            for name, baseline in baselines.items()
        },
    }
    outputs = []
    if options.json is not None:
        text = json.dumps(content, indent=1) + "\n"
        outputs.append(Output("--json", options.json, lambda path: path.write_text(text)))
    if options.save is not None:
        from megatron_vshape.view.figure import save
        from megatron_vshape.view.rank_memory import memory_figure

        curves = {f"rank {rank_report.stage}": rank_report.memory.curve for rank_report in reports}
        figure = memory_figure(curves, gpu.memory_bytes)
        outputs.append(Output("--save", options.save, partial(save, figure)))
    write_all(outputs)
    report_written(outputs)


def _write_costs(
    command: Command,
    config: DryRunConfig,
    sizes: Sizes,
    stages: Sequence[int],
    options: argparse.Namespace,
) -> int:
    """Count the stages of a V with split and full backward, and write their costs."""
    if sizes.pipeline < 2:
        raise ScheduleError(
            "--costs needs a pipeline, and the command has one rank: set "
            "--pipeline-model-parallel-size to 2 or more"
        )
    plain = command.of_megatron().without_chunks()
    with counting_schedule(sizes.pipeline) as with_counting:
        jobs = [config.job(with_counting(plain, sizes), sizes, stage, "") for stage in stages]
        with report_progress(lambda us: f"{us:.0f} us"):
            reports = _group_by_run(rehearse_all(config.programs, jobs))[""]
        if options.measure:
            # Only the first tensor-parallel rank reads data: the others would receive it.
            jobs = [replace(job, rank=job.rank - job.rank % sizes.tensor) for job in jobs]
            reports = _measured(reports, jobs, config)
    costs = counted_costs(reports, config.gpu, sizes.pipeline, sizes.stage_stride)
    write_all([Output("--costs", options.costs, lambda path: path.write_text(costs.to_json()))])
    print("\n".join(source_lines(costs)))
    print(
        f"wrote {options.costs}: {costs.num_stages} stages, for plan --costs and schedule --costs"
    )
    return 0


def _measured(
    reports: Sequence[RankReport], jobs: Sequence[RankJob], config: DryRunConfig
) -> list[RankReport]:
    """Run the ranks for real and replace their estimated times; equal ranks run once.

    Raises:
        ScheduleError: a rank did not run.
    """
    groups: dict[str, list[RankReport]] = {}
    for rank_report in reports:
        work = json.dumps([[kind.kind, kind.work.plain()] for kind in rank_report.step.kinds])
        groups.setdefault(work, []).append(rank_report)
    job_of = {job.stage: job for job in jobs}
    todo = [job_of[ranks[0].stage] for ranks in groups.values()]
    measured_reports: list[RankReport] = []
    results = measure_ranks(todo, config.programs.megatron)
    for ranks, result in zip(groups.values(), results, strict=True):
        ranks_text = _stages(ranks)
        if "error" in result:
            raise ScheduleError(f"{ranks_text} could not be measured: {result['error']}")
        print(f"{ranks_text} on {result['device']}: {format_passes(result)}", flush=True)
        measured_reports += [with_measured(rank_report, result) for rank_report in ranks]
    return sorted(measured_reports, key=lambda rank_report: rank_report.stage)


def _rank(rank_report: RankReport) -> dict[str, Any]:
    plain = rank_report.to_json()
    fields = {key: value for key, value in plain.items() if key not in ("rank", "stage", "name")}
    return {"rank": rank_report.stage, "global_rank": rank_report.rank, **fields}
