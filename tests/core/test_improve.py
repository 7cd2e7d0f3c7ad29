"""Incremental state of the inner loops equals recomputed state, with and without compilation."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_vshape import Costs, Schedule, simulate, verify
from megatron_vshape.core.compiling import compiled
from megatron_vshape.core.evaluated_schedule import MemoryStrategy
from megatron_vshape.core.model import kinds
from megatron_vshape.core.model.costs import with_copies
from megatron_vshape.core.model.kinds import (
    COPY_OUT,
    OFFLOAD,
    PARTS,
    PROCESSOR,
    Kind,
    NeedTable,
    Read,
)
from megatron_vshape.core.model.placement import Placement, looping, v_shape
from megatron_vshape.core.paper.blocks import BuildingBlock, repeat, squeeze, v_half, v_min, v_zb
from megatron_vshape.core.paper.catalogue import make_block, reorder
from megatron_vshape.core.planner import improve, job_shop, orders, search
from megatron_vshape.core.planner.offloading import OffloadSearch

DEVICES = 5


def make_problem(num_microbatches: int, limit: float, *cost: float) -> job_shop.Problem:
    costs = Costs.uniform(DEVICES, 2 * DEVICES, *cost)
    return job_shop.make_problem(
        costs,
        DEVICES,
        num_microbatches,
        limit,
        search.Objective.MAKESPAN,
        v_shape(DEVICES),
    )


def make_shop(num_microbatches: int, limit: float, *cost: float) -> improve.JobShop:
    return job_shop.make_shop(make_problem(num_microbatches, limit, *cost), num_microbatches)


def make_state(block: BuildingBlock, num_microbatches: int, seed: int = 1) -> improve.State:
    return improve.new_state(orders.cyclic_order_of_block(block).unroll(num_microbatches), seed)


def check_local_search(
    shop: improve.JobShop,
    state: improve.State,
    ends: np.ndarray,
    steps: int,
    *num_dependencies: int,
    has_absent_passes: bool = False,
) -> None:
    """Search from a settled state; its final state must equal a recomputed one."""
    initial_value = improve.objective(shop, state)
    value = improve.local_search(shop, state, ends, ends, steps)
    recomputed = improve.new_state(state.row, 1, *num_dependencies)
    assert improve.settle(shop, recomputed)
    assert value == improve.objective(shop, recomputed) <= initial_value
    for name in ("position", "head", "tail"):
        size = shop.length.sum() if has_absent_passes else None
        local_state, recomputed_state = getattr(state, name), getattr(recomputed, name)
        assert np.array_equal(local_state[:size], recomputed_state[:size]), name
    assert has_absent_passes or np.array_equal(state.memory, recomputed.memory)


@pytest.mark.parametrize("seed", range(2))
def test_local_search_updates_all_state(seed: int) -> None:
    shop = make_shop(12, 8, 1, 1.3, 0.7, 0.1)
    state = make_state(v_half(DEVICES), 12, seed)
    assert improve.settle(shop, state)
    check_local_search(shop, state, np.full(DEVICES, state.row.shape[1]), 5000)


@pytest.mark.parametrize("seed", range(2))
def test_passes_are_exchanged_if_memory_permits(seed: int) -> None:
    """During a pass, memory is up to one chunk higher, and the order exactly fits."""
    random = np.random.default_rng(seed)
    shop, state = make_shop(12, 8, 1, 1.3, 0.7, 0.1), make_state(v_half(DEVICES), 12)
    assert improve.settle(shop, state)
    over = random.integers(0, shop.delta.max() + 1, len(shop.over))
    shop = shop._replace(
        over=over, limit=(state.memory + over[shop.type_of[state.row]]).max(axis=1)
    )
    decisions = []
    for device, row in enumerate(state.row):
        for _ in range(300):
            low, high = np.sort(random.choice(len(row), 2, replace=False))
            types = shop.type_of[row]
            types[[low, high]] = types[[high, low]]
            fits = bool((shop.delta[types].cumsum() + over[types] <= shop.limit[device]).all())
            assert improve.fit_exchanged(shop, state, device, low, high) == fits
            decisions.append(fits)
    assert 0.1 < np.mean(decisions) < 0.9


def test_local_search_changes_only_passes_outside_the_window() -> None:
    shop = make_shop(20, 10, 1, 1.3, 0.7, 0.1)
    cyclic = orders.cyclic_order_of_block(v_half(DEVICES))
    window = cyclic.window(20)
    state = improve.new_state(cyclic.unroll(20), 3)
    improve.settle(shop, state)
    initial_rows = state.row.copy()
    improve.local_search(shop, state, *window, 5000)
    for device, (low, high) in enumerate(zip(*window, strict=True)):
        assert np.array_equal(state.row[device, low:high], initial_rows[device, low:high])
    longer, shop = orders.splice(state.row, *window, 1, 20, 57), make_shop(57, 10, 1, 1.3, 0.7, 0.1)
    full = improve.new_state(longer, 1)
    assert improve.settle(shop, full)
    assert improve.measure(shop, longer) == improve.objective(shop, full)


def test_splice_of_a_cyclic_order_repeats_it() -> None:
    cyclic = orders.cyclic_order_of_block(v_min(DEVICES))
    window = cyclic.window(16)
    assert np.array_equal(orders.splice(cyclic.unroll(16), *window, 1, 16, 40), cyclic.unroll(40))


@pytest.mark.parametrize("block", [v_min, v_half, v_zb])
@pytest.mark.parametrize("cool", [0, DEVICES, 100])
def test_filled_and_refilled_orders_are_complete_and_fit(block: object, cool: int) -> None:
    problem = make_problem(9, 2 * DEVICES, 1, 1.3, 0.7, 0.1)
    shop = job_shop.make_shop(problem, 9)
    row = orders.cyclic_order_of_block(block(DEVICES)).unroll(9)  # type: ignore[operator]
    for order in (
        job_shop.fill_idle_time(problem, row, cool),
        job_shop.reinsert_weights(problem, row),
    ):
        assert np.array_equal(np.sort(order, axis=1), np.sort(row, axis=1))
        assert improve.settle(shop, improve.new_state(order, 1))


@pytest.mark.parametrize(("name", "devices"), [("v-half", 4), ("v-two-thirds", 5), ("zb-h1", 3)])
def test_planner_fills_like_the_paper(name: str, devices: int) -> None:
    """On 5 devices, v-two-thirds runs microbatches of one pass type out of order."""
    block = make_block(name, devices, 12)
    schedule, m = squeeze(repeat(block, 12)), 12
    peak = max(block.peaks())
    costs = Costs.uniform(devices, schedule.num_stages)
    limit = peak * costs.held_after_forward_bytes[0]
    problem = job_shop.make_problem(
        costs, devices, m, limit, search.Objective.MAKESPAN, schedule.placement
    )

    def numbers(order: Schedule) -> np.ndarray:
        return np.array(
            [[(3 * s + PARTS.index(kind)) * m + j for kind, s, j in row] for row in order.order]
        )

    filled = job_shop.fill_idle_time(problem, numbers(schedule), peak)
    assert np.array_equal(filled, numbers(reorder(schedule, peak)))


def test_insufficient_memory_is_detected() -> None:
    shop = make_shop(9, 2, 1, 1, 1, 0)
    assert not improve.settle(shop, make_state(v_zb(DEVICES), 9))


def test_plan_is_identical_without_numba() -> None:
    code = (
        "import sys; sys.modules['numba'] = None if {} else sys.modules.get('numba');"
        "from megatron_vshape.core.planner.search import plan;"
        "from megatron_vshape.core.model.costs import Costs;"
        "from megatron_vshape.core.planner.modulo import find_steady_orders;"
        "from megatron_vshape.core.model.placement import v_shape;"
        "costs = Costs.uniform(3, 6, 1, 1.3, .7, .1);"
        "made = plan(costs, 3, 5, 4, steps=200);"
        "print(made.schedule.to_csv(), made.value);"
        "print(find_steady_orders(costs, v_shape(3), 3, [4] * 3, 300))"
    )
    outputs = []
    for blocked in (True, False):
        text = code.format(blocked)
        if not blocked:
            text = text.split(";", 2)[2]
        process = subprocess.run(
            [sys.executable, "-c", text], env=os.environ, capture_output=True, text=True, check=True
        )
        outputs.append(process.stdout)
    assert outputs[0] == outputs[1]


def test_compiles_without_a_writable_cache(monkeypatch):
    caching = pytest.importorskip("numba.core.caching")
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    assert compiled(lambda number: number + 1)(1) == 2


def test_cache_is_opened_by_the_first_call(tmp_path: Path) -> None:
    """Ranks that receive a plan do not open a cache, which would write to a shared folder."""
    caching = pytest.importorskip("numba.core.caching")
    opened: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        ensure = caching._CacheLocator.ensure_cache_path
        patch.setattr(
            caching._CacheLocator,
            "ensure_cache_path",
            lambda locator: opened.append(ensure(locator)),
        )
        function = compiled(twice_and_one)
        assert opened == []
        assert function(2) == 5
        assert opened
    code = "from megatron_vshape import lower, make; import megatron_vshape.core.plan\n"
    code += "lower(make('v-half', 4, 8))"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)
    assert list(tmp_path.iterdir()) == []


def twice_and_one(number: int) -> int:
    return 2 * number + 1


def test_queues_of_a_device_share_one_row() -> None:
    """A pass of another resource directly follows its last input, or the last pass of its queue."""
    costs = with_copies(Costs.uniform(4, 8, 1, 1.15, 0.85, 0.05), 0.4)
    result = search.plan(costs, 4, 10, 4, trades=True, steps=40_000)
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


@pytest.mark.parametrize("seed", range(2))
def test_local_search_updates_all_state_of_any_kinds(checking: tuple[Kind, ...], seed: int) -> None:
    costs, m = with_copies(Costs.uniform(4, 8, 1, 1.15, 0.85, 0.05), 0.4), 8
    problem = job_shop.make_problem(
        costs, 4, m, 6.0, search.Objective.MAKESPAN, v_shape(4), checking
    )
    shop = job_shop.make_shop(problem, m)
    num_dependencies = (shop.inputs.shape[1], shop.readers.shape[1])
    assert num_dependencies == (2, 4)  # no optional kind replaces another
    row = sequential_rows(problem, shop)
    state = improve.new_state(row, seed, max(num_dependencies))
    assert improve.settle(shop, state)
    check_local_search(shop, state, shop.length, 20_000, max(num_dependencies))


@pytest.mark.parametrize("placement", [v_shape(4), looping(4, 2)])
def test_local_search_updates_all_state_with_optional_passes(placement: Placement) -> None:
    costs = with_copies(Costs.uniform(4, 8, 1, 1.15, 0.85, 0.05), 1.0)
    kinds = (*PARTS, *OFFLOAD)
    problem = job_shop.make_problem(costs, 4, 10, 4.0, search.Objective.MAKESPAN, placement, kinds)
    offload_search = OffloadSearch(problem, 1, MemoryStrategy(copies=True))
    searches = offload_search.start_orders(2000, map)
    assert searches
    pass_counts = []
    for variant in searches[:3]:
        shop = variant.shop
        num_dependencies = max(shop.inputs.shape[1], shop.readers.shape[1])
        check_local_search(
            shop, variant.state, shop.length, 10_000, num_dependencies, has_absent_passes=True
        )
        offload_search.keep_if_best(variant)
        pass_counts.append(int(shop.length.sum()))
    assert min(pass_counts) < 7 * 80  # some optional passes are absent
    best = offload_search.best_plan()
    verify(best.schedule, 4.0, costs)
    assert simulate(best.schedule, costs).makespan == pytest.approx(best.value)


def test_local_search_improves_orders_that_offload_all_activations() -> None:
    costs = with_copies(Costs.uniform(8, 16, 1, 1.15, 0.85, 0.05), 0.25)
    problem = job_shop.make_problem(
        costs, 8, 24, 4.0, search.Objective.MAKESPAN, v_shape(8), (*PARTS, *OFFLOAD)
    )
    candidates = OffloadSearch(problem, 1, MemoryStrategy(copies=True)).start_orders(2000, map)
    complete = [candidate for candidate in candidates if candidate.chosen_passes is None]
    assert complete
    for candidate in complete:
        shop = candidate.shop
        # The local search reads one start and one end per queue.
        assert len(candidate.low) == len(candidate.high) == len(shop.length)
        num_dependencies = max(shop.inputs.shape[1], shop.readers.shape[1])
        check_local_search(shop, candidate.state, candidate.low, 10_000, num_dependencies)
