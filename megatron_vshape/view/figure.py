"""Publication-quality figures: one schedule with its block and memory, or several schedules.

Simulated and measured timelines are drawn in the same way. Figures do not use pyplot, so they have
no global state, and equal input gives equal bytes.
"""

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Rectangle
from matplotlib.textpath import TextPath

from megatron_vshape.core.check.simulate import peak_held, unit_costs
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import KINDS, ScheduleError
from megatron_vshape.core.model.placement import chunks_of
from megatron_vshape.core.model.schedule import Timeline
from megatron_vshape.core.paper.building_block import BuildingBlock
from megatron_vshape.view.names import display_name, plain, shade
from megatron_vshape.view.panels import (
    LINE,
    QUIET,
    PointScale,
    bars_of,
    draw_block,
    draw_held,
    draw_idle,
    draw_passes,
    lifespan_notes,
    number_passes,
    number_rows,
    typical_length,
)

FORMATS = (".svg", ".png", ".pdf")
"""File suffixes that `save` supports."""

DOTS_PER_INCH = 200

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
    "text.parse_math": False,  # a schedule file's name may contain a dollar sign
}
_METADATA: dict[str, dict[str, str | None]] = {
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}

# All lengths are points, 1/72 inch.
_LEFT, _RIGHT = 30.0, 34.0
_NARROWEST, _WIDEST = 430.0, 1150.0
_PASS_WIDTH = 8.2  # of a typical pass, unless the figure becomes too wide
_HEADING = 15.0
_GAP = 9.0
_AXIS = 26.0
_LOWEST_NOTED = 7.0  # lower rows have no space for a note
_HELD_ROW = 1.4  # height of a memory row, in rows of passes


_LIFESPANS = "lifespans / T bound the stored chunks"


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
    with _style():
        page = _Page(timeline.makespan * units.time_scale, [timeline], units)
        name = display_name(title or timeline.schedule.name)
        page.heading(name, note)
        page.legend(timeline.schedule.num_chunks, beside=name)
        if block is not None:
            page.block(block)
        page.schedule(timeline, "Schedule" if block is not None else "")
        page.held(timeline, costs, limit)
        page.time_axis()
        return page.figure()


def comparison_figure(
    timelines: Sequence[Timeline],
    titles: Sequence[str],
    notes: Sequence[str],
    units: Units = CHUNKS,
) -> Figure:
    """Draw schedules one above the other on a common time axis, each with its note."""
    with _style():
        longest = max(each.makespan for each in timelines) * units.time_scale
        page = _Page(longest, timelines, units)
        page.legend(max(each.schedule.num_chunks for each in timelines))
        for timeline, title, note in zip(timelines, titles, notes, strict=True):
            page.schedule(timeline, display_name(title), note, end=True)
        page.time_axis()
        return page.figure()


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
            dpi=DOTS_PER_INCH,
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


class _Page:
    """Stack panels from top to bottom; all lengths are in points."""

    def __init__(self, end: float, timelines: Sequence[Timeline], units: Units) -> None:
        self.end = end
        self.units = units
        lengths = [
            (stop - start) * units.time_scale
            for timeline in timelines
            for starts, stops in zip(timeline.starts, timeline.ends, strict=True)
            for start, stop in zip(starts, stops, strict=True)
            if stop > start
        ]
        drawn = {kind for each in timelines for kind in each.schedule.kinds}
        self.kinds = [kind for kind in KINDS if kind in drawn]
        wanted = _PASS_WIDTH * end / typical_length(lengths)
        self.width = min(max(wanted, _NARROWEST), _WIDEST)
        devices = max(timeline.schedule.num_devices for timeline in timelines)
        self.row = min(15.0, max(5.0, 120.0 / devices))
        self.depth = 6.0
        self.items: list[tuple[Axes, float, float, float]] = []
        self._figure = Figure()
        FigureCanvasAgg(self._figure)

    def figure(self) -> Figure:
        """Return the figure with all panels in their positions."""
        width, height = self.width + _LEFT + _RIGHT, self.depth + 4
        self._figure.set_size_inches(width / 72, height / 72)
        for axes, depth, wide, high in self.items:
            bottom = (height - depth - high) / height
            axes.set_position((_LEFT / width, bottom, wide / width, high / height))
        return self._figure

    def heading(self, title: str, note: str) -> None:
        """Write the title and a note below."""
        axes = self._panel(self.width, 26.0, (0, self.width), 26.0)
        axes.text(-_LEFT + 6, 6, title, size=11, weight="bold", va="center_baseline")
        axes.text(-_LEFT + 6, 20, note, size=7, color=QUIET, va="center_baseline")
        self.depth += 3

    def legend(self, num_chunks: int, beside: str = "") -> None:
        """Draw a labeled swatch per kind and shade, to the right of the title `beside` if it fits.

        Otherwise the legend has a separate row.
        """
        note = f"chunk 0 dark to chunk {num_chunks - 1} light:" if num_chunks > 1 else ""
        swatches = 8 * num_chunks + 3 + 12
        length = sum(_text_width(kind.label, 7) + swatches for kind in self.kinds)
        length += _text_width(note, 7)
        fits = _text_width(beside, 11, bold=True) + 30 + length < self.width + _LEFT + _RIGHT
        overlap = bool(beside) and fits
        axes = self._panel(self.width, 12.0, (0, self.width), 12.0, overlap=overlap)
        at = self.width + _RIGHT - 8
        for kind in reversed(self.kinds):
            at -= _text_width(kind.label, 7)
            axes.text(at, 6, kind.label, size=7, va="center_baseline", color=LINE)
            at -= 3
            for chunk in reversed(range(num_chunks)):
                at -= 8
                high = 7.6 / len(kind.does)  # stacked, as in the figure
                for place, part in enumerate(kind.does):
                    colour = shade(part, chunk, num_chunks)
                    box = Rectangle((at, 2.2 + place * high), 8, high, facecolor=colour)
                    axes.add_patch(box)
                    box.set_clip_on(False)
            at -= 12
        axes.text(at + 4, 6, note, size=7, ha="right", va="center_baseline", color=QUIET)

    def block(self, block: BuildingBlock) -> None:
        """Draw the building block, with lifespans and bounds to the right of its rows."""
        slots = max(each.end for each in block.passes)
        notes = lifespan_notes(block)
        room = max(_text_width(text, 6.5) for text in (*notes, _LIFESPANS)) + 8
        if room > self.width / 2:
            room, notes = _RIGHT, []
        cell = min(13.0, (self.width + _RIGHT - room) / slots)
        self._section("Building block")
        self.depth += 8  # for the interval's arrow
        rows = block.num_devices
        axes = self._panel(cell * slots, rows * self.row, (0, slots), rows)
        draw_block(axes, block, PointScale(cell, self.row))
        if notes and self.row >= _LOWEST_NOTED:
            _note_rows(axes, notes, [_LIFESPANS], self.row)
        self.depth += _GAP

    def schedule(self, timeline: Timeline, title: str, note: str = "", end: bool = False) -> None:
        """Draw the passes of every device; `end` marks the end of the last pass."""
        if title:
            self._section(title, note)
        rows = timeline.schedule.num_devices
        axes = self._panel(self.width, rows * self.row, (0, self.end), rows)
        scale = PointScale(self.width / self.end, self.row)
        chunks = chunks_of(timeline.schedule.placement)
        bars = bars_of(timeline, self.units.time_scale)
        length = timeline.makespan * self.units.time_scale
        draw_idle(axes, rows, length, self.row)
        draw_passes(axes, bars, chunks, scale)
        number_passes(axes, bars, timeline.schedule, scale)
        if end:
            axes.axvline(length, color=LINE, lw=0.7)
            _note_rows(axes, [f"{length:.4g}"], [], self.row, at=length)
        self.depth += _GAP

    def held(self, timeline: Timeline, costs: Costs, limit: Limit | None) -> None:
        """Draw the memory of every device, with its peak at the right."""
        peaks = [peak * self.units.held_scale for peak in peak_held(timeline.schedule, costs)]
        reach = None if limit is None else limit.held * self.units.held_scale
        top = max([*peaks, reach or 0.0]) or 1.0  # rows need a height even without memory
        label = self.units.held_label
        note = f"{label}, every row as high as {top:.4g}"
        if limit is not None and reach is not None:
            note = f"{label}; broken line: {reach:.4g}, {plain(limit.label)}"
        self._section("Activations held", note)
        rows, row = timeline.schedule.num_devices, self.row * _HELD_ROW
        axes = self._panel(self.width, rows * row, (0, self.end), rows)
        number_rows(axes, rows, row)
        draw_held(
            axes,
            timeline,
            costs,
            top / self.units.held_scale,
            self.units.time_scale,
            None if limit is None else limit.held,
        )
        if row >= _LOWEST_NOTED:
            _note_rows(axes, [f"{peak:.4g}" for peak in peaks], ["peak"], row)
        self.depth += 4

    def time_axis(self) -> None:
        """Draw the time axis of the panels above."""
        axes = self._panel(self.width, 1.0, (0, self.end), 1)
        axes.axis("on")
        axes.patch.set_visible(False)
        axes.yaxis.set_visible(False)
        for side in ("left", "right", "top"):
            axes.spines[side].set_visible(False)
        axes.set_xlabel(self.units.time_label, size=7, labelpad=1.5)
        self.depth += _AXIS

    def _section(self, title: str, note: str = "") -> None:
        axes = self._panel(self.width, _HEADING, (0, self.width), _HEADING)
        axes.text(-_LEFT + 6, 7, title, size=8, weight="bold", va="center_baseline")
        offset = _text_width(title, 8, bold=True) + 8
        axes.text(-_LEFT + 6 + offset, 7, note, size=7, color=QUIET, va="center_baseline")

    def _panel(
        self,
        width: float,
        height: float,
        across: tuple[float, float],
        rows: float,
        overlap: bool = False,
    ) -> Axes:
        """Add axes without decoration at the current depth, y downward from 0 to `rows`."""
        axes = self._figure.add_axes((0, 0, 1, 1), label=str(len(self.items)))
        axes.axis("off")
        axes.set_xlim(*across)
        axes.set_ylim(rows, 0)
        depth = 6.0 if overlap else self.depth
        self.items.append((axes, depth, width, height))
        if not overlap:
            self.depth += height
        return axes


def _text_width(text: str, size: float, bold: bool = False) -> float:
    if not text:
        return 0.0
    font = FontProperties(size=size, weight="bold" if bold else "normal")
    return float(TextPath((0, 0), text, size=size, prop=font).get_extents().width)


def _note_rows(
    axes: Axes, notes: Sequence[str], heading: Sequence[str], row: float, at: float | None = None
) -> None:
    """Write a note to the right of every row, or of `at`, and a heading above them."""
    place = axes.get_xlim()[1] if at is None else at
    lines = [*((-0.35, text) for text in heading), *((i + 0.5, t) for i, t in enumerate(notes))]
    for y, text in lines:
        axes.annotate(
            text,
            (place, y),
            xytext=(4, 0),
            textcoords="offset points",
            size=min(6.5, row * 0.6),
            va="center_baseline",
            color=QUIET,
            annotation_clip=False,
        )
