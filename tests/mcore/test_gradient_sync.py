"""When GradientSync starts which reduction, on chunks with made-up bucket groups."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.step.gradient_sync import GradientSync, splits_last


class Group:
    """A bucket group that notes when its reduction starts."""

    def __init__(self, name: str, log: list[str], chunk: Any) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        self.buckets = [SimpleNamespace(params_list=self.parameters)]
        self.is_first_batch = self.is_last_microbatch = True
        self._name, self._log, self._chunk = name, log, chunk

    def start_grad_sync(self, force_all_reduce: bool) -> None:
        assert self._chunk.ddp_config.overlap_grad_reduce
        self._log.append(self._name + "!" * force_all_reduce)


def chunk_of(name: str, log: list[str], groups: int = 2, experts: int = 0) -> Any:
    chunk = SimpleNamespace(ddp_config=SimpleNamespace(overlap_grad_reduce=True))
    chunk.bucket_groups = [Group(f"{name}{i}", log, chunk) for i in range(groups)]
    chunk.expert_parallel_bucket_groups = [Group(f"{name}x{i}", log, chunk) for i in range(experts)]
    return chunk


def sync_of(
    chunks: list[Any], recomputes: bool = False, forward_only: bool = False
) -> GradientSync:
    config = SimpleNamespace(param_sync_func=None, no_sync_func=None)
    pipeline = SimpleNamespace(
        overlaps_grad_reduce=True,
        choice=SimpleNamespace(keeps_backward_whole=recomputes),
    )
    return GradientSync(config, chunks, pipeline, 2, False, forward_only)  # type: ignore[arg-type]


def jobs_of(chunk: Any) -> list[list[Tensor]]:
    """Return the parameters of each job of a chunk: one per parameter, last layer first."""
    groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
    return [[parameter] for group in groups for parameter in group.parameters]


def run_w(sync: GradientSync, log: list[str], number: int, jobs: list[list[Tensor]]) -> None:
    sync.weights_begin(number)
    for place, parameters in enumerate(jobs):
        log.append(f"job {place}")
        sync.added(parameters)
    sync.weights_done(number)


def test_each_bucket_starts_after_the_job_that_completes_it() -> None:
    log: list[str] = []
    chunk = chunk_of("b", log, experts=1)
    sync, jobs = sync_of([chunk]), jobs_of(chunk)
    with sync.without_ddp():
        assert not chunk.ddp_config.overlap_grad_reduce  # DDP's hooks are to be quiet
        for _ in range(2):
            for parameters in jobs:
                sync.deferred(parameters)
        run_w(sync, log, 0, jobs)
        assert "b0" not in log
        log.clear()
        run_w(sync, log, 0, jobs)
    assert log == ["job 0", "job 1", "b0", "job 2", "job 3", "b1", "job 4", "job 5", "bx0"]
    assert chunk.ddp_config.overlap_grad_reduce
    assert not any(group.is_first_batch for group in chunk.bucket_groups)


def test_buckets_keep_their_order_and_those_without_jobs_start_first() -> None:
    log: list[str] = []
    chunk = chunk_of("b", log, groups=3)
    sync = sync_of([chunk])
    jobs = [[chunk.bucket_groups[2].parameters[0]], [chunk.bucket_groups[1].parameters[0]]]
    sync.weights_done(0)
    for parameters in jobs:
        sync.deferred(parameters)
    run_w(sync, log, 0, jobs)
    assert log == ["b0", "job 0", "job 1", "b1", "b2"]


def test_the_bucket_of_a_tied_weight_waits_for_the_last_stage() -> None:
    log: list[str] = []
    chunks = [chunk_of("first", log), chunk_of("last", log)]
    tied = chunks[0].bucket_groups[1].parameters[0]
    tied.zero_out_wgrad = True
    sync = sync_of(chunks)
    sync.weights_done(0)
    sync.weights_done(1)
    sync.deferred([tied])  # by the output layer, in the last stage's B
    sync.weights_begin(0)
    sync.weights_done(0)
    assert log == ["first0"]
    run_w(sync, log, 1, [[tied]])
    assert log == ["first0", "last0", "last1", "job 0", "first1"]


def test_the_last_whole_backward_is_split_unless_layers_are_recomputed() -> None:
    for recomputes in (False, True):
        log: list[str] = []
        sync = sync_of([chunk_of("b", log)], recomputes=recomputes)
        assert not sync.splits(0)
        sync.weights_done(0)
        assert sync.splits(0) != recomputes
        sync.weights_done(0)
        assert log == ["b0", "b1"]


def test_chunk_outside_megatron_ddp_is_rejected_in_training() -> None:
    with pytest.raises(UnsupportedError, match="Remove --overlap-grad-reduce"):
        sync_of([torch.nn.Linear(2, 2)])
    evaluates = sync_of([torch.nn.Linear(2, 2)], forward_only=True)  # as with --skip-train
    with evaluates.without_ddp():
        assert not evaluates.overlaps


def test_the_caller_who_accumulates_over_several_calls_reduces_itself() -> None:
    """As NeMo-RL does for streamed rollouts: DDP's no_sync around calls, then start_grad_sync."""
    log: list[str] = []
    chunk = chunk_of("b", log)
    for group in chunk.bucket_groups:
        group.is_last_microbatch = False  # as within no_sync
    sync = sync_of([chunk])
    with sync.without_ddp():
        assert not chunk.ddp_config.overlap_grad_reduce  # DDP's hooks expect a gradient in every B
        for _ in range(2):
            run_w(sync, log, 0, [])
    assert log == []


def test_a_step_within_no_sync_does_not_end_it() -> None:
    chunk = chunk_of("b", [])

    @contextmanager
    def no_sync() -> Iterator[None]:
        """Megatron's: it sets the flag at its end, without a look at its value before."""
        for group in chunk.bucket_groups:
            group.is_last_microbatch = False
        yield
        for group in chunk.bucket_groups:
            group.is_last_microbatch = True

    config = SimpleNamespace(param_sync_func=None, no_sync_func=no_sync)
    choice = SimpleNamespace(keeps_backward_whole=False)
    pipeline: Any = SimpleNamespace(overlaps_grad_reduce=True, choice=choice)
    with no_sync():
        with GradientSync(config, [chunk], pipeline, 2, False).without_ddp():
            assert not GradientSync(config, [chunk], pipeline, 2, False).overlaps
        assert not any(group.is_last_microbatch for group in chunk.bucket_groups)
    with GradientSync(config, [chunk], pipeline, 2, False).without_ddp():
        assert not any(group.is_last_microbatch for group in chunk.bucket_groups)


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_last_backward_is_split_in_every_step_as_captured(recomputes: bool) -> None:
    """CUDA graphs are captured once, for steps within the caller's no_sync as well."""
    splits = []
    for is_last_call in (False, True):
        chunk = chunk_of("b", [])
        for group in chunk.bucket_groups:
            group.is_last_microbatch = is_last_call
        sync = sync_of([chunk], recomputes=recomputes)
        sync.weights_done(0)
        splits.append(sync.splits(0))
    pipeline: Any = SimpleNamespace(
        overlaps_grad_reduce=True, choice=SimpleNamespace(keeps_backward_whole=recomputes)
    )
    assert splits == [splits_last(pipeline, chunk)] * 2 == [not recomputes] * 2
