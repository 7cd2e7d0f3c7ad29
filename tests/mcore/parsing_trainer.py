"""A trainer shaped like slime's: Megatron's parser and `get_model`, and a different step.

Arguments are validated in one process and used for training in others, or all in one. Process
groups are created without Megatron-LM's `initialize`, the loss function computes the loss from
logits, every stage gets every batch, and microbatches have variable length. All functions of
Megatron are imported by name before a schedule is registered.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.utils import get_model_config
from megatron.training.arguments import (
    core_transformer_config_from_args,
    parse_args,
    validate_args,
)
from megatron.training.global_vars import set_args
from megatron.training.training import get_model
from other_trainer import batches, causal_mask, fill, finish, named_parameters
from torch.nn import functional

import megatron_vshape


def provide(args: Any, pre_process: bool, post_process: bool, **options: Any) -> GPTModel:
    """Return a chunk."""
    model = GPTModel(
        core_transformer_config_from_args(args),
        get_gpt_layer_local_spec(),
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type="rope",
        vp_stage=options.get("vp_stage"),
    )
    fill(model)
    return model


def forward(data: Any, model: Any) -> tuple[Any, Any]:
    """Run a microbatch."""
    batch = next(data)
    length = batch["tokens"].shape[1]
    positions = torch.arange(length).unsqueeze(0)
    output = model(batch["tokens"], positions, causal_mask(length), labels=None)

    def loss_of(logits: Any) -> tuple[Any, Any, dict[str, Any]]:
        loss = functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())
        return loss, torch.tensor(1), {"loss": loss.detach()}

    return output, loss_of


def train(args: Any) -> dict[str, Any]:
    """Return the results of this rank for three steps with these validated arguments."""
    set_args(args)
    dist.init_process_group("gloo")
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
    )
    model_parallel_cuda_manual_seed(1)
    sizes = args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    init_num_microbatches_calculator(args.rank, None, *sizes, False)
    model = get_model(partial(provide, args), ModelType.encoder_or_decoder)
    settings = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, model)
    config = get_model_config(model[0])
    config.finalize_model_grads_func = finalize_model_grads
    losses, norms = [], []
    for step, count in enumerate((8, 4, 6)):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        number = step + 10 * mpu.get_data_parallel_rank()
        reports = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[batches(number, count, [24, 7, 16]) for _ in model],
            model=model,
            num_microbatches=count,
            seq_length=args.seq_length,
            micro_batch_size=1,
            decoder_seq_length=args.decoder_seq_length,
            forward_only=False,
        )
        norms.append(float(optimizer.step()[1]))
        if mpu.is_pipeline_last_stage(ignore_virtual=True):
            losses.append([loss_dict["loss"].item() for loss_dict in reports])
    parameters = {name: value.detach().clone() for name, value in named_parameters(model)}
    return {"losses": losses, "norms": norms, "parameters": parameters, "chunks": len(model)}


def start(rank: int, argument: dict[str, Any]) -> None:
    """Run it in a rank of the farm, and end it."""
    megatron_vshape.unregister()
    if argument["schedule"] is not None:
        megatron_vshape.register(**argument["options"])
    args = parse_args(ignore_unknown_args=True)
    args.padded_vocab_size = 128
    validate_args(args)
    args.variable_seq_lengths = True
    args.moe_token_dispatcher_type = "alltoall"  # which alone allows other lengths
    if argument["apart"]:  # now in the process of a worker, which is given the arguments
        megatron_vshape.unregister()
        megatron_vshape.register(**argument["options"])
    finish(train(args))
