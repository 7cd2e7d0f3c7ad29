"""Run a Program on this rank: one match over its instructions, and nothing else."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.program.instructions import (
    Await,
    Instruction,
    Message,
    Program,
    Receive,
    Release,
    Run,
    Send,
)
from megatron_vshape.runtime.labels import label
from megatron_vshape.runtime.stage import Stage


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
    """Is told of every pass, to measure or to trace it."""

    def begins(self, work: Pass) -> None:
        """Called when the pass's input is there, right before it runs."""

    def ends(self, work: Pass) -> None:
        """Called right after the pass has run, before its result is sent."""


class Place:
    """Where a program stands, for whoever must tell of it when the run ends from outside."""

    def __init__(self) -> None:
        """Stand before the first pass."""
        self.instruction: Instruction | None = None  # None: no program runs
        self.last_pass: Pass | None = None


class _Silent:
    """The observer of a run that nobody observes."""

    def begins(self, work: Pass) -> None:
        pass

    def ends(self, work: Pass) -> None:
        pass


def run_program(
    program: Program,
    device: int,
    stages: Mapping[int, Stage],
    transport: Carrier,
    observer: Observer | None = None,
    place: Place | None = None,
) -> None:
    """Run what `program` says for `device`, whose stages are `stages`, and send all its results.

    `place` follows what runs, and stays where something was raised.

    Raises:
        KeyError: `stages` lacks a stage that the program runs on the device.
        RuntimeError: a stage returned nothing where another waits for its result.
        Exception: whatever a pass raised, with a note of stage, microbatch and pass.
    """
    ProgramRun(program, device, stages, transport, observer, place).finish()


class ProgramRun:
    """A program under way on one device.

    Results that the same device reads wait in a table; every tensor is let go of as soon as its
    reader has it, so that memory is what the schedule says.
    """

    def __init__(
        self,
        program: Program,
        device: int,
        stages: Mapping[int, Stage],
        transport: Carrier,
        observer: Observer | None = None,
        place: Place | None = None,
    ) -> None:
        """Take what `run_program` takes, and run nothing yet."""
        self._row = program.instructions[device]
        self._device = device
        self._stages = stages
        self._transport = transport
        self._watcher = observer if observer is not None else _Silent()
        self._place = Place() if place is None else place
        self._local = _Local(program, device)
        self._at = 0

    def finish(self) -> None:
        """Run on to the end, and until all has been sent. Raises what `run_program` raises."""
        self.advance(len(self._row))
        self._transport.drain()
        self._place.instruction = None

    def advance(self, upto: int) -> None:
        """Run on, up to but not including instruction `upto`, where the program is cut.

        It does not wait for what has been sent. Raises what `run_program` raises.
        """
        place = self._place
        received: Tensor | None = None
        result: Tensor | None = None
        for instruction in self._row[self._at : upto]:
            place.instruction = instruction
            match instruction:
                case Run(work):
                    # In a list, which the pass empties, so that only the stage holds its input.
                    handed = [self._local.take(work) if received is None else received]
                    received = result = None
                    place.last_pass = work
                    self._watcher.begins(work)
                    with label(str, work):
                        result = _run_pass(self._stages[work.stage], work, handed, self._device)
                    self._watcher.ends(work)
                    if self._local.keep(work, result):
                        result = None
                    self._transport.poll()
                case Send(message):
                    if result is None:
                        raise RuntimeError(_no_result(message.work))
                    self._transport.send(message, result)
                    result = None
                case Await(message):
                    with label(_WAIT, message.work):
                        received = self._transport.wait(message)
                case Receive(message):
                    self._transport.post(message)
                case Release(message):
                    self._transport.release(message)
        self._at = max(self._at, upto)


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


def describe(work: Pass) -> str:
    """Return the pass in text and in words."""
    return f"{work}, {_WORDS[work.kind]} of stage {work.stage} for microbatch {work.microbatch}"


_WAIT = "wait {}".format

_WORDS = {
    Kind.F: "the forward pass",
    Kind.B: "the backward pass for the inputs",
    Kind.W: "the backward pass for the weights",
    Kind.BW: "the whole backward pass",
}


def _run_pass(stage: Stage, work: Pass, handed: list[Tensor | None], device: int) -> Tensor | None:
    """Run one pass and return its result; takes its input out of `handed`."""
    try:
        return _call_stage(stage, work, handed)
    except Exception as error:
        error.add_note(f"device {device} raised this in {describe(work)}")
        raise


def _call_stage(stage: Stage, work: Pass, handed: list[Tensor | None]) -> Tensor | None:
    kind, _, microbatch = work
    if kind is Kind.F:
        return stage.forward(microbatch, handed.pop())
    if kind is Kind.B:
        return stage.backward_inputs(microbatch, handed.pop())
    if kind is Kind.BW:
        return stage.backward(microbatch, handed.pop())
    stage.backward_weights(microbatch)
    return None


def _no_result(work: Pass) -> str:
    return (
        f"stage {work.stage} returned nothing for {work}, whose result another stage reads; "
        "only F of the last stage, B of the first and W return None"
    )


class _Local:
    """Results whose reader is on the same device: the turn of a V, or a single device."""

    def __init__(self, program: Program, device: int) -> None:
        placement = program.schedule.placement
        self._stays = {
            (kind, stage)
            for stage, holder in enumerate(placement)
            for kind, reader in ((Kind.F, stage + 1), (Kind.B, stage - 1))
            if holder == device and 0 <= reader < len(placement) and placement[reader] == device
        }
        self._left: dict[tuple[Kind, int, int], Tensor] = {}

    def keep(self, work: Pass, result: Tensor | None) -> bool:
        """Keep the result if its reader is on this device; return whether it is."""
        kind, stage, microbatch = work
        kind = Kind.B if kind is Kind.BW else kind
        if (kind, stage) not in self._stays:
            return False
        if result is None:
            raise RuntimeError(_no_result(work))
        self._left[kind, stage, microbatch] = result
        return True

    def take(self, work: Pass) -> Tensor | None:
        """Return the pass's input and forget it; None if it did not stay on this device."""
        if not self._stays:
            return None
        kind, stage, microbatch = work
        if kind is Kind.W:
            return None
        if kind is Kind.F:
            return self._left.pop((Kind.F, stage - 1, microbatch), None)
        return self._left.pop((Kind.B, stage + 1, microbatch), None)
