"""One microbatch through the local stages of every rank, without P2P messages."""

from __future__ import annotations

import copy
import logging
import random
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.program.instructions import Await, Program, Run, Send
from megatron_vshape.mcore.refusals import UnsupportedError, refusing
from megatron_vshape.mcore.step.forward_backward import PipelineRunner
from megatron_vshape.mcore.step.losses import LateChecks
from megatron_vshape.mcore.step.microbatches import iterators_by_chunk
from megatron_vshape.mcore.step.rewind import RandomState, Replay, finish_gathering
from megatron_vshape.mcore.step.stage import StepFeature, StepRequest, TrainerCall
from megatron_vshape.runtime.hosts import gather_objects
from megatron_vshape.runtime.program_runner import Place

logger = logging.getLogger(__name__)


_LIBRARIES = ("megatron.core", "transformer_engine")
"""Packages whose objects are followed, from the layers of a model on."""

_PROCESS_STATE = (
    *("megatron.core.transformer", "megatron.core.models", "megatron.core.parallel_state"),
    *("megatron.core.rerun_state_machine", "transformer_engine.pytorch"),
)
"""Packages with state of the process: logs of auxiliary losses, loss scales, FP8 scales."""

_FP8_TENSORS = ("scale", "scale_inv", "amax", "amax_history")
"""Tensors of Transformer Engine's compiled classes, which have no `__dict__`."""


class Snapshot:
    """State of a rank's chunks and of its process, without parameters and gradients.

    The attributes of the layers are followed, so that buffers of routers, FP8 scales, weight caches
    and counters need no list here. Gradients are zero before a step, and are zeroed, not copied.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        """Copy the state; raises UnsupportedError if gradients are not zero."""
        self._restorers: list[Callable[[], object]] = []
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is used again
        parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self._gradients = _zero_gradients(parameters)
        tensors = (*parameters, *self._gradients)
        self._not_copied = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        for parameter in parameters:
            # Shallow: main gradients and the optimizer's copy of the weights are not changed.
            self._restorers.append(partial(_refill, vars(parameter), dict(vars(parameter))))
            self._restorers.append(partial(setattr, parameter, "grad", parameter.grad))
        self._copy(*chunks)
        for owner, name, value in _process_state():
            self._restorers.append(partial(_set_if_changed, owner, name, value))
            self._copy(value)
        self._restorers += [
            RandomState.now().restore,
            partial(random.setstate, random.getstate()),
            partial(np.random.set_state, np.random.get_state()),
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all state; objects and the memory of their tensors stay the same."""
        if self._gradients:
            torch._foreach_zero_(self._gradients)
        for restore in self._restorers:
            restore()

    def _copy(self, *values: Any) -> None:
        """Copy values and everything that they contain."""
        pending = list(values)
        while pending:
            value = pending.pop()
            if id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if isinstance(value, Tensor):
                if value.numel() and value.untyped_storage().data_ptr() not in self._not_copied:
                    copy = value.detach().clone()
                    self._restorers.append(partial(value.detach().copy_, copy))
            elif isinstance(value, dict):
                self._restorers.append(partial(_refill, value, dict(value)))
                pending += value.values()
            elif isinstance(value, list | deque | set):
                self._restorers.append(partial(_refill, value, list(value)))
                pending += value
            elif isinstance(value, tuple):
                pending += value
            elif _is_followed(value):
                pending += (getattr(value, name, None) for name in ("__dict__", *_FP8_TENSORS))


def _zero_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients; raises UnsupportedError if one is not zero."""
    names = ("grad", "main_grad")
    values = [getattr(parameter, name, None) for parameter in parameters for name in names]
    gradients = [gradient for gradient in values if gradient is not None]
    # One wait for the device for all gradients.
    if gradients and bool(torch.stack([gradient.any() for gradient in gradients]).any()):
        raise UnsupportedError(
            "--pipeline-warmup requires zero gradients before the first step, because it does not "
            "copy them: zero the gradients before the step, or remove --pipeline-warmup"
        )
    return gradients


def _is_followed(value: Any) -> bool:
    is_library_object = type(value).__module__.startswith(_LIBRARIES)
    return isinstance(value, nn.Module) or (is_library_object and not isinstance(value, type))


def _process_state() -> Iterator[tuple[Any, str, Any]]:
    """Yield owner, name and value of the data of modules and of their classes."""
    types = (type(None), bool, int, float, str, Tensor, dict, list, set, deque)
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(_PROCESS_STATE):
            classes = (value for value in vars(module).values() if isinstance(value, type))
            for owner in (module, *(kind for kind in classes if kind.__module__ == module_name)):
                for name, value in list(vars(owner).items()):
                    is_data = isinstance(value, types) or _is_followed(value)
                    if is_data and not name.startswith("__"):
                        yield owner, name, value


def _set_if_changed(owner: Any, name: str, value: Any) -> None:
    if vars(owner).get(name) is not value:
        setattr(owner, name, value)


def _refill(target: Any, items: Any) -> None:
    target.clear()
    (target.extend if isinstance(target, list | deque) else target.update)(items)


class Warmup(StepFeature):
    """Runs each local stage once before the first step, and restores the state of the rank.

    Ranks of one stage (TP, CP, EP) run the same passes, so their collectives match.
    """

    def __init__(self, runner: PipelineRunner) -> None:
        """Set the runner of the steps."""
        self._runner = runner
        self._is_over = False

    def prepare(self, request: StepRequest) -> StepRequest:
        """Warm up before the first training step, which then reads the same microbatches."""
        if self._is_over or request.call.forward_only:
            return request
        self._is_over, start = True, time.monotonic()
        with refusing():
            snapshot = Snapshot(request.call.chunks)
        observer = _StageSeconds()
        step_call, trial_call, replays = _replayed_calls(request.call)
        trial, run = self._runner.prepare_step(
            trial_call, observer, fills_waits=False, cut_program=first_microbatch
        )
        run = replace(run, transport=_MadeUpMessages(trial.transport.blank()))
        with (
            trial.gradient_sync.without_ddp(),
            trial.state.setting(late_checks=LateChecks(Place())),  # which never run
            trial.around_passes(),
        ):
            run.finish()
        finish_gathering(trial.chunks)
        snapshot.restore()
        for replay in replays:
            replay.rewind()
        trial.transport.warm_up()
        group = trial.groups.pp
        slowest = max((seconds, stage) for stage, seconds in observer.seconds.items())
        results = gather_objects((time.monotonic() - start, slowest), group)
        if dist.get_rank() == 0:
            ranks = " ".join(f"{seconds:.1f}" for seconds, _ in results)
            seconds, stage = max(slowest for _, slowest in results)
            text = "pipeline warm-up: %s s by rank; slowest: stage %d, %.1f s"
            logger.info(text, ranks, stage, seconds)
        return StepRequest(step_call)


class _StageSeconds:
    """Observer that adds up the seconds of the passes of each stage."""

    def __init__(self) -> None:
        self.seconds = defaultdict[int, float](float)

    def begins(self, *works: Pass) -> None:
        self.seconds[works[0].stage] -= time.monotonic()

    def ends(self, *works: Pass) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # so that the time is that of this stage
        self.seconds[works[0].stage] += time.monotonic()


class _MadeUpMessages:
    """Carrier that drops sends, and receives a made-up message at once."""

    def __init__(self, blank: Tensor) -> None:
        # Different tokens: equal ones would all be routed to the same experts.
        values = torch.arange(blank.numel(), dtype=torch.float32, device=blank.device)
        self._message = blank.copy_(values.sin_().view(blank.shape))

    def wait(self, message: object) -> Tensor:
        return self._message.clone()

    def _ignore(self, *_: object) -> None: ...

    post = send = release = poll = drain = _ignore


def first_microbatch(program: Program) -> Program:
    """Return the program with the passes of the first microbatch, of all its slices.

    It has no passes that follow those of later microbatches, as the weight gradient of a shared
    output layer does.
    """

    def is_first(work: Pass) -> bool:
        return work.microbatch < program.schedule.slices

    def select(row: Iterable[Any]) -> Iterator[Any]:
        for instruction in row:
            if isinstance(instruction, Run):
                for work in instruction.passes:
                    if is_first(work) and all(read.later < 0 for read in work.kind.follows):
                        yield Run(work)
            elif isinstance(instruction, Await | Send) and is_first(instruction.message.work):
                yield instruction

    rows = tuple(tuple(select(row)) for row in program.instructions)
    return replace(program, instructions=rows, planned=None)


def _replayed_calls(call: TrainerCall) -> tuple[TrainerCall, TrainerCall, list[Replay]]:
    """Return calls of a step and its trial that read the same microbatches.

    Chunks may share an iterator.
    """
    iterators = iterators_by_chunk(call.data_iterator, len(call.chunks))
    replays = {id(source): Replay(source) for source in iterators if hasattr(source, "__next__")}
    for replay in replays.values():
        replay.mark()
    step_data = [replays.get(id(source), source) for source in iterators]
    # An object that is not read by `next` is copied in its current state.
    trial_data = [replays.get(id(source)) or copy.copy(source) for source in iterators]
    step_call = replace(call, data_iterator=step_data)
    trial_call = replace(call, data_iterator=trial_data)
    return step_call, trial_call, list(replays.values())
