"""Text about offloading in a plan."""

import pytest

from megatron_vshape.core.check.simulate import peak_moved, simulate
from megatron_vshape.core.model.costs import Costs, with_copies
from megatron_vshape.core.model.kinds import OFFLOAD, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import v_shape
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.planner.offloading import memory_strategies
from megatron_vshape.view.numbers import link_share, trade_lines


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
