"""Weight gradients of an earlier W that run in a B must not delay any pass."""

from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import catalogue_schedules, costs_of, with_boundary_costs

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.lowering import (
    DeferredWgradOverlap,
    deferred_weight_overlap,
    fuse,
)


def start_times(
    schedule: Schedule, costs: Costs, deferred: Mapping[Pass, DeferredWgradOverlap] | None = None
) -> dict[Pass, float]:
    """Return the start times if a B also runs the given share of the W after it."""
    lengths = {work: costs.time_us(work.kind, work.stage) for row in schedule.order for work in row}
    for work, (weights, share) in (deferred or {}).items():
        lengths[work] += share * lengths[weights]
        lengths[weights] *= 1 - share
    started: dict[Pass, float] = {}
    finished: dict[Pass, tuple[float, int]] = {}
    rows = [list(row) for row in schedule.order]
    clocks = [0.0] * schedule.num_devices
    while any(rows):
        for device, row in enumerate(rows):
            while row and all(
                dependency in finished for dependency in row[0].needs(schedule.num_stages)
            ):
                work = row.pop(0)
                start = clocks[device]
                for dependency in work.needs(schedule.num_stages):
                    end, maker = finished[dependency]
                    send_us = costs.message_us(dependency.stage, work.stage)
                    start = max(start, end + send_us * (maker != device))
                started[work] = start
                clocks[device] = start + lengths[work]
                for kind in work.parts():
                    finished[Pass(kind, work.stage, work.microbatch)] = clocks[device], device
    return started


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_pass_is_delayed(data: st.DataObject) -> None:
    schedule = data.draw(catalogue_schedules(max_devices=5, max_microbatches=12))
    costs = data.draw(with_boundary_costs(data.draw(costs_of(schedule.num_stages))))
    schedule = fuse(simulate(schedule, costs))
    deferred = deferred_weight_overlap(simulate(schedule, costs))
    weights = {overlap.weights for overlap in deferred.values()}
    starts_before, starts_after = (
        start_times(schedule, costs),
        start_times(schedule, costs, deferred),
    )
    for work in starts_before.keys() - weights:
        assert starts_after[work] <= starts_before[work] + 1e-9
    for row in schedule.order:
        for work, following in zip(row, row[1:], strict=False):
            if work in deferred:
                assert deferred[work].weights == following
                assert (work.kind, following.kind) == (Kind.B, Kind.W)
                assert work[1:] != following[1:]  # its own weight gradients are not available yet


def format_overlaps(deferred: Mapping[Pass, DeferredWgradOverlap]) -> str:
    return " ".join(
        f"{work}:{overlap.weights}:{overlap.share:g}" for work, overlap in deferred.items()
    )


def test_overlaps_depend_on_costs_and_tied_embeddings() -> None:
    """No pass reads B0; B1.0 runs after a W of its device, at most one message time later."""

    def overlap_text(ties_ends: bool = False, **costs: float) -> str:
        timeline = simulate(make("v-zb", 2, 3), Costs.uniform(2, 4, **costs))
        return format_overlaps(deferred_weight_overlap(timeline, ties_ends))

    firsts = "B0.0:W3.1:1 B0.1:W3.2:1 B0.2:W0.1:1"
    assert overlap_text() == f"{firsts} B1.0:W2.0:1"
    assert overlap_text(send=0.25) == f"{firsts} B1.0:W2.0:0.5"
    assert overlap_text(weight=2.0) == f"{firsts} B1.0:W2.0:1 B1.2:W2.1:0.5"
    # Otherwise the embedding's gradient would receive W3.1's part before B0.0's.
    assert overlap_text(ties_ends=True) == "B0.2:W0.1:1 B1.0:W2.0:1"


@pytest.mark.parametrize(("name", "share"), [("v-half", 0.02), ("v-zb", 0.3)])
def test_many_backwards_overlap_weight_passes(name: str, share: float) -> None:
    schedule = fuse(simulate(make(name, 8, 32)))
    split = sum(work.kind is Kind.B for row in schedule.order for work in row)
    assert len(deferred_weight_overlap(simulate(schedule))) > share * split
