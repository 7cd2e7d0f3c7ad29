"""The local search moves passes of all kinds in the table, each on its resource queue."""

from collections.abc import Iterator

import numpy as np
import pytest

from megatron_vshape.core.model import kinds
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import (
    COPY_OUT,
    OFFLOAD,
    PARTS,
    PROCESSOR,
    Kind,
    NeedTable,
    Read,
)
from megatron_vshape.core.model.placement import v_shape
from megatron_vshape.core.model.schedule import Objective
from megatron_vshape.core.planner import improve, job_shop
from megatron_vshape.core.planner.search import plan

DEVICES, MICROBATCHES = 4, 10
STEPS = 40_000


def costs_of(copy_us: float, part: float = 0.6, devices: int = DEVICES) -> Costs:
    stages = 2 * devices

    def per_stage(value: float) -> tuple[float, ...]:
        return (value,) * stages

    return Costs.of(
        per_stage(1),
        per_stage(1.15),
        per_stage(0.85),
        0.05,
        per_stage(1),
        per_stage(1),
        copy_out_us=per_stage(copy_us),
        copy_back_us=per_stage(copy_us),
        offloaded_bytes=per_stage(part),
    )


def test_queues_of_a_device_share_one_row() -> None:
    """A pass of another resource directly follows its last input, or the last pass of its queue."""
    costs = costs_of(0.4)
    result = plan(costs, DEVICES, MICROBATCHES, 4, trades=True, steps=STEPS)
    assert result.schedule.kinds > set(OFFLOAD)
    for row in result.schedule.order:
        positions = {work: index for index, work in enumerate(row)}
        last: dict[str, int] = {}
        for index, work in enumerate(row):
            if work.kind.resource == PROCESSOR:
                continue
            behind = [
                positions[dependency] for dependency in work.needs(result.schedule.num_stages)
            ]
            behind.append(last.get(work.kind.resource, -1))
            between = row[max(behind) + 1 : index]
            assert all(passed_over.kind.resource != PROCESSOR for passed_over in between)
            last[work.kind.resource] = index


@pytest.fixture
def checking() -> Iterator[tuple[Kind, ...]]:
    """Return F, B, W, offload kinds, and a kind that reads two devices and needs workspace."""
    kind = kinds.define(
        Kind(
            "X",
            label="check",
            method="check",
            reads=(Read("F", +1), Read("F", -1), Read("D")),
            time=COPY_OUT.time,
            allocated=COPY_OUT.offloaded,
            freed=COPY_OUT.offloaded,
        )
    )
    try:
        yield (*PARTS, *OFFLOAD, kind)
    finally:
        kinds.remove(kind)


def sequential_rows(problem: job_shop.Problem, shop: improve.JobShop) -> np.ndarray:
    """Return all passes of one microbatch, each after its inputs, then those of the next."""
    m, kinds = problem.num_microbatches, problem.kinds
    table = NeedTable(len(problem.placement), kinds)
    types = [
        len(kinds) * stage + kinds.index(table.parts[part])
        for part, stage in table.topological_order()
    ]
    row = np.full((len(problem.memory_limits), int(max(shop.length))), improve.NONE, np.int64)
    for queue in range(len(row)):
        queue_types = [pass_type for pass_type in types if problem.types.queue[pass_type] == queue]
        passes = [
            pass_type * m + microbatch for microbatch in range(m) for pass_type in queue_types
        ]
        row[queue, : len(passes)] = passes
    return row


@pytest.mark.parametrize("seed", range(4))
def test_local_search_updates_all_state_of_any_kinds(checking: tuple[Kind, ...], seed: int) -> None:
    costs, m = costs_of(0.4), 8
    sizes = DEVICES, m, 6.0, Objective.MAKESPAN, v_shape(DEVICES)
    problem = job_shop.make_problem(costs, *sizes, checking)
    shop = job_shop.make_shop(problem, m)
    num_dependencies = (shop.inputs.shape[1], shop.readers.shape[1])
    assert num_dependencies == (
        2,
        4,
    )  # no optional kind replaces another
    row = sequential_rows(problem, shop)
    state = improve.new_state(row, seed, max(num_dependencies))
    assert improve.settle(shop, state)
    initial_value = improve.objective(shop, state)
    value = improve.local_search(shop, state, shop.length, shop.length, 20_000)
    recomputed = improve.new_state(state.row, 1, max(num_dependencies))
    assert improve.settle(shop, recomputed)
    assert value == improve.objective(shop, recomputed) < initial_value
    for name in ("position", "head", "tail", "memory"):
        assert np.array_equal(getattr(state, name), getattr(recomputed, name)), name
