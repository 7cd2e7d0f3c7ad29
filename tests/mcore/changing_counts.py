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
from live_bytes import LiveBytes
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
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
        (count, [draw.randint(3, other_trainer.LONGEST) for _ in range(count)], index % 10 == 9)
        for index, count in enumerate(counts)
    ]


def in_use() -> dict[str, int]:
    """Count the objects, the tensors and the process groups of this rank."""
    gc.collect()
    tensors = [candidate for candidate in gc.get_objects() if isinstance(candidate, torch.Tensor)]
    return {
        "objects": len(gc.get_objects()),
        "tensors": len(tensors),
        "bytes": sum(tensor.nbytes for tensor in tensors),
        "groups": len(distributed_c10d._world.pg_map),
    }


def noted(
    batches: Iterator[dict[str, Tensor]], references: list[Any]
) -> Iterator[dict[str, Tensor]]:
    """Yield microbatches, and add a weak reference to each of their tensors to `seen`."""
    for batch in batches:
        references.extend(map(weakref.ref, batch.values()))
        yield batch


@contextmanager
def offloaded(model: list[Any]) -> Iterator[None]:
    """Free the storages of parameters and gradients, as verl and NeMo-RL do while they generate."""
    buffers = [
        buffer for chunk in model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    data = [values for buffer in buffers for values in (buffer.param_data, buffer.grad_data)]
    storages = [values.untyped_storage() for values in data if values is not None]
    RotaryEmbedding.forward.cache_clear()  # one per chunk, which NeMo-RL clears as well
    with _disable_current_modes():  # host memory is not counted
        copies = [torch.UntypedStorage(storage.nbytes()).copy_(storage) for storage in storages]
    for storage in storages:
        storage.resize_(0)
    yield
    for storage, copy in zip(storages, copies, strict=True):
        storage.resize_(copy.nbytes())
        storage.copy_(copy)


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Run the steps with a count of every tensor's bytes; see `_train`."""
    with LiveBytes() as live_bytes:
        return _train(options, live_bytes)


def _train(options: dict[str, Any], live_bytes: LiveBytes) -> dict[str, Any]:
    """Run the steps; return losses, and memory in use after half of the steps and after all.

    `between` gets the bytes at the end of each step that an inference engine on this GPU cannot
    use.
    """
    number = options["steps"]
    _, model = other_trainer.set_up("verl", options)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1), model)
    losses, used, num_retained, between = array("d"), [], 0, []
    for index, (count, lengths, evaluates) in enumerate(options.get("drawn") or steps(number)):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        collected: list[float] = []
        references: list[Any] = []
        forward_step = partial(other_trainer.forward, "verl", collected)
        data = [
            noted(iter([*other_trainer.batches(index, count, lengths)]), references) for _ in model
        ]
        returned = other_trainer.run_step(forward_step, data, model, count, forward_only=evaluates)
        losses.extend(other_trainer.by_rank(returned, collected) or ())
        if not evaluates:
            optimizer.step()
        del returned, collected, forward_step, data
        num_retained += sum(reference() is not None for reference in references)
        with offloaded(model):
            between.append(live_bytes.count())
        if index + 1 in (max(number // 2, 20), number):
            used.append(in_use())
    record = {"losses": losses.tolist(), "used": used, "kept": num_retained, "between": between}
    return record | {"chunks": len(model)}


start = other_trainer.starts(train)
