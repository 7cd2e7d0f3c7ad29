"""Schedule: in which order every device runs its passes. Timeline: when it does. Plan: why that."""

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from megatron_vshape.core.model.files import check_keys, is_whole, parse_object, read_text
from megatron_vshape.core.model.passes import Kind, Pass, ScheduleError
from megatron_vshape.core.model.placement import Placement, check_placement, chunks_of

FORMAT = 1
MAX_PASSES = 20_000_000
"""More passes than any plan has; what asks for more is refused before memory is."""

MAX_NAME = 200
"""Characters of a schedule's name, which stands in one line of the log."""

MAX_COLUMNS = 100_000
"""Characters of a picture's line; passes of very different lengths would make it endless."""

_ROUNDING = 1e-6
"""A pass may miss the middle of a character by this share of one, as sums of times do."""

_KEYS = ("name", "num_devices", "num_microbatches", "placement", "order")


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order in which every device runs its passes; it holds no times.

    `placement[stage]` is the device of a stage, `order[device]` the passes of a device.
    """

    name: str
    num_devices: int
    num_microbatches: int
    placement: Placement
    order: tuple[tuple[Pass, ...], ...]

    @property
    def num_stages(self) -> int:
        """Return how many stages the model is cut into."""
        return len(self.placement)

    @property
    def num_chunks(self) -> int:
        """Return how many stages every device holds."""
        return len(self.placement) // self.num_devices

    @property
    def splits_backward(self) -> bool:
        """Return whether any weight gradient is a pass of its own."""
        return any(each.kind is Kind.W for passes in self.order for each in passes)

    def to_json(self) -> str:
        """Return the schedule file's text; `from_json` reads it back."""
        return json.dumps(
            {
                "format": FORMAT,
                "name": self.name,
                "num_devices": self.num_devices,
                "num_microbatches": self.num_microbatches,
                "placement": list(self.placement),
                "order": [[str(each) for each in passes] for passes in self.order],
            }
        )

    def to_csv(self) -> str:
        """Return one line per device, its passes separated by commas."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self.order)
        return text.getvalue()

    @classmethod
    def from_json(cls, text: str) -> "Schedule":
        """Return the schedule in a file's text; its form is checked, `verify` checks its sense.

        Raises:
            ScheduleError: not JSON, not this format, a value of the wrong type, or no pass.
        """
        data = parse_object(text, "the schedule file")
        if not is_whole(data.get("format")) or data["format"] != FORMAT:
            raise ScheduleError(
                f"the format is {data.get('format')!r:.40}; this version reads {FORMAT}"
            )
        check_keys(data, ("format", *_KEYS), "the schedule file")
        name, devices, microbatches, placement, order = (data[key] for key in _KEYS)
        devices = _count("num_devices", devices)
        microbatches = _count("num_microbatches", microbatches)
        if not isinstance(name, str) or not name.isprintable() or len(name) > MAX_NAME:
            raise ScheduleError(
                f"name is {name!r:.40}; it must be printable text of up to {MAX_NAME} characters"
            )
        if not isinstance(placement, list) or not all(map(is_whole, placement)):
            raise ScheduleError("placement must be a list with the device of every stage")
        if not isinstance(order, list) or len(order) != devices:
            found = f"{len(order)} lists" if isinstance(order, list) else f"{order!r:.40}"
            raise ScheduleError(
                f"order is {found}; it must hold one list per device, num_devices is {devices}"
            )
        check_placement(tuple(placement), devices)
        check_size(len(placement), microbatches)
        _check_lengths(order, 3 * len(placement) // devices * microbatches)
        return cls(name, devices, microbatches, tuple(placement), _parse_rows(order))

    @classmethod
    def from_csv(
        cls, text: str, placement: Placement | None = None, name: str = "file"
    ) -> "Schedule":
        """Return the schedule in CSV text; without `placement`, a stage is where its passes are.

        What spreadsheets add is no pass: a byte order mark, empty lines, commas at a line's end.

        Raises:
            ScheduleError: a cell is not a pass, or the lines do not fit the placement.
        """
        try:
            lines = csv.reader(io.StringIO(text.removeprefix("\ufeff")))
            rows = [cells for line in lines if (cells := _filled(line))]
        except csv.Error as error:
            raise ScheduleError(f"the CSV cannot be read: {error}") from None
        order = _parse_rows(rows)
        if not any(order):
            raise ScheduleError("the CSV holds no pass; it needs one line per device")
        if placement is None:
            placement = _placement_of(order)
        check_placement(placement, len(order))
        microbatches = 1 + max(each.microbatch for passes in order for each in passes)
        check_size(len(placement), microbatches)
        return cls(name, len(order), microbatches, placement, order)


def check_size(num_stages: int, num_microbatches: int) -> None:
    """Raise ScheduleError if a schedule of this size would fill the memory."""
    if num_stages * num_microbatches * 3 > MAX_PASSES:
        raise ScheduleError(
            f"{num_stages} stages and {num_microbatches} microbatches are more than the "
            f"{MAX_PASSES} passes that a schedule may have"
        )


def load_schedule(path: str | Path) -> Schedule:
    """Return the schedule in the JSON file at `path`, or in the CSV file if it ends in .csv.

    Raises:
        ScheduleError: the file cannot be read or is no schedule file; the text names it.
    """
    text = read_text(path, "the schedule file")
    try:
        if Path(path).suffix == ".csv":
            return Schedule.from_csv(text, name=Path(path).stem)
        return Schedule.from_json(text)
    except ScheduleError as error:
        raise ScheduleError(f"the schedule file {path} is not valid: {error}") from None


class Slot(NamedTuple):
    """When one pass runs; the unit is the costs' (or the building block's slot)."""

    work: Pass
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A schedule with the times at which its passes run, simulated or measured.

    `send_us` is what a result took to the next device, where that is known, and
    `whole_backward_us` what a BW takes of every stage, where it is not B + W.
    """

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    send_us: float = 0.0
    whole_backward_us: tuple[float, ...] | None = None

    def slots(self, device: int) -> Iterable[Slot]:
        """Yield the passes of a device with their times, in order."""
        rows = (self.schedule.order[device], self.starts[device], self.ends[device])
        return map(Slot, *rows)

    @property
    def makespan(self) -> float:
        """Return the time from the first start to the last end over all devices."""
        return max(max(row) for row in self.ends if row) - min(row[0] for row in self.starts if row)

    @property
    def span(self) -> float:
        """Return the longest time from first start to last end of one device.

        What an iteration costs when consecutive iterations need no barrier between them.
        """
        return max(e[-1] - s[0] for s, e in zip(self.starts, self.ends, strict=True) if s)

    @property
    def busy(self) -> float:
        """Return the work of the busiest device."""
        rows = zip(self.starts, self.ends, strict=True)
        return max(sum(e) - sum(s) for s, e in rows)

    @property
    def overhead(self) -> float:
        """Return makespan - busy."""
        return self.makespan - self.busy

    @property
    def bubble(self) -> float:
        """Return the fraction of the makespan in which the busiest device is idle."""
        return self.overhead / self.makespan

    @property
    def span_bubble(self) -> float:
        """Return the fraction of the span in which the busiest device is idle."""
        return 1 - self.busy / self.span

    def draw(self, columns: int | None = None) -> str:
        """Return one line per device: F, B, W in upper case for even chunks, lower for odd.

        A character is the shortest pass, or a share of the makespan where that would be wider
        than `columns` (MAX_COLUMNS at most); it shows what runs at its middle.
        """
        columns = min(columns or MAX_COLUMNS, MAX_COLUMNS)
        shortest = min(
            end - start
            for starts, ends in zip(self.starts, self.ends, strict=True)
            for start, end in zip(starts, ends, strict=True)
        )
        unit = max(shortest, self.makespan / columns)
        first = min(row[0] for row in self.starts if row)
        return "\n".join(
            self._draw_device(device, first, unit) for device in range(self.schedule.num_devices)
        )

    def _draw_device(self, device: int, first: float, unit: float) -> str:
        chunks = chunks_of(self.schedule.placement)
        line = ""

        def column(time: float) -> int:
            return math.ceil((time - first) / unit - 0.5 - _ROUNDING)

        for (kind, stage, _), start, end in self.slots(device):
            middle = (start + end) / 2
            text = kind[0] * (column(middle) - column(start))
            text += kind[-1] * (column(end) - column(middle))
            line = line.ljust(column(start)) + (text if chunks[stage] % 2 == 0 else text.lower())
        return line


class Objective(StrEnum):
    """What is made small: the time of all devices, or of the longest one (no barrier)."""

    MAKESPAN = "makespan"
    SPAN = "span"

    def of(self, timeline: Timeline) -> float:
        """Return what is made small, of this timeline."""
        return timeline.makespan if self is Objective.MAKESPAN else timeline.span

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ScheduleError(f"there is no objective {value!r:.40}; choose {' or '.join(cls)}")


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule that fits, what it costs, and how far it may be from the best.

    `value` is the makespan or span in the costs' unit; no order of the same placement within the
    limits is below `lower_bound`. `source` names what the search began from.
    """

    schedule: Schedule
    objective: Objective
    value: float
    busy: float
    lower_bound: float
    peak: tuple[float, ...]
    source: str
    steps: int

    @property
    def overhead(self) -> float:
        """Return the value beyond the work of the busiest device."""
        return self.value - self.busy

    @property
    def bubble(self) -> float:
        """Return the share of the value in which the busiest device is idle."""
        return self.overhead / self.value

    @property
    def gap(self) -> float:
        """Return how far the value may be above the best, as a share of the lower bound."""
        return self.value / self.lower_bound - 1


def _count(name: str, value: object) -> int:
    if not is_whole(value) or value < 1:
        raise ScheduleError(f"{name} is {value!r:.40}; it must be a whole number of at least 1")
    return value


def _filled(line: Sequence[str]) -> list[str]:
    """Return the cells up to the last that is not blank."""
    cells = [cell.strip() for cell in line]
    while cells and not cells[-1]:
        cells.pop()
    return cells


def _check_lengths(order: Sequence[object], most: int) -> None:
    """Raise ScheduleError at a device with more passes than it can have, which take memory."""
    for device, row in enumerate(order):
        if isinstance(row, list) and len(row) > most:
            raise ScheduleError(
                f"the order of device {device} has {len(row)} passes; its stages and microbatches "
                f"have at most {most}"
            )


def _parse_rows(rows: Sequence[object]) -> tuple[tuple[Pass, ...], ...]:
    parsed = []
    for device, row in enumerate(rows):
        if not isinstance(row, list):
            raise ScheduleError(
                f"the order of device {device} is {row!r:.40}; it must be a list of passes"
            )
        parsed.append(tuple(map(Pass.parse, row)))
    return tuple(parsed)


def _placement_of(order: Sequence[Sequence[Pass]]) -> Placement:
    """Return the device of every stage, which is that of the last pass of it."""
    device_of = {work.stage: device for device, row in enumerate(order) for work in row}
    missing = next((at for at, stage in enumerate(sorted(device_of)) if at != stage), None)
    if missing is not None:
        raise ScheduleError(f"stage {missing} has no pass, but stage {max(device_of)} has")
    return tuple(device_of[stage] for stage in range(len(device_of)))
