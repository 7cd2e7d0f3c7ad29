"""Optimizer steps that do not wait for the global gradient norm and the inf check.

Source: section 4 of Zero Bubble Pipeline Parallelism (arXiv 2401.10241). The reductions for
clipping and loss scaling are a barrier at the end of an iteration. They cost a bubble of d - 1
passes even if the schedule has none. So every rank starts the reductions, steps as if no gradient
is clipped and no step is skipped, and starts the next iteration. When the result arrives, before
the first backward, the step is either valid, or it is rolled back and repeated.

The result must be bitwise equal to a run without post-validation. Therefore this implementation
differs from the paper in three points:

* Norm. The paper passes partial sums from stage to stage and returns the total. A chain adds in
  another order than an all-reduce, so the norm differs in the last bits, and with it every clipped
  gradient. This module starts Megatron's own all-reduce on its own group and waits for it later. It
  ends when the last rank has joined, as the chain does, but with one latency instead of one per
  stage. As in the paper, a rank uses its local part: if that part alone requires clipping or is not
  finite, the rank does not step, so its parameters stay finite. It continues like all other ranks,
  and all of them roll back.
* Rollback. The paper undoes AdamW by arithmetic, which rounds. This module restores a copy: see
  `backup` for its memory.
* Iteration boundary. Both runs wait for the total at the end of the next iteration's forwards. Here
  this is still inside the iteration of the step. So the trainer gets the norm, loss scale and
  learning rate of that iteration, and everything it does next (log, evaluate, save, exit) sees
  validated state. If the trainer is known to do anything but continue, nothing runs early.

Megatron's `ChainedOptimizer.step` repeats a step from the restored state, with the validated
results in place of its own reductions. It also runs the full step while prediction does not pay: a
wrong prediction costs the forwards that ran early. So a step is predicted only if the preceding
steps would have been predicted correctly. All ranks decide from validated results alone, so all
decide equally.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
)
from torch import Tensor

from megatron_vshape.mcore.hook import Replaced
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.runtime.hosts import gather_objects

_STEPS_BEFORE_PREDICTION = 2
"""Consecutive steps without clipping or skipping before the next step is predicted to need none.
A wrong prediction costs about two thirds more than a correct one gains, and clipping comes in
runs."""

_SUPPORTED_OPTIMIZERS = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)
"""Megatron optimizers that support rollback."""

Step = Callable[[Any], tuple[bool, Any, Any]]


class _GradNorms(NamedTuple):
    """The norms that Megatron clips by: floats, or tensors with one element."""

    main: Any  # of all parameters that are in no group
    by_group: dict[str, Any]  # of SEPARATE_GRAD_NORM_GROUPS; empty without clipping

    @classmethod
    def compute(cls, optimizer: Any) -> _GradNorms:
        """Compute the norms with Megatron's own reductions."""
        main, clips = optimizer.get_grad_norm(), _clips_groups(optimizer)
        return cls(main, optimizer._compute_grad_norms_by_group() if clips else {})

    @classmethod
    def of_last_step(cls, optimizer: Any, main: Any) -> _GradNorms:
        """Return the norms of the step that `optimizer` has just made."""
        return cls(main, optimizer.grad_norms_by_group if _clips_groups(optimizer) else {})


class _StepVerdict(NamedTuple):
    """Results of the reductions of one step."""

    found_inf: tuple[bool, ...]  # per optimizer with a loss scale
    norms: _GradNorms
    is_valid: bool  # whether the step without clipping is valid


class Backup:
    """Copies of the parameters, moments and step counts of torch-compatible optimizers.

    Arithmetic cannot undo Adam, because rounding loses the old values. So the backup copies
    everything: for Adam in fp32, 12 bytes per parameter that this rank updates. The memory is
    reused in every step. 16-bit weights are not copied, because they are casts of the fp32 weights.
    """

    def __init__(self) -> None:
        self._copies: list[Tensor] = []
        self._state_tensors: list[Tensor] = []
        self._values: list[tuple[dict[Any, Any], dict[Any, Any]]] = []

    @property
    def nbytes(self) -> int:
        """Return the size of the copies in bytes."""
        return sum(tensor.nbytes for tensor in self._copies)

    @torch.no_grad()
    def save(self, optimizers: Sequence[Any]) -> None:
        """Copy all state that the next step of `optimizers` may change."""
        self._values = [
            (table, _values(table)) for optimizer in optimizers for table in _tables(optimizer)
        ]
        parameters = [
            parameter.detach()
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        states = [
            value
            for table, values in self._values
            for value in values.values()
            if isinstance(value, Tensor)
        ]
        self._state_tensors = parameters + states
        shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in self._state_tensors]
        # Allocate only if the shapes have changed, for example after the first step created the
        # moments.
        if shapes != [(tensor.shape, tensor.dtype, tensor.device) for tensor in self._copies]:
            self._copies = [torch.empty_like(tensor) for tensor in self._state_tensors]
        _copy(self._copies, self._state_tensors)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all values in place, and remove entries that the step has created."""
        _copy(self._state_tensors, self._copies)
        for table, values in self._values:
            for key in table.keys() - values.keys() - {"params"}:
                del table[key]
            table.update(values)


def _tables(optimizer: Any) -> Iterator[dict[Any, Any]]:
    """Yield the dicts that a step may write to.

    These are the groups (learning rates, step counts in apex) and the states per parameter
    (moments, step counts in torch).
    """
    yield from optimizer.param_groups
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield optimizer.state[parameter]


def _values(table: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in table.items() if key != "params"}


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy every source to its target, with one call per device and dtype.

    If a list mixes devices or dtypes, torch copies the tensors one by one. A single tensor is
    enough for that, such as the step count that torch's Adam keeps on the host.
    """
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        group = groups.setdefault((target.device, target.dtype), ([], []))
        group[0].append(target)
        group[1].append(source)
    for group in groups.values():
        torch._foreach_copy_(*group)


@dataclass(eq=False)
class PostValidation:
    """Runs the optimizer steps of a training run; replaces `ChainedOptimizer.step`."""

    start_next: Callable[[], None]  # starts the next step, as far as it can be rolled back
    roll_back: Callable[[], None]  # drops a step that was started early
    _backup: Backup = field(default_factory=Backup)
    _num_valid: int = 0  # consecutive steps for which a step without clipping was valid
    _num_predicted: int = 0
    _num_rolled_back: int = 0

    def step(self, optimizer: Any, original: Step) -> tuple[bool, Any, Any]:
        """Run one step and return the result of `original`; the state is validated at return."""
        from megatron.training import get_args  # libraries without it load this module, too

        if self._num_valid < _STEPS_BEFORE_PREDICTION or not _next_step_follows(get_args()):
            result = original(optimizer)
            success, norm, _ = result
            norms = _GradNorms.of_last_step(optimizer, norm)
            self._record_validity(bool(success) and _is_step_valid(optimizer, norms))
            return result
        return self._predict_step(optimizer, original)

    def end(self) -> None:
        """Drop an early started step; all ranks call this at the end of the run."""
        self.roll_back()

    def closing_line(self) -> str:
        """Return a summary of the predictions of this run."""
        return (
            f"post-validation: {self._num_predicted} steps made before they were validated, "
            f"{self._num_rolled_back} of them undone; "
            f"{self._backup.nbytes / 2**20:.2f} MiB on this rank to undo one"
        )

    def _predict_step(self, optimizer: Any, original: Step) -> tuple[bool, Any, Any]:
        pending = Reductions(optimizer)
        self._backup.save([member.optimizer for member in _active_optimizers(optimizer)])
        # If the local part alone invalidates the step, skip the update to keep parameters finite.
        with nullcontext() if pending.is_local_part_valid else _without_updates(optimizer):
            optimizer.step_with_ready_grads()
        self.start_next()
        verdict = pending.wait()
        if not verdict.is_valid:
            # Restore the model and the optimizer to the state before the step.
            self.roll_back()
            self._backup.restore()
            with _without_updates(optimizer):
                optimizer.step_with_ready_grads()  # copies the parameters in fp32 to the model's
        self._record_validity(verdict.is_valid)
        self._num_predicted += 1
        self._num_rolled_back += not verdict.is_valid
        # The original computes the step's results and, after a rollback, repeats the update.
        with _validated(optimizer, verdict):
            return original(optimizer)

    def _record_validity(self, is_valid: bool) -> None:
        self._num_valid = self._num_valid + 1 if is_valid else 0


class Reductions:
    """The reductions of one step: started at construction, awaited by `wait`.

    Megatron's code computes the local part, starts the reductions and combines the results.
    """

    def __init__(self, optimizer: Any) -> None:
        """Prepare the gradients of `optimizer` for a step, as its `step` does."""
        self._optimizer = optimizer
        self._with_scaler = [
            member
            for member in _active_optimizers(optimizer)
            if getattr(member, "grad_scaler", None) is not None
        ]
        # A scaler replaces its tensors instead of writing to them, so this is its old state.
        self._scaler_states = [dict(vars(member.grad_scaler)) for member in self._with_scaler]
        self._pending: list[_PendingReduction] = []
        with _reducing_in(optimizer, lambda group: _AsyncReductionGroup(group, self._pending)):
            found_inf = optimizer.prepare_grads()
            norms = _GradNorms.compute(optimizer)
        self.is_local_part_valid = not found_inf and _is_step_valid(optimizer, norms)

    def wait(self) -> _StepVerdict:
        """Wait for the global results, and update the loss scale."""
        results = [reduction.result() for reduction in self._pending]
        split = len(self._with_scaler)
        found_inf = tuple(bool(inf_count.item() > 0) for inf_count in results[:split])
        for member, scaler_state, is_inf in zip(
            self._with_scaler, self._scaler_states, found_inf, strict=True
        ):
            # `prepare_grads` has updated the scale from the local part; update it from the global
            # result.
            vars(member.grad_scaler).update(scaler_state)
            member.grad_scaler.update(is_inf)
        norm_results = iter(results[split:])
        with (
            _reducing_in(self._optimizer, lambda _: _ResultGroup(norm_results)),
            Replaced() as replaced,
        ):
            for member in _active_optimizers(self._optimizer):
                # The result includes the part of this rank already.
                replaced.put(member, "get_grads_for_grad_norm", lambda *_, **__: [])
            norms = _GradNorms.compute(self._optimizer)
        is_valid = not any(found_inf) and _is_step_valid(self._optimizer, norms)
        return _StepVerdict(found_inf, norms, is_valid)


class _PendingReduction(NamedTuple):
    """An asynchronous all-reduce and its tensor."""

    work: dist.Work | None
    tensor: Tensor

    def result(self) -> Tensor:
        """Wait for the all-reduce and return its result."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


class _AsyncReductionGroup(dist.ProcessGroup):
    """Process group that starts all-reduces asynchronously and keeps the local values."""

    def __init__(self, group: Any, pending: list[_PendingReduction]) -> None:
        super().__init__(0, 1)
        self._group = group
        self._pending = pending

    def allreduce(  # type: ignore[override]
        self, tensors: Sequence[Tensor], options: Any = None
    ) -> None:
        """Start an all-reduce on a copy of each tensor."""
        for tensor in tensors:
            copy = tensor.clone()
            work = dist.all_reduce(copy, op=options.reduceOp, group=self._group, async_op=True)
            self._pending.append(_PendingReduction(work, copy))


class _ResultGroup(dist.ProcessGroup):
    """Process group that returns the results of completed all-reduces, in order."""

    def __init__(self, results: Iterator[Tensor]) -> None:
        super().__init__(0, 1)
        self._results = results

    def allreduce(  # type: ignore[override]
        self, tensors: Sequence[Tensor], options: Any = None
    ) -> None:
        """Write the next results into `tensors`."""
        for tensor in tensors:
            tensor.copy_(next(self._results))


def _next_step_follows(args: Namespace) -> bool:
    """Return whether the trainer continues directly with the next step after the current one."""
    num_completed = args.curr_iteration + 1
    intervals = (
        args.eval_interval,
        args.exit_interval,
        args.save_interval if args.save else None,
        args.non_persistent_save_interval if args.save else None,
        args.check_weight_hash_across_dp_replicas_interval,
        args.adlr_autoresume_interval if args.adlr_autoresume else None,
    )
    last_iterations = (
        *(getattr(args, "phase_transition_iterations", None) or ()),  # from 0.19 on
        *(iteration - 1 for iteration in args.iterations_to_skip or ()),
        args.train_iters,
    )
    return num_completed not in last_iterations and not any(
        interval and num_completed % interval == 0 for interval in intervals
    )


def why_no_gain(args: Namespace) -> str | None:
    """Return the reason why post-validation cannot save time in this run, or None."""
    if args.log_interval != 1:
        return None
    return (
        "--optimizer-post-validation gains nothing with --log-interval 1: an iteration that is "
        "logged is timed from where all ranks begin it, and so none of it runs early"
    )


def check_optimizer(optimizer: Any) -> None:
    """Raise UnsupportedError on all ranks if an optimizer of any rank does not support rollback.

    All ranks of the world call this.
    """
    members = getattr(optimizer, "chained_optimizers", [])
    unsupported = [
        type(member).__name__ for member in members if type(member) not in _SUPPORTED_OPTIMIZERS
    ]
    local_name = unsupported[0] if unsupported else ""
    if not isinstance(optimizer, ChainedOptimizer):
        local_name = type(optimizer).__name__
    elif not list(_active_optimizers(optimizer)):
        local_name = "an optimizer without parameters"
    names = gather_objects(local_name)
    for rank, name in enumerate(names):
        if name:
            supported = ", ".join(
                optimizer_class.__name__ for optimizer_class in _SUPPORTED_OPTIMIZERS
            )
            raise UnsupportedError(
                f"--optimizer-post-validation does not work with {name}, which rank {rank} "
                f"has: it can undo {supported}"
            )


def _active_optimizers(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers of the chain that update parameters."""
    for member in optimizer.chained_optimizers:
        if not getattr(member, "is_stub_optimizer", False):
            yield member


def _clips_groups(optimizer: Any) -> bool:
    """Return whether Megatron clips groups of parameters by separate norms (from 0.19 on)."""
    # Test only for the groups: if a release renames the method that computes their norms, a step
    # must fail instead of applying gradients that are not clipped.
    return hasattr(megatron_optimizer, "SEPARATE_GRAD_NORM_GROUPS") and any(
        member.config.clip_grad > 0.0 for member in _active_optimizers(optimizer)
    )


def _is_step_valid(optimizer: Any, norms: _GradNorms) -> bool:
    """Return whether a step with these norms neither clips nor skips.

    Uses Megatron's expressions, so that the result is exact to the last bit. The comparisons are
    false for a NaN norm.
    """
    for member in _active_optimizers(optimizer):
        clip_grad = member.config.clip_grad
        limit = getattr(member.config, "grad_norm_skip_threshold", math.inf)
        for norm in (norms.main, *norms.by_group.values()) if clip_grad > 0.0 else ():
            if not clip_grad / (norm + 1.0e-6) >= 1.0:
                return False
        if not norms.main <= limit:
            return False
    return True


@contextmanager
def _reducing_in(optimizer: Any, make_group: Callable[[Any], Any]) -> Iterator[None]:
    """Replace the process groups in which `optimizer` reduces its statistics."""
    groups: dict[int, Any] = {}
    with Replaced() as replaced:
        for member in optimizer.chained_optimizers:
            group = member.get_grad_stats_parallel_group()
            replacement = groups.setdefault(id(group), make_group(group))
            replaced.put(
                member, "get_grad_stats_parallel_group", lambda replacement=replacement: replacement
            )
        yield


@contextmanager
def _without_updates(optimizer: Any) -> Iterator[None]:
    """Make a step skip the parameter update and run only the work around it."""
    with Replaced() as replaced:
        for member in _active_optimizers(optimizer):
            replaced.put(member.optimizer, "step", lambda *_, **__: None)
        yield


@contextmanager
def _validated(optimizer: Any, verdict: _StepVerdict) -> Iterator[None]:
    """Make `optimizer.step` use validated results, and skip the update if it was valid."""
    with Replaced() as replaced:
        replaced.put(optimizer, "prepare_grads", lambda: any(verdict.found_inf))
        replaced.put(optimizer, "get_grad_norm", lambda: verdict.norms.main)
        if _clips_groups(optimizer):
            by_group = partial(setattr, optimizer, "grad_norms_by_group", verdict.norms.by_group)
            replaced.put(optimizer, "_compute_grad_norms_by_group", by_group)
        if verdict.is_valid:
            replaced.put(optimizer, "step_with_ready_grads", lambda: True)
        yield
