"""megatron-vshape advise: compare a run with the best of stock Megatron and of this package."""

import argparse
import json
from collections.abc import Iterator, Sequence
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
    headroom_bytes_of,
    machine_of,
    with_batch,
)
from megatron_vshape.cli.files import (
    Output,
    check_installed,
    check_targets,
    report_written,
    schedule_output,
    write_all,
)
from megatron_vshape.cli.help import MODEL, OUTPUT, SEARCH, group
from megatron_vshape.cli.progress import report_progress
from megatron_vshape.core.model.kinds import MOVING_NAME, ScheduleError
from megatron_vshape.rehearsal import accuracy, report
from megatron_vshape.rehearsal.flags import Command, flag_changes, sizes_of
from megatron_vshape.rehearsal.gpus import Gpu
from megatron_vshape.rehearsal.megatron_layers import flags_text, is_even
from megatron_vshape.rehearsal.start_rules import check_batch, check_model, check_required_flags
from megatron_vshape.tuning import fsdp
from megatron_vshape.tuning.advice import (
    Advice,
    Rows,
    check_schedule_flags,
)
from megatron_vshape.tuning.configurations import (
    ADAPTIVE,
    FLAGS,
    GIVEN,
    NONE,
    SIZES,
    Configuration,
    Subject,
    SweepError,
    configuration_of_command,
    faults,
    neighbors,
)
from megatron_vshape.tuning.further_options import find_fitting_options
from megatron_vshape.tuning.machine import Machine
from megatron_vshape.tuning.predictor import Counts, Prediction, Predictor, Verdict, step_seconds
from megatron_vshape.tuning.proposals import propose
from megatron_vshape.tuning.row_command import find_start_faults, needs_file, row_command, script_of

MOST_SHAPES = 16
"""Maximum number of configurations next to the command's to estimate."""

KEEP = ("recompute", *SIZES.values())
PLANNED = "planned schedule"

DEFAULT_EXPORT = "plan.json"
"""Schedule file in the flags of a row, without --export."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "megatron-vshape advise --gpus 128xH100 [OPTIONS] -- pretrain_gpt.py FLAGS..."
    add_gpus_argument(parser, "(types: see rehearse); this, --cluster or --grid is required")
    add_cluster_argument(parser)
    add_headroom_argument(parser)
    group(parser, MODEL).add_argument(
        "--training-share",
        type=float,
        default=1.0,
        metavar="X",
        help="Time of training relative to a full step, below 1 with rollouts (default: 1.0)",
    )
    search = group(parser, SEARCH)
    search.add_argument(
        "--grid",
        type=Path,
        metavar="FILE.yaml",
        help="Sweep file whose grid to evaluate (default: configurations next to the command's)",
    )
    add_keep_argument(parser)
    search.add_argument(
        "--seconds",
        type=float,
        default=6.0,
        metavar="S",
        help="Time limit in seconds of the search for schedules (default: 6)",
    )
    group(parser, OUTPUT).add_argument(
        "--export",
        type=Path,
        metavar="FILE.json",
        help="Schedule file of the best configuration to write",
    )
    group(parser, OUTPUT).add_argument(
        "--write",
        type=Path,
        metavar="FILE.sh",
        help="Script to write: the whole command of the recommendation, started by torchrun; a "
        "plan is written next to it",
    )
    add_program_arguments(parser)


def add_keep_argument(parser: argparse.ArgumentParser) -> None:
    """Add --keep."""
    group(parser, SEARCH).add_argument(
        "--keep",
        default="",
        metavar="NAMES",
        help=f"Settings not to change, with commas: {', '.join(KEEP)} (default: none)",
    )


def run(options: argparse.Namespace) -> int:
    """Estimate the configurations, print the comparison and the recommendation, and return 0."""
    _check(options)
    if options.write is not None and options.export is None:
        options.export = options.write.with_suffix(".json")
    advice, rows = compare(options)
    _print(advice, options, rows)
    _write(advice, options, rows)
    return 0


def compare(options: argparse.Namespace) -> tuple[Advice, Rows]:
    """Estimate the configurations, and return the search with the rows that start.

    Raises:
        ScheduleError: the command or an option is not supported; the text contains the fix.
    """
    keep = [name for name in options.keep.split(",") if name]
    for name in keep:
        if name not in KEEP:
            raise ScheduleError(f"--keep {name!r:.40} is not one of {', '.join(KEEP)}")
    command = command_with_model(options)
    if options.grid is None:
        machine_of(options)  # its errors come before the download
    subject = Subject("", command, [command.script, *command.flags], tokens=options.vocabulary)
    for note in command.notes:
        print(report.wrap_text(note))
    check_model(command)
    check_schedule_flags(subject.command)
    fetch_missing(options, subject.command)
    proposals: list[Configuration] = []
    if options.model is not None:
        machine = machine_of(options)
        command = with_batch(subject.command, machine.num_devices)
        if not command.has(FLAGS["pipeline_parallel"]):
            proposals = propose(replace(subject, command=command), machine)
            command = proposals[0].command(subject)
            changes = ", ".join(flag_changes(subject.command, command))
            print(report.wrap_text(f"Proposed flags: {changes}"))
        subject = replace(subject, command=command)
    check_required_flags(subject.command)
    if configuration_of_command(subject, 1).pipeline_parallel < 2:
        raise ScheduleError(
            "the command has no pipeline, and advise compares pipeline schedules: set "
            "--pipeline-model-parallel-size to 2 or more, or estimate its memory with rehearse"
        )
    advice = prepare_advice(options, subject, keep, proposals)
    with report_progress(lambda us: f"{us * 1e-6:.1f} s"):
        rows = advice.rows()
        rows = _rows_that_start(advice, options, rows)
    return advice, rows


def prepare_advice(
    options: argparse.Namespace,
    subject: Subject,
    keep: Sequence[str],
    proposals: Sequence[Configuration],
) -> Advice:
    """Count the configurations to compare, and list those left out with their reasons.

    The configurations are those next to the command's, unless there are proposals.
    """
    machine, grid, left_out, post_validation = _grid(options, subject)
    # The comparison starts with the command as it is, so it must run on these GPUs.
    check_batch(subject.command, sizes_of(subject.command, machine.num_devices))
    gpu, command_config = machine.gpu, configuration_of_command(subject, machine.num_devices)
    candidates = []
    nearby = proposals[1:] or neighbors(command_config, subject, machine.num_devices, keep)
    for config in () if grid else nearby:
        _, why = next(faults(config, subject, machine.num_devices, gpu.node), ("", ""))
        if why:
            left_out.append(f"{sizes_text(config, subject)}: {why}")
        else:
            candidates.append(config)
    left_out += [
        f"{sizes_text(config, subject)}: advise evaluates at most {MOST_SHAPES} other "
        "configurations"
        for config in candidates[MOST_SHAPES:]
    ]
    programs = partial(dry_run_config, options, subject.command, gpu)
    counts = Counts(subject, machine, programs)
    headroom_bytes = headroom_bytes_of(options.headroom, gpu.memory_bytes)
    predictor = Predictor(subject, machine, counts, post_validation, headroom_bytes)
    case = _case_of(subject.command, gpu)
    advice = Advice(
        predictor,
        command_config,
        case,
        options.seconds,
        grid=grid,
        left_out=left_out,
        with_fsdp=options.lora_rank is None,
        command_name="the proposal" if proposals else "today",
    )
    with report_progress(lambda us: f"{us * 1e-6:.1f} s"):
        counts.count([command_config, *grid, *candidates[:MOST_SHAPES]], lambda *_: None)
    try:
        counts(command_config)
    except SweepError as error:
        raise ScheduleError(f"the command could not be estimated: {error}") from None
    for config in candidates[:MOST_SHAPES]:
        try:
            counts(config)
            advice.neighbors.append(config)
        except SweepError as error:
            left_out.append(f"{sizes_text(config, subject)}: {error}")
    return advice


def _rows_that_start(advice: Advice, options: argparse.Namespace, rows: Rows) -> Rows:
    """Start the command of each row, and return the rows without those that do not start."""
    subject, machine = advice.predictor.subject, advice.predictor.machine
    config = dry_run_config(options, subject.command, machine.gpu)
    shown = {key: row for key, row in _shown(advice, rows) if key != "today"}
    faults = find_start_faults(shown, subject, machine.num_devices, config)
    for key, fault in faults.items():
        advice.left_out.append(f"{_title(shown[key], subject)}: does not start: {fault}")
    rejected = [shown[key] for key in faults]
    starting: Rows = {
        key: None if any(row is fault for fault in rejected) else row for key, row in rows.items()
    }
    if starting["best"] is None:
        others = [row for row in map(starting.get, ("stock", "same", "least")) if row is not None]
        starting["best"] = min(others, key=step_seconds, default=None)
    return starting


def _grid(
    options: argparse.Namespace, subject: Subject
) -> tuple[Machine, list[Configuration], list[str], bool]:
    """Return the GPUs, the configurations of --grid, and whether they use post-validation.

    The third value lists the impossible ones with the reasons, one of each kind.

    Raises:
        ScheduleError: --grid has other workloads than the command.
    """
    if options.grid is None:
        return machine_of(options), [], [], False
    check_installed("--grid", "sweep", "pydantic", "yaml")
    from megatron_vshape.tuning.files import load_sweep
    from megatron_vshape.tuning.grid import expand_grid, group_by_kind

    loaded = load_sweep(options.grid, options.command)
    has_machine_options = options.gpus is not None or options.cluster is not None
    machine = machine_of(options) if has_machine_options else Machine.of(loaded.cluster)
    # Step times of other sequence lengths or batches are not comparable with that of the command.
    sequence, batch = workload = configuration_of_command(subject, machine.num_devices).workload
    expanded = expand_grid(loaded, machine)
    grid = [config for config in expanded.possible if config.workload == workload]
    dropped = [
        rejection for rejection in expanded.dropped if rejection.configuration.workload == workload
    ]
    impossible = [
        f"{len(members)} impossible, such as {members[0].configuration}: {members[0].reason}"
        for members in group_by_kind(dropped).values()
    ]
    if not grid:
        raise ScheduleError(
            f"--grid {options.grid} has no configuration for the workload of the command "
            f"({sequence} tokens, batch {batch}): remove workloads from the file, or set "
            "--seq-length and --global-batch-size to one of them"
        )
    return machine, grid, impossible, loaded.sweep.post_validation


def _check(options: argparse.Namespace) -> None:
    if not 0 < options.training_share <= 1:
        raise ScheduleError(
            f"--training-share {options.training_share:g} is not above 0 and at most 1: give the "
            "time of training relative to a full step, such as 0.3"
        )
    if options.grid is not None and options.keep:
        raise ScheduleError(
            f"--keep {options.keep:.60} does not work with --grid, whose file lists the "
            "configurations: remove --keep, or give the file one value for the setting"
        )
    check_installed("advise", "estimate", "torch")
    check_targets(options, {"export": (".json",), "json": (".json",), "write": (".sh",)})


def _case_of(command: Command, gpu: Gpu) -> str:
    """Return the case whose published errors apply to the command."""
    ranks = command.number("--expert-model-parallel-size", 1)
    tensor = command.number("--tensor-model-parallel-size", 1)
    shards = command.number("--expert-tensor-parallel-size", tensor)
    span = (ranks - 1) * shards + 1
    return accuracy.case_of(command.has("--num-experts"), ranks, span, gpu)


def sizes_text(config: Configuration, subject: Subject) -> str:
    """Format the parallel sizes and the recomputation."""
    suffix = "" if config.sequence_parallel else " without SP"
    words = f"TP {config.tensor_parallel}{suffix} PP {config.pipeline_parallel}"
    sizes = {
        "CP": config.context_parallel,
        "EP": config.expert_parallel,
        "microbatch": config.microbatch_size,
    }
    words += "".join(f" {name} {size}" for name, size in sizes.items() if size > 1)
    recompute = _recompute(config, subject)
    return words if recompute == NONE else f"{words}, {recompute} recompute"


def _recompute(config: Configuration, subject: Subject) -> str:
    return subject.recompute if config.recompute == GIVEN else config.recompute


def _name(row: Prediction) -> str:
    """Return the name of the schedule."""
    config, schedule = row.configuration, row.schedule
    if config.schedule != ADAPTIVE:
        return config.schedule
    return PLANNED + f" with {MOVING_NAME}" * bool(schedule and schedule.copies)


def _title(row: Prediction, subject: Subject) -> str:
    """Format schedule and parallel configuration."""
    suffix = "".join(f", {feature}" for feature in row.configuration.features)
    if row.is_stock and not is_even(row.layers):
        suffix = ", uneven layers"
    return f"{_name(row)}{suffix}, {sizes_text(row.configuration, subject)}"


NAMES = {
    "today": "today",
    "stock": "best stock",
    "best": "best with this package",
    "same": "current parallelism",
    "least": "least memory within the error",
    "DON'T": "not recommended",
    "fsdp": "without a pipeline",
}
"""Names of the rows, by the keys of --json."""


def _print(advice: Advice, options: argparse.Namespace, rows: Rows) -> None:
    today, machine = rows["today"], advice.predictor.machine
    assert today is not None
    texts = _rejected(today, advice.predictor.subject.command)
    if _starts(today) and not today.fits:
        texts.append(f"Today: {today.fit}.")
    texts += _verdict(advice, options, rows)
    texts += _full_step(options.training_share, rows)
    texts += [fsdp.format_comparison(rows["fsdp"], rows["best"] or today, advice.case)]
    for text in filter(None, texts):
        print(report.wrap_text(text))
    command = advice.predictor.subject.command
    print(
        f"\n{advice.layers} layers, {command.value('--seq-length') or '?'} tokens, batch "
        f"{command.value('--global-batch-size') or '?'}, {machine.num_devices} "
        f"{machine.gpu.name.upper()}. Estimated, not measured."
    )
    shown = _shown(advice, rows)
    names = NAMES | {"today": advice.command_name}
    print("\n".join(_table(advice, [(names[key], row) for key, row in shown])))
    for key, row in shown:
        if key != "today":
            text = _flags_sentence(advice, options, NAMES[key], row, row is rows["best"])
            print(report.wrap_text(text))
    for text in (
        _largest_rank(today, advice.command_name),
        *accuracy.sentences(advice.case, machine.gpu, machine.num_devices),
        *accuracy.upper_bound(advice.case, command.has("--overlap-moe-expert-parallel-comm")),
        "The cost of splitting the backward is not in these errors; measure it with "
        "megatron-vshape rehearse --measure on one GPU.",
        "rehearse runs all layers, advise one layer per stage: peaks and step times differ by less "
        "than 1%, peaks of virtual stages by up to 2% because Megatron keeps messages of each.",
        *(["Not evaluated: " + "; ".join(advice.left_out)] if advice.left_out else []),
    ):
        print(report.wrap_text(text))


def _shown(advice: Advice, rows: Rows) -> list[tuple[str, Prediction]]:
    """Return the rows without duplicates, each with its key."""
    shown: dict[tuple[str, float], tuple[str, Prediction]] = {}
    for key, row in rows.items():
        if row is not None and not (key == "best" and row.is_stock):
            shown.setdefault((_title(row, advice.predictor.subject), step_seconds(row)), (key, row))
    return list(shown.values())


def _table(advice: Advice, shown: Sequence[tuple[str, Prediction]]) -> list[str]:
    titles = {name: _title(row, advice.predictor.subject) for name, row in shown}
    wide, wider = (max(map(len, texts)) for texts in (titles, titles.values()))
    rows = [f"{'':{wide}}  {'':{wider}}  {'step':>8}  {'MFU':>6}  GiB by pipeline rank"]
    for name, row in shown:
        peaks = " ".join(report.gib(rank.allocated) for rank in row.ranks)
        over = "" if row.fits else f"  {row.fit if _starts(row) else row.verdict}"
        figures = f"{step_seconds(row):6.2f} s  {100 * (row.mfu or 0):5.1f}%"
        rows.append(f"{name:{wide}}  {titles[name]:{wider}}  {figures}  {peaks}{over}")
    return rows


def _recommended(advice: Advice, rows: Rows) -> Prediction | None:
    """Return the recommended row: today's, if the gain of others is within the error.

    Of stock and this package it is stock, if the gain of this package is within the error.
    """
    today, stock, best = rows["today"], rows["stock"], rows["best"]
    assert today is not None
    clearly = 1 - accuracy.threshold(advice.case)
    if best is None or (today.fits and step_seconds(best) >= clearly * step_seconds(today)):
        return today if best is not None else None
    is_better = stock is None or step_seconds(best) <= clearly * step_seconds(stock)
    return best if is_better else stock


def _verdict(advice: Advice, options: argparse.Namespace, rows: Rows) -> list[str]:
    """Return the recommendation, and the comparison with the best of this package."""
    within, predictor = accuracy.threshold(advice.case), advice.predictor
    today, stock, best = rows["today"], rows["stock"], rows["best"]
    recommended = _recommended(advice, rows)
    assert today is not None
    if best is None or recommended is None:
        limit_bytes = predictor.allocatable_bytes(advice.command_config)
        headroom = report.gib(predictor.headroom_bytes)
        outside = report.gib(
            predictor.machine.gpu.memory_bytes - predictor.headroom_bytes - limit_bytes
        )
        return [
            f"Recommendation: none. No evaluated configuration fits {report.gib(limit_bytes)} GiB "
            f"of a GPU: {headroom} GiB are kept free, and CUDA and NCCL need about {outside} GiB.",
            *_further_options(advice, options, today),
        ]
    if recommended is today:
        gain = 1 - step_seconds(best) / step_seconds(today)
        return [
            f"Recommendation: keep the flags of {advice.command_name}. The best configuration is "
            f"{100 * gain:.1f}% faster, within the error of the estimate ({100 * within:.1f}%)."
        ]
    faster = 100 * (1 - step_seconds(recommended) / step_seconds(today))
    is_faster = today.fits and faster > 0
    how = f"{faster:.0f}% faster than {advice.command_name}" if is_faster else "it fits"
    how = how if _starts(today) else "it starts"
    changes = flag_changes(predictor.subject.command, _command(advice, options, recommended))
    text = f"{', '.join(changes)}: {how}"
    gain = 0.0 if stock is None else 100 * (1 - step_seconds(best) / step_seconds(stock))
    if recommended is best and not (best.is_stock and recommended is stock):
        beyond = f", {gain:.0f}% faster than the best stock" if stock is not None else ""
        return [f"Recommendation: {text}{beyond}."]
    texts = [f"Recommendation (no package needed): {text}."]
    if best.is_stock:
        return [*texts, "No schedule of this package is faster."]
    return [
        *texts,
        f"This package: another {gain:.0f}% faster than the best stock ({_name(best)}), within "
        f"the error of the estimate ({100 * within:.1f}%).",
    ]


def _further_options(
    advice: Advice, options: argparse.Namespace, today: Prediction
) -> Iterator[str]:
    """Format the options with which the command fits; they are estimated now."""
    predictor = advice.predictor
    rank = max(range(len(today.ranks)), key=lambda rank: today.ranks[rank].allocated)
    programs = dry_run_config(options, predictor.subject.command, predictor.machine.gpu)
    texts = find_fitting_options(
        predictor.subject, advice.command_config, rank, programs, predictor.headroom_bytes
    )
    for text in texts:
        yield f"It fits with {text}."
    if not texts:
        yield (
            "Neither full recomputation with bf16 optimizer states, with an optimizer on the CPU, "
            "with LoRA adapters, nor with 8 times as many GPUs is enough."
        )


def _starts(row: Prediction) -> bool:
    return row.verdict is not Verdict.REJECTED


def _rejected(today: Prediction, command: Command) -> list[str]:
    """Format why Megatron does not start the command, and the flags of the row today."""
    if _starts(today):
        return []
    ranks = today.configuration.pipeline_parallel
    return [
        f"Megatron does not start this command: {today.reason}. The row today is for the layers "
        f"{flags_text(today.layers, ranks, command)}."
    ]


def _full_step(share: float, rows: Rows) -> list[str]:
    """Format the gain of a step of which training is only a share, as with rollouts."""
    today, best = rows["today"], rows["best"]
    if share == 1 or today is None or best is None or not _starts(today):
        return []
    gains = [
        f"{100 * share * (1 - step_seconds(row) / step_seconds(today)):.1f}% ({name})"
        for key, name in (("stock", "best stock"), ("best", "best with this package"))
        if (row := rows[key]) is not None and (key == "stock" or not row.is_stock)
    ]
    return [
        f"Full step, of which training takes {100 * share:g}% today: {', '.join(gains)} faster, "
        "and the rest unchanged."
    ]


def _command(advice: Advice, options: argparse.Namespace, row: Prediction) -> Command:
    """Return the whole command that runs a row; a plan is read from the file of --export."""
    predictor = advice.predictor
    file = str(options.export or DEFAULT_EXPORT)
    return row_command(row, predictor.subject, file, predictor.post_validation)


def _flags_sentence(
    advice: Advice, options: argparse.Namespace, name: str, row: Prediction, is_best: bool
) -> str:
    """Format the changes of today's command for a row, and how to write its schedule file."""
    today = advice.predictor.subject.command
    words = flag_changes(today, _command(advice, options, row)) or ["the flags of today"]
    text = f"Flags, {name}: {', '.join(words)}."
    if not needs_file(row) or (is_best and options.export):
        return text
    sizes = "" if is_best else f"--keep {','.join(KEEP)} with these sizes and "
    return f"{text} advise {sizes}--export {options.export or DEFAULT_EXPORT} writes the schedule."


def _largest_rank(row: Prediction, name: str) -> str:
    """Format the memory of the command's largest rank by component."""
    rank = max(row.ranks, key=lambda rank: rank.allocated)
    return (
        f"Largest rank of {name}: {row.ranks.index(rank)}, {report.gib(rank.states)} GiB of "
        f"weights, gradients and optimizer, {report.gib(rank.buffers)} GiB of workspaces and "
        f"P2P buffers, {report.gib(rank.activations)} GiB of activations."
    )


def _write(advice: Advice, options: argparse.Namespace, rows: Rows) -> None:
    outputs: list[Output] = []
    best, today = rows["best"], advice.predictor.subject.command
    recommended = _recommended(advice, rows)
    if options.write is not None and recommended is not None:
        machine = advice.predictor.machine
        is_today = recommended is rows["today"]
        command = today if is_today else _command(advice, options, recommended)
        script = script_of(command, machine.num_devices, machine.gpu.node)
        outputs.append(Output("--write", options.write, lambda file: file.write_text(script)))

    def changes(row: Prediction) -> list[str]:
        return flag_changes(today, _command(advice, options, row))

    plan_is_unused = options.write is not None and (
        options.export == options.write.with_suffix(".json")
        and not (recommended is best and best is not None and needs_file(best))
    )
    if options.export and best is not None and best.schedule is not None and not plan_is_unused:
        schedule = replace(best.schedule, name="advised")
        outputs.append(schedule_output("--export", options.export, schedule))
    if options.json is not None:
        content = {
            key: _plain(row, advice.predictor.subject)
            | {"flags": [] if key == "today" else changes(row)}
            for key, row in rows.items()
            if row is not None
        }
        text = json.dumps(content, indent=1) + "\n"
        outputs.append(Output("--json", options.json, lambda file: file.write_text(text)))
    write_all(outputs)
    report_written(outputs)


def _plain(row: Prediction, subject: Subject) -> dict[str, Any]:
    config = row.configuration
    return {
        "schedule": _name(row),
        "shape": {
            "tensor": config.tensor_parallel,
            "pipeline": config.pipeline_parallel,
            "recompute": _recompute(config, subject),
            "context": config.context_parallel,
            "experts": config.expert_parallel,
            "microbatch": config.microbatch_size,
        },
        **config.features_in_json,
        "step_s": row.step_s,
        "mfu": row.mfu,
        "peak_bytes": [rank.allocated for rank in row.ranks],
        "layers": list(row.layers),
        "is_stock": row.is_stock,
        "starts": _starts(row),
    }
