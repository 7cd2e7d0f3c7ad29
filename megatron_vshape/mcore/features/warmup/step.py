"""One microbatch through the local stages of every rank, without P2P messages."""

from __future__ import annotations

import copy
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.program.instructions import Await, Program, Run, Send
from megatron_vshape.mcore.features.warmup.snapshot import Snapshot
from megatron_vshape.mcore.refusals import refusing
from megatron_vshape.mcore.step.forward_backward import PipelineRunner
from megatron_vshape.mcore.step.losses import LateChecks
from megatron_vshape.mcore.step.microbatches import iterators_by_chunk
from megatron_vshape.mcore.step.rewind import Replay, finish_gathering
from megatron_vshape.mcore.step.stage import StepFeature, StepRequest, TrainerCall
from megatron_vshape.runtime.hosts import gather_objects
from megatron_vshape.runtime.program_runner import Place

logger = logging.getLogger(__name__)


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
            trial_call, observer, fills_waits=False, cut=first_microbatch
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
