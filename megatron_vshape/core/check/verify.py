"""Verify a schedule before it runs: complete, correctly placed, within memory, deadlock-free."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import lt

from megatron_vshape.core.check.bounds import limits_by_device
from megatron_vshape.core.check.simulate import held_curve, simulate, unit_costs
from megatron_vshape.core.model.costs import Costs, format_memory
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
    _check_positions(schedule)
    _check_counts(schedule)
    _check_overlapped(schedule)
    simulate(schedule)  # raises if it deadlocks
    _check_rows(schedule)
    if max_held is not None:
        limits = limits_by_device(max_held, schedule.num_devices)
        _check_memory(schedule, limits, unit_costs(schedule) if costs is None else costs)


def _check_positions(schedule: Schedule) -> None:
    """Raise ScheduleError for a pass that does not exist or is on the wrong device."""
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    single_stages = {FIRST: 0, LAST: stages - 1}
    for device, passes in enumerate(schedule.order):
        # A row has few kinds and stages, so that a valid one is seen without a look at each pass.
        numbers = {microbatch for _, _, microbatch in passes}
        if numbers.issubset(range(microbatches)) and all(
            0 <= stage < stages
            and stage == single_stages.get(kind.of, stage)
            and schedule.placement[stage] == device
            for kind, stage in {work[:2] for work in passes}
        ):
            continue
        for position, (kind, stage, microbatch) in enumerate(passes):
            if not 0 <= stage < stages:
                reason = f"the last stage is {stages - 1}"
            elif not 0 <= microbatch < microbatches:
                reason = f"the last microbatch is {microbatches - 1}"
            elif stage != single_stages.get(kind.of, stage):
                reason = f"only the {kind.of} stage has a {kind}"
            elif schedule.placement[stage] != device:
                reason = f"its stage is on device {schedule.placement[stage]}"
            else:
                continue
            raise ScheduleError(
                f"{passes[position]} is on device {device}, but {reason}\n"
                + _excerpt(schedule, device, position)
            )


def _check_overlapped(schedule: Schedule) -> None:
    """Raise ScheduleError for an F&B pair that is not an F and a B or BW of another microbatch."""
    for device, row in enumerate(schedule.order if schedule.overlapped else ()):
        for position, work in enumerate(row):
            step = row[position : position + 2]
            if work in schedule.overlapped and not can_overlap(step):
                raise ScheduleError(
                    f"{PAIR_SIGN.join(map(str, step))} on device {device} is not an overlapped "
                    "pair: an F must be followed by a B or BW of another microbatch\n"
                    + _excerpt(schedule, device, position)
                )
    missing_passes = schedule.overlapped.difference(*schedule.order)
    if missing_passes:
        raise ScheduleError(f"{min(missing_passes)} is marked as overlapped, but no device runs it")


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
    wrong_passes = [
        work
        for microbatch in range(microbatches)
        for stage in range(stages)
        for kind in PARTS
        if count[work := Pass(kind, stage, microbatch)] != 1
    ]
    # Optional passes have no fixed count, but none may run twice.
    wrong_passes += [
        work for work, times in count.items() if times > 1 and not work.kind.everywhere
    ]
    # An optional pass may be missing, unless another pass reads it.
    if not wrong_passes:
        _check_reads(schedule, count)
        _check_shared(schedule)
        return
    culprit = wrong_passes[0]
    device, position = _position_of(schedule, culprit)
    other_slots = {work[1:] for work in wrong_passes} - {culprit[1:]}
    suffix = f" (and {len(other_slots)} more are wrong)" if other_slots else ""
    raise ScheduleError(
        f"{_format_count(schedule, culprit)} on device {device}; every pass must run once{suffix}\n"
        + _excerpt(schedule, device, position)
    )


def _has_all_once(schedule: Schedule) -> bool:
    """Return whether every F, B and W exists once, separately or in a BW, without other passes."""
    # One byte per stage and microbatch instead of Pass objects, for schedules of 10^6 passes.
    bits = {kind: sum(1 << PARTS.index(part) for part in kind.does) for kind in (*PARTS, Kind.BW)}
    if not schedule.kinds.issubset(bits):
        return False
    microbatches = schedule.num_microbatches
    seen_bits = bytearray(schedule.num_stages * microbatches)
    for passes in schedule.order:
        for kind, stage, microbatch in passes:
            index, bit = stage * microbatches + microbatch, bits[kind]
            if seen_bits[index] & bit:
                return False
            seen_bits[index] |= bit
    # All bits of a byte are set, none twice: every part once.
    return seen_bits.count((1 << len(PARTS)) - 1) == len(seen_bits)


def _format_count(schedule: Schedule, culprit: Pass) -> str:
    """Format how often a pass runs, with the names in the schedule: a BW runs B and W."""
    row = schedule.order[schedule.placement[culprit.stage]]
    passes = (work for work in row if work[1:] == culprit[1:])
    texts = [str(work) for work in passes if culprit.kind in work.parts()]
    if not texts:
        return f"{culprit} runs never"
    if len(set(texts)) == 1:
        return f"{texts[0]} runs {len(texts)} times"
    return f"{culprit} runs {len(texts)} times, as {' and '.join(dict.fromkeys(texts))},"


def _check_reads(schedule: Schedule, count: Counter[Pass]) -> None:
    """Raise ScheduleError if a pass reads an optional pass that its microbatch omits."""
    for device, passes in enumerate(schedule.order):
        for position, work in enumerate(passes):
            for dependency in work.needs(schedule.num_stages):
                if not count[dependency] and not _may_be_missing(dependency, work):
                    raise ScheduleError(
                        f"{work} on device {device} reads {dependency}, which no device runs\n"
                        + _excerpt(schedule, device, position)
                    )
            # `_check_shared` checks kinds that each device has once.
            group = () if work.kind.of else _group_of(work.kind)
            missing_kinds = [kind for kind in group if not count[work._replace(kind=kind)]]
            if missing_kinds:
                raise ScheduleError(
                    f"{work} on device {device} has no {work._replace(kind=missing_kinds[0])}: of "
                    f"{', '.join(group)} a microbatch of a stage has all or none\n"
                    + _excerpt(schedule, device, position)
                )


def _group_of(kind: Kind) -> tuple[Kind, ...]:
    """Return the kinds that a microbatch must have together with this kind."""
    return next((group for group in ALL_OR_NONE if kind in group), ())


def _may_be_missing(dependency: Pass, work: Pass) -> bool:
    """Return whether the dependency may be missing: its device has the pass for another stage."""
    return dependency.kind.of == DEVICE and any(
        read.at == EVERY for read in work.kind.reads if read.kind == dependency.kind
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
    single_devices = {FIRST: schedule.placement[:1], LAST: schedule.placement[-1:]}
    for kind in shared:
        # If devices compute parts, the pass that sums the parts must exist too.
        summing_kinds = [
            summing_kind for summing_kind in KINDS if Read(kind, at=EVERY) in summing_kind.reads
        ]
        for required_kind in dict.fromkeys((*summing_kinds, kind, *_group_of(kind))):
            for device in single_devices.get(required_kind.of, devices):
                for microbatch in range(schedule.num_microbatches):
                    times = count[required_kind, device, microbatch]
                    if times != 1:
                        raise ScheduleError(
                            f"{required_kind} of microbatch {microbatch} runs "
                            f"{times or 'no'} times on device {device}; a schedule with {kind} "
                            "needs it once there"
                        )


def _check_rows(schedule: Schedule) -> None:
    """Raise ScheduleError unless every pass comes after the passes that it reads on its device.

    This applies to all microbatches and resources: a device starts a copy, or enters a collective,
    at the position of the pass in its order.
    """
    microbatches = range(schedule.num_microbatches)
    is_plain = len(microbatches) == schedule.unsliced_microbatches
    is_plain = is_plain and not any(kind.of for kind in schedule.kinds)
    for device, row in enumerate(schedule.order):
        positions = _positions_by_part(row, len(microbatches))
        if is_plain and all(
            _follows_inputs(schedule, part, positions, len(row)) for part in positions
        ):
            continue  # fast path: several times faster, and covers nearly all rows
        # Slow path: a microbatch has several passes of a kind, or passes that are not of a stage;
        # or there is an error, whose first pass is to be found.
        rules = {
            part: [
                (positions[dependency], later, descends, dependency[0] in part[0].does)
                for dependency, later, descends in _order_rules(schedule, *part)
                if dependency in positions
            ]
            for part in {(kind, stage) for kind, stage, _ in row}
        }
        for position, (kind, stage, microbatch) in enumerate(row):
            for input_positions, later, descends, is_same_kind in rules[kind, stage]:
                input_microbatch = schedule.execution_order(microbatch, later, descends)
                if (
                    input_microbatch in microbatches
                    and input_positions[input_microbatch] > position
                ):
                    reason = (
                        schedule.pass_order_text(kind)
                        if is_same_kind
                        else f"{kind} needs its result"
                    )
                    raise ScheduleError(
                        f"{row[position]} runs before {row[input_positions[input_microbatch]]} on "
                        f"device {device}, and must run behind it: {reason}\n"
                        + _excerpt(schedule, device, position)
                    )


def _positions_by_part(
    row: Sequence[Pass], num_microbatches: int
) -> dict[tuple[Kind, int], list[int]]:
    """Return the index of each part of each microbatch in a row; -1 if missing."""
    positions: dict[tuple[Kind, int], list[int]] = {}
    parts: dict[tuple[Kind, int], list[list[int]]] = {}
    for position, (kind, stage, microbatch) in enumerate(row):
        position_lists = parts.get((kind, stage))
        if position_lists is None:
            keys = [_part_of(part, stage) for part in kind.does]
            position_lists = [positions.setdefault(key, [-1] * num_microbatches) for key in keys]
            parts[kind, stage] = position_lists
        for part_positions in position_lists:
            part_positions[microbatch] = position
    return positions


def _follows_inputs(
    schedule: Schedule,
    part: tuple[Kind, int],
    positions: Mapping[tuple[Kind, int], Sequence[int]],
    end: int,
) -> bool:
    """Return whether this part of all microbatches (one pass each) comes after its inputs."""
    part_positions = positions[part]
    if min(part_positions) < 0:  # a missing pass counts as last
        part_positions = [end if position < 0 else position for position in part_positions]
    for dependency, later, _ in _order_rules(schedule, *part):
        input_positions = positions.get(dependency)
        if input_positions is None:
            continue
        # Microbatch m against m + later. `map` stops at the shorter list, because a microbatch
        # outside the step constrains nothing.
        pairs = (
            (part_positions, input_positions[later:])
            if later >= 0
            else (part_positions[-later:], input_positions)
        )
        if any(map(lt, *pairs)):
            return False
    return True


def _part_of(kind: Kind, stage: int) -> tuple[Kind, int]:
    """Return the key of a part: kind and stage, or -1 for a kind that each device has once."""
    return kind, -1 if kind.of == DEVICE else stage


def _order_rules(
    schedule: Schedule, kind: Kind, stage: int
) -> Iterator[tuple[tuple[Kind, int], int, bool]]:
    """Yield the parts before this pass on the same device, with the microbatch offset.

    The offset counts in execution order; the last value is whether that descends (see
    `Schedule.execution_order`). Parts on the same resource are omitted if the simulation enforces
    them.
    """
    for part in kind.does:
        for read in (*part.reads, *part.follows):
            dependency = find_kind(read.kind)
            # The simulation proves waits for data and the order within a resource, not between
            # resources.
            if read.later or dependency.of == DEVICE or dependency.resource != part.resource:
                for source_stage in read.stages(stage, schedule.num_stages):
                    yield _part_of(dependency, source_stage), read.later, part.descends
        for dependency in schedule.kinds:
            if part in dependency.before:
                yield _part_of(dependency, stage), 0, False


def _position_of(schedule: Schedule, culprit: Pass) -> tuple[int, int]:
    """Return a pass's device and its last index there, or a substitute index.

    The substitute is the last pass of the same microbatch and stage, or the end of the row.
    """
    device = schedule.placement[culprit.stage]
    passes = schedule.order[device]
    slot_positions = [position for position, work in enumerate(passes) if work[1:] == culprit[1:]]
    exact_positions = [
        position for position in slot_positions if culprit.kind in passes[position].parts()
    ]
    return device, (exact_positions or slot_positions or [max(len(passes) - 1, 0)])[-1]


def _check_memory(schedule: Schedule, limits: Sequence[float], costs: Costs) -> None:
    for device, limit in enumerate(limits):
        curve = held_curve(schedule, costs, device)
        peak, max_memory = max(curve, default=0.0), limit * (1 + _ROUNDING)
        # Negated, so that nan is rejected.
        if not peak <= max_memory:
            position = next(
                position for position, memory in enumerate(curve) if not memory <= max_memory
            )
            raise ScheduleError(
                f"device {device} holds {format_memory(peak)} at its peak, more than the limit of "
                f"{format_memory(limit)}; it first exceeds that at "
                f"{schedule.order[device][position]}\n" + _excerpt(schedule, device, position)
            )


def _excerpt(schedule: Schedule, device: int, position: int) -> str:
    """Format the orders around index `position` of a device, with that pass marked."""
    first, last = max(0, position - COLUMNS), position + COLUMNS + 1
    devices = range(max(0, device - ROWS), min(schedule.num_devices, device + ROWS + 1))
    rows = [
        [str(work) for work in schedule.order[row_device][first:last]] for row_device in devices
    ]
    width = max((len(text) for row in rows for text in row), default=1)
    return "\n".join(_draw_rows(schedule, devices, rows, (device, position, first, width)))


def _draw_rows(
    schedule: Schedule, devices: range, rows: list[list[str]], layout: tuple[int, int, int, int]
) -> Iterator[str]:
    device, position, first, width = layout
    digits = len(str(devices[-1]))
    for row_device, row in zip(devices, rows, strict=True):
        cells = [
            f"[{text}]".ljust(width + 2)
            if (row_device, index) == (device, position)
            else f" {text.ljust(width)} "
            for index, text in enumerate(row, first)
        ]
        prefix = "... " if first else ""
        suffix = " ..." if first + len(row) < len(schedule.order[row_device]) else ""
        mark = "   <-- here" if row_device == device else ""
        yield f"    device {row_device:>{digits}} | {prefix}{''.join(cells).rstrip()}{suffix}{mark}"
