"""The schedule of a run: a name or a file, the inputs of its plans, and the checks of both.

This module imports neither torch nor Megatron, so that recipes can be checked without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_vshape.core.check.simulate import usable_host_bytes
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.pieces import Share
from megatron_vshape.core.model.placement import Placement, looping, v_shape, with_loss_last
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import NAMES, make, placement_of
from megatron_vshape.core.request import (
    AUTO,
    PLUS_NAMES,
    PlanRequest,
    evaluate_named,
    find_schedule,
)
from megatron_vshape.mcore.layout import multi_token
from megatron_vshape.mcore.layout.stage_map import (
    HASH_LAYERS,
    StageMap,
    check_deepstack,
    check_ends,
    check_hash_layers,
    check_tied_embeddings,
    num_deepstack_levels,
)
from megatron_vshape.mcore.options import Options, schedule_names
from megatron_vshape.mcore.refusals import BATCH_SIZES
from megatron_vshape.mcore.setup.features import Settings, features
from megatron_vshape.mcore.setup.translate import Translated, translate

GIB = 2.0**30

CHUNKS = (2, 4)
"""Chunks per rank that auto supports; the stages of the costs file select one."""


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """The schedule that the flags select; the input of all plans before the first step."""

    num_devices: int
    name: str
    from_file: Schedule | None = None
    costs: Costs | None = None  # in us and bytes; None: `estimate`
    estimate: Costs | None = None  # relative costs of unequal stages; None: one unit per pass
    limit_bytes: float | None = None  # memory limit of a device, for auto; None: `limit_of`
    limit_of: str | None = None  # a schedule; None: 1F1B
    moved_limit_bytes: float = math.inf  # of memory that is moved off a device
    num_layers: int | None = None  # layers of the model
    layer_shares: tuple[Share, ...] = ()  # share of each layer, if layers are not identical
    keeps_backward_whole: bool = False  # no B is split
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
        # A model is built for one placement, so use that of the best plans for this stage count.
        chunks = 2 if self.costs is None else self.costs.num_stages // self.num_devices
        return v_shape(self.num_devices) if chunks == 2 else looping(self.num_devices, chunks)


def resolve_schedule(options: Options, num_devices: int, loss_last: bool = False) -> ScheduleChoice:
    """Find the schedule that the options name (a name or a file), with all options of features.

    Makes no schedule yet: this needs the number of microbatches (`plans.Planner`).

    Raises:
        ScheduleError: The schedule is neither a name nor a file; or the file is unreadable, for
            another number of devices, incomplete, deadlocks, or has microbatches out of order; or
            costs or memory limit do not fit the schedule.
        UnsupportedError: An option has an invalid value.
    """
    options.check()
    name, limit = str(options.schedule), options.memory_limit_gib
    choice = ScheduleChoice(num_devices, name, costs=options.costs(), loss_last=loss_last)
    if choice.plans_by_costs:
        _check_adaptive(choice, limit, measures=options.profile_steps is not None)
        if isinstance(limit, str):  # a schedule whose activation memory is the limit
            choice = replace(choice, limit_of=limit)
        elif limit is not None:
            choice = replace(choice, limit_bytes=limit * GIB)
    elif limit is not None:
        raise ScheduleError(
            f"--pipeline-memory-limit requires --pipeline-schedule auto; the memory of {name} is "
            "fixed"
        )
    else:
        choice = replace(choice, from_file=_read_file(name, num_devices))
    # A feature changes only its own fields; without its option, none.
    for feature in features():
        choice = feature.configure(choice, options)
    return choice


def _read_file(name: str, num_devices: int) -> Schedule | None:
    """Read and verify the schedule file at the path `name`; None for a schedule's name."""
    schedule = find_schedule(name, schedule_names())
    if isinstance(schedule, str):
        return None
    if schedule.num_devices != num_devices:
        raise ScheduleError(
            f"the schedule file {name} is for {schedule.num_devices} devices, this run has "
            f"{num_devices} pipeline ranks: make --pipeline-model-parallel-size fit"
        )
    return schedule


def _check_adaptive(choice: ScheduleChoice, limit: float | str | None, measures: bool) -> None:
    """Raise ScheduleError for inputs that the adaptive scheduler does not support.

    With `measures`, the run measures costs if none are given.
    """
    name, num_devices, costs = choice.name, choice.num_devices, choice.costs
    allowed = CHUNKS if name == AUTO else CHUNKS[:1]
    if costs is not None and costs.num_stages not in [chunks * num_devices for chunks in allowed]:
        counts = " or ".join(str(chunks * num_devices) for chunks in allowed)
        raise ScheduleError(
            f"--pipeline-costs is for {costs.num_stages} stages, --pipeline-schedule {name} on "
            f"{num_devices} pipeline ranks has {counts}"
        )
    if isinstance(limit, str):
        try:
            evaluate_named(limit, PlanRequest(AUTO, num_devices, num_devices))
        except ScheduleError as error:
            raise ScheduleError(
                f"--pipeline-memory-limit is a number of GiB or a schedule: {error}"
            ) from None
    if name == AUTO and costs is None and not measures:
        raise ScheduleError(
            "--pipeline-schedule auto needs costs: give --pipeline-costs FILE, or "
            "--pipeline-profile-iterations A:B to measure them"
        )


Check = Callable[[Any, str, Placement], None]
"""Rejects options of arguments or a config for a schedule with this name and placement."""


def translate_and_check(
    model: Any, choice: ScheduleChoice, options: Options, check: Check
) -> tuple[ScheduleChoice, Translated]:
    """Translate options for Megatron's stages and reset them in `model`; reject unsupported ones.

    Returns the choice without alternatives that this model does not support, and the translated
    options. `model` is Megatron's arguments or a library's config, each with its own `check`.

    Raises:
        ScheduleError: An option does not fit the model.
        UnsupportedError: The schedule does not support an option.
    """
    # First, as it resets the options that it translates: the checks see only those that remain.
    translated = translate(model, choice.placement, options.layer_split)
    check(model, choice.name, choice.placement)
    settings = Settings(model, replace(choice, enabled=translated.enabled), options)
    # Without their options, features accept everything, and `narrowed` returns the same choice.
    for feature in features():
        feature.check(settings)
    choice = narrowed(settings)
    return choice, replace(translated, warnings=tuple(known_to_lose(model, choice)))


def narrowed(settings: Settings) -> ScheduleChoice:
    """Return the choice without the alternatives (numbers of slices) that the model rules out."""
    for feature in features():
        settings = replace(settings, choice=feature.narrow(settings))
    return settings.choice


def known_to_lose(model: Any, choice: ScheduleChoice) -> Iterator[str]:
    """Yield a warning for combinations that are slower than Megatron's schedule or train less."""
    has_full_recompute = getattr(model, "recompute_granularity", None) == "full"
    if has_full_recompute and choice.name in NAMES and make(choice.name, 2, 2).splits_backward:
        yield (
            f"schedule {choice.name} splits the backward, and --recompute-granularity full "
            "prevents "
            "that: it is slower than interleaved-1f1b and may need no recomputation; "
            "megatron-vshape advise compares them"
        )
    if has_full_recompute and num_deepstack_levels(model):
        yield (
            "with --recompute-granularity full, Megatron-Bridge's deepstack mergers get no "
            "gradients, under Megatron's schedules too: use selective recomputation to train them"
        )


def check_stages(settings: Settings, stage_map: StageMap, ties_ends: bool) -> None:
    """Check the stages, and the options that depend on the placement.

    Raises:
        ScheduleError: Megatron does not support the ranks of the first and the last stage, or a
            feature does not support the stages.
        UnsupportedError: A feature does not support an option of the model.
    """
    # As above: each feature checks the stages only if the run uses it.
    for feature in features():
        feature.check_stages(settings, stage_map)
    # Only Megatron-LM's trainer reads the data on rank 0 for all.
    if not settings.choice.loss_last:
        check_ends(stage_map)
    multi_token.check_ends(stage_map)
    check_hash_layers(stage_map, getattr(settings.model, HASH_LAYERS, None) or 0)
    check_deepstack(stage_map, settings.model)
    if ties_ends:
        check_tied_embeddings(stage_map)


def check_batch_size(choice: ScheduleChoice, args: Any) -> None:
    """Raise ScheduleError if the batch size changes and the schedule is for one number."""
    option = next(
        (
            option_name
            for option_name in BATCH_SIZES
            if getattr(args, option_name, None) is not None
        ),
        None,
    )
    if choice.from_file is not None and option is not None:
        raise ScheduleError(
            f"the schedule file {choice.name} is for one number of microbatches, and this run "
            f"changes it: remove --{option.replace('_', '-')}, or use a schedule by name"
        )
