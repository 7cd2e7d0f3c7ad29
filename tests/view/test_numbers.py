"""Units of the key figures of a schedule."""

import pytest

from megatron_vshape import Costs, Schedule, make, peak_held, simulate
from megatron_vshape.core.check.simulate import peak_moved
from megatron_vshape.core.model.costs import with_copies
from megatron_vshape.core.model.kinds import OFFLOAD, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.pieces import Pieces
from megatron_vshape.core.model.placement import v_shape
from megatron_vshape.core.planner.offloading import memory_strategies
from megatron_vshape.view.numbers import (
    GIB,
    format_sufficient_limit,
    idle_lines,
    link_share,
    numbers_of,
    trade_lines,
)


@pytest.mark.parametrize(
    ("memory", "text"), [(2, "2"), (0.1 + 0.2, "0.3"), (6.40006717, "6.40007"), (1 / 3, "0.333334")]
)
def test_a_limit_is_rounded_up(memory: float, text: str) -> None:
    assert format_sufficient_limit(memory) == text
    assert float(text) * (1 + 1e-9) >= memory


def test_chunk_is_a_share_of_the_model_activations() -> None:
    """With five times the activations in the last stage, 1F1B needs less on the first device."""
    activation_bytes = (1.0, 1.0, 1.0, 5.0)
    costs = Costs.of((1.0,) * 4, (1.0,) * 4, (1.0,) * 4, 0.0, activation_bytes, activation_bytes)
    numbers = numbers_of(simulate(make("1f1b", 4, 8), costs), costs)
    assert numbers.peak_chunks == (4, 3, 2, 5)  # of an eighth of 8


def test_schedule_without_activations_has_relative_peak_one() -> None:
    ones, zeros = (1.0,) * 4, (0.0,) * 4
    costs = Costs.of(ones, ones, ones, 0.0, zeros, zeros)
    assert numbers_of(simulate(make("1f1b", 4, 8), costs), costs).relative_peak == 1


def test_idle_text_names_the_bottleneck_rank() -> None:
    """An output layer as long as six of 64 layers: bubble of 2.7 %, mean idle time of 39 %."""
    timeline = simulate(make("v-half", 8, 32), Pieces.estimated(6, 4).costs((4,) * 16))
    assert 0.02 < timeline.bubble < 0.03
    idle, bottleneck = idle_lines(timeline)
    assert idle.startswith("39.2 %")
    assert bottleneck == "rank 0 is the bottleneck: 1.6x the mean work per rank"


def test_equal_stages_have_no_idle_text() -> None:
    timeline = simulate(make("1f1b", 4, 8))
    assert idle_lines(timeline) == []
    assert timeline.mean_idle == pytest.approx(timeline.bubble)


def test_bytes_are_those_of_the_fused_schedule() -> None:
    """No pass waits for B of the first stage, so its W is fused with it."""
    stages = 4
    activation_bytes = (4 * GIB,) * stages, (6 * GIB,) * stages
    costs = Costs.of(*((1.0,) * stages,) * 3, 0.0, *activation_bytes, state_bytes=(0.0,) * stages)
    schedule = make("zb-h1", stages, 8)
    split_peaks = peak_held(schedule, costs)
    fused_peaks = numbers_of(simulate(schedule, costs), costs).peak_bytes
    assert fused_peaks[0] == max(peak_held(make("1f1b", stages, 8), costs)) < split_peaks[0]
    assert all(
        fused_peak <= split_peak
        for fused_peak, split_peak in zip(fused_peaks, split_peaks, strict=True)
    )


def test_memory_strategies_have_text() -> None:
    texts = [strategy.text for strategy in memory_strategies(True, v_shape(2))]
    assert texts == ["schedule only", "offload all of chunk 0", "offload"]


def test_host_memory_and_link_utilization_are_reported() -> None:
    """Two copies, each as long as two chunks: to the host from 2 to 6, back until 10."""
    copies = [[Pass(kind, 0, j) for kind in OFFLOAD] for j in (0, 1)]
    row = [Pass(Kind.F, 0, 0), Pass(Kind.F, 0, 1)]
    row += [copies[j][position] for position in range(2) for j in (0, 1)]
    row += [copies[j][position] for position in range(2, 4) for j in (0, 1)]
    row += [Pass(kind, 0, j) for j in (0, 1) for kind in (Kind.B, Kind.W)]
    schedule = Schedule("two", 1, 2, (0,), (tuple(row),))
    costs = with_copies(Costs.uniform(1, 1), 1.0)
    timeline = simulate(schedule, costs)
    assert peak_moved(schedule, costs) == (4.0,)
    assert link_share(timeline) == pytest.approx(4.0 / timeline.makespan)
    lines = dict(trade_lines(timeline, costs, "{:g} chunks".format))
    assert lines["offloading"].startswith("100.0 % of the activations (100.0 % of")
    assert "at most 4 chunks of host memory per rank" in lines["offloading"]


def test_offloading_is_reported_only_if_costs_include_it() -> None:
    schedule = make("v-half", 2, 4)
    costs = Costs.uniform(2, 4)
    timeline = simulate(schedule, costs)
    assert not list(trade_lines(timeline, costs, str))
    offload_costs = with_copies(costs, 1.0)
    lines = dict(trade_lines(simulate(schedule, offload_costs), offload_costs, str))
    assert lines == {"offloading": "none (no gain)"}
