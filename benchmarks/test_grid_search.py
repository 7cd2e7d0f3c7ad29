"""The comparison with the published grid search: the best of each schedule, and the winners."""

import pytest

grid_search = pytest.importorskip("grid_search")
Published = grid_search.Published


def row(schedule: str, mfu: str, microbatch_size: str = "1") -> dict[str, str]:
    sizes = dict.fromkeys(grid_search.SIZES, "1") | {"microbatch_size": microbatch_size}
    return {"sequence_length": "64", "schedule": schedule, "predicted_mfu": mfu, **sizes}


@pytest.mark.parametrize("backwards", [False, True])
def test_best_of_all_batches_is_compared(backwards: bool) -> None:
    predicted = [row("1f1b", "0.4"), row("1f1b", "0.5", "2"), row("v-half", "")]
    published = [Published(64, "1f1b", 50.5, "1 1 2 1"), Published(64, "v-half", None, "-")]
    rows, winners_agree = grid_search.compared(
        published, predicted[::-1] if backwards else predicted
    )
    assert winners_agree
    assert rows[1:] == [
        ["64", "1F1B", "50.00", "50.50", "-0.50", "1 1 1 2", "1 1 2 1"],
        ["64", "V-Half", "OOM", "OOM", "", "-", "-"],
    ]


def test_different_winner_is_reported() -> None:
    published = [Published(64, "1f1b", 50.0, ""), Published(64, "v-half", 40.0, "")]
    _, winners_agree = grid_search.compared(published, [row("1f1b", "0.4"), row("v-half", "0.5")])
    assert not winners_agree


def test_results_of_the_paper_load() -> None:
    assert len(grid_search.load_published()) == 9
