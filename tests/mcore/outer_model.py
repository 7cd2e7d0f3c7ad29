"""A trainer of vision-language models: a language model inside a model with an image encoder.

The model is built as by one of three libraries. `bridge` has a provider that passes the vp_stage
on (Megatron-Bridge's Qwen2.5-VL). `rebuilding` has a provider that does not, and builds the layers
of the language model once more (its Qwen3-VL). `mbridge` builds by a closure that drops the
vp_stage. The config of the encoder is a copy of the language model's, as in mbridge.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from other_trainer import (
    HIDDEN,
    LONGEST,
    VOCABULARY,
    DeferredConfig,
    batches,
    causal_mask,
    fill_parameters,
    make_config,
    mean_loss,
    run_step,
    starts,
)
from torch import Tensor, nn

ENCODER_LAYERS, PATCHES, PIXELS = 3, 4, 12


class LanguageModel(GPTModel):
    """A GPT that builds its layers again after Megatron's constructor."""

    def __init__(self, config: Any, layer: Any, **options: Any) -> None:
        super().__init__(config, layer, **options)
        ends = {"pre_process": self.pre_process, "post_process": self.post_process}
        stage = options.get("vp_stage")
        self.decoder = TransformerBlock(config, layer, vp_stage=stage, **ends)


class OuterModel(MegatronModule):
    """A language model, and an encoder where the caller builds the first stage."""

    def __init__(self, config: Any, kind: type, first: bool, last: bool, **chunk: Any) -> None:
        super().__init__(config)
        self.pre_process, layer = first, get_gpt_layer_local_spec()
        if first:
            encoder_config = copy.deepcopy(config)
            encoder_config.num_layers = ENCODER_LAYERS
            encoder_config.pipeline_model_parallel_size = 1
            self.patches = nn.Linear(PIXELS, HIDDEN)
            self.encoder = TransformerBlock(encoder_config, layer, **chunk)
        sizes = {"vocab_size": VOCABULARY, "max_sequence_length": LONGEST}
        ends = {"pre_process": first, "post_process": last}
        self.language_model = kind(
            config,
            layer,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            **sizes,
            **ends,
            **chunk,
        )
        self.share_embeddings_and_output_weights = False

    def set_input_tensor(self, received: Any) -> None:
        self.language_model.set_input_tensor(received)

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, labels: Any, pixels: Any
    ) -> Tensor:
        """Put the features of images [n, patches, pixels] in place of the first tokens."""
        hidden = None
        if self.pre_process:
            hidden = self.language_model.embedding(tokens, positions)
            if len(pixels):
                patches = self.patches(pixels.flatten(0, 1)).unsqueeze(1)
                visible = torch.zeros(1, 1, len(patches), len(patches)).bool()
                features = self.encoder(patches, visible)
                hidden = torch.cat([features, hidden[len(features) :]])
        return self.language_model(tokens, positions, mask, decoder_input=hidden, labels=labels)


@dataclass
class Provider(DeferredConfig):
    """A config that builds its model, as Megatron-Bridge's."""

    kind: type = GPTModel
    vocab_size: int = VOCABULARY

    def provide(self, pre_process=None, post_process=None, vp_stage=None):
        chunk = {"vp_stage": vp_stage} if self.kind is GPTModel else {}
        return OuterModel(self, self.kind, pre_process, post_process, **chunk)


def make_chunks(library: str, config: Any) -> Iterator[nn.Module]:
    """Yield the chunks of this rank, as the library builds them."""
    if library == "mbridge":
        chunks = mpu.get_virtual_pipeline_model_parallel_world_size()
        for index in range(chunks or 1):
            query = {"ignore_virtual": False, "vp_stage": index if chunks else None}
            first, last = mpu.is_pipeline_first_stage(**query), mpu.is_pipeline_last_stage(**query)
            yield OuterModel(config, GPTModel, first, last)
        return
    group = mpu.get_pipeline_model_parallel_group()
    chunks = config.virtual_pipeline_model_parallel_size
    for index in range(chunks or 1):
        stage = index if chunks else None
        first = is_vp_first_stage(stage, chunks) and is_pp_first_stage(group)
        last = is_vp_last_stage(stage, chunks) and is_pp_last_stage(group)
        yield config.provide(first, last, vp_stage=stage)


def names_of(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a chunk by their names in the full model."""
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if name.startswith("language_model.decoder.layers."):
            parts[3] = str(model.language_model.decoder.layers[int(parts[3])].layer_number)
        yield ".".join(parts), parameter


def forward(counts: list[int], data: Any, model: nn.Module) -> tuple[Tensor, Any]:
    """Run a microbatch; only the first stage gets images, only the last labels."""
    index, batch = next(data)
    group = mpu.get_pipeline_model_parallel_group()
    tokens = batch["tokens"]
    positions = torch.arange(tokens.shape[1]).unsqueeze(0)
    pixels = None
    if is_pp_first_stage(group):
        size = counts[index % len(counts)], PATCHES, PIXELS
        pixels = torch.randn(size, generator=torch.Generator().manual_seed(index))
    labels = batch["labels"] if is_pp_last_stage(group) else None
    output = model(tokens, positions, causal_mask(tokens.shape[1]), labels, pixels)
    return output, mean_loss


def train(trainer_options: dict[str, Any]) -> dict[str, Any]:
    """Return losses and gradients of two steps, and the built layers of the encoder."""
    library, ranks = trainer_options["library"], dist.get_world_size()
    sizes = trainer_options.get("config", {})
    if library == "mbridge":
        mpu.initialize_model_parallel(1, ranks)
        config = make_config("verl", ranks, {"config": sizes | {"variable_seq_lengths": False}})
    else:
        kind = LanguageModel if library == "rebuilding" else GPTModel
        config = make_config("bridge", ranks, {"provider": Provider, "config": sizes})
        config.kind = kind
        mpu.initialize_model_parallel(1, ranks, config.virtual_pipeline_model_parallel_size)
    model_parallel_cuda_manual_seed(1)
    chunks = list(make_chunks(library, config))
    encoders = [chunk.encoder for chunk in chunks if hasattr(chunk, "encoder")]
    frozen = trainer_options.get("frozen")
    for chunk in chunks:
        fill_parameters(names_of(chunk))
        for name, parameter in chunk.named_parameters():
            is_language = name.startswith("language_model")
            parameter.requires_grad = frozen != ("language" if is_language else "encoder")
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=False)
    model = [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads
    losses, gradients = [], {}
    for step in range(2):
        for ddp_chunk in model:
            ddp_chunk.zero_grad_buffer()
        forward_step = partial(forward, trainer_options.get("images", [1, 0, 2]))
        data = [enumerate(batches(step, 8, [LONGEST])) for _ in model]
        results = run_step(forward_step, data, model, 8, LONGEST)
        if is_pp_last_stage(mpu.get_pipeline_model_parallel_group()):
            losses += [result["loss"] for result in results]
        for chunk in chunks:
            for name, parameter in names_of(chunk):
                if parameter.requires_grad:
                    gradients[f"{name} of step {step}"] = parameter.main_grad.clone()
                    parameter.data -= 0.1 * parameter.main_grad
    built = [[layer.layer_number for layer in encoder.layers] for encoder in encoders]
    return {"losses": losses, "gradients": gradients, "encoders": built}


start = starts(train)
