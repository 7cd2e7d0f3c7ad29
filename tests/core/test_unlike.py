"""Order of variable-length microbatches in a plan for uniform ones."""

import math
import random
import time
from dataclasses import replace

import pytest

from megatron_vshape import Costs, make, peak_held, simulate
from megatron_vshape.core.model.costs import reordered
from megatron_vshape.core.model.kinds import HELD, TIMES, Kind
from megatron_vshape.core.variable_length import reorder_microbatches


def variable_length_costs(
    num_devices: int, num_stages: int, count: int, seed: int, has_memory: bool = False
) -> Costs:
    """Return costs of microbatches with log-normal lengths of mean 1 and sigma 1."""
    rng = random.Random(seed)
    lengths = [rng.lognormvariate(0, 1) for _ in range(count)]
    mean = sum(lengths) / count
    shares = tuple(length / mean for length in lengths)
    costs = Costs.uniform(num_devices, num_stages, 1, 1.15, 0.85, 0.05)
    amounts = (*TIMES, *HELD) if has_memory else TIMES
    return replace(costs, by_microbatch=tuple((amount, shares) for amount in amounts))


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "v-half", "v-zb", "zb-h1"])
def test_reordered_step_matches_simulation_and_is_not_slower(name: str) -> None:
    schedule = make(name, 4, 12)
    costs = variable_length_costs(4, schedule.num_stages, 12, 0)
    result = reorder_microbatches(schedule, costs, tries=100)
    assert sorted(result.order) == list(range(12))
    assert result.initial_us == pytest.approx(simulate(schedule, costs).makespan)
    makespan = simulate(schedule, reordered(costs, result.order)).makespan
    assert result.best_us == pytest.approx(makespan)
    assert result.best_us <= result.initial_us
    assert reorder_microbatches(schedule, costs, tries=100) == result


def test_reordering_shortens_the_step() -> None:
    schedule = make("v-zb", 4, 16)
    gains = [
        reorder_microbatches(schedule, variable_length_costs(4, 8, 16, seed), tries=400)
        for seed in range(4)
    ]
    assert sum(result.best_us / result.initial_us for result in gains) / 4 < 0.97


def test_overlapped_passes_and_full_backwards_are_reordered() -> None:
    schedule = make("dualpipev", 4, 12)
    costs = variable_length_costs(4, schedule.num_stages, 12, 1)
    full_backward_us = tuple(
        0.9 * (b + w) for b, w in zip(costs.backward_us, costs.weight_us, strict=True)
    )
    costs = costs.having(whole_backward_us=full_backward_us)
    result = reorder_microbatches(schedule, costs, tries=20)
    assert result.initial_us == pytest.approx(simulate(schedule, costs).makespan)


def test_reordered_peaks_are_within_limits() -> None:
    schedule = make("v-half", 4, 12)
    costs = variable_length_costs(4, 8, 12, 3, has_memory=True)
    planned_peaks = peak_held(schedule, costs)
    free = reorder_microbatches(schedule, costs, tries=400)
    limited = reorder_microbatches(schedule, costs, limits=max(planned_peaks), tries=400)
    assert max(peak_held(schedule, reordered(costs, limited.order))) <= max(planned_peaks) * (
        1 + 1e-6
    )
    tight = reorder_microbatches(schedule, costs, limits=0.0, tries=400)
    for peak, planned_peak in zip(
        peak_held(schedule, reordered(costs, tight.order)), planned_peaks, strict=True
    ):
        assert peak <= planned_peak * (1 + 1e-6)
    assert free.best_us <= limited.best_us * (1 + 1e-9)


def test_uniform_microbatches_are_not_reordered() -> None:
    schedule = make("v-half", 4, 12)
    costs = Costs.uniform(4, 8)
    assert reorder_microbatches(schedule, costs).order == tuple(range(12))
    shares = ((Kind.F.time, (1.0,) * 12),)
    assert reorder_microbatches(schedule, replace(costs, by_microbatch=shares)).order == tuple(
        range(12)
    )


def test_memory_depends_on_the_microbatch() -> None:
    schedule = make("1f1b", 2, 3)
    costs = replace(Costs.uniform(2, 2), by_microbatch=((HELD[0], (1.0, 1.0, 5.0)),))
    assert peak_held(schedule, costs) == (12.0, 10.0)
    assert peak_held(schedule, reordered(costs, (2, 1, 0))) == (12.0, 10.0)
    assert peak_held(schedule, replace(costs, by_microbatch=())) == (4.0, 2.0)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "count"), [(4, 32), (8, 64)])
def test_reordering_takes_less_than_a_step(devices: int, count: int) -> None:
    schedule, costs = (
        make("v-zb", devices, count),
        variable_length_costs(devices, 2 * devices, count, 0),
    )
    reorder_microbatches(schedule, costs, tries=1)
    began_s = time.perf_counter()
    reorder_microbatches(schedule, costs, math.inf)
    assert time.perf_counter() - began_s < 1
