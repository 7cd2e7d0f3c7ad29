"""An independent replay of schedules with overlapped passes, by repeated sweeps over the rules."""

from collections import Counter
from itertools import product

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.schedule import Schedule

Key = tuple[str, int, int]
"""Kind, stage and microbatch."""


def peak_of(schedule: Schedule, costs: Costs) -> float:
    """Return the maximum memory of a device: from the start of F to the end of W or BW."""
    activation_bytes, peak = costs.held_after_forward_bytes, 0.0
    for row in schedule.order:
        allocated = 0.0
        for kind, stage, _ in row:
            allocated += activation_bytes[stage] if kind == "F" else 0.0
            peak = max(peak, allocated)
            allocated -= activation_bytes[stage] if "W" in kind else 0.0
    return peak


def is_complete(schedule: Schedule) -> bool:
    """Return whether F, B and W of every stage and microbatch run once, on the stage's device."""
    counts: Counter[Key] = Counter()
    for device, row in enumerate(schedule.order):
        for work in row:
            if not work.stage < schedule.num_stages or schedule.placement[work.stage] != device:
                return False
            parts = "BW" if work.kind == "BW" else [str(work.kind)]
            counts.update((part, work.stage, work.microbatch) for part in parts)
    sizes = range(schedule.num_stages), range(schedule.num_microbatches)
    return counts == Counter(product("FBW", *sizes))


def replay(schedule: Schedule, costs: Costs) -> list[list[tuple[float, float]]]:
    """Return start and end of every pass per device; stops at a deadlock."""
    rows = [
        [(str(work.kind), work.stage, work.microbatch) for work in row] for row in schedule.order
    ]
    overlapped = {(str(work.kind), work.stage, work.microbatch) for work in schedule.overlapped}
    ends: dict[Key, float] = {}
    times: list[list[tuple[float, float]]] = [[] for _ in rows]
    has_progressed = True
    while has_progressed:
        has_progressed = False
        for slots, row in zip(times, rows, strict=True):
            if len(slots) == len(row):
                continue
            step = row[len(slots) : len(slots) + (2 if row[len(slots)] in overlapped else 1)]
            ready = [_ready_time(key, schedule.placement, costs, ends) for key in step]
            if None in ready:
                continue
            start = max([slots[-1][1] if slots else 0.0, *(time or 0.0 for time in ready)])
            end = start + _duration(step, costs)
            slots += [(start, end)] * len(step)
            ends.update({(part, *key[1:]): end for key in step for part in key[0]})
            has_progressed = True
    return times


def _ready_time(
    key: Key, placement: tuple[int, ...], costs: Costs, ends: dict[Key, float]
) -> float | None:
    kind, stage, microbatch = key
    dependencies = []
    if kind == "F" and stage:
        dependencies.append(("F", stage - 1, microbatch))
    if kind[0] == "B":
        dependencies.append(("F", stage, microbatch))
        dependencies += [("B", stage + 1, microbatch)] if stage + 1 < len(placement) else []
    if kind == "W":
        dependencies.append(("B", stage, microbatch))
    if any(dependency not in ends for dependency in dependencies):
        return None
    lags = [
        costs.send_us if placement[dependency[1]] != placement[stage] else 0.0
        for dependency in dependencies
    ]
    return max(
        [0.0, *(ends[dependency] + lag for dependency, lag in zip(dependencies, lags, strict=True))]
    )


def _duration(step: list[Key], costs: Costs) -> float:
    compute_us = {"F": costs.forward_us, "B": costs.backward_us, "W": costs.weight_us}
    collective_us = {
        "F": costs.by_stage.get(Kind.F.collective),
        "B": costs.by_stage.get(Kind.B.collective),
    }
    parts = [(part, stage) for kind, stage, _ in step for part in kind]
    collectives = sum(
        (collective_us.get(part) or compute_us)[s] for part, s in parts if collective_us.get(part)
    )
    duration = (
        sum(compute_us[part][s] for part, s in parts) + collectives + costs.host_us * len(step)
    )
    if len(step) == 1:
        return duration
    return max(duration - collectives, collectives)
