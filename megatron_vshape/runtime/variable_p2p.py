"""The transport for microbatches of unlike length: every message is preceded by its shape."""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from megatron_vshape.core.lowering import Message, Program, never_sent
from megatron_vshape.core.passes import ScheduleError
from megatron_vshape.runtime.p2p import Edge, Transport, TransportError

DIMENSIONS = 3  # [s, b, h]


class VariableTransport(Transport):
    """Carries messages of any shape [s, b, h]; `expect` sets their dtype and the blank's shape.

    A receive cannot be posted before its shape is there, so nothing is received ahead of its use,
    and a message takes two transfers, as under Megatron's own schedules. gloo sends do not wait for
    their receives, so the order of a program holds; for NCCL, see `check`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._checked: list[Program] = []
        self._ahead: dict[Edge, deque[Message]] = {}  # posted and not received, as they are sent
        self._arrived: dict[Message, Tensor] = {}  # received before their turn
        super().__init__(*args, **options)

    def check(self, program: Program) -> None:
        """Prove that the program's messages cannot wait for each other for ever.

        On NCCL a send is a kernel that lasts until its receive, and the next one of its stream
        waits behind it; where the GPU has one queue for all streams (CUDA_DEVICE_MAX_CONNECTIONS=1,
        which Megatron asks for), everything after that waits too. Of the two transfers of a
        message the first is too short to last.

        Raises:
            ScheduleError: on NCCL they can; all ranks find the same.
        """
        if self._waits_block or any(program is each for each in self._checked):
            return
        message = never_sent(program)
        if message is not None:
            schedule = program.schedule
            raise ScheduleError(
                f"{schedule.name} with {schedule.num_microbatches} microbatches on "
                f"{schedule.num_devices} devices does not work with variable_seq_lengths on GPUs, "
                f"where device {message.source} could never send {message.work} to device "
                f"{message.target}, which cannot receive ahead: choose v-min, v-half or v-zb, or "
                "make all microbatches equally long"
            )
        self._checked.append(program)

    def post(self, message: Message) -> None:
        """Note that a message is going to come; does not wait."""
        edge = Edge(message.stream, message.source, message.target)
        self._ahead.setdefault(edge, deque()).append(message)

    def wait(self, message: Message) -> Tensor:
        """Return a posted message's tensor, and keep those that were sent before it.

        Raises:
            TransportError: it did not come in time, or its sender is gone.
        """
        ahead = self._ahead[Edge(message.stream, message.source, message.target)]
        while message not in self._arrived:
            sooner = ahead.popleft()
            self._arrived[sooner] = self._take(sooner)
        return self._arrived.pop(message)

    def _take(self, message: Message) -> Tensor:
        self._receive(message, (DIMENSIONS,), torch.int64)
        shape = super().wait(message).tolist()
        self._receive(message, shape, self._dtype)
        return super().wait(message)

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start to send the shape and the tensor; does not wait."""
        alias = tensor.detach().contiguous()
        if alias.dim() != DIMENSIONS or alias.dtype != self._dtype:
            raise TransportError(
                f"the result of {message.work} is {list(alias.shape)} of {alias.dtype}; the "
                f"receiver expects [s, b, h] of {self._dtype}"
            )
        shape = torch.tensor(alias.shape, dtype=torch.int64, device=self._torch_device)
        self._start(message, shape)
        self._start(message, alias)
