"""The GEMM sizes of a model, from Megatron's options under all their names.

This module does not import Megatron: a sweep reads the sizes from a command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron_vshape.core.model.layers import Share, Widths
from megatron_vshape.mcore.layout import hybrid

Options = Callable[[str], Any]
"""Returns the value of an option by its name in Megatron's arguments; None if not given."""

_IN_CONFIG = {
    "swiglu": "gated_linear_unit",
    "num_experts": "num_moe_experts",
    "seq_length": "max_sequence_length",
}


def options_of(model: Any) -> Options:
    """Return the options of Megatron's arguments or of a config, where some names differ."""

    def option(name: str) -> Any:
        value = getattr(model, name, None)
        return getattr(model, _IN_CONFIG.get(name, name), None) if value is None else value

    return option


def widths_of(option: Options, vocabulary: int, sequence: int | None = None) -> Widths:
    """Return the sizes that determine the GEMMs of a layer and of the output layer."""
    hidden, heads = option("hidden_size") or 1, option("num_attention_heads") or 1
    gated, channels = bool(option("swiglu")), option("kv_channels") or hidden // heads
    alike = option("group_query_attention") is False  # a config has only num_query_groups
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
    """Return the mean feed-forward width per token over all layers."""
    dense = float(option("ffn_hidden_size") or usual)
    if not option("num_experts"):
        return dense
    every = option("moe_layer_freq") or 1
    share = 1 / every if isinstance(every, int) else sum(every) / len(every)
    return float(share * _experts(option, dense) + (1 - share) * dense)


def _experts(option: Options, dense: float) -> float:
    """Return how wide the experts are that a token goes through, the shared one included."""
    each = option("moe_ffn_hidden_size") or dense
    shared = option("moe_shared_expert_intermediate_size") or 0
    return float((option("moe_router_topk") or 2) * each + shared)


class ModelSizes(NamedTuple):
    """The layers of a model, and its output layer and multi-token prediction relative to these."""

    num_layers: int
    head_in_layers: float
    merging_in_layers: float  # of one depth of multi-token prediction, in layers of that depth
    predicting: int  # depths of multi-token prediction
    shares: tuple[Share, ...] = ()  # of each layer; empty if all are identical
    predicted: Share | None = None  # of one depth; None: a layer as all others

    @property
    def blocks(self) -> float:
        """Return the number of a GPT's layers, attention and MLP, with as many products."""
        return Share.total(self.shares).time if self.shares else self.num_layers


def sizes_of(option: Options, vocabulary: int, sequence: int | None = None) -> ModelSizes:
    """Compute the sizes of a GPT, or of a hybrid model from the symbols of its pattern."""
    widths = widths_of(option, vocabulary, sequence)
    pattern, count = option("hybrid_layer_pattern") or "", option("mtp_num_layers") or 0
    main, *depths = pattern.replace(hybrid.BEGINS_STAGE, "").split(hybrid.BEGINS_MTP)
    if not main:
        layers = option("num_layers") or 0
        return ModelSizes(layers, widths.head_in_layers, widths.merging_in_layers, count)
    table = costs_of_symbols(option, widths)
    costs = [table.get(symbol, table["*"]) for symbol in main]
    total = Share.total(costs)
    # In layers of a GPT, attention and MLP, and all of them together as much of each.
    unit = Share(*(each * widths.layer / total.time for each in total))
    depth = Share.total([table.get(each, table["*"]) for each in depths[0]]) if depths else None
    return ModelSizes(
        len(main),
        widths.head_in_layers,
        2 * widths.hidden**2 / depth.time if depth else widths.merging_in_layers,
        hybrid.num_predicting(pattern) or count,
        tuple(each.over(unit) for each in costs),
        depth and depth.over(unit),
    )


def costs_of_symbols(option: Options, widths: Widths) -> Mapping[str, Share]:
    """Compute the costs of one layer for each symbol of a hybrid model's pattern, per token.

    The time is in multiplications of F, the activation memory in numbers, the state in weights.
    Mamba and gated delta net: their products as in `num_floating_point_operations` of Megatron.
    """
    hidden, linears = widths.hidden, 3 if widths.gated else 2

    def mixer(before: float, scan: float, after: float) -> Share:
        weights = hidden * (before + after)
        return Share(weights + scan, 2 * (hidden + before + after), weights)

    attention = Share(
        widths.attention_layer,
        2 * hidden + 2 * widths.attention + widths.key_value,
        widths.attention_weights,
    )
    dense = float(option("ffn_hidden_size") or hidden * (8 / 3 if widths.gated else 4))
    mlp = widths.feed_forward_layer(dense)
    top, width = option("moe_router_topk") or 2, _experts(option, dense)
    local = (option("num_experts") or top) / (option("expert_model_parallel_size") or 1)
    weights = width + (local - top) * (option("moe_ffn_hidden_size") or dense)
    experts = Share(
        widths.feed_forward_layer(width),
        2 * hidden * (1 + top) + linears * width,
        widths.feed_forward_layer(weights),
    )
    state = option("mamba_state_dim") or 128
    size = option("mamba_head_dim") or 64
    inner = (option("mamba_num_heads") or 2 * hidden / size) * size
    others = 2 * (option("mamba_num_groups") or 8) * state + inner / size
    mamba = mixer(2 * inner + others, 3.5 * inner * state, inner)
    keys = (option("linear_num_key_heads") or 16) * (option("linear_key_head_dim") or 128)
    heads, size = option("linear_num_value_heads") or 32, option("linear_value_head_dim") or 128
    values = heads * size
    delta = mixer(2 * (keys + values + heads), 4 * values * size, values)
    dense_layer = Share(mlp, 2 * hidden + linears * dense, mlp)
    return {
        "*": attention,
        "+": attention,  # multi-latent, as a GPT with it is estimated
        "D": attention,  # with sparse scores
        "-": dense_layer,
        "E": experts,
        "M": mamba,
        "G": delta,
    }
