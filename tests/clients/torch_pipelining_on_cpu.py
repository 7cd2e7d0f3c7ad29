"""A training step of a tiny Llama in torchtitan and NeMo Automodel, with any schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from forked import run_cases
from nemo_automodel.components.distributed.pipelining import AutoPipeline
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_vshape import make
from megatron_vshape.core.program.lowering import with_full_backwards
from megatron_vshape.core.program.torch_file import find_torch_name, to_torch_csv

MICROBATCHES, LENGTH, LAYERS, VOCABULARY = 8, 16, 14, 2048


def loss_of(logits: Any, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build_automodel(mesh: DeviceMesh, name: str, file: str | None) -> Any:
    """Return schedule, parts, and whether they have the first and the last stage."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        use_cache=False,
    )
    pipeline = AutoPipeline(
        world_mesh=mesh,
        dp_axis_names=(),
        pp_schedule=name,
        pp_schedule_csv=file,
        pp_microbatch_size=1,
        pp_batch_size=MICROBATCHES,
        device=torch.device("cpu"),
    ).build(LlamaForCausalLM(config), loss_fn=loss_of)
    info = pipeline.info
    return info.schedule, info.model_parts, info.has_first_stage, info.has_last_stage


def build_torchtitan(mesh: DeviceMesh, name: str, file: str | None) -> Any:
    """Return the pipeline of pipeline_llm."""
    config = model_registry("debugmodel").model
    for layer in config.layers:  # the default attention needs kernels of a GPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = dataclasses.replace(config, layers=[*config.layers * 3][:LAYERS])
    model = config.build()
    model.init_states()
    training = TrainingConfig(local_batch_size=MICROBATCHES, seq_len=LENGTH)
    return pipeline_llm(
        model,
        parallel_dims=SimpleNamespace(pp=mesh.size(), get_mesh=lambda axis: mesh["pp"]),
        training=training,
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=mesh.size(),
            pipeline_parallel_schedule=name,
            pipeline_parallel_schedule_csv=file,
        ),
        compile_config=None,
        ac_config=None,
        dump_folder="",
        device=torch.device("cpu"),
        model_config=config,
        parallelize_fn=lambda model, **_: model,
        loss_fn=lambda logits, labels: (loss_of(logits, labels), None),
    )


BUILDERS: dict[str, Callable[..., Any]] = {
    "automodel": build_automodel,
    "torchtitan": build_torchtitan,
}


def main(case: SimpleNamespace) -> dict[str, Any]:
    """Train a step; return losses and gradients of all ranks."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    name, file = "1F1B", None
    if case.made is not None:
        schedule = make(case.made, mesh.size(), MICROBATCHES)
        if case.full_backward:
            schedule = with_full_backwards(schedule)
        name = find_torch_name(schedule.placement, mesh.size())
        file = f"{case.folder}/{dist.get_rank()}.csv"
        with open(file, "w") as stream:
            stream.write(to_torch_csv(schedule))
    schedule, parts, has_first, has_last = BUILDERS[case.framework](mesh, name, file)
    tokens = torch.arange(MICROBATCHES * (LENGTH + 1)).mul(7919).remainder(VOCABULARY)
    tokens = tokens.view(MICROBATCHES, LENGTH + 1)
    losses: list[Tensor] | None = [] if has_last else None
    schedule.step(
        *([tokens[:, :-1]] if has_first else []),
        target=tokens[:, 1:] if has_last else None,
        losses=losses,
    )
    local = {name: p.grad for part in parts for name, p in part.named_parameters()}
    records: list[Any] = [None] * mesh.size()
    dist.all_gather_object(records, (losses and [loss.detach() for loss in losses], local))
    gradients = {name: gradient for _, named in records for name, gradient in named.items()}
    return {
        "losses": next(losses for losses, _ in records if losses is not None),
        "gradients": dict(sorted(gradients.items())),
        "chunks": len(parts),
    }


run_cases(main, made=None, full_backward=False)
