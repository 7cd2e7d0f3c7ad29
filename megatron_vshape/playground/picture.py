"""A timeline as the page reads it: a header in JSON, then the passes as typed arrays.

393,216 passes are 12 MB that the browser uses as they lie, where JSON would be parsed for a second.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from megatron_vshape.core.check.simulate import held_curve, peak_held
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import NeedTable
from megatron_vshape.core.model.placement import chunks_of
from megatron_vshape.core.model.schedule import Timeline
from megatron_vshape.view.names import display_name
from megatron_vshape.view.numbers import messages_per_microbatch
from megatron_vshape.view.palette import ink, shade

KINDS = (Kind.F, Kind.B, Kind.W, Kind.BW)
"""The number of a kind in the arrays is its place here."""

ARRAYS = (
    ("start", "<f8"),
    ("end", "<f8"),
    ("held", "<f4"),
    ("late", "<f4"),
    ("microbatch", "<u4"),
    ("stage", "<u2"),
    ("kind", "u1"),
)
"""In this order behind the header, so that each begins at a multiple of its width."""


@dataclass(frozen=True, slots=True)
class Period:
    """Where one repeat of the building block begins, how long it is, and whose passes it has."""

    start: float
    length: float
    first_microbatch: int
    microbatches: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What stands beside a timeline and does not follow from it alone."""

    in_bytes: bool = False
    """Whether memory is bytes; else it is chunks."""

    in_us: bool = False
    """Whether times are microseconds; else the reader knows their unit."""

    in_passes: bool = False
    """Whether times are in passes of equal length, whatever the unit of the costs."""

    limit: float | None = None
    """Memory limit per rank, in the memory unit of the costs."""

    base_peak: float | None = None
    """Peak of 1F1B, in the same unit."""

    lower_bound: float | None = None
    bounded: str = "makespan"
    """Objective of the lower bound."""

    period: Period | None = None
    title: str = ""
    note: str = ""
    recipe: str = ""
    """The arguments of `megatron-vshape` that make this schedule again."""

    no_recipe: str = ""
    """Why no command makes it, where the reader may wonder."""

    train: str = ""
    """The name by which `--pipeline-schedule` runs it; empty where only a file of it can be."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A timeline with its costs and facts; `late` is by how much each pass was late, if known."""

    timeline: Timeline
    costs: Costs
    facts: Facts = field(default_factory=Facts)
    late: tuple[tuple[float, ...], ...] | None = None


def encode(pictures: Sequence[Picture], more: Mapping[str, object] | None = None) -> bytes:
    """Return the header's length, the header and the arrays of all pictures."""
    header = {**(more or {}), "timelines": [_header(each) for each in pictures]}
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-(len(text) + 4) % 8)
    parts = [struct.pack("<I", len(text)), text]
    for picture in pictures:
        for column, (_, dtype) in zip(_columns(picture), ARRAYS, strict=True):
            data = np.asarray(column, dtype=dtype).tobytes()
            parts += [data, b"\0" * (-len(data) % 8)]
    return b"".join(parts)


def _columns(picture: Picture) -> Iterable[np.ndarray]:
    timeline, order = picture.timeline, picture.timeline.schedule.order
    place = {kind: at for at, kind in enumerate(KINDS)}
    devices = range(timeline.schedule.num_devices)
    # of other kinds, such as copies, the page shows what they leave in memory
    drawn = np.fromiter((work.kind in place for row in order for work in row), np.bool_)
    passes = [work for row in order for work in row if work.kind in place]
    size = len(passes)
    yield _flat(timeline.starts)[drawn]
    yield _flat(timeline.ends)[drawn]
    curves = [held_curve(timeline.schedule, picture.costs, device) for device in devices]
    yield _flat(curves)[drawn]
    yield np.zeros(size) if picture.late is None else _flat(picture.late)[drawn]
    yield np.fromiter((work.microbatch for work in passes), np.uint32, size)
    yield np.fromiter((work.stage for work in passes), np.uint16, size)
    yield np.fromiter((place[work.kind] for work in passes), np.uint8, size)


def _flat(rows: Sequence[Sequence[float]]) -> np.ndarray:
    return np.concatenate([np.asarray(row, dtype=np.float64) for row in rows])


def _header(picture: Picture) -> dict[str, object]:
    timeline, costs = picture.timeline, picture.costs
    schedule = timeline.schedule
    table = NeedTable(schedule.num_stages)
    return {
        "title": picture.facts.title or display_name(schedule.name),
        "devices": schedule.num_devices,
        "microbatches": schedule.num_microbatches,
        "placement": schedule.placement,
        "chunks": chunks_of(schedule.placement),
        "counts": [sum(work.kind in KINDS for work in row) for row in schedule.order],
        "needs": [table.needs[part] for part in table.parts],
        "parts": [table.parts_of[kind] for kind in KINDS],
        "held_after_forward": costs.held_after_forward_bytes,
        "send": costs.send_us,
        "has_late": picture.late is not None,
        "numbers": _numbers(picture),
        "facts": asdict(picture.facts),
    }


def _numbers(picture: Picture) -> dict[str, object]:
    timeline = picture.timeline
    messages, relative = messages_per_microbatch(timeline.schedule)
    makespan, span, busy = timeline.makespan, timeline.span, timeline.busy  # each a look at all
    return {
        "makespan": makespan,
        "span": span,
        "busy": busy,
        "bubble": (makespan - busy) / makespan,
        "span_bubble": 1 - busy / span,
        "peaks": peak_held(timeline.schedule, picture.costs),
        "messages": messages,
        "relative_messages": relative,
    }


def palette() -> dict[str, object]:
    """Return the colours of figures, by kind, for up to eight chunks a device."""
    sizes = range(1, 9)
    kinds = (Kind.F, Kind.B, Kind.W)
    fills = [[[shade(k, c, n) for c in range(n)] for k in kinds] for n in sizes]
    return {
        "fills": fills,
        "inks": [[[ink(colour) for colour in row] for row in rows] for rows in fills],
    }
