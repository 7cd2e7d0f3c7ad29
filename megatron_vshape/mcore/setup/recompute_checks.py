"""What stages may compute again, and what of a model cannot be; told before a model is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron_vshape.core.model.kinds import BUT_LAST, FULL, NO_RECOMPUTE, ScheduleError
from megatron_vshape.mcore.refusals import (
    UnsupportedError,
    captures_graphs,
    has_transformer_engine,
    uses_stash,
)


class Switch(NamedTuple):
    """What turns the recompute of a module on: a boolean of the layers that have one."""

    attribute: str
    switches: Callable[[Any], bool] = lambda layer: True  # what the layer would then compute again


def _computes(name: str) -> Callable[[Any], bool]:
    """Return whether a layer's module of that name does something; TE's norms may be elsewhere."""
    return lambda layer: type(getattr(layer, name)).__name__ != "IdentityOp"


class Selective(NamedTuple):
    """A module of Megatron's --recompute-modules."""

    name: str
    switches: tuple[Switch, ...]
    discards: bool = False  # its output: by a way of Megatron's that needs Transformer Engine
    prepares: bool = False  # under FP8, layers when they are built


MODULES = (
    Selective("core_attn", (Switch("checkpoint_core_attention"),)),
    Selective(
        "layernorm",
        (
            Switch("recompute_input_layernorm", _computes("input_layernorm")),
            Switch("recompute_pre_mlp_layernorm", _computes("pre_mlp_layernorm")),
        ),
        discards=True,
        prepares=True,
    ),
    Selective("mlp", (Switch("recompute_mlp", lambda layer: not layer.is_moe_layer),)),
    Selective("moe", (Switch("moe_layer_recompute", lambda layer: hasattr(layer, "router")),)),
    Selective("moe_act", (Switch("activation_recompute"),), discards=True, prepares=True),
    Selective(
        "shared_experts",
        (Switch("shared_experts_recompute", lambda layer: layer.shared_experts is not None),),
    ),
    Selective("mla_up_proj", (Switch("recompute_up_proj"),), discards=True),
    Selective("gdn_norm_out", (Switch("recompute_norm_out"),), discards=True),
)
"""The modules that can be set per stage, and where Megatron 0.17 to 0.19 read them."""


def modules_of(setting: str) -> tuple[Selective, ...]:
    """Return the modules that a setting names; none for `none` and all that is whole layers.

    Raises:
        ScheduleError: it names what Megatron has not.
    """
    known = {each.name: each for each in MODULES}
    names = () if setting in (NO_RECOMPUTE, FULL, BUT_LAST) else tuple(setting.split(","))
    for name in names:
        if name not in known:
            raise ScheduleError(
                f"the schedule's recompute has {setting!r:.60}; a setting is {NO_RECOMPUTE}, "
                f"{FULL}, {BUT_LAST}, or with commas of {', '.join(known)}"
            )
    return tuple(known[name] for name in names)


def check_recompute(settings: Sequence[str], options: Any, schedule: str) -> None:
    """Raise where a model of these options cannot compute again what the stages are to.

    `options` are Megatron's arguments or a config, before the model is built.

    Raises:
        ScheduleError: there is no such setting.
        UnsupportedError: one does not go with the model; the text says what would.
    """
    if captures_graphs(options) and set(settings) - {NO_RECOMPUTE}:
        raise UnsupportedError(
            f"schedule {schedule} recomputes by stage, which CUDA graphs do not support: use a "
            "schedule "
            "without recompute, or remove --cuda-graph-impl"
        )
    for setting in dict.fromkeys(settings):
        for each in modules_of(setting):
            why = _why_not(each, options)
            if why is not None:
                raise UnsupportedError(f"schedule {schedule} recomputes {each.name}, {why}")


def setting_of(options: Any) -> str:
    """Return the setting that Megatron's own options give all stages; empty where none is as they.

    `options` are Megatron's arguments or a config.
    """
    granularity = getattr(options, "recompute_granularity", None)
    if granularity == FULL:
        alone = options.recompute_method == "uniform" and options.recompute_num_layers == 1
        return FULL if alone else ""
    setting = ",".join(getattr(options, "recompute_modules", None) or ())
    if granularity != "selective" or not setting:
        return ""
    try:
        check_recompute((setting,), options, "")
    except (ScheduleError, UnsupportedError):  # layers have it by the way they are built
        return ""
    return setting


def check_copies(copies: bool, options: Any, schedule: str) -> None:
    """Raise UnsupportedError where activations that are to wait in host memory are a graph's."""
    if copies and captures_graphs(options):
        raise UnsupportedError(
            f"schedule {schedule} offloads activations, which CUDA graphs do not support: use a "
            "schedule without offloading, or remove --cuda-graph-impl"
        )
    if copies and uses_stash(options):
        raise UnsupportedError(
            f"schedule {schedule} offloads activations, which --moe-paged-stash stores itself: "
            "use a "
            "schedule without offloading, or remove --moe-paged-stash"
        )


def _why_not(module: Selective, options: Any) -> str | None:
    """Return why the model's layers cannot compute the module again."""
    quantizes = getattr(options, "fp8", None) or getattr(options, "fp4", None)
    if module.prepares and quantizes:
        return (
            "which FP8 and FP4 support only for all stages: use a schedule without it, and "
            f"--recompute-modules {module.name}"
        )
    if module.discards and not has_transformer_engine():
        return "which Megatron does by Transformer Engine, and that is not installed: install it"
    if module.name == "mlp" and getattr(options, "add_bias_linear", False):
        return "which requires --disable-bias-linear"
    if module.name == "moe_act" and not getattr(options, "moe_grouped_gemm", False):
        return "which only grouped experts have: --moe-grouped-gemm"
    if module.name == "shared_experts" and getattr(options, "moe_shared_expert_overlap", False):
        return "which excludes overlap: remove --moe-shared-expert-overlap"
    return None
