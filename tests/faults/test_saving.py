"""A disk that is full, a writer that is killed: the checkpoint before still loads."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.conftest import Inject, Tally
from faults.test_killed import EVERY_TWO, FIVE, assert_continues
from mcore.farm import Farm, Train

slow = pytest.mark.slow
DATA, INDEX, TRACKER = "iter_0000004/__2_0", "iter_0000004/.metadata", "latest_checkpointed"


@pytest.mark.parametrize(
    ("what", "rank", "file"),
    [
        ("full disk", 0, INDEX),
        ("killed writer", 2, DATA),
        pytest.param("full disk", 2, DATA, marks=slow),
        pytest.param("full disk", 0, TRACKER, marks=slow),
        pytest.param("killed writer", 0, INDEX, marks=slow),
        pytest.param("killed writer", 0, TRACKER, marks=slow),
    ],
)
def test_previous_checkpoint_still_loads(
    farm: Farm,
    train: Train,
    inject: Inject,
    tally: Tally,
    tmp_path: Path,
    what: str,
    rank: int,
    file: str,
) -> None:
    tally(f"{what} while saving")
    saved = tmp_path / "saved"
    fault = {"what": what, "rank": rank, "file": file, "skip": 1 if file == TRACKER else 0}
    run = inject([fault], *FIVE, *EVERY_TWO, "--save", str(saved))
    assert (tmp_path / "struck").exists()
    assert None not in run.codes
    assert 0 not in run.codes
    lost = 3
    if file == TRACKER:  # Megatron empties it first; the checkpoint itself is complete
        (saved / "latest_checkpointed_iteration.txt").write_text("4")
        lost = 1
    assert_continues(farm, train(4, *FIVE), saved, lost)
