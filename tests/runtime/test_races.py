"""torch's sanitizer finds no race in the launches of the runtime, and finds every injected race.

Hosts run ahead to the end, so the sanitizer checks the launches before any kernel has run.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from runtime.fake_device import (
    Device,
    DeviceTensor,
    Distributed,
    Group,
    Kernel,
    Race,
    World,
    WrongData,
)
from runtime.fake_pipeline import SHAPE, TO_THE_END, Train, program_of

from megatron_vshape.core.paper.catalogue import EVERY_NAME, JOINT_NAMES
from megatron_vshape.core.program.early_start import prefix_before_loss
from megatron_vshape.core.program.instructions import Message
from megatron_vshape.runtime.p2p import Edge, Transport, _PolledSends
from megatron_vshape.runtime.variable_p2p import DIMENSIONS, VariableTransport

Change = pytest.MonkeyPatch


def run(train: Train, lead: float = TO_THE_END) -> None:
    World(train.program.schedule.num_devices, 0, lead=lead).run(train)


@pytest.mark.parametrize("name", EVERY_NAME)
def test_runtime_has_no_race(name: str) -> None:
    microbatches = 6 if name in JOINT_NAMES else 5
    program = program_of(name, 3, microbatches)
    prefix, ends = prefix_before_loss(program)
    for lead in (TO_THE_END, 1):
        run(Train(program, steps=2), lead)
        run(Train(prefix, steps=2, ends=ends), lead)
        run(
            Train(
                program_of(name, 3, microbatches, length_on_arrival=True),
                steps=2,
                length_on_arrival=True,
            ),
            lead,
        )


def reads_without_a_wait(changed: Change) -> None:
    changed.setattr(Transport, "wait", lambda self, message: self._posted.pop(message)[1])


def waits_for_another(changed: Change) -> None:
    def wait(self: Transport, message: Message) -> Any:
        next(iter(self._posted.values()))[0].wait()  # posted first, and not always read first
        return self._posted.pop(message)[1]

    changed.setattr(Transport, "wait", wait)


def orders_only(changed: Change, *, is_send: bool) -> None:
    """Have streams wait for the compute stream at sends, or at receives, once passes have begun."""
    order = Distributed.order

    def of_one_kind(self: Distributed, group: Group, *, sends: bool) -> None:
        if sends == is_send or not group.device.lead:
            order(self, group, sends=sends)

    changed.setattr(Distributed, "order", of_one_kind)


def keeps_nothing_sent(changed: Change) -> None:
    add = _PolledSends.add
    changed.setattr(_PolledSends, "add", lambda self, send: add(self, send._replace(tensor=None)))


def forgets_the_last_length(changed: Change) -> None:
    start = VariableTransport._start_shape

    def forgetful(self: VariableTransport, message: Message, shape: Any) -> None:
        self._shapes.clear()
        start(self, message, shape)

    changed.setattr(VariableTransport, "_start_shape", forgetful)


def releases_without_a_wait(changed: Change) -> None:
    def release(self: _PolledSends, message: Message) -> None:
        queue = self._left.get(Edge.of(message), ())
        for index, send in enumerate(queue):
            if send.message == message:
                queue[index] = send._replace(tensor=None)  # type: ignore[index]

    changed.setattr(_PolledSends, "release", release)


def releases_what_is_sent_next_too(changed: Change) -> None:
    release = _PolledSends.release

    def too_much(self: _PolledSends, message: Message) -> None:
        release(self, message)
        for queue in self._left.values():
            for index, send in enumerate(queue):
                queue[index] = send._replace(tensor=None)

    changed.setattr(_PolledSends, "release", too_much)


def polls_without_asking(changed: Change) -> None:
    changed.setattr(_PolledSends, "poll", lambda self: self._left.clear())


def drains_without_a_wait(changed: Change) -> None:
    changed.setattr(_PolledSends, "drain", lambda self: self._left.clear())


def receives_into_one_buffer(changed: Change) -> None:
    """For each communicator, so that the next message comes before the first has been read."""
    irecv = Distributed.irecv
    buffers: dict[Group, DeviceTensor] = {}

    def into(self: Distributed, tensor: DeviceTensor, src: int, group: Group) -> Any:
        if tensor.shape == SHAPE:
            tensor.storage = buffers.setdefault(group, tensor.detach()).storage
        return irecv(self, tensor, src, group)

    changed.setattr(Distributed, "irecv", into)


def sends_from_one_buffer(changed: Change) -> None:
    """For each communicator, so that the next message is written while the first leaves."""
    isend = Distributed.isend
    buffers: dict[Group, DeviceTensor] = {}

    def copied(self: Distributed, tensor: DeviceTensor, dst: int, group: Group) -> Any:
        if tensor.shape != SHAPE:
            return isend(self, tensor, dst, group)
        here = group.device
        if group not in buffers:
            buffers[group] = here.empty(SHAPE, torch.float32)
        buffer = buffers[group]
        reads, writes = {tensor.pointer: "sent"}, {buffer.pointer: "sent"}
        here.launch(Kernel(here.compute, "copy", reads, writes))
        return isend(self, buffer, dst, group)

    changed.setattr(Distributed, "isend", copied)


def reads_a_length_without_a_wait(changed: Change) -> None:
    wait = Transport.wait

    def impatient(self: Transport, message: Message) -> Any:
        work, tensor = self._posted[message]
        if tensor.shape != (DIMENSIONS,):
            return wait(self, message)
        return self._posted.pop(message)[1]

    changed.setattr(Transport, "wait", impatient)


def takes_without_a_wait(changed: Change) -> None:
    def take(self: VariableTransport, message: Message) -> Any:
        self._receive(message, (DIMENSIONS,), torch.int64)
        shape = Transport.wait(self, message).tolist()
        self._receive(message, shape, self._dtype)
        return self._posted.pop(message)[1]

    changed.setattr(VariableTransport, "_take", take)


MUTANTS: dict[str, tuple[Callable[[Change], None], bool]] = {
    # the mutation, and whether messages are of any length
    "a receive is read without a wait": (reads_without_a_wait, False),
    "a receive is read after a wait for another": (waits_for_another, False),
    "a receive does not wait for the compute stream": (partial(orders_only, is_send=True), False),
    "a send does not wait for the compute stream": (partial(orders_only, is_send=False), False),
    "a sent tensor is not kept": (keeps_nothing_sent, False),
    "a length does not wait for the last one of its edge": (forgets_the_last_length, True),
    "a release does not wait": (releases_without_a_wait, False),
    "a release lets go of later ones too": (releases_what_is_sent_next_too, False),
    "a poll does not ask": (polls_without_asking, False),
    "a drain does not wait": (drains_without_a_wait, False),
    "receives share a buffer": (receives_into_one_buffer, False),
    "sends share a buffer": (sends_from_one_buffer, False),
    "a length is read without a wait": (reads_a_length_without_a_wait, True),
    "a message of any length is not waited for": (takes_without_a_wait, True),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_injected_race_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, length_on_arrival = MUTANTS[mutant]
    change(monkeypatch)
    train = Train(
        program_of("v-half", 4, 8, length_on_arrival=length_on_arrival),
        steps=2,
        length_on_arrival=length_on_arrival,
    )
    with pytest.raises(Race, match="is not ordered after"):
        run(train)
    # And without the sanitizer a kernel finds wrong data where hosts are as far ahead.
    monkeypatch.setattr(Device, "tell", lambda *_: None)
    with pytest.raises(WrongData):
        run(train)
