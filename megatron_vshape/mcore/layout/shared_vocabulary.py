"""Vocabulary parallelism: costs of stages without embedding and output layer, and its padding."""

from __future__ import annotations

import logging
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.pieces import Pieces, without_ends
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.planner.vocabulary import ALL_REDUCE_TIME, shared_pieces
from megatron_vshape.environment import is_first_rank
from megatron_vshape.mcore.layout.sizes import ModelSizes
from megatron_vshape.mcore.layout.stage_map import (
    Split,
    estimated_pieces,
    pieces_of,
    vocabulary_size,
    with_predicting,
)

logger = logging.getLogger(__name__)

FLAG = "--pipeline-vocab-parallel"


def pad_vocabulary(args: Namespace, num_ranks: int) -> None:
    """Make Megatron pad the vocabulary to a multiple of the number of ranks that share it.

    A padded row is trained like any other. So nothing changes if the size is divisible already.
    """
    multiple = args.make_vocab_size_divisible_by
    parts = num_ranks * args.tensor_model_parallel_size
    vocabulary_size = getattr(args, "padded_vocab_size", None) or args.vocab_size
    current_multiple = multiple * args.tensor_model_parallel_size
    if (
        vocabulary_size is not None
        and (math.ceil(vocabulary_size / current_multiple) * current_multiple) % parts == 0
    ):
        return
    args.make_vocab_size_divisible_by = math.lcm(multiple, num_ranks)
    if args.make_vocab_size_divisible_by != multiple and is_first_rank():
        logger.warning(
            "%s pads the vocabulary to a multiple of %d, not of %d: it is shared by %d pipeline x "
            "%d tensor ranks",
            FLAG,
            args.make_vocab_size_divisible_by * args.tensor_model_parallel_size,
            current_multiple,
            num_ranks,
            args.tensor_model_parallel_size,
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
            measured, has_vocabulary = pieces_of(sizes, costs), costs.shards_output_layer
            vocabulary_costs = (
                costs if has_vocabulary else self._shared(args, sizes, measured, layers, placement)
            )
            costs = (
                self.without(sizes, measured).costs(layers).having(vocabulary_costs.extra_amounts)
            )
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
        all-reduce lasts a tenth of the F of an even stage, and a layer stores 17 values per
        hidden element.
        """
        stages, ranks = len(placement), max(placement) + 1
        blocks_per_stage, num_predicting = sizes.blocks / stages, sizes.predicting
        pieces = measured or estimated_pieces(sizes, stages)
        prediction_piece = self.without(sizes, pieces).last
        pieces = replace(
            pieces, last=pieces.last.over(prediction_piece).times(1 / (1 + num_predicting))
        )
        # Values stored per token from LOGITS to HEAD_WEIGHT.
        stored_values = (vocabulary_size(args) or 0) / ranks + args.hidden_size
        stored_memory = (
            (1 + num_predicting) * stored_values / (17 * args.hidden_size * blocks_per_stage)
        )
        if measured is not None:
            stored_memory *= blocks_per_stage * measured.layer[Kind.F.allocated]
        all_reduce_us = ALL_REDUCE_TIME * blocks_per_stage * pieces.layer[Kind.F.time]
        shared = shared_pieces(pieces, ranks, all_reduce_us, stored_memory, num_predicting)
        return with_predicting(shared, sizes).costs(layers)
