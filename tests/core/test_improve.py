"""Incremental state of the inner loops equals recomputed state, with and without compilation."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_vshape.core.compiling import compiled
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import PARTS
from megatron_vshape.core.model.placement import v_shape
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.blocks import BuildingBlock, repeat, squeeze, v_half, v_min, v_zb
from megatron_vshape.core.paper.catalogue import make_block
from megatron_vshape.core.paper.reordering import reorder
from megatron_vshape.core.planner import improve, job_shop, orders, search

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


@pytest.mark.parametrize("seed", range(5))
def test_local_search_updates_all_state(seed: int) -> None:
    shop = make_shop(12, 8, 1, 1.3, 0.7, 0.1)
    state = make_state(v_half(DEVICES), 12, seed)
    assert improve.settle(shop, state)
    initial_value = improve.objective(shop, state)
    none = np.full(DEVICES, state.row.shape[1])
    value = improve.local_search(shop, state, none, none, 5000)
    recomputed = improve.new_state(state.row, 1)
    assert improve.settle(shop, recomputed)
    assert value == improve.objective(shop, recomputed) <= initial_value
    for name in ("position", "head", "tail", "memory"):
        assert np.array_equal(getattr(state, name), getattr(recomputed, name)), name


@pytest.mark.parametrize("seed", range(4))
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
    assert window is not None
    state = improve.new_state(cyclic.unroll(20), 3)
    improve.settle(shop, state)
    initial_rows = state.row.copy()
    improve.local_search(shop, state, *window, 5000)
    for device, (low, high) in enumerate(zip(*window, strict=True)):
        assert np.array_equal(state.row[device, low:high], initial_rows[device, low:high])
    longer = orders.splice(state.row, *window, 1, 20, 57)
    full = improve.new_state(longer, 1)
    assert improve.settle(make_shop(57, 10, 1, 1.3, 0.7, 0.1), full)
    assert improve.measure(make_shop(57, 10, 1, 1.3, 0.7, 0.1), longer) == improve.objective(
        make_shop(57, 10, 1, 1.3, 0.7, 0.1), full
    )


def test_splice_of_a_cyclic_order_repeats_it() -> None:
    cyclic = orders.cyclic_order_of_block(v_min(DEVICES))
    window = cyclic.window(16)
    assert window is not None
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
        assert order is not None
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
    assert filled is not None
    assert np.array_equal(filled, numbers(reorder(schedule, peak)))


def test_insufficient_memory_is_detected() -> None:
    shop = make_shop(9, 2, 1, 1, 1, 0)
    assert not improve.settle(shop, make_state(v_zb(DEVICES), 9))


def test_plan_is_identical_without_numba() -> None:
    code = (
        "import sys; sys.modules['numba'] = None if {} else sys.modules.get('numba');"
        "from megatron_vshape.core.planner.search import plan;"
        "from megatron_vshape.core.model.costs import Costs;"
        "made = plan(Costs.uniform(3, 6, 1, 1.3, .7, .1), 3, 5, 4, steps=200);"
        "print(made.schedule.to_csv(), made.value)"
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
