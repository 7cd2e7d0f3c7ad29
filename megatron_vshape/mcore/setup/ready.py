"""The environment of a rank, completed once its schedule has been chosen."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from typing import Any

import torch

from megatron_vshape.environment import ALLOCATOR, missing, settings, told
from megatron_vshape.mcore.refusals import BESIDE, captures_graphs
from megatron_vshape.mcore.setup.pipeline import Pipeline

logger = logging.getLogger(__name__)


def complete_environment(
    options: Any, pipeline: Pipeline, registers: bool = False
) -> frozenset[str]:
    """Set what the schedule needs and this process's environment lacks, and tell it in a line.

    `options` are Megatron's arguments or a config; `registers` says that NCCL registers buffers,
    where they do not. Once CUDA has started nothing is set, since nobody would read it: that is
    told instead. Returns the names of what is set.
    """
    sizes = options.tensor_model_parallel_size, options.context_parallel_size
    needed = settings(
        kernels=pipeline.choice.kernels,
        # Where passes run beside each other, which this order keeps them from, Megatron leaves it
        # to the user.
        ordered=max(sizes) > 1 and not getattr(options, BESIDE, False),
        graphs=captures_graphs(options),
        registers=registers or bool(getattr(options, "nccl_ub", False)),
    )
    lacking = missing(needed, os.environ)
    is_late = torch.cuda.is_initialized()
    if lacking and not is_late:
        os.environ.update({name: value for name, (value, _) in lacking.items()})
    if lacking and os.environ.get("RANK", "0") == "0":
        name = pipeline.choice.name
        if is_late:
            logger.warning(
                "CUDA had started when schedule %s was chosen, too late to set here what it needs; "
                "start the ranks with %s",
                *(name, told(lacking)),
            )
        else:
            logger.info("set in the environment for schedule %s: %s", name, told(lacking))
    return frozenset() if is_late else frozenset(lacking)


def leave_allocator(names: Collection[str]) -> None:
    """Take back what has been set so for the allocator, if CUDA has not started since."""
    of_allocator = {*ALLOCATOR, "NCCL_GRAPH_REGISTER"}.intersection(names)
    if of_allocator and not torch.cuda.is_initialized():
        for name in of_allocator:
            os.environ.pop(name, None)
        if os.environ.get("RANK", "0") == "0":
            left = ", ".join(sorted(of_allocator))
            logger.info("taken back from the environment, as NCCL registers buffers: %s", left)
