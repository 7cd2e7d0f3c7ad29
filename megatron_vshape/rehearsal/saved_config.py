"""Convert a saved configuration of Megatron-Bridge to a training command of the same model.

Bridge writes `run_config.yaml` into every checkpoint; `ConfigContainer.to_yaml` writes a recipe in
the same format. Nearly all names equal those of Megatron's arguments, so Megatron's parser gives
the flag of each name. This module has only names that differ, and flags that depend on several
settings. verl writes the fields of Bridge's model to `transformer_config.json` in checkpoints.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from argparse import Action, ArgumentParser, BooleanOptionalAction
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from enum import Enum
from functools import cache, cached_property
from typing import Any

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.rank_job import DEFAULT_TARGETS, LoraConfig
from megatron_vshape.rehearsal.sources import importable_megatron
from megatron_vshape.rehearsal.yaml_files import number, section

logger = logging.getLogger(__name__)

_CONTAINER = "megatron.bridge.training.config.ConfigContainer"
LAYOUT = "--pipeline-model-parallel-layout"

_SECTIONS = ("model", "ddp", "optimizer", "train", "scheduler", "dist", "rng")
"""In order of precedence: if two sections have the same name, the first one applies."""

_RENAMED = {
    "num_moe_experts": "num_experts",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "fp8_param": "fp8_param_gather",
    "fp4_param": "fp4_param_gather",
    "rope_scaling": "use_rope_scaling",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "use_te_rng_tracker": "te_rng_tracker",
    "cuda_graph_scope": "cuda_graph_modules",
    "check_for_nan_in_grad": "check_for_nan_in_loss_and_grad",
    "yarn_rotary_scaling_factor": "rotary_scaling_factor",
    "yarn_mscale": "mscale",
    "yarn_mscale_all_dim": "mscale_all_dim",
}

_BY_RULE = frozenset(
    """
    activation_func gated_linear_unit bias_activation_fusion share_embeddings_and_output_weights
    num_query_groups max_position_embeddings seq_length persist_layer_norm vocab_size
    should_pad_vocab virtual_pipeline_model_parallel_size pipeline_model_parallel_layout
    grad_reduce_in_fp32 cross_entropy_fusion_impl microbatch_group_size_per_vp_stage
    ffn_hidden_size expert_tensor_parallel_size
    """.split()
)
"""Names that `_by_rule` and `_layout_arguments` read."""

_WITHOUT_EFFECT = frozenset(
    """
    params_dtype pipeline_dtype autocast_dtype enable_autocast cpu_offloading mtp_enabled
    deallocate_pipeline_outputs hf_model_id hf_model_revision batch_p2p_comm
    use_custom_fsdp use_layer_wise_distributed_optimizer is_hybrid_model restore_modelopt_state
    nccl_communicator_config_path heterogeneous_block_specs generation_config timers
    start_weight_decay end_weight_decay weight_decay_incr_style
    """.split()
)
"""Settings that follow from others, or do not change the memory of a step."""

_BRIDGE_DEFAULTS = {"parallel_output": True, "scatter_embedding_sequence_parallel": True}
"""Defaults of fields that only Bridge's providers have. All other such fields are off by
default."""

_PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True, "grad_reduce_in_fp32": True},
    "fp16": {"fp16": True, "grad_reduce_in_fp32": False},
}
_FORMATS: dict[str, dict[str, Any]] = {
    "fp8_delayed_scaling": {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_param_gather": True},
    "fp8_current_scaling": {
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
        "fp8_param_gather": True,
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 1,
    },
    "fp8_subchannel_scaling": {"fp8": "hybrid", "fp8_recipe": "blockwise"},
    "mxfp8": {
        "fp8": "e4m3",
        "fp8_recipe": "mxfp8",
        "fp8_param_gather": True,
        "reuse_grad_buf_for_mxfp8_param_ag": True,
    },
    "nvfp4": {"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_param_gather": True},
}
"""Named recipes of Bridge's training/mixed_precision.py: bf16_mixed, bf16_with_mxfp8_mixed, ..."""

_DTYPES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_DTYPES |= {"half": "fp16", "uint8": "fp8"}

_LAYERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


_VERL_NAMES = {"num_layers", "hidden_size", "vocab_size", "pipeline_model_parallel_size"}
_VERL_OTHERS = {"ddp": {"use_distributed_optimizer": True}}
"""verl's default; its file has the model only."""


class _Callable:
    """Placeholder for a value that a configuration only names: a function or an object."""


def is_saved_config(content: Any) -> bool:
    """Return whether a file's content is a configuration of Megatron-Bridge."""
    return isinstance(content, dict) and str(content.get("_target_", "")).startswith(_CONTAINER)


def config_of_verl(content: Any) -> dict[str, Any] | None:
    """Return verl's `transformer_config.json` as a configuration of Bridge; None for other content.

    verl writes dtypes and enums as text ("torch.bfloat16", "AttnBackend.flash") and omits functions
    and layouts.
    """
    if not isinstance(content, dict) or not content.keys() >= _VERL_NAMES:
        return None
    model: dict[str, Any] = {}
    for name, value in content.items():
        dtype = isinstance(value, str) and value.startswith("torch.")
        enum = re.fullmatch(r"[A-Z]\w+\.(\w+)", value) if isinstance(value, str) else None
        model[name] = {"_target_": value} if dtype else enum[1] if enum else value
    return {"_target_": _CONTAINER, "model": model} | _VERL_OTHERS


def flags_of_config(config: Mapping[str, Any], extra_flags: Iterable[str] = ()) -> list[str]:
    """Return Megatron's flags for the configuration.

    Settings without a flag are logged in one line. `extra_flags` follow the file.

    Raises:
        ScheduleError: Megatron is not installed; or the configuration has only the name of a
            precision recipe, or lacks its pipeline layout.
    """
    sections = _sections(config)
    parser = _arguments()
    flags: list[str] = []
    lost: list[str] = []
    assigned: set[str] = set()
    ruled = _by_rule(sections, lost) | _layout_arguments(config, sections, extra_flags)
    for dest, value in ruled.items():
        assigned.add(dest)
        flags += parser.words(dest, value) or []
    for title in _SECTIONS:
        for name, value in sections[title].items():
            if name in _BY_RULE or name in _WITHOUT_EFFECT or name.startswith(("_", "inference_")):
                continue
            dest = parser.dest_of(name)
            words = [] if dest in assigned else parser.words(dest, value)
            if value is not None:
                assigned.add(dest)
            if words is not None:
                flags += words
            elif not parser.is_default(title, name, value):
                lost.append(name)
    if lost:
        logger.warning("not said by a flag of Megatron, and left out: %s", ", ".join(lost))
    return flags


def lora_of_config(peft: Any) -> LoraConfig | None:
    """Return the adapters of a configuration's `peft`: Bridge's LoRA, its fields or its name.

    Raises:
        ScheduleError: it is another kind of adapters, such as DoRA.
    """
    if not peft or peft == "none":
        return None
    fields = peft if isinstance(peft, dict) else {"_target_": peft}
    kind = str(fields.get("_target_", "lora")).rpartition(".")[2].lower()
    if kind != "lora":
        raise ScheduleError(
            f"the configuration trains {kind:.40} adapters (peft): only LoRA is estimated. Set "
            "peft to null, and add --lora-rank to estimate LoRA instead"
        )
    # Bridge: an empty list of targets means all linear layers, no list its four default ones.
    targets = fields.get("target_modules", DEFAULT_TARGETS) or ("all-linear",)
    per_expert = fields.get("share_expert_adapters") is False
    return LoraConfig(number(fields, "dim", _LORA_DIM), tuple(targets), per_expert)


_LORA_DIM = 32
"""Bridge's default rank."""


def flags_of_arguments(values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the flags for values of Megatron's arguments, and the names that have no flag."""
    parser = _arguments()
    words = {name: parser.words(name, value) for name, value in values.items()}
    flags = [word for flag in words.values() for word in flag or ()]
    return flags, [name for name, flag in words.items() if flag is None]


def _sections(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sections, including settings that Bridge adds when a run starts."""
    sections = {
        name: {key: _plain(value) for key, value in section(config, name).items()}
        for name in (*_SECTIONS, "tokenizer", "dataset")
    }
    inner = section(config, "model").get("transformer")
    if isinstance(inner, dict):  # a builder's configuration contains that of Megatron
        sections["model"] = {key: _plain(value) for key, value in inner.items()} | sections["model"]
        del sections["model"]["transformer"]
    name = config.get("mixed_precision")
    precision = _precision(name) if isinstance(name, str) else section(config, "mixed_precision")
    if isinstance(name, str):
        for key in precision:
            sections["ddp" if key.startswith("grad_") else "model"].setdefault(key, None)
    for settings in (section(config, "comm_overlap"), precision):
        for key, value in settings.items():
            for name in ("model", "optimizer", "ddp"):
                if key in sections[name] and value is not None:
                    sections[name][key] = _plain(value)
    _remove_encoder(sections["model"])
    return sections


def _precision(name: str) -> dict[str, Any]:
    """Return the settings of a named precision.

    Raises:
        ScheduleError: Only Bridge knows the name.
    """
    match = re.fullmatch(r"(bf16|fp16)(?:_with_(\w+))?_mixed", name.replace("-", "_"))
    if match is None or (match[2] and match[2] not in _FORMATS):
        raise ScheduleError(
            f"mixed_precision {name!r:.40} is a name that only Bridge knows: known here are "
            f"bf16_mixed, fp16_mixed, bf16_with_X_mixed with X one of {', '.join(_FORMATS)}, and "
            "the settings that Bridge writes for a run that has started"
        )
    return _PRECISIONS[match[1]] | _FORMATS.get(match[2], {})


def _remove_encoder(model: dict[str, Any]) -> None:
    """Reduce a vision-language model to its language model, which has one position per token."""
    if model.pop("vision_config", None) is None:
        return
    logger.warning("the estimate does not include the image encoder on the first stage")
    if model.get("position_embedding_type") == "mrope":
        model["position_embedding_type"] = "rope"
        model.pop("mrope_section", None)


def _plain(value: Any) -> Any:
    """Return a value without its `_target_`: the name of an enum, or a dtype as in flags."""
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if not isinstance(value, dict) or "_target_" not in value:
        return value
    if "_name_" in value:
        return value["_name_"]
    package, _, name = str(value["_target_"]).rpartition(".")
    return _DTYPES[name] if package == "torch" and name in _DTYPES else _Callable()


def _by_rule(sections: Mapping[str, Mapping[str, Any]], lost: list[str]) -> dict[str, Any]:
    """Return arguments that depend on several settings, or are the opposite of one."""
    model = sections["model"]
    heads, groups = model.get("num_attention_heads"), model.get("num_query_groups")
    grouped = groups not in (None, heads) and not model.get("multi_latent_attention")
    length = number(model, "seq_length") or None
    reduced_in_fp32 = sections["ddp"].get("grad_reduce_in_fp32")
    fusion = model.get("cross_entropy_fusion_impl")
    if fusion == "te" and model.get("cross_entropy_loss_fusion"):
        fusion = "native"  # Megatron's parser rejects "te" here
        lost.append("cross_entropy_fusion_impl")
    group = model.get("microbatch_group_size_per_vp_stage")
    ffn = model.get("ffn_hidden_size") or 4 * number(model, "hidden_size")
    experts_tensor = model.get("expert_tensor_parallel_size")
    if experts_tensor is None and number(model, "expert_model_parallel_size", 1) > 1:
        experts_tensor = 1  # Bridge's default; Megatron's is the tensor-parallel size
    return {
        "ffn_hidden_size": ffn or None,
        "expert_tensor_parallel_size": experts_tensor,
        "seq_length": length,
        "max_position_embeddings": (
            max(length or 0, number(model, "max_position_embeddings")) or None
        ),
        "untie_embeddings_and_output_weights": (
            model.get("share_embeddings_and_output_weights") is False
        ),
        "group_query_attention": grouped,
        "num_query_groups": groups if grouped else None,
        "no_persist_layer_norm": model.get("persist_layer_norm") is False,
        "grad_reduce_in_bf16": bool(model.get("bf16")) and reduced_in_fp32 is False,
        "accumulate_allreduce_grads_in_fp32": bool(model.get("fp16") and reduced_in_fp32),
        "cross_entropy_fusion_impl": fusion,
        # The default is the pipeline size, so that it follows another pipeline size.
        "microbatch_group_size_per_vp_stage": (
            None if group == model.get("pipeline_model_parallel_size") else group
        ),
        # By default, Bridge's forward step uses no mask from the data loader.
        "create_attention_mask_in_dataloader": (
            sections["dataset"].get("skip_getting_attention_mask_from_dataset") is False
        ),
    }


def _activation(model: Mapping[str, Any], function: str) -> dict[str, Any]:
    """Return the arguments of the MLP's activation; other gated functions have SwiGLU's sizes."""
    gated = bool(model.get("gated_linear_unit"))
    quick = gated and function == "quick_gelu"
    swiglu = gated and not quick
    fused = "bias_swiglu_fusion" if swiglu else "bias_gelu_fusion"
    supported = {"silu"} if gated else {"gelu", "squared_relu"}
    if not quick and function and function not in supported:
        logger.warning(
            "activation_func %s: rehearsed with %s", function, "silu" if swiglu else "gelu"
        )
    return {
        "swiglu": swiglu,
        "quick_geglu": quick,
        "squared_relu": not gated and function == "squared_relu",
        fused: model.get("bias_activation_fusion"),
    }


def _layout_arguments(
    config: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], extra_flags: Iterable[str]
) -> dict[str, Any]:
    """Return the arguments of the activation, of the pipeline layout and of the vocabulary size."""
    model = sections["model"]
    raw = {**section(config["model"], "transformer"), **config["model"]}
    function = raw.get("activation_func")
    target = function.get("_target_", "") if isinstance(function, dict) else str(function or "")
    layout = _layout(raw.get("pipeline_model_parallel_layout"), extra_flags)
    chunks = model.get("virtual_pipeline_model_parallel_size")
    by_pattern = model.get("hybrid_layer_pattern") or model.get("hybrid_override_pattern")
    virtual_stages = None if layout or by_pattern or LAYOUT in extra_flags else chunks
    size, pads = number(model, "vocab_size"), bool(model.get("should_pad_vocab"))
    if not size:
        size, pads = number(sections["tokenizer"], "vocab_size"), True
    if pads:
        tensor = number(model, "tensor_model_parallel_size", 1)
        step = number(model, "make_vocab_size_divisible_by", 128) * tensor
        size = -(-size // step) * step
    return _activation(model, target.rpartition(".")[2]) | {
        "pipeline_model_parallel_layout": layout,
        "num_virtual_stages_per_pipeline_rank": None if virtual_stages == 1 else virtual_stages,
        "padded_vocab_size": size or None,
        "tokenizer_type": None if size else sections["tokenizer"].get("tokenizer_type"),
    }


def _layout(layout: Any, extra_flags: Iterable[str]) -> str | None:
    """Return a pipeline layout as the flag's text, with stages separated by |.

    Raises:
        ScheduleError: The file has an object without its layers.
    """
    if layout is None or LAYOUT in extra_flags:
        return None
    if isinstance(layout, str):
        return layout
    if isinstance(layout, dict):
        raise ScheduleError(
            "the configuration has a pipeline layout, of which Bridge wrote no layers once the run "
            f"had begun: give it after the file, {LAYOUT} 'Et*3|t*4|...|L'"
        )
    stages = [[stage] if isinstance(stage, str) else stage for stage in layout]
    return "|".join(
        "".join(_LAYERS.get(str(_plain(layer)).lower(), str(layer)) for layer in stage)
        for stage in stages
    )


@cache
def _arguments() -> _Arguments:
    return _Arguments()


class _Arguments:
    """Megatron's arguments by attribute name."""

    def __init__(self) -> None:
        self._actions: dict[str, list[Action]] = {}
        with silence(), importable_megatron():
            try:
                from megatron.training.arguments import add_megatron_arguments
            except ImportError as error:
                raise ScheduleError(
                    "a configuration of Megatron-Bridge is read with Megatron's own arguments, "
                    "which are not installed (megatron.training): pip install "
                    "'megatron-vshape[megatron]'"
                ) from error
            parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
        for action in parser._actions:
            self._actions.setdefault(action.dest, []).append(action)

    def dest_of(self, name: str) -> str:
        """Return the name of the argument for a setting."""
        name = _RENAMED.get(name, name)
        return f"ddp_{name}" if f"ddp_{name}" in self._actions else name

    def words(self, dest: str, value: Any) -> list[str] | None:
        """Return the words that set an argument, none if it is the default; None if no flag can."""
        if isinstance(value, _Callable) or value is None:
            return []
        if dest not in self._actions:
            return None
        for action in self._actions[dest]:
            if _equals_default(value, action.default):
                return []
        for action in self._actions[dest]:
            words = _words(action, value)
            if words is not None:
                return words
        return None

    def is_default(self, section: str, name: str, value: Any) -> bool:
        """Return whether a setting without a flag has its default value."""
        if isinstance(value, _Callable) or section not in self._defaults:
            return True
        defaults = self._defaults[section]
        if name in defaults:
            return _equals_default(value, defaults[name])
        return _equals_default(value, _BRIDGE_DEFAULTS.get(name)) or (
            name not in _BRIDGE_DEFAULTS and not value
        )

    @cached_property
    def _defaults(self) -> dict[str, dict[str, Any]]:
        with silence(), importable_megatron():
            from megatron.core.distributed import DistributedDataParallelConfig
            from megatron.core.optimizer import OptimizerConfig
            from megatron.core.transformer import MLATransformerConfig
        return {
            section: {
                field.name: field.default
                if field.default_factory is MISSING
                else field.default_factory()
                for field in fields(config)
            }
            for section, config in (
                ("model", MLATransformerConfig),
                ("ddp", DistributedDataParallelConfig),
                ("optimizer", OptimizerConfig),
            )
        }


def _equals_default(value: Any, default: Any) -> bool:
    if isinstance(default, Enum):
        default = default.name
    elif isinstance(default, list | tuple):
        default = [member.name if isinstance(member, Enum) else member for member in default]
        value = value if isinstance(value, list) else [value]
    elif type(default).__name__ == "dtype":
        default = _DTYPES.get(str(default).rpartition(".")[2])
    return bool(value == default) and isinstance(value, bool) == isinstance(default, bool)


def _words(action: Action, value: Any) -> list[str] | None:
    flag = action.option_strings[0]
    if isinstance(action, BooleanOptionalAction):
        flags = [
            option for option in action.option_strings if option.startswith("--no-") != bool(value)
        ]
        return flags[:1]
    if action.nargs == 0:  # a switch: it sets its constant
        if isinstance(value, bool):
            return [flag] if action.const is value else None if action.default is value else []
        return None
    values = value if isinstance(value, list) else [value]
    if any(isinstance(entry, dict | _Callable) for entry in values):
        return None
    if action.nargs is None and isinstance(value, list):
        return _as_one_word(action, value)
    if action.choices is not None:
        choices = [choice.name if isinstance(choice, Enum) else choice for choice in action.choices]
        if any(entry not in choices for entry in values):
            return None
    if action.type is int:
        values = [int(entry) if isinstance(entry, float) else entry for entry in values]
    return [flag, *map(str, values)]


def _as_one_word(action: Action, value: list[Any]) -> list[str] | None:
    """Return the flag for a list that the argument's type parses from one word."""
    convert: Any = action.type or str
    for text in (str(value).replace(" ", ""), ",".join(map(str, value))):
        with contextlib.suppress(Exception):
            if list(convert(text)) == value:
                return [action.option_strings[0], text]
    return None


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Suppress Megatron's output and warnings during import."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
