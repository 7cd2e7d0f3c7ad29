"""Costs of stages if all ranks share the embedding and the output layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.layers import Pieces, without_ends
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.planner.vocabulary import SUM, shared_pieces, tells_shared
from megatron_vshape.mcore.layout.sizes import ModelSizes
from megatron_vshape.mcore.layout.stage_map import (
    Split,
    estimated_pieces,
    pieces_of,
    vocabulary_size,
    with_predicting,
)


class SharedEnds:
    """Makes the costs of stages without embedding and output layer."""

    def without(self, sizes: ModelSizes, pieces: Pieces) -> Pieces:
        """Return the pieces without both ends; layers of multi-token prediction stay."""
        return with_predicting(without_ends(pieces), sizes)

    def split(
        self,
        args: Any,
        sizes: ModelSizes,
        layers: tuple[int, ...],
        placement: Placement,
        costs: Costs | None,
    ) -> Split:
        """Return the split of a model with vocabulary parallelism."""
        estimate = self._shared(args, sizes, None, layers, placement)
        if costs is not None:
            measured, known = pieces_of(sizes, costs), tells_shared(costs)
            others = costs if known else self._shared(args, sizes, measured, layers, placement)
            costs = self.without(sizes, measured).costs(layers).having(**dict(others.others))
        return Split(layers, costs, estimate, shares=sizes.shares)

    def _shared(
        self,
        args: Any,
        sizes: ModelSizes,
        measured: Pieces | None,
        layers: Sequence[int],
        placement: Placement,
    ) -> Costs:
        """Return the costs of stages without both ends, and of each rank's vocabulary passes.

        Based on measured pieces or on estimated GEMMs, in units of a chunk. Assumptions: an
        all-reduce lasts `SUM` (a tenth) of the F of an even stage, and a layer stores 17 values per
        hidden element.
        """
        stages, ranks = len(placement), max(placement) + 1
        each, count = sizes.blocks / stages, sizes.predicting
        pieces = measured or estimated_pieces(sizes, stages)
        further = self.without(sizes, pieces).last
        pieces = replace(pieces, last=pieces.last.over(further).times(1 / (1 + count)))
        # Values stored per token from LOGITS to HEAD_WEIGHT.
        numbers = (vocabulary_size(args) or 0) / ranks + args.hidden_size
        held = (1 + count) * numbers / (17 * args.hidden_size * each)
        if measured is not None:
            held *= each * measured.layer.held_after_forward_bytes
        sum_us = SUM * each * pieces.layer.forward_us
        shared = shared_pieces(pieces, ranks, sum_us, held, count)
        return with_predicting(shared, sizes).costs(layers)
