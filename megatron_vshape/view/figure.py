"""Publication-quality figures: one schedule with its block and memory, or several schedules.

Simulated and measured timelines are drawn in the same way. Figures do not use pyplot, so they have
no global state, and equal input gives equal bytes.
"""

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Outline

from megatron_vshape.core.check.simulate import peak_held, unit_costs
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import KINDS, PROCESSOR, Kind, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import chunks_of, stages_of
from megatron_vshape.core.model.schedule import Timeline
from megatron_vshape.core.paper.blocks import BuildingBlock
from megatron_vshape.view.names import HELD_COLOUR, display_name, ink, plain, shade
from megatron_vshape.view.numbers import held_steps

FORMATS = (".svg", ".png", ".pdf")
"""File suffixes that `save` supports."""

_DOTS_PER_INCH = 200

_FONT_NAMES = ["DejaVu Sans", "Verdana", "Arial"]  # the first comes with matplotlib
_FONTS = ", ".join([*(f"'{name}'" for name in _FONT_NAMES), "sans-serif"])
_STYLE: dict[Any, Any] = {
    "font.family": ["sans-serif"],
    "font.sans-serif": _FONT_NAMES,
    "svg.fonttype": "none",  # text stays text: small, searchable, accessible
    "svg.hashsalt": "megatron-vshape",
    "pdf.fonttype": 42,
    "path.simplify": False,
    "axes.linewidth": 0.5,
    "xtick.major.width": 0.5,
    "xtick.major.size": 2.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 6.5,
    "ytick.major.size": 0,
    "axes.titlesize": 8,
    "axes.labelsize": 7,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "legend.fontsize": 7,
    "legend.title_fontsize": 7,
    "legend.frameon": False,
    "text.parse_math": False,  # a schedule file's name may contain a dollar sign
}
_METADATA: dict[str, dict[str, str | None]] = {
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}

# All lengths are points, 1/72 inch.
_NARROWEST, _WIDEST = 430.0, 1150.0
_PASS_WIDTH = 8.2  # of a typical pass, unless the figure becomes too wide
_HELD_ROW = 1.4  # height of a memory row, in rows of passes
_CELL = 13.0  # largest width of a slot of the building block
_SMALLEST_TEXT, _LARGEST_TEXT = 4.0, 7.0  # smaller numbers are illegible and omitted
_DIGIT = 0.64  # width of a digit in units of the font size

_IDLE, _LINE, _QUIET, _LIMIT = "#ececec", "#1a1a1a", "#6b6b6b", "#b3001b"
_TOP, _BOTTOM = 0.06, 0.94  # of a row

Box = tuple[float, float, float, float]
"""A rectangle in the units of the axes: left, right, top, bottom."""


class Bar(NamedTuple):
    """A pass to draw, with time and row in the units of the axes."""

    work: Pass
    row: int
    start: float
    end: float
    top: float = _TOP  # within its row
    bottom: float = _BOTTOM


@dataclass(frozen=True, slots=True)
class Units:
    """Scales and labels of times and memory in a figure."""

    time_label: str = "time, in passes of one chunk"
    time_scale: float = 1.0
    held_label: str = "chunks"
    held_scale: float = 1.0


CHUNKS = Units()
MILLISECONDS_AND_GIB = Units("time, ms", 1e-3, "GiB", 2.0**-30)


@dataclass(frozen=True, slots=True)
class Limit:
    """A line across the memory curves, in the unit of the costs' memory."""

    held: float
    label: str


def schedule_figure(
    timeline: Timeline,
    costs: Costs | None = None,
    *,
    title: str | None = None,
    note: str = "",
    block: BuildingBlock | None = None,
    limit: Limit | None = None,
    units: Units = CHUNKS,
) -> Figure:
    """Draw a schedule, the memory of its devices and, if given, its building block.

    >>> from megatron_vshape import make, schedule_figure, simulate
    >>> schedule_figure(simulate(make("v-half", 4, 8)))
    <Figure size ...>
    """
    costs = unit_costs(timeline.schedule) if costs is None else costs
    name = display_name(title or timeline.schedule.name)
    heights = [1.0] * (block is not None) + [1.0, _HELD_ROW]
    with _style():
        figure, panels = _panels([timeline], heights, units)
        _draw_schedule(panels[-2], timeline, units, "Schedule" if block else name, note)
        _draw_memory(panels[-1], timeline, costs, limit, units)
        if block is not None:
            _draw_block(panels[0], block, f"{name}: building block")
            figure.draw_without_rendering()  # places the panels
            letters = [
                block_pass.work.kind + "0" * (block.num_microbatches > 1)
                for block_pass in block.passes
            ]
            _write_in(panels[0], _bars_of_block(block), letters, chunks_of(block.placement))
        _number_passes(figure, panels[-2:-1], [timeline], units)
        return figure


def comparison_figure(
    timelines: Sequence[Timeline],
    titles: Sequence[str],
    notes: Sequence[str],
    units: Units = CHUNKS,
) -> Figure:
    """Draw schedules one above the other on a common time axis, each with its note."""
    with _style():
        figure, panels = _panels(timelines, [1.0] * len(timelines), units)
        for axes, timeline, title, note in zip(panels, timelines, titles, notes, strict=True):
            _draw_schedule(axes, timeline, units, display_name(title), note)
            length = timeline.makespan * units.time_scale
            axes.axvline(length, color=_LINE, lw=0.7)
            _note(axes, f"{length:.4g}", (length, 0.5))
        _number_passes(figure, panels, timelines, units)
        return figure


def save(figure: Figure, path: str | Path) -> None:
    """Write the figure to a .svg, .png or .pdf file.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from megatron_vshape import make, save, schedule_figure, simulate
    >>> with TemporaryDirectory() as folder:
    ...     save(schedule_figure(simulate(make("1f1b", 2, 2))), f"{folder}/mine.svg")
    ...     [path.name for path in Path(folder).iterdir()]
    ['mine.svg']

    Raises:
        ScheduleError: the suffix is not supported.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise ScheduleError(f"{path}: a figure's name must end in one of {', '.join(FORMATS)}")
    buffer = io.BytesIO()
    with _style(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(
            buffer,
            format=suffix.lstrip("."),
            dpi=_DOTS_PER_INCH,
            metadata=_METADATA[suffix],
        )
    content = buffer.getvalue()
    path.write_bytes(_lighten(content.decode()).encode() if suffix == ".svg" else content)


def _lighten(svg: str) -> str:
    """Move attributes that all texts of the SVG share into its style; this halves the size."""
    svg = re.sub(r'<g id="text_\d+">\s*(<text [^\n]*</text>)\s*</g>', r"\1", svg)
    svg = re.sub(r'(<text [^>]*) transform="rotate\(-0 [^"]*"', r"\1", svg)
    svg = svg.replace(f"font-family: {_FONTS}; ", "")
    return svg.replace("</style>", f" text{{font-family: {_FONTS}}}</style>", 1)


@contextmanager
def _style() -> Iterator[None]:
    """Set the figures' style regardless of the user's style, and restore that at the end."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def _panels(
    timelines: Sequence[Timeline], heights: Sequence[float], units: Units
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a legend, and its panels on a common time axis."""
    end = max(timeline.makespan for timeline in timelines) * units.time_scale
    devices = max(timeline.schedule.num_devices for timeline in timelines)
    bars = [bar for timeline in timelines for bar in bars_of(timeline, units)]
    full_width = _PASS_WIDTH * end / _typical_length(bars)
    row = min(15.0, max(5.0, 120.0 / devices))
    height = sum(heights) * devices * row + 26 * len(heights) + 44
    width = min(max(full_width, _NARROWEST), _WIDEST) + 64
    figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    for axes in panels:
        axes.set(xlim=(0, end), ylim=(devices, 0))
        axes.xaxis.set_visible(axes is panels[-1])
        axes.spines["bottom"].set_visible(axes is panels[-1])
        row_step = max(1, math.ceil(7.0 / row))
        rows = range(0, devices, row_step)
        axes.set_yticks(
            [row_number + 0.5 for row_number in rows],
            [str(row_number) for row_number in rows],
            color=_QUIET,
        )
        axes.set_ylabel("rank", size=6.5, color=_QUIET)
    panels[-1].set_xlabel(units.time_label)
    _add_legend(figure, timelines)
    return figure, list(panels)


def _add_legend(figure: Figure, timelines: Sequence[Timeline]) -> None:
    """Draw a labeled swatch per kind and shade; those of a full backward are its parts'."""
    drawn = {kind for timeline in timelines for kind in timeline.schedule.kinds}
    kinds = [kind for kind in KINDS if kind in drawn]
    chunks = max(timeline.schedule.num_chunks for timeline in timelines)
    swatches: list[Any] = [
        tuple(Patch(color=shade(p, c, chunks)) for c in range(chunks) for p in kind.does)
        for kind in kinds
    ]
    figure.legend(
        swatches,
        [kind.label for kind in kinds],
        title=f"chunk 0 dark to chunk {chunks - 1} light" if chunks > 1 else None,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="outside lower center",
        ncols=len(kinds),
    )


def _draw_schedule(axes: Axes, timeline: Timeline, units: Units, title: str, note: str) -> None:
    """Draw the passes of every device over the color of idle time."""
    _set_title(axes, title, note)
    length = timeline.makespan * units.time_scale
    rows = range(timeline.schedule.num_devices)
    idle = _outline([(0.0, length, row + _TOP, row + _BOTTOM) for row in rows])
    axes.add_patch(PathPatch(idle, facecolor=_IDLE, edgecolor="none", gid="idle"))
    _draw_passes(axes, bars_of(timeline, units), chunks_of(timeline.schedule.placement))


def bars_of(timeline: Timeline, units: Units = CHUNKS) -> list[Bar]:
    """Return the timeline's passes, starting at 0."""
    first = timeline.first_start
    lanes = timeline.schedule.queues()
    heights = {
        device: _heights([lane.resource for lane in lanes if lane.device == device])
        for device in range(timeline.schedule.num_devices)
    }
    pairs = timeline.schedule.overlapped_pairs().items()
    lower_part = {half: index for pair in pairs for index, half in enumerate(pair)}

    def height(device: int, work: Pass) -> tuple[float, float]:
        """Return the vertical extent of a pass; in an F&B pair, F has the upper half."""
        top, bottom = heights[device][work.kind.resource]
        if work not in lower_part:
            return top, bottom
        middle = (top + bottom) / 2
        return (middle, bottom) if lower_part[work] else (top, middle)

    scale = units.time_scale
    return [
        Bar(work, device, (start - first) * scale, (end - first) * scale, *height(device, work))
        for device in heights
        for work, start, end in timeline.slots(device)
        if end > start
    ]


def _heights(resources: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return the vertical extent of each resource of a device.

    The processor has the complete row, or two thirds if there are other resources.
    """
    upper = _BOTTOM if len(resources) == 1 else _TOP + (_BOTTOM - _TOP) * 2 / 3
    other_resources = [resource for resource in resources if resource != PROCESSOR]
    levels = np.linspace(upper, _BOTTOM, len(other_resources) + 1).tolist()
    return {PROCESSOR: (_TOP, upper)} | dict(zip(other_resources, pairwise(levels), strict=True))


def _draw_passes(
    axes: Axes, bars: Sequence[Bar], chunks: Sequence[int], faint: bool = False
) -> None:
    """Draw the bars in their colors; the parts of a full backward are stacked.

    `chunks[stage]` decides the shade. Passes of one color form one path, so that figures with tens
    of thousands of passes stay fast and small.
    """
    if not bars:
        return
    x = _width(axes) / axes.get_xlim()[1]  # points per unit, approximately
    edge = min(0.6, 0.12 * _typical_length(bars) * x)
    boxes: dict[tuple[str, Kind, int], list[Box]] = {}
    for (kind, stage, _), row, start, end, top, bottom in bars:
        levels = np.linspace(row + top, row + bottom, len(kind.does) + 1).tolist()
        # Stacked parts have no edge, which would cut the number in two, but smaller boxes.
        group, gap = ("passes", 0.0) if len(kind.does) == 1 else ("whole", edge / 2 / x)
        for part, (above, below) in zip(kind.does, pairwise(levels), strict=True):
            box = (start + gap, end - gap, above, below)
            boxes.setdefault((group, part, chunks[stage]), []).append(box)
    for (group, kind, chunk), group_boxes in sorted(boxes.items()):
        width = edge if group == "passes" else 0.0
        patch = PathPatch(_outline(group_boxes), edgecolor="white", linewidth=width)
        patch.set_facecolor(shade(kind, chunk, max(chunks) + 1))
        patch.set_gid(f"{'copies-' if faint else ''}{group}-{kind}-chunk{chunk}")
        patch.set_alpha(0.22 if faint else None)
        axes.add_patch(patch)


def _number_passes(
    figure: Figure, panels: Sequence[Axes], timelines: Sequence[Timeline], units: Units
) -> None:
    """Write the position, as 3 or 3/1, into every pass of the processor that is wide enough."""
    figure.draw_without_rendering()  # places the panels
    figure.set_layout_engine("none")  # a second layout would move them a little
    for axes, timeline in zip(panels, timelines, strict=True):
        schedule = timeline.schedule
        processor_bars = [
            bar for bar in bars_of(timeline, units) if bar.work.kind.resource == PROCESSOR
        ]
        texts = ["/".join(map(str, schedule.position(bar.work).values())) for bar in processor_bars]
        _write_in(axes, processor_bars, texts, chunks_of(schedule.placement))


def _write_in(axes: Axes, bars: Sequence[Bar], texts: Sequence[str], chunks: Sequence[int]) -> None:
    """Write a text into every bar that is wide enough; nothing if most bars are too small."""
    extent = axes.get_window_extent()
    x = 72 / axes.figure.dpi * extent.width / axes.get_xlim()[1]  # points per unit
    row = 72 / axes.figure.dpi * extent.height / axes.get_ylim()[0]
    text_width = max(map(len, texts)) * _DIGIT
    size = min(_LARGEST_TEXT, 0.62 * row, 0.86 * _typical_length(bars) * x / text_width)
    if size < _SMALLEST_TEXT:
        return
    for bar, text in zip(bars, texts, strict=True):
        text_size = round(min(size, size * (bar.bottom - bar.top) / (_BOTTOM - _TOP) * 1.6), 1)
        if len(text) * _DIGIT * text_size <= (bar.end - bar.start) * x:
            axes.text(
                (bar.start + bar.end) / 2,
                bar.row + (bar.top + bar.bottom) / 2,
                text,
                size=text_size,
                ha="center",
                va="center_baseline",
                color=ink(shade(bar.work.parts()[0], chunks[bar.work.stage], max(chunks) + 1)),
                in_layout=False,
            )


def _typical_length(bars: Sequence[Bar]) -> float:
    """Return the 25th percentile of the lengths, because short passes must be readable too."""
    return float(np.percentile([bar.end - bar.start for bar in bars], 25))


def _bars_of_block(block: BuildingBlock) -> list[Bar]:
    placement = block.placement
    return [Bar(p.work, placement[p.work.stage], p.start, p.end) for p in block.passes]


def _draw_block(axes: Axes, block: BuildingBlock, title: str) -> None:
    """Draw one block, faint repeats behind it, the interval, and lifespans with bounds."""
    note = "right: upper bound of the peak in chunks, the sum of ceil(lifespan / T)"
    _set_title(axes, title, note, pad=12)
    bars, chunks = _bars_of_block(block), chunks_of(block.placement)
    end = max(bar.end for bar in bars)
    axes.set_xlim(0, max(end, _width(axes) / _CELL))
    copies = [
        bar._replace(start=bar.start + shift, end=bar.end + shift)
        for shift in range(block.interval, int(end), block.interval)
        for bar in bars
        if bar.end + shift <= end
    ]
    _draw_passes(axes, copies, chunks, faint=True)
    _draw_passes(axes, bars, chunks)
    first = min(bar.start for bar in bars if bar.row == 0)
    last = first + block.interval
    arrow = {"arrowstyle": "<->", "lw": 0.6, "color": _QUIET, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (first, -0.3), (last, -0.3), arrowprops=arrow, annotation_clip=False)
    _note(axes, f"T = {block.interval}", (last, -0.3))
    for row, text in enumerate(_lifespan_notes(block)):
        if row in axes.get_yticks() - 0.5:
            _note(axes, text, (end, row + 0.5))


def _lifespan_notes(block: BuildingBlock) -> list[str]:
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
        text = " + ".join(f"ceil({span}/{block.interval})" for span in spans)
        if chunks_a_stage != 1:
            text = f"{chunks_a_stage} × " + (f"({text})" if len(spans) > 1 else text)
        notes.append(f"≤ {float(chunks_a_stage * bounds[device]):.4g} = {text}")
    return notes


def _draw_memory(
    axes: Axes, timeline: Timeline, costs: Costs, limit: Limit | None, units: Units
) -> None:
    """Draw each device's memory as an area in its row, with the limit as a dashed line."""
    peaks = peak_held(timeline.schedule, costs)
    top = max([*peaks, limit.held if limit else 0.0]) or 1.0  # rows need a height without memory
    note = f"{units.held_label}; height of a row: {top * units.held_scale:.4g}"
    if limit is not None:
        limit_text = limit.held * units.held_scale
        note = f"{units.held_label}; dashed line: {limit_text:.4g}, {plain(limit.label)}"
    _set_title(axes, "Activation memory", note)
    scale, first = (_BOTTOM - _TOP) / top, timeline.first_start
    for device, peak in enumerate(peaks):
        base = device + _BOTTOM
        steps = held_steps(timeline, costs, device)
        times = [(time - first) * units.time_scale for time, _ in steps]
        levels = [base - scale * memory for _, memory in steps]
        axes.fill_between(times, base, levels, step="post", color=HELD_COLOUR, lw=0, gid="held")
        axes.axhline(base, color=_QUIET, lw=0.4)
        if limit is not None:
            axes.axhline(base - scale * limit.held, color=_LIMIT, lw=0.6, ls=(0, (4, 2)))
        if device in axes.get_yticks() - 0.5:  # rows are high enough for a note
            _note(axes, f"{peak * units.held_scale:.4g}", (axes.get_xlim()[1], device + 0.5))


def _width(axes: Axes) -> float:
    """Return the width of the figure in points."""
    return 72 * axes.figure.bbox.width / axes.figure.dpi


def _set_title(axes: Axes, title: str, note: str, pad: float = 4.0) -> None:
    axes.set_title(title, loc="left", weight="bold", pad=pad)
    axes.set_title(note, loc="right", size=7, color=_QUIET, pad=pad)


def _note(axes: Axes, text: str, point: tuple[float, float]) -> None:
    """Write a small note to the right of a place in the units of the axes."""
    style: dict[str, Any] = {"size": 6.5, "color": _QUIET, "va": "center_baseline"}
    axes.annotate(
        text, point, xytext=(4, 0), textcoords="offset points", annotation_clip=False, **style
    )


def _outline(boxes: Sequence[Box]) -> Outline:
    """Return one path of all boxes."""
    left, right, top, bottom = np.array(boxes).T
    x = np.stack([left, right, right, left], axis=1)
    y = np.stack([top, top, bottom, bottom], axis=1)
    return Outline.make_compound_path_from_polys(np.stack([x, y], axis=2))
