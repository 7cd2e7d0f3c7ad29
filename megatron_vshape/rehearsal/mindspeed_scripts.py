"""Translate flags of MindSpeed-LLM, a fork of Megatron-LM for NPUs, to those of Megatron.

Sources: core/transformer/transformer_block.py and features_manager in MindSpeed-LLM and MindSpeed.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import accumulate

from megatron_vshape.mcore.layout.sizes import layer_pattern
from megatron_vshape.rehearsal.command import Command, words_by_flag
from megatron_vshape.rehearsal.rank_job import LoraConfig, Reference

_FUSED = "--use-fused-rmsnorm", "--use-fused-swiglu", "--use-fused-rotary-pos-emb"
_TRANSLATED = frozenset(
    """
    --first-k-dense-replace --noop-layers --num-layer-list --n-shared-experts --shared-expert-gate
    --full-attention-interval --moe-intermediate-size --context-parallel-algo --moe-tp-extend-ep
    --lora-r --lora-alpha --lora-target-modules
    """.split()
)
_CONTEXT = {"ulysses_cp_algo": "a2a", "kvallgather_cp_algo": "all_gather"}
"""Communication of context parallelism; other algorithms are estimated as Megatron's ring."""


def with_translated_flags(command: Command) -> Command:
    """Replace flags by Megatron's with the same memory, and the NPU's kernels by fused ones."""
    sources = [flag for flag in _TRANSLATED if command.has(flag)]
    if not sources and not any(map(command.has, _FUSED)):
        return command
    changes = {"transformer_impl": None} | _layer_changes(command) | _expert_changes(command)
    if command.has("--is-pairwise-dataset"):  # a sample has a chosen and a rejected answer
        changes["micro_batch_size"] = 2 * command.number("--micro-batch-size", 1)
        changes["global_batch_size"] = 2 * command.number("--global-batch-size", 1)
    is_dpo = command.value("--stage") == "dpo"
    algorithm = command.value("--context-parallel-algo", "")
    if algorithm in _CONTEXT and command.number("--context-parallel-size", 1) > 1:
        changes["cp_comm_type"] = _CONTEXT[algorithm]
    if interval := command.number("--full-attention-interval", 0):
        changes["linear_attention_freq"] = interval
        changes["experimental_attention_variant"] = "gated_delta_net"
    if "mindspeed_llm." in (command.value("--spec") or ""):
        changes["spec"] = None
    lora = command.lora
    if command.has("--lora-r"):
        targets = words_by_flag(command.flags).get("--lora-target-modules", ())
        lora = LoraConfig(command.number("--lora-r", 8), tuple(targets), per_expert=True)
    names = ", ".join(["layers", *sorted(sources)])
    note = f"Estimated with the equivalents of Megatron for MindSpeed-LLM's {names}."
    command = replace(
        command,
        lora=lora,
        reference=Reference.FORWARD if is_dpo else None,
        notes=(*command.notes, note),
    )
    return command.without(_TRANSLATED.__contains__).having(**changes)


def _expert_changes(command: Command) -> dict[str, object]:
    """Translate the sizes of experts, and experts that are distributed over tensor ranks, too."""
    width = command.number("--moe-ffn-hidden-size", command.number("--moe-intermediate-size", 0))
    changes: dict[str, object] = {"moe_ffn_hidden_size": width} if width else {}
    shared = command.number("--n-shared-experts", 0)
    if shared and not command.has("--moe-shared-expert-intermediate-size"):
        width = width or command.number("--ffn-hidden-size", 0)
        changes["moe_shared_expert_intermediate_size"] = shared * width
    if command.has("--shared-expert-gate"):
        changes["moe_shared_expert_gate"] = True
    if command.has("--moe-tp-extend-ep"):
        ranks = command.number("--tensor-model-parallel-size", 1)
        ranks *= command.number("--expert-model-parallel-size", 1)
        changes |= {"expert_model_parallel_size": ranks, "expert_tensor_parallel_size": 1}
    return changes


def _layer_changes(command: Command) -> dict[str, object]:
    """Translate dense layers, layers without operations, and the number of layers per stage."""
    num_layers = command.number("--num-layers", 0)
    noops, counts = (
        [int(number) for number in re.findall(r"\d+", command.value(flag) or "")]
        for flag in ("--noop-layers", "--num-layer-list")
    )
    layers = [layer for layer in range(num_layers) if layer not in noops]
    changes: dict[str, object] = {}
    if (num_dense := command.number("--first-k-dense-replace", 0)) > 0:
        step = command.number("--moe-layer-freq", 1) or 1
        changes["moe_layer_freq"] = layer_pattern(
            layer >= num_dense and layer % step == 0 for layer in layers
        )
    if not noops and not counts:
        return changes
    if noops:
        chunks = command.number("--pipeline-model-parallel-size", 1)
        if per_chunk := command.number("--num-layers-per-virtual-pipeline-stage", 0):
            chunks = num_layers // per_chunk or 1
        counts = [num_layers // chunks] * chunks
    stages = [
        "t" * sum(end - count <= layer < end for layer in layers)
        for end, count in zip(accumulate(counts), counts, strict=True)
    ]
    if len(stages) > 1 and sum(counts) == num_layers:
        predicting = "m" * command.number("--mtp-num-layers", 0)
        changes["pipeline_model_parallel_layout"] = f"E{'|'.join(stages)}{predicting}L"
        changes["num_layers_per_virtual_pipeline_stage"] = None
    return changes | {"num_layers": len(layers)}
