"""Times of passes from counted or measured work, and cost files from dry runs.

The dry run of a cost file uses the V placement with two stages per rank. Some microbatches have
split backwards and some full backwards, so every stage runs F, B, W and BW. A rank without a dry
run gets the costs of its nearest neighbor toward the first rank, as the source of the costs
reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.files import COUNTED, MEASURED
from megatron_vshape.core.model.kinds import HELD, TIMES, WORKSPACES, Kind, ScheduleError
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.rehearsal.gpus import Gpu
from megatron_vshape.rehearsal.rank_report import PassReport, RankReport
from megatron_vshape.rehearsal.step_time import send_us, step_time
from megatron_vshape.rehearsal.work import Work, is_once

MICROBATCHES = 3
"""Microbatches of a counted step per kind of backward: bytes are from the middle one, work from
that with the least memory traffic."""


def both_backwards(num_devices: int) -> Schedule:
    """Return a V-shaped schedule: first microbatches with split backwards, then with full ones.

    All W's of the first microbatches come after their other passes. Directly after its B, a W would
    be fused with it.
    """
    split, full = (make(name, num_devices, MICROBATCHES) for name in ("v-zb", "1f1b-v"))
    rows = []
    for first, then in zip(split.order, full.order, strict=True):
        wgrads = sorted((work for work in first if work.kind is Kind.W), key=lambda w: w.microbatch)
        without_wgrads = [work for work in first if work.kind is not Kind.W]
        later = (work._replace(microbatch=work.microbatch + MICROBATCHES) for work in then)
        rows.append((*without_wgrads, *wgrads, *later))
    count, placement = 2 * MICROBATCHES, split.placement
    return Schedule("both backwards", num_devices, count, placement, tuple(rows))


def counted_costs(ranks: Sequence[RankReport], gpu: Gpu, devices: int, gpu_distance: int) -> Costs:
    """Return times (`step_time`) and memory of all stages from dry runs of `both_backwards`.

    `gpu_distance` is the distance between neighboring pipeline ranks in GPUs.

    Raises:
        ScheduleError: A stage lacks a pass.
    """
    # (rank, chunk) of each stage in the V placement.
    stages = [(stage, 0) for stage in range(devices)]
    stages += [(stage, 1) for stage in reversed(range(devices))]
    reports = _reports_of_all_ranks(ranks, devices)
    passes = _passes_by_kind(reports, stages, gpu)
    # One value for all devices: the memory that every rank has, and the largest need of graphs.
    common_bytes, first = min(map(always_bytes, reports)), reports[0]
    # Every stage but the first receives its input, and every one but the last a gradient.
    message = float(first.model.message_bytes)
    received = (0.0,) + (message,) * (len(stages) - 1)
    activation_bytes = tuple(map(_bytes_after_forward, passes[Kind.F], passes[Kind.BW], received))
    min_bytes = max(activation_bytes) * 1e-6
    amounts: dict[str, Any] = {
        "held_after_forward_bytes": tuple(max(size, min_bytes) for size in activation_bytes),
        "held_after_backward_bytes": tuple(max(0.0, -w.adds_bytes) for w in passes[Kind.W]),
        "state_bytes": tuple(
            _state_bytes(reports[rank], chunk)
            + chunk * (always_bytes(reports[rank]) - common_bytes)
            for rank, chunk in stages
        ),
    }
    dummies = tuple(float(reports[rank].model.chunk_dummy_bytes[chunk]) for rank, chunk in stages)
    if any(dummies):
        amounts["dummy_bytes"] = dummies
    amounts |= _times_by_name(passes)
    for kind, stage_reports in passes.items():
        # Before a pass, its message has been received. The model of costs allocates F's activations
        # with the message at its start; only more than that is workspace.
        none = (0.0,) * len(stage_reports)
        messages = {Kind.F: received, Kind.W: none}.get(kind, received[::-1])
        allocated = activation_bytes if kind is Kind.F else none
        amounts[str(kind.workspace)] = tuple(
            max(0.0, float(report.meanwhile_bytes) + message_bytes - allocated_bytes)
            for report, message_bytes, allocated_bytes in zip(
                stage_reports, messages, allocated, strict=True
            )
        )
    costs = Costs.of(
        **amounts,
        send_us=send_us(float(first.model.message_bytes), gpu, gpu_distance),
        layers=tuple(reports[rank].model.chunk_layers[chunk] for rank, chunk in stages),
        device_bytes=common_bytes + max(map(_unshared_graph_bytes, reports)),
    )
    text = f"{COUNTED} by a rehearsal, priced by kernel efficiencies on {gpu.name.upper()}"
    missing = devices - len(ranks)
    if missing:
        text += f"; {missing} of {devices} ranks like their neighbours"
    return _with_measured_source(costs, ranks).with_source(text)


def with_measured(rank: RankReport, measured: Mapping[str, Any]) -> RankReport:
    """Replace the estimated pass times of a rank by measured ones; on a GPU also the memory.

    `measured` is a result of `measurement.measure_ranks`.
    """
    names = ["ms", *(("adds_bytes", "meanwhile_bytes") if measured["on_gpu"] else ())]
    measured_values = {
        (measurement["kind"], measurement["chunk"]): {name: measurement[name] for name in names}
        for measurement in measured["kinds"]
    }
    kinds = [
        replace(report, **measured_values.get((report.kind, report.chunk), {}))
        for report in rank.step.kinds
    ]
    where = f"{measured['device']}, one rank at a time, without communication"
    return replace(
        rank,
        step=replace(rank.step, kinds=kinds),
        provenance=replace(rank.provenance, measured=where, memory_measured=measured["on_gpu"]),
    )


def _with_measured_source(costs: Costs, ranks: Sequence[RankReport]) -> Costs:
    if ranks[0].provenance.measured is None:
        return costs
    memory = (*HELD, *WORKSPACES) if ranks[0].provenance.memory_measured else ()
    source = f"{MEASURED} on {ranks[0].provenance.measured}"
    return costs.with_source(source, *TIMES, Kind.BW.time, *memory)


def pass_times(
    reports: Sequence[RankReport], stages: Sequence[tuple[int, int]], devices: int, gpu: Gpu
) -> dict[str, Any]:
    """Return the pass times of every stage by their names in `Costs`.

    Args:
        reports: Results of some ranks. Other ranks are assumed to equal their neighbors.
        stages: Rank and chunk of every stage.
        devices: Number of pipeline ranks.
        gpu: GPU and links.

    Raises:
        ScheduleError: A stage lacks a pass.
    """
    return _times_by_name(_passes_by_kind(_reports_of_all_ranks(reports, devices), stages, gpu))


def _passes_by_kind(
    ranks: Sequence[RankReport], stages: Sequence[tuple[int, int]], gpu: Gpu
) -> dict[Kind, list[PassReport]]:
    return {
        kind: [_pass_report(ranks[rank], kind, chunk, gpu) for rank, chunk in stages]
        for kind in (Kind.F, Kind.B, Kind.W, Kind.BW)
    }


def _times_by_name(passes: Mapping[Kind, Sequence[PassReport]]) -> dict[str, Any]:
    amounts: dict[str, Any] = {}
    for kind, reports in passes.items():
        amounts[str(kind.time)] = tuple(
            max(1.0, 1e6 * (report.seconds - report.waited_seconds)) for report in reports
        )
        if kind.collective and any(report.waited_seconds for report in reports):
            amounts[str(kind.collective)] = tuple(1e6 * report.waited_seconds for report in reports)
    return amounts


def _reports_of_all_ranks(reports: Sequence[RankReport], devices: int) -> list[RankReport]:
    by_rank = {report.stage: report for report in reports}
    return [
        by_rank[max((stage for stage in by_rank if stage <= rank), default=min(by_rank))]
        for rank in range(devices)
    ]


def _pass_report(rank: RankReport, kind: Kind, chunk: int, gpu: Gpu) -> PassReport:
    """Return the results of a pass.

    With full recompute, a backward is not split: BW counts as B, and W is empty. If only B and W
    ran, BW is their sum.
    """
    ran = {report.kind: report for report in rank.step.kinds if report.chunk == chunk}
    if kind in (Kind.B, Kind.W) and kind not in ran and Kind.BW in ran:
        if kind is Kind.W:
            return PassReport(kind, chunk, 0, 0.0, 0.0, 0.0, 0.0, Work())
        kind = Kind.BW
    if kind is Kind.BW and kind not in ran and {Kind.B, Kind.W} <= ran.keys():
        b, w = (_pass_report(rank, part, chunk, gpu) for part in (Kind.B, Kind.W))
        sums = {name: getattr(b, name) + getattr(w, name) for name in _SUMMED}
        return replace(b, kind=kind, **sums)
    if kind not in ran:
        raise ScheduleError(
            f"rank {rank.stage} ran no {kind} of its chunk {chunk}: the dry run needs a V "
            "schedule with split and full backwards"
        )
    result = ran[kind]
    parts = step_time(result.work, gpu, rank.step.scale)
    # The last pass of a step may have started collectives that occur once per step.
    seconds, waited_seconds = parts["step_s"] - parts["data parallel"], parts["exchanges"]
    if result.ms is not None:  # measured: communication ended at once
        seconds = result.ms / 1e3 + waited_seconds
    if kind is Kind.W:
        seconds -= _hidden_s(parts, result.work)
        waited_seconds = 0.0
    return replace(result, seconds=seconds, waited_seconds=waited_seconds)


_SUMMED = ("adds_bytes", "meanwhile_bytes", "seconds", "waited_seconds")


def _hidden_s(parts: Mapping[str, float], work: Work) -> float:
    """Return the seconds of a W's collectives that overlap with its GEMMs.

    W gathers for a GEMM while the previous one runs (`runtime.weight_jobs`). So it waits for the
    first gather, and for time by which gathers exceed the GEMMs.
    """
    exchanges = parts["exchanges"]
    gathers = sum(
        number for (_, group, *_), (number, _) in work.exchanges.items() if not is_once(group)
    )
    # All gathers but the first, as far as there are GEMMs to hide them.
    return min(exchanges * (1 - 1 / max(1, gathers)), parts["products"])


def _bytes_after_forward(forward: PassReport, backward: PassReport, received: float) -> float:
    """Return the bytes of a stage after F.

    F's result includes the output, which is freed once it is sent, but not the received input,
    which stays until the backward. Both have the same size, except in the first stage, which
    receives none: its F allocates more than its backward frees. With full recomputation the input
    of a layer is all that it keeps. In a full backward, the gradient that is received and the one
    that is sent are not included either; a split one frees the received gradient in W.
    """
    # A backward adds a negative amount.
    activation_bytes = max(
        min(float(forward.adds_bytes), received - float(backward.adds_bytes)), received
    )
    return activation_bytes + float(forward.static_bytes or 0)  # of CUDA graphs, until the backward


def _state_bytes(rank: RankReport, chunk: int) -> float:
    """Return the bytes of a stage between steps: its part of the parameters' and its layers'."""
    model, parameters = rank.model, rank.model.chunk_parameters
    part = float(parameters[chunk] / sum(parameters))
    retained = part * rank.memory.replaced_bytes
    inputs = model.chunk_layers[chunk] * model.message_bytes
    # With full recomputation, experts keep the input of their layer and its gradient until the next
    # forward. At the peak of the last layer's backward, the others have freed their checkpoints.
    return part * model_state_bytes(rank) + (retained - inputs if retained > inputs else retained)


def always_bytes(rank: RankReport) -> float:
    """Return the bytes that a rank has at all times, whatever its layers are."""
    memory = rank.memory
    state_bytes = model_state_bytes(rank) + memory.update_bytes
    return float(memory.held_bytes) - state_bytes - memory.replaced_bytes


def _unshared_graph_bytes(rank: RankReport) -> float:
    """Return the bytes that the pool of CUDA graphs needs beyond the peak of all memory.

    The pool and other memory peak at different times and cannot share blocks.
    """
    apart = rank.memory.graph_bytes
    return float(max(0, apart.pool + apart.other - rank.memory.peak_bytes)) if apart else 0.0


def model_state_bytes(rank: RankReport) -> float:
    """Return the bytes of weights, gradients and optimizer during the passes."""
    parts = rank.memory.held_parts
    held_bytes = sum(parts[name] for name in ("weights", "gradients", "optimizer"))
    return float(held_bytes) - rank.memory.update_bytes
