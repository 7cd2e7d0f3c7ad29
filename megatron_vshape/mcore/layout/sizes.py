"""The GEMM sizes of a model, from Megatron's options under all their names.

This module does not import Megatron: a sweep reads the sizes from a command line.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import Widths
from megatron_vshape.core.model.stage_costs import Share
from megatron_vshape.mcore.layout import hybrid

Options = Callable[[str], Any]
"""Returns the value of an option by its name in Megatron's arguments; None if not given."""

_IN_CONFIG = {
    "swiglu": "gated_linear_unit",
    "num_experts": "num_moe_experts",
    "seq_length": "max_sequence_length",
}


def option_reader(model: Any) -> Options:
    """Return the options of Megatron's arguments or of a config, where some names differ."""

    def option(name: str) -> Any:
        value = getattr(model, name, None)
        return getattr(model, _IN_CONFIG.get(name, name), None) if value is None else value

    return option


def widths_of(option: Options, vocabulary: int, sequence: int | None = None) -> Widths:
    """Return the sizes that determine the GEMMs of a layer and of the output layer."""
    hidden, heads = option("hidden_size") or 1, option("num_attention_heads") or 1
    gated = bool(option("swiglu") or option("quick_geglu"))
    channels = option("kv_channels") or hidden // heads
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
    have_experts = layers_with_experts(option)
    share = sum(have_experts) / len(have_experts)
    return float(share * _experts(option, dense) + (1 - share) * dense)


def layers_with_experts(option: Options) -> tuple[bool, ...]:
    """Return for each layer of a GPT with experts whether it is an MoE layer.

    Raises:
        ScheduleError: --moe-layer-freq is neither an integer nor an expression of lists.
    """
    frequency = _layer_frequency(option, "moe_layer_freq") or 1
    if isinstance(frequency, int):
        return tuple(layer % frequency == 0 for layer in range(option("num_layers") or 1))
    return tuple(map(bool, frequency))


def layers_with_linear_attention(option: Options) -> tuple[bool, ...]:
    """Return for each layer of a GPT whether its attention is linear.

    Raises:
        ScheduleError: --linear-attention-freq is neither an integer nor an expression of lists.
    """
    frequency = _layer_frequency(option, "linear_attention_freq")
    num_layers = option("num_layers") or 0
    if frequency is None:
        return (False,) * num_layers
    if isinstance(frequency, int):
        return tuple((layer + 1) % frequency != 0 for layer in range(num_layers))
    return tuple(map(bool, frequency))


def layer_pattern(layers: Iterable[bool]) -> str:
    """Return a list of 0 and 1 as in Megatron's options: ([0]*3+[1]*58)."""
    parts = [f"[{kind:d}]*{len([*run])}" for kind, run in groupby(layers)]
    return f"({'+'.join(parts)})"


def _layer_frequency(option: Options, name: str) -> Any:
    """Return the integer, or the list with a number for each layer, of an option; None: unset."""
    frequency = option(name)
    if not isinstance(frequency, str):
        return frequency
    try:
        return _evaluated(ast.parse(frequency.strip(), mode="eval").body)
    except (SyntaxError, TypeError):
        raise ScheduleError(
            f"--{name.replace('_', '-')} {frequency} cannot be read; give an integer, or "
            "lists of 0 and 1, such as ([0]*3+[1]*58)"
        ) from None


def _evaluated(node: ast.expr) -> Any:
    """Evaluate the lists of integers, sums and products that Megatron's option accepts."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=items):
            return [_evaluated(item) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _evaluated(left) + _evaluated(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _evaluated(left) * _evaluated(right)
    raise TypeError(ast.dump(node))


def _experts(option: Options, dense: float) -> float:
    """Return how wide the experts are that a token goes through, the shared one included."""
    expert_width = option("moe_ffn_hidden_size") or dense
    shared = option("moe_shared_expert_intermediate_size") or 0
    return float((option("moe_router_topk") or 2) * expert_width + shared)


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
    unit = Share(*(kind_total * widths.layer / total.time for kind_total in total))
    depth = Share.total([table.get(symbol, table["*"]) for symbol in depths[0]]) if depths else None
    return ModelSizes(
        len(main),
        widths.head_in_layers,
        2 * widths.hidden**2 / depth.time if depth else widths.merging_in_layers,
        hybrid.num_predicting(pattern) or count,
        tuple(cost.over(unit) for cost in costs),
        depth and depth.over(unit),
    )


def has_dense_layers(option: Options) -> bool:
    """Return whether a GPT with experts also has dense layers.

    Raises:
        ScheduleError: as `layers_with_experts`.
    """
    return bool(option("num_experts")) and not all(layers_with_experts(option))


def costs_of_symbols(option: Options, widths: Widths) -> Mapping[str, Share]:
    """Compute the costs of one layer for each symbol of a hybrid model's pattern, per token.

    The time is in multiplications of F, the activation memory in numbers, the state in weights.
    With full recomputation a layer keeps its input. Mamba and gated delta net: their products as in
    `num_floating_point_operations` of Megatron.
    """
    hidden, linears = widths.hidden, 3 if widths.gated else 2

    def mixer(width_before: float, scan: float, width_after: float) -> Share:
        weights = hidden * (width_before + width_after)
        return Share(weights + scan, 2 * (hidden + width_before + width_after), weights)

    weights = _attention_weights(option, widths)
    attention = Share(
        weights + widths.sequence * widths.attention,
        2 * hidden + 2 * widths.attention + widths.key_value,
        weights,
    )
    dense = float(option("ffn_hidden_size") or hidden * (8 / 3 if widths.gated else 4))
    mlp = widths.feed_forward_layer(dense)
    top, width = option("moe_router_topk") or 2, _experts(option, dense)
    local = (option("num_experts") or top) / (option("expert_model_parallel_size") or 1)
    expert_width = option("moe_ffn_hidden_size") or dense
    # Experts of a latent size, with a projection to it and one back.
    latent = option("moe_latent_size") or hidden
    projections, scale = (0 if latent == hidden else 2 * hidden * latent), latent / hidden
    shared_width = width - top * expert_width
    weights = shared_width + local * expert_width * scale * _expert_state(option)
    experts = Share(
        widths.feed_forward_layer(shared_width + top * expert_width * scale) + projections,
        2 * (hidden + latent * top) + linears * width,
        widths.feed_forward_layer(weights) + projections,
    )
    state = option("mamba_state_dim") or 128
    size = option("mamba_head_dim") or 64
    inner = (option("mamba_num_heads") or 2 * hidden / size) * size
    group_width = 2 * (option("mamba_num_groups") or 8) * state + inner / size
    mamba = mixer(2 * inner + group_width, 3.5 * inner * state, inner)
    keys = (option("linear_num_key_heads") or 16) * (option("linear_key_head_dim") or 128)
    heads, size = option("linear_num_value_heads") or 32, option("linear_value_head_dim") or 128
    values = heads * size
    delta = mixer(2 * (keys + values + heads), 4 * values * size, values)
    dense_layer = Share(mlp, 2 * hidden + linears * dense, mlp)
    table = {
        "*": attention,
        "+": attention,  # multi-latent, as a GPT with it is estimated
        "D": attention,  # with sparse scores
        "-": dense_layer,
        "E": experts,
        "M": mamba,
        "G": delta,
    }
    if option("recompute_granularity") == "full":
        return {
            symbol: symbol_cost._replace(memory=hidden) for symbol, symbol_cost in table.items()
        }
    return table


class ModelParameters(NamedTuple):
    """Numbers of parameters, without those of norms, biases and multi-token prediction."""

    total: float
    active: float  # that a token is multiplied by, both embeddings included
    embeddings: float  # of both, or of the shared one


def symbols_of(option: Options) -> str:
    """Return the layers as symbols of a hybrid model, in which a GPT's layer has two.

    Raises:
        ScheduleError: --moe-layer-freq or --linear-attention-freq cannot be read.
    """
    pattern = (option("hybrid_layer_pattern") or "").partition(hybrid.BEGINS_MTP)[0]
    if pattern:
        return hybrid.without_stages(pattern)
    linear = layers_with_linear_attention(option)
    sparse = layers_with_experts(option) if option("num_experts") else (False,) * len(linear)
    layers = zip(linear, sparse, strict=False)
    return "".join(("G" if is_linear else "*") + "-E"[is_sparse] for is_linear, is_sparse in layers)


def parameters_of(option: Options, vocabulary: int) -> ModelParameters:
    """Count the parameters of a GPT or hybrid model.

    Raises:
        ScheduleError: --moe-layer-freq or --linear-attention-freq cannot be read.
    """
    table = costs_of_symbols(option, widths_of(option, vocabulary))
    layers = [table[symbol] for symbol in symbols_of(option)]
    total = sum(layer.state for layer in layers)
    # The time of experts counts their active ones, that of a Mamba layer its scan as well.
    active = sum(min(layer.time, layer.state) for layer in layers)
    tables = 2 if option("untie_embeddings_and_output_weights") else 1
    embeddings = float(tables * vocabulary * (option("hidden_size") or 0))
    return ModelParameters(total + embeddings, active + embeddings, embeddings)


def _expert_state(option: Options) -> float:
    """Return a rank's state per weight of its experts, relative to other weights.

    Experts have their own tensor parallelism, and fewer ranks share their optimizer state: 12 of
    the 18 bytes of a weight with its gradient and Adam in mixed precision.
    """
    tensor = option("tensor_model_parallel_size") or 1
    expert_tensor = option("expert_tensor_parallel_size") or tensor
    world = option("world_size")
    if not (world and option("use_distributed_optimizer")):
        return float(tensor / expert_tensor)
    ranks = world / (option("pipeline_model_parallel_size") or 1)  # of a pipeline stage
    sharing = ranks / (expert_tensor * (option("expert_model_parallel_size") or 1))
    return float(tensor / expert_tensor * (6 + 12 / sharing) / (6 + 12 * tensor / ranks))


def _attention_weights(option: Options, widths: Widths) -> float:
    """Return the weights of an attention layer's projections, multi-latent ones too."""
    if not option("multi_latent_attention"):
        gate = widths.hidden * widths.attention if option("attention_output_gate") else 0
        return widths.attention_weights + gate
    hidden, heads = widths.hidden, option("num_attention_heads") or 1
    head, rotary = option("qk_head_dim") or 128, option("qk_pos_emb_head_dim") or 64
    value, latent = option("v_head_dim") or 128, option("kv_lora_rank") or 32
    queries, low = heads * (head + rotary), option("q_lora_rank")
    query = low * (hidden + queries) if low else hidden * queries
    return float(
        query
        + hidden * (latent + rotary)
        + latent * heads * (head + value)
        + heads * value * hidden
    )
