"""What a stage's backward computes again, set for every chunk of a rank by itself.

Megatron has one setting for all of a model, and puts it into layers when these are built: booleans
of modules for the selective ones, read in every forward, and `full` in the config that the stack of
layers reads in every forward. A plan has a setting per stage, such as `none`, `full` or
`layernorm,mlp`, so here the booleans are set, and each stack has a config of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron_vshape.core.model.kinds import BUT_LAST, FULL, NO_RECOMPUTE
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.setup.recompute_checks import (
    MODULES,
    Selective,
    Switch,
    modules_of,
)

STACKS = ("TransformerBlock", "HybridStack")
"""The classes that read `full` from their config in every forward."""


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
            is_whole = setting in (FULL, BUT_LAST)
            stack.config.recompute_granularity = FULL if is_whole else None
            # A layer at a time: in B, what one layer keeps comes on top.
            stack.config.recompute_method, stack.config.recompute_num_layers = "uniform", 1
            if setting == BUT_LAST:
                stack.config.recompute_method = "block"
                stack.config.recompute_num_layers = max(len(stack.layers) - 1, 0)
        for module in modules_of(setting):
            switches = list(_switches(self._chunk, (module,)))
            if not switches and any(len(stack.layers) for stack, _ in self._stacks):
                raise UnsupportedError(
                    f"{what} is to recompute {module.name}, which none of its layers supports: "
                    "use a "
                    f"schedule with another recompute setting for it, such as {NO_RECOMPUTE}"
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
