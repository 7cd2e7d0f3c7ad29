"""Fails in the middle of a step and restarts in the same process, as Megatron's wrapper does.

This repeats the calls of megatron/training/inprocess_restart.py to nvidia_resiliency_ext in order:
`pretrain` fails on one rank, every process group is destroyed while the other ranks use it,
Megatron's globals are destroyed, and `pretrain` is called again with the same arguments.
"""

from __future__ import annotations

import copy
import gc
import os
import threading
import time
from typing import Any

import megatron.training
import recorder
import torch.distributed as dist
from megatron.core import rerun_state_machine
from megatron.training import arguments, global_vars, training

from megatron_vshape.core.model.passes import Pass
from megatron_vshape.mcore.hooks.session import Session
from megatron_vshape.mcore.step.forward_backward import PipelineRunner
from megatron_vshape.mcore.step.stage import MegatronStage
from megatron_vshape.runtime.p2p import Transport

PATIENCE_S = 60


class FailedOnPurposeError(RuntimeError):
    """The error that one rank raises in a pass."""


def fail_once(name: str, step: int) -> None:
    """Have the rank of a B fail in it, in one step (from 1) of this process."""
    _, stage, microbatch = Pass.parse(name)
    original, calls = MegatronStage.backward_inputs, []

    def run(self: MegatronStage, number: int, *args: Any) -> Any:
        if (self.stage, number) == (stage, microbatch):
            calls.append(number)
            if len(calls) == step:
                raise FailedOnPurposeError(name)
        return original(self, number, *args)

    MegatronStage.backward_inputs = run  # type: ignore[method-assign]


def left_over() -> list[str]:
    """Return the remaining objects of a finished run, except those of the recorder."""
    gc.unfreeze()  # objects from before the fork, such as the session
    for candidate in gc.get_objects():
        if isinstance(candidate, recorder.Records):
            candidate._model, candidate._optimizer = [], None
    gc.collect()
    leftovers = [
        type(candidate).__name__
        for candidate in gc.get_objects()
        if isinstance(candidate, PipelineRunner | Transport | training.DDP)
    ]
    leftovers += [
        thread.name for thread in threading.enumerate() if thread.name.startswith("sends to")
    ]
    (session,) = [candidate for candidate in gc.get_objects() if isinstance(candidate, Session)]
    state = session.step
    leftovers += ["jobs"] * len(state.jobs._buckets)
    parts = (session.training.runner, session.build.optimizer, session.training.iteration_log)
    parts += (state.running_chunk, state.tracker, state.late_checks, state.gradient_sync)
    leftovers += [type(part).__name__ for part in parts if part is not None]
    return leftovers


def start(rank: int, settings: dict[str, Any]) -> None:
    """Wrap `pretrain`."""
    fail_once(settings["fails"], settings["step"])
    pretrain = megatron.training.pretrain
    parses_inside = not hasattr(arguments, "parse_and_validate_args")  # 0.17

    def twice(*args: Any, **options: Any) -> None:
        saved_args = None if parses_inside else copy.deepcopy(global_vars.get_args())
        try:
            pretrain(*args, **options)
        except Exception as error:
            print(f"the first try ended: {type(error).__name__}")
        else:
            raise RuntimeError("the first try did not fail")
        for group in list(dist.distributed_c10d._world.pg_map):
            group.abort()
        dist.destroy_process_group()
        training.destroy_global_state()
        rerun_state_machine.destroy_rerun_state_machine()
        deadline = time.monotonic() + PATIENCE_S
        while leftovers := left_over():
            if time.monotonic() > deadline:
                raise RuntimeError(f"of the first try there is still {leftovers}")
            time.sleep(0.1)
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        if saved_args is not None:
            global_vars.set_global_variables(saved_args)  # Megatron's wrapper leaves that out
        print("the second try begins")
        pretrain(*args, **options)

    megatron.training.pretrain = twice
