"""Read options of Megatron-Bridge's scripts/performance, which train a recipe by its name.

Sources: scripts/performance/argument_parser.py and utils/overrides.py of Megatron-Bridge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from megatron_vshape.rehearsal.command import ENDS_ARE_LAYERS
from megatron_vshape.rehearsal.yaml_files import scalar

RECIPE = "model_recipe_name"
"""The option with the name of the recipe."""

_SHORT = {
    "-mr": "--model_recipe_name",
    "-ng": "--num_gpus",
    "-gn": "--gpus_per_node",
    "-gb": "--global_batch_size",
    "-mb": "--micro_batch_size",
    "-sl": "--seq_length",
    "-tp": "--tensor_model_parallel_size",
    "-pp": "--pipeline_model_parallel_size",
    "-cp": "--context_parallel_size",
    "-vp": "--virtual_pipeline_model_parallel_size",
    "-ep": "--expert_model_parallel_size",
    "-et": "--expert_tensor_parallel_size",
    "-rl": "--recompute_num_layers",
    "-ol": "--activation_offload_layers",
    "-c": "--compute_dtype",
}
_MODEL = """
    tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
    virtual_pipeline_model_parallel_size expert_model_parallel_size expert_tensor_parallel_size
    seq_length num_layers hidden_size num_moe_experts pipeline_model_parallel_layout
    cuda_graph_impl
""".split()
_TRAIN = ("global_batch_size", "micro_batch_size")
_PRECISIONS = {
    "bf16": "bf16_mixed",
    "fp8_cs": "bf16_with_fp8_current_scaling_mixed",
    "fp8_mx": "bf16_with_mxfp8_mixed",
    "fp8_sc": "bf16_with_fp8_subchannel_scaling_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
_NUM_LAYERS = {"deepseek_v3": 61, "kimi_k2": 61}
"""Models whose layers no number of ranks divides: stages are full from the first on."""


_COUNTS_ENDS = ("qwen3_235b_a22b", "llama31_405b")
"""Models in whose recipes embedding and loss count as a layer each."""


def options_of_performance(words: Sequence[str]) -> dict[str, Any] | None:
    """Return the values of the options by name, None if no recipe is named.

    An option without a value is True. `None` and `null` are None. Releases of 2025 have a name and
    a size of the model.
    """
    flags = [_SHORT.get(word, word) for word in words]
    if not ({"--model_recipe_name", "--model_size"} & {*flags} and "--compute_dtype" in flags):
        return None
    options: dict[str, Any] = {}
    for index, flag in enumerate(flags):
        if flag.startswith("--"):
            name, equals, value = flag[2:].partition("=")
            values = takewhile(lambda word: word[:1] not in ("-", "+"), flags[index + 1 :])
            text = value if equals else next(values, "true")
            options[name] = None if text == "None" else scalar(text)
    options.setdefault(RECIPE, f"{options.get('model_name')}_{options.get('model_size')}")
    return options


def config_of_performance(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as overrides of a recipe of Megatron-Bridge."""
    values = {name: value for name, value in options.items() if value is not None}
    model: dict[str, Any] = {name: values[name] for name in _MODEL if name in values}
    model["sequence_parallel"] = model.get("tensor_model_parallel_size", 1) > 1
    model |= _layers_of_stages(str(values[RECIPE]), model) | _memory_settings(values)
    if "cuda_graph_scope" in values:
        model["cuda_graph_scope"] = str(values["cuda_graph_scope"]).split(",")
    if values.get("moe_a2a_overlap"):
        model |= {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}
    if backend := values.get("moe_flex_dispatcher_backend"):
        model |= {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}
    dtype = str(values.get("compute_dtype", "bf16"))
    return {
        "model": model,
        "train": {name: values[name] for name in _TRAIN if name in values},
        "mixed_precision": _PRECISIONS.get(dtype, dtype),
        "ddp": {"use_megatron_fsdp": True} if values.get("use_megatron_fsdp") else {},
    }


def _memory_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of recomputation and offloading."""
    settings: dict[str, Any] = {}
    if num_recomputed := values.get("recompute_num_layers"):
        settings |= {"recompute_granularity": "full", "recompute_method": "block"}
        settings["recompute_num_layers"] = num_recomputed
    if modules := values.get("recompute_modules"):
        settings["recompute_modules"] = str(modules).split(",")
        settings["recompute_granularity"] = "selective"
    if num_offloaded := values.get("activation_offload_layers"):
        settings |= {"cpu_offloading": True, "cpu_offloading_num_layers": num_offloaded}
    return settings


def _layers_of_stages(recipe: str, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with which a recipe divides its layers among the stages."""
    ranks, chunks = (
        model.get(f"{prefix}pipeline_model_parallel_size", 1) for prefix in ("", "virtual_")
    )
    if recipe in _COUNTS_ENDS and ranks > 1:
        return dict.fromkeys(ENDS_ARE_LAYERS, True)
    layout, num_layers = model.get("pipeline_model_parallel_layout"), _NUM_LAYERS.get(recipe)
    if num_layers is None or layout is not None:
        num_predicting = str(layout).count("m") if "[" not in str(layout) else 0
        return {"mtp_num_layers": num_predicting} if num_predicting else {}
    return {"pipeline_model_parallel_layout": _layout(num_layers, ranks * chunks)}


def _layout(num_layers: int, num_stages: int) -> str:
    """Return the layout in which each stage but the last ones has the same number of layers."""
    per_stage = -(-num_layers // num_stages)
    starts = range(0, num_stages * per_stage, per_stage)
    layers = ["t" * max(0, min(per_stage, num_layers - start)) for start in starts]
    return f"E{'|'.join(layers)}L"
