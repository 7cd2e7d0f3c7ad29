"""Requests of the playground, validated field by field before any work."""

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from megatron_vshape.core.model.files import is_number, is_whole
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper import catalogue
from megatron_vshape.core.paper.catalogue import OPTIONS
from megatron_vshape.core.schedule_names import SCHEDULE_NAMES

_MAX_DEVICES = 256
_MAX_MICROBATCHES = 16_384
MAX_PASSES = 1_600_000
"""Maximum passes of a request; interaction is smooth up to a quarter of this."""

_MAX_TEXT = 32 * 2**20
"""Maximum bytes of a file that is opened in the playground."""

_MAX_SECONDS = 600.0

MOST_CHUNKS = 4
"""Maximum chunks per rank of a plan; most models have enough layers."""

_LARGEST = 1e12

_OF_CHUNKS = re.compile(r"([a-z0-9-]+):([0-9]{1,9})", re.ASCII)
"""A name with chunks per rank, as on the command line: interleaved-1f1b:4."""


class FieldError(ScheduleError):
    """An invalid field of a request; the playground marks the field and shows the text."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


class AnswerKind(StrEnum):
    """The requested result."""

    TIMELINE = "timeline"
    STEPS = "steps"
    SCHEDULE_FILE = "schedule-file"
    TRACE_FILE = "trace-file"


class Source(StrEnum):
    """The source of a schedule."""

    NAME = "name"
    FILE = "file"
    PLAN = "plan"


@dataclass(frozen=True, slots=True)
class FileText:
    """A file opened in the playground."""

    name: str
    text: str

    @property
    def argument(self) -> str:
        """Shell argument that names the file."""
        return shlex.quote(self.name)


Times = tuple[float, ...]
"""Additional times of F, B and W for the embedding or the output layer."""

_NO_TIMES = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class CostChoice:
    """Pass times of one chunk (1 / (2 * devices) of the model), or a costs file."""

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0
    send: float = 0.0
    embedding: Times = _NO_TIMES
    head: Times = _NO_TIMES
    file: FileText | None = None


@dataclass(frozen=True, slots=True)
class NamedChoice:
    """A catalogue schedule; None selects the catalogue's default."""

    name: str
    chunks: int | None = None


@dataclass(frozen=True, slots=True)
class FileChoice:
    """A schedule from a file."""

    file: FileText


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """A plan for the chosen costs, with at most `limit` memory per rank."""

    limit: float
    limit_in_gib: bool = False
    seconds: float | None = None


ScheduleChoice = NamedChoice | FileChoice | PlanChoice


@dataclass(frozen=True, slots=True)
class Request:
    """All inputs of an answer; equal requests have equal answers."""

    answer_kind: AnswerKind
    devices: int
    microbatches: int
    costs: CostChoice
    schedule: ScheduleChoice


def parse_request(data: object) -> Request:
    """Parse and validate a request from decoded JSON.

    Raises:
        FieldError: a value is missing or invalid; names the field.
    """
    body = _object(data, "request")
    _known(body, ("want", "devices", "microbatches", "costs", "schedule"))
    answer_kind = _choice(body.get("want"), tuple(AnswerKind), "want")
    devices = _whole(body.get("devices"), "devices", _MAX_DEVICES)
    microbatches = _whole(body.get("microbatches"), "microbatches", _MAX_MICROBATCHES)
    costs = _costs(body.get("costs"))
    schedule = _schedule(body.get("schedule"))
    if not isinstance(schedule, FileChoice):
        chunks = MOST_CHUNKS
        if isinstance(schedule, NamedChoice):
            chunks = schedule.chunks or catalogue.usual_chunks(schedule.name.rstrip("+"))
        passes = 3 * devices * chunks * microbatches
        if passes > MAX_PASSES:
            raise FieldError(
                "microbatches",
                f"{devices} ranks with {microbatches} microbatches make {passes:,} passes; the "
                f"page draws up to {MAX_PASSES:,}",
            )
    return Request(AnswerKind(answer_kind), devices, microbatches, costs, schedule)


def _schedule(data: object) -> ScheduleChoice:
    body = _object(data, "schedule")
    _known(body, "source name chunks file limit limit_in_gib seconds".split())
    source = Source(_choice(body.get("source"), tuple(Source), "schedule"))
    if source is Source.FILE:
        return FileChoice(_file(body.get("file"), "schedule"))
    if source is Source.PLAN:
        return _plan(body)
    requested_name = body.get("name")
    if (
        isinstance(requested_name, str)
        and (match := _OF_CHUNKS.fullmatch(requested_name))
        and match[1] in OPTIONS
    ):
        requested_name, body = match[1], {**body, "chunks": int(match[2])}
    name = _choice(requested_name, SCHEDULE_NAMES, "schedule")
    chunks = None
    if name in OPTIONS and body.get("chunks") is not None:
        chunks = _whole(body["chunks"], "chunks", catalogue.MAX_STAGES_PER_DEVICE)
    return NamedChoice(name, chunks)


def _plan(body: dict[str, object]) -> PlanChoice:
    limit = _number(body.get("limit"), "limit", minimum=0.0)
    in_gib = body.get("limit_in_gib", False)
    if not isinstance(in_gib, bool):
        raise FieldError("limit", "limit_in_gib must be true or false")
    seconds = None
    if body.get("seconds") is not None:
        seconds = _number(body["seconds"], "seconds", minimum=0.0, maximum=_MAX_SECONDS)
    return PlanChoice(limit, in_gib, seconds)


def _costs(data: object) -> CostChoice:
    body = _object(data, "costs")
    _known(body, ("forward", "backward", "weight", "send", "embedding", "head", "file"))
    if body.get("file") is not None:
        return CostChoice(file=_file(body["file"], "costs"))
    return CostChoice(
        _number(body.get("forward", 1.0), "forward", minimum=0.0),
        _number(body.get("backward", 1.0), "backward", minimum=0.0),
        _number(body.get("weight", 1.0), "weight", minimum=0.0),
        _number(body.get("send", 0.0), "send"),
        _extra(body.get("embedding"), "embedding"),
        _extra(body.get("head"), "head"),
    )


def _extra(data: object, field: str) -> Times:
    if data is None:
        return _NO_TIMES
    if not isinstance(data, list) or len(data) != 3:
        raise FieldError(field, f"{field} must be three numbers: added to F, B and W")
    names = ("forward", "backward", "weight")
    return tuple(_number(v, f"{field}_{n}") for n, v in zip(names, data, strict=True))


def _file(data: object, field: str) -> FileText:
    """Return a file with its text; the server reads none by its path."""
    body = _object(data, field)
    _known(body, ("name", "text"), field)
    name, text = body.get("name", "file.json"), body.get("text")
    if not isinstance(name, str) or len(name) > 200 or not name.isprintable():
        raise FieldError(field, "the file's name must be printable and of up to 200 characters")
    if not isinstance(text, str) or not text:
        raise FieldError(field, "the file is empty; choose one with a schedule or costs")
    if len(text) > _MAX_TEXT:
        raise FieldError(field, f"the file is larger than {_MAX_TEXT // 2**20} MiB")
    return FileText(name, text)


def check_drawn(schedule: Schedule) -> None:
    """Raise ScheduleError if the schedule of a file is too large for the playground."""
    if schedule.num_devices > _MAX_DEVICES:
        raise ScheduleError(
            f"it is for {schedule.num_devices:,} ranks; the page draws up to {_MAX_DEVICES}"
        )
    if 3 * schedule.num_stages * schedule.num_microbatches > MAX_PASSES:
        raise ScheduleError(f"it has more than the {MAX_PASSES:,} passes that the page draws")


def _object(data: object, field: str) -> dict[str, object]:
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise FieldError(field, f"{field} must be an object")
    return data


def _known(body: dict[str, object], keys: Sequence[str], field: str = "request") -> None:
    for key in body:
        if key not in keys:
            raise FieldError(field, f"there is no field {key!r:.60}; known are {', '.join(keys)}")


def _choice(value: object, choices: Sequence[str], field: str) -> str:
    if not isinstance(value, str) or value not in choices:
        raise FieldError(field, f"{value!r:.60} is none of {', '.join(choices)}")
    return value


def _whole(value: object, field: str, maximum: int) -> int:
    if not is_whole(value):
        raise FieldError(field, f"enter a whole number from 1 to {maximum:,}")
    if not 1 <= value <= maximum:
        value_text = f"{value:,}" if abs(value) < 10**15 else "this"
        raise FieldError(field, f"{value_text} is outside 1 to {maximum:,}")
    return value


def _number(
    value: object, field: str, minimum: float | None = None, maximum: float = _LARGEST
) -> float:
    requirement = "a number of at least 0" if minimum is None else f"a number above {minimum:g}"
    if not is_number(value):
        raise FieldError(field, f"enter {requirement}")
    if isinstance(value, float) and not math.isfinite(value):
        raise FieldError(field, f"enter {requirement}")
    if value < 0 or (minimum is not None and value <= minimum):
        raise FieldError(field, f"{float(value):g} is too small; enter {requirement}")
    if value > maximum:
        raise FieldError(field, f"the value is too large; enter at most {maximum:g}")
    return float(value)
