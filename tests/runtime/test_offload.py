"""Storages emptied after F and filled again before B: equal gradients, less memory, no race."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from live_bytes import LiveBytes
from offloaded import choose_all, poisoning, with_offloads
from runtime.plain_pipeline import SHAPE, PlainStage, data_of, gradients_of, one_process
from torch import Tensor, UntypedStorage, nn

from megatron_vshape.core.model.kinds import FROM_HOST, TO_HOST, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.runtime import host_memory
from megatron_vshape.runtime.host_memory import HostMemory, Moment
from megatron_vshape.runtime.offload import Offload, OffloadError
from megatron_vshape.runtime.program_runner import run_program

CPU = torch.device("cpu")
MICROBATCHES = 6


class OffloadedStage(PlainStage):
    """A stage whose microbatches may wait; `offload` is its rank's."""

    offload: Offload

    def forward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        result = super().forward(microbatch, received)
        self.offload.ends_forward(self.stage, microbatch, self.saved[microbatch][1])
        return result

    def backward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        self.offload.begins_backward(Pass(Kind.B, self.stage, microbatch))
        return super().backward(microbatch, received)

    def backward_weights(self, microbatch: int) -> None:
        self.offload.begins_weights(Pass(Kind.W, self.stage, microbatch))
        super().backward_weights(microbatch)


class NoMail:
    """The messages of a device that is alone."""

    def poll(self) -> None:
        pass

    def drain(self) -> None:
        pass


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill freed and uninitialized memory with NaN in every dtype."""
    monkeypatch.setattr(UntypedStorage, "resize_", poisoning)


def stages_of(offload: Offload, dtype: torch.dtype = torch.float32) -> dict[int, OffloadedStage]:
    stages = {stage: OffloadedStage(stage, 2, 0, dtype) for stage in range(2)}
    for stage in stages.values():
        stage.offload = offload
    offload.keep(parameter for stage in stages.values() for parameter in stage.module.parameters())
    return stages


def train(
    offload: Offload,
    chosen: Callable[[int, int], bool] = choose_all,
    dtype: torch.dtype = torch.float32,
) -> list[list[Tensor]]:
    """Run two stages of one device and return their gradients."""
    schedule = with_offloads(make("v-half", 1, MICROBATCHES), chosen)
    stages = stages_of(offload, dtype)
    mail: Any = NoMail()
    run_program(lower(schedule), 0, stages, mail, handlers=offload.handlers())
    return [gradients_of(stage.module) for stage in stages.values()]


def equal(gradients: list[list[Tensor]], dtype: torch.dtype = torch.float32) -> bool:
    expected, _ = one_process(2, MICROBATCHES, 0, dtype)
    pairs = zip(gradients, expected, strict=True)
    return all(torch.equal(a, b) for mine, yours in pairs for a, b in zip(mine, yours, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offload_keeps_gradients_bitwise(poisoned: None, dtype: torch.dtype) -> None:
    offload = Offload(CPU)
    for _ in range(2):
        assert equal(train(offload, dtype=dtype), dtype)
    assert offload.bytes_by_stage[0] > 0
    assert offload.host.nbytes >= offload.bytes_by_stage[0]


def late_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """H fills the storages after B has begun: here, with the next microbatch's H."""
    copy_back, pending = Offload.copy_back, list[tuple[Offload, int, int]]()

    def after_the_next(self: Offload, stage: int, microbatch: int) -> None:
        for copy in pending:
            copy_back(*copy)
        pending[:] = [(self, stage, microbatch)]

    monkeypatch.setattr(Offload, "copy_back", after_the_next)
    monkeypatch.setattr(Offload, "begins_backward", lambda self, work: None)
    monkeypatch.setattr(Offload, "begins_weights", lambda self, work: None)


def swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """D swaps the buffers of two microbatches."""
    take, blocks_by_size = HostMemory.take, dict[int, list[tuple[Tensor, Moment]]]()

    def the_same_twice(self: HostMemory, num_bytes: int) -> list[tuple[Tensor, Moment]]:
        return blocks_by_size.setdefault(num_bytes, take(self, num_bytes) or [])

    monkeypatch.setattr(HostMemory, "take", the_same_twice)


def dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied back."""
    find = Offload._parts

    def once(self: Offload, activations: Any) -> Iterator[tuple[Tensor, Tensor]]:
        return find(self, activations) if activations.at == "on the device" else iter(())

    monkeypatch.setattr(Offload, "_parts", once)


def empty_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """D copies memory that is already freed."""
    copy_out = Offload.copy_out

    def emptied_first(self: Offload, stage: int, microbatch: int) -> None:
        for storage, size in self._waiting[stage, microbatch].storages:
            storage.resize_(0)
            storage.resize_(size)
        copy_out(self, stage, microbatch)

    monkeypatch.setattr(Offload, "copy_out", emptied_first)


@pytest.mark.parametrize("mutant", [late_copy, swapped, dropped, empty_too_early])
def test_wrong_copies_change_the_gradients(
    poisoned: None, monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    offload = Offload(CPU)
    assert equal(train(offload))
    mutant(monkeypatch)
    assert not equal(train(offload))


def test_pass_without_saved_tensors_names_its_position() -> None:
    offload = Offload(CPU)
    train(offload)
    stages = stages_of(offload)  # all stages, because saved tensors are identified by address
    stage = stages[0]
    gradient = torch.ones(SHAPE)
    with pytest.raises(OffloadError, match=r"^D0\.7: .* are gone, or not made yet; F, D, L, R, H"):
        offload.copy_out(0, 7)
    stage.forward(0, None)
    with pytest.raises(OffloadError, match=r"^L0\.0: .* are on the device;"):
        offload.release(0, 0)
    offload.copy_out(0, 0)
    offload.release(0, 0)
    for run in (lambda: stage.backward(0, gradient), lambda: stage.backward_weights(0)):
        with pytest.raises(OffloadError, match=r"microbatch 0 are in host memory;"):
            run()
    with pytest.raises(OffloadError, match=r"^H0\.0: .* are in host memory;"):
        offload.copy_back(0, 0)
    offload.make_room(0, 0)
    with pytest.raises(OffloadError, match=r"^B0\.0: .* with room on the device;"):
        stage.backward(0, gradient)
    offload.copy_back(0, 0)
    stage.backward_inputs(0, gradient)
    stage.backward_weights(0)


def test_offloaded_stage_has_almost_no_device_memory() -> None:
    offload = Offload(CPU)
    train(offload)
    stages = stages_of(offload)
    stage = stages[1]
    data = data_of(0, 0, torch.float32)[0]
    with LiveBytes() as live_bytes:
        stage.forward(0, data.clone())
        num_before = live_bytes.count()
        offload.copy_out(1, 0)
        offload.release(1, 0)
        assert live_bytes.count() == num_before - offload.bytes_by_stage[1]
        assert live_bytes.count() < data.nbytes  # the loss
        offload.make_room(1, 0)
        offload.copy_back(1, 0)
        assert live_bytes.count() == num_before


def made_table() -> Tensor:
    return torch.linspace(1, 2, SHAPE[0] * SHAPE[1] * SHAPE[2]).view(SHAPE)


def test_failed_step_frees_its_memory() -> None:
    offload = Offload(CPU)
    train(offload)
    stages = stages_of(offload)
    stages[0].forward(0, None)
    offload.copy_out(0, 0)
    offload.release(0, 0)
    assert offload.host.nbytes
    offload.clear()
    assert offload.host.nbytes == 0
    assert equal(train(offload))  # the next step starts from a clean state


class WithTable(nn.Module):
    """Scales by a table that is made once, as that of a rotary embedding is."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, data: Tensor) -> Tensor:
        if self.table is None:
            self.table = made_table()
        return torch.tanh(torch.tanh(data) * self.table).exp()


def test_tensors_saved_by_two_microbatches_stay_on_the_device(poisoned: None) -> None:
    module, offload = WithTable(), Offload(CPU)
    alone = torch.ones(SHAPE, requires_grad=True)
    WithTable()(alone).sum().backward()
    for microbatch in range(4):
        data = torch.ones(SHAPE, requires_grad=True)
        output = module(data)
        offload.ends_forward(0, microbatch, output)
        offload.copy_out(0, microbatch)
        offload.release(0, microbatch)
        assert module.table is not None
        assert torch.equal(module.table, made_table())
        offload.make_room(0, microbatch)
        offload.copy_back(0, microbatch)
        offload.begins_backward(Pass(Kind.B, 0, microbatch))
        output.sum().backward()
        assert torch.equal(data.grad, alone.grad)
    # The tensors saved by both tangents, except the table and the output.
    assert offload.bytes_by_stage[0] == 2 * data.nbytes


def blocks_from(host: HostMemory, num_bytes: int) -> list[Tensor]:
    blocks = host.take(num_bytes)
    assert blocks is not None
    return [block for block, _ in blocks]


def test_the_parts_of_a_quantized_parameter_stay_on_the_device() -> None:
    """Transformer Engine's FP8 weights have no storage of their own, but those of their parts."""

    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._data, self._scale = torch.zeros(4, dtype=torch.uint8), torch.ones(1)

        def get_data_tensors(self) -> Tensor:
            return self._data

        def untyped_storage(self) -> UntypedStorage:
            raise RuntimeError("no GPU")

    parameter: Any = Quantized()
    offload = Offload(CPU, None)
    offload.keep([parameter, torch.zeros(2)])
    assert {part.untyped_storage()._cdata for part in (parameter._data, parameter._scale)} < (
        offload._kept
    )
    assert len(offload._kept) == 3


def test_host_memory_is_reused_and_stops_growing() -> None:
    host = HostMemory(CPU)
    first = blocks_from(host, 16_000)
    assert sum(map(len, first)) >= 16_000
    assert host.nbytes == sum(map(len, first)) <= 16_000 * 17 / 16
    host.give_back(first, Moment(None))
    repeated = blocks_from(host, 16_000)
    assert {block.data_ptr() for block in repeated} == {block.data_ptr() for block in first}
    assert host.nbytes == sum(map(len, first))
    host.clear()
    assert host.nbytes == 0


def test_blocks_about_to_return_are_not_allocated_again() -> None:
    host = HostMemory(CPU)
    first = blocks_from(host, 16_000)
    host.expect_back()
    copy = threading.Timer(0.05, host.give_back, (first, Moment(None)))
    copy.start()
    repeated = blocks_from(host, 16_000)
    copy.join()
    assert {block.data_ptr() for block in repeated} == {block.data_ptr() for block in first}
    host.expect_back()
    host.give_back([], Moment(None))  # a copy that has failed
    assert len(blocks_from(host, 16_000)) == len(first)


def test_program_thread_allocates_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """To pin memory waits for the device, which is proved not to hang where the program has D."""
    grow, threads = HostMemory._grow, set[str]()

    def noted(host: HostMemory, count: int) -> bool:
        threads.add(threading.current_thread().name)
        return grow(host, count)

    monkeypatch.setattr(HostMemory, "_grow", noted)
    assert equal(train(Offload(CPU)))
    assert threads == {threading.main_thread().name}


def test_host_memory_stays_below_its_limit(caplog: pytest.LogCaptureFixture) -> None:
    host = HostMemory(CPU, most_bytes=3 * 2**20)
    first, _ = (blocks_from(host, 2**20) for _ in range(2))
    with caplog.at_level(logging.WARNING):
        assert host.take(2**21) is None
    assert host.nbytes == 2 * 2**20
    (record,) = caplog.records
    assert "beyond 2 MiB on rank 0 (2 more wanted: the limit is 3 MiB)" in record.getMessage()
    host.give_back(first, Moment(None))
    assert host.take(2**21) is not None  # of a free one, and one more
    assert host.nbytes == 3 * 2**20


def no_memory(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda ranks: 100)
    return "0 MiB of this rank's share are free"


def cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> str:
    text, empty, tensors = "CUDA error: out of memory", torch.empty, list[Tensor]()

    def refuse(*sizes: Any, **options: Any) -> Tensor:
        tensor = empty(*sizes, **options)
        if "pin_memory" in options:
            tensors.append(tensor)
            if len(tensors) > 40:  # of some microbatches there is enough
                raise RuntimeError(f"{text}\nCompile with TORCH_USE_CUDA_DSA")
        return tensor

    monkeypatch.setattr(host_memory.torch, "empty", refuse)
    return text


@pytest.mark.parametrize("fault", [no_memory, cannot_be_pinned])
def test_tensors_beyond_the_host_limit_stay_on_the_device(
    poisoned: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Callable[[pytest.MonkeyPatch], str],
) -> None:
    why, offload = fault(monkeypatch), Offload(CPU)
    with caplog.at_level(logging.WARNING):
        assert equal(train(offload))
    (record,) = caplog.records
    assert record.getMessage().startswith("no host memory for activations beyond 0 MiB on rank 0")
    assert f"{why}): the rest stays in GPU memory" in record.getMessage()
    assert (offload.host.nbytes == 0) == (fault is no_memory)


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

    def run_thread(name: str, run: Callable[[int, int], None], microbatch: int) -> None:
        thread = threading.Thread(target=run, args=(0, microbatch), name=f"{name}_0")
        thread.start()
        thread.join()

    for microbatch in range(2):
        stage.forward(microbatch, None)
    run_thread(TO_HOST, offload.copy_out, 0)
    offload.release(0, 0)
    offload.make_room(0, 0)
    run_thread(FROM_HOST, offload.copy_back, 0)
    run_thread(TO_HOST, offload.copy_out, 1)


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
