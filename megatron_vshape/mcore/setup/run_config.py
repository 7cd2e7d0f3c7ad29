"""The configuration of a run: the chosen schedule, its slices, and the pipeline that runs it.

This module imports neither torch nor Megatron, so that recipes can be checked without them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from megatron_vshape.core.check.simulate import usable_host_bytes
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.placement import Placement, looping, with_loss_last, zigzag
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.model.stage_costs import Share
from megatron_vshape.core.paper.catalogue import make, placement_of
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.core.schedule_names import AUTO, PLUS_NAMES
from megatron_vshape.mcore.layout.stage_map import StageMap
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.refusals import UnsupportedError


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """The schedule that the flags select; the input of all plans before the first step."""

    num_devices: int
    name: str
    from_file: Schedule | None = None
    planned: Placement | None = None  # of auto's plan, which is made before the model is built
    costs: Costs | None = None  # in us and bytes; None: `estimate`
    estimate: Costs | None = None  # relative costs of unequal stages; None: one unit per pass
    limit_bytes: float | None = None  # memory limit of a device, for auto; None: `limit_of`
    limit_of: str | None = None  # a schedule; None: 1F1B
    moved_limit_bytes: float = math.inf  # of memory that is moved off a device
    num_layers: int | None = None  # layers of the model
    layer_shares: tuple[Share, ...] = ()  # share of each layer, if layers are not identical
    keeps_full_backward: bool = False  # no B is split
    whole_stages: frozenset[int] = frozenset()  # stages whose B is not split
    fills_waits: bool = False  # a B that waits for tensor-parallel ranks runs jobs of the next W
    ties_ends: bool = False  # the first and the last stage add to one gradient
    shards_output_layer: bool = False  # the embedding, too, over all ranks
    kernels: bool = False  # P2P messages are GPU kernels (NCCL)
    enabled: frozenset[str] = frozenset()  # features of plans that Megatron's options enable
    slices: int | tuple[int, ...] = 1  # slices per microbatch; auto chooses from several
    may_overlap: bool = False  # an F may overlap with a backward (Megatron's layer plans)
    loss_last: bool = False  # number the ranks so that the last one computes the loss

    @property
    def plans_by_costs(self) -> bool:
        """Return whether the adaptive scheduler makes the schedule from costs."""
        return self.name == AUTO or self.name in PLUS_NAMES

    def request(self, num_microbatches: int) -> PlanRequest:
        """Return the plan request of a step, without costs and the limit of activation memory."""
        request = PlanRequest(self.name, self.num_devices, num_microbatches, slices=self.slices)
        return replace(request, moved_limit=usable_host_bytes(self.moved_limit_bytes))

    def published(self, name: str, num_microbatches: int) -> Schedule:
        """Make the catalogue's schedule `name` for a step of this run."""
        assert isinstance(self.slices, int)  # only auto chooses, and not while it measures
        return make(name, self.num_devices, num_microbatches, slices=self.slices)

    @property
    def moves_memory(self) -> bool:
        """Return whether the schedule moves memory off devices, or may according to the costs."""
        if self.from_file is not None:
            return self.from_file.copies
        return self.name == AUTO and self.costs is not None and self.costs.copies

    @property
    def has_overlap(self) -> bool:
        """Return whether the schedule has overlapped passes, independent of other options."""
        return self.from_file is not None and bool(self.from_file.overlapped)

    @property
    def placement(self) -> Placement:
        """Return the pipeline rank of every stage, equal for any number of microbatches."""
        return tuple(self.ranks[device] for device in self.stage_devices)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the pipeline rank of each device of the planned schedule."""
        # Libraries take the results of the loss from the last pipeline rank, Megatron-LM's trainer
        # gets them sent there. A V has the loss on device 0, so its devices are renumbered.
        return (
            with_loss_last(self.stage_devices) if self.loss_last else tuple(range(self.num_devices))
        )

    @property
    def stage_devices(self) -> Placement:
        """Return the device of every stage in the schedule's own numbering."""
        if self.from_file is not None:
            return self.from_file.placement
        if not self.plans_by_costs:
            return placement_of(self.name, self.num_devices)
        if self.planned is not None:
            return self.planned
        # Without a plan: a loop of more than two chunks is idle for less time with the memory of
        # 1F1B, and only a zigzag (with two chunks: the V) supports much less memory.
        chunks = 2 if self.costs is None else self.costs.num_stages // self.num_devices
        loops = chunks > 2 and self.limit_bytes is None
        return (looping if loops else zigzag)(self.num_devices, chunks)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run that start-up checks read."""

    model: Any  # Megatron's arguments or a library's config
    choice: ScheduleChoice
    options: Options


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The pipeline of a run: everything that is known after the checks of its options."""

    options: Options
    choice: ScheduleChoice
    stage_map: StageMap
    overlaps_grad_reduce: bool = False
    has_trial: bool = False  # once costs are measured, compare the plan with a named schedule
    recomputed_inputs: tuple[str, ...] = ()  # modules whose results B recomputes and W retains
    splits_graphs: bool = False  # capture CUDA graphs of F, B and W instead of F and BW

    def ends(self, rank: int, chunk: int | None) -> tuple[bool, bool]:
        """Return whether a rank's chunk is the model's first stage, and whether it is the last."""
        stage = self.stage_map.stage(rank, chunk)
        return stage == 0, stage == self.stage_map.last_stage


def even_slices(counts: Iterable[int], length: int | None, options: Any) -> tuple[int, ...]:
    """Return those of the numbers of slices into which `length` tokens divide evenly."""
    unit = _length_unit(options)
    return tuple(count for count in counts if count == 1 or not (length or 0) % (count * unit))


def _length_unit(options: Any) -> int:
    """Return the number of tokens that must divide the length of a slice."""
    parts: int = getattr(options, "tensor_model_parallel_size", 1)
    return parts if getattr(options, "sequence_parallel", False) else 1


def check_sequence(slices: int, length: int | None, options: Any) -> None:
    """Raise UnsupportedError unless `length` tokens are divisible into equal slices."""
    unit = _length_unit(options)
    if length is None or even_slices([slices], length, options):
        return
    valid_counts = [count for count in range(1, length // unit + 1) if not length % (count * unit)]
    nearest = min(valid_counts, key=lambda count: abs(count - slices)) if valid_counts else 1
    multiple = f", each a multiple of {unit} tensor-parallel ranks" if unit > 1 else ""
    raise UnsupportedError(
        f"--pipeline-slices {slices} does not divide {length} tokens into equal "
        f"slices{multiple}. Use --pipeline-slices {nearest}"
    )
