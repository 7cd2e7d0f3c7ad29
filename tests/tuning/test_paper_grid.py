"""The paper's grid search, predicted from the stored counts of benchmarks/evidence."""

import csv
from typing import Any

import pytest
from tuning.samples import ROOT

from megatron_vshape.rehearsal.gpus import MEASURED_GIB, Software

evidence = pytest.importorskip("evidence", reason="the page needs the extra [sweep]")


@pytest.fixture(scope="module")
def rows() -> list[Any]:
    return evidence.grid_predictions()


def test_every_predicted_winner_is_the_published_one(rows: list[Any]) -> None:
    for length in (1024, 3072, 16384):
        group = [row for row in rows if row.published.sequence_length == length]
        published = max(group, key=lambda row: row.published.mfu_percent or 0.0)
        predicted = max(group, key=lambda row: row.mfu_percent * row.prediction.fits)
        assert predicted.published.schedule == published.published.schedule


def test_a_method_fits_if_it_ran_in_the_paper(rows: list[Any]) -> None:
    """At 16384 tokens only V-Half ran, with 1.2 GiB to spare."""
    assert len(rows) == 9
    for row in rows:
        assert row.prediction.fits == (row.published.mfu_percent is not None)


def test_memory_of_cuda_is_that_of_published_messages() -> None:
    text = (ROOT / "benchmarks" / "evidence" / "outside_memory.csv").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    outside = [
        float(row["in use"]) - float(row["allocated"]) - float(row["unallocated"])
        for row in csv.DictReader(lines)
    ]
    assert len(outside) == 4
    assert all(gib == pytest.approx(MEASURED_GIB[Software.TORCH, 8], abs=0.02) for gib in outside)
