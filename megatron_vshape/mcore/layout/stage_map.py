"""The stages of a run: their ranks and chunks, and their layers (`--pipeline-layer-split`).

This module does not import Megatron, so that the stages of a recipe can be checked without it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import AUTO_SPLIT, even_layers, parse_layers
from megatron_vshape.core.model.pieces import Encoder, Pieces
from megatron_vshape.core.model.placement import Placement, chunks_of, stages_of
from megatron_vshape.core.model.stage_costs import Share
from megatron_vshape.core.planner.lighter import fitting_layers
from megatron_vshape.environment import is_first_rank
from megatron_vshape.mcore.layout.sizes import ModelSizes, option_reader, sizes_of


@dataclass(frozen=True, slots=True)
class StageMap:
    """The placement of all stages: `placement[stage]` is the pipeline rank of a stage.

    `layers[stage]` is the number of transformer layers of a stage. The last stage also has
    `predicting` layers of multi-token prediction.
    """

    placement: Placement
    layers: tuple[int, ...]
    predicting: int = 0

    @property
    def num_ranks(self) -> int:
        """Return the number of pipeline ranks."""
        return max(self.placement) + 1

    @property
    def num_chunks(self) -> int:
        """Return the number of stages per rank."""
        return len(self.placement) // self.num_ranks

    @property
    def last_stage(self) -> int:
        """Return the number of the stage that computes the loss."""
        return len(self.placement) - 1

    @property
    def loss_rank(self) -> int:
        """Return the pipeline rank that computes the loss."""
        return self.placement[-1]

    @property
    def end_ranks(self) -> tuple[int, int]:
        """Return the pipeline ranks of the first and the last stage."""
        return self.placement[0], self.placement[-1]

    @property
    def ends_meet(self) -> bool:
        """Return whether one rank has the first and the last stage."""
        return len(set(self.end_ranks)) == 1

    def stages(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, by chunk."""
        return stages_of(self.placement, self.num_ranks)[rank]

    def stage(self, rank: int, chunk: int | None) -> int:
        """Return the stage of a chunk; Megatron passes None for the only chunk of a rank."""
        return self.stages(rank)[chunk or 0]

    def chunk(self, stage: int) -> int:
        """Return the index of the stage's chunk on its rank."""
        return chunks_of(self.placement)[stage]


def megatrons_text(layers: Sequence[int], predicting: int = 0) -> str:
    """Return Megatron's text for stages with these layers; Megatron places them in a loop."""
    stages = ["t" * count for count in layers]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "m" * predicting + "L"
    return "|".join(stages)


def check_ends(stage_map: StageMap) -> None:
    """Raise ScheduleError unless rank 0 reads data.

    Megatron's trainer decides on rank 0 whether there is data, and broadcasts the result to all
    ranks.
    """
    ends = stage_map.end_ranks
    if 0 not in ends:
        raise ScheduleError(
            f"the first stage is on rank {ends[0]} and the last on rank {ends[1]}, and Megatron "
            "needs one of the two on rank 0: renumber the devices of the schedule"
        )


HASH_LAYERS = "moe_n_hash_layers"
"""Option with the number of first layers that route by token ids (DeepSeek-V4). Megatron-LM's
dev branch has it (d48bd6be); 0.19 and main of August 2026 do not."""


def check_hash_layers(stage_map: StageMap, num_hash_layers: int) -> None:
    """Raise ScheduleError unless all layers that route by token ids are on the first stage.

    Only the stage with the embedding receives the token ids.
    """
    if num_hash_layers > stage_map.layers[0]:
        raise ScheduleError(
            f"{HASH_LAYERS} {num_hash_layers} needs that many layers in the first stage, which has "
            f"{stage_map.layers[0]} of {list(stage_map.layers)}: give a layer split that begins "
            f"with {num_hash_layers} or more, or fewer stages"
        )


def check_deepstack(stage_map: StageMap, model: Any) -> None:
    """Raise ScheduleError unless all layers that add image features are on the first stage.

    The first layers of Qwen3-VL add features of inner layers of the image encoder (deepstack),
    which only the first stage has.
    """
    num_levels = num_deepstack_levels(model)
    if num_levels > stage_map.layers[0]:
        raise ScheduleError(
            f"deepstack_visual_indexes has {num_levels} levels, which need that many layers in the "
            f"first stage, and the stages have {','.join(map(str, stage_map.layers))} layers: give "
            f"a --pipeline-layer-split that begins with {num_levels} or more, or use fewer stages"
        )


def num_deepstack_levels(model: Any) -> int:
    """Return the number of layers of a library's model that add image features.

    Libraries state it in the config of the encoder, or in that of the model.
    """
    if getattr(model, "language_model_only", False):  # trained without the encoder
        return 0
    owners = (model, getattr(model, "hf_config", None), getattr(model, "thinker_config", None))
    encoders = (getattr(owner, "vision_config", None) for owner in owners)
    levels = (getattr(config, "deepstack_visual_indexes", None) for config in (*encoders, model))
    return len(next((indexes for indexes in levels if indexes is not None), ()))


def check_tied_embeddings(stage_map: StageMap) -> None:
    """Raise ScheduleError if neither this package nor Megatron can tie the two embeddings."""
    ends = stage_map.end_ranks
    if stage_map.ends_meet or ends == (0, stage_map.num_ranks - 1):
        return
    raise ScheduleError(
        f"the first stage is on rank {ends[0]} and the last on rank {ends[1]}, and Megatron ties "
        f"embeddings only between ranks 0 and {stage_map.num_ranks - 1}: add "
        "--untie-embeddings-and-output-weights"
    )


logger = logging.getLogger(__name__)


class Split(NamedTuple):
    """The layers of every stage, in model order, and the costs of these stages."""

    layers: tuple[int, ...]
    costs: Costs | None  # measured costs, if given
    estimate: Costs | None = None  # in units of a chunk's passes; None if all stages are equal
    shares: tuple[Share, ...] = ()  # share of each layer, if layers are not identical


class ModelEnds(Protocol):
    """Costs of stages if embedding and output layer belong to no stage, but to all ranks."""

    def without(self, sizes: ModelSizes, pieces: Pieces) -> Pieces:
        """Return the pieces of a model without embedding and output layer."""

    def split(
        self,
        args: Any,
        sizes: ModelSizes,
        layers: tuple[int, ...],
        placement: Placement,
        costs: Costs | None,
    ) -> Split:
        """Return a split with the costs of the stages and of each rank's part of the ends."""


def split_layers(
    args: Any,
    placement: Placement,
    text: str | None,
    costs: Costs | None,
    limit_bytes: float | None = None,
    ends: ModelEnds | None = None,
    encoder: Encoder | None = None,
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
        ends: Makes the costs if no stage has the embedding and the output layer; None: the first
            and the last stage have them.
        encoder: The image encoder on the first stage, unless measured costs include it.

    Raises:
        ScheduleError: The layers or the costs do not fit the stages.
    """
    # On every rank alike, without communication: it depends on options and files only.
    layers, measured = specified_layers(args, placement, text, costs)
    sizes = _sizes(args)
    estimated = estimated_pieces(sizes, len(placement))
    if encoder is not None:
        estimated = estimated.with_encoder(encoder)
    if layers is None:
        pieces = measured or estimated
        if ends is not None:
            pieces = ends.without(sizes, pieces)
        layers = pieces.balanced(sizes.num_layers, placement, num_deepstack_levels(args))
        if limit_bytes is not None and measured is not None:
            layers = fitting_layers(pieces, layers, placement, limit_bytes)
    if text is not None and is_first_rank():
        layers_text = ",".join(map(str, layers))
        logger.info("layers per stage, in model order: %s", layers_text)
    if ends is not None:
        return ends.split(args, sizes, layers, placement, costs)
    has_unequal_layers = len(set(Share.of_stages(layers, sizes.shares))) > 1
    unlike = has_unequal_layers or sizes.predicting > 0 or encoder is not None
    estimate = estimated.costs(layers) if unlike else None
    if costs is not None and measured is not None and costs.layers != layers:
        if costs.layers is not None or text == AUTO_SPLIT:
            costs = measured.costs(layers)
    return Split(layers, costs, estimate, sizes.shares)


def specified_layers(
    args: Any, placement: Placement, text: str | None, costs: Costs | None
) -> tuple[tuple[int, ...] | None, Pieces | None]:
    """Return the layers of every stage, or None to balance them, and the measured pieces.

    Raises:
        ScheduleError: The layers or the costs do not fit the stages, or the sizes for balancing are
            unknown.
    """
    sizes = _sizes(args)
    measured = None if costs is None else pieces_of(sizes, costs)
    if text is None:
        return even_layers(sizes.num_layers, placement), measured
    if text != AUTO_SPLIT:
        return parse_layers(text, sizes.num_layers, placement), measured
    if measured is None and vocabulary_size(args) is None:
        raise ScheduleError(
            "--pipeline-layer-split auto needs the size of the vocabulary before the tokenizer "
            "is there: add --vocab-size"
        )
    return None, measured


def pieces_of(sizes: ModelSizes, costs: Costs) -> Pieces:
    """Return the pieces of measured costs; stages count as equal unless the costs have layers."""
    even = (sizes.num_layers / costs.num_stages,) * costs.num_stages
    divides = costs.layers is not None or not sizes.num_layers % costs.num_stages
    return Pieces.of(costs, costs.layers or even, sizes.shares if divides else ())


def estimated_pieces(sizes: ModelSizes, num_stages: int) -> Pieces:
    """Estimate the pieces from the GEMMs of layers and output layer, in units of an even stage.

    Each multi-token prediction layer counts as a layer with its own output layer. An output layer
    of unknown size costs nothing.
    """
    pieces = Pieces.estimated(sizes.head_in_layers, sizes.blocks / num_stages)
    return with_predicting(replace(pieces, shares=sizes.shares), sizes)


def better_split(
    costs: Costs, stage_map: StageMap, shares: tuple[Share, ...]
) -> tuple[int, ...] | None:
    """Return the balanced layers per stage if they shorten the work of the busiest rank by 3%.

    Args:
        costs: Measured costs of the stages of `stage_map`.
        stage_map: The stages of the run.
        shares: The share of each layer; empty if all are identical.
    """
    pieces = Pieces.of(costs, stage_map.layers, shares)

    def busiest_us(stage_costs: Costs) -> float:
        ranks = (stage_map.stages(rank) for rank in range(stage_map.num_ranks))
        return max(sum(stage_costs.stages[stage].total_us for stage in stages) for stages in ranks)

    layers = pieces.balanced(sum(stage_map.layers), stage_map.placement)
    return layers if busiest_us(pieces.costs(layers)) < 0.97 * busiest_us(costs) else None


def with_predicting(pieces: Pieces, sizes: ModelSizes) -> Pieces:
    return pieces.predicting(sizes.predicting, sizes.merging_in_layers, sizes.predicted)


def _sizes(args: Any) -> ModelSizes:
    return sizes_of(option_reader(args), vocabulary_size(args) or 0)


def vocabulary_size(args: Any) -> int | None:
    size: int | None = getattr(args, "padded_vocab_size", None) or getattr(args, "vocab_size", None)
    return size
