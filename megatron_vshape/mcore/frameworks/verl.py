"""verl: recorded choices of routers, which it gathers from all ranks.

verl (mode R2) appends the choices of every forward call of a chunk, sorts them by Megatron's
schedule table, and gathers the layers of all ranks in `pp_gather`, which expects chunk c of rank r
to be stage c * ranks + r. In a V it is not. ROLL has a copy of these functions.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_vshape.mcore.frameworks import Framework
from megatron_vshape.mcore.hook import Session
from megatron_vshape.mcore.layout.built_layers import has_experts
from megatron_vshape.mcore.layout.stage_map import StageMap
from megatron_vshape.runtime.hosts import gather_objects

GATHER_PARAMETERS = ("local_layers_router_map", "tf_config")
"""First parameters of verl's and ROLL's `pp_gather`."""


class Verl(Framework):
    """Gathers recorded choices by the placement of the schedule."""

    def adapt(self, session: Session, config: Any) -> None:
        """Replace `pp_gather` in all loaded modules; forks have it in modules of other names."""
        for module in list(sys.modules.values()):
            function = vars(module).get("pp_gather") if inspect.ismodule(module) else None
            if not inspect.isfunction(function) or hasattr(function, "__wrapped__"):
                continue
            if tuple(inspect.signature(function).parameters)[:2] == GATHER_PARAMETERS:
                session.process.replaced.put(module, "pp_gather", _gathers(session, function))


FRAMEWORK = Verl()


def _gathers(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that gathers [b, s, local layers, topk] from all ranks."""

    @functools.wraps(original)
    def pp_gather(local_layers_router_map: Tensor, tf_config: Any, *args: Any) -> Any:
        pipeline = session.pipeline
        if pipeline is None or pipeline.stage_map.num_chunks == 1:
            return original(local_layers_router_map, tf_config, *args)
        return gathered(local_layers_router_map, tf_config, pipeline.stage_map)

    return pp_gather


def gathered(local_tensor: Tensor, config: Any, stage_map: StageMap) -> Tensor:
    """Gather the expert choices of all layers on the CPU, in the order of the layers.

    `local_tensor` has those of this rank's MoE layers, [b, s, layers, topk] or nested, chunk after
    chunk.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    everyones = gather_objects(local_tensor.cpu(), group)
    counts = moe_layers_of_stages(config, stage_map.layers)
    by_stage: dict[int, Tensor] = {}
    for rank, rank_tensor in enumerate(everyones):
        stages = stage_map.stages(rank)
        ends = [0, *accumulate(counts[stage] for stage in stages)]
        for stage, (begin, end) in zip(stages, pairwise(ends), strict=True):
            by_stage[stage] = _layers(rank_tensor, begin, end)
    return torch.cat([by_stage[stage] for stage in sorted(by_stage)], dim=2)


def moe_layers_of_stages(config: Any, layers: Sequence[int]) -> list[int]:
    """Count the MoE layers of every stage by Megatron's `moe_layer_freq`."""
    ends = [0, *accumulate(layers)]
    by_layer = has_experts(config, ends[-1])
    return [sum(by_layer[begin:end]) for begin, end in pairwise(ends)]


def _layers(choices: Tensor, begin: int, end: int) -> Tensor:
    if not choices.is_nested:
        return choices[:, :, begin:end]
    rows = [row[:, begin:end] for row in choices.unbind()]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
