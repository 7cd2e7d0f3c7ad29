"""Names beside marks cover neither one another nor the marks."""

import random
from itertools import combinations

import pytest

pytest.importorskip("matplotlib", reason="figures need the extra [draw]")
from matplotlib.figure import Figure
from matplotlib.text import Text

from megatron_vshape.view.labels import Mark, name_marks


@pytest.mark.parametrize("seed", range(4))
def test_no_name_covers_another_or_a_mark(seed: int) -> None:
    dice = random.Random(seed)
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    marks = [Mark(dice.random(), dice.random() ** 3, f"Schedule-{at}") for at in range(14)]
    marks += [Mark(each.x + 0.004, each.y, f"near {each.name}") for each in marks[:4]]
    unnamed = [(dice.random(), dice.random()) for _ in range(20)]
    places = [*((mark.x, mark.y) for mark in marks), *unnamed]
    axes.scatter(*zip(*places, strict=True), s=20)
    axes.plot([0, 1], [0, 1], label="a line")
    axes.legend()
    name_marks(axes, marks, unnamed)
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # without what leads to it
    assert {text.get_text() for text in axes.texts} == {mark.name for mark in marks}
    assert not [1 for a, b in combinations(boxes, 2) if a.overlaps(b)]
    assert not [1 for box in boxes if box.overlaps(axes.get_legend().get_window_extent())]
    for place in places:
        x, y = axes.transData.transform(place)
        assert not any(box.contains(x, y) for box in boxes)


def test_a_name_without_room_is_left_out() -> None:
    figure = Figure(figsize=(2, 1))
    axes = figure.subplots()
    marks = [Mark(0.5, 0.5, f"a rather long name, number {at}") for at in range(9)]
    axes.scatter([0.5], [0.5])
    name_marks(axes, marks)
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # without what leads to it
    assert len(boxes) < len(marks)
    assert not [1 for a, b in combinations(boxes, 2) if a.overlaps(b)]
