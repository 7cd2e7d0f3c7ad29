"""Recorded expert choices of libraries: their order, and how the layers of ranks are joined.

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
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_vshape.mcore.hooks.session import Session
from megatron_vshape.mcore.layout.stage_map import StageMap
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.step.forward_backward import PipelineRunner

LIBRARY = "router_replay_utils"
"""Last part of the module names of verl's and ROLL's functions."""


def schedule_table(
    session: Session, num_microbatches: int, num_chunks: int
) -> list[tuple[int, int]]:
    """Return (microbatch, chunk) of every forward call of the last step.

    Raises:
        UnsupportedError: that step had other calls, or its microbatches were reordered; or a stage
            has no layers, and so no records.
    """
    layers = session.pipeline.stage_map.layers if session.pipeline is not None else ()
    empty = [str(stage) for stage, count in enumerate(layers) if not count]
    if empty:
        raise UnsupportedError(
            f"recorded router replay needs expert choices of every stage, and stages "
            f"{', '.join(empty)} of layer split {','.join(map(str, layers))} have no layers: give "
            "--pipeline-layer-split with at least one layer per stage"
        )
    runner = session.runner
    calls = runner.calls if isinstance(runner, PipelineRunner) else None
    if calls is None or len(calls.ended) != num_microbatches * num_chunks:
        raise UnsupportedError(
            f"get_schedule_table is asked for {num_microbatches} microbatches and {num_chunks} "
            f"chunks, and the last step had {len(calls.ended) if calls else 0} forward calls: it "
            "is known for the last step alone. Sort recorded expert choices after each step"
        )
    if calls.order is not None:
        raise UnsupportedError(
            "recorded router replay does not support reordered microbatches, as libraries take "
            "records for ascending ones. Add --pipeline-keep-order"
        )
    return calls.ended


def gather_by_placement(session: Session) -> None:
    """Have loaded libraries gather recorded choices by the placement of the schedule."""
    for module in list(sys.modules.values()):
        found = vars(module).get("pp_gather") if inspect.ismodule(module) else None
        if not inspect.isfunction(found) or hasattr(found, "__wrapped__"):
            continue
        if found.__module__.rpartition(".")[2] == LIBRARY:
            session.replaced.put(module, "pp_gather", _gathers(session, found))


def _gathers(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a library's function that gathers [b, s, local layers, topk] from all ranks."""

    @functools.wraps(original)
    def pp_gather(local_layers_router_map: Tensor, tf_config: Any, *args: Any) -> Any:
        pipeline = session.pipeline
        if pipeline is None or pipeline.stage_map.num_chunks == 1:
            return original(local_layers_router_map, tf_config, *args)
        return gathered(local_layers_router_map, tf_config, pipeline.stage_map)

    return pp_gather


def gathered(own: Tensor, config: Any, stage_map: StageMap) -> Tensor:
    """Gather the expert choices of all layers on the CPU, in the order of the layers.

    `own` has those of this rank's MoE layers, [b, s, layers, topk] or nested, chunk after chunk.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, own.cpu(), group=group)
    counts = moe_layers_of_stages(config, stage_map.layers)
    by_stage: dict[int, Tensor] = {}
    for rank, found in enumerate(everyones):
        stages = stage_map.stages(rank)
        ends = [0, *accumulate(counts[stage] for stage in stages)]
        for stage, (begin, end) in zip(stages, pairwise(ends), strict=True):
            by_stage[stage] = _layers(found, begin, end)
    return torch.cat([by_stage[stage] for stage in sorted(by_stage)], dim=2)


def moe_layers_of_stages(config: Any, layers: Sequence[int]) -> list[int]:
    """Count the MoE layers of every stage by Megatron's `moe_layer_freq`."""
    frequency = config.moe_layer_freq
    ends = [0, *accumulate(layers)]
    has_experts = (
        [not at % frequency for at in range(ends[-1])]
        if isinstance(frequency, int)
        else [bool(each) for each in frequency]
    )
    return [sum(has_experts[begin:end]) for begin, end in pairwise(ends)]


def _layers(choices: Tensor, begin: int, end: int) -> Tensor:
    if not choices.is_nested:
        return choices[:, :, begin:end]
    rows = [row[:, begin:end] for row in choices.unbind()]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
