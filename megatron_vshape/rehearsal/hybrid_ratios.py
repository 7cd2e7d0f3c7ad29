"""Replace the ratios of layers of old hybrid models by the pattern that Megatron made of them.

Source: megatron/core/ssm/mamba_hybrid_layer_allocation.py of Megatron-Core 0.13.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.mcore.layout import hybrid
from megatron_vshape.rehearsal.command import Command

_FLAGS = ("--hybrid-attention-ratio", "--hybrid-mlp-ratio")


def with_pattern(command: Command) -> Command:
    """Return the command with a pattern in place of ratios; unchanged if it has a pattern.

    Raises:
        ScheduleError: A ratio is no number, or both are above 1.
    """
    if command.pattern or not command.layers or not any(map(command.has, _FLAGS)):
        return command
    try:
        ratios = [float(command.value(flag, "0") or "") for flag in _FLAGS]
    except ValueError:
        ratios = [2.0]
    if min(ratios) < 0 or sum(ratios) > 1:
        raise ScheduleError(f"{' and '.join(_FLAGS)} are no ratios with a sum of at most 1")
    pattern = _pattern_of(command.layers, *ratios)
    note = f"The ratios of layers are estimated as {hybrid.FLAG} {pattern}."
    command = replace(command, notes=(*command.notes, note))
    changes = {hybrid.OPTION: pattern, "num_layers": None, "spec": None}
    return command.without(_FLAGS.__contains__).having(**changes)


def _pattern_of(num_layers: int, attention_ratio: float, mlp_ratio: float) -> str:
    """Return the symbols of layers in which attention and then MLPs are spread evenly."""
    num_attention, num_mlps = round(num_layers * attention_ratio), round(num_layers * mlp_ratio)
    num_mixers = num_layers - num_attention
    pattern = _spread("*", num_mixers / (num_attention + 1), "M" * num_layers)
    if not num_mlps:
        return pattern
    return _spread("-", (num_mixers - num_mlps) / num_mlps, pattern)


def _spread(symbol: str, distance: float, pattern: str) -> str:
    """Replace an M of the pattern by the symbol after each `distance` of them."""
    symbols, remaining = [], distance
    for layer in pattern:
        is_replaced = layer == "M" and remaining < 0.5
        symbols.append(symbol if is_replaced else layer)
        if layer == "M":
            remaining += distance if is_replaced else -1
    return "".join(symbols)
