"""Accounting of a rank's memory in the pool of its CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron_vshape.mcore.split import graphs
from megatron_vshape.rehearsal.ledger import Ledger, tensors_in
from megatron_vshape.rehearsal.phases import START
from megatron_vshape.rehearsal.rank_report import GraphBytes


class GraphPool:
    """Marks allocations of captured modules in F and B as graph memory; W allocates only gathers.

    The pool and other memory cannot share blocks, so both peaks add up even if they occur at
    different times. A copy of the input of each F stays allocated until its B.
    """

    def __init__(self, ledger: Ledger, chunks: Iterable[nn.Module]) -> None:
        """Add hooks to the modules of `chunks` that graphs cover."""
        self._ledger, self._running, self._inputs = ledger, nn.Module(), 0
        self.most_inputs = 0
        self._inputs_of: dict[int, int] = {}  # bytes per microbatch, by chunk
        self._pass, self._of_pass = START, 0
        covered = graphs.covered(chunks)
        inner = {child for module in covered for child in module.children()}
        for module in covered - inner:
            if next(module.parameters(), None) is not None:
                module.register_forward_pre_hook(self._enter, with_kwargs=True)
                module.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._ledger.graphed = True
        for tensor in tensors_in((*args, *kwargs.values())):
            if tensor.requires_grad:
                self._add_input_bytes(tensor.nbytes)
                self._count_of_pass(tensor.nbytes)
                tensor.register_hook(partial(self._end_backward, module, tensor.nbytes))
                break

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._ledger.graphed = False
        for tensor in tensors_in((output,)):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._begin_backward, module))

    def _begin_backward(self, module: nn.Module, gradient: Tensor) -> None:
        self._ledger.graphed, self._running = True, module

    def _end_backward(self, module: nn.Module, size: int, gradient: Tensor) -> None:
        self._add_input_bytes(-size)
        if self._running is module:  # the next module may have started
            self._ledger.graphed = False

    def _add_input_bytes(self, size: int) -> None:
        self._inputs += size
        self.most_inputs = max(self.most_inputs, self._inputs)

    def _count_of_pass(self, size: int) -> None:
        phase = self._ledger.phase
        if phase != self._pass:
            self._pass, self._of_pass = phase, 0
        self._of_pass += size
        if phase.kind == "F":
            self._inputs_of[phase.chunk] = self._of_pass

    def inputs_of(self, chunk: int) -> int:
        """Return the bytes of a microbatch's static inputs, allocated from F to B of a chunk."""
        return self._inputs_of.get(chunk, 0)

    def peaks(self) -> GraphBytes:
        """Return the peaks of the pool, of other memory, and of static inputs."""
        return GraphBytes(self._ledger.pool_peak, self._ledger.other_peak, self.most_inputs)
