"""Where a step's time went that was not predicted."""

from dataclasses import replace

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.mcore.observe.lateness import slow_among_replicas, where_told

SCHEDULE = make("v-half", 4, 8)
PLANNED = Costs.uniform(4, 8, 1000, 1100, 900, 50)


def told(costs: Costs) -> list[str]:
    """Return what is told of steps that run at these costs, measured without fault."""
    return where_told([simulate(SCHEDULE, costs)] * 3, PLANNED, replace(costs, send_us=50.0))


def test_nothing_is_told_of_steps_that_take_what_was_predicted() -> None:
    assert told(PLANNED) == []
    assert told(Costs.uniform(4, 8, 990, 1100, 900, 50)) == []


def test_messages_and_the_host_and_passes_are_told_apart() -> None:
    (line,) = told(replace(PLANNED, send_us=400.0))
    assert "passes +0.00 ms, the host between passes +0.00 ms, messages waited for +" in line
    line = told(replace(PLANNED, host_us=80.0))[0]
    assert "passes +0.00 ms, the host between passes +" in line
    assert line.endswith("messages waited for +0.00 ms")
    line = told(Costs.uniform(4, 8, 1200, 1300, 1100, 50))[0]
    assert line.endswith("the host between passes +0.00 ms, messages waited for +0.00 ms")


def test_the_slowest_rank_is_named_with_its_factor() -> None:
    hot = [1.3 if device == 2 else 1.0 for device in SCHEDULE.placement]
    times = {
        name: tuple(us * by for us, by in zip(getattr(PLANNED, name), hot, strict=True))
        for name in ("forward_us", "backward_us", "weight_us")
    }
    costs = PLANNED.having(**times)
    assert told(costs)[1] == (
        "pipeline rank 2 is the slowest: its passes take 1.30 times what was predicted, those of "
        "its peers 1.00"
    )
    both = [((0, 2, 4, 6), PLANNED), ((1, 3, 5, 7), costs), ((8, 9, 10, 11), PLANNED)]
    (line,) = slow_among_replicas(both, SCHEDULE.placement)
    assert line.startswith("rank 5 is slow: its passes take 1.30 times those of its replicas")
    alone = replace(costs, layers=(2,) * 8)
    (line,) = slow_among_replicas([((0, 1, 2, 3), alone)], SCHEDULE.placement)
    assert line.startswith("rank 2 is slow: its passes take 1.30 times those of the other ranks'")
    assert slow_among_replicas([((0, 1, 2, 3), PLANNED)], SCHEDULE.placement) == []
