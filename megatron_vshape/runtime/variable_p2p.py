"""Transport for variable-length microbatches: each message is preceded by its shape."""

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
    """P2P messages of any shape [s, b, h]; `expect` sets their dtype and the shape of `blank`.

    A receive cannot be posted before its shape has arrived, so each message requires two transfers,
    as in Megatron's own schedules.

    - gloo: sends do not wait for their receives, so `post` only records the message, and `wait`
      receives it.
    - NCCL: `post` receives the message. The host waits for its shape, but for no pass: the program
      is lowered for that. The transfer of the shape is too short to matter.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._ahead: dict[Edge, deque[Message]] = {}  # posted, not received; in send order
        self._arrived: dict[Message, Tensor] = {}  # received before the runner reads them
        self._streams: dict[Edge, torch.cuda.Stream] = {}  # of the shapes, on NCCL
        self._shapes: dict[Edge, dist.Work] = {}  # the last shape's send, on NCCL
        super().__init__(*args, **options)

    def post(self, message: Message) -> None:
        """Record an expected message; on NCCL, receive it."""
        if not self._waits_block:
            self._arrived[message] = self._take(message)
            return
        self._ahead.setdefault(Edge.of(message), deque()).append(message)

    def wait(self, message: Message) -> Tensor:
        """Return a posted message's tensor. Messages sent before it are received and stored.

        Raises:
            TransportError: the message did not arrive in time, or its sender is gone.
        """
        # The sender's order may differ from the order of reads: receive and store what came first.
        while message not in self._arrived:
            sooner = self._ahead[Edge.of(message)].popleft()
            self._arrived[sooner] = self._take(sooner)
        return self._arrived.pop(message)

    def _take(self, message: Message) -> Tensor:
        with self._aside(Edge.of(message)):
            self._receive(message, (DIMENSIONS,), torch.int64)
            shape = super().wait(message).tolist()
        # On the stream of the passes: only the shape needs the host to wait.
        self._receive(message, shape, self._dtype)
        return super().wait(message)

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start to send the shape and the tensor without waiting."""
        alias = tensor.detach().contiguous()
        if alias.dim() != DIMENSIONS or alias.dtype != self._dtype:
            raise TransportError(
                f"the result of {message.work} is {list(alias.shape)} of {alias.dtype}; the "
                f"receiver expects [s, b, h] of {self._dtype}"
            )
        # A copy to a GPU from host memory that is not pinned would wait for the stream.
        shape = torch.tensor(alias.shape, dtype=torch.int64, pin_memory=not self._waits_block)
        self._start_shape(message, shape)
        self._start(message, alias)

    def _start_shape(self, message: Message, shape: Tensor) -> None:
        edge = Edge.of(message)
        with self._aside(edge):
            if edge in self._shapes:
                self._shapes[edge].wait()  # then the stream may reuse the last shape's memory
            work = self._start(message, shape.to(self._torch_device, non_blocking=True))
        if not self._waits_block:
            self._shapes[edge] = work

    def _aside(self, edge: Edge) -> AbstractContextManager[None]:
        """Return a context in which the shapes of an edge use a separate CUDA stream.

        NCCL's transfers follow the current stream. On the stream of the passes, a shape would leave
        only after its pass, and the host that reads the shape would wait for all passes launched
        before. An edge waits for other edges no more than its process group does.
        """
        if self._waits_block:
            return nullcontext()
        if edge not in self._streams:
            self._streams[edge] = torch.cuda.Stream(self._torch_device)
        return torch.cuda.stream(self._streams[edge])
