"""Variable lengths, packed sequences, wide messages, and changing numbers of microbatches."""

from pathlib import Path
from typing import Any

import pytest
from mcore.farm import Farm, Train
from mcore.parity import (
    EVALUATED,
    UNTIED,
    assert_close_tensors,
    assert_same_training,
    gradients_by_parameter,
)
from megatron.core.transformer import TransformerConfig

from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.mcore.setup import plans
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.setup.run_config import ScheduleChoice


@pytest.mark.slow
def test_messages_are_received_when_posted_as_on_gpus(train: Train, farm: Farm) -> None:
    """A pass order that deadlocked before messages were received in this way."""
    steps, plugin = EVALUATED.split(), "variable_lengths"
    megatron_run = train(4, *steps, "--pipeline-schedule", "1f1b", plugin=plugin)
    flags = ("--pipeline-schedule", "zb-h1", *steps)
    package_run = farm.run(4, *flags, plugin=plugin, argument="taken").check()
    assert_same_training(package_run, megatron_run)


@pytest.mark.skipif(
    hasattr(TransformerConfig, "enable_mhc_connections"),
    reason="this Megatron has such models, and rejects them with a pipeline",
)
@pytest.mark.parametrize("width", ["fixed", pytest.param("growing", marks=pytest.mark.slow)])
def test_messages_wider_than_the_hidden_size(farm: Farm, width: str) -> None:
    """Of several residual streams; with shapes sent ahead they may also grow from stage to stage.

    Megatron 0.19 has no such models. Its 1F1B supports them only if shapes are sent ahead.
    """
    steps = ("--train-iters", "2", "--clip-grad", "0", UNTIED)
    sent_ahead = "any" if width == "fixed" else width
    megatron_run = farm.run(2, *steps, plugin="wide_messages", argument=sent_ahead).check()
    flags = ("--pipeline-schedule", "zb-h1", *steps)
    package_run = farm.run(2, *flags, plugin="wide_messages", argument=width).check()
    assert_same_training(package_run, megatron_run)


def run_packed(farm: Farm, ranks: int, **settings: Any) -> list[dict[str, Any]]:
    return farm.run(ranks, plugin="packed_sequences", argument=settings).check().records


@pytest.mark.parametrize(
    ("schedule", "tensor", "pipeline"),
    [
        ("v-half", 1, 2),
        pytest.param("v-half", 2, 2, marks=pytest.mark.slow),
        pytest.param("v-half", 1, 4, marks=pytest.mark.slow),
        pytest.param("v-zb", 2, 4, marks=pytest.mark.slow),
        pytest.param("v-half", 1, 8, marks=pytest.mark.slow),
        pytest.param("v-zb", 2, 8, marks=pytest.mark.slow),
    ],
)
def test_packed_sequences_train_like_1f1b(
    farm: Farm, schedule: str, tensor: int, pipeline: int
) -> None:
    ranks = tensor * pipeline
    settings = {"tensor": tensor, "config": {"num_layers": max(8, 2 * pipeline)}}
    megatron_ranks = run_packed(farm, ranks, schedule=None, **settings)
    package_ranks = run_packed(farm, ranks, schedule=schedule, **settings)
    assert package_ranks[-1]["losses"] == pytest.approx(megatron_ranks[-1]["losses"], abs=1e-6)
    gradients = map(gradients_by_parameter, (package_ranks, megatron_ranks))
    assert_close_tensors(*gradients, rtol=1e-5, atol=1e-6)


def test_stage_without_sequence_boundaries_is_rejected(farm: Farm) -> None:
    packed, merged = (
        run_packed(farm, 2, schedule="v-half", tensor=1, merges=merges)[-1]["losses"]
        for merges in (False, True)
    )
    assert packed[1] == pytest.approx(merged[1], abs=1e-6)  # one sequence
    assert packed[0] != pytest.approx(merged[0], abs=1e-4)
    with pytest.raises(AssertionError, match="stages 1, 2 were called without packed_seq_params"):
        run_packed(farm, 2, schedule="v-half", tensor=1, without=0)


def run_steps(
    farm: Farm, schedule: str | None, ranks: int, steps: int, **settings: Any
) -> list[dict[str, Any]]:
    settings |= {"schedule": schedule, "steps": steps}
    run = farm.run(ranks, plugin="changing_counts", argument=settings, timeout_s=3000)
    return run.check().records


@pytest.mark.parametrize(
    ("schedule", "ranks", "steps"),
    [
        ("v-half", 2, 24),
        pytest.param("v-half", 4, 1000, marks=pytest.mark.slow),
        pytest.param("v-min", 4, 60, marks=pytest.mark.slow),
        pytest.param("v-zb", 4, 60, marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_1f1b_and_nothing_accumulates(
    farm: Farm, schedule: str, ranks: int, steps: int
) -> None:
    plain = run_steps(farm, None, ranks, steps)
    package_ranks = run_steps(farm, schedule, ranks, steps)
    assert [record["chunks"] for record in package_ranks] == [2] * ranks
    assert len(plain[-1]["losses"]) >= steps
    assert package_ranks[-1]["losses"] == pytest.approx(plain[-1]["losses"], abs=1e-5)
    assert [record["kept"] for record in package_ranks] == [
        0
    ] * ranks  # tensors of the data after their step
    # Memory that an inference engine on the same GPUs has between steps.
    package_counts, megatron_counts = (
        [sum(ranks) for ranks in zip(*(rank["between"] for rank in runs), strict=True)]
        for runs in (package_ranks, plain)
    )
    assert all(
        package_count <= megatron_count
        for package_count, megatron_count in zip(package_counts, megatron_counts, strict=True)
    ), (package_counts, megatron_counts)
    for rank in package_ranks:
        half, end = rank["used"]
        assert half["groups"] == end["groups"]  # no communicator is made after the first step
        # The last step may leave its last messages, of a few hundred tokens, until the next.
        assert end["tensors"] <= half["tensors"] + 4
        assert end["bytes"] <= half["bytes"] + 64 * 2**10
        assert end["objects"] <= half["objects"] + 100


def test_an_evaluation_may_come_first_with_any_number_of_microbatches(
    farm: Farm, tmp_path: Path
) -> None:
    """RL libraries compute log-probabilities before they train."""
    file = tmp_path / "mine.json"
    file.write_text(make("v-zb", 2, 6).to_json())
    drawn = [(1, [5], True), (6, [4, 7, 5, 9, 3, 6], False), (3, [8, 4, 5], True)]
    plain = run_steps(farm, None, 2, 0, drawn=drawn)
    assert len(plain[-1]["losses"]) == 10
    for schedule in ("dualpipev", str(file)):  # at least 4 microbatches, and 6
        package_ranks = run_steps(farm, schedule, 2, 0, drawn=drawn)
        assert package_ranks[-1]["losses"] == pytest.approx(plain[-1]["losses"], abs=1e-5)


@pytest.mark.parametrize("name", ["1f1b-v", "v-min", "v-half", "v-zb", "v-two-thirds", "zb-h1"])
@pytest.mark.parametrize("kernels", [True, False])
def test_any_number_of_microbatches_has_a_program(name: str, kernels: bool) -> None:
    planner = Planner(ScheduleChoice(4, name, kernels=kernels))
    for count in (*range(1, 18), 31):
        plan, program = planner.plan_step(count), planner.evaluation_program(count)
        assert plan.schedule.num_microbatches == count
        assert program.schedule.num_microbatches == count
        assert planner.plan_step(count) is plan
        assert planner.evaluation_program(count) is program


def test_plans_are_dropped_when_they_have_not_been_used_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plans, "MOST_MICROBATCHES", 20)
    planner = Planner(ScheduleChoice(2, "v-half"))
    first = planner.plan_step(2)
    for count in range(3, 40):
        planner.plan_step(count)
        planner.evaluation_program(count)
        if count < 19:  # used again, so it is kept in addition to the latest
            assert planner.plan_step(2) is first
    assert planner.plan_step(2) is not first
    assert list(planner._training) == [2]
    assert len(planner._evaluation) == 1
