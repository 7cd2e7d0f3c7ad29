"""Binary format of a timeline for the browser: a JSON header, then the passes as typed arrays.

393,216 passes are 12 MB that the browser uses without parsing; JSON would need a second.
"""

import io
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from megatron_vshape.core.check.simulate import held_curve, peak_held, simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind, NeedTable, ScheduleError
from megatron_vshape.core.model.placement import chunks_of
from megatron_vshape.core.model.schedule import Schedule, Timeline
from megatron_vshape.core.paper.blocks import BuildingBlock, repeat, squeeze
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.view.chrome_trace import write_trace
from megatron_vshape.view.names import display_name, ink, placement_text, shade
from megatron_vshape.view.numbers import base_peak, messages_per_microbatch

KINDS = (Kind.F, Kind.B, Kind.W, Kind.BW)
"""The index of a kind is its number in the arrays."""

ARRAYS = (
    ("start", "<f8"),
    ("end", "<f8"),
    ("held", "<f4"),
    ("microbatch", "<u4"),
    ("stage", "<u2"),
    ("kind", "u1"),
)
"""Arrays after the header, in an order that aligns each to a multiple of its width."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Context of a timeline that does not follow from it."""

    in_bytes: bool = False
    """Whether memory is in bytes and time in microseconds; else in chunks and the user's unit."""

    in_passes: bool = False
    """Whether times are in passes of equal length, regardless of the costs' unit."""

    limit: float | None = None
    """Memory limit per rank, in the memory unit of the costs."""

    base_peak: float | None = None
    """Peak of 1F1B, in the same unit."""

    lower_bound: float | None = None
    bounded: str = "makespan"
    """Objective of the lower bound."""

    title: str = ""
    note: str = ""
    recipe: str = ""
    """Arguments of `megatron-vshape` that make this schedule."""

    train: str = ""
    """Name for `--pipeline-schedule`; empty if only a schedule file can be used."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A timeline with its costs and facts."""

    timeline: Timeline
    costs: Costs
    facts: Facts = field(default_factory=Facts)


def encode(pictures: Sequence[Picture]) -> bytes:
    """Encode pictures: the header's length, the header and all arrays."""
    header = {"timelines": [_header(picture) for picture in pictures]}
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
    kind_number = {kind: number for number, kind in enumerate(KINDS)}
    devices = range(timeline.schedule.num_devices)
    # Other kinds, such as copies, are not drawn; the memory curve shows their effect.
    is_drawn = np.fromiter((work.kind in kind_number for row in order for work in row), np.bool_)
    passes = [work for row in order for work in row if work.kind in kind_number]
    size = len(passes)
    yield _flat(timeline.starts)[is_drawn]
    yield _flat(timeline.ends)[is_drawn]
    curves = [held_curve(timeline.schedule, picture.costs, device) for device in devices]
    yield _flat(curves)[is_drawn]
    yield np.fromiter((work.microbatch for work in passes), np.uint32, size)
    yield np.fromiter((work.stage for work in passes), np.uint16, size)
    yield np.fromiter((kind_number[work.kind] for work in passes), np.uint8, size)


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


def palette(*, is_dark: bool = False) -> dict[str, object]:
    """Return the colors by kind on a light or dark background, for up to eight chunks per rank."""
    sizes = range(1, 9)
    kinds = (Kind.F, Kind.B, Kind.W)
    fills = [[[shade(k, c, n, is_dark=is_dark) for c in range(n)] for k in kinds] for n in sizes]
    return {
        "fills": fills,
        "inks": [[[ink(colour) for colour in row] for row in rows] for rows in fills],
    }


def size_note(schedule: Schedule) -> str:
    """Format the size and the placement of a schedule."""

    def count(number: int, word: str, plural: str) -> str:
        return f"{number:,} {word if number == 1 else plural}"

    return (
        f"{count(schedule.num_devices, 'rank', 'ranks')}, "
        f"{count(schedule.num_microbatches, 'microbatch', 'microbatches')}, "
        f"{count(sum(map(len, schedule.order)), 'pass', 'passes')}; "
        f"{placement_text(schedule)}"
    )


def trace_text(picture: Picture) -> str:
    """Return the Perfetto trace of a picture."""
    stream = io.StringIO()
    unit = "bytes" if picture.facts.in_bytes else "chunks"
    write_trace(picture.timeline, stream, picture.costs, unit)
    return stream.getvalue()


_STEP_TITLES = ("1  Building block", "2  Repeated", "3  Squeezed", "4  Reordered")


def step_pictures(block: BuildingBlock, last: Schedule) -> Iterator[Picture]:
    """Yield the block, its repeats, the squeezed schedule, and `last`, made from them."""
    stages, devices = len(block.placement), block.num_devices
    num_microbatches = last.num_microbatches
    costs = Costs.uniform(devices, stages)
    block_microbatches = min(block.num_microbatches, num_microbatches)
    slot = 2 * devices / stages
    repeated = _scaled(repeat(block, num_microbatches), slot)
    squeezed = squeeze(repeated)
    timelines = (
        _scaled(repeat(block, block_microbatches), slot),
        repeated,
        simulate(squeezed, costs),
        simulate(last, costs),
    )
    notes = (
        f"The passes of one microbatch. The next one starts T = {block.interval} slots later.",
        "A copy every T slots. No two passes meet, and every lifespan is as the block's.",
        "Every rank drops its redundant idle time; the order of its passes stays.",
        "Passes move into the idle slots of warm-up and cool-down, within the same memory."
        if last.order != squeezed.order
        else "Nothing to do: no pass of this schedule finds a better place.",
    )
    base = base_peak(devices)
    for index, timeline in enumerate(timelines):
        facts = Facts(in_passes=True, base_peak=base, title=_STEP_TITLES[index], note=notes[index])
        yield Picture(timeline, costs, facts)


def _scaled(timeline: Timeline, scale: float) -> Timeline:
    def rows(times: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(time * scale for time in row) for row in times)

    return Timeline(timeline.schedule, rows(timeline.starts), rows(timeline.ends))


def catalogue_name(schedule: Schedule) -> str:
    """Return the schedule's name if the catalogue makes exactly this schedule; otherwise empty."""
    try:
        catalogue_schedule = make(schedule.name, schedule.num_devices, schedule.num_microbatches)
    except ScheduleError:
        return ""
    return schedule.name if catalogue_schedule == schedule else ""
