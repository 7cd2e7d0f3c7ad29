"""The transport for microbatches of unlike length: every message is preceded by its shape."""

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vshape.core.program.instructions import Message
from megatron_vshape.runtime.p2p import Edge, Transport, TransportError

DIMENSIONS = 3  # [s, b, h]


class VariableTransport(Transport):
    """Carries messages of any shape [s, b, h]; `expect` sets their dtype and the blank's shape.

    A receive cannot be posted before its shape is there, and a message takes two transfers, as
    under Megatron's own schedules. On gloo, whose sends do not wait for their receives, nothing is
    received ahead of its use. On NCCL posting takes the message, and the host waits for its shape,
    but for no pass: the program is lowered for that (`takes`). Of the two transfers the first is
    too short to last.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._ahead: dict[Edge, deque[Message]] = {}  # posted and not received, as they are sent
        self._arrived: dict[Message, Tensor] = {}  # received before their turn
        self._streams: dict[Edge, torch.cuda.Stream] = {}  # of shapes, on NCCL
        self._shapes: dict[Edge, dist.Work] = {}  # the last shape's send, on NCCL
        super().__init__(*args, **options)

    def post(self, message: Message) -> None:
        """Note that a message is going to come; on NCCL take it."""
        if not self._waits_block:
            self._arrived[message] = self._take(message)
            return
        self._ahead.setdefault(Edge.of(message), deque()).append(message)

    def wait(self, message: Message) -> Tensor:
        """Return a posted message's tensor, and keep those that were sent before it.

        Raises:
            TransportError: it did not come in time, or its sender is gone.
        """
        while message not in self._arrived:
            sooner = self._ahead[Edge.of(message)].popleft()
            self._arrived[sooner] = self._take(sooner)
        return self._arrived.pop(message)

    def _take(self, message: Message) -> Tensor:
        with self._aside(Edge.of(message)):
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
        # From memory of the host that is not pinned, the copy to a GPU would wait for the stream.
        shape = torch.tensor(alias.shape, dtype=torch.int64, pin_memory=not self._waits_block)
        self._start_shape(message, shape)
        self._start(message, alias)

    def _start_shape(self, message: Message, shape: Tensor) -> None:
        edge = Edge.of(message)
        with self._aside(edge):
            if edge in self._shapes:
                self._shapes[edge].wait()  # the stream: it may use the memory of that one again
            work = self._start(message, shape.to(self._torch_device, non_blocking=True))
        if not self._waits_block:
            self._shapes[edge] = work

    def _aside(self, edge: Edge) -> AbstractContextManager[None]:
        """Have the shapes of an edge travel on a stream of their own.

        NCCL's transfers follow the stream that is current. On that of the passes a shape would
        leave only when its pass has ended, and the host that reads it would wait until all passes
        launched before have ended too. Edges wait for each other no more than their groups do.
        """
        if self._waits_block:
            return nullcontext()
        if edge not in self._streams:
            self._streams[edge] = torch.cuda.Stream(self._torch_device)
        return torch.cuda.stream(self._streams[edge])
