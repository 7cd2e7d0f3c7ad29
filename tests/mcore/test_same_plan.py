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


def compare_programs(rank: int, names: tuple[str, ...]) -> list[str]:
    agreement, errors = Agreement(), []
    for name in (names[0], names[rank]):
        program = lower(make(name, 2, 4))
        try:
            agreement.check(program)
            agreement.check(program)
        except ScheduleError as error:
            errors.append(str(error))
    return errors


def test_different_pass_orders_fail_on_all_ranks(farm: Farm) -> None:
    errors_by_rank = run_ranks(farm, 3, compare_programs, ("v-half", "v-half", "v-zb"))
    (text,) = errors_by_rank[0]
    assert errors_by_rank == [[text]] * 3
    assert text.startswith("rank 2 has planned another order than rank 0 for 4 microbatches: ")
    assert run_ranks(farm, 2, compare_programs, ("v-half", "v-half")) == [[], []]


def compare_counts(rank: int, count_of: tuple[int, ...], has_replicas: bool) -> str:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])] if has_replicas else []
    pipeline = groups[rank // 2] if has_replicas else None
    program = lower(make("v-half", 2, count_of[rank]))
    try:
        Agreement().check(program, groups=[pipeline])
    except ScheduleError as error:
        return str(error)
    return ""


def test_only_dependent_ranks_need_the_same_number_of_microbatches(farm: Farm) -> None:
    assert run_ranks(farm, 4, compare_counts, (4, 4, 3, 3), True) == [""] * 4
    text, *other_texts = run_ranks(farm, 4, compare_counts, (4, 4, 3, 3), False)
    assert text.startswith("rank 2 runs 3 microbatches in this step, rank 0 runs 4: ")
    assert other_texts == [text] * 3
    assert run_ranks(farm, 2, compare_counts, (4, 3), False)[0].startswith(
        "rank 1 runs 3 microbatches"
    )


def compare_in_two_groups(rank: int, names: tuple[str, ...]) -> str:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    try:
        Agreement().check(
            lower(make(names[rank], 2, 4)), groups=[rows[rank // 2], columns[rank % 2]]
        )
    except ScheduleError as error:
        return str(error)
    return ""


def test_ranks_of_several_groups_compare_through_common_ranks(farm: Farm) -> None:
    texts = run_ranks(farm, 4, compare_in_two_groups, ("v-half", "v-half", "v-half", "v-zb"))
    assert all("rank 3 has planned another order than rank 0" in text for text in texts)


def compare_what_b_runs(rank: int, shares: tuple[float, ...]) -> str:
    overlaps = {Pass.parse("B0.0"): DeferredWgradOverlap(Pass.parse("W3.1"), shares[rank])}
    try:
        Agreement().check(lower(make("v-zb", 2, 4)), overlaps)
    except ScheduleError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_different_wgrad_overlaps_fail_on_all_ranks(farm: Farm) -> None:
    assert run_ranks(farm, 2, compare_what_b_runs, (0.5, 0.5)) == ["", ""]
    texts = run_ranks(farm, 2, compare_what_b_runs, (0.5, 0.25))
    assert all("rank 1 has planned another order than rank 0" in text for text in texts)


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
    assert report.within_passes_bytes == 4000
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
