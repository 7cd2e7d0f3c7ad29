"""The environment of a rank, completed once its schedule has been chosen."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from megatron_vshape.environment import missing, settings, told
from megatron_vshape.mcore.refusals import BESIDE, captures_graphs
from megatron_vshape.mcore.setup.pipeline import Pipeline

logger = logging.getLogger(__name__)


def complete_environment(options: Any, pipeline: Pipeline) -> None:
    """Set what the schedule needs and this process's environment lacks, and tell it in a line.

    `options` are Megatron's arguments or a config. Once CUDA has started nothing is set, since
    nobody would read it: that is told instead.
    """
    sizes = options.tensor_model_parallel_size, options.context_parallel_size
    needed = settings(
        kernels=pipeline.choice.kernels,
        # Where passes run beside each other, which this order keeps them from, Megatron leaves it
        # to the user.
        ordered=max(sizes) > 1 and not getattr(options, BESIDE, False),
        graphs=captures_graphs(options),
        registers=bool(getattr(options, "nccl_ub", False)),
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
