"""The text picture: plain, cut to a terminal's width, in colour where that is wanted."""

import io
import re

import pytest
from shared_costs import shared_costs

from megatron_vshape import Costs, Timeline, make, simulate
from megatron_vshape.core.model.schedule import ELLIPSIS
from megatron_vshape.core.model.stage_costs import StageCosts
from megatron_vshape.core.planner.vocabulary import with_vocabulary_passes
from megatron_vshape.view.text import picture, wants_colour

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_picture_is_the_timeline_drawing_with_a_legend():
    timeline = simulate(make("v-min", 4, 8))
    text = picture(timeline)
    assert text.startswith(timeline.draw())
    assert text.endswith(
        "F B W  chunk 0   f b w  chunk 1   (forward, input gradient, weight gradient)"
    )


def test_one_chunk_needs_no_lower_case():
    assert picture(simulate(make("1f1b", 2, 2))) == (
        "FF  BW BW\n FBWFBW\n\nF B W  forward, input gradient, weight gradient"
    )


def test_colour_changes_no_letter():
    timeline = simulate(make("v-half", 4, 8))
    coloured = picture(timeline, colour=True)
    assert ESCAPE.sub("", coloured) == picture(timeline)
    assert "\x1b[97;48;5;25mFFFFF\x1b[0m" in coloured


@pytest.mark.parametrize("columns", [20, 79])
def test_wide_picture_shows_start_and_end(columns):
    timeline = simulate(make("v-half", 4, 40))
    full_lines = timeline.draw().split("\n")
    lines = picture(timeline, columns).split("\n")[:4]
    width = max(map(len, full_lines))
    for line, full_line in zip(lines, full_lines, strict=True):
        assert len(line) <= columns
        head, tail = line.split(ELLIPSIS)
        assert full_line.startswith(head)
        assert full_line.ljust(width).rstrip().endswith(tail)


def test_narrow_picture_is_not_cut():
    timeline = simulate(make("v-half", 4, 8))
    assert picture(timeline, 200) == picture(timeline)


@pytest.mark.parametrize(
    ("stream", "environment", "expected"),
    [
        (Terminal(), {"TERM": "xterm"}, True),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": ""}, True),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {"TERM": "xterm"}, False),
    ],
)
def test_color_depends_on_terminal_and_no_color(monkeypatch, stream, environment, expected):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert wants_colour(stream) is expected


def with_short_sums() -> Timeline:
    plain = Costs.uniform(4, 8, 10.0, 10.0, 10.0, 0.0)
    shared = shared_costs(
        plain, StageCosts.of(1, 1, 1, 1, 1), StageCosts.of(8, 8, 8, 1, 1), 4, 0.03
    )
    return simulate(with_vocabulary_passes(make("v-half", 4, 8), shared), shared)


def with_an_empty_stage() -> Timeline:
    times = (0.02, *(10.0,) * 7)
    return simulate(
        make("v-half", 4, 8), Costs.of(times, times, times, 0.0, (1.0,) * 8, (1.0,) * 8)
    )


@pytest.mark.parametrize("make_timeline", [with_short_sums, with_an_empty_stage])
def test_a_column_is_as_long_as_a_usual_pass(make_timeline):
    timeline = make_timeline()
    widest = max(len(line) for line in timeline.draw().splitlines())
    usual = timeline.makespan / 10.0  # in passes
    assert usual - 1 <= widest <= 5 * usual
    processor = [line for line in timeline.draw().splitlines() if "F" in line.upper()]
    assert len(processor) == 4
