"""Steps of a small GPT in 64 bits, unsliced and in slices; prints a JSON line for each case.

`start` is a plugin of the farm for one rank. It gets the cases by name, as in {"mine":
{"schedule": "v-zb", "slices": 4}}.

Every case runs on forked ranks: by Megatron without a pipeline (once for each model), by Megatron's
1F1B, and by this package. The output has the differences of losses and gradients relative to the
largest value, and the state of slices that remains after the step; for a failed case, the reason.
"""

from __future__ import annotations

import json
import os
import random
import socket
import traceback
from collections.abc import Callable, Iterator
from tempfile import mkdtemp
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from other_trainer import fill, names_of, unwrapped
from sharded_sequence import _marked_norm as marked_norm
from torch import Tensor, nn

import megatron_vshape
from megatron_vshape.mcore.features.slices import attention as sliced_attention
from megatron_vshape.mcore.features.slices import router as sliced_router
from megatron_vshape.mcore.features.slices import step as step_slices
from megatron_vshape.mcore.layout import multi_token
from megatron_vshape.mcore.step_state import TokenRange

LENGTH, VOCABULARY, HIDDEN = 24, 64, 32
MICROBATCHES = 3


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
        tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator)
        share = 0.3 + 0.3 * index if case.get("ragged") else 1.0
        mask = torch.rand(2, LENGTH, generator=generator) < share
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask.double()


def forward_step(case: dict[str, Any], data: Any, model: nn.Module) -> Any:
    """Run a microbatch."""
    tokens, labels, mask = next(data)
    positions = torch.arange(LENGTH)[None].expand_as(tokens).contiguous()
    attention_mask = (
        torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1) if case.get("mask") else None
    )
    counted = {"loss_mask": mask} if case.get("ragged") else {}
    output = model(tokens, positions, attention_mask, labels=labels, **counted)

    def loss_of(losses: Tensor) -> Any:
        total, count = (losses * mask).sum(), mask.sum()
        report = {"loss": (total / count).detach()}
        if case.get("per_token"):
            return total, count.int(), report
        return total / count, report

    return output, loss_of


def build(case: dict[str, Any], config: Any) -> list[nn.Module]:
    chunks = config.virtual_pipeline_model_parallel_size or 1
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=False)
    wrapped_chunks = []
    for chunk in range(chunks):
        where = chunk if chunks > 1 else None
        ends = {
            "pre_process": mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=where),
            "post_process": mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=where),
            "vp_stage": where,
        }
        layer, mtp_spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts), None
        if config.mtp_num_layers:
            mtp_spec = get_gpt_mtp_block_spec(config, layer, False, where)
        model = GPTModel(
            config,
            layer,
            VOCABULARY,
            LENGTH,
            position_embedding_type=case.get("position", "rope"),
            share_embeddings_and_output_weights=False,
            mtp_block_spec=mtp_spec,
            **ends,
        ).double()
        fill(model)
        wrapped_chunks.append(
            DistributedDataParallel(config, ddp, model, disable_bucketing=bool(chunk))
        )
    return wrapped_chunks


def step(case: dict[str, Any], ranks: int, is_package: bool) -> dict[str, Any]:
    """Return the losses and the gradients of a step, and the remaining state of slices."""
    slices = Forced(1) if case["slices"] == 1 else case["slices"]
    if is_package and "mutant" in case:
        owner, name, stand_in = MUTANTS[case["mutant"]]
        setattr(owner, name, stand_in)
    if is_package:
        megatron_vshape.register(schedule=case["schedule"], slices=slices)
    tensor = case.get("tensor", 1)
    if tensor > 1:  # torch's norm rejects a sharded sequence, and no other code needs the attribute
        WrappedTorchNorm.__new__ = marked_norm
    config = TransformerConfig(
        num_layers=case.get("layers", 4),
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_query_groups=case.get("groups"),
        tensor_model_parallel_size=tensor,
        sequence_parallel=tensor > 1,
        pipeline_model_parallel_size=ranks // tensor,
        window_size=tuple(case["window"]) if "window" in case else None,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        calculate_per_token_loss=case.get("per_token", False),
        use_cpu_initialization=True,
        mtp_num_layers=case.get("predicting"),
        **case.get("recompute", {}),
        **case.get("experts", {}),
    )
    chunks = config.virtual_pipeline_model_parallel_size
    mpu.initialize_model_parallel(tensor, ranks // tensor, chunks)
    model_parallel_cuda_manual_seed(1)
    model = build(case, config)
    config.finalize_model_grads_func = finalize_model_grads
    for chunk in model:
        chunk.zero_grad_buffer()
    reports = get_forward_backward_func()(
        forward_step_func=lambda data, model: forward_step(case, data, model),
        data_iterator=[batches(case) for _ in model] if len(model) > 1 else batches(case),
        model=model if len(model) > 1 else model[0],
        num_microbatches=MICROBATCHES,
        seq_length=LENGTH,
        micro_batch_size=2,
        forward_only=False,
    )
    names = (pair for chunk in model for pair in names_of(unwrapped(chunk)))
    rank = mpu.get_tensor_model_parallel_rank()
    return {
        "gradients": {(name, rank): parameter.main_grad.clone() for name, parameter in names},
        "losses": [report["loss"].item() for report in reports],
        "balance": balance(),
        "kept": left(model) if is_package else 0,
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


def left(model: list[nn.Module]) -> int:
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


def run(case: dict[str, Any], ranks: int, is_package: bool) -> list[dict[str, Any]]:
    """Return the results of forked ranks."""
    folder, port, children = mkdtemp(), _free_port(), []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            _become(rank, ranks, port, f"{folder}/{rank}", lambda: step(case, ranks, is_package))
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(ranks)]


def _become(rank: int, ranks: int, port: int, path: str, work: Callable[[], Any]) -> None:
    try:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        result = work()
    except BaseException:
        result = {"error": traceback.format_exc()[-2000:]}
    torch.save(result, path)
    os._exit(0)


def _free_port() -> int:
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as free:
            if free.connect_ex(("127.0.0.1", port)):
                return port


def apart(
    package_ranks: list[dict[str, Any]], megatron_ranks: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return by how much gradients and losses differ, as shares of the largest; or an error."""
    errors = [result["error"] for result in (*package_ranks, *megatron_ranks) if "error" in result]
    if errors:
        return {"error": errors[0]}
    mine: dict[Any, Tensor] = {}
    yours: dict[Any, Tensor] = {}
    for gradients, runs in ((mine, package_ranks), (yours, megatron_ranks)):
        for result in runs:
            gradients.update(result["gradients"])
    assert mine.keys() == yours.keys()
    largest = max(float(gradient.abs().max()) for gradient in yours.values())
    pairs = [(float((mine[key] - yours[key]).abs().max()), key) for key in yours]
    losses = [
        next(result["losses"] for result in run if result["losses"])
        for run in (package_ranks, megatron_ranks)
    ]
    return {
        "gradients": max(pairs)[0] / largest,
        "losses": max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True)),
        "balance": balance_apart(package_ranks, megatron_ranks),
        "kept": sum(result["kept"] for result in package_ranks),
    }


def balance_apart(
    package_ranks: list[dict[str, Any]], megatron_ranks: list[dict[str, Any]]
) -> float:
    """Return the relative differences of the further losses."""
    totals: list[dict[str, Tensor]] = [{}, {}]
    for total, run in zip(totals, (package_ranks, megatron_ranks), strict=True):
        for result in run:
            for name, values in result["balance"].items():
                total[name] = total.get(name, 0) + values
    assert totals[0].keys() == totals[1].keys()
    pairs = [(totals[0][name], totals[1][name]) for name in totals[0]]
    shares = (((mine - yours).abs() / yours.abs().clamp(min=1e-3)).max() for mine, yours in pairs)
    return max(map(float, shares), default=0.0)


def start(rank: int, cases: dict[str, dict[str, Any]]) -> NoReturn:
    """Run the cases and end the process."""
    megatron_vshape.unregister()
    baselines: dict[str, list[dict[str, Any]]] = {}
    package_keys = ("schedule", "slices", "mutant")
    for name, case in cases.items():
        model = {key: value for key, value in case.items() if key not in package_keys}
        tensor, ranks = case.get("tensor", 1), case.get("ranks", 2)
        package_ranks = run(case, ranks * tensor, True)
        figures: dict[str, Any] = {"case": name}
        for against, count in (("whole", tensor), ("1f1b", ranks * tensor)):
            key = f"{json.dumps(model)} {count}"
            if key not in baselines:
                baselines[key] = run({"slices": 1, **model}, count, False)
            figures[against] = apart(package_ranks, baselines[key])
        print(json.dumps(figures), flush=True)
    os._exit(0)
