"""Functions of Megatron's trainer that support one model chunk per rank, with several."""

import pytest
from mcore.conftest import UNTIED
from mcore.test_training import Train, assert_equal_training, losses

SKIP = ("--iterations-to-skip", "2", "3", "--train-iters", "4", "--log-interval", "2", UNTIED)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, "v-half"),
        (4, "v-half --pipeline-vocab-parallel"),
        (2, "v-zb --optimizer-post-validation --rerun-mode disabled"),
        pytest.param(2, "v-zb --pipeline-slices 2", marks=pytest.mark.slow),
        pytest.param(2, "interleaved-1f1b", marks=pytest.mark.slow),
        pytest.param(4, "zb-h1", marks=pytest.mark.slow),
    ],
)
def test_skipped_iterations_equal_1f1b(train: Train, ranks: int, flags: str) -> None:
    expected = train(2, "--pipeline-schedule", "1f1b", *SKIP)
    assert len(losses(expected)) == 2
    assert_equal_training(train(ranks, "--pipeline-schedule", *flags.split(), *SKIP), expected)
