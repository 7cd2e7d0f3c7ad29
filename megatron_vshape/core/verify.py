"""Proofs about a schedule before it runs: complete, rightly placed, within memory, no deadlock."""

from collections import Counter

from megatron_vshape.core.costs import Costs
from megatron_vshape.core.passes import PARTS, Kind, Pass, ScheduleError, need_table
from megatron_vshape.core.placement import check_placement
from megatron_vshape.core.schedule import Schedule
from megatron_vshape.core.simulate import PART_OF, peak_held

LISTED = 5
"""So many culprits are listed; a schedule with more is broken as a whole."""


def verify(schedule: Schedule, max_held: float | None = None, costs: Costs | None = None) -> None:
    """Return if every pass runs once, where its stage is, in an order that can run.

    With `max_held`, no device may hold more: chunks, or bytes where `costs` are in bytes.

    Raises:
        ScheduleError: what is wrong, where, and for a deadlock the cycle of waits.
    """
    check_placement(schedule.placement, schedule.num_devices)
    _check_complete(schedule)
    cycle = find_cycle(schedule)
    if cycle:
        lines = "\n".join("    " + line for line in _explain(schedule, cycle))
        raise ScheduleError("the schedule deadlocks; each pass below waits for the next:\n" + lines)
    if max_held is not None:
        _check_memory(schedule, max_held, costs)


def _check_complete(schedule: Schedule) -> None:
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    count: Counter[tuple[Kind, int, int]] = Counter()
    wrong: list[str] = []
    for device, passes in enumerate(schedule.order):
        for work in passes:
            if work.stage >= stages:
                wrong.append(f"{work} on device {device}: there are only {stages} stages")
            elif work.microbatch >= microbatches:
                wrong.append(
                    f"{work} on device {device}: there are only {microbatches} microbatches"
                )
            elif schedule.placement[work.stage] != device:
                home = schedule.placement[work.stage]
                wrong.append(f"{work} stands on device {device}, its stage is on device {home}")
            for kind in work.parts():
                count[kind, work.stage, work.microbatch] += 1
    if not wrong and (len(count) != 3 * stages * microbatches or max(count.values()) > 1):
        wrong = [
            f"{Pass(kind, stage, microbatch)} runs {count[kind, stage, microbatch]} times "
            f"instead of once on device {schedule.placement[stage]}"
            for microbatch in range(microbatches)
            for stage in range(stages)
            for kind in PARTS
            if count[kind, stage, microbatch] != 1
        ]
    if wrong:
        more = f"; and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
        raise ScheduleError("the schedule is not complete: " + "; ".join(wrong[:LISTED]) + more)


def _check_memory(schedule: Schedule, max_held: float, costs: Costs | None) -> None:
    for device, held in enumerate(peak_held(schedule, costs)):
        if held > max_held * (1 + 1e-9):
            raise ScheduleError(
                f"device {device} holds {held:g} at its peak, more than the limit of {max_held:g}"
            )


def find_cycle(schedule: Schedule) -> list[Pass]:
    """Return passes of which each waits for the next and the last for the first; [] if none."""
    stuck = _run_all(schedule)
    if not stuck:
        return []
    home = {
        Pass(kind, work.stage, work.microbatch): (device, at)
        for device, passes in enumerate(schedule.order)
        for at, work in enumerate(passes)
        for kind in work.parts()
    }
    work = schedule.order[min(stuck)][stuck[min(stuck)]]
    seen: dict[Pass, int] = {}
    path: list[Pass] = []
    while work not in seen:
        seen[work] = len(path)
        path.append(work)
        device, at = home[Pass(work.parts()[0], work.stage, work.microbatch)]
        if at > stuck[device]:
            work = schedule.order[device][stuck[device]]
            continue
        # the first pass of a stuck device waits for a result, which another place makes later
        for need in _needs(work, schedule.num_stages):
            maker, place = home[need]
            if maker in stuck and place >= stuck[maker]:
                work = schedule.order[maker][place]
                break
    return path[seen[work] :]


def _needs(work: Pass, num_stages: int) -> list[Pass]:
    return list(Pass(PARTS[PART_OF[work.kind]], work.stage, work.microbatch).needs(num_stages))


def _run_all(schedule: Schedule) -> dict[int, int]:
    """Return where each device that cannot finish stands: {} when the schedule can run."""
    at = [0] * schedule.num_devices
    done: set[tuple[int, int, int]] = set()
    waiting: dict[tuple[int, int, int], list[int]] = {}
    table = need_table(schedule.num_stages)
    awake = list(range(schedule.num_devices))
    while awake:
        device = awake.pop()
        passes = schedule.order[device]
        while at[device] < len(passes):
            kind, stage, microbatch = passes[at[device]]
            for part, other in table[PART_OF[kind]][stage]:
                need = (part, other, microbatch)
                if need not in done:
                    waiting.setdefault(need, []).append(device)
                    break
            else:
                for part in (1, 2) if kind is Kind.BW else (PART_OF[kind],):
                    done.add((part, stage, microbatch))
                    awake.extend(waiting.pop((part, stage, microbatch), ()))
                at[device] += 1
                continue
            break
    return {d: at[d] for d, passes in enumerate(schedule.order) if at[d] < len(passes)}


def _explain(schedule: Schedule, cycle: list[Pass]) -> list[str]:
    """Return one line per wait of the cycle, with its reason."""
    lines = []
    for work, other in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        reads = any(
            need.kind in other.parts()
            for need in _needs(work, schedule.num_stages)
            if (need.stage, need.microbatch) == (other.stage, other.microbatch)
        )
        here, there = schedule.placement[work.stage], schedule.placement[other.stage]
        reason = "reads its result" if reads else f"device {here} runs it first"
        lines.append(f"{work} on device {here} waits for {other} on device {there}: {reason}")
    return lines
