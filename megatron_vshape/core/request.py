"""Plan requests and results; names of schedules; evaluation of published schedules.

The command line, the playground, the trainer and the sweep convert their terms and units to a
`PlanRequest`, and `core.plan.plan_request` returns its `PlanResult`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

from megatron_vshape.core.check.bounds import limits_by_device
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import KINDS, PARTS, Kind, ScheduleError
from megatron_vshape.core.model.pieces import Pieces, regroup
from megatron_vshape.core.model.placement import (
    Placement,
    default_placements,
    looping,
    v_shape,
    zigzag,
)
from megatron_vshape.core.model.schedule import Objective, Schedule, Timeline, load_schedule
from megatron_vshape.core.paper.blocks import BuildingBlock
from megatron_vshape.core.paper.catalogue import (
    EVERY_NAME,
    NAMES,
    OPTIONS,
    make,
    make_block,
    no_such_schedule,
)
from megatron_vshape.core.planner.lighter import fitting_layers
from megatron_vshape.core.planner.result import Plan
from megatron_vshape.core.planner.vocabulary import with_vocabulary_passes
from megatron_vshape.core.program.lowering import lower

AUTO = "auto"
"""The best schedule within a limit."""

PLUS = "+"
MEMORY_NAMES = ("v-min", "v-half", "v-zb")
PLUS_NAMES = tuple(name + PLUS for name in MEMORY_NAMES)
"""The best schedule with the memory and the placement of the schedule before the plus."""

SCHEDULE_NAMES = (*EVERY_NAME, *PLUS_NAMES)
"""Names of schedules; `SUFFIXES` are those of schedule files."""

SLICES = (1, 2, 4, 8)
"""Slices per microbatch that AUTO chooses from, if the sequence allows them."""

SUFFIXES = (".json", ".csv")
"""Suffixes of schedule files."""

StageCostFunction = Callable[[int, str], Costs]
"""Returns the costs of the model cut into that number of stages; the text names their user."""

MEGATRONS_OWN = ("1f1b", "interleaved-1f1b")
"""Schedules of stock Megatron."""

_MAX_COMPARED_PASSES = 20_000
"""Maximum passes of a published schedule in a comparison: generating a larger one is slower than
planning, which starts from the same blocks."""

_SEARCHED_CHUNKS = (1, 2, 3, 4, 6, 8, 10, 12)
"""Numbers of chunks per device of a plan if the layers of the model do not limit them."""

SAME = 1e-9
"""Relative tolerance for equal values, so that rounding decides nothing."""


def is_megatrons_own(name: str | None) -> bool:
    """Return whether Megatron's functions run the named schedule, for any number of stages."""
    return name is not None and name.partition(":")[0] in MEGATRONS_OWN


def megatrons_name(chunks: int) -> str:
    """Name stock Megatron's schedule with this number of virtual stages per rank."""
    return "1f1b" if chunks == 1 else f"interleaved-1f1b:{chunks}"


NOT_STOCK = "not supported by stock Megatron"


def why_not_stock(name: str, num_devices: int, num_microbatches: int) -> str:
    """Return the reason why stock Megatron rejects one of its schedules; empty if it does not.

    Empty for other schedules.
    """
    base_name = name.partition(":")[0]
    interleaved = base_name in ("interleaved-1f1b", "overlapped-interleaved-1f1b")
    if not interleaved or num_microbatches % num_devices == 0:
        return ""
    return f"{num_microbatches} microbatches are not a multiple of {num_devices} ranks"


_cached_schedule = lru_cache(maxsize=64)(make)
"""A frontier evaluates the same schedules at every limit."""


class BaselineSpec(NamedTuple):
    """A catalogue schedule with its stages per device (if optional) and slices per microbatch."""

    name: str
    chunks: int | None = None
    slices: int = 1

    def __str__(self) -> str:
        name = self.name if self.chunks is None else f"{self.name}:{self.chunks}"
        return name if self.slices == 1 else f"{name} in {self.slices} slices"

    def block(self, num_devices: int, num_microbatches: int) -> BuildingBlock:
        """Make its building block; raises ScheduleError for unsupported sizes."""
        return make_block(self.name, num_devices, num_microbatches, **self._choices())

    def make(self, num_devices: int, num_microbatches: int) -> Schedule:
        """Make the schedule; raises ScheduleError for unsupported sizes."""
        return _cached_schedule(self.name, num_devices, num_microbatches, **self._choices())

    def _choices(self) -> dict[str, int]:
        chunks = {} if self.chunks is None else {"num_chunks": self.chunks}
        return {"slices": self.slices, **chunks}

    def is_megatrons(self, num_devices: int, num_microbatches: int) -> bool:
        """Return whether Megatron runs it; interleaved 1F1B requires complete groups."""
        has_full_groups = self.name == "1f1b" or num_microbatches % num_devices == 0
        return self.name in MEGATRONS_OWN and has_full_groups and self.slices == 1


class EvaluatedSchedule(NamedTuple):
    """An evaluated schedule at the request's costs; `baseline` is its catalogue entry."""

    schedule: Schedule
    costs: Costs
    timeline: Timeline
    peak: tuple[float, ...]
    baseline: BaselineSpec | None = None

    @property
    def is_megatrons(self) -> bool:
        """Return whether a function of Megatron runs it: a baseline without further kinds."""
        schedule = self.schedule
        if self.baseline is None or not schedule.kinds <= {*PARTS, Kind.BW}:
            return False
        return self.baseline.is_megatrons(schedule.num_devices, schedule.num_microbatches)


def baselines_of(
    num_devices: int,
    num_microbatches: int,
    chunk_counts: Iterable[int],
    slice_counts: Iterable[int] = (1,),
) -> Iterator[tuple[BaselineSpec, BuildingBlock]]:
    """Yield the baselines for these numbers of stages per device, with their blocks.

    A schedule with optional stages per device is included once per number. Schedules larger than
    `_MAX_COMPARED_PASSES` are omitted. With several slices, only Megatron's schedules are included,
    as other libraries slice them; the search itself starts from the sliced blocks of all others.
    """
    allowed = sorted(set(chunk_counts))
    for slices, name in product(slice_counts, NAMES):
        if slices > 1 and name not in MEGATRONS_OWN:
            continue
        optional_counts = [chunks for chunks in allowed if chunks > 1]
        for chunks in optional_counts if name in OPTIONS else (None,):
            passes = 3 * num_devices * num_microbatches * slices
            if (chunks or 1) * passes > _MAX_COMPARED_PASSES:
                continue  # its block alone is slow to generate
            try:
                baseline = BaselineSpec(name, chunks, slices)
                block = baseline.block(num_devices, num_microbatches)
            except ScheduleError:  # not for these sizes
                continue
            chunks_of_block = len(block.placement) // num_devices
            if chunks_of_block in allowed and chunks_of_block * passes <= _MAX_COMPARED_PASSES:
                yield baseline, block


def with_all_kinds(schedule: Schedule, costs: Costs) -> Schedule:
    """Add the passes of vocabulary parallelism to the schedule, if the costs have them."""
    return with_vocabulary_passes(schedule, costs) if costs.shards_output_layer else schedule


def evaluate_schedule(schedule: Schedule, costs: Costs) -> EvaluatedSchedule:
    """Simulate the schedule at these costs and compute its peak memory (see `with_all_kinds`)."""
    schedule = with_all_kinds(schedule, costs)
    return EvaluatedSchedule(schedule, costs, simulate(schedule, costs), peak_held(schedule, costs))


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A plan request; times and memory are in the units of `costs`.

    Without costs, a pass of one of 2 * devices stages takes one unit of time and memory.
    """

    # A catalogue name, possibly with a plus or a colon and stages per device; AUTO; a schedule
    # file; or a schedule.
    name: str | Schedule
    num_devices: int
    num_microbatches: int
    costs: Costs | None = None  # for the maximum number of stages of a plan
    cut: StageCostFunction | None = None  # None: adjacent stages of the costs are added up
    # Memory limit for AUTO: of all devices, or of each; a name for its peak; None: that of 1F1B.
    limit: float | Sequence[float] | str | None = None
    moved_limit: float = math.inf  # memory that AUTO may move off a device
    objective: Objective = Objective.MAKESPAN
    placements: tuple[Placement, ...] = ()  # allowed for AUTO; (): any
    chunks: tuple[int, ...] = ()  # stages per device for AUTO; (): up to the stages of `costs`
    slices: int | tuple[int, ...] = 1  # per microbatch; AUTO chooses from several
    baselines: tuple[EvaluatedSchedule, ...] = ()  # a plan is no worse than those that fit
    steps: int | None = None  # search steps; None: the default of `search.plan`
    seconds: float | None = None  # search time instead of steps
    # Instead of `cut`: a model of that number of layers, balanced for every placement.
    layers: tuple[Pieces, int] | None = None

    def full_costs(self) -> Costs:
        """Return the costs of the maximum number of stages of a plan."""
        return self.costs or self.costs_of(v_shape(self.num_devices), "a plan")

    def costs_of(self, placement: Placement, name: str) -> Costs:
        """Return the costs of these stages; raises ScheduleError if there are none."""
        num_stages = len(placement)
        if self.layers is not None:
            pieces, num_layers = self.layers
            layers = pieces.balanced(num_layers, placement)
            if self.limit is not None and not isinstance(self.limit, str):
                layers = fitting_layers(pieces, layers, placement, self.limit)
            return pieces.costs(layers)
        if self.cut is not None:
            return self.cut(num_stages, name)
        if self.costs is None:
            return Costs.uniform(self.num_devices, num_stages)
        return regroup(self.costs, num_stages, name)

    def slice_counts(self) -> tuple[int, ...]:
        """Return the allowed numbers of slices per microbatch.

        Raises:
            ScheduleError: slices are required, but the costs have passes that are not of a stage.
        """
        counts = (self.slices,) if isinstance(self.slices, int) else self.slices
        if max(counts) == 1:
            return (1,)
        amounts = self.full_costs().by_stage
        shared_kinds = [kind for kind in KINDS if kind.of and kind.time in amounts]
        if not shared_kinds:
            return counts
        if 1 in counts:
            return (1,)
        raise ScheduleError(
            f"slices do not support passes that all ranks share, and the costs contain "
            f"{', '.join(shared_kind.label for shared_kind in shared_kinds)}: "
            "remove --slices, or these costs"
        )

    def chunk_counts(self) -> tuple[int, ...]:
        """Return the allowed numbers of stages per device."""
        if self.placements:
            counts = {len(placement) // self.num_devices for placement in self.placements}
            return tuple(sorted(counts))
        return self.chunks or tuple(range(1, self.full_costs().num_stages // self.num_devices + 1))

    def searched_placements(self) -> tuple[Placement, ...]:
        """Return the placements that AUTO searches.

        With costs of whole stages and one number of slices, these are the loop and the zigzag of
        every number of chunks that the costs support; else those of `default_placements`.
        """
        if self.placements:
            return self.placements
        costs, devices, slices = self.full_costs(), self.num_devices, self.slice_counts()
        placements = default_placements(devices, costs.num_stages, costs.copies)
        if self.layers is not None or costs.copies or costs.shards_output_layer or slices[1:]:
            return tuple(placements)
        counts = [chunks for chunks in self.chunk_counts() if self._has_costs_of(chunks * devices)]
        if len(counts) > len(_SEARCHED_CHUNKS):  # not limited by the number of layers
            counts = [chunks for chunks in counts if chunks in _SEARCHED_CHUNKS]
        for chunks in counts:
            if 3 * chunks * devices * self.num_microbatches * slices[0] <= _MAX_COMPARED_PASSES:
                placements += [zigzag(devices, chunks), looping(devices, chunks)]
        return tuple(dict.fromkeys(placements))

    def _has_costs_of(self, num_stages: int) -> bool:
        try:
            self.costs_of(looping(self.num_devices, num_stages // self.num_devices), "a plan")
        except ScheduleError:
            return False
        return True

    def allows(self, placement: Placement) -> bool:
        """Return whether a plan may have this placement."""
        if self.placements:
            return placement in self.placements
        return len(placement) // self.num_devices in self.chunk_counts()


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A feasible schedule and the costs of its stages.

    The last six fields are those of a search; a schedule by name has none of them.
    """

    schedule: Schedule
    costs: Costs
    block: BuildingBlock | None = None  # of a published schedule by name
    searched: Plan | None = None
    limits: tuple[float, ...] = ()  # memory limit of each device
    baselines: tuple[EvaluatedSchedule, ...] = ()  # those that could be better than the plan
    baseline: BaselineSpec | None = None  # the result itself, if it is a published schedule
    is_megatrons: bool = False  # whether Megatron runs it
    searched_bound: float = 0.0  # lower bound over the searched placements

    @property
    def plan(self) -> Plan:
        """Search result; raises ScheduleError for a schedule by name."""
        if self.searched is None:
            raise ScheduleError(f"{self.schedule.name} was requested by name, not planned")
        return self.searched


def find_schedule(name: str, names: Sequence[str] = (*SCHEDULE_NAMES, AUTO)) -> str | Schedule:
    """Return the name if it is one of `names`; otherwise load and verify a schedule file.

    A name may be followed by a colon and the stages per device (see `with_chunks`).

    Raises:
        ScheduleError: the name is unknown, or the file is unreadable or its schedule infeasible.
    """
    spec = with_chunks(name)
    if (name if spec is None else spec.name) in names:
        return name
    path = Path(name)
    if path.suffix not in SUFFIXES and not path.exists():
        raise no_such_schedule(name, names, "; a schedule file ends in .json or .csv")
    schedule = load_schedule(path)
    try:
        verify(schedule)
        lower(schedule)  # proves the order of its messages too
    except ScheduleError as error:
        raise ScheduleError(f"the schedule file {path} cannot run: {error}") from None
    return schedule


def with_chunks(text: str) -> BaselineSpec | None:
    """Parse a name with stages per device, as interleaved-1f1b:4; None for another form.

    Raises:
        ScheduleError: the schedule has no optional stages per device, or no number follows the
            colon.
    """
    name, colon, chunks = text.partition(":")
    if not colon or name not in EVERY_NAME:
        return None
    if name not in OPTIONS or not (chunks.isdecimal() and 0 < len(chunks.lstrip("0")) < 4):
        examples = " or ".join(f"{option}:4" for option in OPTIONS)
        raise ScheduleError(
            f"{text!r:.60} is not a schedule: a number of chunks per rank can follow "
            f"the colon of {examples}"
        )
    return BaselineSpec(name, int(chunks))


def evaluate_named(name: str | BaselineSpec, request: PlanRequest) -> EvaluatedSchedule:
    """Simulate a published schedule or a schedule file at the request's costs; compute its peak.

    A text is a catalogue name, possibly with a colon and the stages per device, as
    interleaved-1f1b:4; or a schedule file.

    Raises:
        ScheduleError: the name is unknown or does not support this size, or the costs are for other
            stages.
    """
    devices, microbatches = request.num_devices, request.num_microbatches
    spec = find_schedule(name, EVERY_NAME) if isinstance(name, str) else name
    if isinstance(spec, Schedule):
        sizes = spec.num_devices, spec.unsliced_microbatches
        if sizes != (devices, microbatches):
            raise ScheduleError(
                f"{name} is for {sizes[0]} devices and {sizes[1]} microbatches, "
                f"not for {devices} and {microbatches}"
            )
        return evaluate_schedule(spec, request.costs_of(spec.placement, spec.name))
    if isinstance(spec, str):
        spec = with_chunks(spec) or BaselineSpec(spec)
    schedule = spec.make(devices, microbatches)
    costs = request.costs_of(schedule.placement, str(spec))
    return evaluate_schedule(schedule.split_overlapped(), costs)._replace(baseline=spec)


def limits_of(request: PlanRequest) -> tuple[float, ...]:
    """Return the memory limit of every device; by default, or for a name, a schedule's peak."""
    limit = "1f1b" if request.limit is None else request.limit
    if isinstance(limit, str):
        limit = max(evaluate_named(limit, request).peak)
    return limits_by_device(limit, request.num_devices)
