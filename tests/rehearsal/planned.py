"""Comparison of activation memory with the plan, and a plan with offloaded activations."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_vshape import Costs, Schedule, peak_held
from megatron_vshape.core.model.kinds import OFFLOAD
from megatron_vshape.core.model.passes import Pass

_OF_A_STAGE = {"held_after_forward_bytes": ("F",), "held_after_backward_bytes": ("F", "B")}


def off_the_plan(schedule: Schedule, ranks: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Compute the relative difference of every rank's peak between passes from the planned peak.

    The plan uses the bytes that passes have allocated: in F and B of a stage, in L (negative) and
    in S (logits). It has no P2P messages. `ranks` can be some of the ranks.
    """
    names = (*_OF_A_STAGE, "offloaded_bytes", "logits_bytes")
    amounts = {name: [1.0] * schedule.num_stages for name in names}
    for rank in ranks:
        adds = {(report["kind"], report["chunk"]): report["adds_bytes"] for report in rank["kinds"]}
        local_stages = [
            stage for stage, device in enumerate(schedule.placement) if device == rank["rank"]
        ]
        for chunk, stage in enumerate(local_stages):
            for name, kinds in _OF_A_STAGE.items():
                amounts[name][stage] = sum(adds.get((kind, chunk), 0.0) for kind in kinds)
            amounts["offloaded_bytes"][stage] = -adds.get(("L", chunk), 0.0)
            assert adds.get(("L", chunk), -1.0) < 0, f"stage {stage} offloads no memory"
            amounts["logits_bytes"][stage] = sum(
                adds.get(("S", index), 0.0) for index in range(len(local_stages))
            )
    unused = {
        name
        for name, kind in (("offloaded_bytes", "L"), ("logits_bytes", "S"))
        if not any(work.kind == kind for row in schedule.order for work in row)
    }
    ones = (1.0,) * schedule.num_stages
    used_amounts = {name: tuple(values) for name, values in amounts.items() if name not in unused}
    planned = peak_held(
        schedule, Costs.of(ones, ones, ones, 0.0, ones, ones).having(**used_amounts)
    )
    return {
        rank["rank"]: rank["held_between_passes_bytes"] / planned[rank["rank"]] - 1
        for rank in ranks
    }


def with_copies(schedule: Schedule) -> Schedule:
    """Add offloading to a V schedule: every second microbatch of the first stage of every rank."""
    rows = [_copied(row, stage) for stage, row in enumerate(schedule.order)]
    return replace(schedule, name=f"{schedule.name} with copies", order=tuple(rows))


def _copied(row: tuple[Pass, ...], stage: int) -> tuple[Pass, ...]:
    """Start offloading directly after F, end it one pass later, and reload directly before B."""
    out: list[Pass] = []
    pending: list[Pass] = []
    for work in row:
        copies = [Pass(kind, work.stage, work.microbatch) for kind in OFFLOAD]
        away = work.stage == stage and work.microbatch % 2 == 0
        if away and work.kind == "B":
            out += copies[2:]
        out.append(work)
        out += pending
        pending = []
        if away and work.kind == "F":
            out.append(copies[0])
            pending = [copies[1]]
    return tuple(out)
