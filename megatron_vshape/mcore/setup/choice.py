"""What schedule a run is to have: a name or a file, and what it is planned by."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from megatron_vshape.core.ask import AUTO, PLUS_NAMES, SLICES, Question, ask, find, known_as
from megatron_vshape.core.check.bounds import fits
from megatron_vshape.core.check.simulate import filled, peak_in_host
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import Share
from megatron_vshape.core.model.placement import Placement, looping, v_shape, with_loss_last
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import JOINT_NAMES
from megatron_vshape.core.planner.vocabulary import is_shared
from megatron_vshape.mcore.options import Options, schedule_names

GIB = 2.0**30

CHUNKS = (2, 4)
"""Chunks per rank with auto: limited by the stages of the costs file."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the flags say of a schedule; all that plans are made of before anything has run."""

    num_devices: int
    name: str
    from_file: Schedule | None = None
    costs: Costs | None = None  # in us and bytes; with None every chunk pass takes one unit,
    estimate: Costs | None = None  # or this, in such units, where stages have unlike layers
    limit_bytes: float | None = None  # of a device, for auto; None: activations as `limit_of` holds
    limit_of: str | tuple[float, ...] | None = None  # a schedule, or its peaks; None: 1F1B's
    host_limit_bytes: float = math.inf  # of what waits in host memory of a device
    num_layers: int | None = None  # of the model
    layer_shares: tuple[Share, ...] = ()  # of each of these, if they are not identical
    keeps_backward_whole: bool = False  # every B takes its W along, as where layers are recomputed
    whole_stages: frozenset[int] = frozenset()  # the same of these: no W is left of their B
    hides: bool = False  # a B that waits for tensor-parallel ranks runs jobs of the W after it
    ties_ends: bool = False  # the first and the last stage add to one gradient
    shares: bool = False  # all devices share the vocabulary
    kernels: bool = False  # messages are kernels, as on NCCL
    may_offload: bool = False  # what copies to the host take is measured with the rest
    slices: int | tuple[int, ...] = 1  # of every microbatch; auto chooses from several
    may_join: bool = False  # an F may run beside a backward, as Megatron's layer plans let it
    loss_last: bool = False  # ranks are numbered so that the last one makes the loss

    @property
    def most_slices(self) -> int:
        """Return in how many slices a microbatch is cut, or may be."""
        return self.slices if isinstance(self.slices, int) else max(self.slices)

    @property
    def plans_by_costs(self) -> bool:
        """Return whether the adaptive scheduler makes the order."""
        return self.name == AUTO or self.name in PLUS_NAMES

    @property
    def copies(self) -> bool:
        """Return whether activations wait in host memory, or may by what the costs say."""
        if self.from_file is not None:
            return self.from_file.copies
        return self.name == AUTO and self.costs is not None and self.costs.copies

    @property
    def in_host_bytes(self) -> float:
        """Return how much is planned to wait in host memory: blocks of it are not quite filled."""
        return filled(self.host_limit_bytes)

    @property
    def joins(self) -> bool:
        """Return whether the schedule has joint passes whatever the run is asked for."""
        return self.from_file is not None and bool(self.from_file.joint)

    @property
    def placement(self) -> Placement:
        """Return the pipeline rank of every stage, which no number of microbatches changes."""
        return tuple(self.ranks[device] for device in self.planned)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the pipeline rank that is each device of the schedule as it is planned."""
        return with_loss_last(self.planned) if self.loss_last else tuple(range(self.num_devices))

    @property
    def planned(self) -> Placement:
        """Return the device of every stage, where the schedule's name or file puts it."""
        if self.from_file is not None:
            return self.from_file.placement
        if not self.plans_by_costs:
            return _published_placement(self.name, self.num_devices)
        # a model is built for one placement: that of the best plans for so many stages
        chunks = 2 if self.costs is None else self.costs.num_stages // self.num_devices
        return v_shape(self.num_devices) if chunks == 2 else looping(self.num_devices, chunks)


@cache
def _published_placement(name: str, num_devices: int) -> Placement:
    least = 2 * num_devices if name in JOINT_NAMES else 1  # microbatches
    return ask(Question(name, num_devices, least)).schedule.placement


def choice_of(
    name: str,
    num_devices: int,
    costs: Costs | None = None,
    limit_gib: float | str | None = None,
    measures: bool = False,
) -> Choice:
    """Return the schedule that `name` names, or of the file at that path.

    A limit that is no number names the schedule whose activations are to fit. `measures` says that
    costs will be measured, where there are none yet.

    Raises:
        ScheduleError: neither a name nor a file, an unreadable file, one for another number of
            devices, incomplete, deadlocking or with microbatches out of turn; or costs or a limit
            that do not go with it.
    """
    if name == AUTO or name in PLUS_NAMES:
        _check_adaptive(name, num_devices, costs, limit_gib, measures)
        if isinstance(limit_gib, str):
            return Choice(num_devices, name, costs=costs, limit_of=limit_gib)
        limit_bytes = None if limit_gib is None else limit_gib * GIB
        return Choice(num_devices, name, costs=costs, limit_bytes=limit_bytes)
    if limit_gib is not None:
        raise ScheduleError(
            f"--pipeline-memory-limit requires --pipeline-schedule auto; the memory of {name} is "
            "fixed"
        )
    found = find(name, schedule_names())
    if isinstance(found, str):
        return Choice(num_devices, name, costs=costs)
    _check_file(name, found, num_devices)
    return Choice(num_devices, name, found, costs, shares=is_shared(found))


def choice_for(options: Options, num_devices: int, loss_last: bool = False) -> Choice:
    """Return the schedule that a run's options ask for; raises as `choice_of`, or of a value."""
    options.check()
    choice = choice_of(
        str(options.schedule),
        num_devices,
        options.costs(),
        options.memory_limit_gib,
        options.profile_steps is not None,
    )
    return replace(
        choice,
        shares=choice.shares or options.vocab_parallel,
        host_limit_bytes=_host_limit_bytes(options.host_memory_limit_gib, choice),
        slices=_slices(options, choice),
        loss_last=loss_last,
    )


def not_sliced(choice: Choice, options: Options, may_offload: bool) -> dict[str, object]:
    """Return what of this package's slices do not go with, by what it is called."""
    return {
        "vocabulary parallelism": choice.shares,
        "offloading that the run measures": may_offload,
        "overlapped passes": choice.joins,
        "--pipeline-profile-iterations or --pipeline-trace": options.profile_steps,
    }


def _slices(options: Options, choice: Choice) -> int | tuple[int, ...]:
    """Return in how many slices microbatches are cut: as a schedule file says, or the option.

    Raises:
        ScheduleError: the option says other than the file; or auto is to choose with an order
            that has its own.
    """
    given, own = options.slices, 1 if choice.from_file is None else choice.from_file.slices
    if given == AUTO and choice.name == AUTO:
        return SLICES
    if given == AUTO and choice.from_file is not None:
        return own
    if isinstance(given, str):
        raise ScheduleError(
            f"--pipeline-slices auto chooses with --pipeline-schedule auto, and {choice.name} has "
            "no choice: set a number"
        )
    if choice.from_file is not None and given not in (1, own):
        raise ScheduleError(
            f"the schedule file {choice.name} has {own} slices per microbatch, not the {given} of "
            "--pipeline-slices: remove the option, or use another file"
        )
    return max(given, own)


def _host_limit_bytes(limit_gib: float | None, choice: Choice) -> float:
    """Return the limit of what waits in host memory of a device.

    Raises:
        ScheduleError: nothing waits there, or by the costs more does than that.
    """
    option, file, costs = "--pipeline-host-memory-limit", choice.from_file, choice.costs
    if limit_gib is None:
        return math.inf
    if file is None and choice.name != AUTO:
        raise ScheduleError(
            f"{option} requires --pipeline-schedule auto, or a schedule file with offloading; "
            f"{choice.name} has none. Remove {option}"
        )
    limit_bytes = limit_gib * GIB
    if file is None or costs is None or not (choice.copies and costs.copies):
        return limit_bytes
    if costs.num_stages == file.num_stages:
        peaks = peak_in_host(file, costs)
        if not fits(peaks, [filled(limit_bytes)] * len(peaks)):
            raise ScheduleError(
                f"the schedule file {choice.name} has {max(peaks) / GIB:.3f} GiB of rank "
                f"{peaks.index(max(peaks))} wait in host memory at once, by --pipeline-costs, and "
                f"{option} {limit_gib:g} has room for {filled(limit_gib):.3f}: raise it, or plan "
                "with --host-memory-limit"
            )
    return limit_bytes


def _check_adaptive(
    name: str, num_devices: int, costs: Costs | None, limit_gib: float | str | None, measures: bool
) -> None:
    """Raise ScheduleError for what the adaptive scheduler cannot plan by."""
    allowed = CHUNKS if name == AUTO else CHUNKS[:1]
    if costs is not None and costs.num_stages not in [each * num_devices for each in allowed]:
        counts = " or ".join(str(each * num_devices) for each in allowed)
        raise ScheduleError(
            f"--pipeline-costs is for {costs.num_stages} stages, --pipeline-schedule {name} on "
            f"{num_devices} pipeline ranks has {counts}"
        )
    if isinstance(limit_gib, str):
        try:
            known_as(limit_gib, Question(AUTO, num_devices, num_devices))
        except ScheduleError as error:
            raise ScheduleError(
                f"--pipeline-memory-limit is a number of GiB or a schedule: {error}"
            ) from None
    if name == AUTO and costs is None and not measures:
        raise ScheduleError(
            "--pipeline-schedule auto needs costs: give --pipeline-costs FILE, or "
            "--pipeline-profile-iterations A:B to measure them"
        )


def _check_file(name: str, schedule: Schedule, num_devices: int) -> None:
    if schedule.num_devices != num_devices:
        raise ScheduleError(
            f"the schedule file {name} is for {schedule.num_devices} devices, this run has "
            f"{num_devices} pipeline ranks: make --pipeline-model-parallel-size fit"
        )
