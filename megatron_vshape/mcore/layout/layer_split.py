"""`--pipeline-layer-split`: the layers of every stage, and the costs of such stages."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import (
    AUTO_SPLIT,
    Pieces,
    Share,
    even_layers,
    parse_layers,
    without_ends,
)
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.planner.lighter import fitting_layers
from megatron_vshape.core.planner.vocabulary import SUM, shared_pieces, tells_shared
from megatron_vshape.mcore.layout.sizes import ModelSizes, options_of, sizes_of

logger = logging.getLogger(__name__)


class Split(NamedTuple):
    """The layers of every stage, in model order, and the costs of these stages."""

    layers: tuple[int, ...]
    costs: Costs | None  # measured costs, if given
    estimate: Costs | None = None  # in units of a chunk's passes; None if all stages are equal
    shares: tuple[Share, ...] = ()  # share of each layer, if layers are not identical


def split_layers(
    args: Any,
    placement: Placement,
    text: str | None,
    costs: Costs | None,
    limit_bytes: float | None = None,
    shares: bool = False,
) -> Split:
    """Return the split that `text` specifies, or the even split.

    With `text` auto, the measured or estimated work of the stages is balanced. If `limit_bytes` is
    given, layers then move between stages until one microbatch fits.

    Args:
        args: Megatron's arguments, or the config of a library.
        placement: The pipeline rank of every stage.
        text: The value of `--pipeline-layer-split`; None for the even split.
        costs: Costs from a file. If they include layer counts, or `text` is auto, they are
            converted to the layers of this run. Otherwise they apply to this run's stages as they
            are.
        limit_bytes: Memory limit per rank, including model states, if the costs include these.
        shares: Whether all ranks share the vocabulary. Then no stage has the embedding or the
            output layer, and the costs include each rank's part of them.

    Raises:
        ScheduleError: The layers or the costs do not fit the stages.
    """
    layers, measured = given_layers(args, placement, text, costs)
    sizes = _sizes(args)
    if layers is None:
        pieces = measured or _estimated(sizes, len(placement))
        if shares:
            pieces = _without_ends(sizes, pieces)
        layers = pieces.balanced(sizes.num_layers, placement)
        if limit_bytes is not None and measured is not None:
            layers = fitting_layers(pieces, layers, placement, limit_bytes)
    if text is not None and os.environ.get("RANK", "0") == "0":
        told = ",".join(map(str, layers))
        logger.info("layers per stage, in model order: %s", told)
    if shares:
        return _share(args, sizes, layers, placement, costs)
    unlike = len(set(Share.of_stages(layers, sizes.shares))) > 1 or sizes.predicting > 0
    estimate = _estimated(sizes, len(placement)).costs(layers) if unlike else None
    if costs is not None and measured is not None and costs.layers != layers:
        if costs.layers is not None or text == AUTO_SPLIT:
            costs = measured.costs(layers)
    return Split(layers, costs, estimate, sizes.shares)


def given_layers(
    args: Any, placement: Placement, text: str | None, costs: Costs | None
) -> tuple[tuple[int, ...] | None, Pieces | None]:
    """Return the layers of every stage, or None to balance them, and the measured pieces.

    Raises:
        ScheduleError: The layers or the costs do not fit the stages, or the sizes for balancing are
            unknown.
    """
    sizes = _sizes(args)
    measured = None if costs is None else _pieces_of(sizes, costs)
    if text is None:
        return even_layers(sizes.num_layers, placement), measured
    if text != AUTO_SPLIT:
        return parse_layers(text, sizes.num_layers, placement), measured
    if measured is None and _vocabulary(args) is None:
        raise ScheduleError(
            "--pipeline-layer-split auto needs the size of the vocabulary before the tokenizer "
            "is there: add --vocab-size"
        )
    return None, measured


def _share(
    args: Any, sizes: ModelSizes, layers: tuple[int, ...], placement: Placement, costs: Costs | None
) -> Split:
    """Return the split of a model with vocabulary parallelism."""
    estimate = _shared(args, sizes, None, layers, placement)
    if costs is not None:
        measured, known = _pieces_of(sizes, costs), tells_shared(costs)
        others = costs if known else _shared(args, sizes, measured, layers, placement)
        costs = _without_ends(sizes, measured).costs(layers).having(**dict(others.others))
    return Split(layers, costs, estimate, shares=sizes.shares)


def _without_ends(sizes: ModelSizes, pieces: Pieces) -> Pieces:
    """Return the pieces without embedding and output layer; multi-token prediction layers stay."""
    return _predicting(without_ends(pieces), sizes)


def _shared(
    args: Any,
    sizes: ModelSizes,
    measured: Pieces | None,
    layers: Sequence[int],
    placement: Placement,
) -> Costs:
    """Return the costs of stages with vocabulary parallelism, and of each rank's vocabulary passes.

    Based on measured pieces or on estimated GEMMs, in units of a chunk. Assumptions: an all-reduce
    lasts `SUM` (a tenth) of the F of an even stage, and a layer stores 17 values per hidden
    element.
    """
    stages, ranks = len(placement), max(placement) + 1
    each, count = sizes.blocks / stages, sizes.predicting
    pieces = measured or _estimated(sizes, stages)
    further = _without_ends(sizes, pieces).last
    pieces = replace(pieces, last=pieces.last.over(further).times(1 / (1 + count)))
    # Values stored per token from LOGITS to HEAD_WEIGHT.
    numbers = (_vocabulary(args) or 0) / ranks + args.hidden_size
    held = (1 + count) * numbers / (17 * args.hidden_size * each)
    if measured is not None:
        held *= each * measured.layer.held_after_forward_bytes
    sum_us = SUM * each * pieces.layer.forward_us
    shared = shared_pieces(pieces, ranks, sum_us, held, count)
    return _predicting(shared, sizes).costs(layers)


def _pieces_of(sizes: ModelSizes, costs: Costs) -> Pieces:
    """Return the pieces of measured costs; stages count as equal unless the costs have layers."""
    even = (sizes.num_layers / costs.num_stages,) * costs.num_stages
    divides = costs.layers is not None or not sizes.num_layers % costs.num_stages
    return Pieces.of(costs, costs.layers or even, sizes.shares if divides else ())


def _estimated(sizes: ModelSizes, num_stages: int) -> Pieces:
    """Estimate the pieces from the GEMMs of layers and output layer, in units of an even stage.

    Each multi-token prediction layer counts as a layer with its own output layer. An output layer
    of unknown size costs nothing.
    """
    pieces = Pieces.estimated(sizes.head_in_layers, sizes.blocks / num_stages)
    return _predicting(replace(pieces, shares=sizes.shares), sizes)


def _predicting(pieces: Pieces, sizes: ModelSizes) -> Pieces:
    return pieces.predicting(sizes.predicting, sizes.merging_in_layers, sizes.predicted)


def _sizes(args: Any) -> ModelSizes:
    return sizes_of(options_of(args), _vocabulary(args) or 0)


def _vocabulary(args: Any) -> int | None:
    size: int | None = getattr(args, "padded_vocab_size", None) or getattr(args, "vocab_size", None)
    return size
