"""Figures contain all passes, all numbers that fit, the idle time, the memory and the limit."""

import re
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from megatron_vshape import Costs, Schedule, ScheduleError, Timeline, make, simulate
from megatron_vshape.core.model.amounts import GIB
from megatron_vshape.core.paper.catalogue import NAMES, make_block
from megatron_vshape.view.figure import (
    FORMATS,
    Limit,
    comparison_figure,
    save,
    schedule_figure,
)
from megatron_vshape.view.rank_memory import CATEGORIES, memory_figure

pytest.importorskip("matplotlib", reason="figures need the extra [draw]")


SVG = "{http://www.w3.org/2000/svg}"


class Picture:
    """An SVG file's shapes by their gid, and its texts."""

    def __init__(self, path: Path) -> None:
        self.root = ElementTree.parse(path).getroot()
        self.texts = ["".join(text.itertext()) for text in self.root.iter(f"{SVG}text")]

    def boxes(self, pattern: str) -> int:
        """Return the number of closed shapes in the groups whose id matches."""
        groups = [
            group
            for group in self.root.iter(f"{SVG}g")
            if re.fullmatch(pattern, group.get("id", ""))
        ]
        return sum(
            path.get("d").count("z") for group in groups for path in group.iter(f"{SVG}path")
        )


def draw(tmp_path, figure) -> Picture:
    save(figure, tmp_path / "figure.svg")
    return Picture(tmp_path / "figure.svg")


def count(schedule, *kinds):
    return sum(work.kind in kinds for row in schedule.order for work in row)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half"])
def test_every_pass_is_a_box_with_its_microbatch(tmp_path, name):
    schedule = make(name, 4, 8)
    picture = draw(tmp_path, schedule_figure(simulate(schedule)))
    for kind in ("F", "B", "W"):
        assert picture.boxes(f"passes-{kind}-chunk.*") == count(schedule, kind)
        halves = count(schedule, "BW") if kind != "F" else 0
        assert picture.boxes(f"whole-{kind}-chunk.*") == halves
    assert picture.boxes("idle") == 4
    assert picture.boxes("held") == 4
    for microbatch in range(8):
        passes = sum(work.microbatch == microbatch for row in schedule.order for work in row)
        elsewhere = 2 * (microbatch < 4)  # a device's number, left of its passes and its memory
        assert picture.texts.count(str(microbatch)) >= passes + elsewhere


def test_unreadable_pass_numbers_are_omitted(tmp_path):
    texts = draw(tmp_path, schedule_figure(simulate(make("v-half", 4, 100)))).texts
    assert sum(text.isdigit() for text in texts) < 40


def test_shades_distinguish_several_chunks(tmp_path):
    two = draw(tmp_path, schedule_figure(simulate(make("v-half", 4, 8))))
    assert two.boxes("passes-F-chunk0") == two.boxes("passes-F-chunk1") == 4 * 8
    assert "chunk 0 dark to chunk 1 light" in two.texts
    one = draw(tmp_path, schedule_figure(simulate(make("1f1b", 4, 8))))
    assert not any("light" in text for text in one.texts)


def test_figure_has_title_legend_and_units(tmp_path):
    figure = schedule_figure(
        simulate(make("v-zb", 4, 8)), note="bubble 5.9 %", limit=Limit(8.0, "peak of 1F1B")
    )
    texts = draw(tmp_path, figure).texts
    assert "V-ZB" in texts
    assert "bubble 5.9 %" in texts
    assert "chunks; dashed line: 8, peak of 1F1B" in texts
    assert "time, in passes of one chunk" in texts
    assert texts.count("rank") == 2  # labels of the passes and of the memory
    assert {"forward", "input gradient", "weight gradient"} <= set(texts)
    assert "full backward" not in texts
    texts_1f1b = draw(tmp_path, schedule_figure(simulate(make("1f1b", 4, 8)))).texts
    assert "full backward" in texts_1f1b
    assert "weight gradient" not in texts_1f1b


def test_comparison_has_all_passes_and_one_axis(tmp_path):
    timelines = [simulate(make(name, 4, 8)) for name in NAMES]
    notes = [f"note {name}" for name in NAMES]
    picture = draw(tmp_path, comparison_figure(timelines, NAMES, notes))
    total = sum(count(timeline.schedule, "F") for timeline in timelines)
    assert picture.boxes("passes-F-chunk.*") == total
    assert set(notes) < set(picture.texts)
    assert picture.texts.count("time, in passes of one chunk") == 1
    for timeline in timelines:
        assert f"{timeline.makespan:.4g}" in picture.texts


@pytest.mark.parametrize("suffix", FORMATS)
def test_same_input_same_bytes(tmp_path, suffix):
    contents = []
    for index in range(2):
        path = tmp_path / f"{index}{suffix}"
        save(schedule_figure(simulate(make("v-min", 4, 8))), path)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]
    magic = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}[suffix]
    assert contents[0].startswith(magic)


def test_suffix_is_case_insensitive_and_unknown_suffix_rejected(tmp_path):
    figure = schedule_figure(simulate(make("v-min", 2, 3)))
    save(figure, tmp_path / "a.svg")
    save(figure, tmp_path / "a.SVG")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "a.SVG").read_bytes()
    with pytest.raises(ScheduleError, match=r"a\.gif: a figure's name must end in one of \.svg"):
        save(figure, tmp_path / "a.gif")


def test_costs_without_activation_memory_are_drawn(tmp_path):
    empty_costs = Costs.uniform(2, 4).having(
        held_after_forward_bytes=(0.0,) * 4, held_after_backward_bytes=(0.0,) * 4
    )
    figure = schedule_figure(simulate(make("v-min", 2, 3)), empty_costs)
    assert "Activation memory" in draw(tmp_path, figure).texts


def test_hostile_name_stays_text(tmp_path):
    template = make("v-min", 2, 2)
    schedule = Schedule("$\\frac{$<b>\x1b[31m\x00", 2, 2, template.placement, template.order)
    texts = draw(tmp_path, schedule_figure(simulate(schedule))).texts
    assert "$\\frac{$<b>?[31m?" in texts


def test_measured_timeline_starts_at_zero(tmp_path):
    planned = simulate(make("v-min", 4, 8))
    shift = 1e9
    measured = Timeline(
        planned.schedule,
        tuple(tuple(time + shift for time in row) for row in planned.starts),
        tuple(tuple(time + shift for time in row) for row in planned.ends),
    )
    save(schedule_figure(planned), tmp_path / "planned.svg")
    save(schedule_figure(measured), tmp_path / "measured.svg")
    assert (tmp_path / "planned.svg").read_bytes() == (tmp_path / "measured.svg").read_bytes()


def test_large_figure_is_fast_and_small(tmp_path):
    timeline = simulate(make("v-half", 16, 128))
    started = time.process_time()
    save(schedule_figure(timeline), tmp_path / "large.svg")
    assert time.process_time() - started < 10
    assert (tmp_path / "large.svg").stat().st_size < 3_000_000
    assert Picture(tmp_path / "large.svg").boxes("passes-.*") == 16 * 2 * 3 * 128


def test_a_block_is_drawn_with_its_interval_and_lifespans(tmp_path):
    block = make_block("v-half", 4, 8)
    picture = draw(tmp_path, schedule_figure(simulate(make("v-half", 4, 8)), block=block))
    assert "T = 6" in picture.texts
    assert "≤ 6 = ceil(27/6) + ceil(6/6)" in picture.texts
    plain = draw(tmp_path, schedule_figure(simulate(make("v-half", 4, 8))))
    drawn = picture.boxes("passes-.*") - plain.boxes("passes-.*")
    assert drawn == len(block.passes) == 24
    assert picture.boxes("copies-.*") > 0


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
