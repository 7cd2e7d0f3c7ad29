"""What our own schedules need beside Megatron's in a rehearsal, where no other rank answers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

PASSES = {
    "forward": "F",
    "backward_inputs": "B",
    "backward_weights": "W",
    "backward": "BW",
    "look_up": "I",
    "own_logits": "S",
    "own_head_weights": "T",
    "own_embedding_weights": "J",
    "join": "join",
    "sum_embeddings": "E",
    "sum_vocabulary": "C",
    "release": "L",
    "make_room": "R",
}
"""The methods of a stage that run passes, and how the passes are written."""


def install(watch: Callable[[Callable[..., Any], str], Callable[..., Any]]) -> None:
    """Register the schedules and stand in for what would wait for another rank or a thread."""
    import megatron_vshape

    megatron_vshape.register()
    from megatron_vshape.mcore.setup import library
    from megatron_vshape.mcore.step import loss_reporting
    from megatron_vshape.mcore.step.stage import MegatronStage
    from megatron_vshape.runtime import host_memory, offload, p2p, program_runner, together

    replaced: Any = host_memory
    replaced.free_host_bytes = lambda ranks=None: None  # what is free here says nothing of there
    replaced = offload
    replaced.Tensor = FakeTensor  # what it may copy, in place of plain tensors
    replaced = p2p.Transport
    replaced._warm_up = lambda self, edges: None  # it checks what it receives
    replaced = library
    replaced._messages_are_kernels = lambda: True  # NCCL's programs, whatever the backend says
    replaced = p2p
    replaced._WaitedSends = lambda timeout_s, tell: _sends_until_waited_for(tell)
    replaced = together.Together
    replaced.begin = _begin_at_once
    replaced = program_runner
    replaced.ThreadPoolExecutor = _AtOnce  # fake tensors know one thread
    replaced = loss_reporting.Courier
    replaced.bring_losses = _bring
    stage: Any = MegatronStage
    for method, kind in PASSES.items():
        if hasattr(stage, method):
            setattr(stage, method, watch(getattr(stage, method), kind))


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
