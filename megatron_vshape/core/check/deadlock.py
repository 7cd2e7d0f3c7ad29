"""Why a schedule that is stuck cannot go on: the cycle of its waits, in words."""

from collections.abc import Iterator, Mapping

from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Schedule

LISTED = 12
"""So many waits of a cycle are told at most: its first ones and its last one."""


def explain_deadlock(schedule: Schedule, stuck: Mapping[int, int]) -> str:
    """Return the message about a schedule of which each device in `stuck` stands at a position.

    One line per wait: who waits for whom, and whether it reads its result or must run after it
    on their device.
    """
    home = {
        Pass(kind, work.stage, work.microbatch): (device, at)
        for device, passes in enumerate(schedule.order)
        for at, work in enumerate(passes)
        for kind in work.parts()
    }
    absent = _find_absent(schedule, stuck, home)
    if absent:
        return "the schedule cannot end: " + absent
    cycle = _find_cycle(schedule, stuck, home)
    lines = [
        _tell(schedule, work, other)
        for work, other in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    ]
    if len(lines) > LISTED:
        lines[LISTED - 1 : -1] = [f"... and {len(lines) - LISTED} more waits, until"]
    head = "the schedule deadlocks; each pass below waits for the next:\n"
    return head + "\n".join("    " + line for line in lines)


def _find_absent(
    schedule: Schedule, stuck: Mapping[int, int], home: Mapping[Pass, tuple[int, int]]
) -> str | None:
    """Return who waits for a pass that no device runs; None where the schedule is complete."""
    for device, at in stuck.items():
        work = schedule.order[device][at]
        for need in work.needs(schedule.num_stages):
            if need not in home:
                return f"{work} on device {device} waits for {need}, which no device runs"
    return None


def _find_cycle(
    schedule: Schedule, stuck: Mapping[int, int], home: Mapping[Pass, tuple[int, int]]
) -> list[Pass]:
    """Return passes of which each waits for the next, and the last for the first."""
    first = min(stuck)
    work = schedule.order[first][stuck[first]]
    seen: dict[Pass, int] = {}
    while work not in seen:
        seen[work] = len(seen)
        device, at = home[Pass(work.parts()[0], work.stage, work.microbatch)]
        if at > stuck[device]:
            work = schedule.order[device][stuck[device]]
        else:  # the first pass of a stuck device waits for a result that comes later
            work = next(_missing(schedule, stuck, home, work))
    return list(seen)[seen[work] :]


def _missing(
    schedule: Schedule,
    stuck: Mapping[int, int],
    home: Mapping[Pass, tuple[int, int]],
    work: Pass,
) -> Iterator[Pass]:
    """Yield the passes that `work` reads from and that have not run."""
    for need in work.needs(schedule.num_stages):
        device, at = home[need]
        if device in stuck and at >= stuck[device]:
            yield schedule.order[device][at]


def _tell(schedule: Schedule, work: Pass, other: Pass) -> str:
    reads = any(
        need.kind in other.parts() and need[1:] == other[1:]
        for need in work.needs(schedule.num_stages)
    )
    device = schedule.placement[work.stage]
    reason = "reads its result" if reads else f"device {device} runs it first"
    return f"{work} on device {device} waits for {other}: {reason}"
