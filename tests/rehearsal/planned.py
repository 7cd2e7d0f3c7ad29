"""Comparison of activation memory with the plan, and a plan with offloaded activations."""

from collections.abc import Sequence
from typing import Any

from offloaded import with_offloads

from megatron_vshape import Costs, Schedule, peak_held

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
    first_stages = range(schedule.num_devices)
    return with_offloads(schedule, lambda stage, m: stage in first_stages and m % 2 == 0)
