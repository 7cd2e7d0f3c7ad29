"""Vocabulary parallelism: all pipeline ranks share the embedding and the output layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import LOGITS
from megatron_vshape.core.model.pieces import Pieces, without_ends
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.planner.vocabulary import (
    ALL_REDUCE_TIME,
    PENDING_LOGITS,
    in_proportion,
    is_shared,
    most_logits_bytes,
    share_forwards,
    shared_pieces,
    uniform_shared,
    with_vocabulary_passes,
    without_shared,
)
from megatron_vshape.mcore.hook import Hook
from megatron_vshape.mcore.layout.sizes import ModelSizes
from megatron_vshape.mcore.layout.stage_map import (
    ModelEnds,
    Split,
    estimated_pieces,
    pieces_of,
    vocabulary_size,
    with_predicting,
)
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.refusals import (
    GRAPHS,
    OVERLAP_OPTION,
    UNTRIED,
    Refusal,
    check_encoder,
    check_refusals,
    each_of,
    is_given,
)
from megatron_vshape.mcore.setup.features import BuiltChunk, Feature
from megatron_vshape.mcore.setup.run_config import Settings

if TYPE_CHECKING:
    from megatron_vshape.mcore.setup.run_config import RunConfig, ScheduleChoice
    from megatron_vshape.mcore.step.forward_backward import PipelineRunner
    from megatron_vshape.mcore.step.stage import StepFeature


FLAG = "--pipeline-vocab-parallel"

_NEEDS_LOGITS = "it needs the full logits, which no rank has"
_NO_FORWARD = "it saves tensors of the output layer, whose forward does not run"
_WIDE_LOGITS = "each rank computes its rows of the logits in the dtype of the parameters"
_OF_F_B_W = "graphs capture only F, B and W"


def _is_of_mcore_bridge(config: Any) -> bool:
    """Check for a config of ms-swift's mcore_bridge, which NVIDIA's Megatron-Bridge is not."""
    packages = (base.__module__.partition(".")[0] for base in type(config).__mro__)
    return "mcore_bridge" in packages


REFUSALS = (
    Refusal("optimizer_post_validation", UNTRIED, in_config=False),
    Refusal(OVERLAP_OPTION, UNTRIED),
    Refusal("cuda_graph_impl", _OF_F_B_W, **GRAPHS),
    Refusal("external_cuda_graph", _OF_F_B_W),
    *each_of(
        UNTRIED,
        *("use_mup", "mtp_detach_heads", "fp32_residual_connection", "enable_autocast"),
        *("init_model_with_meta_device", "fp8_output_proj"),
    ),
    Refusal(
        "hf_model_type",
        "mcore_bridge loads and saves the embedding and the output layer as weights of one stage",
        flag="a model of mcore_bridge (ms-swift)",
        holds=_is_of_mcore_bridge,
    ),
    Refusal("perform_rl_step", _NEEDS_LOGITS),
    *each_of(
        _NEEDS_LOGITS,
        *("logits_save_dir", "logits_load_dir", "export_kd_teacher_load"),
        in_config=False,
    ),
    *(
        Refusal(f"save_{values}_interval", _NO_FORWARD, is_set=is_given, in_config=False)
        for values in ("activations", "dgrads")
    ),
    Refusal(
        "logit_dtype",
        _WIDE_LOGITS,
        flag="--output-logit-dtype",
        is_set=is_given,
        in_config=False,
    ),
)
"""Options that vocabulary parallelism rejects."""


def check_model_options(model: Any) -> None:
    """Raise UnsupportedError for the first option that vocabulary parallelism does not support."""
    check_refusals(REFUSALS, model, FLAG)


class VocabularyFeature(Feature):
    """Shares the vocabulary if the option or the schedule file does."""

    flag = FLAG
    refusals = REFUSALS

    def label(self, settings: Settings) -> str | None:
        """Return the flag, or a description if a schedule file enables the feature."""
        if settings.options.vocab_parallel:
            return FLAG
        return "vocabulary parallelism" if settings.choice.shards_output_layer else None

    def requires_ours(self, options: Options) -> bool:
        """Return whether the flag is given."""
        return options.vocab_parallel

    def configure(self, choice: ScheduleChoice, options: Options) -> ScheduleChoice:
        """Return the choice with the option; a schedule file with vocabulary passes implies it."""
        file = choice.from_file
        shares = options.vocab_parallel or (file is not None and is_shared(file))
        return replace(choice, shards_output_layer=shares)

    def check(self, settings: Settings) -> None:
        """Reject options that vocabulary parallelism does not support."""
        if settings.choice.shards_output_layer:
            check_model_options(settings.model)

    def ends(self, choice: ScheduleChoice) -> ModelEnds | None:
        """Return the costs of stages without the vocabulary, and of each rank's part of it."""
        return SharedEnds() if choice.shards_output_layer else None

    measured_kinds = (LOGITS,)

    def adapt_costs(
        self, choice: ScheduleChoice, costs: Costs | None, num_stages: int
    ) -> Costs | None:
        """Return the costs with vocabulary passes, estimated if unknown, or without them."""
        if not choice.shards_output_layer:
            return costs and without_shared(costs)
        uniform = uniform_shared(choice.num_devices, num_stages)
        return in_proportion(costs or uniform, choice.estimate or uniform)

    def adapt_schedule(self, schedule: Schedule, costs: Costs) -> Schedule:
        """Return the schedule with vocabulary passes, if the costs include them."""
        return with_vocabulary_passes(schedule, costs)

    def adapt_evaluation(self, choice: ScheduleChoice, wave: Schedule) -> Schedule:
        """Return the schedule with the forward passes of the vocabulary."""
        return share_forwards(wave) if choice.shards_output_layer else wave

    def least_bytes(self, costs: Costs) -> float:
        """Return the memory of the logits of one microbatch."""
        return most_logits_bytes(costs, min(PENDING_LOGITS))

    def change_arguments(self, args: Any, pipeline: RunConfig) -> None:
        """Make Megatron pad the vocabulary to a multiple of the ranks that share it."""
        if pipeline.choice.shards_output_layer:
            from megatron_vshape.mcore.features.vocabulary.model import pad_vocabulary

            pad_vocabulary(args, pipeline.stage_map.num_ranks)

    def build_chunk(self, built: BuiltChunk) -> None:
        """Replace embedding and output layer of a chunk by the rows of this rank."""
        if built.pipeline.choice.shards_output_layer:
            from megatron_vshape.mcore.features.vocabulary.model import convert_rows, share_rows

            stage_map = built.pipeline.stage_map
            share_rows(built.state, built.first, built.model, stage_map, built.rank, built.chunk)
            convert_rows(built.patch)

    def owns_embeddings(self, pipeline: RunConfig, model: Any) -> bool:
        """Return whether a chunk has rows that all ranks share."""
        if not pipeline.choice.shards_output_layer:
            return False
        from megatron_vshape.mcore.features.vocabulary.model import check_rows, has_shared_rows

        if not has_shared_rows(model):
            return False
        check_rows(model)
        return True

    def check_chunks(self, pipeline: RunConfig, rank: int, chunks: Sequence[Any]) -> None:
        """Reject changes of embedding, output layer and loss, whose forward does not run."""
        if pipeline.choice.shards_output_layer:
            from megatron_vshape.mcore.features.vocabulary.model import check_ends

            check_encoder(chunks, self.flag, "it uses the embedding of the first stage")
            ends = pipeline.ends(rank, 0)[0], pipeline.ends(rank, len(chunks) - 1)[1]
            check_ends(chunks[0], chunks[-1], ends)

    def hooks(self) -> tuple[Hook, ...]:
        """Return the feature's replacements of Megatron's attributes."""
        from megatron_vshape.mcore.features.vocabulary.loss_of_logits import HOOKS

        return HOOKS


FEATURE = VocabularyFeature()


def in_steps(runner: PipelineRunner) -> StepFeature:
    """Return the passes of the vocabulary."""
    from megatron_vshape.mcore.features.vocabulary.step import VocabularySharing

    return VocabularySharing(runner.pipeline.choice.shards_output_layer)


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
                self.without(sizes, measured).costs(layers).having(**dict(vocabulary_costs.others))
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
            stored_memory *= blocks_per_stage * measured.layer.held_after_forward_bytes
        all_reduce_us = ALL_REDUCE_TIME * blocks_per_stage * pieces.layer.forward_us
        shared = shared_pieces(pieces, ranks, all_reduce_us, stored_memory, num_predicting)
        return with_predicting(shared, sizes).costs(layers)
