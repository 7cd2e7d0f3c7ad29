"""Runs are compared within a workload: one sequence length and one global batch size."""

from pathlib import Path

import pytest
from tuning.counts import predictor_of
from tuning.samples import load_sample

from megatron_vshape.tuning.configurations import Configuration
from megatron_vshape.tuning.files import Loaded, Pruning
from megatron_vshape.tuning.grid import expand_grid
from megatron_vshape.tuning.predictor import Prediction, Verdict
from megatron_vshape.tuning.ranking import kendall_tau, prune_predictions
from megatron_vshape.tuning.report import (
    best_rows,
    result_tables,
    rows_of,
)
from megatron_vshape.tuning.results import Outcome, Result, Status

TWO_BATCHES = [{"sequence_length": 64, "global_batch_size": size} for size in (8, 64)]
TWO_WORKLOADS = {"workloads": TWO_BATCHES}


def survey(loaded: Loaded, margin: float) -> dict[Configuration, Prediction]:
    predictions = predictor_of(loaded).survey(expand_grid(loaded).possible, margin)
    return {prediction.configuration: prediction for prediction in predictions}


@pytest.fixture
def two_batches(tmp_path: Path) -> list[Prediction]:
    """Predictions of two batch sizes; a step of the larger is about eight times slower."""
    grid, sweep = {"schedule": ["v-half"]}, TWO_WORKLOADS
    return list(survey(load_sample(tmp_path, grid, sweep=sweep), 0.5).values())


def test_a_large_batch_is_not_slower_for_being_large(two_batches: list[Prediction]) -> None:
    chosen = prune_predictions(two_batches, Pruning(margin=0.9))
    assert len(chosen.run) == 4
    assert not chosen.dropped


def test_each_workload_has_its_best(two_batches: list[Prediction]) -> None:
    rows = best_rows(rows_of(two_batches))
    assert [row.configuration.workload for row in rows] == [(64, 8), (64, 64)]
    tables = [text.splitlines() for text in result_tables(rows)]
    assert [lines[2].split()[-1] for lines in tables] == ["best", "best"]
    assert [lines[0] for lines in tables] == [
        f"sequence 64, batch {batch}, layout: even, status: predicted runs" for batch in (8, 64)
    ]


def test_measured_figures_are_shown_with_the_predicted(two_batches: list[Prediction]) -> None:
    outcome = Outcome(Status.OK, 12.345, 99 * 2.0**30, 0.123)
    ran = [
        Result(prediction.configuration, outcome, 0.4567, 1, 1, 0.1)
        for prediction in two_batches[:3]
    ]
    text = "\n".join(result_tables(rows_of(two_batches, ran)))
    for figure in ("45.67 (", "12.345 (", "12.3 (", "99.0 ("):
        assert text.count(figure) == 3


def test_a_run_that_failed_is_no_winner(two_batches: list[Prediction]) -> None:
    """The fastest measured run wins over a failed run with a better prediction."""
    first, second = (
        prediction for prediction in two_batches if prediction.configuration.global_batch_size == 8
    )
    best, second_best = sorted(
        (first, second), key=lambda prediction: prediction.mfu or 0.0, reverse=True
    )
    ran = Result(
        second_best.configuration, Outcome(Status.OK, 1.0, 2.0**30), best.mfu / 2, 1.0, 1.0, 0.1
    )
    for status in (Status.OUT_OF_MEMORY, Status.FAILED):
        failed = Result(best.configuration, Outcome(status), None, 1.0, 1.0, 0.1)
        rows = rows_of([best, second_best], [failed, ran])
        assert best_rows(rows) == [rows[1]]
        *_, first_line, second_line = "".join(result_tables(rows)).splitlines()
        assert f"- ({100 * best.mfu:.2f})" in first_line
        assert "best" in second_line
        assert "best" not in first_line
        assert rows[0].best_mfu == 0


def test_a_plan_is_made_for_each_batch(tmp_path: Path) -> None:
    grid, sweep = {"schedule": ["1f1b", "adaptive"], "microbatch_size": [1]}, TWO_WORKLOADS
    predictions = survey(load_sample(tmp_path, grid, sweep=sweep), 0.5)
    assert {prediction.verdict for prediction in predictions.values()} == {Verdict.RUNS}


def test_additional_adaptive_run_is_planned_even_if_slow(tmp_path: Path) -> None:
    slow = {"schedule": "adaptive", "pipeline_parallel": 2, "layout": "even", "recompute": "full"}
    also = [slow, {**slow, "arguments": ["--x"]}]
    loaded = load_sample(tmp_path, {"schedule": ["v-zb"]}, sweep={"also": also})
    predictions = survey(loaded, 0.0)
    verdicts = {
        config.arguments: prediction.verdict
        for config, prediction in predictions.items()
        if config.recompute == "full"
    }
    assert verdicts == {(): Verdict.NOT_PLANNED, ("--x",): Verdict.RUNS}
    run = prune_predictions(predictions.values(), Pruning(margin=0.0)).run
    assert any(prediction.configuration.arguments == ("--x",) for prediction in run)


@pytest.mark.parametrize(
    ("predicted", "measured", "groups", "tau"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], None, 1),
        ([1, 2, 3, 4], [4, 3, 2, 1], None, -1),
        # The example of SciPy's documentation of kendalltau.
        ([12, 2, 1, 12, 2], [1, 4, 7, 1, 0], None, pytest.approx(-0.47140452)),
        ([], [], None, None),
        ([1], [2], None, None),
        ([1, 1], [1, 2], None, None),
        # The two long ones are the wrong way round, the two short ones right.
        ([1, 2, 10, 20], [1, 2, 20, 10], None, pytest.approx(2 / 3)),
        ([1, 2, 10, 20], [1, 2, 20, 10], ["a", "a", "b", "b"], 0),
        ([1, 2], [1, 2], ["a", "b"], None),
    ],
)
def test_tau_of_rankings(
    predicted: list[float],
    measured: list[float],
    groups: list[str] | None,
    tau: float | None,
) -> None:
    """None where no two runs of a group can be compared."""
    assert kendall_tau(predicted, measured, groups) == tau
