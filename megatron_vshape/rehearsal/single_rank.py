"""The passes of this package's schedules in a dry run or a measurement of a single rank.

With torch's "fake" backend, `runtime.hosts.has_peers` is false, and no pass waits for another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from megatron_vshape.core.model.kinds import FROM_HOST, TO_HOST, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.mcore.step.stage import Execution, Handlers, MegatronStage
from megatron_vshape.rehearsal.phases import JOIN, Phase
from megatron_vshape.runtime.program_runner import Handler

Watch = Callable[[Phase], AbstractContextManager[Any]]
"""Returns the context in which a pass runs."""


def watched_stage(watch: Watch) -> type[MegatronStage]:
    """Return a stage whose passes run in the context of `watch`."""

    class WatchedStage(MegatronStage):
        def forward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
            with watch(Phase("F", self.chunk, microbatch)):
                return super().forward(microbatch, received)

        def backward_inputs(self, microbatch: int, received: Tensor | None) -> Tensor | None:
            with watch(Phase("B", self.chunk, microbatch)):
                return super().backward_inputs(microbatch, received)

        def backward_weights(self, microbatch: int) -> None:
            with watch(Phase("W", self.chunk, microbatch)):
                super().backward_weights(microbatch)

        def backward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
            with watch(Phase("BW", self.chunk, microbatch)):
                return super().backward(microbatch, received)

    return WatchedStage


def watched_execution(watch: Watch) -> Execution:
    """Return the execution of a dry run: every pass in the context of `watch`, in one thread."""

    def adapt(handlers: Handlers, stages: Mapping[int, MegatronStage]) -> Handlers:
        return {
            kind: handler
            if kind.resource in (TO_HOST, FROM_HOST)
            else _watched_handler(kind, handler, stages, watch)
            for kind, handler in handlers.items()
        }

    return Execution(watched_stage(watch), SerialExecutor, adapt)


def _watched_handler(
    kind: Kind, handler: Handler, stages: Mapping[int, MegatronStage], watch: Watch
) -> Handler:
    join = handler.join

    def run_watched(work: Pass) -> None:
        with watch(Phase(str(kind), stages[work.stage].chunk, work.microbatch)):
            handler.run(work)

    def join_watched(work: Pass) -> None:
        assert join is not None
        with watch(Phase(JOIN, stages[work.stage].chunk, work.microbatch)):
            join(work)

    return handler._replace(run=run_watched, join=join and join_watched)


class SerialExecutor(Executor):
    """Runs a job when it is submitted: fake tensors support one thread."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Accept the arguments of an executor with threads."""

    def submit(self, job: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the job and return its result."""
        future: Future[Any] = Future()
        future.set_result(job(*args, **kwargs))
        return future
