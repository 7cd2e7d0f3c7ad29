"""Megatron runs the commands of a trial, and the trial reads times and losses from its log."""

from pathlib import Path

from mcore.farm import MODEL, Farm
from mcore.parity import UNTIED

from megatron_vshape.rehearsal.command import words_by_flag
from megatron_vshape.rehearsal.command_reader import read_command
from megatron_vshape.tuning.training_run import TrainingLog
from megatron_vshape.tuning.trial import WARM_UP, Variant, with_schedule

RANKS = 4
FLAGS = (*MODEL, UNTIED, "--clip-grad", "0", "--ckpt-format", "torch_dist")


def test_schedules_train_from_one_checkpoint_with_equal_losses(farm: Farm, tmp_path: Path) -> None:
    weights, board = tmp_path / "weights", tmp_path / "board"
    farm.run(RANKS, *FLAGS, "--save", str(weights), "--save-interval", "1").check()
    files = {path: path.stat().st_mtime_ns for path in weights.rglob("*")}
    user_flags = ("--load", str(weights), "--save", str(weights), "--save-interval", "1")
    user_flags += ("--tensorboard-dir", str(board), "--eval-iters", "3", "--eval-interval", "2")
    sizes = ("--pipeline-model-parallel-size", str(RANKS), "--train-iters", "1000")
    command = read_command(["pretrain_gpt.py", *FLAGS, *sizes, *user_flags])
    losses = []
    for name in ("1f1b", "v-half", "v-zb"):
        flags = Variant(name, with_schedule(command, name)).command_of(2).flags
        run = farm.run(RANKS, *flags, without=[*words_by_flag(MODEL)]).check()
        log = TrainingLog(tmp_path / name)
        log.path.write_text("\n".join(run.output))
        log.update()
        assert list(log.step_s) == list(range(1, WARM_UP + 3))
        assert log.num_ranks == RANKS
        assert set(log.peak_bytes) == set(range(RANKS))
        assert "validation loss" not in log.path.read_text()
        losses.append(log.losses)
    assert losses[0].keys() == set(range(1, WARM_UP + 3))
    assert losses[1:] == [losses[0]] * 2
    assert {path: path.stat().st_mtime_ns for path in weights.rglob("*")} == files
    assert not board.exists()
