"""Additional replacements for a dry run of this package's schedules, where no other rank exists."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from megatron_vshape.core.model.kinds import FROM_HOST, PARTS, TO_HOST, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.rehearsal.phases import JOIN
from megatron_vshape.runtime.program_runner import Handler

Watch = Callable[[Callable[..., Any], str], Callable[..., Any]]
"""Wraps a pass handler so that it reports each pass, with stage and microbatch, under this name."""


def install(watch: Watch) -> None:
    """Register the schedules, and replace all waits for other ranks or threads."""
    from megatron_vshape.mcore.hooks import registry

    registry.install({})
    from megatron_vshape.mcore.split import te_layers
    from megatron_vshape.mcore.step.stage import MegatronStage
    from megatron_vshape.runtime import host_memory, offload, program_runner

    replaced: Any = host_memory
    replaced.free_host_bytes = lambda ranks=None: None  # this host is not a training host
    for replaced in (offload, te_layers):
        replaced.Tensor = FakeTensor  # these modules offload and shard only this type
    replaced = program_runner
    replaced.ThreadPoolExecutor = _SerialExecutor  # fake tensors support one thread
    run_alone()
    stage: Any = MegatronStage
    for kind in (*PARTS, Kind.BW):
        setattr(stage, kind.method, watch(getattr(stage, kind.method), str(kind)))
    replaced = program_runner.ProgramRun
    replaced.__post_init__ = _with_watched_handlers(replaced.__post_init__, watch)


def run_alone() -> None:
    """Remove all waits for other ranks, and replace the data that they would send."""
    from megatron_vshape.mcore.setup import configure, one_planner
    from megatron_vshape.mcore.step import losses
    from megatron_vshape.runtime import device_collectives, p2p

    replaced: Any = p2p.Transport
    replaced._warm_up = lambda self, edges, size=1: None  # the original checks received values
    replaced = configure
    replaced._messages_are_kernels = lambda: True  # programs as with NCCL, for any backend
    replaced = p2p
    replaced._WaitedSends = lambda timeout_s, tell, group_of: _sends_until_waited_for(tell)
    replaced = one_planner.RankZeroPlanner
    replaced.__call__ = lambda self, plan: plan()  # there is no rank 0 that plans for all
    replaced = device_collectives.DeviceCollectives
    replaced.begin = _begin_at_once
    replaced = losses.LossGatherer
    replaced.send_to_last_rank = _send_to_last_rank


def _with_watched_handlers(begin: Callable[[Any], None], watch: Watch) -> Callable[[Any], None]:
    """Wrap the start of a program's run so that all pass handlers report to `watch`."""

    def begin_watched(run: Any) -> None:
        def report_pass(
            call: Callable[[Pass], None] | None, name: str, work: Pass, index: Any
        ) -> None:
            watch(lambda stage, index: call and call(work), name)(run.stages[work.stage], index)

        def watched(kind: Kind, handler: Handler) -> Handler:
            return handler._replace(
                run=lambda work: report_pass(handler.run, str(kind), work, work.microbatch),
                join=handler.join
                and (lambda work: report_pass(handler.join, JOIN, work, work.microbatch)),
            )

        run.handlers = {
            kind: handler if kind.resource in (TO_HOST, FROM_HOST) else watched(kind, handler)
            for kind, handler in run.handlers.items()
        }
        begin(run)

    return begin_watched


def _sends_until_waited_for(tell: Any) -> Any:
    """Return a send queue that completes sends only when the program waits: the host runs ahead."""
    from megatron_vshape.runtime import p2p

    class Sends(p2p._PolledSends):
        def poll(self) -> None:
            pass

        def drain(self) -> None:
            for queue in self._left.values():
                for send in queue:
                    send.work.wait()
                queue.clear()

    return Sends(tell)


def _begin_at_once(self: Any, job: Callable[[], Any], inputs: Any) -> Any:
    from megatron_vshape.runtime import device_collectives

    return device_collectives.Pending(self, _done_future(job()))


def _done_future(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class _SerialExecutor:
    """An executor that runs a job when it is submitted."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Accept the arguments of an executor."""

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        return _done_future(job())

    def shutdown(self, *args: Any, **options: Any) -> None:
        """Do nothing: no job is running."""


def _send_to_last_rank(self: Any, store: Any, loss_rank: int, group: Any, device: Any) -> Any:
    is_last = group.rank() == group.size() - 1
    return store if group.rank() == loss_rank or not is_last else [{}]
