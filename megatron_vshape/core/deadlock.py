"""Why a schedule that is stuck cannot go on: the cycle of its waits, in words."""

import itertools
from collections.abc import Iterator, Mapping

from megatron_vshape.core.instructions import Await, Instruction, Run, Send
from megatron_vshape.core.passes import Pass
from megatron_vshape.core.schedule import Schedule

LISTED = 12
"""So many waits of a cycle are told at most: its first ones and its last one."""

LISTED_DEVICES = 8
"""A deadlock of messages names at most so many devices."""


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


def explain_stuck_messages(stuck: Mapping[int, Instruction]) -> str:
    """Return the message about messages that wait for each other, one line a device."""
    lines = [
        f"    device {device} {_tell_instruction(instruction)}"
        for device, instruction in itertools.islice(stuck.items(), LISTED_DEVICES)
    ]
    if len(stuck) > LISTED_DEVICES:
        lines.append(f"    ... and {len(stuck) - LISTED_DEVICES} more devices")
    return "the messages deadlock, however far ahead receives are posted:\n" + "\n".join(lines)


def _tell_instruction(instruction: Instruction) -> str:
    if isinstance(instruction, Run):
        return f"waits for all of its messages in {instruction.work}"
    message = instruction.message
    if isinstance(instruction, Send):
        return f"sends {message.work} to device {message.target}, which has not posted its receive"
    if isinstance(instruction, Await):
        return f"waits for {message.work} from device {message.source}"
    return f"stands at {instruction}"
