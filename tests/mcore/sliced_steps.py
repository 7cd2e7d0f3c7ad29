"""A plugin of the farm: a step of a small GPT in 64 bits, unsliced or in slices.

Its results are losses, gradients, further losses, and the state of slices that remains after the
step. `mutant` names a fault that is injected into the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import other_trainer
import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from other_trainer import LONGEST, VOCABULARY
from sharded_sequence import _marked_norm as marked_norm
from torch import Tensor, nn

from megatron_vshape.mcore.features.slices import attention as sliced_attention
from megatron_vshape.mcore.features.slices import router as sliced_router
from megatron_vshape.mcore.features.slices import step as step_slices
from megatron_vshape.mcore.layout import multi_token
from megatron_vshape.mcore.step_state import TokenRange

MICROBATCHES = 3
CONFIG = {
    "params_dtype": torch.float64,
    "pipeline_dtype": torch.float64,
    "attention_softmax_in_fp32": False,
    "variable_seq_lengths": False,
}


class Forced(int):
    """One slice that counts as several, so that it goes their way."""

    def __gt__(self, number: int) -> bool:
        return number == 1 or int(self) > number


def stale(storage: Any, part: TokenRange, local_tensors: Any) -> Any:
    """Leave keys and values of all but the last slice as they were: not written."""
    if part.end == part.total:
        return PUT(storage, part, local_tensors)
    for tensor in storage.full_tensors:
        tensor.data[part.begin : part.end] = 0
    return tuple(tensor.data[: part.end] for tensor in storage.full_tensors)


def lost(storage: Any, part: TokenRange, gradients: Any) -> Any:
    """Free the state that a slice keeps for later ones."""
    storage.gradients = []
    return ADD(storage, part, gradients)


def early(storage: Any, part: TokenRange, gradients: Any) -> Any:
    """Free the state that earlier slices need with the B of the last."""
    result = ADD(storage, part, gradients)
    for tensor in storage.full_tensors:
        tensor.data.fill_(7.0)
    return result


@classmethod  # type: ignore[misc]
def out_of_turn(cls: type[TokenRange], number: int, slices: int, length: int) -> TokenRange:
    """Run the slices of a microbatch from the last to the first."""
    part = PART(number, slices, length)
    begin = part.total - part.end
    return TokenRange(part.microbatch, begin, begin + part.end - part.begin, part.total)


def apart_again(state: Any, chunks: Any) -> None:
    """Have every slice's experts be balanced by themselves."""


def looks_no_further(model: nn.Module) -> bool:
    """Make multi-token prediction see no tokens behind the end of a slice."""
    return False


PUT, ADD = sliced_attention.KeysValues.put, sliced_attention.KeysValues.add
PART = TokenRange.of_pass
MUTANTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "stale": (sliced_attention.KeysValues, "put", stale),
    "lost": (sliced_attention.KeysValues, "add", lost),
    "early": (sliced_attention.KeysValues, "add", early),
    "out of turn": (TokenRange, "of_pass", out_of_turn),
    "balanced apart": (sliced_router, "balance_full_microbatches", apart_again),
    "tokens apart": (step_slices, "looks_ahead", looks_no_further),
}


def batches(case: dict[str, Any]) -> Iterator[tuple[Tensor, ...]]:
    """Yield tokens, labels, and which of them count: of a ragged mask more in some microbatches."""
    for index in range(MICROBATCHES):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (2, LONGEST + 1), generator=generator)
        share = 0.3 + 0.3 * index if case.get("ragged") else 1.0
        mask = torch.rand(2, LONGEST, generator=generator) < share
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask.double()


def forward_step(case: dict[str, Any], data: Any, model: nn.Module) -> Any:
    """Run a microbatch."""
    tokens, labels, mask = next(data)
    positions = torch.arange(LONGEST)[None].expand_as(tokens).contiguous()
    attention_mask = other_trainer.causal_mask(LONGEST) if case.get("mask") else None
    counted = {"loss_mask": mask} if case.get("ragged") else {}
    output = model(tokens, positions, attention_mask, labels=labels, **counted)

    def loss_of(losses: Tensor) -> Any:
        total, count = (losses * mask).sum(), mask.sum()
        report = {"loss": (total / count).detach()}
        if case["config"].get("calculate_per_token_loss"):
            return total, count.int(), report
        return total / count, report

    return output, loss_of


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Run a step."""
    _, model = other_trainer.set_up("verl", case, case.get("tensor", 1))
    for chunk in model:
        chunk.zero_grad_buffer()
    data, run = [batches(case) for _ in model], partial(forward_step, case)
    reports = other_trainer.run_step(run, data, model, MICROBATCHES, LONGEST, size=2)
    return {
        "losses": [report["loss"].item() for report in reports],
        "gradients": other_trainer.gradients_of(model),
        "tensor_rank": mpu.get_tensor_model_parallel_rank(),
        "balance": balance(),
        "kept": count_buffers(model) if case["schedule"] else 0,
    }


def balance() -> dict[str, Tensor]:
    """Return further losses of this rank by layer: load balance and multi-token prediction."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ModuleNotFoundError:  # before 0.18
        metrics = moe_utils.get_moe_layer_wise_logging_tracker()
        values = {name: metric["values"] for name, metric in metrics.items()}
    else:
        values = {
            name: metric.values for name, metric in get_moe_metrics_tracker()._metrics.items()
        }
    return values | multi_token.take_metrics()


def count_buffers(model: list[nn.Module]) -> int:
    """Return how many buffers of keys and values the layers have left."""
    cores = [
        layer for chunk in model for layer in chunk.modules() if hasattr(layer, "core_attention")
    ]
    cells = [cell for layer in cores for cell in layer.core_attention.forward.__closure__]
    dicts = [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, dict)]
    routers = [layer for chunk in model for layer in chunk.modules() if hasattr(layer, "routing")]
    for router in routers:
        cells_of_loss = (cell.cell_contents for cell in router._apply_aux_loss.__closure__ or ())
        dicts += [
            cell.loads for cell in cells_of_loss if isinstance(cell, sliced_router._RouterLoss)
        ]
    return sum(map(len, dicts))


def start(rank: int, case: dict[str, Any]) -> NoReturn:
    """Run the step, and end the process."""
    if "mutant" in case:
        owner, name, replacement = MUTANTS[case["mutant"]]
        setattr(owner, name, replacement)
    if case.get("tensor", 1) > 1:  # torch's norm rejects a sharded sequence for an attribute only
        WrappedTorchNorm.__new__ = marked_norm
        case["config"]["sequence_parallel"] = True
    if case["options"].get("slices") == 1:
        case["options"]["slices"] = Forced(1)
    if "window_size" in case["config"]:
        case["config"]["window_size"] = tuple(case["config"]["window_size"])
    case["config"] |= CONFIG
    other_trainer.starts(train)(rank, case)
