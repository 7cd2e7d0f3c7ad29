"""From a library's TransformerConfig to the pipeline that runs.

A library on top of Megatron-Core has no argument parser of Megatron's. What flags say there is
given to `register`, and what Megatron's arguments say of the model stands in its config.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_vshape.mcore.layout.stage_map import StageMap
from megatron_vshape.mcore.layout.stages import StageLayout
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.refusals import check_library
from megatron_vshape.mcore.setup.one_planner import OnePlanner
from megatron_vshape.mcore.setup.pipeline import Pipeline, pipeline_of
from megatron_vshape.mcore.setup.plans import Planner


def prepare_config(config: Any, options: Options) -> Pipeline:
    """Return the pipeline for the model that this TransformerConfig describes, and tell it so.

    Called before the config checks itself. Raises as `pipeline_of`.
    """
    pipeline = pipeline_of(
        config,
        options,
        OnePlanner(str(options.schedule), options.timeout_seconds),
        check=check_library,
        ties_ends=getattr(config, "share_embeddings_and_output_weights", None),
        kernels=_messages_are_kernels(),
        loss_last=True,
    )
    tell_config(config, pipeline.stage_map)
    return pipeline


def tell_config(config: Any, stage_map: StageMap) -> None:
    """Have Megatron build these stages; it leaves the layers to a layout, also of one chunk."""
    config.pipeline_model_parallel_layout = StageLayout(stage_map)
    if stage_map.num_chunks > 1:
        config.virtual_pipeline_model_parallel_size = stage_map.num_chunks
        config.overlap_p2p_comm = True  # else Megatron allows no chunks on two ranks


def with_messages_of_this_run(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline as it is to run, now that the process groups are there."""
    choice = replace(pipeline.choice, kernels=_messages_are_kernels())
    return (
        pipeline
        if choice == pipeline.choice
        else replace(pipeline, planner=Planner(choice, pipeline.planner.once))
    )


def _messages_are_kernels() -> bool:
    if dist.is_initialized():
        return "nccl" in str(dist.get_backend())
    return torch.cuda.is_available()
