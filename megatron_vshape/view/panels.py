"""Parts of a figure: rows of passes, building block, memory, legend.

A panel draws into axes with y downward from 0, one unit per device. Passes of one color form one
path, so that figures with tens of thousands of passes stay fast and small.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import PROCESSOR, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import chunks_of, stages_of
from megatron_vshape.core.model.schedule import Schedule, Timeline
from megatron_vshape.core.paper.building_block import BuildingBlock
from megatron_vshape.view.names import HELD_COLOUR, ink, shade, tint
from megatron_vshape.view.numbers import costs_up_to, held_steps

IDLE = "#ececec"
LINE = "#1a1a1a"
QUIET = "#6b6b6b"
LIMIT = "#b3001b"

SMALLEST_TEXT = 4.0
"""Points; smaller numbers are illegible and omitted."""

LARGEST_TEXT = 7.0
DIGIT_WIDTH = 0.64
"""Width of a digit in units of the font size."""

_TOP, _BOTTOM = 0.06, 0.94
_MIDDLE = (_TOP + _BOTTOM) / 2


class Bar(NamedTuple):
    """A pass to draw, with time and row in the units of the axes."""

    work: Pass
    row: int
    start: float
    end: float
    top: float = _TOP  # within its row
    bottom: float = _BOTTOM


Box = tuple[float, float, float, float]
"""A rectangle in the units of the axes: left, right, top, bottom."""


@dataclass(frozen=True, slots=True)
class PointScale:
    """Points per unit of x and per row of the axes."""

    x: float
    row: float


def bars_of(timeline: Timeline, time_scale: float = 1.0) -> list[Bar]:
    """Return the timeline's passes, starting at 0, with times multiplied by `time_scale`."""
    first = timeline.first_start
    lanes = timeline.schedule.lanes()
    heights = {
        device: _heights([lane.resource for lane in lanes if lane.device == device])
        for device in range(timeline.schedule.num_devices)
    }
    pairs = timeline.schedule.overlapped_pairs().items()
    lower_part = {half: place for pair in pairs for place, half in enumerate(pair)}

    def height(device: int, work: Pass) -> tuple[float, float]:
        """Return the vertical extent of a pass; in an F&B pair, F has the upper half."""
        top, bottom = heights[device][work.kind.resource]
        if work not in lower_part:
            return top, bottom
        middle = (top + bottom) / 2
        return (middle, bottom) if lower_part[work] else (top, middle)

    return [
        Bar(
            work,
            device,
            (start - first) * time_scale,
            (end - first) * time_scale,
            *height(device, work),
        )
        for device in heights
        for work, start, end in timeline.slots(device)
        if end > start
    ]


def _heights(resources: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return the vertical extent of each resource of a device.

    The processor has the complete row, or two thirds if there are other resources.
    """
    upper = _BOTTOM if len(resources) == 1 else _TOP + (_BOTTOM - _TOP) * 2 / 3
    heights = {PROCESSOR: (_TOP, upper)}
    others = [resource for resource in resources if resource != PROCESSOR]
    each = (_BOTTOM - upper) / max(len(others), 1)
    for at, resource in enumerate(others):
        heights[resource] = (upper + at * each, upper + (at + 1) * each)
    return heights


def draw_idle(axes: Axes, num_devices: int, end: float, row_points: float) -> None:
    """Draw every device's row from 0 to `end` in the color of idle time, with its number."""
    boxes = [(0.0, end, row + _TOP, row + _BOTTOM) for row in range(num_devices)]
    axes.add_patch(PathPatch(_outline(boxes), facecolor=IDLE, edgecolor="none", gid="idle"))
    number_rows(axes, num_devices, row_points)


def number_rows(axes: Axes, num_devices: int, row_points: float) -> None:
    """Write the devices' numbers left of their rows; every second or fourth if rows are low."""
    every = max(1, math.ceil(7.0 / row_points))
    size = min(LARGEST_TEXT, max(SMALLEST_TEXT + 1, row_points * 0.6))
    for row in range(0, num_devices, every):
        axes.annotate(
            str(row),
            (0, row + _MIDDLE),
            xytext=(-4, 0),
            textcoords="offset points",
            ha="right",
            va="center_baseline",
            size=size,
            color=QUIET,
            annotation_clip=False,
        )


def draw_passes(
    axes: Axes, bars: Iterable[Bar], chunks: Sequence[int], scale: PointScale, faint: bool = False
) -> None:
    """Draw the bars in their colors; the parts of a full backward are stacked.

    `chunks[stage]` decides the shade. A white edge separates passes that are wide enough.
    """
    bars = list(bars)
    if not bars:
        return
    typical = typical_length(bar.end - bar.start for bar in bars) * scale.x
    edge = min(0.6, 0.12 * typical)
    split: dict[tuple[Kind, int], list[Box]] = {}
    whole: dict[tuple[Kind, int], list[Box]] = {}
    for (kind, stage, _), row, start, end, top, bottom in bars:
        chunk = chunks[stage]
        if len(kind.does) == 1:
            split.setdefault((kind, chunk), []).append((start, end, row + top, row + bottom))
            continue
        # Stacked parts have no edge, which would cut the number in two, but smaller boxes.
        x, y = edge / 2 / scale.x, edge / 2 / scale.row
        levels = [top + (bottom - top) * at / len(kind.does) for at in range(len(kind.does) + 1)]
        levels[0], levels[-1] = top + y, bottom - y
        for part, (above, below) in zip(kind.does, pairwise(levels), strict=True):
            box = (start + x, end - x, row + above, row + below)
            whole.setdefault((part, chunk), []).append(box)
    for group, boxes, width in (("passes", split, edge), ("whole", whole, 0.0)):
        for (kind, chunk), mine in sorted(boxes.items()):
            patch = PathPatch(_outline(mine), edgecolor="white", linewidth=width)
            patch.set_facecolor(shade(kind, chunk, max(chunks) + 1))
            patch.set_gid(f"{'copies-' if faint else ''}{group}-{kind}-chunk{chunk}")
            patch.set_alpha(0.22 if faint else None)
            patch.set_clip_on(False)
            axes.add_patch(patch)


def number_passes(axes: Axes, bars: Sequence[Bar], schedule: Schedule, scale: PointScale) -> None:
    """Write the position, as 3 or 3/1, into every pass that is wide enough.

    Only passes of the processor are high enough. Nothing is written if most are too small.
    """
    chunks = chunks_of(schedule.placement)
    bars = [bar for bar in bars if bar.work.kind.resource == PROCESSOR]
    texts = ["/".join(map(str, schedule.position(bar.work).values())) for bar in bars]
    typical = typical_length(bar.end - bar.start for bar in bars) * scale.x
    size = text_size(typical, scale.row, max(map(len, texts)))
    if size is None:
        return
    for bar, text in zip(bars, texts, strict=True):
        own = min(size, size * (bar.bottom - bar.top) / (_BOTTOM - _TOP) * 1.6)
        if len(text) * DIGIT_WIDTH * own <= (bar.end - bar.start) * scale.x:
            _write(axes, bar, text, own, chunks)


def typical_length(lengths: Iterable[float]) -> float:
    """Return the 25th percentile of the lengths, because short passes must be readable too."""
    return float(np.percentile(list(lengths), 25))


def text_size(width: float, height: float, digits: float) -> float | None:
    """Return the font size for `digits` digits in a box given in points; None if too small."""
    size = min(LARGEST_TEXT, 0.62 * height, 0.86 * width / (digits * DIGIT_WIDTH))
    return round(size, 1) if size >= SMALLEST_TEXT else None


def draw_block(axes: Axes, block: BuildingBlock, scale: PointScale) -> None:
    """Draw one block, faint repeats behind it, and the interval."""
    chunks = chunks_of(block.placement)
    end = max(each.end for each in block.passes)
    bars = [
        Bar(each.work, block.placement[each.work.stage], each.start, each.end)
        for each in block.passes
    ]
    number_rows(axes, block.num_devices, scale.row)
    copies = [
        Bar(bar.work, bar.row, bar.start + shift, bar.end + shift)
        for shift in range(block.interval, end, block.interval)
        for bar in bars
        if bar.end + shift <= end
    ]
    draw_passes(axes, copies, chunks, scale, faint=True)
    draw_passes(axes, bars, chunks, scale)
    _letter_block(axes, bars, chunks, scale, block.num_microbatches)
    arrow = {"arrowstyle": "<->", "lw": 0.6, "color": QUIET, "shrinkA": 0, "shrinkB": 0}
    first = min(bar.start for bar in bars if bar.row == 0)
    low = -3.5 / scale.row
    axes.annotate(
        "", (first, low), (first + block.interval, low), arrowprops=arrow, annotation_clip=False
    )
    axes.annotate(
        f"T = {block.interval}",
        (first + block.interval, low),
        xytext=(3, 0),
        textcoords="offset points",
        va="center_baseline",
        size=LARGEST_TEXT - 0.5,
        color=QUIET,
        annotation_clip=False,
    )


def _letter_block(
    axes: Axes, bars: Sequence[Bar], chunks: Sequence[int], scale: PointScale, num_microbatches: int
) -> None:
    """Write F, B or W into each pass, with its microbatch if the block has several."""
    several = num_microbatches > 1
    size = text_size(scale.x, scale.row, 2.6 if several else 1.6)  # W is 1.6 digits wide
    if size is None:
        return
    for bar in bars:
        number = str(bar.work.microbatch) if several else ""
        _write(axes, bar, bar.work.kind + number, size, chunks)


def lifespan_notes(block: BuildingBlock) -> list[str]:
    """Format, for every device, its lifespans in intervals and the resulting bound in chunks."""
    chunks_a_stage = Fraction(2 * block.num_devices, len(block.placement))
    lives, bounds = block.lives(), block.peak_bounds()
    notes = []
    for device, stages in enumerate(stages_of(block.placement, block.num_devices)):
        spans = [
            lives[stage, microbatch][1] - lives[stage, microbatch][0]
            for stage in stages
            for microbatch in range(block.num_microbatches)
        ]
        text = " + ".join(f"⌈{span}/{block.interval}⌉" for span in spans)
        if chunks_a_stage != 1:
            text = f"{chunks_a_stage} × " + (f"({text})" if len(spans) > 1 else text)
        notes.append(f"{text} = {float(chunks_a_stage * bounds[device]):.4g}")
    return notes


def draw_held(
    axes: Axes,
    timeline: Timeline,
    costs: Costs,
    top: float,
    time_scale: float,
    limit: float | None,
) -> None:
    """Draw each device's memory as an area in its row, stacked by chunk; a row is `top` high.

    The limit is a dashed line through every row.
    """
    num_chunks = timeline.schedule.num_chunks
    first = timeline.first_start
    room = (_BOTTOM - _TOP) / top
    for chunk in reversed(range(num_chunks)):
        upto = costs_up_to(timeline, costs, chunk)
        areas = []
        for device in range(timeline.schedule.num_devices):
            steps = held_steps(timeline, upto, device)
            if steps:
                areas.append(_area(steps, device + _BOTTOM, room, first, time_scale))
        colour = tint(HELD_COLOUR, chunk, num_chunks)
        outline = Outline.make_compound_path(*areas)
        patch = PathPatch(outline, facecolor=colour, edgecolor="none", gid=f"held-chunk{chunk}")
        axes.add_patch(patch)
    for device in range(timeline.schedule.num_devices):
        axes.axhline(device + _BOTTOM, color=QUIET, lw=0.4)
        if limit is not None:
            axes.axhline(device + _BOTTOM - room * limit, color=LIMIT, lw=0.6, ls=(0, (4, 2)))


def _area(
    steps: Sequence[tuple[float, float]], base: float, room: float, first: float, time_scale: float
) -> Outline:
    """Return the area under a step curve with its base line at `base`."""
    times = np.repeat([(time - first) * time_scale for time, _ in steps], 2)
    heights = np.zeros(len(times))
    heights[1::2] = [held for _, held in steps]
    heights[2::2] = heights[1:-1:2]
    points = np.column_stack([times, base - room * heights])
    return Outline(np.vstack([points, points[:1]]), closed=True)


def _write(axes: Axes, bar: Bar, text: str, size: float, chunks: Sequence[int]) -> None:
    kind = bar.work.parts()[0]
    axes.text(
        (bar.start + bar.end) / 2,
        bar.row + (bar.top + bar.bottom) / 2,
        text,
        size=size,
        ha="center",
        va="center_baseline",
        color=ink(shade(kind, chunks[bar.work.stage], max(chunks) + 1)),
    )


def _outline(boxes: Sequence[Box]) -> Outline:
    """Return one path of all boxes."""
    left, right, top, bottom = np.array(boxes).T
    x = np.stack([left, right, right, left], axis=1)
    y = np.stack([top, top, bottom, bottom], axis=1)
    return Outline.make_compound_path_from_polys(np.stack([x, y], axis=2))
