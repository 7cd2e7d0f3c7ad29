"""Numbers of microbatches that a schedule cannot run are rejected before the first step."""

from argparse import Namespace

import pytest
from mcore.farm import Farm
from mcore.test_bad_input import rejection_text
from megatron.core import num_microbatches_calculator as calculator

from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.setup.megatron_schedules import (
    changing_counts,
    check_interleaved,
    fixed_counts,
    runs_interleaved,
)

INTERLEAVED = "--pipeline-schedule interleaved-1f1b"


def model_arguments(**changed: object) -> Namespace:
    """Return validated arguments of a run with 8 microbatches on 4 pipeline ranks."""
    settings = {
        "pipeline_schedule": "interleaved-1f1b",
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": 2,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "global_batch_size": 16,
        "micro_batch_size": 1,
        "eval_iters": 10,
        "eval_global_batch_size": 16,
        "eval_micro_batch_size": 1,
    }
    return Namespace(**(settings | changed))


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")  # two copies


@pytest.mark.parametrize("number", range(1, 14))
@pytest.mark.parametrize("group", [4, 5, 6])
def test_numbers_that_megatrons_schedule_runs(number: int, group: int) -> None:
    """By the text of the two errors that Megatron raises within a step."""
    in_range = 4 <= group <= number
    assert runs_interleaved(number, 4, group) == (in_range and number % group not in (1, 2, 3))


REJECTED: dict[str, tuple[dict[str, object], str]] = {
    "training": ({"global_batch_size": 6}, "3 microbatches, the number in a training step"),
    "evaluation": ({"eval_global_batch_size": 2}, "1 microbatches, the number in an evaluation"),
    "evaluation by its size": ({"eval_micro_batch_size": 4}, "2 microbatches, the number in an ev"),
    "group": ({"microbatch_group_size_per_vp_stage": 6}, "in groups of 6. Make --global-batch-si"),
}


@pytest.mark.parametrize(("changed", "said"), REJECTED.values(), ids=REJECTED)
def test_numbers_that_it_cannot_run(changed: dict[str, object], said: str) -> None:
    args = model_arguments(**changed)
    with pytest.raises(UnsupportedError, match=said):
        check_interleaved(args, fixed_counts(args))


FINE: dict[str, dict[str, object]] = {
    "both": {},
    "no evaluation": {"eval_global_batch_size": 2, "eval_iters": 0},
    "no training": {"global_batch_size": 2, "skip_train": True},
    "one chunk": {"global_batch_size": 2, "virtual_pipeline_model_parallel_size": None},
    "training changes": {"global_batch_size": 2, "step_batch_size_schedule": "0:16"},
}


@pytest.mark.parametrize("changed", FINE.values(), ids=FINE)
def test_numbers_that_it_can_run(changed: dict[str, object]) -> None:
    args = model_arguments(**changed)
    check_interleaved(args, fixed_counts(args))


@pytest.mark.skipif(
    not hasattr(calculator, "StepBatchsizeNumMicroBatchesCalculator"),
    reason="Megatron has schedules of batch sizes from 0.19 on",
)
class TestSchedulesOfBatchSizes:
    SIZES = "0:2 4:8 12:24"

    @pytest.mark.parametrize(
        ("consumed", "iterations", "numbers"),
        [(0, 9, [1, 4, 12]), (0, 3, [1, 4]), (4, 9, [4, 12]), (12, 9, [12])],
    )
    def test_the_steps_that_are_left_count(
        self, consumed: int, iterations: int, numbers: list[int]
    ) -> None:
        calculator.destroy_num_microbatches_calculator()
        calculator.init_num_microbatches_calculator(
            0, None, None, 1, 2, step_batch_size_schedule=self.SIZES
        )
        args = model_arguments(
            step_batch_size_schedule=self.SIZES,
            consumed_train_samples=consumed,
            iteration=0,
            train_iters=iterations,
        )
        assert [count.number for count in changing_counts(args)] == numbers
        assert calculator.get_num_microbatches() == numbers[0]
        calculator.destroy_num_microbatches_calculator()

    @pytest.mark.parametrize(
        ("schedule", "sizes", "said"),
        [
            (
                "interleaved-1f1b",
                "0:4 128:6",
                "6 microbatches, the number in training step 2 (--st",
            ),
            ("dualpipev", "0:6 192:8", "dualpipev requires at least 2 x ranks microbatches"),
        ],
    )
    def test_a_size_that_cannot_run(self, farm: Farm, schedule: str, sizes: str, said: str) -> None:
        # Thresholds are tokens, and a sample has 32.
        flags = ("--pipeline-schedule", schedule, "--step-batch-size-schedule", sizes)
        more_flags = ("--train-iters", "3")
        assert said in rejection_text(farm, *flags, *more_flags, without=("--global-batch-size",))

    def test_sizes_that_can_run(self, farm: Farm) -> None:
        flags = ("--pipeline-schedule", "dualpipev", "--step-batch-size-schedule", "0:8 256:9")
        run = farm.run(4, *flags, "--train-iters", "2", without=("--global-batch-size",)).check()
        assert "global batch size:     9" in run.output[3]


def test_an_evaluation_that_cannot_run(farm: Farm) -> None:
    flags = "--eval-iters 1 --eval-interval 1 --eval-global-batch-size 6"
    text = rejection_text(farm, *INTERLEAVED.split(), *flags.split())
    assert "does not work with 6 microbatches, the number in an evaluation step" in text
    assert "Set --eval-iters 0, or make --eval-global-batch-size / (" in text
