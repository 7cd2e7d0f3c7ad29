"""The planner's walk moves passes of whatever kinds the table has, each on its resource's lane."""

from collections.abc import Iterator

import numpy as np
import pytest

from megatron_vshape.core.model import kinds
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import OFFLOAD, PARTS, PROCESSOR, Kind, NeedTable, Read
from megatron_vshape.core.model.placement import v_shape
from megatron_vshape.core.model.schedule import Objective
from megatron_vshape.core.planner import improve, job_shop
from megatron_vshape.core.planner.search import plan

DEVICES, MICROBATCHES = 4, 10
STEPS = 40_000


def costs_of(copy_us: float, part: float = 0.6, devices: int = DEVICES) -> Costs:
    stages = 2 * devices

    def each(value: float) -> tuple[float, ...]:
        return (value,) * stages

    copies = (("copy_out_us", each(copy_us)), ("copy_back_us", each(copy_us)))
    others = (*copies, ("offloaded_bytes", each(part)))
    return Costs(each(1), each(1.15), each(0.85), 0.05, each(1), each(1), others=others)


def test_every_device_has_its_lanes_in_one_row() -> None:
    """A pass of another resource stands right behind the last that it reads, or its lane's last."""
    costs = costs_of(0.4)
    made = plan(costs, DEVICES, MICROBATCHES, 4, trades=True, steps=STEPS)
    assert made.schedule.kinds > set(OFFLOAD)
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


@pytest.fixture
def checking() -> Iterator[tuple[Kind, ...]]:
    """Return F, B, W, copies, and one that reads two devices and needs memory while it runs."""
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
        yield (*PARTS, *OFFLOAD, kind)
    finally:
        kinds.remove(kind)


def one_by_one(problem: job_shop.Problem, shop: improve.JobShop) -> np.ndarray:
    """Return all passes of one microbatch, each behind what it reads, then those of the next."""
    m, kinds = problem.num_microbatches, problem.kinds
    table = NeedTable(len(problem.placement), kinds)
    sorts = [len(kinds) * stage + kinds.index(table.parts[part]) for part, stage in table.in_turn()]
    row = np.full((len(problem.room), int(max(shop.length))), improve.NONE, np.int64)
    for lane in range(len(row)):
        own = [sort for sort in sorts if problem.sorts.lane[sort] == lane]
        passes = [sort * m + microbatch for microbatch in range(m) for sort in own]
        row[lane, : len(passes)] = passes
    return row


@pytest.mark.parametrize("seed", range(4))
def test_the_walk_keeps_everything_up_to_date(checking: tuple[Kind, ...], seed: int) -> None:
    costs, m = costs_of(0.4), 8
    sizes = DEVICES, m, 6.0, Objective.MAKESPAN, v_shape(DEVICES)
    problem = job_shop.make_problem(costs, *sizes, checking)
    shop = job_shop.make_shop(problem, m)
    ways = (shop.before.shape[1], shop.after.shape[1])
    assert ways == (2, 4)  # of kinds that a microbatch may do without, none stands for another
    row = one_by_one(problem, shop)
    state = improve.new_state(row, seed, max(ways))
    assert improve.settle(shop, state)
    before = improve.objective(shop, state)
    value = improve.local_search(shop, state, shop.length, shop.length, 20_000)
    again = improve.new_state(state.row, 1, max(ways))
    assert improve.settle(shop, again)
    assert value == improve.objective(shop, again) < before
    for name in ("place", "head", "tail", "held"):
        assert np.array_equal(getattr(state, name), getattr(again, name)), name
