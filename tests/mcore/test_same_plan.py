"""Agreement of all ranks on the schedule and on memory before a step runs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mcore.farm import Farm
from mcore.ranks import run_ranks

from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.lowering import DeferredWgradOverlap, lower
from megatron_vshape.mcore.observe.profiling import Profiler
from megatron_vshape.mcore.observe.report import (
    RunReport,
    StaticMemory,
    max_of_replicas,
    static_memory,
)
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.setup.plans import Agreement, Planner
from megatron_vshape.mcore.setup.run_config import ScheduleChoice
from megatron_vshape.mcore.step_state import StepState
from megatron_vshape.runtime.activation_tracker import ActivationTracker


def compare(
    rank: int,
    names: tuple[str, ...],
    counts: tuple[int, ...] = (),
    pairs: tuple[tuple[int, int], ...] = (),
    shares: tuple[float, ...] = (),
) -> str:
    """Return the error of a rank after comparing rank 0's schedule and then its own."""
    groups = [(pair, dist.new_group(pair)) for pair in pairs]
    local_groups = [group for pair, group in groups if rank in pair] or [None]
    agreement = Agreement()
    try:
        for index in (0, 0, rank, rank):
            program = lower(make(names[index], 2, counts[index] if counts else 4))
            overlaps = {
                Pass.parse("B0.0"): DeferredWgradOverlap(Pass.parse("W3.1"), share)
                for share in shares[index : index + 1]
            }
            agreement.check(program, overlaps, groups=local_groups)
    except ScheduleError as error:
        return str(error)
    return ""


HALF, ZERO = "v-half", "v-zb"
ROWS, COLUMNS = ((0, 1), (2, 3)), ((0, 2), (1, 3))
PLANNED = "has planned another order than rank 0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((HALF, HALF),), ""),
        (((HALF, HALF, ZERO),), f"rank 2 {PLANNED} for 4 microbatches: "),
        # Only dependent ranks need the same number of microbatches.
        (((HALF,) * 4, (4, 4, 3, 3), ROWS), ""),
        (((HALF,) * 4, (4, 4, 3, 3)), "rank 2 runs 3 microbatches in this step, rank 0 runs 4: "),
        (((HALF,) * 2, (4, 3)), "rank 1 runs 3 microbatches"),
        # Ranks of several groups compare through common ranks.
        (((HALF, HALF, HALF, ZERO), (), ROWS + COLUMNS), f"rank 3 {PLANNED}"),
        pytest.param(((ZERO,) * 2, (), (), (0.5, 0.5)), "", marks=pytest.mark.slow),
        pytest.param(
            ((ZERO,) * 2, (), (), (0.5, 0.25)), f"rank 1 {PLANNED}", marks=pytest.mark.slow
        ),
    ],
)
def test_different_plans_fail_on_all_ranks(
    farm: Farm, arguments: tuple[Any, ...], message: str
) -> None:
    texts = run_ranks(farm, len(arguments[0]), compare, *arguments)
    assert len(set(texts)) == 1
    assert texts[0].startswith(message)
    assert bool(texts[0]) == bool(message)


def memory_of_replicas(rank: int) -> list[StaticMemory]:
    group = SimpleNamespace(rank=lambda: rank // 2, size=lambda: 2)
    memory = StaticMemory(10, 10, 100 if rank == 2 else rank, 0, 0)
    return max_of_replicas(memory, group, lambda static_memory: static_memory.total)  # type: ignore[arg-type]


@pytest.mark.slow
def test_memory_of_the_largest_replica_counts(farm: Farm) -> None:
    expected = [StaticMemory(10, 10, 1, 0, 0), StaticMemory(10, 10, 100, 0, 0)]
    assert run_ranks(farm, 4, memory_of_replicas) == [expected] * 4


class Quantized(torch.Tensor):
    """A parameter that stores its bytes in an inner tensor, like Transformer Engine's FP8."""

    data_: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> "Quantized":
        wrapper = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16)
        wrapper.data_ = data
        return wrapper

    def get_data_tensors(self) -> list[torch.Tensor]:
        return [self.data_]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise NotImplementedError(func)


def test_quantized_parameters_count_their_storage() -> None:
    parameter = Quantized(torch.zeros(30, dtype=torch.uint8))
    with pytest.raises(RuntimeError):
        parameter.untyped_storage().data_ptr()
    chunk = SimpleNamespace(parameters=lambda: [parameter])
    optimizer = SimpleNamespace(param_groups=[{"params": [torch.zeros(15)]}])
    memory = static_memory([chunk], optimizer)  # type: ignore[list-item]
    assert (memory.parameters, memory.optimizer) == (30, 15 * 4 + 2 * 15 * 4)


def test_quantized_activations_count_their_storage() -> None:
    saved, weight = (Quantized(torch.zeros(size, dtype=torch.uint8)) for size in (30, 50))
    tracker = ActivationTracker([weight])
    tracker.add(saved)
    tracker.add(weight)
    tracker.ends(Pass(Kind.F, 0, 0))
    assert tracker.peak_bytes == 30


def test_workspace_of_passes_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    report = RunReport(StepState(), "auto", [], lambda _: None)  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5000)
    with report.training_step([], 4, 1):
        pass
    assert report.memory.within_passes == 4000
    planner = Planner(ScheduleChoice(2, "auto", limit_bytes=1e6))
    planner.reserve((10, 20))
    pipeline: Any = SimpleNamespace(options=Options("auto", 1.0))
    module = "megatron_vshape.mcore.observe.profiling"
    monkeypatch.setattr(
        f"{module}.max_of_replicas",
        lambda local_bytes, group, size: [local_bytes, 2 * local_bytes],
    )
    monkeypatch.setattr(f"{module}.dist.get_rank", lambda: 0)
    Profiler(pipeline, planner, report)._reserve_within_passes(None)  # type: ignore[arg-type]
    assert planner.static_bytes == (4010, 8020)
