"""Run a function on several ranks of a farm; also the plugin that does so on each of them."""

from __future__ import annotations

import base64
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from mcore.farm import Farm

import megatron_vshape


def run_ranks(
    farm: Farm, num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 50
) -> list[Any]:
    """Return `function(rank, *args)` of every rank, in rank order, like `runtime.ranks`.

    The farm has imported Megatron in the CPU mode, which takes most of the time of such a test.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = base64.b64encode(pickle.dumps((function, args))).decode()
        given = {"call": call, "folder": folder}
        farm.run(num_ranks, plugin=Path(__file__), given=given, timeout_s=timeout_s).check()
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(num_ranks)]


def start(rank: int, given: dict[str, str]) -> NoReturn:
    """Run the function without this package's hooks, and end the process."""
    megatron_vshape.unregister()
    dist.init_process_group("gloo")
    function, args = pickle.loads(base64.b64decode(given["call"]))
    Path(given["folder"], str(rank)).write_bytes(pickle.dumps(function(rank, *args)))
    os._exit(0)
