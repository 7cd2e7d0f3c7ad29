"""Files of the command line that the playground offers.

They are read once at the start, and identified by keys instead of paths.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.files import parse_object, read_text
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.playground.request import MAX_TEXT, FileText


class Sort(StrEnum):
    """Type of a file's content."""

    SCHEDULE = "schedule"
    COSTS = "costs"


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
            **self.detail,
        }


def read_given(paths: Iterable[str | Path]) -> list[Given]:
    """Read and check the files at `paths`.

    Raises:
        ScheduleError: a file cannot be read, or is neither a schedule nor costs.
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
    raise ScheduleError("it is no schedule (order) and no costs (forward_us)")
