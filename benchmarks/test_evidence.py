"""The evidence page is the output of its script, and the predictions do not use their targets."""

from dataclasses import replace

import pytest
from tuning.samples import ROOT

evidence = pytest.importorskip("evidence", reason="the page needs the extra [sweep]")


@pytest.fixture
def small_budget() -> None:
    """The page is printed with the default budget."""


@pytest.mark.slow
def test_page_equals_the_output_of_the_script() -> None:
    page = (ROOT / "benchmarks" / "evidence.md").read_text()
    assert page == evidence.page(), "python benchmarks/evidence.py > benchmarks/evidence.md"


def test_predictions_do_not_use_published_figures() -> None:
    """Except for the fitted row, no published figure changes a prediction."""
    (published,) = (
        published for published in evidence.read_sets() if "Primus" in published.description["name"]
    )
    rows = tuple(
        row if row.schedule in ("1f1b", "interleaved-1f1b") else replace(row, published=1.0)
        for row in published.rows
    )
    other_set = replace(published, rows=rows)
    microbatches = published.microbatches()
    assert other_set.microbatches() == microbatches
    for row_of_set, other_row in zip(published.rows, rows, strict=True):
        assert published.predict(row_of_set, microbatches) == other_set.predict(
            other_row, microbatches
        )


def test_memory_line_goes_through_its_two_rows() -> None:
    (published,) = (
        published for published in evidence.read_sets() if "trial" in published.description["name"]
    )
    memory_gib = published.memory([published.predict(row, 24) for row in published.rows])
    fitted_schedules = published.description["memory_line"]
    for row, memory in zip(published.rows, memory_gib, strict=True):
        if row.schedule in fitted_schedules:
            assert memory == pytest.approx(row.memory)


def test_longer_passes_slow_split_backwards_more() -> None:
    (published,) = (published for published in evidence.read_sets() if published.subject is None)
    for row, passes in zip(published.rows, (2, 2, 3, 3), strict=True):
        per_microbatch = passes * (row.chunks or 1)
        busy = [published.predict(row, count, 1e6).time_us for count in (48, 56)]
        # With passes this long no other cost matters: the step is a number of passes per
        # microbatch.
        assert (busy[1] - busy[0]) / 8 == pytest.approx(per_microbatch * 1e6, rel=0.1)
