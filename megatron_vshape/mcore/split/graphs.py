"""What CUDA graphs cover, and in which order Transformer Engine captures them.

TE captures the F and the B of every layer and microbatch once, in the order in which they are going
to run, and replays them. A replayed B computes the weight gradients too: what a graph covers is not
split, from the first step on, and the rest of the model is split as ever.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

from megatron.core.transformer import cuda_graphs
from torch import nn

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.program.instructions import Program, Run
from megatron_vshape.mcore.refusals import (
    GRAPH_SCOPES,
    captures_graphs,
    parts_of,
)

logger = logging.getLogger(__name__)


def cover_whole_layers(options: Any) -> bool:
    """Return whether the graphs cover every linear layer of every layer of the model."""
    if not captures_graphs(options):
        return False
    scope = _scope(options)
    if not scope:
        return True
    experts = getattr(options, "num_experts", None) or getattr(options, "num_moe_experts", None)
    all_have_experts = getattr(options, "moe_layer_freq", None) in (None, 1)
    needed = {"attn"} | ({"moe"} if experts else set())
    if not experts or not all_have_experts:
        needed.add("mlp")
    return needed <= scope and getattr(options, "hybrid_layer_pattern", None) is None


def _scope(options: Any) -> set[str]:
    """Return the parts of a layer that are covered; none stands for all of it."""
    found = (parts_of(getattr(options, name, None)) for name in GRAPH_SCOPES)
    return next(filter(None, found), set()) - {"full"}


def covered(chunks: Iterable[nn.Module]) -> set[nn.Module]:
    """Return every module of the chunks whose passes are replayed, by what Megatron says of it."""
    found: set[nn.Module] = set()
    layer: Any
    for chunk in chunks:
        for layer in chunk.modules():
            config = getattr(layer, "config", None)
            if not hasattr(layer, "layer_number"):
                continue  # stacks of layers can be captured too, for inference
            if captures_graphs(config) and cuda_graphs._layer_is_graphable(layer, config):
                for module in layer._get_submodules_under_cudagraphs():
                    found.update(module.modules())
    return found


def capture_order(program: Program, rank: int, stages: Sequence[int]) -> list[int]:
    """Return a rank's passes as TE takes them: a chunk's number from 1 for F, minus that for B.

    `stages` are the rank's. The microbatches of a chunk come in turn, so that a number says which
    one it is. W is no part of a graph, and a whole backward is one B.
    """
    number = {stage: at for at, stage in enumerate(stages, 1)}
    order = []
    for each in program.instructions[rank]:
        for work in each.passes if isinstance(each, Run) else ():
            if work.stage not in number:
                continue
            does, chunk = work.kind.does, number[work.stage]
            if Kind.F in does:
                order.append(chunk)
            if Kind.B in does:
                order.append(-chunk)
    return order


def capture_late(options: Any, planned_by: int) -> None:
    """Delay the capture of TE's graphs until the pass order is final, after `planned_by` steps."""
    if options.cuda_graph_warmup_steps >= planned_by:
        return
    if os.environ.get("RANK", "0") == "0":
        logger.info(
            "cuda_graph_warmup_steps %d: raised to %d, because the schedule is planned again "
            "before",
            options.cuda_graph_warmup_steps,
            planned_by,
        )
    options.cuda_graph_warmup_steps = planned_by
