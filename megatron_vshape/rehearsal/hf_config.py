"""Convert a Hugging Face config.json to Megatron's flags of the same language model."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, create_model

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.mcore.layout.sizes import layer_pattern
from megatron_vshape.rehearsal.command import flags_of


def _names(text: str) -> dict[str, str]:
    """Return Megatron's options by the names in config.json; a single name is equal in both."""
    pairs = (word.partition("=") for word in text.split())
    return {name: option or name for name, _, option in pairs}


_SIZES = _names("""
    num_hidden_layers=num_layers hidden_size num_attention_heads head_dim=kv_channels
    intermediate_size=ffn_hidden_size max_position_embeddings q_lora_rank kv_lora_rank v_head_dim
    qk_nope_head_dim=qk_head_dim qk_rope_head_dim=qk_pos_emb_head_dim mamba_num_heads mamba_head_dim
    num_nextn_predict_layers=mtp_num_layers ssm_state_size=mamba_state_dim n_groups=mamba_num_groups
""")
_SIZES_OF_LINEAR_ATTENTION = _names("""
    full_attention_interval=linear_attention_freq linear_conv_kernel_dim linear_key_head_dim
    linear_value_head_dim linear_num_key_heads linear_num_value_heads
""")
_NUMBERS = _names("""
    rms_norm_eps=norm_epsilon layer_norm_epsilon=norm_epsilon layer_norm_eps=norm_epsilon
    rope_theta=rotary_base rotary_emb_base=rotary_base partial_rotary_factor=rotary_percent
    rotary_pct=rotary_percent
""")
_SWITCHES = _names("attention_bias=add_qkv_bias use_qk_norm=qk_layernorm")
_OPTIONS = _SIZES | _NUMBERS | _SWITCHES | _names("hybrid_override_pattern=hybrid_layer_pattern")
_SIZES_OF_EXPERTS = _names("""
    num_experts num_local_experts=num_experts n_routed_experts=num_experts moe_latent_size
    num_experts_per_tok=moe_router_topk experts_per_token=moe_router_topk
    moe_intermediate_size=moe_ffn_hidden_size moe_shared_expert_intermediate_size
    shared_expert_intermediate_size=moe_shared_expert_intermediate_size
""")
_OPTIONS_OF_EXPERTS = {
    **_SIZES_OF_EXPERTS,
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
}
_REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")

_Size = Annotated[int, Field(ge=0, lt=2**31)]
_Layers = Annotated[int, Field(ge=1, le=10_000)]
_Number = Annotated[float, Field(ge=0)]


def _fields(kind: Any, *groups: Iterable[str]) -> dict[str, Any]:
    """Return optional fields of one type for pydantic."""
    return {name: (kind | None, None) for names in groups for name in names}


def _make_model(name: str, *fields: dict[str, Any]) -> type[BaseModel]:
    """Return a pydantic model of these fields; it ignores all others."""
    definitions = {name: field for part in fields for name, field in part.items()}
    config = ConfigDict(allow_inf_nan=False)  # not strict: YAML reads 1e-05 as text
    return create_model(name, __config__=config, **definitions)


_Rope = _make_model(
    "Rope",
    _fields(str, ["rope_type"]),
    _fields(_Number, ["factor", "rope_theta", "mscale", "mscale_all_dim", "partial_rotary_factor"]),
)
_SIZES_OF_GROUPS = """
    num_key_value_heads n_shared_experts n_group topk_group decoder_sparse_step sliding_window
    first_k_dense_replace
""".split()
_DROPOUTS = ("attention_dropout", "hidden_dropout")
_HfConfig = _make_model(
    "HfConfig",
    _fields(_Size, _SIZES, _SIZES_OF_EXPERTS, _SIZES_OF_GROUPS, _SIZES_OF_LINEAR_ATTENTION),
    _fields(_Layers, ["num_hidden_layers"]),
    _fields(Annotated[int, Field(ge=1, lt=2**31)], ["num_attention_heads"]),
    _fields(Annotated[int, Field(ge=2, lt=2**31)], ["vocab_size"]),
    _fields(_Number, _NUMBERS, _DROPOUTS, ["routed_scaling_factor"]),
    _fields(bool, _SWITCHES, ["use_parallel_residual", "tie_word_embeddings"]),
    _fields(_Rope, ["rope_scaling", "rope_parameters"]),
    _fields(str, ["hybrid_override_pattern"]),
    _fields(list[_Size], ["mlp_only_layers"]),
    _fields(list[str], ["layer_types"]),
)
"""The fields of config.json that decide Megatron's flags, with their types and limits."""

_PLAIN = "--normalization RMSNorm --disable-bias-linear"
_LLAMA = f"{_PLAIN} --position-embedding-type rope --swiglu"
_EXPERTS = (
    "--moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion "
    "--expert-tensor-parallel-size 1"
)
_SIGMOID = (
    "--moe-router-score-function sigmoid --moe-router-pre-softmax --moe-router-dtype fp32 "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 1e-4"
)
_LATENT = f"{_LLAMA} --multi-latent-attention --qk-layernorm --no-rope-fusion"
_MLA = f"{_LATENT} {_SIGMOID}"
# Without mtp_num_hidden_layers: Megatron 0.19 rejects --mtp-num-layers with this attention.
_LINEAR = (
    f"{_LLAMA} --qk-layernorm --apply-layernorm-1p --attention-output-gate "
    "--experimental-attention-variant gated_delta_net"
)
_LINEAR_WITH_EXPERTS = f"{_LINEAR} --moe-shared-expert-gate --moe-router-dtype fp32"
_FLAGS = {
    "deepseek_v2": f"{_LATENT} --moe-router-pre-softmax --moe-router-dtype fp32 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3",
    "deepseek_v3": _MLA,
    "glm": f"{_LLAMA} --rotary-interleaved --no-rope-fusion",
    "glm4_moe": f"{_LLAMA} {_SIGMOID}",
    "glm4_moe_lite": _MLA,
    "gpt_neox": "--position-embedding-type rope",
    "gpt_oss": "--normalization RMSNorm --position-embedding-type rope --no-rope-fusion "
    "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 "
    "--no-bias-gelu-fusion --no-bias-dropout-fusion --softmax-type learnable "
    "--window-attn-skip-freq 2",
    "kimi_k2": _MLA,
    "llama": _LLAMA,
    # Its chunks of attention are estimated as full attention.
    "llama4": f"{_LLAMA} --rotary-interleaved --no-rope-fusion --moe-router-score-function sigmoid "
    "--moe-router-dtype fp32",
    "mimo": f"{_LLAMA} --add-qkv-bias",
    "minimax_m2": f"{_LLAMA} --qk-layernorm {_SIGMOID}",
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "nemotron_h": f"{_PLAIN} --position-embedding-type none --squared-relu",
    "qwen2": f"{_LLAMA} --add-qkv-bias",
    "qwen2_moe": f"{_LLAMA} --add-qkv-bias --moe-shared-expert-gate --moe-router-pre-softmax",
    "qwen3": f"{_LLAMA} --qk-layernorm",
    "qwen3_5": _LINEAR,
    "qwen3_5_moe": _LINEAR_WITH_EXPERTS,
    "qwen3_moe": f"{_LLAMA} --qk-layernorm",
    "qwen3_next": _LINEAR_WITH_EXPERTS,
}
"""Flags of each model_type that do not depend on its sizes, as in Megatron-Bridge's providers."""

_LANGUAGE_MODELS = _names(
    "glm4v_moe=glm4_moe qwen2_5_vl=qwen2 qwen3_vl=qwen3 qwen3_vl_moe=qwen3_moe "
    "qwen3_omni_moe=qwen3_moe"
)
_LANGUAGE_PARTS = ("thinker_config", "text_config")
"""Fields of a multimodal model with the fields of its language model."""


def flags_of_hf_config(config: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return Megatron's flags of a model, and a note about parts that they do not have.

    Raises:
        ScheduleError: the type of the model is unknown, or a size is missing.
        pydantic.ValidationError: a field has a wrong type or an impossible value.
    """
    fields = config
    for name in _LANGUAGE_PARTS:
        fields = fields.get(name) or fields
        if not isinstance(fields, Mapping):
            raise ScheduleError(f"its {name} must have keys with values")
    type_name = str(fields.get("model_type") or config.get("model_type")).removesuffix("_text")
    kind = _LANGUAGE_MODELS.get(type_name, type_name)
    if kind not in _FLAGS:
        raise ScheduleError(
            f"its model_type {type_name:.40} is not supported; supported: {', '.join(_FLAGS)}. "
            "Give Megatron's flags of the model after -- instead"
        )
    fields = _with_common_names(fields) if kind == "llama4" else fields
    text = _HfConfig.model_validate(fields).model_dump(exclude_none=True)
    if kind == "gpt_neox" and text.get("use_parallel_residual", True):
        raise ScheduleError(
            "it has a parallel residual (use_parallel_residual), which Megatron does not support; "
            "use_parallel_residual: false estimates the same layers in sequence"
        )
    missing = [name for name in _REQUIRED if name not in text]
    if missing:
        raise ScheduleError(f"it lacks {', '.join(missing)}: use the complete config.json")
    width, heads = text["hidden_size"], text["num_attention_heads"]
    if width % heads and not (text.get("head_dim") or text.get("kv_lora_rank")):
        raise ScheduleError(f"hidden_size {width} is not a multiple of num_attention_heads {heads}")
    has_vision = fields is not config or "vision_config" in config
    experts = _expert_options(text)
    options = {option: text[name] for name, option in _OPTIONS.items() if text.get(name)}
    options |= _attention_options(text) | experts
    options |= _linear_attention_options(text) if _LINEAR in _FLAGS[kind] else {}
    if kind == "gpt_oss":
        options["window_size"] = f"{text.get('sliding_window', 128) - 1},0"
    # The NullTokenizer of older releases adds one token; padding to an even number covers both.
    vocabulary = text["vocab_size"]
    options |= {"vocab_size": vocabulary - 1, "make_vocab_size_divisible_by": 2 - vocabulary % 2}
    is_tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    options |= {"untie_embeddings_and_output_weights": not is_tied}
    options |= {name: text.get(name, 0) for name in _DROPOUTS}
    flags = flags_of({name: _plain(value) for name, value in options.items()})
    parts = [_FLAGS[kind], *([_EXPERTS] if experts else [])]
    parts += [_SIGMOID] if experts and kind == "nemotron_h" else []
    return [*flags, *" ".join(parts).split()], _encoder_note(config) if has_vision else ""


def _with_common_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Llama 4 with the names and values that other models have for them."""
    return {
        **config,
        "moe_intermediate_size": config.get("intermediate_size"),
        "intermediate_size": config.get("intermediate_size_mlp"),
        "decoder_sparse_step": config.get("interleave_moe_layer_step"),
        "n_shared_experts": 1,
    }


def _encoder_note(config: Mapping[str, Any]) -> str:
    """Return the note on the vision encoder, with its size if it has the fields of Qwen's."""
    kind = str(config.get("model_type"))
    note = f"The language model of {kind:.40}, without its vision encoder"
    vision = config.get("vision_config")
    vision = vision if isinstance(vision, dict) else {}
    names = ("depth", "hidden_size", "intermediate_size", "out_hidden_size", "spatial_merge_size")
    sizes = [size for size in map(vision.get, names) if isinstance(size, int)]
    if len(sizes) < len(names):
        return f"{note}."
    depth, width, inner, outer, merge = sizes
    layer = 4 * width**2 + (3 if "2_5" in kind else 2) * width * inner  # Qwen2.5-VL's is gated
    merged = width * merge**2
    mergers = 1 + len(vision.get("deepstack_visual_indexes") or ())
    parameters = depth * layer + mergers * merged * (merged + outer)
    return (
        f"{note} of {parameters * 1e-9:.1f}B parameters: on the first stage, it needs at least "
        f"{2 * parameters / 2**30:.1f} GiB more."
    )


def _plain(value: Any) -> Any:
    """Return a number as Megatron's parser expects it: 1000000.0 is an integer there."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _attention_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of query groups and rotary embeddings."""
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    factor = rope.get("factor", 1)
    # In transformers 5, the base and the rotated part are parameters of the embedding.
    options = {option: rope[name] for name, option in _NUMBERS.items() if name in rope}
    if config.get("kv_lora_rank"):
        options |= {name: rope[name] for name in ("mscale", "mscale_all_dim") if name in rope}
        options |= {"rotary_scaling_factor": factor, "rope_type": "yarn" if factor > 1 else "rope"}
        return options | {"kv_channels": config.get("v_head_dim")}
    if groups != heads:
        options |= {"group_query_attention": True, "num_query_groups": groups}
    if rope.get("rope_type") == "llama3":
        options |= {"use_rope_scaling": True, "rope_scaling_factor": factor}
    return options | ({"num_layers": None} if config.get("hybrid_override_pattern") else {})


def _expert_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of experts; none for a dense model."""
    options = {name: config[key] for key, name in _OPTIONS_OF_EXPERTS.items() if config.get(key)}
    if "num_experts" not in options:
        return {}
    width = options.setdefault("moe_ffn_hidden_size", config.get("intermediate_size"))
    if shared := config.get("n_shared_experts"):
        options.setdefault("moe_shared_expert_intermediate_size", shared * width)
    if (config.get("n_group") or 1) > 1:
        options |= {"moe_router_num_groups": config["n_group"]}
        options |= {"moe_router_group_topk": config["topk_group"]}
    layers, step = range(config["num_hidden_layers"]), config.get("decoder_sparse_step") or 1
    dense = {*range(config.get("first_k_dense_replace") or 0), *config.get("mlp_only_layers", ())}
    dense |= {layer for layer in layers if (layer + 1) % step}
    freq = layer_pattern(layer not in dense for layer in layers) if dense else None
    return options | {"moe_layer_freq": freq}


def _linear_attention_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of layers with linear attention."""
    sizes = _SIZES_OF_LINEAR_ATTENTION
    options = {option: config[name] for name, option in sizes.items() if config.get(name)}
    types = config.get("layer_types", ())
    freq = layer_pattern(layer == "linear_attention" for layer in types) if types else 4
    return {"linear_attention_freq": freq} | options  # 4: the default of transformers
