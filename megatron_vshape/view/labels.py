"""Placement of labels next to the points of a figure, without any overlap."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

SIZE = 7.0
"""Font size in points."""

_RADII = (7.0, 12.0, 18.0, 26.0, 36.0, 48.0, 62.0)
_ANGLES = (20, -20, 160, -160, 90, -90, 50, -50, 130, -130)
"""Tried offsets of a label, best first: points from the mark, and degrees around it."""

_MARK = 4.0
_LED = 15.0
"""Half the size of a mark, and the distance from which a line connects it to its label (points)."""

_CROSSED = 3.0
"""Penalty for covering a line, in points of distance per covered point."""


class Mark(NamedTuple):
    """Position of a mark in data coordinates, and its label."""

    x: float
    y: float
    name: str


class _Box(NamedTuple):
    left: float
    bottom: float
    right: float
    top: float

    def meets(self, other: "_Box") -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.bottom < other.top
            and other.bottom < self.top
        )

    def within(self, other: "_Box") -> bool:
        return (
            self.left >= other.left
            and self.right <= other.right
            and self.bottom >= other.bottom
            and self.top <= other.top
        )


def name_marks(
    axes: Axes, marks: Sequence[Mark], others: Sequence[tuple[float, float]] = ()
) -> None:
    """Label the marks after all else is drawn; a thin line connects a distant label to its mark.

    A label without free space among the others, and among the unlabeled marks `others`, is omitted.
    """
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]
    scale = 72 / axes.figure.dpi
    places = [tuple(axes.transData.transform((mark.x, mark.y)) * scale) for mark in marks]
    unnamed = [axes.transData.transform(place) * scale for place in others]
    taken = [_Box(x - _MARK, y - _MARK, x + _MARK, y + _MARK) for x, y in (*places, *unnamed)]
    edge = _Box(*(scale * np.asarray(axes.get_window_extent().extents)))
    legend = axes.get_legend()
    if legend is not None:
        taken.append(_Box(*(scale * np.asarray(legend.get_window_extent().extents))))
    lines = _line_points(axes) * scale
    for mark, (x, y) in sorted(zip(marks, places, strict=True), key=lambda each: -each[1][1]):
        wide, high = _size(axes, mark.name, scale)
        tried = _candidates(x, y, wide, high)
        free = [
            (distance + _CROSSED * _covered(box, lines), distance, box)
            for distance, box in tried
            if box.within(edge) and not any(box.meets(each) for each in taken)
        ]
        if not free:
            continue
        _, distance, box = min(free, key=lambda each: each[0])
        taken.append(box)
        led = {"arrowstyle": "-", "lw": 0.4, "color": "#888888", "shrinkA": 0, "shrinkB": 3}
        axes.annotate(
            mark.name,
            (mark.x, mark.y),
            textcoords="offset points",
            xytext=(box.left - x, box.bottom - y),
            va="bottom",  # of all lines, as measured
            fontsize=SIZE,
            arrowprops=led if distance > _LED else None,
        )


def _candidates(x: float, y: float, wide: float, high: float) -> Iterator[tuple[float, _Box]]:
    """Yield the possible boxes of a label with their distances from its mark."""
    for radius in _RADII:
        for angle in _ANGLES:
            dx, dy = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            # The distance is that of the nearest corner, or of the middle of the nearest side.
            left = x + radius * dx - wide * (1 - round(dx)) / 2
            bottom = y + radius * dy - high * (1 - round(dy)) / 2
            yield radius, _Box(left, bottom, left + wide, bottom + high)


def _size(axes: Axes, name: str, scale: float) -> tuple[float, float]:
    """Return the width and height of a label in points."""
    text = axes.text(0, 0, name, fontsize=SIZE, transform=None)
    extent = text.get_window_extent()
    text.remove()
    return extent.width * scale, extent.height * scale


def _line_points(axes: Axes) -> np.ndarray:
    """Return closely spaced points along all lines, in pixels; marks without a line have none."""
    found = [np.empty((0, 2))]
    for line in axes.lines:
        if line.get_linestyle() == "None":
            continue
        path = np.asarray(line.get_transform().transform_path(line.get_path()).vertices)
        for a, b in zip(path, path[1:], strict=False):
            steps = max(int(np.hypot(*(b - a)) / 3), 1)
            found.append(a + (b - a) * np.linspace(0, 1, steps + 1)[:, None])
    return np.concatenate(found)


def _covered(box: _Box, points: np.ndarray) -> int:
    x, y = points[:, 0], points[:, 1]
    return int(((x > box.left) & (x < box.right) & (y > box.bottom) & (y < box.top)).sum())
