"""From a library's TransformerConfig to the pipeline of a run.

A library on top of Megatron-Core does not use Megatron's argument parser. The schedule options come
from `register`, and the model options from the config.
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
from megatron_vshape.mcore.setup.one_planner import RankZeroPlanner
from megatron_vshape.mcore.setup.pipeline import Pipeline, pipeline_of
from megatron_vshape.mcore.setup.plans import Planner


def prepare_config(config: Any, options: Options) -> Pipeline:
    """Return the pipeline for a TransformerConfig, and set its stages on the config.

    Called before the config checks itself. Raises as `pipeline_of`.
    """
    pipeline = pipeline_of(
        config,
        options,
        RankZeroPlanner(str(options.schedule), options.timeout_seconds),
        check=check_library,
        ties_ends=getattr(config, "share_embeddings_and_output_weights", None),
        kernels=_messages_are_kernels(),
        loss_last=True,
    )
    tell_config(config, pipeline.stage_map)
    return pipeline


def tell_config(config: Any, stage_map: StageMap) -> None:
    """Set the stages on a config; with a layout, Megatron does not compute layer counts itself."""
    config.pipeline_model_parallel_layout = StageLayout(stage_map)
    if stage_map.num_chunks > 1:
        config.virtual_pipeline_model_parallel_size = stage_map.num_chunks
        config.overlap_p2p_comm = True  # required by Megatron for chunks on two ranks


def with_messages_of_this_run(pipeline: Pipeline) -> Pipeline:
    """Update the pipeline for the P2P backend of the run, known once process groups exist."""
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
