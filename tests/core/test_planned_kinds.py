"""The planner plans whatever kinds the table has: here copies of activations to the host and back.

OFFLOAD has them: copies beside the processor, each way on a lane of its own, and what lets go of
memory and takes it again in the processor's row.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from megatron_vshape.core.check import bounds
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model import kinds
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import OFFLOAD, PARTS, PROCESSOR, Kind, Read, ScheduleError
from megatron_vshape.core.model.placement import v_shape
from megatron_vshape.core.model.schedule import Objective
from megatron_vshape.core.paper.blocks import v_half
from megatron_vshape.core.planner import cyclic_orders, improve, job_shop
from megatron_vshape.core.planner.exact import prove
from megatron_vshape.core.planner.inserting import insert
from megatron_vshape.core.planner.search import Plan, plan

DEVICES, MICROBATCHES = 4, 10
STEPS = 40_000


@pytest.fixture
def offloading() -> tuple[Kind, ...]:
    """Return F, B, W and the four kinds that copy."""
    return (*PARTS, *OFFLOAD)


def costs_of(copy_us: float, part: float = 0.6, devices: int = DEVICES) -> Costs:
    stages = 2 * devices

    def each(value: float) -> tuple[float, ...]:
        return (value,) * stages

    copies = (("copy_out_us", each(copy_us)), ("copy_back_us", each(copy_us)))
    others = (*copies, ("offloaded_bytes", each(part)))
    return Costs(each(1), each(1.15), each(0.85), 0.05, each(1), each(1), others=others)


def check(made: Plan, costs: Costs, limit: float, planned: tuple[Kind, ...]) -> None:
    """Raise unless the plan is complete, fits, and says of itself what the simulator says."""
    schedule = made.schedule
    verify(schedule, limit, costs)
    assert schedule.kinds == set(planned)
    for row in schedule.order:
        assert len(row) == 2 * made.schedule.num_microbatches * len(planned)
    assert made.value == pytest.approx(made.objective.of(simulate(schedule, costs)))
    assert made.peak == peak_held(schedule, costs)
    assert made.lower_bound <= made.value


def test_copies_beat_what_any_order_alone_can_do_at_the_limit(
    offloading: tuple[Kind, ...],
) -> None:
    costs, only = costs_of(0.4), [v_shape(DEVICES)]
    values: list[float] = []
    made = plan(
        costs,
        DEVICES,
        MICROBATCHES,
        4,
        placements=only,
        kinds=offloading,
        steps=5 * STEPS,
        progress=lambda _steps, value, _bound: values.append(value),
    )
    check(made, costs, 4, offloading)
    alone = plan(costs, DEVICES, MICROBATCHES, 4, placements=only, steps=STEPS)
    check(alone, costs, 4, PARTS)
    assert made.value < alone.lower_bound
    start = plan(costs, DEVICES, MICROBATCHES, 4, placements=only, kinds=offloading, steps=0)
    check(start, costs, 4, offloading)
    assert made.value < start.value  # the walk moves them like any others
    assert values[-1] == pytest.approx(made.value, rel=1e-4)


def test_a_limit_that_order_alone_cannot_meet(offloading: tuple[Kind, ...]) -> None:
    costs, limit = costs_of(0.4), 1.5
    with pytest.raises(bounds.LimitError):
        plan(costs, DEVICES, 5, limit, steps=STEPS)
    made = plan(costs, DEVICES, 5, limit, kinds=offloading, steps=STEPS)
    check(made, costs, limit, offloading)
    with pytest.raises(ScheduleError, match="no order was found within the limits"):
        plan(costs, DEVICES, 5, 0.9, kinds=offloading, steps=STEPS)


def test_every_device_has_its_lanes_in_one_row(offloading: tuple[Kind, ...]) -> None:
    """A pass of another resource stands right behind the last that it reads, or its lane's last."""
    costs = costs_of(0.4)
    made = plan(costs, DEVICES, MICROBATCHES, 4, kinds=offloading, steps=STEPS)
    for row in made.schedule.order:
        place = {work: at for at, work in enumerate(row)}
        last: dict[str, int] = {}
        for at, work in enumerate(row):
            if work.kind.resource == PROCESSOR:
                continue
            behind = [place[need] for need in work.needs(made.schedule.num_stages)]
            behind.append(last.get(work.kind.resource, -1))
            between = row[max(behind) + 1 : at]
            assert all(each.kind.resource != PROCESSOR for each in between)
            last[work.kind.resource] = at


def test_a_plan_of_other_kinds_is_not_proven(offloading: tuple[Kind, ...]) -> None:
    pytest.importorskip("ortools")
    costs = costs_of(0.4, devices=2)
    made = plan(costs, 2, 3, 3, kinds=offloading, steps=1000)
    assert prove(made, costs, 3, 1.0) is made


@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize(("devices", "microbatches"), [(1, 1), (2, 3), (3, 7)])
def test_any_counts(
    offloading: tuple[Kind, ...], devices: int, microbatches: int, objective: Objective
) -> None:
    costs = costs_of(2.5, 1.0, devices)
    made = plan(costs, devices, microbatches, devices + 1, objective, kinds=offloading, steps=2000)
    check(made, costs, devices + 1, offloading)


@pytest.fixture
def checking(offloading: tuple[Kind, ...]) -> Iterator[tuple[Kind, ...]]:
    """Return the kinds with one that reads two other devices, and needs memory while it runs."""
    kind = kinds.define(
        "X",
        label="check",
        method="check",
        reads=[Read("F", +1), Read("F", -1), Read("D")],
        time="copy_out_us",
        takes="offloaded_bytes",
        frees="offloaded_bytes",
    )
    try:
        yield (*offloading, kind)
    finally:
        kinds.remove(kind)


@pytest.mark.parametrize("seed", range(4))
def test_the_walk_keeps_everything_up_to_date(checking: tuple[Kind, ...], seed: int) -> None:
    costs, m = costs_of(0.4), 8
    sizes = DEVICES, m, 6.0, Objective.MAKESPAN, v_shape(DEVICES)
    problem = job_shop.make_problem(costs, *sizes, checking)
    shop = job_shop.make_shop(problem, m)
    ways = (shop.before.shape[1], shop.after.shape[1])
    assert ways == (2, 4)  # of kinds that a microbatch may do without, none stands for another
    parts = job_shop.make_shop(job_shop.with_parts_alone(problem), m)
    start = cyclic_orders.cyclic_order_of_block(v_half(DEVICES)).unroll(m)
    row = insert(problem, parts, start)
    state = improve.new_state(row, seed, max(ways))
    assert improve.settle(shop, state)
    before = improve.objective(shop, state)
    value = improve.walk(shop, state, shop.length, shop.length, 20_000)
    again = improve.new_state(state.row, 1, max(ways))
    assert improve.settle(shop, again)
    assert value == improve.objective(shop, again) < before
    for name in ("place", "head", "tail", "held"):
        assert np.array_equal(getattr(state, name), getattr(again, name)), name


def test_memory_that_is_needed_only_while_a_pass_runs_counts(checking: tuple[Kind, ...]) -> None:
    costs = costs_of(0.4)
    made = plan(costs, DEVICES, 6, 3, placements=[v_shape(4)], kinds=checking, steps=STEPS)
    check(made, costs, 3, checking)


def test_the_kinds_must_be_complete(offloading: tuple[Kind, ...]) -> None:
    costs = costs_of(0.4)
    with pytest.raises(ScheduleError, match="of the kinds F, B, W, L, R, H lacks D"):
        plan(costs, DEVICES, 4, 4, kinds=[kind for kind in offloading if kind != "D"])
    with pytest.raises(ScheduleError, match="of the kinds F, B lacks W"):
        plan(costs, DEVICES, 4, 4, kinds=(Kind.F, Kind.B))
    with pytest.raises(ScheduleError, match="no passes of BW, which does what others do"):
        plan(costs, DEVICES, 4, 4, kinds=(*PARTS, Kind.BW))
