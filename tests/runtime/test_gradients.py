"""Programs on gloo ranks: gradients as of one process, memory as of the schedule."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime.plain_pipeline import SHAPE, AliveCounter, gradients_of, one_process, stages_for
from runtime.ranks import run_ranks

from megatron_vshape.core.check.simulate import peak_held, simulate, unit_costs
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import looping, stages_of
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.instructions import Program
from megatron_vshape.core.program.lowering import forward_wave, lower
from megatron_vshape.runtime.p2p import Transport
from megatron_vshape.runtime.program_runner import run_program


def gpipe_looping(num_devices: int, num_microbatches: int) -> Schedule:
    """Return all forwards, then all backwards, on a looping placement of two chunks."""
    placement = looping(num_devices, 2)
    rows = []
    for first, second in stages_of(placement, num_devices):
        row = [Pass(Kind.F, s, m) for s in (first, second) for m in range(num_microbatches)]
        for stage in (second, first):
            for kind in (Kind.B, Kind.W):
                row += [Pass(kind, stage, m) for m in range(num_microbatches)]
        rows.append(tuple(row))
    return Schedule("looping", num_devices, num_microbatches, placement, tuple(rows))


@dataclass(frozen=True)
class Case:
    """A program to run, on pipelines of `num_devices` ranks."""

    name: str
    num_devices: int
    num_microbatches: int
    fused: bool = False
    dtype: torch.dtype = torch.float32
    kernels: bool = False

    def __str__(self) -> str:
        fused = "-fused" * self.fused + "-kernels" * self.kernels
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name}-d{self.num_devices}-m{self.num_microbatches}{fused}-{dtype}"

    def schedule(self) -> Schedule:
        if self.name == "looping":
            return gpipe_looping(self.num_devices, self.num_microbatches)
        return make(self.name, self.num_devices, self.num_microbatches)

    def program(self) -> Program:
        schedule = self.schedule()
        return lower(schedule, simulate(schedule) if self.fused else None, kernels=self.kernels)


NAMES = ("1f1b", "v-min", "v-half", "v-zb")
FOUR = [Case(name, 4, m) for name in NAMES for m in (1, 3, 9)]
FOUR += [Case(name, 4, 9, fused=True) for name in ("v-min", "v-half")]
FOUR += [Case(name, 4, 5, dtype=torch.bfloat16) for name in ("v-half", "1f1b")]
FOUR += [Case("looping", 4, 3)]
FOUR += [Case(name, 4, 9, fused=True, kernels=True) for name in ("v-half", "v-zb")]
FOUR += [Case("dualpipev", 4, 9), Case("dualpipev", 4, 9, fused=True, kernels=True)]
TWO = [Case(name, 2, m) for name in NAMES for m in (1, 4)]
TWO += [Case("looping", 2, 3), Case("looping", 2, 3)]


def run_case(rank: int, case: Case, transport: Transport, pipeline: int) -> dict[str, Any]:
    """Run a case on this rank and return the results to compare."""
    program = case.program()
    transport.prepare(program)
    device = transport.device
    stages = stages_for(program.schedule, device, pipeline, case.dtype)
    counter = AliveCounter(stages)
    transport.expect(SHAPE, case.dtype)
    run_program(program, device, stages, transport, counter)
    return {
        "device": device,
        "pipeline": pipeline,
        "gradients": {
            s: [g.tolist() for g in gradients_of(stage_object.module)]
            for s, stage_object in stages.items()
        },
        "losses": [loss for stage_object in stages.values() for loss in stage_object.losses],
        "peak": counter.peak,
        "passes": counter.passes,
        "left": sum(
            len(stage_object.jobs._buckets) + stage_object.num_alive()
            for stage_object in stages.values()
        ),
        "pending": len(transport._sends.left()),
        "groups": len(dist.distributed_c10d._world.pg_map),
    }


def run_cases(rank: int) -> dict[Case, dict[str, Any]]:
    """Run all cases: one pipeline of four ranks, then two of two, interleaved as with TP."""
    transport = Transport([[0, 1, 2, 3]], SHAPE, torch.float32, "cpu", timeout_s=20)
    results = {case: run_case(rank, case, transport, 0) for case in FOUR}
    assert transport.device == rank
    transport.close()
    transport = Transport([[0, 2], [1, 3]], SHAPE, torch.float32, "cpu", timeout_s=20)
    results |= {case: run_case(rank, case, transport, rank % 2) for case in TWO}
    repeated = {case: run_case(rank, case, transport, rank % 2) for case in TWO}
    for case in TWO:
        assert repeated[case]["gradients"] == results[case]["gradients"]
        results[case]["groups again"] = repeated[case]["groups"] - repeated[TWO[0]]["groups"]
    run_evaluation(rank, transport)
    transport.close()
    return results


def run_evaluation(rank: int, transport: Transport) -> None:
    """Run a program of forward passes alone, as an evaluation does."""
    schedule = make("v-half", 2, 3)
    program = lower(forward_wave(schedule.placement, 2, 3))
    transport.prepare(program)
    stages = stages_for(schedule, transport.device, rank % 2, torch.float32)
    with torch.no_grad():
        run_program(program, transport.device, stages, transport)
    if 3 in stages:
        assert stages[3].losses == one_process(4, 3, rank % 2, torch.float32)[1]


@pytest.fixture(scope="module")
def results() -> list[dict[Case, dict[str, Any]]]:
    """Return the results of every case for every rank, from one launch."""
    return run_ranks(4, run_cases)


@pytest.mark.parametrize("case", FOUR + TWO[:-1], ids=str)
def test_gradients_equal_one_process_bitwise(results, case: Case) -> None:
    num_stages = len(case.schedule().placement)
    for ranks in results:
        result = ranks[case]
        expected, losses = one_process(
            num_stages, case.num_microbatches, result["pipeline"], case.dtype
        )
        for stage, gradients in result["gradients"].items():
            for gradient, expected_gradient in zip(gradients, expected[stage], strict=True):
                assert torch.equal(torch.tensor(gradient), expected_gradient.float()), (
                    f"{case} stage {stage}"
                )
        if num_stages - 1 in result["gradients"]:
            assert result["losses"] == losses


@pytest.mark.parametrize("case", FOUR + TWO[:-1], ids=str)
def test_activation_memory_stays_within_the_schedule(results, case: Case) -> None:
    schedule = case.schedule()
    chunks_per_stage = unit_costs(schedule).held_after_forward_bytes[0]
    peaks = peak_held(schedule)
    for ranks in results:
        result = ranks[case]
        peak, planned_peak = result["peak"] * chunks_per_stage, peaks[result["device"]]
        # An overlapped pass allocates the activations of its F at its start; they are counted at
        # its end.
        assert peak == planned_peak or (
            schedule.overlapped and planned_peak - 1 <= peak < planned_peak
        )
        assert result["left"] == 0
        assert result["pending"] == 0


@pytest.mark.parametrize("case", FOUR, ids=str)
def test_observer_receives_passes_in_program_order(results, case: Case) -> None:
    order = case.program().schedule.order
    for rank, ranks in enumerate(results):
        assert tuple(ranks[case]["passes"]) == order[rank]


def test_planning_again_creates_no_process_groups(results) -> None:
    for ranks in results:
        assert {ranks[case]["groups again"] for case in TWO} == {0}
