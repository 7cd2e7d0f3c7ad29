"""Schedule: pass order of every device. Timeline: times of the passes."""

import csv
import io
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from operator import attrgetter, sub
from pathlib import Path
from typing import Any, NamedTuple

from megatron_vshape.core.model.files import (
    HALF_DUPLEX,
    check_keys,
    fault_in_file,
    is_whole,
    parse_object,
    read_text,
)
from megatron_vshape.core.model.kinds import KINDS, PAIR_SIGN, PARTS, PROCESSOR, Kind, ScheduleError
from megatron_vshape.core.model.passes import Pass, parse_step
from megatron_vshape.core.model.placement import Placement, check_placement, chunks_of, message_us
from megatron_vshape.core.model.torch_csv import is_torch_csv, package_cells

FORMAT = 1
MAX_PASSES = 20_000_000
"""Maximum passes of a schedule: larger ones are rejected before memory is allocated."""

_MAX_NAME = 200
"""Maximum characters of a schedule's name, which is printed in one line of the log."""

_MAX_COLUMNS = 100_000
"""Maximum characters per line of a picture, for passes of very different lengths."""

ELLIPSIS = " … "
"""Replacement for the middle of a picture."""

_MUCH_SHORTER = 4
"""Passes shorter than the usual one by this factor do not set the column width of a picture."""

_ROUNDING = 1e-6
"""Tolerance for the middle of a character, for rounding in sums of times."""

_KIND = attrgetter("kind")

_KEYS = ("name", "num_devices", "num_microbatches", "placement", "order")


class ResourceQueue(NamedTuple):
    """Resource queue: the passes of a device on one resource, in their order.

    `positions[i]` is the index of `passes[i]` in the device's order.
    """

    device: int
    resource: str
    passes: Sequence[Pass]
    positions: Sequence[int]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Pass order of every device, without times.

    Attributes:
        name: printable name.
        num_devices: number of pipeline ranks.
        num_microbatches: number of microbatches; with slices, the number of all slices.
        placement: device of each stage.
        order: passes of each device.
        overlapped: each F that forms an overlapped pair with the next pass, a B or BW: both start
            when the inputs of both are ready, and both results are available at the end of both.
            The text form is `F0.3&B7.1`.
        slices: number k of slices of each microbatch along the sequence. A pass is then of a slice;
            slice j of microbatch i has the number i k + j.

    >>> from megatron_vshape import Schedule, make
    >>> schedule = make("1f1b", 2, 2)
    >>> print(schedule.to_csv(), end="")
    F0.0,F0.1,BW0.0,BW0.1
    F1.0,BW1.0,F1.1,BW1.1
    >>> Schedule.from_json(schedule.to_json()) == schedule
    True
    """

    name: str
    num_devices: int
    num_microbatches: int
    placement: Placement
    order: tuple[tuple[Pass, ...], ...]
    overlapped: frozenset[Pass] = frozenset()
    slices: int = 1
    # A cache in a list, because fields of a frozen class cannot be assigned.
    _kinds: list[frozenset[Kind]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @property
    def num_stages(self) -> int:
        """Number of stages of the model."""
        return len(self.placement)

    @property
    def unsliced_microbatches(self) -> int:
        """Number of microbatches, each with all its slices."""
        return self.num_microbatches // self.slices

    @property
    def size_text(self) -> str:
        """Size in words, as in `4 ranks, 8 microbatches of 2 slices`."""
        ranks, count = self.num_devices, self.unsliced_microbatches
        text = f"{ranks} rank{'s' * (ranks > 1)}, {count} microbatch{'es' * (count > 1)}"
        return text if self.slices == 1 else f"{text} of {self.slices} slices"

    def execution_order(self, number: int, later: int, descends: bool) -> int:
        """Return the microbatch that is `later` positions behind another in execution order.

        F of a microbatch's slices ascend, because a slice reads the keys and values of earlier
        slices. B descend, because a slice owes them their gradients.
        """
        if self.slices == 1 or not descends:
            return number + later
        microbatch: int = reversed_slice(reversed_slice(number, self.slices) + later, self.slices)
        return microbatch

    def pass_order_text(self, kind: Kind) -> str:
        """Format the rule for the order in which a stage runs the passes of one kind."""
        text = f"each stage runs its {kind} passes in the order of the microbatches, 0, 1, 2, ..."
        if self.slices == 1:
            return f"{text}, in which the trainer reads them"
        descends = any(part.descends for part in kind.does)
        direction = "the last to the first" if descends else "the first to the last"
        return f"{text}, and the slices of a microbatch from {direction}"

    def check_counts(self) -> None:
        """Raise ScheduleError unless the numbers of devices, microbatches and slices are valid."""
        if len(self.order) != self.num_devices:
            raise ScheduleError(
                f"the schedule has orders for {len(self.order)} devices and "
                f"num_devices {self.num_devices}; the two must be equal"
            )
        if self.num_microbatches < 1:
            raise ScheduleError(
                f"num_microbatches is {self.num_microbatches}; it must be at least 1"
            )
        check_slices(self.slices, self.num_microbatches)

    def position(self, work: Pass) -> dict[str, int]:
        """Return the microbatch of a pass, and its slice if there are several."""
        microbatch, slice_number = divmod(work.microbatch, self.slices)
        return {"microbatch": microbatch} | ({"slice": slice_number} if self.slices > 1 else {})

    @property
    def num_chunks(self) -> int:
        """Number of stages per device."""
        return len(self.placement) // self.num_devices

    @property
    def kinds(self) -> frozenset[Kind]:
        """Kinds of the passes."""
        if not self._kinds:  # cached, because it needs all passes
            self._kinds.append(frozenset(map(_KIND, chain.from_iterable(self.order))))
        return self._kinds[0]

    @property
    def copies(self) -> bool:
        """Whether passes move memory off the devices."""
        return any(kind.offloaded for kind in self.kinds)

    def moving_passes(self) -> Iterator[Pass]:
        """Yield the passes that move memory off their device, device by device."""
        return (work for row in self.order for work in row if work.kind.offloaded)

    @property
    def splits_backward(self) -> bool:
        """Whether any weight gradient is a separate pass."""
        return Kind.W in self.kinds

    def split_overlapped(self) -> "Schedule":
        """Return the schedule with every F&B pair as two separate passes."""
        return replace(self, overlapped=frozenset())

    def renumbered(self, numbers: Sequence[int]) -> "Schedule":
        """Return the schedule with new numbers of the devices, given for every current device.

        >>> from megatron_vshape import make
        >>> make("v-half", 2, 2).renumbered((1, 0)).placement
        (1, 0, 0, 1)
        """
        if list(numbers) == list(range(self.num_devices)):
            return self
        placement = tuple(numbers[device] for device in self.placement)
        order = tuple(row for _, row in sorted(zip(numbers, self.order, strict=True)))
        return replace(self, placement=placement, order=order)

    def steps(self, device: int) -> Iterator[tuple[Pass, ...]]:
        """Yield the steps of a device in order: one pass, or the two passes of an F&B pair."""
        row = iter(self.order[device])
        if not self.overlapped:
            return zip(row)
        # Both read from one iterator, so the partner of a pair is not yielded a second time.
        return ((work, next(row)) if work in self.overlapped else (work,) for work in row)

    def overlapped_pairs(self) -> dict[Pass, Pass]:
        """Return the F&B pairs as a dict from F to its B or BW."""
        steps = (step for device in range(self.num_devices) for step in self.steps(device))
        return dict(step for step in steps if len(step) == 2) if self.overlapped else {}

    def queues(self) -> list[ResourceQueue]:
        """Return the resource queues: those of all processors first, in device order."""
        if all(kind.resource == PROCESSOR for kind in self.kinds):
            return [
                ResourceQueue(d, PROCESSOR, row, range(len(row)))
                for d, row in enumerate(self.order)
            ]
        # Insert processors first, because callers rely on queue d being the processor of device d.
        positions_by_queue: dict[tuple[int, str], list[int]] = {
            (device, PROCESSOR): [] for device in range(self.num_devices)
        }
        for device, row in enumerate(self.order):
            for position, work in enumerate(row):
                positions_by_queue.setdefault((device, work.kind.resource), []).append(position)
        return [
            ResourceQueue(
                device,
                resource,
                [self.order[device][position] for position in positions],
                positions,
            )
            for (device, resource), positions in positions_by_queue.items()
        ]

    def to_json(self) -> str:
        """Return the text of the schedule file; `from_json` is the inverse."""
        data = {
            "format": FORMAT,
            "name": self.name,
            "num_devices": self.num_devices,
            "num_microbatches": self.num_microbatches,
            "placement": list(self.placement),
            "order": [self._cells(device) for device in range(self.num_devices)],
        }
        # Versions without slices then still read schedules without them.
        if self.slices > 1:
            data["slices"] = self.slices
        return json.dumps(data)

    def to_csv(self) -> str:
        """Return one line per device, with comma-separated passes."""
        text = io.StringIO()
        rows = map(self._cells, range(self.num_devices))
        csv.writer(text, lineterminator="\n").writerows(rows)
        return text.getvalue()

    def _cells(self, device: int) -> list[str]:
        return [PAIR_SIGN.join(map(str, step)) for step in self.steps(device)]

    @classmethod
    def from_json(cls, text: str) -> "Schedule":
        """Parse a schedule file. This checks the format; `verify` checks the schedule.

        Raises:
            ScheduleError: not JSON, not this format, a value of the wrong type, or an invalid pass.
        """
        data = parse_object(text, "the schedule file")
        if not is_whole(data.get("format")) or data["format"] != FORMAT:
            raise ScheduleError(
                f"the format is {data.get('format')!r:.40}; this version reads {FORMAT}"
            )
        _check_recompute(data.pop("recompute", []))
        data.pop(HALF_DUPLEX, None)
        slices = _parse_count("slices", data.pop("slices", 1))
        check_keys(data, ("format", *_KEYS), "the schedule file")
        name, devices, microbatches, placement, order = (data[key] for key in _KEYS)
        devices = _parse_count("num_devices", devices)
        microbatches = _parse_count("num_microbatches", microbatches)
        if not isinstance(name, str) or not name.isprintable() or len(name) > _MAX_NAME:
            raise ScheduleError(
                f"name is {name!r:.40}; it must be printable text of up to {_MAX_NAME} characters"
            )
        if not isinstance(placement, list) or not all(map(is_whole, placement)):
            raise ScheduleError("placement must be a list with the device of every stage")
        if not isinstance(order, list) or len(order) != devices:
            content = f"{len(order)} lists" if isinstance(order, list) else f"{order!r:.40}"
            raise ScheduleError(
                f"order is {content}; it must contain one list per device, num_devices is {devices}"
            )
        # Check the sizes before parsing, because large invalid files would exhaust memory.
        check_placement(tuple(placement), devices)
        check_size(len(placement), microbatches)
        check_slices(slices, microbatches)
        # Upper bound of a valid row: each simple kind once per stage and microbatch of the device.
        simple = sum(kind.does == (kind,) for kind in KINDS)
        _check_lengths(order, simple * len(placement) // devices * microbatches)
        rows, overlapped = _parse_rows(order)
        return cls(name, devices, microbatches, tuple(placement), rows, overlapped, slices)

    @classmethod
    def from_csv(
        cls, text: str, placement: Placement | None = None, name: str = "file", slices: int = 1
    ) -> "Schedule":
        """Parse a schedule in CSV text; `placement` defaults to the devices of the passes.

        A CSV does not contain the number of `slices` per microbatch. A byte order mark, empty lines
        and trailing commas from spreadsheets are ignored. The form of torch.distributed.pipelining
        is read as well (see `torch_csv`).

        Raises:
            ScheduleError: a cell is not a pass, or the lines do not fit the placement.
        """
        try:
            lines = csv.reader(io.StringIO(text.removeprefix("\ufeff")))
            rows = [cells for line in lines if (cells := _without_trailing_blanks(line))]
        except csv.Error as error:
            raise ScheduleError(f"the CSV cannot be read: {error}") from None
        if is_torch_csv(rows):
            rows = list(map(package_cells, rows))
        order, overlapped = _parse_rows(rows)
        if not any(order):
            raise ScheduleError("the CSV has no passes; it needs one line per device")
        if placement is None:
            placement = _placement_of(order)
        check_placement(placement, len(order))
        microbatches = 1 + max(work.microbatch for passes in order for work in passes)
        check_size(len(placement), microbatches)
        check_slices(slices, microbatches)
        return cls(name, len(order), microbatches, placement, order, overlapped, slices)


def check_size(num_stages: int, num_microbatches: int) -> None:
    """Raise ScheduleError if a schedule of this size would exhaust memory."""
    if num_stages * num_microbatches * len(PARTS) > MAX_PASSES:
        raise ScheduleError(
            f"{num_stages} stages and {num_microbatches} microbatches are more than the "
            f"{MAX_PASSES} passes that a schedule may have"
        )


def reversed_slice(number: Any, slices: int) -> Any:
    """Return the slice in the mirrored position of its microbatch, for descending order.

    `number` is an integer or an array.
    """
    return number + slices - 1 - 2 * (number % slices)


def check_slices(slices: int, num_microbatches: int) -> None:
    """Raise ScheduleError unless every microbatch has all of its slices."""
    if slices < 1 or num_microbatches % slices:
        raise ScheduleError(
            f"slices is {slices} and num_microbatches, which counts every slice, is "
            f"{num_microbatches}; it must be a multiple of slices"
        )


def load_schedule(path: str | Path) -> Schedule:
    """Load a schedule from a JSON file, or from a CSV file if `path` ends in .csv.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from megatron_vshape import load_schedule, make
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "mine.json")
    ...     _ = path.write_text(make("v-half", 2, 4).to_json())
    ...     load_schedule(path).name
    'v-half'

    Raises:
        ScheduleError: the file cannot be read or is not a valid schedule; the text names it.
    """
    text = read_text(path, "the schedule file")
    try:
        if Path(path).suffix == ".csv":
            return Schedule.from_csv(text, name=Path(path).stem)
        return Schedule.from_json(text)
    except ScheduleError as error:
        raise fault_in_file(error, "the schedule file", path) from None


class Slot(NamedTuple):
    """Start and end of one pass, in the unit of the costs (or in slots of the building block)."""

    work: Pass
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A schedule with the times of its passes, simulated or measured.

    `send_us` is the time of a P2P message, if known, and `more_send_us` is added to it at the
    boundary behind each stage. `whole_backward_us` is the time of a BW per stage, if it differs
    from B + W.
    """

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    send_us: float = 0.0
    whole_backward_us: tuple[float, ...] | None = None
    more_send_us: tuple[float, ...] = ()

    def message_us(self, stage: int, other_stage: int) -> float:
        """Return the time of a message between stages on two devices."""
        return message_us(self.send_us, self.more_send_us, stage, other_stage)

    def slots(self, device: int) -> Iterable[Slot]:
        """Yield the passes of a device with their times, in order."""
        rows = (self.schedule.order[device], self.starts[device], self.ends[device])
        return map(Slot, *rows)

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end over all devices."""
        return max(map(max, filter(None, self.ends))) - self.first_start

    @property
    def first_start(self) -> float:
        """Start of the earliest pass."""
        return min(map(min, filter(None, self.starts)))

    @property
    def span(self) -> float:
        """Longest time from first start to last end of one device.

        This is the time of an iteration if consecutive iterations need no barrier between them.
        """
        return max(max(e) - min(s) for s, e in zip(self.starts, self.ends, strict=True) if s)

    @property
    def work(self) -> tuple[float, ...]:
        """Busy time of every device's processor; an F&B pair counts once."""
        overlapped = self.schedule.overlapped
        return tuple(
            # Passes of a queue are disjoint: busy time is the sum of ends minus that of starts.
            sum(_times_at(self.ends[lane.device], positions))
            - sum(_times_at(self.starts[lane.device], positions))
            for lane in self.schedule.queues()
            if lane.resource == PROCESSOR
            for positions in [
                [
                    position
                    # Both passes of a pair have the same start and end: skip F, count its partner.
                    for position, work in zip(lane.positions, lane.passes, strict=True)
                    if work not in overlapped
                ]
                if overlapped
                else lane.positions
            ]
        )

    @property
    def busy(self) -> float:
        """Busy time of the busiest processor."""
        return max(self.work)

    @property
    def mean_idle(self) -> float:
        """Share of the makespan in which a device's processor is idle, as a mean over devices."""
        return 1 - sum(self.work) / (self.makespan * self.schedule.num_devices)

    @property
    def overhead(self) -> float:
        """Makespan minus busy."""
        return self.makespan - self.busy

    @property
    def bubble(self) -> float:
        """Fraction of the makespan in which the busiest device is idle."""
        return self.overhead / self.makespan

    @property
    def span_bubble(self) -> float:
        """Fraction of the span in which the busiest device is idle."""
        return 1 - self.busy / self.span

    def draw(self, columns: int | None = None, max_width: int | None = None) -> str:
        """Draw one line per device: F, B, W in upper case for even chunks, lower for odd.

        A character is as long as the shortest pass, except for passes much shorter than most. It is
        longer if the picture would exceed `columns` (at most _MAX_COLUMNS). A character shows the
        pass that runs at its middle. Other resources of a device have separate lines below. The
        middle of a picture wider than `max_width` characters is omitted.

        >>> from megatron_vshape import make, simulate
        >>> print(simulate(make("zb-h1", 2, 3)).draw())
        FF BWFBWBW
         FBFBWFBWW
        """
        columns = min(columns or _MAX_COLUMNS, _MAX_COLUMNS)
        unit = max(self._column_length(), self.makespan / columns)
        first = self.first_start

        def column(time: float) -> int:
            # The first character whose middle is not before `time`.
            return math.ceil((time - first) / unit - 0.5 - _ROUNDING)

        width = max(map(column, map(max, filter(None, self.ends))))
        parts = [range(width)]
        if max_width is not None and width > max_width:
            head = (max_width - len(ELLIPSIS) + 1) // 2
            parts = [range(head), range(width - (max_width - len(ELLIPSIS) - head), width)]
        letters = {}
        for kind in self.schedule.kinds:
            text = kind[0] + kind[-1] if len(kind.does) > 1 else kind[0]  # two if full backward
            chunks = chunks_of(self.schedule.placement)
            letters[kind] = [text if chunk % 2 == 0 else text.lower() for chunk in chunks]
        lanes = sorted(self.schedule.queues(), key=lambda lane: lane.device)
        return "\n".join(
            ELLIPSIS.join(self._draw_lane(lane, letters, column, part) for part in parts).rstrip()
            for lane in lanes
        )

    def _column_length(self) -> float:
        """Return the length of the shortest pass that is not much shorter than most.

        Otherwise short collectives or stages without layers would stretch all other passes.
        """
        flat = chain.from_iterable
        # Of F, B and W only, if there are any: these set the scale that a reader expects.
        lengths: list[float] = list(map(sub, flat(self.ends), flat(self.starts)))
        timed_passes = zip(lengths, flat(self.schedule.order), strict=True)
        simple = [length for length, work in timed_passes if work.kind in PARTS and length > 0]
        sorted_lengths = sorted(simple or filter(None, lengths))
        median_length = sorted_lengths[len(sorted_lengths) // 2]
        return min(length for length in lengths if length >= median_length / _MUCH_SHORTER)

    def _draw_lane(
        self,
        lane: ResourceQueue,
        letters: Mapping[Kind, Sequence[str]],
        column: Callable[[float], int],
        part: range,
    ) -> str:
        """Draw these columns of a resource queue."""
        starts, ends = self.starts[lane.device], self.ends[lane.device]
        # Only passes that intersect `part`: a step may have 10^5 passes, and `max_width` is small.
        low = bisect_right(lane.positions, part.start, key=lambda index: column(ends[index]))
        high = bisect_left(lane.positions, part.stop, key=lambda index: column(starts[index]))
        texts, width, shown = list[str](), part.start, ""

        def draw(letter: str, stop: int) -> None:
            nonlocal width
            texts.append(letter * (min(stop, part.stop) - width))
            width = max(width, min(stop, part.stop))

        for index in range(low, high):
            work, position = lane.passes[index], lane.positions[index]
            shown += letters[work.kind][work.stage]
            if work in self.schedule.overlapped:  # drawn with its partner, one after the other
                continue
            start, length = starts[position], ends[position] - starts[position]
            draw(" ", column(start))
            for number, letter in enumerate(shown, 1):
                draw(letter, column(start + length * number / len(shown)))
            shown = ""
        draw(" ", part.stop)
        return "".join(texts)


class Objective(StrEnum):
    """Objective of a plan: time of all devices (makespan), or of the slowest (span, no barrier)."""

    MAKESPAN = "makespan"
    SPAN = "span"

    def of(self, timeline: Timeline) -> float:
        """Return the objective's value for this timeline."""
        return timeline.makespan if self is Objective.MAKESPAN else timeline.span

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ScheduleError(f"there is no objective {value!r:.40}; choose {' or '.join(cls)}")


def _times_at(row: Sequence[float], positions: Sequence[int]) -> Sequence[float]:
    """Return the times of a queue's passes; the complete row if it is the only queue."""
    return row if len(positions) == len(row) else [row[position] for position in positions]


def _parse_count(name: str, value: object) -> int:
    if not is_whole(value) or value < 1:
        raise ScheduleError(f"{name} is {value!r:.40}; it must be a whole number of at least 1")
    return value


def _without_trailing_blanks(line: Sequence[str]) -> list[str]:
    """Return the cells up to the last one that is not blank."""
    cells = [cell.strip() for cell in line]
    while cells and not cells[-1]:
        cells.pop()
    return cells


def _check_recompute(settings: object) -> None:
    """Reject a file of 0.2.0 or before whose plan relies on stages that recompute."""
    if isinstance(settings, list) and set(map(str, settings)) <= {"none"}:
        return
    raise ScheduleError(
        f"the schedule file recomputes by stage (recompute: {settings!r:.60}), which is no longer "
        "supported: plan again, and use Megatron's --recompute-granularity to recompute in all "
        "stages"
    )


def _check_lengths(order: Sequence[object], max_passes: int) -> None:
    """Raise ScheduleError for a device with more passes than it can have, to save memory."""
    for device, row in enumerate(order):
        if isinstance(row, list) and len(row) > max_passes:
            raise ScheduleError(
                f"the order of device {device} has {len(row)} passes; its stages and microbatches "
                f"have at most {max_passes}"
            )


def _parse_rows(rows: Sequence[object]) -> tuple[tuple[tuple[Pass, ...], ...], frozenset[Pass]]:
    """Parse the passes of every device; also return the F of F&B pairs."""
    parsed, overlapped = [], set[Pass]()
    for device, row in enumerate(rows):
        if not isinstance(row, list):
            raise ScheduleError(
                f"the order of device {device} is {row!r:.40}; it must be a list of passes"
            )
        steps = list(map(parse_step, row))
        overlapped.update(step[0] for step in steps if len(step) == 2)
        parsed.append(tuple(chain.from_iterable(steps)))
    return tuple(parsed), frozenset(overlapped)


def _placement_of(order: Sequence[Sequence[Pass]]) -> Placement:
    """Return the device of every stage, derived from its passes."""
    device_of: dict[int, int] = {}
    for device, row in enumerate(order):
        for work in row:
            first = device_of.setdefault(work.stage, device)
            if first != device:
                raise ScheduleError(
                    f"{work} is on device {device}, but stage {work.stage} has passes on "
                    f"device {first}; a stage is on one device"
                )
    missing = next(
        (expected for expected, stage in enumerate(sorted(device_of)) if expected != stage), None
    )
    if missing is not None:
        raise ScheduleError(f"stage {missing} has no pass, but stage {max(device_of)} has")
    return tuple(device_of[stage] for stage in range(len(device_of)))
