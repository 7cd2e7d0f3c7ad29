"""Post-validation is bitwise exact: confirmed and rolled-back steps, boundaries, rejections."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from mcore.farm import Ended, Farm
from mcore.parity import UNTIED
from megatron.core.optimizer import optimizer as megatron_optimizer
from offloaded import with_offloads

from megatron_vshape.core.paper.catalogue import make

V_ZB = ("--pipeline-schedule", "v-zb", "--rerun-mode", "disabled", UNTIED)
FIFTY = (*V_ZB, *"--train-iters 50 --log-interval 10 --no-check-for-nan-in-loss-and-grad".split())
POST_VALIDATION = "--optimizer-post-validation"
SCALED = ("--initial-loss-scale", "1024", "--loss-scale-window", "5")
DATA_PARALLEL = (
    "--pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather"
).split()


def is_bitwise_equal(first: Any, second: Any) -> bool:
    """Return whether two nests are equal to the last bit, NaN included."""
    if isinstance(first, torch.Tensor):
        is_same_type = first.dtype == second.dtype and first.shape == second.shape
        return is_same_type and torch.equal(as_integers(first), as_integers(second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            is_bitwise_equal(first[key], second[key]) for key in first
        )
    if isinstance(first, list):
        return len(first) == len(second) and all(map(is_bitwise_equal, first, second))
    return repr(first) == repr(second)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def steps_of(run: Ended) -> list[dict[str, Any]]:
    return run.record["exact"]["steps"]


def assert_exact(run: Ended, expected: Ended) -> None:
    """Compare all values of all ranks, and the evaluations."""
    values, expected_values = (
        [[record["exact"], record["evaluations"]] for record in ended.records]
        for ended in (run, expected)
    )
    assert is_bitwise_equal(values, expected_values)


def count_early_starts(run: Ended) -> tuple[int, int]:
    """Return the numbers of early-started and of rolled-back steps."""
    (counts,) = re.findall(
        r"post-validation: (\d+) steps made before they were validated, (\d+) of them undone",
        run.output[0],
    )
    return int(counts[0]), int(counts[1])


class Lab:
    """Trains on four ranks of the farm and records exact values."""

    def __init__(self, farm: Farm) -> None:
        self.farm = farm

    def run(self, *flags: str, **settings: Any) -> Ended:
        settings = {"infected": (), "stopped": None, "renews_forward_step": False} | settings
        return self.farm.run(
            4, *flags, plugin="exact_steps", argument=settings, timeout_s=400
        ).check()

    def both(self, *flags: str, infected: tuple[int, ...] = ()) -> tuple[Ended, Ended]:
        """Train with and without post-validation, check that all is equal, and return both."""
        plain = self.run(*flags, infected=infected)
        ahead = self.run(*flags, POST_VALIDATION, infected=infected)
        assert_exact(ahead, plain)
        return plain, ahead


@pytest.fixture
def lab(farm: Farm) -> Lab:
    return Lab(farm)


@pytest.mark.slow
def test_fp16_with_clipping_at_times_and_infinite_gradients(lab: Lab) -> None:
    flags = ("--fp16", *SCALED, "--clip-grad", "1.25")
    plain, ahead = lab.both(*FIFTY, *flags, infected=(7, 15, 16, 30, 42))
    guessed, undone = count_early_starts(ahead)
    assert 0 < undone < guessed
    assert sum(step["skipped"] for step in steps_of(plain)) == 5
    assert len({step["loss scale"] for step in steps_of(plain)}) > 1
    norms = [step["norm"] for step in steps_of(plain) if step["norm"] is not None]
    assert {norm > 1.25 for norm in norms} == {True, False}


def test_bf16_distributed_optimizer_with_dropout_and_per_token_loss(lab: Lab) -> None:
    flags = "--bf16 --loss-scale 64 --calculate-per-token-loss --hidden-dropout 0.1".split()
    clipping = ("--clip-grad", "1.9")
    flags = [*FIFTY, *"--train-iters 10 --num-layers 4".split(), *flags, *clipping, *DATA_PARALLEL]
    _, ahead = lab.both(*flags, infected=(5, 8))
    guessed, undone = count_early_starts(ahead)
    assert 0 < undone < guessed


@pytest.mark.skipif(
    not hasattr(megatron_optimizer, "SEPARATE_GRAD_NORM_GROUPS"),
    reason="this Megatron has no --mtp-detach-heads",
)
def test_clipping_by_the_norm_of_detached_mtp_layers(lab: Lab) -> None:
    """Only the norm of the group exceeds the limit, and only in some steps."""
    limit = 12.5
    flags = "--train-iters 12 --num-layers 4 --mtp-num-layers 1 --mtp-detach-heads"
    flags = [*flags.split(), *"--mtp-loss-scaling-factor 20 --clip-grad".split(), str(limit)]
    plain, ahead = lab.both(*FIFTY, *DATA_PARALLEL, *flags)
    assert max(step["norm"] for step in steps_of(plain)) < limit
    assert {step["group norms"]["mtp"] > limit for step in steps_of(plain)} == {True, False}
    guessed, undone = count_early_starts(ahead)
    assert 0 < undone < guessed


def test_separate_gradient_norms_are_the_reviewed_ones() -> None:
    """A new group needs a review of post-validation: the step is valid only if no norm clips."""
    groups = getattr(megatron_optimizer, "SEPARATE_GRAD_NORM_GROUPS", ("mtp",))
    assert groups == ("mtp",)


def test_offloaded_activations_of_an_early_started_step(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "schedule.json"
    file.write_text(with_offloads(make("v-zb", 2, 4)).to_json())
    precision = "--bf16 --loss-scale 64 --clip-grad 100 --num-layers 4 --train-iters 8"
    flags = (*FIFTY, *DATA_PARALLEL, *precision.split(), "--pipeline-schedule", str(file))
    _, ahead = lab.both(*flags, infected=(5,))
    assert "microbatches and stages are offloaded" in ahead.output[0]
    assert count_early_starts(ahead) == (4, 1)


def test_a_step_with_other_arguments_than_the_early_started_one(lab: Lab) -> None:
    """It is rolled back with its parameter all-gathers, which the step starts again."""
    flags = (*FIFTY, *DATA_PARALLEL, "--num-layers", "4", "--train-iters", "6", "--clip-grad", "9")
    plain = lab.run(*flags)
    ahead = lab.run(*flags, POST_VALIDATION, renews_forward_step=True)
    assert_exact(ahead, plain)
    assert count_early_starts(ahead) == (6 - 2 - 1, 0)  # not the first two, nor the last


PRECISIONS = {
    "fp32": (),
    "bf16": ("--bf16", "--loss-scale", "64"),
    "fp16": ("--fp16", *SCALED),
}
CLIPPING = {"never": "100", "sometimes": "1.25", "always": "0.01"}


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [(), tuple(DATA_PARALLEL)], ids=["pipeline", "data"])
@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_post_validation_is_bitwise_exact(
    lab: Lab, precision: str, clipping: str, parallel: tuple[str, ...]
) -> None:
    # Without a loss scale nothing skips an infinite gradient: the weights of fp32 become NaN.
    infected = (46,) if precision == "fp32" else (7, 15, 16, 30, 42)
    flags = (*PRECISIONS[precision], "--clip-grad", CLIPPING[clipping], *parallel)
    plain, ahead = lab.both(*FIFTY, *flags, infected=infected)
    guessed, undone = count_early_starts(ahead)
    if clipping == "always":
        assert guessed == 0
    else:
        assert 0 < undone < guessed
    assert sum(step["skipped"] for step in steps_of(plain)) == (0 if precision == "fp32" else 5)


@pytest.mark.slow
def test_timed_steps_start_after_validation(lab: Lab, tmp_path: Path) -> None:
    """The trace times steps 4 to 6, and steps 8 to 10 for comparison with the prediction."""
    trace = ("--pipeline-trace", str(tmp_path / "trace"))
    flags = (*BOUNDARIES, "--train-iters", "13")
    plain, ahead = lab.run(*flags), lab.run(*flags, *trace, POST_VALIDATION)
    assert_exact(ahead, plain)
    assert count_early_starts(ahead) == (13 - 2 - 1, 0)  # no timed step starts early
    assert "measured later: passes " in ahead.output[0]
    assert (tmp_path / "trace" / "trace.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["v-half", "zb-h1", "1f1b-v"])
def test_post_validation_with_other_schedules(lab: Lab, schedule: str) -> None:
    flags = ("--bf16", "--loss-scale", "64", "--clip-grad", "1.2", "--pipeline-schedule", schedule)
    _, ahead = lab.both(*FIFTY, *flags, infected=(9, 20))
    guessed, undone = count_early_starts(ahead)
    assert 0 < undone < guessed


BOUNDARIES = (
    *V_ZB,
    *"--train-iters 16 --log-interval 99 --clip-grad 100 --hidden-dropout 0.1".split(),
)
EVALUATION = ("--eval-interval", "6", "--eval-iters", "1", "--ckpt-format", "torch_dist")


@pytest.mark.slow
def test_evaluation_and_saving_see_a_validated_state(lab: Lab, tmp_path: Path) -> None:
    flags = (*BOUNDARIES, *EVALUATION, "--save-interval", "99")
    plain_folder, ahead_folder = str(tmp_path / "plain"), str(tmp_path / "ahead")
    plain = lab.run(*flags, "--save", plain_folder, "--exit-interval", "9")
    # Stopped by a signal after the next step has started early.
    stop = ("--exit-signal-handler", POST_VALIDATION)
    ahead = lab.run(*flags, "--save", ahead_folder, *stop, stopped=9)
    assert_exact(ahead, plain)
    # Not the first two, nor before the evaluation.
    assert count_early_starts(ahead) == (9 - 2 - 1, 0)
    plain = lab.run(*flags, "--load", plain_folder)
    ahead = lab.run(*flags, "--load", ahead_folder, POST_VALIDATION)
    assert_exact(ahead, plain)
    assert len(steps_of(ahead)) == 7
    assert count_early_starts(ahead) == (7 - 2 - 2, 0)  # nor before the end


def test_schedule_without_gain_logs_one_line(farm: Farm) -> None:
    message = f"{POST_VALIDATION} gains nothing with --log-interval 1: an iteration that is "
    all_schedules, other_run = (
        farm.run(2, *V_ZB, POST_VALIDATION, "--log-interval", interval).check()
        for interval in ("1", "2")
    )
    assert [text.count(message) for text in all_schedules.output] == [1, 0]
    assert [text.count(message) for text in other_run.output] == [0, 0]
