"""Run a function on several gloo ranks, one process per rank, and return their results."""

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRELOADED = [
    *("torch", "torch.distributed", "pytest", "wandb", "pydantic"),
    *("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
]
"""Modules imported once by the server that forks the ranks: torch, and the imports of Megatron.

Megatron itself is not imported: on a CPU its first import must come after `cpu.install`.
"""


class RanksFailed(AssertionError):
    """A rank raised, died or timed out; the message contains the traceback of every rank."""


def run_ranks(num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 50):
    """Return `function(rank, *args)` of every rank, in rank order.

    Raises:
        RanksFailed: any rank did.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        processes = [
            context.Process(
                target=_rank, args=(rank, num_ranks, Path(folder) / "store", pipe, function, args)
            )
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for process, (_, pipe) in zip(processes, pipes, strict=True):
            process.start()
            pipe.close()
        try:
            return _collect([pipe for pipe, _ in pipes], processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()


def _collect(pipes: list[Connection], processes: list[Any], deadline: float) -> list[Any]:
    results, failures = [], []
    for rank, pipe in enumerate(pipes):
        try:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                failures.append(f"rank {rank} did not end in time")
                continue
            result, failure = pipe.recv()
        except EOFError:
            processes[rank].join(5)
            result, failure = None, f"it died with exit code {processes[rank].exitcode}"
        results.append(result)
        if failure is not None:
            failures.append(f"rank {rank}: {failure}")
    if failures:
        raise RanksFailed("\n".join(failures))
    for rank, process in enumerate(processes):
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode != 0:
            raise RanksFailed(f"rank {rank} ended with exit code {process.exitcode}")
    return results


def _rank(
    rank: int,
    num_ranks: int,
    store: Path,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    try:
        pipe.send((function(rank, *args), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
