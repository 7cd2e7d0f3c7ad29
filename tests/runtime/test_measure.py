"""Measured timelines and costs."""

import time

import pytest
import torch
import torch.distributed as dist
from runtime.ranks import run_ranks

from megatron_vshape.core.catalogue import make
from megatron_vshape.core.lowering import lower
from megatron_vshape.core.passes import Kind, Pass
from megatron_vshape.core.placement import stages_of
from megatron_vshape.core.schedule import Slot
from megatron_vshape.core.simulate import simulate
from megatron_vshape.runtime.measure import (
    PassTimer,
    gather_slots,
    measure_send_us,
    measured_costs,
    merge,
)
from megatron_vshape.runtime.p2p import Transport
from megatron_vshape.runtime.program_runner import run_program

SHAPE = (4, 1, 4)
SLEEP_S = {Kind.F: 0.010, Kind.B: 0.014, Kind.W: 0.006}
HELD = {stage: (100.0 + stage, 10.0) for stage in range(4)}


class Sleeper:
    """A stage whose passes sleep; stage 3 takes half as long again."""

    def __init__(self, stage: int) -> None:
        self.factor = 1.5 if stage == 3 else 1.0

    def forward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        time.sleep(SLEEP_S[Kind.F] * self.factor)
        return torch.zeros(SHAPE)

    def backward_inputs(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        time.sleep(SLEEP_S[Kind.B] * self.factor)
        return torch.zeros(SHAPE)

    def backward_weights(self, microbatch: int) -> None:
        time.sleep(SLEEP_S[Kind.W] * self.factor)

    def backward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        self.backward_weights(microbatch)
        return self.backward_inputs(microbatch, received)


def timed_step(rank: int) -> tuple[list[list[Slot]], float | None, tuple[float, float]]:
    """Run a step of sleepers on 2 ranks; return all slots, this rank's send time, its totals."""
    program = lower(make("v-half", 2, 6))
    transport = Transport([[0, 1]], SHAPE, torch.float32, "cpu")
    transport.prepare(program)
    own = stages_of(program.schedule.placement, 2)[rank]
    dist.barrier()
    timer = PassTimer(torch.device("cpu"))
    run_program(program, rank, {stage: Sleeper(stage) for stage in own}, transport, timer)
    send_us = measure_send_us(program, rank, transport, torch.zeros(SHAPE))
    rows = gather_slots(timer.slots(), dist.group.WORLD)
    transport.close()
    return rows, send_us, timer.busy_and_whole()


def test_costs_of_a_measured_step_predict_it() -> None:
    results = run_ranks(2, timed_step)
    rows = results[0][0]
    assert [slot.work for slot in rows[1]] == [slot.work for slot in results[1][0][1]]
    schedule = make("v-half", 2, 6)
    timeline = merge(schedule, rows)
    assert timeline.schedule.order == schedule.order
    assert min(row[0] for row in timeline.starts) == 0
    send_us = results[0][1]
    assert send_us is not None
    assert 1 < send_us < 50_000
    assert results[1][1] is None  # each pair is measured once, by its lower end
    costs = measured_costs([timeline], send_us, HELD)
    for stage, factor in enumerate((1, 1, 1, 1.5)):
        assert costs.forward_us[stage] == pytest.approx(10_000 * factor, rel=0.25)
        assert costs.backward_us[stage] == pytest.approx(14_000 * factor, rel=0.25)
        assert costs.weight_us[stage] == pytest.approx(6_000 * factor, rel=0.25)
    assert costs.held_after_forward_bytes == (100, 101, 102, 103)
    predicted = simulate(schedule, costs)
    assert timeline.makespan == pytest.approx(predicted.makespan, rel=0.15)
    # The ranks' totals alone, without a common clock, tell the bubble of the merged timeline.
    busy_us, whole_us = map(max, zip(*(totals for _, _, totals in results), strict=True))
    assert 1 - busy_us / whole_us == pytest.approx(timeline.bubble, abs=0.02)
    assert timeline.bubble == pytest.approx(predicted.bubble, abs=0.05)
    assert timeline.bubble > 0.01


def _timeline_of(times: dict[Kind, float]):
    """Return a one-device timeline of one microbatch over two stages with these pass times."""
    order = [Pass(Kind.F, 0, 0), Pass(Kind.F, 1, 0)]
    kinds = [Kind.B, Kind.W] if Kind.B in times else [Kind.BW]
    order += [Pass(kind, 1, 0) for kind in kinds] + [Pass(Kind.BW, 0, 0)]
    clock, slots = 5.0, []
    for work in order:
        slots.append(Slot(work, clock, clock + times[work.kind]))
        clock = slots[-1].end
    return merge(make("v-half", 1, 1), [slots])


def test_a_whole_backward_is_divided_as_split_ones_are() -> None:
    timeline = _timeline_of({Kind.F: 10.0, Kind.B: 12.0, Kind.W: 8.0, Kind.BW: 20.0})
    costs = measured_costs([timeline], 0.0, HELD)
    assert costs.backward_us == pytest.approx((12.0, 12.0))
    assert costs.weight_us == pytest.approx((8.0, 8.0))


def test_whole_backwards_alone_are_divided_in_half() -> None:
    costs = measured_costs([_timeline_of({Kind.F: 10.0, Kind.BW: 20.0})], 0.0, HELD)
    assert costs.backward_us == (10.0, 10.0)
    assert costs.weight_us == (10.0, 10.0)
