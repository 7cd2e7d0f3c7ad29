"""A plugin of the farm: steps with random numbers of microbatches of random lengths.

As dynamic batches make them in reinforcement learning: every tenth step evaluates, with one
microbatch or four.
"""

from __future__ import annotations

import gc
import random
import weakref
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import other_trainer
import torch
import torch.distributed as dist
from live_bytes import LiveBytes
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes

MOST = 9
"""Maximum microbatches of a step; the first steps have every number up to it once."""


def steps(number: int) -> list[tuple[int, list[int], bool]]:
    """Draw count, lengths and whether it evaluates, for each of `number` steps."""
    draw = random.Random(61)
    counts = [*range(1, MOST + 1), *(draw.randint(1, MOST) for _ in range(MOST, number))]
    counts[9::20], counts[19::20] = [1] * len(counts[9::20]), [4] * len(counts[19::20])
    return [
        (count, [draw.randint(3, other_trainer.LONGEST) for _ in range(count)], at % 10 == 9)
        for at, count in enumerate(counts)
    ]


def in_use() -> dict[str, int]:
    """Count the objects, the tensors and the process groups of this rank."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    return {
        "objects": len(gc.get_objects()),
        "tensors": len(tensors),
        "bytes": sum(each.nbytes for each in tensors),
        "groups": len(distributed_c10d._world.pg_map),
    }


def noted(batches: Iterator[dict[str, Tensor]], seen: list[Any]) -> Iterator[dict[str, Tensor]]:
    """Yield microbatches, and add a weak reference to each of their tensors to `seen`."""
    for batch in batches:
        seen.extend(map(weakref.ref, batch.values()))
        yield batch


@contextmanager
def offloaded(model: list[Any]) -> Iterator[None]:
    """Free the storages of parameters and gradients, as verl and NeMo-RL do while they generate."""
    buffers = [each for chunk in model for each in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    data = [each for buffer in buffers for each in (buffer.param_data, buffer.grad_data)]
    storages = [each.untyped_storage() for each in data if each is not None]
    RotaryEmbedding.forward.cache_clear()  # one per chunk, which NeMo-RL clears as well
    with _disable_current_modes():  # host memory is not counted
        copies = [torch.UntypedStorage(each.nbytes()).copy_(each) for each in storages]
    for each in storages:
        each.resize_(0)
    yield
    for each, copy in zip(storages, copies, strict=True):
        each.resize_(copy.nbytes())
        each.copy_(copy)


def train(given: dict[str, Any]) -> dict[str, Any]:
    """Run the steps with a count of every tensor's bytes; see `_train`."""
    with LiveBytes() as live:
        return _train(given, live)


def _train(given: dict[str, Any], live: LiveBytes) -> dict[str, Any]:
    """Run the steps; return losses, and what is in use when a half of them and all have run.

    `between` has the bytes at the end of each step that an inference engine on this GPU cannot use.
    """
    ranks, number = dist.get_world_size(), given["steps"]
    mpu.initialize_model_parallel(1, ranks)
    config = other_trainer.make_config("verl", ranks, given)
    model_parallel_cuda_manual_seed(1)
    model = other_trainer.make_model("verl", config, given)
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1), model)
    losses, used, kept, between = array("d"), [], 0, []
    for at, (count, lengths, evaluates) in enumerate(given.get("drawn") or steps(number)):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        collected: list[float] = []
        seen: list[Any] = []
        returned = get_forward_backward_func()(
            forward_step_func=partial(other_trainer.forward, "verl", collected),
            data_iterator=[
                noted(iter([*other_trainer.batches(at, count, lengths)]), seen) for _ in model
            ],
            model=model,
            num_microbatches=count,
            seq_length=1,
            micro_batch_size=1,
            forward_only=evaluates,
        )
        losses.extend(other_trainer.by_rank(returned, collected) or ())
        if not evaluates:
            optimizer.step()
        del returned, collected
        kept += sum(each() is not None for each in seen)
        with offloaded(model):
            between.append(live.count())
        if at + 1 in (max(number // 2, 20), number):
            used.append(in_use())
    found = {"losses": losses.tolist(), "used": used, "kept": kept, "between": between}
    return found | {"chunks": len(model)}


start = other_trainer.starts(train)
