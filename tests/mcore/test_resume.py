"""Runs that stop, fail or hang: the report of each rank, and equal steps after a restart."""

import re
from pathlib import Path

import pytest
from mcore.farm import Farm, Train
from mcore.parity import assert_same_tensors

FIVE = ("--train-iters", "5", "--eval-interval", "5", "--eval-iters", "2")


def test_steps_after_resuming_equal_those_without_a_stop(
    train: Train, farm: Farm, tmp_path: Path
) -> None:
    flags = ("--pipeline-schedule", "v-half", *FIVE)
    uninterrupted = train(4, *flags)
    saved = ("--save", str(tmp_path), "--save-interval", "3", "--ckpt-format", "torch_dist")
    first = farm.run(4, *flags, *saved, "--exit-interval", "3").check()
    second = farm.run(4, *flags, "--load", str(tmp_path), "--ckpt-format", "torch_dist").check()
    assert [len(run.record["losses"]) for run in (first, second)] == [3, 2]
    for key in ("losses", "grad_norms"):
        assert first.record[key] + second.record[key] == uninterrupted.record[key]
    assert_same_tensors(second.merged("parameters"), uninterrupted.merged("parameters"))


def test_sigterm_during_a_step_saves_and_ends_all_ranks(
    train: Train, farm: Farm, tmp_path: Path
) -> None:
    flags = ("--pipeline-schedule", "v-half", *FIVE, "--ckpt-format", "torch_dist")
    plugin = "plugins:sigterm"
    saved = ("--save", str(tmp_path), "--save-interval", "1000", "--exit-signal-handler")
    first = farm.run(4, *flags, *saved, plugin=plugin).check()
    assert len(first.record["losses"]) == 3  # the interrupted step was finished
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    second = farm.run(4, *flags, "--load", str(tmp_path)).check()
    uninterrupted = train(4, "--pipeline-schedule", "v-half", *FIVE)
    assert first.record["losses"] + second.record["losses"] == uninterrupted.record["losses"]


def test_data_loaders_and_send_threads_end_with_the_trainer(farm: Farm) -> None:
    # Loader processes then ignore SIGTERM, so a trainer that does not stop them hangs at exit.
    flags = ("--pipeline-schedule", "v-half", "--num-workers", "1", "--exit-signal-handler")
    farm.run(2, *flags, plugin="plugins:leaves_nothing").check()


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
    # Its W runs later with both schedules: a full backward pass would be another function.
    settings = {"fails": "B3.5", "step": 3}
    restarted = farm.run(2, *flags, "--inprocess-restart", plugin=plugin, argument=settings).check()
    uninterrupted = train(2, *flags)
    assert all("the second try begins" in text for text in restarted.output)
    assert sum("ended: FailedOnPurposeError" in text for text in restarted.output) == 1
    for key in ("losses", "grad_norms"):
        assert (
            restarted.record[key][:2] == restarted.record[key][2:4]
        )  # steps 1 and 2 of both attempts
        assert restarted.record[key][2:] == uninterrupted.record[key]
    assert_same_tensors(restarted.merged("parameters"), uninterrupted.merged("parameters"))


TIMEOUT_S, STALL_S = 4, 10
WAITS = re.compile(
    r"TransportError: rank (\d) \(device \1\): [FB]\d\.\d (?:waits for|waits for a receive of) "
    r".*(?:nothing has moved for 4 s|whose connection failed)"
)


def test_a_stalled_forward_is_reported_by_every_rank(farm: Farm) -> None:
    flags = ("--pipeline-schedule", "v-half", "--pipeline-timeout", str(TIMEOUT_S))
    stall = {"what": "stall", "seconds": STALL_S, "rank": 2, "step": 1, "pass": "F2.1"}
    run = farm.run(4, *flags, plugin="faults.injection", argument=[stall])
    assert run.codes == [1] * 4, run.output
    for rank, text in enumerate(run.output):
        match = WAITS.search(text)
        assert match is not None, text[-2000:]
        assert int(match[1]) == rank
    message = "F3.1 waits for F2.1 from rank 2 (device 2), and nothing has moved for 4 s"
    assert message in run.output[3]
