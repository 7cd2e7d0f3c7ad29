"""Which stage is where: pipeline ranks and chunks, the layers of every stage, the model's ends.

Nothing here needs Megatron: `doctor` checks a recipe's stages where it is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def check_ends(stage_map: StageMap) -> None:
    """Raise ScheduleError unless rank 0 reads data.

    Whether there is any to train on, Megatron's trainer tells all ranks by what rank 0 has.
    """
    ends = stage_map.end_ranks
    if 0 not in ends:
        raise ScheduleError(
            f"the first stage is on rank {ends[0]} and the last on rank {ends[1]}, and Megatron "
            "needs one of the two on rank 0: renumber the devices of the schedule"
        )


HASH_LAYERS = "moe_n_hash_layers"
"""Option with the number of first layers that route by tokens (DeepSeek-V4).

Megatron-LM's branch dev has it (d48bd6be); 0.19 and main of August 2026 do not.
"""


def check_hash_layers(stage_map: StageMap, num_hash_layers: int) -> None:
    """Raise ScheduleError unless layers that route by tokens are where the tokens are.

    Only the stage with the embedding is given them.
    """
    if num_hash_layers > stage_map.layers[0]:
        raise ScheduleError(
            f"{HASH_LAYERS} {num_hash_layers} needs that many layers in the first stage, which has "
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
