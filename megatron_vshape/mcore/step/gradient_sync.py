"""Start of data-parallel gradient reductions during a step."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_vshape.mcore.hook import Replaced
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.setup.run_config import RunConfig


@dataclass(slots=True)
class _Reduction:
    """The reduction of one bucket group, and the work that must complete first."""

    start: Callable[[], None]
    chunks: frozenset[int]  # chunks whose backwards must all have run
    jobs: int = 0  # pending weight jobs of its parameters


class GradientSync:
    """Starts the reduction of every bucket in the W that completes its gradients.

    DDP would start a bucket when autograd passes its parameters for the last time, which is too
    early with deferred weight gradients. So the whole step runs under `no_sync`, and this class
    starts the buckets: those without weight jobs when the last W of their chunk starts, the others
    when the jobs have added their missing gradients. The chunks of a rank end in the same order on
    all data-parallel ranks, even if their numbers of microbatches differ
    (tests/mcore/test_plans.py), and the buckets of a chunk start in order. So the reductions match.
    """

    def __init__(
        self,
        config: Any,
        model: Sequence[nn.Module],
        pipeline: RunConfig,
        num_microbatches: int,
        force_all_reduce: bool | None,
        forward_only: bool = False,
    ) -> None:
        """Plan the reductions of one step.

        Raises:
            UnsupportedError: Reductions should overlap, but a chunk is not wrapped in Megatron's
                DDP.
        """
        self._config = config
        self._model = model
        wants = pipeline.overlaps_grad_reduce or overlaps_grad_reduce(model[0])
        self._disables_hooks = wants and not forward_only
        self._accumulates = _accumulates(model)
        self.overlaps = self._disables_hooks and not self._accumulates
        self._splits_last = not forward_only and splits_last(pipeline, model[0])
        # By chunk, the backwards whose W has not ended: the last one completes its gradients.
        self._left = [num_microbatches] * len(model)
        self._closed: set[int] = set()
        self._force_all_reduce = bool(force_all_reduce)
        self._queues: list[deque[_Reduction]] = []
        self._reduction_of: dict[Tensor, _Reduction] = {}
        if self.overlaps:
            for chunk in range(len(model)):
                self._plan(chunk)

    def gather_parameters(self) -> None:
        """Start parameter all-gathers of all chunks, if Megatron leaves this to the schedule."""
        param_sync = self._config.param_sync_func
        if param_sync is not None:
            for chunk, sync in zip(self._model, self._per_chunk(param_sync), strict=True):
                sync(chunk.parameters())

    @contextlib.contextmanager
    def without_ddp(self) -> Iterator[None]:
        """Disable DDP's own reductions during a step."""
        with contextlib.ExitStack() as stack:
            no_sync = self._config.no_sync_func
            # The end of this context would end the caller's `no_sync` as well.
            if no_sync is not None and not self._accumulates:
                # With several chunks, Megatron's trainer sets one context per chunk.
                for enter in self._per_chunk(no_sync) if isinstance(no_sync, list) else [no_sync]:
                    stack.enter_context(enter())
            if self._disables_hooks:
                stack.enter_context(_overlap(self._model, False))
            yield

    def deferred(self, parameters: Sequence[Tensor]) -> None:
        """Count a new job that adds to the gradients of `parameters`."""
        for parameter in parameters:
            if parameter in self._reduction_of:
                self._reduction_of[parameter].jobs += 1

    def added(self, parameters: Sequence[Tensor]) -> None:
        """Count a completed job, and start reductions that are ready."""
        for parameter in parameters:
            if parameter in self._reduction_of:
                self._reduction_of[parameter].jobs -= 1
        self._start_ready()

    def splits(self, chunk: int) -> bool:
        """Return whether a full backward of the chunk runs as B, then W.

        True for the last one, so that its buckets start one by one.
        """
        return self._splits_last and self._left[chunk] == 1

    def weights_begin(self, chunk: int) -> None:
        """Record that a W of the chunk starts; its B has run."""
        if self._left[chunk] == 1:
            self._close(chunk)

    def weights_done(self, chunk: int) -> None:
        """Record that the weight gradients of one more microbatch are complete."""
        self._left[chunk] -= 1
        if not self._left[chunk]:
            self._close(chunk)

    def _close(self, chunk: int) -> None:
        self._closed.add(chunk)
        self._start_ready()

    def _start_ready(self) -> None:
        for queue in self._queues:
            # Data-parallel ranks must start the reductions of a queue in the same order, so never
            # skip one.
            while queue and not queue[0].jobs and queue[0].chunks <= self._closed:
                with _overlap(self._model, True):
                    queue.popleft().start()

    def _plan(self, chunk: int) -> None:
        """Queue the reductions of a chunk's bucket groups, with a separate queue for experts."""
        model: Any = self._model[chunk]
        if not hasattr(model, "bucket_groups"):
            raise UnsupportedError(
                "--overlap-grad-reduce requires Megatron's DistributedDataParallel around chunk "
                f"{chunk}, which is a {type(model).__name__}. Remove --overlap-grad-reduce"
            )
        for groups in (model.bucket_groups, model.expert_parallel_bucket_groups):
            queue: deque[_Reduction] = deque()
            for group in groups:
                parameters = [
                    parameter for bucket in group.buckets for parameter in bucket.params_list
                ]
                # A shared embedding, to whose gradient the last chunk's passes add as well.
                shared = any(
                    getattr(parameter, "zero_out_wgrad", False) for parameter in parameters
                )
                chunks = range(len(self._model)) if shared else [chunk]
                reduction = _Reduction(partial(self._start_group, group), frozenset(chunks))
                self._reduction_of.update(dict.fromkeys(parameters, reduction))
                queue.append(reduction)
            self._queues.append(queue)

    def _start_group(self, group: Any) -> None:
        # Otherwise DDP would start its "first batch" again at the end of the step.
        group.is_first_batch = False
        group.start_grad_sync(force_all_reduce=self._force_all_reduce)

    def _per_chunk(self, function: Any) -> list[Any]:
        return function if isinstance(function, list) else [function] * len(self._model)


def splits_last(pipeline: RunConfig, chunk: nn.Module) -> bool:
    """Return whether the last full backward of every chunk runs as B, then W.

    CUDA graphs are captured in this order, so it depends on the run only, not on a step: the caller
    may run some steps within DDP's `no_sync`. False with full recompute, because all recomputed
    activations would be allocated between B and W.
    """
    overlaps = pipeline.overlaps_grad_reduce or overlaps_grad_reduce(chunk)
    return overlaps and not pipeline.choice.keeps_full_backward


def divide_by_tokens(model: Sequence[Any], tokens: Tensor, groups: Any) -> None:
    """Divide the gradients by the number of tokens, as Megatron does if it gets that number.

    `tokens` is the number of this pipeline; it is summed over data-parallel ranks.
    """
    dist.all_reduce(tokens, group=getattr(groups, "dp_cp_gtp_remat", None) or groups.dp_cp)
    scaling = 1.0 / torch.clamp(tokens, min=1)
    for chunk in model:
        chunk.scale_gradients(scaling)


def _accumulates(model: Sequence[nn.Module]) -> bool:
    """Return whether the caller runs this step within DDP's `no_sync`.

    It then accumulates the gradients of several calls, and starts their reduction itself.
    """
    groups = (group for chunk in model for group in getattr(chunk, "bucket_groups", ()))
    return not all(group.is_last_microbatch for group in groups)


@contextlib.contextmanager
def _overlap(model: Sequence[nn.Module], is_on: bool) -> Iterator[None]:
    """Set overlap_grad_reduce in DDP's config within this context.

    If true, DDP's hooks require a gradient from every backward, which a B with deferred weights
    does not have. But bucket groups reduce asynchronously only if it is true.
    """
    with Replaced() as replaced:
        for model_chunk in model:
            if hasattr(model_chunk, "ddp_config"):
                replaced.put(model_chunk.ddp_config, "overlap_grad_reduce", is_on)
        yield


def overlaps_grad_reduce(chunk: nn.Module) -> bool:
    """Return whether the chunk's DDP reduces gradients during the backward."""
    return bool(getattr(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", False))
