"""Run a Program on this rank: one match over its instructions, and nothing else."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from megatron_vshape.core.model.kinds import BESIDE, PROCESSOR, Kind
from megatron_vshape.core.model.passes import NeedTable, Pass
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.program.instructions import (
    Await,
    Instruction,
    Message,
    Program,
    Receive,
    Release,
    Run,
    Send,
    result_of,
)
from megatron_vshape.runtime.labels import label
from megatron_vshape.runtime.stage import Handler, Stage


class Carrier(Protocol):
    """What carries messages between ranks; `p2p.Transport` over torch.distributed."""

    def post(self, message: Message) -> None:
        """Make ready to receive a message; does not wait."""

    def wait(self, message: Message) -> Tensor:
        """Return a posted message's tensor once it is there."""

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start to send; keeps what it needs of the tensor until that has ended."""

    def release(self, message: Message) -> None:
        """Let go of what was sent; what is computed from now on waits until it has been taken."""

    def poll(self) -> None:
        """Let go of what has left already; does not wait."""

    def drain(self) -> None:
        """Wait until all that was sent has left."""


class Observer(Protocol):
    """Is told of every pass, to measure or to trace it; from the thread that runs it.

    Of two that run as one it is told at once.
    """

    def begins(self, *works: Pass) -> None:
        """Called when the pass's input is there, right before it runs."""

    def ends(self, *works: Pass) -> None:
        """Called right after the pass has run, before its result is sent."""


class Place:
    """Where a program stands, for whoever must tell of it when the run ends from outside."""

    def __init__(self) -> None:
        """Stand before the first pass."""
        self.instruction: Instruction | None = None  # None: no program runs
        self.last_pass: Pass | None = None


class _Silent:
    """The observer of a run that nobody observes."""

    def begins(self, *works: Pass) -> None:
        pass

    def ends(self, *works: Pass) -> None:
        pass


def run_program(
    program: Program,
    device: int,
    stages: Mapping[int, Stage],
    transport: Carrier,
    observer: Observer | None = None,
    place: Place | None = None,
    handlers: Mapping[Kind, Handler] = MappingProxyType({}),
) -> None:
    """Run the passes and messages of `device` in a program with these `stages`.

    `place` follows what runs, and stays where something was raised; `handlers` run the passes of
    their kinds.

    On every rank, for example of one device:

    >>> import torch
    >>> from megatron_vshape import Transport, lower, make, run_program
    >>> class Squares:
    ...     weight = torch.tensor([1.0, 2.0], requires_grad=True)
    ...     losses = {}
    ...     def forward(self, microbatch, received):
    ...         self.losses[microbatch] = self.weight.square().sum()
    ...     def backward(self, microbatch, received):
    ...         self.losses.pop(microbatch).backward()
    >>> torch.distributed.init_process_group(
    ...     "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    ... )
    >>> program = lower(make("1f1b", num_devices=1, num_microbatches=3))
    >>> transport = Transport([[0]], shape=(2,), dtype=torch.float32, torch_device="cpu")
    >>> transport.prepare(program)
    >>> run_program(program, 0, {0: Squares()}, transport)
    >>> Squares.weight.grad
    tensor([ 6., 12.])
    >>> torch.distributed.destroy_process_group()

    Raises:
        KeyError: `stages` lacks a stage that the program runs on the device.
        RuntimeError: a stage returned nothing where another waits for its result.
        Exception: whatever a pass raised, with a note of stage, microbatch and pass.
    """
    ProgramRun(program, device, stages, transport, observer, place, handlers).finish()


@dataclass(eq=False)
class ProgramRun:
    """A program under way on one device.

    Results that the same device reads wait in a table; every tensor is let go of as soon as its
    reader has it, so that memory is what the schedule says.
    """

    program: Program
    device: int
    stages: Mapping[int, Stage]
    transport: Carrier
    observer: Observer | None = None
    place: Place | None = None
    handlers: Mapping[Kind, Handler] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._watcher = self.observer or _Silent()
        self._place = self.place or Place()
        self._row = self.program.instructions[self.device]
        schedule = self.program.schedule
        self._local = _Local(schedule, self.device)
        others = any(kind.resource != PROCESSOR for kind in schedule.kinds)
        self._beside = _Beside(schedule, self.handlers) if others else None
        self._at = 0

    def finish(self) -> None:
        """Run on to the end, and until all has been sent. Raises what `run_program` raises."""
        self.advance(len(self._row))
        if self._beside is not None:
            self._beside.finish()
        self.transport.drain()
        self._place.instruction = None

    def advance(self, upto: int) -> None:
        """Run on, up to but not including instruction `upto`, where the program is cut.

        It does not wait for what has been sent. Raises what `run_program` raises.
        """
        place = self._place
        received: dict[Kind, Tensor] = {}  # by the kind of pass that has made it
        results: dict[Pass, Tensor | None] = {}
        for instruction in self._row[self._at : upto]:
            place.instruction = instruction
            match instruction:
                case Run(work):
                    place.last_pass = work
                    results.clear()
                    results = self._run_step(instruction.passes, received)
                    self.transport.poll()
                case Send(message):
                    result = results.pop(message.work, None)
                    if result is None:
                        raise RuntimeError(_no_result(message.work))
                    self.transport.send(message, result)
                    del result
                case Await(message):
                    with label(_WAIT, message.work):
                        received[message.work.kind] = self.transport.wait(message)
                case Receive(message):
                    self.transport.post(message)
                case Release(message):
                    self.transport.release(message)
        self._at = max(self._at, upto)

    def _run_step(
        self, works: tuple[Pass, ...], received: dict[Kind, Tensor]
    ) -> dict[Pass, Tensor | None]:
        """Run a pass, or two as one, and return what they leave for other devices.

        Takes what they read out of `received`.
        """
        # In a list, which the passes empty, so that only their stages hold what they read.
        handed = [self._input_of(each, received, alone=len(works) == 1) for each in works]
        if self._beside is None:
            made = self._run(works, handed)
        else:
            made = self._beside.run(works, partial(self._run, works, handed))
        return {
            result_of(work): result
            for work, result in zip(works, made, strict=True)
            if not self._local.keep(work, result)
        }

    def _input_of(self, work: Pass, received: dict[Kind, Tensor], alone: bool) -> Tensor | None:
        """Return what a pass reads and forget it: a message, or a result of this device."""
        if alone and received:
            return received.popitem()[1]
        # Of the two that run as one, F reads an F, and B or BW a B.
        kind = Kind.F if work.kind is Kind.F else Kind.B
        return received.pop(kind) if kind in received else self._local.take(work)

    def _run(self, works: tuple[Pass, ...], handed: list[Tensor | None]) -> list[Tensor | None]:
        """Run a pass, or two as one, and return what they make; takes inputs out of `handed`."""
        try:
            handler = self.handlers.get(works[0].kind)  # such a pass runs by itself
            if handler is not None and handler.join is not None:
                with label(_WAIT, works[0]):
                    handler.join(works[0])
            self._watcher.begins(*works)
            with label(_name_of, works):
                if handler is None:
                    results = _call_stages(self.stages, works, handed)
                else:
                    handler.run(works[0])
                    results = [None]
        except Exception as error:
            error.add_note(f"device {self.device} raised this in {describe(*works)}")
            raise
        self._watcher.ends(*works)
        return results


def run_drain(instructions: Iterable[Instruction], transport: Carrier, blank: Tensor) -> None:
    """Bring messages to rest (see `program.early_start.drain`); every Send carries `blank`."""
    for each in instructions:
        match each:
            case Receive(message):
                transport.post(message)
            case Send(message):
                transport.send(message, blank)
            case Await(message):
                with label(_WAIT, message.work):
                    transport.wait(message)
    transport.drain()


def describe(*works: Pass) -> str:
    """Return a pass, or two that run as one, in text and in words."""
    return ", beside ".join(
        f"{work}, {work.kind.words} of stage {work.stage} for microbatch {work.microbatch}"
        for work in works
    )


_WAIT = "wait {}".format


def _name_of(works: tuple[Pass, ...]) -> str:
    return BESIDE.join(map(str, works))


def _call_stages(
    stages: Mapping[int, Stage], works: tuple[Pass, ...], handed: list[Tensor | None]
) -> list[Tensor | None]:
    """Return the results of passes that run as one, or where a stage cannot, one by one."""
    if len(works) == 1:
        return [_call_stage(stages[works[0].stage], works[0], handed)]
    joint = getattr(stages[works[0].stage], "forward_beside", None)
    if joint is None:
        return [_call_stage(stages[each.stage], each, handed) for each in works]
    work, other = works
    return [*joint(work.microbatch, handed.pop(0), stages[other.stage], other, handed.pop(0))]


def _call_stage(stage: Stage, work: Pass, handed: list[Tensor | None]) -> Tensor | None:
    method: Callable[..., Tensor | None] = getattr(stage, work.kind.method)
    if work.kind.receives:
        return method(work.microbatch, handed.pop(0))
    return method(work.microbatch)


def _no_result(work: Pass) -> str:
    return (
        f"stage {work.stage} returned nothing for {work}, whose result another stage reads; "
        "only F of the last stage, B of the first and W return None"
    )


class _Local:
    """Results whose reader is on the same device: the turn of a V, or a single device."""

    def __init__(self, schedule: Schedule, device: int) -> None:
        placement, stages = schedule.placement, range(len(schedule.placement))
        passes = [Pass(kind, stage, 0) for kind in schedule.kinds for stage in stages]
        reads = {
            work[:2]: need[:2]
            for work in passes
            for need in work.needs(len(placement))
            if not work.kind.of  # what that reads of others comes by a collective
            and need.stage != work.stage
            and placement[need.stage] == device
            if placement[work.stage] == device
        }
        # By kind and stage of the result: what is left of it, by microbatch.
        left: dict[tuple[Kind, int], dict[int, Tensor]] = {need: {} for need in reads.values()}
        self._takes = {work: left[need] for work, need in reads.items()}
        results = {work[:2]: result_of(work)[:2] for work in passes}
        self._keeps = {work: left[made] for work, made in results.items() if made in left}

    def keep(self, work: Pass, result: Tensor | None) -> bool:
        """Keep the result if its reader is on this device; return whether it is."""
        kind, stage, microbatch = work
        left = self._keeps.get((kind, stage))
        if left is None:
            return False
        if result is None:
            raise RuntimeError(_no_result(work))
        left[microbatch] = result
        return True

    def take(self, work: Pass) -> Tensor | None:
        """Return the pass's input and forget it; None if it did not stay on this device."""
        kind, stage, microbatch = work
        left = self._takes.get((kind, stage))
        return None if left is None else left.pop(microbatch, None)


class _Beside:
    """What other resources than the processor run: a thread for each, in the program's order."""

    def __init__(self, schedule: Schedule, handlers: Mapping[Kind, Handler]) -> None:
        self._handlers = handlers
        self._needs = NeedTable(schedule.num_stages, schedule.kinds)
        self._resource = {kind: schedule.resource_of(kind) for kind in schedule.kinds}
        self._threads = {
            resource: ThreadPoolExecutor(
                1, initializer=on_stream_of(resource), thread_name_prefix=resource
            )
            for resource in set(self._resource.values()) - {PROCESSOR}
        }
        self._under_way: dict[Pass, Future[list[Tensor | None]]] = {}

    def run(
        self, works: tuple[Pass, ...], run: Callable[[], list[Tensor | None]]
    ) -> list[Tensor | None]:
        """Run passes once what they read from other resources is there, or begin to beside us.

        What the whole device would be waited for by is done here, where the program has the pass.
        """
        reads = [
            self._under_way[need]
            for work in works
            for need in self._needs.needs_of(work)
            if need in self._under_way
        ]

        def run_in_turn() -> list[Tensor | None]:
            for each in reads:
                each.result()
            return run()

        (work, *_) = works
        if work.kind.resource == PROCESSOR:
            return run_in_turn()
        handler = self._handlers.get(work.kind)
        if handler is not None and handler.prepare is not None:
            handler.prepare(work)
        self._under_way[work] = self._threads[self._resource[work.kind]].submit(run_in_turn)
        return [None]

    def finish(self) -> None:
        """Wait for all of them, and raise what one has raised."""
        for each in self._under_way.values():
            each.result()
        self._under_way.clear()
        for thread in self._threads.values():
            thread.shutdown()


def on_stream_of(resource: str) -> Callable[[], None]:
    """Return what makes a new thread use this one's GPU, and a stream that is the resource's.

    Else it would begin with the first GPU, and launch behind the passes it is to run beside.
    """
    if not torch.cuda.is_initialized():
        return lambda: None
    device = torch.cuda.current_device()

    def begin() -> None:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(stream_of(resource, device))

    return begin


@cache
def stream_of(resource: str, device: int) -> torch.cuda.Stream:
    """Return the one stream of a resource; torch has few, and hands them out again."""
    return torch.cuda.Stream(device)
