"""Which stage is where: pipeline ranks and chunks, the layers of every stage, the embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import Placement, chunks_of, stages_of


@dataclass(frozen=True, slots=True)
class StageMap:
    """The place of every stage: `placement[stage]` is a pipeline rank, its chunk counts there.

    `layers[stage]` is how many transformer layers the stage has; `predicting` layers of multi-token
    prediction follow those of the last.
    """

    placement: Placement
    layers: tuple[int, ...]
    predicting: int = 0

    @property
    def num_ranks(self) -> int:
        """Return how many pipeline ranks there are."""
        return max(self.placement) + 1

    @property
    def num_chunks(self) -> int:
        """Return how many stages every rank holds."""
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
        """Return the pipeline ranks that hold the embedding and the output layer."""
        return self.placement[0], self.placement[-1]

    @property
    def ends_meet(self) -> bool:
        """Return whether these are one."""
        return len(set(self.end_ranks)) == 1

    def stages(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, by chunk."""
        return stages_of(self.placement, self.num_ranks)[rank]

    def stage(self, rank: int, chunk: int | None) -> int:
        """Return the stage that is this chunk of this rank; Megatron calls an only chunk None."""
        return self.stages(rank)[chunk or 0]

    def chunk(self, stage: int) -> int:
        """Return which chunk of its rank the stage is."""
        return chunks_of(self.placement)[stage]


class StageLayout(PipelineParallelLayerLayout):  # type: ignore[misc]
    """Megatron's layer layout for any placement.

    Megatron's own form numbers stages by chunk, then rank, so it has no text for a V. It looks
    layers up by rank and chunk in `layout`, which works for every placement; only the number of
    the first layer must be counted in model order.
    """

    def __init__(self, stage_map: StageMap) -> None:
        stages = [[LayerType.decoder] * count for count in stage_map.layers]
        stages[0].insert(0, LayerType.embedding)
        stages[-1] += [LayerType.mtp] * stage_map.predicting + [LayerType.loss]
        self.stage_map = stage_map
        self.stages = stages
        # What libraries write into checkpoints, and read: the stages, without their places.
        self.input_data = megatrons_text(stage_map.layers, stage_map.predicting)
        self.pipeline_model_parallel_size = stage_map.num_ranks
        self.virtual_pipeline_model_parallel_size = stage_map.num_chunks
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
        """Return how many layers of this type the stages before this one have."""
        if pp_rank is None:
            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        stage = self.stage_map.stage(pp_rank, vp_stage)
        return sum(layers.count(layer_type) for layers in self.stages[:stage])


def megatrons_text(layers: Sequence[int], predicting: int = 0) -> str:
    """Return Megatron's own text for stages with so many layers, which it places looping."""
    stages = ["t" * count for count in layers]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "m" * predicting + "L"
    return "|".join(stages)


def check_ends(stage_map: StageMap) -> None:
    """Raise ScheduleError unless rank 0 reads data.

    Whether there is any to train on, Megatron's trainer tells all ranks by what rank 0 has.
    """
    ends = stage_map.end_ranks
    if 0 not in ends:
        raise ScheduleError(
            f"the first stage is on rank {ends[0]} and the last on rank {ends[1]}, and Megatron "
            "needs one of the two on rank 0: number the devices of the schedule anew"
        )


HASH_LAYERS = "moe_n_hash_layers"
"""The option that says how many of the first layers route by the tokens themselves: DeepSeek-V4.

Megatron-LM's branch dev has it (d48bd6be); 0.19 and main of August 2026 do not.
"""


def check_hash_layers(stage_map: StageMap, num_hash_layers: int) -> None:
    """Raise ScheduleError unless layers that route by tokens are where the tokens are.

    Only the stage with the embedding is given them.
    """
    if num_hash_layers > stage_map.layers[0]:
        raise ScheduleError(
            f"{HASH_LAYERS} {num_hash_layers} needs so many layers in the first stage, which has "
            f"{stage_map.layers[0]} of {list(stage_map.layers)}: give a layer split that begins "
            f"with {num_hash_layers} or more, or fewer stages"
        )


def check_tied_embeddings(stage_map: StageMap) -> None:
    """Raise ScheduleError where neither we nor Megatron can tie the two embedding ends."""
    ends = stage_map.end_ranks
    if stage_map.ends_meet or ends == (0, stage_map.num_ranks - 1):
        return
    raise ScheduleError(
        f"the first stage is on rank {ends[0]} and the last on rank {ends[1]}, and Megatron ties "
        f"embeddings only between ranks 0 and {stage_map.num_ranks - 1}: add "
        "--untie-embeddings-and-output-weights"
    )


def embedding_ranks(placement: Placement, pipeline_ranks: Sequence[int]) -> list[int]:
    """Return the global ranks of a pipeline whose embedding gradients Megatron must add up.

    One rank where it holds both ends, and then there is nothing to add: the weight is one.
    """
    return sorted({pipeline_ranks[placement[0]], pipeline_ranks[placement[-1]]})


def tie_embeddings(first: Any, last: Any) -> None:
    """Make the output layer of `last` use the word embedding of `first`, both on this rank.

    One Parameter, owned by `first`: two copies of it under one name could not be saved in
    parallel, and would need their gradients added up. Call it before the chunks are wrapped.
    """
    weight = first.embedding.word_embeddings.weight
    # The gradient comes from two passes, of which only one may add to main_grad by itself.
    weight.zero_out_wgrad = True
    last.output_layer.weight = None
    last.shared_embedding_or_output_weight = lambda: weight
    last.tie_embeddings_and_output_weights_state_dict = _leave_untouched


def _leave_untouched(*args: Any, **kwargs: Any) -> None:
    """Add nothing to a checkpoint: the chunk with the embedding saves the tied weight."""
