"""The memory figure of an estimate has a panel per rank, the categories and the GPU's memory."""

import re

import pytest

pytest.importorskip("matplotlib", reason="figures need the extra [draw]")

from megatron_vshape.view.figure import save
from megatron_vshape.view.rank_memory import CATEGORIES, GIB, memory_figure


def test_panels_and_categories(tmp_path):
    bytes_by_category = dict.fromkeys(CATEGORIES, 2 * GIB)
    curve = [(0.0, 0, {}), (0.5, 10 * GIB, bytes_by_category), (1.0, 0, {})]
    figure = memory_figure({"rank 0": curve, "rank 3": curve}, 80 * GIB)
    for axes in figure.axes:
        assert [len(layer.get_paths()) for layer in axes.collections] == [1] * len(CATEGORIES)
        assert max(path.vertices[:, 1].max() for path in axes.collections[-1].get_paths()) == 10
        (line,) = axes.lines
        assert list(line.get_ydata()) == [80, 80]
    save(figure, tmp_path / "memory.svg")
    texts = set(re.findall(r"<text[^>]*>([^<]*)", (tmp_path / "memory.svg").read_text()))
    assert {label for label, _ in CATEGORIES.values()} < texts
    assert {"rank 0", "rank 3", "estimated time of the rank's passes, s"} < texts
