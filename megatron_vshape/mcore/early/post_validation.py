"""Optimizer steps that do not wait for the gradient norm and the inf check of all ranks.

Section 4 of Zero Bubble Pipeline Parallelism (arXiv 2401.10241): the reductions behind clipping
and loss scaling are a barrier at the end of an iteration, and cost a bubble of d - 1 passes even
where the passes leave none. So every rank starts them, steps as if nothing would be clipped or
skipped, and begins the next iteration. When the result is there, before the first backward, what
was guessed either stands, or is undone and the step is made anew.

Three things differ from the paper, for the result has to be bitwise the one that the run has
without all this:

* The paper passes partial sums from stage to stage and the total back. A chain adds in another
  order than an all-reduce, so its norm differs in the last bits, and with it every clipped
  gradient. Here Megatron's own all-reduce is started, on its own group, and waited for later:
  the same bits. It ends when the last rank has joined, as the total of the chain does, and takes
  one latency from there instead of one per stage. What a rank knows by itself, its own part, is
  used as in the paper: where that part alone calls for clipping, or is not finite, the rank does
  not step (the parameters stay finite) but goes on like the others, so that all undo the same.
* The paper undoes AdamW by arithmetic, which rounds. Here the step works on a copy's original:
  see `optimizer_backup` for what that takes.
* The paper's run waits for the total where the next iteration's forwards end. So does this one,
  but still inside the iteration that it is of: the trainer gets that iteration's norm, loss scale
  and learning rate, and whatever it does next (log, evaluate, save, exit) sees a state that is
  validated. Where it is known to do something else than to go on, nothing runs early at all.

Redoing is left to Megatron's own `ChainedOptimizer.step`, from the restored state, with the
validated results in the places where it would compute them; so is the whole step while guessing
does not pay. A guess that fails costs the forwards that were run early, so one is made only when
the steps before would have been guessed right. Every rank decides that from validated results
alone, and so decides alike.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
)
from megatron.training import get_args
from torch import Tensor

from megatron_vshape.mcore.early.optimizer_backup import Backup
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.replaced import Replaced
from megatron_vshape.mcore.step.forward_backward import PipelineRunner

STEPS_BEFORE_A_GUESS = 2
"""Consecutive steps without clipping or skipping before the next step is predicted to need none.

A failed guess costs about two thirds more than a good one gains, and clipping comes in runs.
"""

KNOWN = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)
"""The optimizers of Megatron that can be undone."""

Step = Callable[[Any], tuple[bool, Any, Any]]


class StepVerdict(NamedTuple):
    """What the reductions of one step say."""

    found_inf: tuple[bool, ...]  # of each optimizer with a loss scale
    norm: Any  # of all gradients: a float, or a tensor of one element
    stands: bool  # whether a step without clipping is the right one


@dataclass(eq=False)
class PostValidation:
    """Makes the optimizer steps of a run; takes the place of `ChainedOptimizer.step`."""

    runner: PipelineRunner  # of the steps' passes
    _backup: Backup = field(default_factory=Backup)
    _calm: int = 0  # steps in a row that an unclipped step would have been right for
    _guessed: int = 0
    _undone: int = 0

    def step(self, optimizer: Any, original: Step) -> tuple[bool, Any, Any]:
        """Make one step and return what `original` returns for it; the state is validated then."""
        if self._calm < STEPS_BEFORE_A_GUESS or not next_step_follows(get_args()):
            result = original(optimizer)
            success, norm, _ = result
            self._note(bool(success) and _stands(optimizer, norm))
            return result
        return self._guess(optimizer, original)

    def end(self) -> None:
        """Leave nothing of a next step behind; all ranks call this when the run is over."""
        self.runner.drop_ahead()

    def closing_line(self) -> str:
        """Return how the guesses of this run went."""
        return (
            f"post-validation: {self._guessed} steps made before they were validated, "
            f"{self._undone} of them undone; "
            f"{self._backup.nbytes / 2**20:.2f} MiB on this rank to undo one"
        )

    def _guess(self, optimizer: Any, original: Step) -> tuple[bool, Any, Any]:
        pending = Reductions(optimizer)
        self._backup.save([each.optimizer for each in _working(optimizer)])
        with nullcontext() if pending.own_part_stands else _without_updates(optimizer):
            optimizer.step_with_ready_grads()
        self.runner.run_ahead()
        verdict = pending.wait()
        if not verdict.stands:
            self._undo(optimizer)
        self._note(verdict.stands)
        self._guessed += 1
        self._undone += not verdict.stands
        with _validated(optimizer, verdict):
            return original(optimizer)

    def _undo(self, optimizer: Any) -> None:
        """Bring the model and the optimizer back to where the step began."""
        self.runner.drop_ahead()
        _finish_gathering(optimizer)
        self._backup.restore()
        with _without_updates(optimizer):
            optimizer.step_with_ready_grads()  # copies the parameters in fp32 to the model's

    def _note(self, stood: bool) -> None:
        self._calm = self._calm + 1 if stood else 0


class Reductions:
    """The reductions of one step, started and not waited for.

    Megatron's own code computes this rank's part and starts them; the results are its own too.
    """

    def __init__(self, optimizer: Any) -> None:
        """Prepare the gradients of `optimizer` for a step, as its `step` does."""
        self._optimizer = optimizer
        self._scaled = [each for each in _working(optimizer) if _scaler(each) is not None]
        # A scaler replaces its tensors and never writes to them, so these are its old values.
        self._scalers = [dict(vars(each.grad_scaler)) for each in self._scaled]
        self._started: list[_Started] = []
        with _reducing_in(optimizer, lambda group: _Later(group, self._started)):
            found_inf = optimizer.prepare_grads()
            norm = optimizer.get_grad_norm()
        self.own_part_stands = not found_inf and _stands(optimizer, norm)

    def wait(self) -> StepVerdict:
        """Return what all ranks together found; the loss scale is updated by it."""
        results = [each.result() for each in self._started]
        split = len(self._scaled)
        found_inf = tuple(bool(each.item() > 0) for each in results[:split])
        for each, before, found in zip(self._scaled, self._scalers, found_inf, strict=True):
            vars(each.grad_scaler).update(before)
            each.grad_scaler.update(found)
        answers = iter(results[split:])
        with _reducing_in(self._optimizer, lambda _: _Answer(answers)), Replaced() as replaced:
            for each in _working(self._optimizer):
                # The part of this rank is in the answer already.
                replaced.put(each, "get_grads_for_grad_norm", lambda *_, **__: [])
            norm = self._optimizer.get_grad_norm()
        stands = not any(found_inf) and _stands(self._optimizer, norm)
        return StepVerdict(found_inf, norm, stands)


class _Started(NamedTuple):
    """An all-reduce under way, and the tensor that it writes to."""

    work: dist.Work | None
    tensor: Tensor

    def result(self) -> Tensor:
        """Wait for the all-reduce and return what came out."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


class _Later(dist.ProcessGroup):
    """Stands for a process group; starts its all-reduces and leaves the caller its own part."""

    def __init__(self, group: Any, started: list[_Started]) -> None:
        super().__init__(0, 1)
        self._group = group
        self._started = started

    def allreduce(  # type: ignore[override]
        self, tensors: Sequence[Tensor], options: Any = None
    ) -> None:
        """Start one on a copy."""
        for each in tensors:
            copy = each.clone()
            work = dist.all_reduce(copy, op=options.reduceOp, group=self._group, async_op=True)
            self._started.append(_Started(work, copy))


class _Answer(dist.ProcessGroup):
    """Stands for a process group whose all-reduces have been made: gives their results in turn."""

    def __init__(self, answers: Iterator[Tensor]) -> None:
        super().__init__(0, 1)
        self._answers = answers

    def allreduce(  # type: ignore[override]
        self, tensors: Sequence[Tensor], options: Any = None
    ) -> None:
        """Write the next results into `tensors`."""
        for each in tensors:
            each.copy_(next(self._answers))


def next_step_follows(args: Namespace) -> bool:
    """Return whether the trainer goes straight from the step that it is in to the next one."""
    done = args.curr_iteration + 1
    intervals = (
        args.eval_interval,
        args.exit_interval,
        args.save_interval if args.save else None,
        args.non_persistent_save_interval if args.save else None,
        args.check_weight_hash_across_dp_replicas_interval,
        args.adlr_autoresume_interval if args.adlr_autoresume else None,
    )
    others = (
        *(getattr(args, "phase_transition_iterations", None) or ()),  # from 0.19 on
        *(each - 1 for each in args.iterations_to_skip or ()),
        args.train_iters,
    )
    return done not in others and not any(each and done % each == 0 for each in intervals)


def why_no_gain(args: Namespace) -> str | None:
    """Return why validating late saves no time in a whole run, None if it can save some."""
    if args.log_interval != 1:
        return None
    return (
        "--optimizer-post-validation gains nothing with --log-interval 1: an iteration that is "
        "logged is timed from where all ranks begin it, and so none of it runs early"
    )


def check_optimizer(optimizer: Any) -> None:
    """Raise UnsupportedError, on all ranks alike, if an optimizer cannot be undone.

    All ranks of the world call this.
    """
    parts = getattr(optimizer, "chained_optimizers", [])
    strangers = [type(each).__name__ for each in parts if type(each) not in KNOWN]
    mine = strangers[0] if strangers else ""
    if not isinstance(optimizer, ChainedOptimizer):
        mine = type(optimizer).__name__
    elif not list(_working(optimizer)):
        mine = "an optimizer without parameters"
    everyones = [""] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    for rank, stranger in enumerate(everyones):
        if stranger:
            known = ", ".join(each.__name__ for each in KNOWN)
            raise UnsupportedError(
                f"--optimizer-post-validation does not work with {stranger}, which rank {rank} "
                f"has: it can undo {known}"
            )


def _working(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers in the chain that have something to update."""
    for each in optimizer.chained_optimizers:
        if not getattr(each, "is_stub_optimizer", False):
            yield each


def _scaler(optimizer: Any) -> Any:
    return getattr(optimizer, "grad_scaler", None)


def _stands(optimizer: Any, norm: Any) -> bool:
    """Return whether a step with this norm neither clips nor skips.

    With Megatron's own expressions, so that the answer is the same to the last bit; written so
    that it is no where the norm is not a number.
    """
    for each in _working(optimizer):
        limit = getattr(each.config, "grad_norm_skip_threshold", math.inf)
        if each.config.clip_grad > 0.0 and not each.config.clip_grad / (norm + 1.0e-6) >= 1.0:
            return False
        if not norm <= limit:
            return False
    return True


def _finish_gathering(optimizer: Any) -> None:
    """Wait for parameters that are being gathered, and have all of them gathered again."""
    for chunk in getattr(optimizer, "model_chunks", []):
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if group.param_gather_handle is not None:
                group.param_gather_handle.wait()
                group.param_gather_handle = None
            group.param_gather_dispatched = False


@contextmanager
def _reducing_in(optimizer: Any, stand_in: Callable[[Any], Any]) -> Iterator[None]:
    """Have `optimizer` reduce in groups that stand for its own, meanwhile."""
    made: dict[int, Any] = {}
    with Replaced() as replaced:
        for each in optimizer.chained_optimizers:
            group = each.get_grad_stats_parallel_group()
            stands = made.setdefault(id(group), stand_in(group))
            replaced.put(each, "get_grad_stats_parallel_group", lambda stands=stands: stands)
        yield


@contextmanager
def _without_updates(optimizer: Any) -> Iterator[None]:
    """Have a step leave the parameters as they are and do only what it does around that."""
    with Replaced() as replaced:
        for each in _working(optimizer):
            replaced.put(each.optimizer, "step", lambda *_, **__: None)
        yield


@contextmanager
def _validated(optimizer: Any, verdict: StepVerdict) -> Iterator[None]:
    """Have `optimizer.step` find the gradients prepared, and the parameters where they are right
    already updated."""
    with Replaced() as replaced:
        replaced.put(optimizer, "prepare_grads", lambda: any(verdict.found_inf))
        replaced.put(optimizer, "get_grad_norm", lambda: verdict.norm)
        if verdict.stands:
            replaced.put(optimizer, "step_with_ready_grads", lambda: True)
        yield
