"""What a stage's backward computes again, set for every chunk of a rank by itself.

Megatron has one setting for all of a model, and puts it into layers when these are built: booleans
of modules for the selective ones, read in every forward, and `full` in the config that the stack of
layers reads in every forward. A plan has a setting per stage, such as `none`, `full` or
`layernorm,mlp`, so here the booleans are set, and each stack has a config of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from megatron_vshape.core.model.kinds import NO_RECOMPUTE, ScheduleError
from megatron_vshape.mcore.refusals import (
    UnsupportedError,
    captures_graphs,
    has_transformer_engine,
    uses_stash,
)

FULL = "full"


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

STACKS = ("TransformerBlock", "HybridStack")
"""The classes that read `full` from their config in every forward."""


def modules_of(setting: str) -> tuple[Selective, ...]:
    """Return the modules that a setting names; none for `none` and `full`.

    Raises:
        ScheduleError: it names what Megatron has not.
    """
    known = {each.name: each for each in MODULES}
    names = () if setting in (NO_RECOMPUTE, FULL) else tuple(setting.split(","))
    for name in names:
        if name not in known:
            raise ScheduleError(
                f"the schedule's recompute has {setting!r:.60}; a setting is {NO_RECOMPUTE}, "
                f"{FULL}, or with commas of {', '.join(known)}"
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
            f"schedule {schedule} has stages compute again what CUDA graphs have captured once for "
            "all: take one without recompute, or leave --cuda-graph-impl out"
        )
    for setting in dict.fromkeys(settings):
        for each in modules_of(setting):
            why = _why_not(each, options)
            if why is not None:
                raise UnsupportedError(f"schedule {schedule} recomputes {each.name}, {why}")


def check_copies(copies: bool, options: Any, schedule: str) -> None:
    """Raise UnsupportedError where activations that are to wait in host memory are a graph's."""
    if copies and captures_graphs(options):
        raise UnsupportedError(
            f"schedule {schedule} has activations wait in host memory, and those of CUDA graphs "
            "stay where they were captured: take one without copies, or leave --cuda-graph-impl out"
        )
    if copies and uses_stash(options):
        raise UnsupportedError(
            f"schedule {schedule} has activations wait in host memory, and those of experts wait "
            "in the stash: take one without copies, or leave --moe-paged-stash out"
        )


def _why_not(module: Selective, options: Any) -> str | None:
    """Return why the model's layers cannot compute the module again."""
    quantizes = getattr(options, "fp8", None) or getattr(options, "fp4", None)
    if module.prepares and quantizes:
        return (
            "which under FP8 and FP4 prepares layers as they are built, for all stages alike: take "
            f"a schedule without it, and --recompute-modules {module.name}"
        )
    if module.discards and not has_transformer_engine():
        return "which Megatron does by Transformer Engine, and that is not installed: install it"
    if module.name == "mlp" and getattr(options, "add_bias_linear", False):
        return "whose biases Megatron hands out of what is computed again: --disable-bias-linear"
    if module.name == "moe_act" and not getattr(options, "moe_grouped_gemm", False):
        return "which only grouped experts have: --moe-grouped-gemm"
    if module.name == "shared_experts" and getattr(options, "moe_shared_expert_overlap", False):
        return "which cannot run beside others then: leave --moe-shared-expert-overlap out"
    return None


class Recompute:
    """What the backward of one chunk computes again; it starts as Megatron has built it."""

    def __init__(self, chunk: nn.Module) -> None:
        """Take a chunk of the model, whatever it is wrapped in."""
        self._built = [
            (layer, switch, getattr(layer, switch.attribute))
            for layer, switch in _switches(chunk, MODULES)
        ]
        self._stacks: list[tuple[Any, Any]] = [
            (each, each.config)
            for each in chunk.modules()
            if any(base.__name__ in STACKS for base in type(each).__mro__)
        ]
        self._chunk = chunk

    def set(self, setting: str | None, what: str = "") -> None:
        """Have the forwards from now on be computed again so; None: as the model was built.

        Raises:
            UnsupportedError: nothing in the chunk, which is `what`, is computed again then.
        """
        for layer, switch, value in self._built:
            setattr(layer, switch.attribute, value)
        for stack, config in self._stacks:
            stack.config = config
        if setting is None:
            return
        for layer, switch, _ in self._built:
            setattr(layer, switch.attribute, False)
        for stack, config in self._stacks:
            stack.config = copy.copy(config)
            stack.config.recompute_granularity = FULL if setting == FULL else None
            # A layer at a time: in B, what one layer keeps comes on top.
            stack.config.recompute_method, stack.config.recompute_num_layers = "uniform", 1
        for module in modules_of(setting):
            switches = list(_switches(self._chunk, (module,)))
            if not switches and any(len(stack.layers) for stack, _ in self._stacks):
                raise UnsupportedError(
                    f"{what} is to recompute {module.name}, and none of its layers can: take a "
                    f"schedule whose recompute has another setting for it, such as {NO_RECOMPUTE}"
                )
            for layer, switch in switches:
                setattr(layer, switch.attribute, True)


def set_recompute(
    chunks: Sequence[Recompute], stages: Sequence[int], settings: Sequence[str]
) -> None:
    """Set what the chunks of this rank, which are these stages, compute again, or undo it.

    All ranks of the world call this.

    Raises:
        UnsupportedError: on all ranks, if one of them cannot.
    """
    why = None
    try:
        for chunk, stage in zip(chunks, stages, strict=True):
            chunk.set(settings[stage] if settings else None, f"stage {stage}")
    except UnsupportedError as error:
        why = str(error)
    everyones = [why] * dist.get_world_size()
    dist.all_gather_object(everyones, why)
    found = next((each for each in everyones if each is not None), None)
    if found is not None:
        raise UnsupportedError(found)


def _switches(chunk: nn.Module, modules: Sequence[Selective]) -> Iterator[tuple[Any, Switch]]:
    """Yield the layers of a chunk that can compute one of the modules again, with its switch."""
    for layer in chunk.modules():
        for module in modules:
            for switch in module.switches:
                if switch.attribute in vars(layer) and switch.switches(layer):
                    yield layer, switch
