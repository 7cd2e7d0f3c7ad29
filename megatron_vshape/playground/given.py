"""The files given on the command line: read once at the start, and known by keys, not paths."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.files import parse_object, read_text
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.playground.request import MAX_TEXT, FileText
from megatron_vshape.playground.traces import events_of


class Sort(StrEnum):
    """What a file holds."""

    SCHEDULE = "schedule"
    COSTS = "costs"
    TRACE = "trace"


@dataclass(frozen=True, slots=True)
class Given:
    """A file that the page offers; `detail` says what is in it."""

    key: str
    sort: Sort
    file: FileText
    detail: dict[str, object]
    preset: bool = False
    """Whether it is offered among the presets, not among the reader's own files."""


def read_given(paths: Iterable[str | Path]) -> list[Given]:
    """Return the files at `paths`, checked.

    Raises:
        ScheduleError: one cannot be read, or is no schedule, costs or trace.
    """
    return [_read(f"{at}-{Path(path).name}", Path(path)) for at, path in enumerate(paths)]


def read_presets(folder: Path) -> list[Given]:
    """Return the costs files in a folder that may be missing, checked.

    `NAME.about.json` says how NAME.json was measured and is none.

    Raises:
        ScheduleError: a file cannot be read, or holds no costs.
    """
    presets = []
    for path in _costs_files(folder):
        given = _read(f"preset-{path.name}", path)
        if given.sort is not Sort.COSTS:
            raise ScheduleError(
                f"the file {path} is a {given.sort}, and {folder} is for costs; give it on the "
                "command line instead"
            )
        presets.append(replace(given, preset=True))
    return presets


def _costs_files(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        for path in sorted(folder.glob("*.json")):
            if not path.name.endswith(".about.json"):
                yield path


def _read(key: str, path: Path) -> Given:
    if path.is_file() and path.stat().st_size > MAX_TEXT:
        raise ScheduleError(f"the file {path} is larger than {MAX_TEXT // 2**20} MiB")
    file = FileText(path.name, read_text(path, "the file"), str(path))
    try:
        sort = sort_of(file)
        return Given(key, sort, file, _detail(sort, file))
    except ScheduleError as error:
        raise ScheduleError(f"the file {path} cannot be shown: {error}") from None


def sort_of(file: FileText) -> Sort:
    """Return what the file holds, told by its keys; raises ScheduleError if it is none."""
    if file.name.endswith(".csv"):
        return Sort.SCHEDULE
    keys = parse_object(file.text, "the file").keys()
    for sort, key in ((Sort.SCHEDULE, "order"), (Sort.COSTS, "forward_us")):
        if key in keys:
            return sort
    if "traceEvents" in keys:
        return Sort.TRACE
    raise ScheduleError(
        "it is no schedule (order), no costs (forward_us) and no trace (traceEvents)"
    )


def _detail(sort: Sort, file: FileText) -> dict[str, object]:
    if sort is Sort.COSTS:
        return {"stages": Costs.from_json(file.text).num_stages}
    if sort is Sort.SCHEDULE and not file.name.endswith(".csv"):
        schedule = Schedule.from_json(file.text)
        return {"devices": schedule.num_devices, "microbatches": schedule.num_microbatches}
    if sort is Sort.TRACE:
        return {"events": len(events_of(parse_object(file.text, "the trace")))}
    return {}
