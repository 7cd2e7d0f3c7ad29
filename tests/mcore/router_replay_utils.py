"""Recorded expert choices sorted and gathered as in verl, for Megatron's schedules."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from torch import Tensor


def sorted_by_chunk(records: list[Tensor], count: int, chunks: int) -> Tensor:
    """Sort [1, s, layers, topk] of every forward call; return the choices of all microbatches."""
    by_chunk: list[list[Tensor]] = [[] for _ in range(chunks)]
    group = mpu.get_pipeline_model_parallel_world_size()
    for index, (_, chunk) in enumerate(get_schedule_table(count, chunks, group)):
        by_chunk[chunk].append(records[index])
    return torch.cat([torch.cat(chunk_records) for chunk_records in by_chunk], dim=2)


def pp_gather(local_layers_router_map: Tensor, tf_config: Any) -> Tensor:
    """Gather the layers of all ranks, as Megatron's interleaved schedule places them."""
    group = mpu.get_pipeline_model_parallel_group()
    everyones: list[Any] = [None] * group.size()
    dist.all_gather_object(everyones, local_layers_router_map, group=group)
    chunks = tf_config.virtual_pipeline_model_parallel_size or 1
    pieces = [rank_map.chunk(chunks, dim=2) for rank_map in everyones]
    return torch.cat(
        [pieces[rank][chunk] for chunk in range(chunks) for rank in range(len(pieces))], 2
    )
