"""Measured timelines and costs."""

import time
from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from runtime.ranks import run_ranks

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import stages_of
from megatron_vshape.core.model.schedule import Slot
from megatron_vshape.core.model.stage_costs import StageCosts
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.instructions import Message
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.runtime import measure
from megatron_vshape.runtime.measure import (
    PassTimer,
    _ahead_of_first,
    clocks_ahead_us,
    gather_slots,
    measure_send_us,
    measured_costs,
    merge,
    undisturbed,
)
from megatron_vshape.runtime.p2p import Transport
from megatron_vshape.runtime.program_runner import run_program
from megatron_vshape.runtime.variable_p2p import VariableTransport

SHAPE = (4, 1, 4)
SLEEP_S = {Kind.F: 0.010, Kind.B: 0.014, Kind.W: 0.006}
HELD = {stage: (100.0 + stage, 10.0) for stage in range(4)}


class Sleeper:
    """A stage whose passes sleep; stage 3 needs 1.5 times as long."""

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


class Taking(VariableTransport):
    """Receives messages of any length when they are posted, as on NCCL."""

    def post(self, message: Message) -> None:
        self._arrived[message] = self._take(message)


def measure_with_any_length(rank: int) -> bool:
    """Return whether messages are timed where posting waits for them; else it times out."""
    program = lower(make("v-half", 2, 2))
    transport = Taking([[0, 1]], SHAPE, torch.float32, "cpu", timeout_s=10)
    transport.prepare(program)
    send_us = measure_send_us(program, rank, transport, torch.zeros(SHAPE))
    clocks_ahead_us(program, rank, transport, torch.zeros(SHAPE), dist.group.WORLD)
    transport.close()
    return send_us is not None


def test_messages_of_any_length_are_timed() -> None:
    assert run_ranks(2, measure_with_any_length) == [True, False]


OTHER_HOST_US = 1e12


class OtherHost:
    """The clock of a host that was started eleven days earlier."""

    thread_time = time.thread_time

    @staticmethod
    def perf_counter() -> float:
        return time.perf_counter() + OTHER_HOST_US / 1e6


class Step(NamedTuple):
    """Measurements of a rank."""

    rows: list[list[Slot]]
    ahead_us: list[float]
    send_us: float | None
    totals: tuple[float, float]


def timed_step(rank: int) -> Step:
    """Run steps of sleepers on 2 ranks with separate clocks; return the step with the least noise.

    On a machine with other load, some step is delayed by more than the duration of a pass.
    """
    if rank == 1:
        measure.time = OtherHost  # type: ignore[attr-defined]
    program = lower(make("v-half", 2, 6))
    transport = Transport([[0, 1]], SHAPE, torch.float32, "cpu")
    transport.prepare(program)
    local_stages = stages_of(program.schedule.placement, 2)[rank]
    tries: list[tuple[float, PassTimer]] = []
    for _ in range(5):
        dist.barrier()
        timer = PassTimer(torch.device("cpu"))
        run_program(
            program, rank, {stage: Sleeper(stage) for stage in local_stages}, transport, timer
        )
        took_us = torch.tensor(timer.busy_and_whole()[1])
        dist.all_reduce(took_us, dist.ReduceOp.MAX)
        tries.append((took_us.item(), timer))
    timer = min(tries, key=itemgetter(0))[1]
    send_us = measure_send_us(program, rank, transport, torch.zeros(SHAPE))
    rows = gather_slots(timer.slots(), dist.group.WORLD)
    ahead_us = clocks_ahead_us(program, rank, transport, torch.zeros(SHAPE), dist.group.WORLD)
    transport.close()
    return Step(rows, ahead_us, send_us, timer.busy_and_whole())


def test_costs_of_a_measured_step_predict_it() -> None:
    results = run_ranks(2, timed_step)
    rows, ahead_us = results[0].rows, results[0].ahead_us
    assert rows == results[1].rows
    assert ahead_us == results[1].ahead_us
    assert ahead_us[0] == 0
    assert ahead_us[1] == pytest.approx(OTHER_HOST_US, abs=2_000)
    schedule = make("v-half", 2, 6)
    timeline = merge(schedule, rows, ahead_us)
    assert timeline.schedule.order == schedule.order
    assert min(row[0] for row in timeline.starts) == 0
    send_us = results[0].send_us
    assert send_us is not None
    assert 1 < send_us < 50_000
    assert results[1].send_us is None  # each pair is measured once, by its lower end
    costs = measured_costs([timeline], send_us, HELD)
    for stage, factor in enumerate((1, 1, 1, 1.5)):
        assert costs.forward_us[stage] == pytest.approx(10_000 * factor, rel=0.25)
        assert costs.backward_us[stage] == pytest.approx(14_000 * factor, rel=0.25)
        assert costs.weight_us[stage] == pytest.approx(6_000 * factor, rel=0.25)
    assert costs.held_after_forward_bytes == (100, 101, 102, 103)
    predicted = simulate(schedule, costs)
    assert timeline.makespan == pytest.approx(predicted.makespan, rel=0.15)
    # The totals of the ranks, without a common clock, give the bubble of the merged timeline.
    busy_us, whole_us = map(max, zip(*(step.totals for step in results), strict=True))
    assert 1 - busy_us / whole_us == pytest.approx(timeline.bubble, abs=0.02)
    assert timeline.bubble == pytest.approx(predicted.bubble, abs=0.05)
    assert timeline.bubble > 0.01


def test_shifted_clocks_give_the_same_timeline() -> None:
    timeline = simulate(make("v-half", 4, 6))
    rows = [list(timeline.slots(device)) for device in range(4)]
    ahead_us = [0.0, 1e12, -3e9, 7.0]
    shifted = [
        [Slot(work, start + by, end + by) for work, start, end in row]
        for row, by in zip(rows, ahead_us, strict=True)
    ]
    merged = merge(timeline.schedule, shifted, ahead_us)
    for device in range(4):
        assert merged.starts[device] == pytest.approx(timeline.starts[device], abs=1e-3)
        assert merged.ends[device] == pytest.approx(timeline.ends[device], abs=1e-3)


def test_clock_offsets_use_the_fastest_round_trip_between_neighbours() -> None:
    """The first device is a neighbour of the third alone, which is one of the second."""
    pairs: list[tuple[int, int]] = [(0, 2), (1, 2)]
    stamps: list[dict[tuple[int, int], list[float]]] = [
        {(0, 2): [100.0, 130.0, 200.0, 210.0], (1, 2): []},
        {(0, 2): [], (1, 2): [5000.0, 5010.0, 6000.0, 6100.0]},
        {(0, 2): [1129.0, 1205.0], (1, 2): [1015.0, 2000.0]},
    ]
    assert all(list(rank_stamps) == pairs for rank_stamps in stamps)
    assert _ahead_of_first(stamps) == [0.0, 4990.0, 1000.0]


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


def test_full_backward_is_divided_in_the_ratio_of_split_backwards() -> None:
    timeline = _timeline_of({Kind.F: 10.0, Kind.B: 12.0, Kind.W: 8.0, Kind.BW: 20.0})
    costs = measured_costs([timeline], 0.0, HELD)
    assert costs.backward_us == pytest.approx((12.0, 12.0))
    assert costs.weight_us == pytest.approx((8.0, 8.0))


def test_stage_with_both_backwards_has_a_cost_of_full_backward() -> None:
    timeline = _timeline_of({Kind.F: 10.0, Kind.B: 12.0, Kind.W: 8.0, Kind.BW: 17.0})
    full_schedule = replace(timeline.schedule, order=((Pass(Kind.BW, 1, 0),),))
    full_timeline = replace(timeline, schedule=full_schedule, starts=((0.0,),), ends=((17.0,),))
    costs = measured_costs([timeline, full_timeline], 0.0, HELD)
    assert costs.backward_us[1] + costs.weight_us[1] == pytest.approx(20.0)
    assert costs.by_stage.get(Kind.BW.time) == pytest.approx((17.0, 17.0))
    assert Kind.BW.time not in measured_costs([timeline], 0.0, HELD).by_stage


def test_fused_passes_are_ignored() -> None:
    schedule = make("dualpipev", 2, 8)
    stages = (StageCosts.of(10.0 + stage, 12.0, 8.0, *HELD[stage]) for stage in range(4))
    separate = Costs(tuple(stages), 0.0)
    waits = (3.0,) * 4
    costs_with_waits = separate.having(forward_exchange_us=waits, backward_exchange_us=waits)
    costs = measured_costs([simulate(schedule, costs_with_waits)], 0.0, HELD)
    assert costs.forward_us == pytest.approx([us + 3 for us in separate.forward_us])


def test_fused_passes_are_timed_once() -> None:
    timer = PassTimer(torch.device("cpu"))
    passes = Pass(Kind.F, 0, 3), Pass(Kind.B, 3, 1)
    timer.begins(*passes)
    time.sleep(0.02)
    timer.ends(*passes)
    first, second = timer.slots()
    assert (first.work, second.work) == passes
    assert first[1:] == second[1:]
    assert timer.busy_and_whole()[0] == first.end - first.start >= 20_000


def test_time_before_a_weight_pass_is_host_time() -> None:
    timeline = _timeline_of({Kind.F: 10.0, Kind.B: 12.0, Kind.W: 8.0, Kind.BW: 20.0})
    assert measured_costs([timeline], 0.0, HELD).host_us == pytest.approx(0.0)
    (starts,), (ends,) = timeline.starts, timeline.ends
    weight_position = [work.kind for work in timeline.schedule.order[0]].index(Kind.W)
    later_times = [
        [time + 3.0 * (position >= weight_position) for position, time in enumerate(r)]
        for r in (starts, ends)
    ]
    later = replace(timeline, starts=(tuple(later_times[0]),), ends=(tuple(later_times[1]),))
    assert measured_costs([later], 0.0, HELD).host_us == pytest.approx(3.0)


def test_full_backwards_alone_are_divided_in_half() -> None:
    costs = measured_costs([_timeline_of({Kind.F: 10.0, Kind.BW: 20.0})], 0.0, HELD)
    assert costs.backward_us == (10.0, 10.0)
    assert costs.weight_us == (10.0, 10.0)


def _stretched(timeline, device: int, times: float):
    """Return the timeline with the passes of a device stretched by a factor, one after another."""
    starts, ends = list(map(list, timeline.starts)), list(map(list, timeline.ends))
    for index, (start, end) in enumerate(zip(starts[device], ends[device], strict=True)):
        ends[device][index] = start + times * (end - start)
    return replace(timeline, starts=tuple(map(tuple, starts)), ends=tuple(map(tuple, ends)))


def test_costs_ignore_disturbed_steps() -> None:
    calm = simulate(make("v-half", 2, 6))
    steps = [calm, _stretched(calm, 1, 1.5), calm, _stretched(calm, 0, 1.05)]
    undisturbed_steps, left_out = undisturbed(steps)
    assert left_out == [(1, 1, pytest.approx(1.5))]
    assert undisturbed_steps == [steps[0], steps[2], steps[3]]
    # No more than half of the steps: where all differ, none is the usual one.
    undisturbed_steps, left_out = undisturbed(
        [_stretched(calm, 0, 2.0**exponent) for exponent in range(4)]
    )
    assert [step for step, *_ in left_out] == [2, 3]
    assert len(undisturbed_steps) == 2
    memory_by_stage = dict.fromkeys(range(4), (1.0, 1.0))
    assert measured_costs(steps, 0.0, memory_by_stage).forward_us[0] == pytest.approx(1.0)
