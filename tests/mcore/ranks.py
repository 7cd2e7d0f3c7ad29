"""Run a function on several ranks of a farm; also the plugin that does so on each of them."""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from mcore.farm import Farm

import megatron_vshape


def run_ranks(
    farm: Farm, num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 50
) -> list[Any]:
    """Return `function(rank, *args)` of every rank, in rank order, like `runtime.ranks`.

    The farm has imported Megatron in the CPU mode, which takes most of the time of such a test.
    """
    call = base64.b64encode(pickle.dumps((function, args))).decode()
    return farm.run(num_ranks, plugin=__name__, argument=call, timeout_s=timeout_s).check().records


def start(rank: int, call: str) -> NoReturn:
    """Run the function without this package's hooks, and end the process."""
    megatron_vshape.unregister()
    dist.init_process_group("gloo")
    function, args = pickle.loads(base64.b64decode(call))
    torch.save(function(rank, *args), os.environ["FARM_RECORD"])
    os._exit(0)
