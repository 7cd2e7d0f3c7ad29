"""Check that the layers of built chunks are those of their stages.

A builder that ignores the chunk number (vp_stage) builds the layers of one chunk for all of them.
Megatron trains such a model without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_vshape.mcore.layout.sizes import layers_with_experts, layers_with_linear_attention
from megatron_vshape.mcore.layout.stage_map import StageMap
from megatron_vshape.mcore.options import UnsupportedError

_FIX = (
    "Pass the vp_stage of the chunk to its layer spec and to its model, or choose a schedule with "
    "one chunk per rank, such as zb-h1"
)


def check_layers(stage_map: StageMap, rank: int, chunks: Sequence[nn.Module]) -> None:
    """Raise UnsupportedError if a chunk of this rank has layers of another stage.

    Only layers of Megatron's classes are checked, whose numbers count from the start of the model.
    """
    stages = stage_map.stages(rank)
    layers = [_layers(chunk) for chunk in chunks]
    for chunk, stage in enumerate(stages):
        _check_numbers(stage_map, chunk, stage, layers[chunk])
    config, num_layers = getattr(chunks[0], "config", None), sum(stage_map.layers)
    for kind in _KINDS:
        if getattr(config, kind.condition, None):
            by_config = kind.by_config(config, num_layers)
            expected = [by_config[slice(*_range(stage_map, stage))] for stage in stages]
            built = [[kind.is_built(layer) for layer in chunk] for chunk in layers]
            _check_kinds(kind.option, stages, built, expected)


def _check_numbers(
    stage_map: StageMap, chunk: int, stage: int, layers: Sequence[nn.Module]
) -> None:
    if not layers or not all(isinstance(layer, TransformerLayer | MambaLayer) for layer in layers):
        return
    start, end = _range(stage_map, stage)
    expected, numbers = list(range(start + 1, end + 1)), [layer.layer_number for layer in layers]
    if numbers != expected:
        raise UnsupportedError(
            f"chunk {chunk} is stage {stage} and was built with the layers {numbers}, not "
            f"with {expected}. {_FIX}"
        )


def _check_kinds(
    option: str,
    stages: Sequence[int],
    built: Sequence[list[bool | None]],
    expected: Sequence[list[bool]],
) -> None:
    """Raise UnsupportedError if a chunk has the kinds of layers of chunk 0 of this rank.

    A library's spec may differ from the option. So chunk 0 must have the kinds that the option
    gives to it, and the other chunk the same kinds, although the option gives it different ones.
    """
    for chunk, stage in enumerate(stages):
        if expected[chunk] != built[chunk] == built[0] == expected[0]:
            raise UnsupportedError(
                f"chunk {chunk} is stage {stage} and was built with the kinds of layers that "
                f"{option} gives to chunk 0 (stage {stages[0]}). {_FIX}"
            )


def _range(stage_map: StageMap, stage: int) -> tuple[int, int]:
    """Return the indices of a stage's first layer and of the layer after its last."""
    start = sum(stage_map.layers[:stage])
    return start, start + stage_map.layers[stage]


def _layers(chunk: Any) -> list[nn.Module]:
    """Return the layers of a chunk, or of its language model."""
    for model in (chunk, getattr(chunk, "language_model", None)):
        layers = getattr(getattr(model, "decoder", None), "layers", None)
        if layers is not None:
            return list(layers)
    return []


def has_experts(config: Any, num_layers: int) -> list[bool]:
    """Return for each layer whether it has experts, by Megatron's `moe_layer_freq`."""
    options = {"moe_layer_freq": config.moe_layer_freq, "num_layers": num_layers}
    return [*layers_with_experts(options.get)]


def _has_linear_attention(config: Any, num_layers: int) -> list[bool]:
    options = {"linear_attention_freq": config.linear_attention_freq, "num_layers": num_layers}
    return [*layers_with_linear_attention(options.get)]


def _is_moe_layer(layer: Any) -> bool | None:
    mlp = getattr(layer, "mlp", None)
    return isinstance(mlp, MoELayer) if isinstance(mlp, MoELayer | MLP) else None


def _is_linear_attention_layer(layer: Any) -> bool | None:
    attention = getattr(layer, "self_attention", None)
    return None if attention is None else not isinstance(attention, Attention)


class _Kind(NamedTuple):
    """A kind of layers that an option distributes over the model."""

    condition: str  # the option that enables the kind
    option: str
    by_config: Callable[[Any, int], list[bool]]
    is_built: Callable[[Any], bool | None]  # None: unknown


_KINDS = (
    _Kind("num_moe_experts", "moe_layer_freq", has_experts, _is_moe_layer),
    _Kind(
        "linear_attention_freq",
        "linear_attention_freq",
        _has_linear_attention,
        _is_linear_attention_layer,
    ),
)
