"""The sizes of a model's products, by whatever names Megatron's options have for them.

Nothing here needs Megatron: a sweep reads them from a command line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_vshape.core.model.layers import Widths

Options = Callable[[str], Any]
"""Returns the value of an option by the name that Megatron's arguments have; None: not given."""

_IN_CONFIG = {
    "swiglu": "gated_linear_unit",
    "num_experts": "num_moe_experts",
    "seq_length": "max_sequence_length",
}


def options_of(model: Any) -> Options:
    """Return the options in Megatron's arguments, or in a config, which names some differently."""

    def option(name: str) -> Any:
        value = getattr(model, name, None)
        return getattr(model, _IN_CONFIG.get(name, name), None) if value is None else value

    return option


def widths_of(option: Options, vocabulary: int, sequence: int | None = None) -> Widths:
    """Return what the products of a layer and of the head of such a model depend on."""
    hidden, heads = option("hidden_size") or 1, option("num_attention_heads") or 1
    gated, channels = bool(option("swiglu")), option("kv_channels") or hidden // heads
    alike = option("group_query_attention") is False  # a config has the groups alone
    groups = None if alike else option("num_query_groups")
    return Widths(
        hidden,
        attention=heads * channels,
        key_value=2 * (groups or heads) * channels,
        feed_forward=_feed_forward(option, hidden * (8 / 3 if gated else 4)),
        gated=gated,
        sequence=sequence or option("seq_length") or 0,
        vocabulary=vocabulary,
    )


def _feed_forward(option: Options, usual: float) -> float:
    """Return how wide the feed-forward is that a token goes through, over all layers."""
    dense = float(option("ffn_hidden_size") or usual)
    if not option("num_experts"):
        return dense
    each = option("moe_ffn_hidden_size") or dense
    shared = option("moe_shared_expert_intermediate_size") or 0
    experts = (option("moe_router_topk") or 2) * each + shared
    every = option("moe_layer_freq") or 1
    share = 1 / every if isinstance(every, int) else sum(every) / len(every)
    return float(share * experts + (1 - share) * dense)
