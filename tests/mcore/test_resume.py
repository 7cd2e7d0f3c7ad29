"""A stopped, saved and resumed run is bitwise equal to an uninterrupted run."""

from pathlib import Path

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
