"""Prepare a built model: linear layers defer their weight gradients from B to W.

Layers whose weight gradients stay in B are logged once per model, with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence, Set

from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from torch import nn

from megatron_vshape.mcore.split import graphs, te_layers
from megatron_vshape.mcore.split.local_layers import mark_gathered
from megatron_vshape.mcore.split.te_layers import AS_IT_SHOULD
from megatron_vshape.mcore.step_state import StepState
from megatron_vshape.runtime.weight_jobs import name_weights

logger = logging.getLogger(__name__)

SHOWN = 3
"""Maximum number of layers named per reason; the log line counts the others."""


def prepare_layers(state: StepState, chunks: Sequence[nn.Module], splits_graphs: bool) -> None:
    """Make the linear layers of unwrapped chunks defer their weight gradients.

    Layers that CUDA graphs cover compute their weight gradients in B, unless the graphs are split
    too. Megatron's local layers need no preparation: a hook has replaced their autograd function.

    Raises:
        StoreError: Transformer Engine's layers do not match the adapter.
    """
    whole = graphs.covered(chunks)
    # With split graphs, covered TE layers get a store too: their W is captured separately.
    if splits_graphs:
        whole = {each for each in whole if not te_layers.is_splittable(each)}
    te_layers.install(state, chunks, whole)
    for chunk in chunks:
        mark_gathered(chunk)
        name_weights(chunk)  # in traces
    replicas = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    # Tensor- and data-parallel replicas have the same layers, so one of them logs.
    if replicas == (0, 0):
        log_whole_layers(chunks, whole)


def whole_layers(
    chunks: Iterable[nn.Module], graphed: Set[nn.Module] = frozenset()
) -> dict[tuple[str, str], list[str]]:
    """Return the names of layers whose weight gradients run in B, by (class name, reason).

    `graphed` are the layers that CUDA graphs cover. Only layers with a weight matrix count: the
    gradients of norms and biases are sums, and cheap.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for number, chunk in enumerate(chunks):
        fused = _in_operations(chunk)
        for name, layer in chunk.named_modules():
            reason = _why_graphed(layer) if layer in graphed else _why_whole(layer, layer in fused)
            if reason is not None:
                key = (type(layer).__name__, reason)
                found.setdefault(key, []).append(f"chunk {number} {name}".rstrip())
    return found


def log_whole_layers(chunks: Iterable[nn.Module], graphed: Set[nn.Module] = frozenset()) -> None:
    """Log which linear layers are not split and why; a warning if that is not by design."""
    for (kind, reason), names in whole_layers(chunks, graphed).items():
        shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        level = logging.INFO if reason.startswith(AS_IT_SHOULD) else logging.WARNING
        logger.log(
            level,
            "the weight gradients of %d %s stay in B, %s: %s",
            len(names),
            kind,
            reason,
            shown,
        )


def _why_graphed(layer: nn.Module) -> str | None:
    return f"{AS_IT_SHOULD}: a CUDA graph replays them with B" if _has_matrix(layer) else None


def _in_operations(chunk: nn.Module) -> set[nn.Module]:
    """Return the layers whose parameters TE's fused operations use.

    The fused operations of a dense MLP have no store.
    """
    owners = (each for each in chunk.modules() if hasattr(each, "_fused_impl"))
    return {layer for owner in owners for layer in owner.modules()}


def _why_whole(layer: nn.Module, is_fused: bool) -> str | None:
    """Return the reason why the layer's weight gradients stay in B, or None if W computes them."""
    if is_fused and _has_matrix(layer):
        return f"{AS_IT_SHOULD}: fused operations of Transformer Engine compute them"
    if not _has_matrix(layer) or isinstance(layer, ColumnParallelLinear | RowParallelLinear):
        return None
    if te_layers.is_te_layer(layer):
        return te_layers.why_whole(layer)
    if isinstance(layer, VocabParallelEmbedding | nn.Embedding):
        return f"{AS_IT_SHOULD}: a lookup has no product to put off"
    if "Router" in type(layer).__name__:
        return f"{AS_IT_SHOULD}: a router's product is small"
    return "because it is not computed by one of Megatron's or Transformer Engine's linear layers"


def _has_matrix(layer: nn.Module) -> bool:
    parameters = layer.parameters(recurse=False)
    return any(each.requires_grad and each.dim() > 1 for each in parameters)
