"""Placement of stages: pipeline ranks and chunks, layers per stage, first and last stage.

This module does not import Megatron: `doctor` checks the stages of a recipe without it.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import Placement, chunks_of, stages_of


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
