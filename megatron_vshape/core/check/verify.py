"""Verify a schedule before it runs: complete, correctly placed, within memory, deadlock-free."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import lt

from megatron_vshape.core.check.bounds import each_limit
from megatron_vshape.core.check.simulate import held_curve, simulate, unit_costs
from megatron_vshape.core.model.costs import Costs, held_text
from megatron_vshape.core.model.kinds import (
    ALL_OR_NONE,
    DEVICE,
    EVERY,
    FIRST,
    KINDS,
    LAST,
    PAIR_SIGN,
    PARTS,
    Kind,
    Read,
    ScheduleError,
    find_kind,
)
from megatron_vshape.core.model.passes import Pass, can_overlap
from megatron_vshape.core.model.placement import check_placement
from megatron_vshape.core.model.schedule import Schedule

ROWS, COLUMNS = 2, 3
"""Devices above and below the invalid pass in a picture, and passes before and after it."""

_ROUNDING = 1e-9
"""Relative tolerance of memory limits, for rounded sums of fractions."""


def verify(
    schedule: Schedule,
    max_held: float | Sequence[float] | None = None,
    costs: Costs | None = None,
) -> None:
    """Check that every pass runs once, on the right device and without deadlock.

    With `max_held` (one value or one per device), also check the peak memory per device: in chunks,
    or in the unit of the memory of `costs`.

    >>> from megatron_vshape import make, verify
    >>> verify(make("1f1b", 4, 8), max_held=6)
    Traceback (most recent call last):
    megatron_vshape.core.model.kinds.ScheduleError: device 0 holds 8 at its peak, more than the ...

    Raises:
        ScheduleError: what is wrong and a picture of where; for a deadlock the cycle of waits.
    """
    schedule.check_counts()
    check_placement(schedule.placement, schedule.num_devices)
    # The order matters: each check assumes the earlier ones, and the simulation needs every pass.
    _check_places(schedule)
    _check_counts(schedule)
    _check_overlapped(schedule)
    simulate(schedule)  # raises if it deadlocks
    _check_rows(schedule)
    if max_held is not None:
        limits = each_limit(max_held, schedule.num_devices)
        _check_memory(schedule, limits, unit_costs(schedule) if costs is None else costs)


def _check_places(schedule: Schedule) -> None:
    """Raise ScheduleError for a pass that does not exist or is on the wrong device."""
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    only = {FIRST: 0, LAST: stages - 1}
    for device, passes in enumerate(schedule.order):
        # A row has few kinds and stages, so that a valid one is seen without a look at each pass.
        numbers = {microbatch for _, _, microbatch in passes}
        if numbers.issubset(range(microbatches)) and all(
            0 <= stage < stages
            and stage == only.get(kind.of, stage)
            and schedule.placement[stage] == device
            for kind, stage in {work[:2] for work in passes}
        ):
            continue
        for at, (kind, stage, microbatch) in enumerate(passes):
            if not 0 <= stage < stages:
                wrong = f"the last stage is {stages - 1}"
            elif not 0 <= microbatch < microbatches:
                wrong = f"the last microbatch is {microbatches - 1}"
            elif stage != only.get(kind.of, stage):
                wrong = f"only the {kind.of} stage has a {kind}"
            elif schedule.placement[stage] != device:
                wrong = f"its stage is on device {schedule.placement[stage]}"
            else:
                continue
            raise ScheduleError(
                f"{passes[at]} is on device {device}, but {wrong}\n" + excerpt(schedule, device, at)
            )


def _check_overlapped(schedule: Schedule) -> None:
    """Raise ScheduleError for an F&B pair that is not an F and a B or BW of another microbatch."""
    for device, row in enumerate(schedule.order if schedule.overlapped else ()):
        for at, work in enumerate(row):
            step = row[at : at + 2]
            if work in schedule.overlapped and not can_overlap(step):
                raise ScheduleError(
                    f"{PAIR_SIGN.join(map(str, step))} on device {device} is not an overlapped "
                    "pair: an F must be followed by a B or BW of another microbatch\n"
                    + excerpt(schedule, device, at)
                )
    rest = schedule.overlapped.difference(*schedule.order)
    if rest:
        raise ScheduleError(f"{min(rest)} is marked as overlapped, but no device runs it")


def _check_counts(schedule: Schedule) -> None:
    """Raise ScheduleError unless every stage and microbatch has each required pass once."""
    # Fast path: nearly all schedules have only F, B, W and BW.
    if _has_all_once(schedule):
        return
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    count = Counter(
        Pass(kind, work.stage, work.microbatch)
        for passes in schedule.order
        for work in passes
        for kind in work.parts()
    )
    wrong = [
        work
        for microbatch in range(microbatches)
        for stage in range(stages)
        for kind in PARTS
        if count[work := Pass(kind, stage, microbatch)] != 1
    ]
    # Optional passes have no fixed count, but none may run twice.
    wrong += [work for work, times in count.items() if times > 1 and not work.kind.everywhere]
    # An optional pass may be missing, unless another pass reads it.
    if not wrong:
        _check_reads(schedule, count)
        _check_shared(schedule)
        return
    culprit = wrong[0]
    device, at = _place_of(schedule, culprit)
    others = {work[1:] for work in wrong} - {culprit[1:]}
    more = f" (and {len(others)} more are wrong)" if others else ""
    raise ScheduleError(
        f"{_times_told(schedule, culprit)} on device {device}; every pass must run once{more}\n"
        + excerpt(schedule, device, at)
    )


def _has_all_once(schedule: Schedule) -> bool:
    """Return whether every F, B and W exists once, separately or in a BW, without other passes."""
    # One byte per stage and microbatch instead of Pass objects, for schedules of 10^6 passes.
    bits = {kind: sum(1 << PARTS.index(part) for part in kind.does) for kind in (*PARTS, Kind.BW)}
    if not schedule.kinds.issubset(bits):
        return False
    microbatches = schedule.num_microbatches
    seen = bytearray(schedule.num_stages * microbatches)
    for passes in schedule.order:
        for kind, stage, microbatch in passes:
            at, bit = stage * microbatches + microbatch, bits[kind]
            if seen[at] & bit:
                return False
            seen[at] |= bit
    # All bits of a byte are set, none twice: every part once.
    return seen.count((1 << len(PARTS)) - 1) == len(seen)


def _times_told(schedule: Schedule, culprit: Pass) -> str:
    """Format how often a pass runs, with the names in the schedule: a BW runs B and W."""
    row = schedule.order[schedule.placement[culprit.stage]]
    same = (work for work in row if work[1:] == culprit[1:])
    found = [str(work) for work in same if culprit.kind in work.parts()]
    if not found:
        return f"{culprit} runs never"
    if len(set(found)) == 1:
        return f"{found[0]} runs {len(found)} times"
    return f"{culprit} runs {len(found)} times, as {' and '.join(dict.fromkeys(found))},"


def _check_reads(schedule: Schedule, count: Counter[Pass]) -> None:
    """Raise ScheduleError if a pass reads an optional pass that its microbatch omits."""
    for device, passes in enumerate(schedule.order):
        for at, work in enumerate(passes):
            for need in work.needs(schedule.num_stages):
                if not count[need] and not _is_of_another(need, work):
                    raise ScheduleError(
                        f"{work} on device {device} reads {need}, which no device runs\n"
                        + excerpt(schedule, device, at)
                    )
            # `_check_shared` checks kinds that each device has once.
            group = () if work.kind.of else _group_of(work.kind)
            lacks = [kind for kind in group if not count[work._replace(kind=kind)]]
            if lacks:
                raise ScheduleError(
                    f"{work} on device {device} has no {work._replace(kind=lacks[0])}: of "
                    f"{', '.join(group)} a microbatch of a stage has all or none\n"
                    + excerpt(schedule, device, at)
                )


def _group_of(kind: Kind) -> tuple[Kind, ...]:
    """Return the kinds that a microbatch must have together with this kind."""
    return next((group for group in ALL_OR_NONE if kind in group), ())


def _is_of_another(need: Pass, work: Pass) -> bool:
    """Return whether `need` may be missing, because its device has the pass for another stage."""
    return need.kind.of == DEVICE and any(
        read.at == EVERY for read in work.kind.reads if read.kind == need.kind
    )


def _check_shared(schedule: Schedule) -> None:
    """Raise ScheduleError unless every pass that is not of a stage exists once per device."""
    shared = [kind for kind in KINDS if kind in schedule.kinds and kind.of]
    count = Counter(
        (work.kind, device, work.microbatch)
        for device, passes in enumerate(schedule.order)
        for work in passes
        if work.kind.of
    )
    devices = range(schedule.num_devices)
    ends = {FIRST: schedule.placement[:1], LAST: schedule.placement[-1:]}
    for kind in shared:
        # If devices compute parts, the pass that sums the parts must exist too.
        sums = [each for each in KINDS if Read(kind, at=EVERY) in each.reads]
        for each in dict.fromkeys((*sums, kind, *_group_of(kind))):
            for device in ends.get(each.of, devices):
                for microbatch in range(schedule.num_microbatches):
                    times = count[each, device, microbatch]
                    if times != 1:
                        raise ScheduleError(
                            f"{each} of microbatch {microbatch} runs {times or 'no'} times on "
                            f"device {device}; a schedule with {kind} needs it once there"
                        )


def _check_rows(schedule: Schedule) -> None:
    """Raise ScheduleError unless every pass comes after the passes that it reads on its device.

    This applies to all microbatches and resources: a device starts a copy, or enters a collective,
    at the position of the pass in its order.
    """
    microbatches = range(schedule.num_microbatches)
    plain = len(microbatches) == schedule.whole_microbatches
    plain = plain and not any(kind.of for kind in schedule.kinds)
    for device, row in enumerate(schedule.order):
        places = _places(row, len(microbatches))
        if plain and all(_stands_behind(schedule, each, places, len(row)) for each in places):
            continue  # fast path: several times faster, and covers nearly all rows
        # Slow path: a microbatch has several passes of a kind, or passes that are not of a stage;
        # or there is an error, whose first pass is to be found.
        laws = {
            each: [
                (places[need], later, descends, need[0] in each[0].does)
                for need, later, descends in _laws(schedule, *each)
                if need in places
            ]
            for each in {(kind, stage) for kind, stage, _ in row}
        }
        for at, (kind, stage, microbatch) in enumerate(row):
            for there, later, descends, is_turn in laws[kind, stage]:
                other = schedule.in_turn(microbatch, later, descends)
                if other in microbatches and there[other] > at:
                    why = schedule.turns_text(kind) if is_turn else f"{kind} needs its result"
                    raise ScheduleError(
                        f"{row[at]} runs before {row[there[other]]} on device {device}, and must "
                        f"run behind it: {why}\n" + excerpt(schedule, device, at)
                    )


def _places(row: Sequence[Pass], num_microbatches: int) -> dict[tuple[Kind, int], list[int]]:
    """Return the index of each part of each microbatch in a row; -1 if missing."""
    places: dict[tuple[Kind, int], list[int]] = {}
    parts: dict[tuple[Kind, int], list[list[int]]] = {}
    for at, (kind, stage, microbatch) in enumerate(row):
        own = parts.get((kind, stage))
        if own is None:
            keys = [_part_of(part, stage) for part in kind.does]
            own = [places.setdefault(key, [-1] * num_microbatches) for key in keys]
            parts[kind, stage] = own
        for each in own:
            each[microbatch] = at
    return places


def _stands_behind(
    schedule: Schedule,
    part: tuple[Kind, int],
    places: Mapping[tuple[Kind, int], Sequence[int]],
    end: int,
) -> bool:
    """Return whether this part of all microbatches (one pass each) comes after its inputs."""
    own = places[part]
    if min(own) < 0:  # a missing pass counts as last
        own = [end if at < 0 else at for at in own]
    for need, later, _ in _laws(schedule, *part):
        there = places.get(need)
        if there is None:
            continue
        # Microbatch m against m + later. `map` stops at the shorter list, because a microbatch
        # outside the step constrains nothing.
        pairs = (own, there[later:]) if later >= 0 else (own[-later:], there)
        if any(map(lt, *pairs)):
            return False
    return True


def _part_of(kind: Kind, stage: int) -> tuple[Kind, int]:
    """Return the key of a part: kind and stage, or -1 for a kind that each device has once."""
    return kind, -1 if kind.of == DEVICE else stage


def _laws(
    schedule: Schedule, kind: Kind, stage: int
) -> Iterator[tuple[tuple[Kind, int], int, bool]]:
    """Yield the parts before this pass on the same device, with the microbatch offset.

    The offset counts in execution order; the last value is whether that descends (see
    `Schedule.in_turn`). Parts on the same resource are omitted if the simulation enforces them.
    """
    for part in kind.does:
        for read in (*part.reads, *part.follows):
            need = find_kind(read.kind)
            # The simulation proves waits for data and the order within a resource, not between
            # resources.
            if read.later or need.of == DEVICE or need.resource != part.resource:
                for other in read.stages(stage, schedule.num_stages):
                    yield _part_of(need, other), read.later, part.descends
        for need in schedule.kinds:
            if part in need.before:
                yield _part_of(need, stage), 0, False


def _place_of(schedule: Schedule, culprit: Pass) -> tuple[int, int]:
    """Return a pass's device and its last index there, or a substitute index.

    The substitute is the last pass of the same microbatch and stage, or the end of the row.
    """
    device = schedule.placement[culprit.stage]
    passes = schedule.order[device]
    same = [at for at, work in enumerate(passes) if work[1:] == culprit[1:]]
    itself = [at for at in same if culprit.kind in passes[at].parts()]
    return device, (itself or same or [max(len(passes) - 1, 0)])[-1]


def _check_memory(schedule: Schedule, limits: Sequence[float], costs: Costs) -> None:
    for device, limit in enumerate(limits):
        curve = held_curve(schedule, costs, device)
        peak, most = max(curve, default=0.0), limit * (1 + _ROUNDING)
        # Negated, so that nan is rejected.
        if not peak <= most:
            at = next(at for at, held in enumerate(curve) if not held <= most)
            raise ScheduleError(
                f"device {device} holds {held_text(peak)} at its peak, more than the limit of "
                f"{held_text(limit)}; it first exceeds that at {schedule.order[device][at]}\n"
                + excerpt(schedule, device, at)
            )


def excerpt(schedule: Schedule, device: int, at: int) -> str:
    """Format the orders around index `at` of a device, with that pass marked."""
    first, last = max(0, at - COLUMNS), at + COLUMNS + 1
    devices = range(max(0, device - ROWS), min(schedule.num_devices, device + ROWS + 1))
    rows = [[str(work) for work in schedule.order[each][first:last]] for each in devices]
    width = max((len(text) for row in rows for text in row), default=1)
    return "\n".join(_draw_rows(schedule, devices, rows, (device, at, first, width)))


def _draw_rows(
    schedule: Schedule, devices: range, rows: list[list[str]], where: tuple[int, int, int, int]
) -> Iterator[str]:
    device, at, first, width = where
    label = len(str(devices[-1]))
    for each, row in zip(devices, rows, strict=True):
        cells = [
            f"[{text}]".ljust(width + 2)
            if (each, place) == (device, at)
            else f" {text.ljust(width)} "
            for place, text in enumerate(row, first)
        ]
        ahead = "... " if first else ""
        behind = " ..." if first + len(row) < len(schedule.order[each]) else ""
        mark = "   <-- here" if each == device else ""
        yield f"    device {each:>{label}} | {ahead}{''.join(cells).rstrip()}{behind}{mark}"
