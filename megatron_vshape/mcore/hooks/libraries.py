"""Functions of libraries that number the stages by chunk, then rank.

Router replay, weights and hybrid models: verl, ROLL and Megatron-Bridge.

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

from megatron_vshape.mcore.hook import Function, Replaced, Session, replaces
from megatron_vshape.mcore.layout.stage_map import StageMap
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.setup.configure import Pipeline
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


_ROWS = "embedding.word_embeddings.weight"


_CONVERTER = "mcore_adapter.models.converter.dist_converter"


def have_stages_found(session: Session, pipeline: Pipeline) -> None:
    """Make ROLL's mcore_adapter load the weights of the stages of this rank.

    The converter numbers stages by chunk, then rank, and treats a tied output layer as a separate
    weight. The patch applies only if mcore_adapter builds the model.
    """
    converter = getattr(sys.modules.get(_CONVERTER), "DistConverter", None)
    if converter is None or converter in session.providers:
        return
    session.providers.append(converter)
    stage_map, is_here = pipeline.stage_map, converter.is_on_this_rank

    def layer_info(self: Any, layer: int) -> tuple[int, int, int]:
        stage = next(each for each, end in enumerate(accumulate(stage_map.layers)) if layer < end)
        local = layer - sum(stage_map.layers[:stage])
        return local, stage_map.placement[stage], stage_map.chunk(stage)

    def is_first(self: Any, vp_stage: int) -> bool:
        return pipeline.ends(self.pipeline_model_parallel_rank, vp_stage)[0]

    def is_last(self: Any, vp_stage: int) -> bool:
        return pipeline.ends(self.pipeline_model_parallel_rank, vp_stage)[1]

    def is_on_this_rank(self: Any, weight_name: str, vp_stage: int | None = None) -> bool:
        # A tied output layer is the embedding itself, so only the chunk of the first stage loads
        # it.
        is_twice = stage_map.ends_meet and weight_name == _ROWS and not self.revert
        elsewhere = is_twice and not is_first(self, vp_stage or 0)
        return not elsewhere and bool(is_here(self, weight_name, vp_stage))

    session.replaced.put(converter, "_get_layer_info", layer_info)
    session.replaced.put(converter, "is_pipeline_first_stage", is_first)
    session.replaced.put(converter, "is_pipeline_last_stage", is_last)
    session.replaced.put(converter, "is_on_this_rank", is_on_this_rank)


def have_chunks_provided(session: Session, config: Any) -> None:
    """Patch a library's provider of hybrid models, which is its config, to build several chunks."""
    owner: Any = next((each for each in type(config).__mro__ if "provide" in vars(each)), None)
    if not getattr(config, "is_hybrid_model", False) or owner in (None, *session.providers):
        return
    session.providers.append(owner)
    session.replaced.put(owner, "provide", provide_hybrid(session, owner.provide))


@replaces
def provide_hybrid(
    session: Session,
    original: Function,
    config: Any,
    pre_process: bool | None = None,
    post_process: bool | None = None,
    vp_stage: int | None = None,
) -> Any:
    """Build one of several chunks with a provider that rejects virtual pipeline stages.

    Megatron-Bridge's provider rejects them, although its model supports them. The provider sees a
    config without chunks; `model_init` passes the chunk to the model's constructor.
    """
    if session.pipeline is None or vp_stage is None:
        return original(config, pre_process, post_process, vp_stage)
    session.provided_chunk = vp_stage
    try:
        with Replaced() as replaced:
            # The provider raises if the config has virtual stages.
            replaced.put(config, "virtual_pipeline_model_parallel_size", None)
            return original(config, pre_process, post_process)
    finally:
        session.provided_chunk = None
