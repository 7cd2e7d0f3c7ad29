"""The stages in Megatron's form: its layer layout, and tied embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_vshape.core.model.placement import Placement
from megatron_vshape.mcore.layout.stage_map import StageMap


class StageLayout(PipelineParallelLayerLayout):  # type: ignore[misc]
    """Megatron's layer layout for any placement.

    Megatron's text form numbers stages by chunk, then rank, so it cannot describe the V placement.
    Megatron looks up layers by rank and chunk in `layout`, which works for every placement. Only
    the number of the first layer must be counted in model order.
    """

    def __init__(self, stage_map: StageMap) -> None:
        stages = [[LayerType.decoder] * count for count in stage_map.layers]
        stages[0].insert(0, LayerType.embedding)
        stages[-1] += [LayerType.mtp] * stage_map.predicting + [LayerType.loss]
        self.stage_map = stage_map
        self.stages = stages
        # Libraries write this into checkpoints and read it: the stages without their placement.
        self.input_data = megatrons_text(stage_map.layers, stage_map.predicting)
        self.pipeline_model_parallel_size = stage_map.num_ranks
        self.virtual_pipeline_model_parallel_size = stage_map.num_chunks
        # [rank][chunk]: what Megatron looks up to build a chunk, to count layers and to save them.
        self.layout = [
            [stages[stage] for stage in stage_map.stages(rank)]
            for rank in range(stage_map.num_ranks)
        ]
        self.flatten_layout = [layer for stage in stages for layer in stage]

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Return the number of layers of this type in all earlier stages."""
        if pp_rank is None:
            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        stage = self.stage_map.stage(pp_rank, vp_stage)
        return sum(layers.count(layer_type) for layers in self.stages[:stage])


def megatrons_text(layers: Sequence[int], predicting: int = 0) -> str:
    """Return Megatron's text for stages with these layers; Megatron places them in a loop."""
    stages = ["t" * count for count in layers]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "m" * predicting + "L"
    return "|".join(stages)


def embedding_ranks(placement: Placement, pipeline_ranks: Sequence[int]) -> list[int]:
    """Return the global ranks of a pipeline whose embedding gradients Megatron must sum.

    If one rank has the first and the last stage, it is the only one: the weight is shared, so there
    is nothing to sum.
    """
    return sorted({pipeline_ranks[placement[0]], pipeline_ranks[placement[-1]]})


def tie_embeddings(first: Any, last: Any) -> None:
    """Make the output layer of `last` use the word embedding of `first`, both on this rank.

    The result is one Parameter, owned by `first`. Two copies under one name could not be saved in
    parallel, and their gradients would have to be summed. Code that looks for either layer in
    `last` finds the same weight, for example Megatron-Bridge, which loads weights into the last
    chunk of the last rank. Call this before the chunks are wrapped.
    """
    weight = first.embedding.word_embeddings.weight
    # The gradient comes from two passes, of which only one may add to main_grad directly.
    weight.zero_out_wgrad = True
    last.output_layer._parameters.pop("weight", None)
    vars(last.output_layer)["weight"] = weight  # an attribute, not registered
    last._modules.pop("embedding", None)  # if a library has added one
    vars(last)["embedding"] = first.embedding
    last.shared_embedding_or_output_weight = lambda: weight
    last.tie_embeddings_and_output_weights_state_dict = _leave_untouched


def _leave_untouched(*args: Any, **kwargs: Any) -> None:
    """Add nothing to a checkpoint: the chunk with the embedding saves the tied weight."""


def streams_of(config: Any) -> int:
    """Return the number of residual streams of the hidden size that a stage sends.

    Hyper-connections (mHC) have more than one. The option names differ between Megatron's main and
    dev branches.
    """
    for enabled, count in (
        ("enable_mhc_connections", "mhc_num_residual_streams"),
        ("enable_hyper_connections", "num_residual_streams"),
    ):
        if getattr(config, enabled, False):
            return int(getattr(config, count))
    return 1
