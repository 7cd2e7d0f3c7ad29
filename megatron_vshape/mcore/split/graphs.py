"""Modules that CUDA graphs cover, and the order in which Transformer Engine captures them.

TE captures the F and the B of every layer and microbatch once, in execution order, and replays
them. A replayed B also computes weight gradients. So layers in graphs are never split, unless
`graph_weights` makes TE capture weight gradients separately.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from megatron.core.transformer import cuda_graphs
from torch import nn

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.program.instructions import Program, Run
from megatron_vshape.mcore.refusals import (
    captures_graphs,
    graph_scope,
)

logger = logging.getLogger(__name__)


def cover_whole_layers(options: Any) -> bool:
    """Return whether the graphs cover every linear layer of the model."""
    if not captures_graphs(options):
        return False
    scope = graph_scope(options)
    if not scope:
        return True
    experts = getattr(options, "num_experts", None) or getattr(options, "num_moe_experts", None)
    all_have_experts = getattr(options, "moe_layer_freq", None) in (None, 1)
    needed = {"attn"} | ({"moe"} if experts else set())
    if not experts or not all_have_experts:
        needed.add("mlp")
    return needed <= scope and getattr(options, "hybrid_layer_pattern", None) is None


def covered(chunks: Iterable[nn.Module]) -> set[nn.Module]:
    """Return all modules of the chunks whose passes are replayed, according to Megatron."""
    found: set[nn.Module] = set()
    layer: Any
    for chunk in chunks:
        for layer in chunk.modules():
            config = getattr(layer, "config", None)
            if not hasattr(layer, "layer_number"):
                continue  # a block of layers; only inference captures these
            if captures_graphs(config) and cuda_graphs._layer_is_graphable(layer, config):
                for module in layer._get_submodules_under_cudagraphs():
                    found.update(module.modules())
    return found


class ChunkPass(NamedTuple):
    """A pass of a rank: pass type, index of the chunk on the rank, and microbatch."""

    kind: Kind
    chunk: int
    microbatch: int


def passes_of(program: Program, rank: int, stages: Sequence[int]) -> list[ChunkPass]:
    """List the passes of a rank's `stages` in program order."""
    chunk_of = {stage: at for at, stage in enumerate(stages)}
    return [
        ChunkPass(work.kind, chunk_of[work.stage], work.microbatch)
        for each in program.instructions[rank]
        for work in (each.passes if isinstance(each, Run) else ())
        if work.stage in chunk_of
    ]


def capture_order(program: Program, rank: int, stages: Sequence[int]) -> list[int]:
    """List a rank's passes in Megatron's format for TE: chunk number for F, negative number for B.

    Chunks are the rank's `stages`, counted from 1. The microbatches of a chunk run in ascending
    order, so the position of a number identifies the microbatch. W is omitted; a full backward
    counts as B.
    """
    order = []
    for work in passes_of(program, rank, stages):
        does, number = work.kind.does, work.chunk + 1
        order += [number] * (Kind.F in does) + [-number] * (Kind.B in does)
    return order


def capture_late(options: Any, planned_by: int) -> None:
    """Delay TE's graph capture until the pass order is final, after `planned_by` steps."""
    if options.cuda_graph_warmup_steps >= planned_by:
        return
    if os.environ.get("RANK", "0") == "0":
        logger.info(
            "cuda_graph_warmup_steps %d: raised to %d, because graphs are captured in the final "
            "order of passes. Passes are measured before that, launches from Python included",
            options.cuda_graph_warmup_steps,
            planned_by,
        )
    options.cuda_graph_warmup_steps = planned_by
