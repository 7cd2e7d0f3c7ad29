"""Which order is the fastest in the run itself: `auto` tries its plan beside others."""

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mcore.farm import Ended, Farm
from mcore.test_training import UNTIED, losses

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.schedule import load_schedule
from megatron_vshape.mcore.observe.drift import WINDOW, Drift
from megatron_vshape.mcore.observe.trial import OF_STEPS, SHARE, TURN, Trial, worth_trying

Train = Callable[..., Ended]


def tried(real_s: list[float], stretched: Callable[[], float]) -> tuple[Trial, int, int]:
    """Run a trial of candidates that really take so long; return it, who won, after what steps."""
    trial = Trial([f"order {at}" for at in range(len(real_s))], real_s)
    before = None
    for step in range(2 * OF_STEPS):
        running = trial.running
        if trial.ran(before):
            decided = trial.judged()
            trial.go_on(decided)
            if decided.table:
                assert decided.table.splitlines()[1 + decided.left[0]].endswith("stays")
                return trial, decided.left[0], step + 1
        before = real_s[running] * stretched()
    raise AssertionError("the trial does not end")


def noise(seed: int) -> Callable[[], float]:
    """Return what a calm machine makes of a step."""
    rng = random.Random(seed)
    return lambda: 1 + abs(rng.gauss(0, 0.01))


@pytest.mark.parametrize("seed", range(20))
def test_the_faster_order_wins_within_a_hundredth_of_the_steps(seed: int) -> None:
    real = [1.04, 1.0, 1.07]
    trial, winner, steps = tried(real, noise(seed))
    assert winner == 1
    assert steps < OF_STEPS
    cost = sum(real[at] - 1.0 for at, taken in enumerate(trial.taken_s) for _ in taken)
    assert cost <= SHARE * OF_STEPS


def test_orders_that_take_the_same_are_tried_as_long_as_a_trial_may_last() -> None:
    _, winner, steps = tried([1.0, 1.0], noise(0))
    assert winner in (0, 1)
    assert OF_STEPS - 2 * 2 * TURN <= steps <= OF_STEPS


def test_a_disturbed_machine_seldom_hides_the_fastest() -> None:
    """Of 100 trials in which other programs stretch a sixth of the steps by up to a half."""
    good, cost = 0, 0.0
    real = [1.04, 1.0, 1.02, 1.06]
    for seed in range(100):
        rng, left = random.Random(seed), [0]

        def stretched(rng: random.Random = rng, left: list[int] = left) -> float:
            if not left[0] and rng.random() < 0.05:
                left[0] = rng.randint(1, 6)
            left[0] = max(left[0] - 1, 0)
            return 1 + abs(rng.gauss(0, 0.01)) + (rng.random() / 2 if left[0] else 0.0)

        trial, winner, _ = tried(real, stretched)
        good += real[winner] <= 1.01
        cost += sum(real[at] - 1.0 for at, taken in enumerate(trial.taken_s) for _ in taken)
    assert good >= 95
    assert cost / 100 <= SHARE * OF_STEPS


def test_what_is_predicted_to_be_much_slower_is_not_tried() -> None:
    assert worth_trying([1.0, 1.2, 1.05, 1.01, 0.99]) == [0, 4, 3, 2]
    assert worth_trying([1.0, 1.09, 1.09, 1.09, 1.09]) == [0, 1, 2]


def test_steps_drift() -> None:
    drift = Drift(0.05, None)
    assert not any(drift.ends_step(1.0 + at % 2 / 100) for at in range(10 * WINDOW))
    assert not any(drift.ends_step(1.0 if at % 3 else 9.0) for at in range(WINDOW))
    found = [drift.ends_step(1.07) for _ in range(WINDOW)]
    assert found[-1]
    assert sum(found) == 1


@pytest.mark.parametrize(
    "drift", [pytest.param((), marks=pytest.mark.slow), ("--pipeline-replan", "drift:1%")]
)
def test_a_run_tries_its_plan_beside_others(
    train: Train, farm: Farm, tmp_path: Path, drift: tuple[str, ...]
) -> None:
    """Every order gives the same numbers, whatever ran which step.

    To the bit: weight gradients are added up microbatch by microbatch in all of them.
    """
    steps = "56" if drift else "40"
    small = ("--num-layers", "4", "--global-batch-size", "4", "--seq-length", "16")
    many = ("--train-iters", steps, *small, "--clip-grad", "0", UNTIED)
    theirs = train(2, "--pipeline-schedule", "1f1b", *many)
    limit = ("--pipeline-memory-limit", ".05", "--pipeline-trace", str(tmp_path))
    flags = ("--pipeline-profile-iterations", "2:3", *limit, *drift, *many)
    plugin = Path(__file__).parent / "last_wins.py"
    ours = farm.run(2, "--pipeline-schedule", "auto", *flags, plugin=plugin).check()
    assert losses(ours) == losses(theirs)
    text = ours.output[0]
    turns = re.search(r"orders that get steps in turn: auto, (.*)", text)
    assert turns is not None, text[-3000:]
    names = ["auto", *turns[1].split(", ")]
    table = text.partition("orders tried in turn:\n")[2].splitlines()[: len(names) + 1]
    assert table[0].split() == ["order", "predicted", "step,", "ms", "+-", "steps"]
    assert [line[:34].rstrip() for line in table[1:]] == names
    assert table[-1].endswith("stays")  # as the plugin has it
    # The winner's memory and time are then held against its own prediction.
    assert f"predicted for {names[-1]}, and measured later: passes " in text
    assert ("measured anew" in text) == bool(drift)
    assert text.count("measured costs: ") == (2 if drift else 1)
    # What was learned is kept, and offered to who starts again.
    assert load_schedule(tmp_path / "schedule.json").name == names[-1]
    costs = Costs.load(tmp_path / "costs.json")
    assert re.search(
        r"\d{4}-\d\d-\d\d, .*, 4 microbatches, 64 tokens", dict(costs.sources)["forward_us"]
    )
    again = farm.run(2, "--pipeline-schedule", "auto", *limit, *many[2:]).check()
    assert f"{tmp_path}/costs.json was measured in training on 2 ranks" in again.output[0]


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_step_may_run_another_order(farm: Farm, replicas: int) -> None:
    """Losses and parameters keep every bit: under one order, another in each step, and 1F1B."""
    steps = ("--train-iters", "6", "--num-layers", "4", "--clip-grad", "0", UNTIED)
    flags = (*steps, "--pipeline-model-parallel-size", "2")
    plugin = Path(__file__).parent / "any_order.py"
    theirs, one, another = (
        farm.run(2 * replicas, "--pipeline-schedule", name, *flags, plugin=each).check()
        for name, each in (("1f1b", None), ("v-half", None), ("v-half", plugin))
    )
    assert len(losses(another)) == 6
    orders = set(re.findall(r"order (\w+) runs", another.output[0]))
    assert len(orders) == 6
    for other in (one, theirs):
        assert losses(another) == losses(other)
        mine, yours = another.merged("parameters"), other.merged("parameters")
        assert mine.keys() == yours.keys()
        assert [name for name in mine if not torch.equal(mine[name], yours[name])] == []
