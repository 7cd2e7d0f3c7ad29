"""Chunks of a model with experts on two ranks: their passes by layer plans and without.

A chunk is written as its layers, D for a dense one and M for one with experts, between "<" where
it has the embedding and ">" where it has the loss. Imported once the CPU mode is on.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from mcore.fake_streams import EmptiedError, Event, streams_without_a_gpu
from mcore.split_state import split_state
from mcore.without_te import let_predict
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.mcore.features.overlap import layer_plans
from megatron_vshape.mcore.hooks.core_hooks import tie_embeddings
from megatron_vshape.mcore.step.stage import MegatronStage, StepContext, StepData, TrainerCall
from megatron_vshape.runtime import weight_jobs

Case = tuple[tuple[str, str], str, dict[str, Any]]
"""Two chunks, passes in their order, and options of the model."""

TOKENS, BATCH, HIDDEN, VOCABULARY, MICROBATCHES = 16, 2, 32, 64, 4


def config_of(**options: Any) -> TransformerConfig:
    """Return the config of layers of which the first is dense, the others' experts on two ranks."""
    return TransformerConfig(
        **{
            "num_layers": 4,
            "moe_layer_freq": [0, 1, 1, 1],
            "hidden_size": HIDDEN,
            "num_attention_heads": 4,
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 1e-2,
            "moe_ffn_hidden_size": 16,
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": 2,
            "overlap_moe_expert_parallel_comm": True,
            "bf16": True,
            "params_dtype": torch.bfloat16,
            "pipeline_dtype": torch.bfloat16,
            "add_bias_linear": False,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.0,
            "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False,
            "persist_layer_norm": False,
            "deallocate_pipeline_outputs": True,
        }
        | options
    )


def chunk_of(text: str, config: TransformerConfig, ties: bool) -> GPTModel:
    """Return the chunk that `text` writes."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    dense, experts, *_ = block.layer_specs
    layers = [{"D": dense, "M": experts}[letter] for letter in text.strip("<>")]
    return GPTModel(
        config,
        replace(block, layer_specs=layers),
        VOCABULARY,
        TOKENS,
        pre_process="<" in text,
        post_process=">" in text,
        share_embeddings_and_output_weights=ties,
        position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(config, experts, False) if ">" in text else None,
    ).bfloat16()


def forward_step(
    data: Iterator[Any], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[..., Any]]:
    """Return a microbatch's output, or its plan, and its loss function, as Megatron's script."""
    tokens, labels = next(data)
    positions = torch.arange(TOKENS).expand(BATCH, -1)
    mask = torch.triu(torch.ones(1, 1, TOKENS, TOKENS), diagonal=1).bool()
    call = model.build_schedule_plan if return_schedule_plan else model

    def loss_of(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return call(tokens, positions, mask, labels=labels), loss_of


def batches(rank: int) -> Iterator[Any]:
    """Yield the rank's microbatches."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        tokens = torch.randint(0, VOCABULARY, (2, BATCH, TOKENS), generator=generator)
        yield tokens[0], tokens[1]


class Chunks:
    """Two stages of a rank, and the results of their passes."""

    def __init__(self, rank: int, texts: tuple[str, str], by_layers: bool, **options: Any) -> None:
        ties = options.pop("ties", False)
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        self.state = split_state()
        config = config_of(**options)
        # During its construction, a chunk with multi-token prediction has to be the last.
        parallel_state.is_pipeline_last_stage = lambda **_: True
        models = [chunk_of(text, config, ties) for text in texts]
        if ties:
            tie_embeddings(*models)
        sync: Any = SimpleNamespace(
            splits=lambda chunk: False,
            weights_begin=lambda chunk: None,
            weights_done=lambda chunk: None,
        )
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        pipeline: Any = None
        call = TrainerCall(
            forward_step,
            data_iterator=None,
            model=[
                DistributedDataParallel(config, settings, chunk_model) for chunk_model in models
            ],
            num_microbatches=MICROBATCHES,
            seq_length=TOKENS,
            micro_batch_size=BATCH,
        )
        unused: Any = None
        step = StepContext(
            call,
            self.state,
            pipeline,
            groups=SimpleNamespace(cp=SimpleNamespace(size=lambda: 1)),
            passes_per_microbatch=1,
            shape=(),
            transport=unused,
            gradient_sync=sync,
            program=unused,
            wgrad_overlaps={},
            data=StepData([batches(rank) for _ in models]),
            forward_step=forward_step,
            num_tokens=torch.zeros([], dtype=torch.int),
        )
        if by_layers:
            layer_plans.OverlappedSteps().begin(step)
        self.stages = [
            MegatronStage(step, chunk, chunk, is_last=">" in text, has_several_chunks=False)
            for chunk, text in enumerate(texts)
        ]
        # Without an explicit stage, the query is for the running one, which the hooks know.
        parallel_state.is_pipeline_last_stage = lambda **_: (
            ">" in texts[self.state.running_chunk or 0]
        )
        self.made: dict[str, Tensor] = {}
        self._texts = texts
        self._rank = rank

    def inputs_of(self, work: Pass) -> Tensor | None:
        """Return the input of the pass, None on the first stage for F and on the last for B."""
        if ("<" if work.kind is Kind.F else ">") in self._texts[work.stage]:
            return None
        seed = 1000 * self._rank + 100 * work.stage + 10 * work.microbatch + (work.kind is Kind.F)
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(TOKENS, BATCH, HIDDEN, generator=generator).bfloat16()

    def run(self, *passes: Pass) -> None:
        """Run a pass, or an F that overlaps another pass, and keep their results."""
        first, *overlapped_passes = passes
        stage, received = self.stages[first.stage], self.inputs_of(first)
        if overlapped_passes:
            (work,) = overlapped_passes
            backward_stage, gradient = self.stages[work.stage], self.inputs_of(work)
            outputs = stage.forward_overlapped(
                first.microbatch, received, backward_stage, work, gradient
            )
        elif first.kind is Kind.W:
            stage.backward_weights(first.microbatch)
            return
        else:
            outputs = (getattr(stage, first.kind.method)(first.microbatch, received),)
        for work, output in zip(passes, outputs, strict=True):
            makes_loss = work.kind is Kind.F and stage._makes_loss
            loss = stage._outputs.get(work.microbatch) if makes_loss else None
            if (output := loss if output is None else output) is not None:
                self.made[str(work)] = output.detach().clone()

    def gradients(self) -> dict[str, Tensor]:
        """Return the sums of the gradients so far."""
        return {
            f"{chunk} {name}": parameter.main_grad
            for chunk, stage in enumerate(self.stages)
            for name, parameter in stage.model.named_parameters()
        }


def form_groups() -> None:
    """Make the two ranks each other's experts."""
    let_predict()
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=1
        )


def passes_of(text: str) -> list[tuple[Pass, ...]]:
    """Return the passes of a text: `F0.1 F0.0&B1.0 W1.0`."""
    return [tuple(map(Pass.parse, pair.split("&"))) for pair in text.split()]


def restore(output: Tensor, recomputed: Tensor) -> None:
    """Give an output that has been emptied its values again, wherever it is kept."""
    memory, values = output.untyped_storage(), recomputed.untyped_storage()
    memory.resize_(values.nbytes())
    memory.copy_(values)


def recomputing_without_te() -> Any:
    """Let Megatron discard and recompute outputs without Transformer Engine and a C++ compiler."""
    return patch.multiple(
        random,
        create=True,
        FP8GlobalStateManager=SimpleNamespace(is_fp8_enabled=lambda: False),
        activation_recompute_forward=lambda **unused: nullcontext(),
        fp8_autocast=lambda **unused: nullcontext(),
        _get_share_storage=lambda: restore,
    )


def alike(mine: Tensor, plain: Tensor, sums_twice: bool) -> bool:
    """Return whether all bits are equal, except for the rounding of a sum of two terms.

    The gradient of embeddings that multi-token prediction also uses is accumulated in one graph in
    16 bits without plans, and from two graphs in 32 bits with plans.
    """
    if sums_twice:
        return bool((mine - plain).norm() <= 2**-8 * plain.norm())
    return torch.equal(mine, plain)


def unlike(rank: int, cases: dict[str, Case]) -> dict[str, list[str]]:
    """Return by case the results and gradients that differ by a bit from passes without plans."""
    form_groups()
    differences = {}
    for name, (texts, order, options) in cases.items():
        ran = []
        for by_layers in (True, False):
            ran.append(Chunks(rank, texts, by_layers, **options))
            torch.manual_seed(rank)
            with recomputing_without_te():
                for passes in passes_of(order):
                    ran[-1].run(*passes)
        overlapped_run, separate_run = ran
        predicts = "mtp_num_layers" in options
        differences[name] = [
            key
            for mine, plain in (
                (overlapped_run.made, separate_run.made),
                (overlapped_run.gradients(), separate_run.gradients()),
            )
            for key in mine.keys() | plain.keys()
            if not alike(mine[key], plain[key], "word_embeddings" in key and predicts)
        ]
        if not any(gradient.any() for gradient in overlapped_run.gradients().values()):
            differences[name].append("no gradient at all")
    return differences


def never_waiting() -> Any:
    """Have streams wait for no event."""
    return patch.object(Event, "wait", lambda event, stream=None: None)


def unrecorded(by: str) -> Any:
    """Make a module not record which streams use its memory."""
    record = Tensor.record_stream

    def only_by_others(tensor: Tensor, stream: Any) -> None:
        if not sys._getframe(1).f_globals["__name__"].startswith(by):
            record(tensor, stream)

    return patch.object(Tensor, "record_stream", only_by_others)


def emptying_experts_input() -> Any:
    """Make Megatron's plans free tensors that the experts of a rank with one expert keep for B."""
    try:
        owner = importlib.import_module("megatron.core.models.common.utils")
    except ModuleNotFoundError:  # before 0.19
        owner = importlib.import_module("megatron.core.models.gpt.fine_grained_callables")
    upstream = owner.should_free_input

    def frees(name: str, is_moe: bool, *arguments: Any) -> bool:
        return is_moe if name == "mlp" else bool(upstream(name, is_moe, *arguments))

    return patch.object(owner, "should_free_input", frees)


MUTANTS: dict[str | None, Callable[[], Any]] = {
    None: nullcontext,
    "no wait": never_waiting,
    "no record": partial(unrecorded, "megatron"),
    "results are not recorded": partial(unrecorded, layer_plans.__name__),
    "jobs are not recorded": partial(unrecorded, weight_jobs.__name__),
    "emptied early": emptying_experts_input,
}


def wrong_on_streams(
    rank: int, cases_by_mutant: dict[str | None, dict[str, Case]]
) -> dict[str | None, dict[str, list[str]]]:
    """Return the errors in the use of streams, by mutant and case."""
    form_groups()
    faults: dict[str | None, dict[str, list[str]]] = {}
    for mutant, cases in cases_by_mutant.items():
        for name, (texts, order, options) in cases.items():
            chunks = Chunks(rank, texts, by_layers=True, **options)
            with streams_without_a_gpu() as streams, MUTANTS[mutant](), suppress(EmptiedError):
                for passes in passes_of(order):
                    chunks.run(*passes)
                    chunks.made.clear()
            faults.setdefault(mutant, {})[name] = streams.wrong
    return faults
