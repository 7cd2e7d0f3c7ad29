"""Steps with another number of microbatches each time, as dynamic batches have them."""

from pathlib import Path
from typing import Any

import pytest
from mcore.farm import Farm

from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.mcore.setup import plans
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.setup.run_config import ScheduleChoice


def run_steps(
    farm: Farm, schedule: str | None, ranks: int, steps: int, **settings: Any
) -> list[dict[str, Any]]:
    settings |= {"schedule": schedule, "steps": steps}
    run = farm.run(ranks, plugin="changing_counts", given=settings, timeout_s=3000)
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
    # What is left for an inference engine on the same GPUs between steps.
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
        if count < 19:  # used again, and so kept beside the latest
            assert planner.plan_step(2) is first
    assert planner.plan_step(2) is not first
    assert list(planner._training) == [2]
    assert len(planner._evaluation) == 1
