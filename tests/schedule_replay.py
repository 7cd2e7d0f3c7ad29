"""An independent replay of schedules, by repeated sweeps over the dependency rules.

A device's processor runs F, B, W, BW and the markers L and R in the order of its row; L and R have
no duration. D (to the host) runs on the device's outgoing link, H (back) on its incoming link, both
in the order of the row. F reads the F of the stage before; B reads its F, the B of the stage after
and its H (if it has one); W reads its B, D its F, L its D, R its L, H its R. Results of other
devices arrive after the time of a message. A stage retains `held_after_forward_bytes` of a
microbatch from the start of F, `held_after_backward_bytes` from the end of B, and nothing after W;
L frees `offloaded_bytes` of it, and R allocates them again.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Schedule

Key = tuple[str, int, int]
"""Kind, stage and microbatch."""

READS = {"F": "", "B": "F", "BW": "F", "W": "B", "D": "F", "L": "D", "R": "L", "H": "R"}
LINKS = {"D": "outgoing", "H": "incoming"}
TIMES = {"F": "forward_us", "B": "backward_us", "W": "weight_us"}
TIMES |= {"D": "copy_out_us", "H": "copy_back_us"}
COLLECTIVES = {"F": "forward_exchange_us", "B": "backward_exchange_us"}
WORKSPACES = {"F": "forward", "B": "backward", "W": "weight", "BW": "backward"}


def offloaded_chunks(schedule: Schedule) -> set[tuple[int, int]]:
    """Return the stage and microbatch of each D."""
    return {work[1:] for row in schedule.order for work in row if work.kind == "D"}


def is_complete(schedule: Schedule) -> bool:
    """Return whether F, B and W of every stage and microbatch run once, on the stage's device.

    An offloaded microbatch has D, L, R and H, too.
    """
    counts: Counter[Key] = Counter()
    for device, row in enumerate(schedule.order):
        for work in row:
            if not work.stage < schedule.num_stages or schedule.placement[work.stage] != device:
                return False
            counts.update((part, *work[1:]) for part in work.kind)
    chunks = set(product(range(schedule.num_stages), range(schedule.num_microbatches)))
    expected = Counter((part, *chunk) for part in "FBW" for chunk in chunks)
    offloaded = offloaded_chunks(schedule) & chunks
    return counts == expected + Counter((part, *chunk) for part in "DLRH" for chunk in offloaded)


def replay(
    schedule: Schedule, costs: Costs, durations: Mapping[Pass, float] | None = None
) -> dict[Pass, tuple[float, float]]:
    """Return start and end of every pass that runs before the end, or before a deadlock.

    Passes with `durations` have these instead of those of the costs.
    """
    amounts, offloaded = costs.lists(), offloaded_chunks(schedule)
    queues: dict[tuple[int, str], deque[tuple[Pass, ...]]] = {}
    for device, row in enumerate(schedule.order):
        for step in _steps(row, schedule):
            queue = LINKS.get(step[0].kind, "processor")
            queues.setdefault((device, queue), deque()).append(step)
    clocks = dict.fromkeys(queues, 0.0)
    ends: dict[Key, float] = {}
    times: dict[Pass, tuple[float, float]] = {}
    has_progressed = True
    while has_progressed:
        has_progressed = False
        for queue, steps in queues.items():
            while steps:
                ready = [_ready_time(work, schedule, costs, ends, offloaded) for work in steps[0]]
                if None in ready:
                    break
                step = steps.popleft()
                start = max([clocks[queue], *(time or 0.0 for time in ready)])
                duration = (durations or {}).get(step[0])
                if duration is None:
                    duration = _duration(step, amounts, costs.host_us)
                clocks[queue] = start + duration
                times |= dict.fromkeys(step, (start, clocks[queue]))
                ends |= {(part, *work[1:]): clocks[queue] for work in step for part in work.kind}
                has_progressed = True
    return times


def _steps(row: Sequence[Pass], schedule: Schedule) -> Iterator[tuple[Pass, ...]]:
    passes = iter(row)
    for work in passes:
        yield (work, next(passes)) if work in schedule.overlapped else (work,)


def _ready_time(
    work: Pass,
    schedule: Schedule,
    costs: Costs,
    ends: Mapping[Key, float],
    offloaded: set[tuple[int, int]],
) -> float | None:
    """Return the time at which the inputs of a pass are available; None if one has not run."""
    kind, stage, microbatch = work
    reads = [(part, stage) for part in READS[kind]]
    if kind == "F" and stage:
        reads.append(("F", stage - 1))
    if kind in ("B", "BW"):
        reads += [("B", stage + 1)] if stage + 1 < schedule.num_stages else []
        reads += [("H", stage)] if (stage, microbatch) in offloaded else []
    ready = 0.0
    for part, other_stage in reads:
        end = ends.get((part, other_stage, microbatch))
        if end is None:
            return None
        if schedule.placement[other_stage] != schedule.placement[stage]:
            end += costs.send_us
            end += costs.more_send_us[min(stage, other_stage)] if costs.more_send_us else 0.0
        ready = max(ready, end)
    return ready


def _duration(step: tuple[Pass, ...], amounts: Mapping[str, Any], host_us: float) -> float:
    parts = [(part, stage) for kind, stage, _ in step for part in kind]
    compute = sum(amounts[TIMES[part]][stage] for part, stage in parts if part in TIMES)
    names = ((COLLECTIVES.get(part), stage) for part, stage in parts)
    collectives = sum(amounts[name][stage] for name, stage in names if name in amounts)
    if len(step) == 1:
        return compute + collectives + host_us
    return max(compute + 2 * host_us, collectives)


def peaks(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Return the maximum memory of each device: states, activations and workspace."""
    amounts, zeros = costs.lists(), (0.0,) * schedule.num_stages

    def amount(name: str, stage: int) -> float:
        return amounts.get(name, zeros)[stage]

    maxima = []
    for device, row in enumerate(schedule.order):
        allocated = maximum = 0.0
        for kind, stage, _ in row:
            forward, backward = (
                amount(f"held_after_{name}_bytes", stage) for name in ("forward", "backward")
            )
            offloaded = amount("offloaded_bytes", stage)
            allocated += {"F": forward, "R": offloaded}.get(kind, 0.0)
            workspace = amount(f"{WORKSPACES.get(kind)}_work_bytes", stage)
            maximum = max(maximum, allocated + workspace)
            changes = {"B": backward - forward, "W": -backward, "BW": -forward, "L": -offloaded}
            allocated += changes.get(kind, 0.0)
            maximum = max(maximum, allocated)
        stages = [stage for stage, owner in enumerate(schedule.placement) if owner == device]
        states = sum(amount("state_bytes", stage) for stage in stages)
        maxima.append(costs.device_bytes + states + maximum)
    return tuple(maxima)
