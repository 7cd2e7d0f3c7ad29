"""Stream order of GPU offload copies, with fake streams: every memory access is ordered."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from offloaded import with_offloads
from runtime.test_offload import NoMail, OffloadedStage, stages_of
from torch import Tensor, UntypedStorage

from megatron_vshape.core.model.kinds import FROM_HOST, TO_HOST
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.runtime.host_memory import Moment
from megatron_vshape.runtime.offload import Offload
from megatron_vshape.runtime.program_runner import run_program

CPU = torch.device("cpu")

NOBODYS: Any = SimpleNamespace(output=-1, shared=())
"""Activations of which nothing is another's."""

Clock = Counter[str]
"""By stream, the number of its operations that have completed by then."""


class Streams:
    """The stream of each thread; checks that accesses to one block of memory are ordered.

    A host may run ahead of all its launches: work without a wait may not have run yet.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clocks: dict[str, Clock] = {}
        self.hurried = threading.local()  # a thread that is waits for nothing
        self._last: dict[object, list[tuple[str, int, bool]]] = {}
        self.wrong: list[str] = []

    @property
    def name(self) -> str:
        return threading.current_thread().name.partition("_")[0]

    def _clock(self) -> Clock:
        return self.clocks.setdefault(self.name, Counter())

    def now(self) -> Clock:
        with self._lock:
            return Counter(self._clock())

    def wait(self, moment: Clock) -> None:
        if getattr(self.hurried, "own", False):
            return
        with self._lock:
            self.clocks[self.name] = self._clock() | moment

    def touch(self, what: object, writes: bool) -> None:
        """Note an access, and that it may come before one that was launched earlier."""
        with self._lock:
            clock, name = self._clock(), self.name
            clock[name] += 1
            for stream, number, wrote in self._last.setdefault(what, []):
                if (writes or wrote) and clock[stream] < number:
                    self.wrong.append(f"{name} does not wait for {stream}")
            self._last[what].append((name, clock[name], writes))


class StepHook:
    """A part of a storage, or of a block, which is copied."""

    def __init__(self, tensor: Tensor, streams: Streams) -> None:
        self.tensor, self.streams = tensor, streams

    @property
    def memory(self) -> object:
        return self.tensor.untyped_storage()._cdata

    def copy_(self, source: "StepHook", non_blocking: bool) -> None:
        assert non_blocking
        self.streams.touch(source.memory, writes=False)
        self.streams.touch(self.memory, writes=True)
        self.tensor.copy_(source.tensor)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    parts, resize, forward = Offload._parts, UntypedStorage.resize_, OffloadedStage.forward
    backward = OffloadedStage.backward

    def noted(self: Offload, activations: Any) -> Iterator[tuple[StepHook, StepHook]]:
        for pair in parts(self, activations):
            yield tuple(StepHook(part, streams) for part in pair)  # type: ignore[misc]

    def resized(storage: UntypedStorage, size: int) -> UntypedStorage:
        streams.touch(storage._cdata, writes=True)
        return resize(storage, size)

    memory_by_pass: dict[tuple[int, int], list[int]] = {}

    def run_forward(self: OffloadedStage, microbatch: int, received: Tensor | None) -> Any:
        ends_forward = self.offload.ends_forward

        def note_first(stage: int, number: int, output: Tensor) -> None:
            saved = self.offload._saved(output.grad_fn, NOBODYS)
            memory_by_pass[stage, number] = list({storage._cdata for _, storage in saved})
            for storage in memory_by_pass[stage, number]:
                streams.touch(storage, writes=True)
            ends_forward(stage, number, output)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.offload, "ends_forward", note_first)
            return forward(self, microbatch, received)

    def run_backward(self: OffloadedStage, microbatch: int, received: Tensor | None) -> Any:
        result = backward(self, microbatch, received)
        for storage in memory_by_pass.pop((self.stage, microbatch)):
            streams.touch(storage, writes=False)
        return result

    monkeypatch.setattr(Moment, "of", lambda device: Moment(streams.now()))  # type: ignore[arg-type]
    monkeypatch.setattr(Moment, "wait", lambda self: streams.wait(self.event or Counter()))
    monkeypatch.setattr(Offload, "_parts", noted)
    monkeypatch.setattr(UntypedStorage, "resize_", resized)
    monkeypatch.setattr(OffloadedStage, "forward", run_forward)
    monkeypatch.setattr(OffloadedStage, "backward", run_backward)
    return streams


def run_steps(offload: Offload) -> None:
    program = lower(with_offloads(make("v-half", 1, 6)))
    stages, mail = stages_of(offload), cast(Any, NoMail())
    for _ in range(2):  # the second finds host memory that the first has used
        run_program(program, 0, stages, mail, handlers=offload.handlers())


def reuse_blocks(offload: Offload) -> None:
    """Have a microbatch leave into the memory that another is still being copied back from."""
    run_steps(offload)
    offload.host.clear()
    stages = stages_of(offload)
    stage = stages[0]

    def beside(name: str, run: Callable[[int, int], None], microbatch: int) -> None:
        thread = threading.Thread(target=run, args=(0, microbatch), name=f"{name}_0")
        thread.start()
        thread.join()

    for microbatch in range(2):
        stage.forward(microbatch, None)
    beside(TO_HOST, offload.copy_out, 0)
    offload.release(0, 0)
    offload.make_room(0, 0)
    beside(FROM_HOST, offload.copy_back, 0)
    beside(TO_HOST, offload.copy_out, 1)


def test_every_access_waits_for_earlier_accesses(streams: Streams) -> None:
    run_steps(Offload(CPU))
    reuse_blocks(Offload(CPU))
    assert set(streams.clocks) == {"MainThread", TO_HOST, FROM_HOST}
    assert streams.wrong == []


@pytest.mark.parametrize(
    ("owner", "method", "wrong", "run"),
    [
        (Offload, "copy_out", f"{TO_HOST} does not wait for MainThread", run_steps),
        (Offload, "release", f"MainThread does not wait for {TO_HOST}", run_steps),
        (Offload, "copy_back", f"{FROM_HOST} does not wait for MainThread", run_steps),
        (Offload, "begins_backward", f"MainThread does not wait for {FROM_HOST}", run_steps),
        (Offload, "copy_out", f"{TO_HOST} does not wait for {FROM_HOST}", reuse_blocks),
    ],
)
def test_every_wait_is_necessary(
    streams: Streams,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    method: str,
    wrong: str,
    run: Callable[[Offload], None],
) -> None:
    original = getattr(owner, method)

    def without_waits(self: Any, *args: Any) -> Any:
        streams.hurried.own = True
        try:
            return original(self, *args)
        finally:
            streams.hurried.own = False

    monkeypatch.setattr(owner, method, without_waits)
    run(Offload(CPU))
    assert wrong in streams.wrong
