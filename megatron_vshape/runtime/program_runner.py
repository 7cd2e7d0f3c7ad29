"""Program runner: execute the instructions of a Program on this rank, by calls of its stages."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_vshape.core.model.kinds import PAIR_SIGN, PROCESSOR, Kind, NeedTable
from megatron_vshape.core.model.passes import Pass
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
from megatron_vshape.runtime.weight_jobs import label


class Handler(NamedTuple):
    """Runs all passes of a kind that the model stages do not implement.

    - run: runs the pass, in a separate thread if its resource is not the processor.
    - join: called before a pass with collectives; returns when the inputs of the pass are ready.
    - prepare: called in the program's thread at the position of the pass.
    """

    run: Callable[[Pass], None]
    join: Callable[[Pass], None] | None = None
    prepare: Callable[[Pass], None] | None = None


class Stage(Protocol):
    """One stage of the model on this rank.

    The runner calls the passes in program order. The stage saves the state that a later pass of the
    same microbatch needs, and frees it right after that pass. For a pass of another kind without a
    `Handler`, the runner calls the method named by the kind, with the microbatch only.

    A stage may implement `forward_overlapped(microbatch, received, other, work, gradient)` for
    overlapped F&B: it runs F overlapped with `work`, a B or BW of the stage `other` with the output
    gradient `gradient`, and returns both results. Without that method the two passes run one after
    the other.
    """

    def forward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run F and return the detached output; None from the last stage, which stores its loss.

        `received` is the input, [s, b, h]; None for the first stage, which reads the data.
        """

    def backward_inputs(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run B and return the gradient of the input; None from the first stage.

        `received` is the gradient of the output, [s, b, h]; None for the last stage.
        """

    def backward_weights(self, microbatch: int) -> None:
        """Run W: add this microbatch's weight gradients."""

    def backward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run a full backward (B and W) and return the input's gradient, as `backward_inputs`."""


class Carrier(Protocol):
    """P2P message interface of the runner, implemented by `p2p.Transport`."""

    def post(self, message: Message) -> None:
        """Post the receive of a message without waiting."""

    def wait(self, message: Message) -> Tensor:
        """Wait for a posted message and return its tensor."""

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start a send. The tensor's memory stays alive until the send has completed."""

    def release(self, message: Message) -> None:
        """Free a sent tensor. Later computation waits until the message has been received."""

    def poll(self) -> None:
        """Free the tensors of completed sends without waiting."""

    def drain(self) -> None:
        """Wait until all sends have completed."""


class Observer(Protocol):
    """Callbacks around each pass, for measurement and tracing.

    They run in the thread that runs the pass. An overlapped forward-backward (F&B) pair makes a
    single call with both passes.
    """

    def begins(self, *works: Pass) -> None:
        """Called when the input of the pass has arrived, right before the pass runs."""

    def ends(self, *works: Pass) -> None:
        """Called right after the pass has run, before its result is sent."""


class Place:
    """Current position in a program, for error reports when the run is ended from outside."""

    def __init__(self) -> None:
        """Initialize to the position before the first pass."""
        self.instruction: Instruction | None = None  # None: no program runs
        self.last_pass: Pass | None = None


class _Silent:
    """Null observer."""

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

    Args:
        program: the lowered schedule of all pipeline ranks.
        device: index of this rank in the pipeline.
        stages: the model stages of this rank, by stage number.
        transport: P2P messages.
        observer: called around each pass, for measurement and tracing.
        place: updated to the current instruction; after an exception it shows where it was raised.
        handlers: run the passes of their kinds in place of the stages.

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
    """State of a program that runs on one pipeline rank.

    Results read on the same rank are stored in a table. Each tensor is freed as soon as its reader
    has received it, so that activation memory follows the schedule.
    """

    program: Program
    device: int
    stages: Mapping[int, Stage]
    transport: Carrier
    observer: Observer | None = None
    place: Place | None = None
    handlers: Mapping[Kind, Handler] = field(default_factory=dict)
    executor: type[Executor] = ThreadPoolExecutor  # of copies and collectives

    def __post_init__(self) -> None:
        self._observer = self.observer or _Silent()
        self._place = self.place or Place()
        self._row = self.program.instructions[self.device]
        schedule = self.program.schedule
        self._local = _Local(schedule, self.device)
        has_others = any(kind.resource != PROCESSOR for kind in schedule.kinds)
        self._others = (
            _OtherResources(schedule, self.handlers, self.executor) if has_others else None
        )
        self._at = 0

    def finish(self) -> None:
        """Run the remaining instructions and complete all sends. Raises as `run_program`."""
        self.advance(len(self._row))
        if self._others is not None:
            self._others.finish()
        self.transport.drain()
        self._place.instruction = None

    def advance(self, upto: int) -> None:
        """Run up to but not including instruction `upto`, where the program is cut.

        `Run` runs a pass or an F&B pair, `Send` starts to send its result, `Receive` posts the
        receive of a message, `Await` waits for it, and `Release` frees a sent result. Does not wait
        for the completion of sends. Raises as `run_program`.
        """
        place = self._place
        # Local, because a cut is always right after a pass and its sends: no input is left over.
        received: dict[Kind, Tensor] = {}  # by the kind of the pass that produced it
        results: dict[Pass, Tensor | None] = {}
        for instruction in self._row[self._at : upto]:
            # Updated before the instruction runs, so that an error report names a wait that never
            # ends.
            place.instruction = instruction
            match instruction:
                case Run(work):
                    place.last_pass = work
                    # Drop all references to results of the last step before the next pass
                    # allocates.
                    results.clear()
                    results = self._run_passes(instruction.passes, received)
                    # Once per pass, so that the tensors of completed sends do not add up.
                    self.transport.poll()
                case Send(message):
                    result = results.pop(message.work, None)
                    if result is None:
                        raise RuntimeError(_no_result(message.work))
                    self.transport.send(message, result)
                    # This name would keep the tensor alive during the next pass.
                    del result
                case Await(message):
                    with label(_WAIT, message.work):
                        received[message.work.kind] = self.transport.wait(message)
                case Receive(message):
                    self.transport.post(message)
                case Release(message):
                    self.transport.release(message)
        # A later call continues here, and one with an earlier cut does nothing.
        self._at = max(self._at, upto)

    def _run_passes(
        self, works: tuple[Pass, ...], received: dict[Kind, Tensor]
    ) -> dict[Pass, Tensor | None]:
        """Run a pass or an F&B pair, and return the results to send to other ranks.

        Removes the inputs of the passes from `received`.
        """
        # The passes empty this list, so that only their stages keep references to the inputs: an
        # argument would stay alive until the call returns.
        handed = [self._input_of(work, received, alone=len(works) == 1) for work in works]
        if self._others is None:
            results = self._run_here(works, handed)
        else:
            results = self._others.run(works, partial(self._run_here, works, handed))
        # A result that this rank reads itself needs no message.
        return {
            result_of(work): result
            for work, result in zip(works, results, strict=True)
            if not self._local.keep(work, result)
        }

    def _input_of(self, work: Pass, received: dict[Kind, Tensor], alone: bool) -> Tensor | None:
        """Return and remove the input of a pass: a received message or a result of this rank."""
        # A single pass has one input, so a received message must be it.
        if alone and received:
            return received.popitem()[1]
        # In an F&B pair, F reads the result of an F, and B or BW the result of a B.
        # In a pair, one input may be local and the other a message.
        kind = Kind.F if work.kind is Kind.F else Kind.B
        return received.pop(kind) if kind in received else self._local.take(work)

    def _run_here(
        self, works: tuple[Pass, ...], handed: list[Tensor | None]
    ) -> list[Tensor | None]:
        """Run a pass or an F&B pair and return the results; removes the inputs from `handed`."""
        try:
            handler = self.handlers.get(works[0].kind)  # never part of a pair
            # A collective needs its inputs now; the wait is excluded from the measured time of the
            # pass.
            if handler is not None and handler.join is not None:
                with label(_WAIT, works[0]):
                    handler.join(works[0])
            self._observer.begins(*works)
            with label(_name_of, works):
                if len(works) > 1:
                    results = _call_pair(self.stages, works, handed)
                elif handler is None:
                    results = [_call_stage(self.stages, works[0], handed)]
                else:
                    handler.run(works[0])
                    results = [None]
        except Exception as error:
            error.add_note(f"device {self.device} raised this in {describe(*works)}")
            raise
        self._observer.ends(*works)
        return results


def run_drain(instructions: Iterable[Instruction], transport: Carrier, blank: Tensor) -> None:
    """Complete the messages in flight (see `program.early_start.drain`).

    Every Send carries `blank`.
    """
    for instruction in instructions:
        match instruction:
            case Receive(message):
                transport.post(message)
            case Send(message):
                transport.send(message, blank)
            case Await(message):
                with label(_WAIT, message.work):
                    transport.wait(message)
    transport.drain()


def describe(*works: Pass) -> str:
    """Format a pass or an F&B pair with its stage and microbatch, for messages."""
    return ", beside ".join(
        f"{work}, {work.kind.words} of stage {work.stage} for microbatch {work.microbatch}"
        for work in works
    )


_WAIT = "wait {}".format


def _name_of(works: tuple[Pass, ...]) -> str:
    return PAIR_SIGN.join(map(str, works))


def _call_pair(
    stages: Mapping[int, Stage], works: tuple[Pass, ...], handed: list[Tensor | None]
) -> list[Tensor | None]:
    """Run an F&B pair, overlapped if the stage of F supports it; return both results."""
    work, backward_work = works
    overlapped = getattr(stages[work.stage], "forward_overlapped", None)
    if overlapped is None:
        return [_call_stage(stages, work, handed) for work in works]
    # `pop` leaves the stage with the only reference, so that it can free the input early.
    return [
        *overlapped(
            work.microbatch,
            handed.pop(0),
            stages[backward_work.stage],
            backward_work,
            handed.pop(0),
        )
    ]


def _call_stage(
    stages: Mapping[int, Stage], work: Pass, handed: list[Tensor | None]
) -> Tensor | None:
    """Call the method of the pass's stage.

    F calls `forward`, B `backward_inputs`, W `backward_weights` and BW `backward`. All but W get a
    tensor of another stage: F its input, B and BW the gradient of its output.
    """
    method: Callable[..., Tensor | None] = getattr(stages[work.stage], work.kind.method)
    if work.kind.receives:
        return method(work.microbatch, handed.pop(0))
    return method(work.microbatch)


def _no_result(work: Pass) -> str:
    return (
        f"stage {work.stage} returned nothing for {work}, whose result another stage reads; "
        "only F of the last stage, B of the first and W return None"
    )


class _Local:
    """Results read on the same rank: at the turn of the V placement, or with a single rank."""

    def __init__(self, schedule: Schedule, device: int) -> None:
        placement, stages = schedule.placement, range(len(schedule.placement))
        passes = [Pass(kind, stage, 0) for kind in schedule.kinds for stage in stages]
        reads = {
            work[:2]: dependency[:2]
            for work in passes
            for dependency in work.needs(len(placement))
            if not work.kind.of  # their inputs from other stages arrive by a collective
            and dependency.stage != work.stage
            and placement[dependency.stage] == device
            if placement[work.stage] == device
        }
        # By kind and stage of the result: the unread results, by microbatch.
        result_slots: dict[tuple[Kind, int], dict[int, Tensor]] = {
            dependency: {} for dependency in reads.values()
        }
        self._takes = {work: result_slots[dependency] for work, dependency in reads.items()}
        results = {work[:2]: result_of(work)[:2] for work in passes}
        # A BW stores its result as that of its B, which is the pass that readers name.
        self._keeps = {
            work: result_slots[result] for work, result in results.items() if result in result_slots
        }

    def keep(self, work: Pass, result: Tensor | None) -> bool:
        """Store the result if its reader is on this rank; return whether it is."""
        kind, stage, microbatch = work
        waiting_results = self._keeps.get((kind, stage))
        if waiting_results is None:
            return False
        if result is None:
            raise RuntimeError(_no_result(work))
        waiting_results[microbatch] = result
        return True

    def take(self, work: Pass) -> Tensor | None:
        """Return and remove the input of a pass; None if it was not produced on this rank."""
        kind, stage, microbatch = work
        waiting_results = self._takes.get((kind, stage))
        return None if waiting_results is None else waiting_results.pop(microbatch, None)


class _OtherResources:
    """Passes of resources other than the processor: one thread per resource, in program order.

    The resource of a pass is the processor, a link to the host's memory, or the collectives.
    """

    def __init__(
        self,
        schedule: Schedule,
        handlers: Mapping[Kind, Handler],
        executor: Callable[..., Executor],
    ) -> None:
        self._handlers = handlers
        self._needs = NeedTable(schedule.num_stages, schedule.kinds)
        self._resource = {kind: kind.resource for kind in schedule.kinds}
        self._threads = {
            resource: executor(1, initializer=on_stream_of(resource), thread_name_prefix=resource)
            for resource in set(self._resource.values()) - {PROCESSOR}
        }
        self._under_way: dict[Pass, Future[list[Tensor | None]]] = {}

    def run(
        self, works: tuple[Pass, ...], run: Callable[[], list[Tensor | None]]
    ) -> list[Tensor | None]:
        """Run passes on the processor after their inputs from other resources, or submit them.

        A pass of another resource is submitted to the thread of that resource and does not block.
        Its `prepare`, which may synchronize the whole GPU, runs here, in the thread of the program.
        """
        reads = [
            self._under_way[dependency]
            for work in works
            for dependency in work.needs_in(self._needs)
            if dependency in self._under_way
        ]

        # A wait for a thread of the host, not for the GPU: on a GPU, streams order the work by
        # events.
        def run_in_turn() -> list[Tensor | None]:
            for future in reads:
                future.result()
            return run()

        (work, *_) = works
        if work.kind.resource == PROCESSOR:
            # The processor runs in the caller's thread, and only waits for the reads.
            return run_in_turn()
        handler = self._handlers.get(work.kind)
        if handler is not None and handler.prepare is not None:
            handler.prepare(work)
        # One thread per resource runs its passes in program order; a wait inside blocks only them.
        self._under_way[work] = self._threads[self._resource[work.kind]].submit(run_in_turn)
        return [None]

    def finish(self) -> None:
        """Wait for all submitted passes and raise their first exception."""
        for future in self._under_way.values():
            future.result()
        self._under_way.clear()
        for thread in self._threads.values():
            thread.shutdown()


def on_stream_of(resource: str) -> Callable[[], None]:
    """Return a thread initializer that selects the current GPU and the resource's stream.

    Without it, a new thread would use GPU 0, and would launch on the stream of the passes that its
    work is to overlap with.
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
    """Return the stream of a resource, created once: torch reuses a small pool of streams."""
    return torch.cuda.Stream(device)
