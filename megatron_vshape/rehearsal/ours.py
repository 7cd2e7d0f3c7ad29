"""What our own schedules need beside Megatron's in a rehearsal, where no other rank answers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from megatron_vshape.core.model.kinds import FROM_HOST, PARTS, TO_HOST, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.runtime.stage import Handler

Watch = Callable[[Callable[..., Any], str], Callable[..., Any]]
"""Makes a pass handler report each pass, with stage and microbatch, by this name."""


def install(watch: Watch) -> None:
    """Register the schedules and stand in for what would wait for another rank or a thread."""
    import megatron_vshape

    megatron_vshape.register()
    from megatron_vshape.mcore.split import te_layers
    from megatron_vshape.mcore.step.stage import MegatronStage
    from megatron_vshape.runtime import host_memory, offload, program_runner

    replaced: Any = host_memory
    replaced.free_host_bytes = lambda ranks=None: None  # what is free here says nothing of there
    for replaced in (offload, te_layers):
        replaced.Tensor = FakeTensor  # what is copied, and cut to its part, in place of plain ones
    replaced = program_runner
    replaced.ThreadPoolExecutor = _AtOnce  # fake tensors know one thread
    run_alone()
    stage: Any = MegatronStage
    for kind in (*PARTS, Kind.BW):
        setattr(stage, kind.method, watch(getattr(stage, kind.method), kind))
    replaced = program_runner.ProgramRun
    replaced.__post_init__ = _watching(replaced.__post_init__, watch)


def run_alone() -> None:
    """Have a rank wait for no other: what it would hear from them is stood in for."""
    from megatron_vshape.mcore.setup import library, one_planner
    from megatron_vshape.mcore.step import loss_reporting
    from megatron_vshape.runtime import p2p, together

    replaced: Any = p2p.Transport
    replaced._warm_up = lambda self, edges: None  # it checks what it receives
    replaced = library
    replaced._messages_are_kernels = lambda: True  # NCCL's programs, whatever the backend says
    replaced = p2p
    replaced._WaitedSends = lambda timeout_s, tell: _sends_until_waited_for(tell)
    replaced = one_planner.OnePlanner
    replaced.__call__ = lambda self, plan: plan()  # rank 0 is not there to plan for all
    replaced = together.Together
    replaced.begin = _begin_at_once
    replaced = loss_reporting.Courier
    replaced.bring_losses = _bring


def _watching(begin: Callable[[Any], None], watch: Watch) -> Callable[[Any], None]:
    """Return what begins a program's run, and has the handlers of passes tell of them."""

    def begin_watched(run: Any) -> None:
        def told(call: Callable[[Pass], None] | None, name: str, work: Pass, at: Any) -> None:
            watch(lambda stage, microbatch: call and call(work), name)(run.stages[work.stage], at)

        def watched(kind: Kind, handler: Handler) -> Handler:
            return handler._replace(
                run=lambda work: told(handler.run, kind, work, work.microbatch),
                join=handler.join and (lambda work: told(handler.join, "join", work, work)),
            )

        run.handlers = {
            kind: each if kind.resource in (TO_HOST, FROM_HOST) else watched(kind, each)
            for kind, each in run.handlers.items()
        }
        begin(run)

    return begin_watched


def _sends_until_waited_for(tell: Any) -> Any:
    """Return sends none of which has left before the program waits for it: the host is ahead."""
    from megatron_vshape.runtime import p2p

    class Sends(p2p._PolledSends):
        def poll(self) -> None:
            pass

        def drain(self) -> None:
            for queue in self._left.values():
                for each in queue:
                    each.work.wait()
                queue.clear()

    return Sends(tell)


def _begin_at_once(self: Any, job: Callable[[], Any], inputs: Any) -> Any:
    from megatron_vshape.runtime import together

    return together.Pending(self, _done(job()))


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class _AtOnce:
    """An executor that runs a job as it is given."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Accept what an executor does."""

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        return _done(job())

    def shutdown(self, *args: Any, **options: Any) -> None:
        """Leave nothing running, for nothing is."""


def _bring(self: Any, store: Any, loss_rank: int, group: Any, device: Any) -> Any:
    is_last = group.rank() == group.size() - 1
    return store if group.rank() == loss_rank or not is_last else [{}]
