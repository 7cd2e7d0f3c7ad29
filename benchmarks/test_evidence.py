"""The evidence page is what its script prints, and the script predicts what it says."""

from dataclasses import replace

import pytest
from tuning.samples import ROOT

evidence = pytest.importorskip("evidence", reason="the page needs the extra [sweep]")


@pytest.fixture
def small_budget() -> None:
    """The page is printed with the default budget."""


@pytest.mark.slow
def test_the_page_is_what_the_script_prints() -> None:
    page = (ROOT / "benchmarks" / "evidence.md").read_text()
    assert page == evidence.page(), "python benchmarks/evidence.py > benchmarks/evidence.md"


def test_a_published_figure_is_no_input_of_its_prediction() -> None:
    """But of the row that is fitted, no figure moves what is predicted."""
    (given,) = (each for each in evidence.read_sets() if "Primus" in each.given["name"])
    rows = tuple(
        row if row.schedule in ("1f1b", "interleaved-1f1b") else replace(row, published=1.0)
        for row in given.rows
    )
    other = replace(given, rows=rows)
    microbatches = given.microbatches()
    assert other.microbatches() == microbatches
    for ours, theirs in zip(given.rows, rows, strict=True):
        assert given.predict(ours, microbatches) == other.predict(theirs, microbatches)


def test_a_line_of_memory_goes_through_the_two_rows_it_names() -> None:
    (given,) = (each for each in evidence.read_sets() if "trial" in each.given["name"])
    found = given.memory([given.predict(row, 24) for row in given.rows])
    named = given.given["memory_line"]
    for row, memory in zip(given.rows, found, strict=True):
        if row.schedule in named:
            assert memory == pytest.approx(row.memory)


def test_longer_passes_cost_a_split_backward_more() -> None:
    (given,) = (each for each in evidence.read_sets() if each.model is None)
    for row, passes in zip(given.rows, (2, 2, 3, 3), strict=True):
        per_microbatch = passes * (row.chunks or 1)
        busy = [given.predict(row, count, 1e6).time_us for count in (48, 56)]
        # With passes this long nothing else counts: a period is so many of them a microbatch.
        assert (busy[1] - busy[0]) / 8 == pytest.approx(per_microbatch * 1e6, rel=0.1)
