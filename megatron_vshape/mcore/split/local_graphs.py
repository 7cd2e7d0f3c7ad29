"""The CUDA graphs that Megatron itself captures, `--cuda-graph-impl local`, under any order.

In one step the layers run as ever and note every F and B, and at its end Megatron captures these in
the order in which they have run. From then on a layer replays its graphs in turn, one at each F.
What a graph has left, later ones write over, in that order: what runs in another, an evaluation or
a step of an order that is not the run's last, runs without graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.cuda_graphs import (
    CudaGraphManager,
    _CudagraphGlobalRecord,
    _CudaGraphRunner,
    create_cudagraphs,
)
from torch import Tensor, nn

from megatron_vshape.mcore.refusals import captures_locally
from megatron_vshape.mcore.replaced import Replaced


@contextmanager
def taking_part(config: Any, chunks: Sequence[nn.Module], takes_part: bool) -> Iterator[None]:
    """Run a step inside, of which layers record or replay the passes only if it takes part."""
    with Replaced() as replaced:
        if captures_locally(config) and not takes_part:
            replaced.put(_CudagraphGlobalRecord, "cudagraph_created", False)
            for chunk in chunks:
                for module in chunk.modules():
                    if isinstance(module, CudaGraphManager):
                        replaced.put(module, "training", False)
        yield


def begin_forward(config: Any, model: nn.Module) -> None:
    """Have an F that may be recorded share no tensor with those before it.

    Rotary embeddings are computed once and kept. Megatron gives what several graphs read one
    buffer, which has to be free again before any B is captured.
    """
    if captures_locally(config) and not _CudagraphGlobalRecord.cudagraph_created:
        for module in model.modules():
            clear = getattr(type(module).forward, "cache_clear", None)
            if clear is not None:
                clear()


def capture() -> None:
    """Have Megatron capture what a step has recorded.

    Megatron's main (0.20) marks a parameter once a graph adds its gradient to `main_grad`, and what
    is marked no later graph adds: of several microbatches only the first would count. So none is
    marked when a capture begins; a fused kernel marks what it adds itself within it.
    """
    create = _CudaGraphRunner.create_bwd_graph

    def create_unmarked(runner: Any, *args: Any, **options: Any) -> Any:
        for parameter in runner.params_to_backprop:
            if hasattr(parameter, "grad_added_to_main_grad"):
                parameter.grad_added_to_main_grad = False
        return create(runner, *args, **options)

    with Replaced() as replaced:
        replaced.put(_CudaGraphRunner, "create_bwd_graph", create_unmarked)
        create_cudagraphs()


class _Same(torch.autograd.Function):
    """Gives a tensor out as another one on the same memory, and its gradient back as it is."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """Return another tensor, which is no view to autograd."""
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient."""
        return gradient


def own(output: Tensor) -> Tensor:
    """Return a layer's output as a tensor of its own, which may be emptied when it has been sent.

    While it records, a layer gives out a view, and afterwards the same tensor at every replay.
    """
    same: Tensor = _Same.apply(output)
    return same
