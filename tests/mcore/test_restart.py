"""A failed step is retried in the same process without state of the first attempt."""

import pytest
from mcore.farm import Farm, Train
from mcore.parity import assert_same_tensors

STEPS = ("--train-iters", "4", "--num-layers", "4")
FLAGS = {
    "v-half": ("--pipeline-schedule", "v-half", *STEPS),
    "v-zb, post-validated": (
        *("--pipeline-schedule", "v-zb", "--optimizer-post-validation"),
        *("--rerun-mode", "disabled", *STEPS),
    ),
}


@pytest.mark.parametrize(
    "name", ["v-zb, post-validated", pytest.param("v-half", marks=pytest.mark.slow)]
)
def test_failed_step_leaves_no_state_and_the_retry_is_equal(
    train: Train, farm: Farm, name: str
) -> None:
    flags = FLAGS[name]
    plugin = "restarts"
    settings = {"fails": "B3.4", "step": 3}
    restarted = farm.run(2, *flags, "--inprocess-restart", plugin=plugin, given=settings).check()
    uninterrupted = train(2, *flags)
    assert all("the second try begins" in text for text in restarted.output)
    assert sum("ended: FailedOnPurposeError" in text for text in restarted.output) == 1
    for key in ("losses", "grad_norms"):
        assert (
            restarted.record[key][:2] == restarted.record[key][2:4]
        )  # steps 1 and 2 of both attempts
        assert restarted.record[key][2:] == uninterrupted.record[key]
    assert_same_tensors(restarted.merged("parameters"), uninterrupted.merged("parameters"))
