"""Files that the playground offers: from the command line, and an example.

They are read once at the start, and identified by keys instead of paths.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from io import StringIO
from pathlib import Path

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.files import parse_object, read_text
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.playground.request import MAX_TEXT, FileText
from megatron_vshape.playground.traces import events_of
from megatron_vshape.view.chrome_trace import write_trace

EXAMPLE = "example"
"""Key of the trace that is shown until the user opens a trace."""


class Sort(StrEnum):
    """Type of a file's content."""

    SCHEDULE = "schedule"
    COSTS = "costs"
    TRACE = "trace"


@dataclass(frozen=True, slots=True)
class Given:
    """A file that the playground offers; `detail` summarizes its content."""

    key: str
    sort: Sort
    detail: dict[str, object]
    file: FileText

    def offer(self) -> dict[str, object]:
        """Return the description of the file that the playground needs."""
        return {
            "key": self.key,
            "sort": self.sort,
            "name": self.file.name,
            "example": self.key == EXAMPLE,
            **self.detail,
        }


def read_given(paths: Iterable[str | Path]) -> list[Given]:
    """Read and check the files at `paths`.

    Raises:
        ScheduleError: a file cannot be read, or is not a schedule, costs or a trace.
    """
    return [_read(f"{at}-{Path(path).name}", Path(path)) for at, path in enumerate(paths)]


def _read(key: str, path: Path) -> Given:
    if path.is_file() and path.stat().st_size > MAX_TEXT:
        raise ScheduleError(f"the file {path} is larger than {MAX_TEXT // 2**20} MiB")
    file = FileText(path.name, read_text(path, "the file"), str(path))
    try:
        return Given(key, *_look_into(file), file)
    except ScheduleError as error:
        raise ScheduleError(f"the file {path} cannot be shown: {error}") from None


def _look_into(file: FileText) -> tuple[Sort, dict[str, object]]:
    """Detect a file's content by its keys; raises ScheduleError if it is unknown."""
    if file.name.endswith(".csv"):
        return Sort.SCHEDULE, {}
    data = parse_object(file.text, "the file")
    if "order" in data:
        schedule = Schedule.from_json(file.text)
        sizes = {"devices": schedule.num_devices, "microbatches": schedule.num_microbatches}
        return Sort.SCHEDULE, {**sizes}
    if "forward_us" in data:
        return Sort.COSTS, {"stages": Costs.from_json(file.text).num_stages}
    if "traceEvents" in data:
        return Sort.TRACE, {"events": len(events_of(data))}
    raise ScheduleError(
        "it is no schedule (order), no costs (forward_us) and no trace (traceEvents)"
    )


def example_trace() -> Given:
    """Make a trace in training's format of a step in which all devices stall once."""
    schedule = make("v-half", 4, 8)
    costs = Costs.uniform(4, 8, 900.0, 1000.0, 800.0, 40.0)
    planned = simulate(schedule, costs)
    stall, stall_us = planned.makespan / 2, 1800.0

    def moved(rows: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(at + stall_us * (at >= stall) for at in row) for row in rows)

    ran = replace(planned, starts=moved(planned.starts), ends=moved(planned.ends))
    text = StringIO()
    write_trace(ran, text, costs)
    return Given(
        EXAMPLE, *_look_into(file := FileText("example.trace.json", text.getvalue())), file
    )
