"""Baselines of a plan, by stages per device, and where backwards are split into B and W."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from megatron_vshape.core.check.bounds import fits, room_in
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import PARTS, Kind, ScheduleError
from megatron_vshape.core.model.placement import Placement, stages_of
from megatron_vshape.core.model.schedule import Objective, Schedule, Timeline
from megatron_vshape.core.paper.blocks import BuildingBlock
from megatron_vshape.core.paper.catalogue import NAMES, OPTIONS, make, make_block
from megatron_vshape.core.planner.vocabulary import shared_if_told

MEGATRONS_OWN = ("1f1b", "interleaved-1f1b")
"""Schedules of stock Megatron."""

MOST_COMPARED = 20_000
"""Maximum passes of a published schedule in a comparison: generating a larger one is slower than
planning, which starts from the same blocks."""

INSERTIONS = (shared_if_told,)
"""Functions that insert the passes of a capability into a schedule, if the costs have them."""

SAME = 1e-9
"""Relative tolerance for equal values, so that rounding decides nothing."""

WORTH = 0.002
"""Minimum share of the busiest device's work that full backwards must save to be planned; smaller
savings are only used where fusing delays no pass."""


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
    own = name.partition(":")[0]
    interleaved = own in ("interleaved-1f1b", "overlapped-interleaved-1f1b")
    if not interleaved or num_microbatches % num_devices == 0:
        return ""
    return f"{num_microbatches} microbatches are not a multiple of {num_devices} ranks"


_made = lru_cache(maxsize=64)(make)
"""A frontier evaluates the same schedules at every limit."""


class BaselineSpec(NamedTuple):
    """A catalogue schedule with its stages per device (if optional) and slices per microbatch."""

    name: str
    chunks: int | None = None
    slices: int = 1

    def __str__(self) -> str:
        named = self.name if self.chunks is None else f"{self.name}:{self.chunks}"
        return named if self.slices == 1 else f"{named} in {self.slices} slices"

    def block(self, num_devices: int, num_microbatches: int) -> BuildingBlock:
        """Make its building block; raises ScheduleError for unsupported sizes."""
        return make_block(self.name, num_devices, num_microbatches, **self._choices())

    def make(self, num_devices: int, num_microbatches: int) -> Schedule:
        """Make the schedule; raises ScheduleError for unsupported sizes."""
        return _made(self.name, num_devices, num_microbatches, **self._choices())

    def _choices(self) -> dict[str, int]:
        chunks = {} if self.chunks is None else {"num_chunks": self.chunks}
        return {"slices": self.slices, **chunks}

    def is_megatrons(self, num_devices: int, num_microbatches: int) -> bool:
        """Return whether Megatron runs it; interleaved 1F1B requires complete groups."""
        whole = self.name == "1f1b" or num_microbatches % num_devices == 0
        return self.name in MEGATRONS_OWN and whole and self.slices == 1


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
    `MOST_COMPARED` are omitted. With several slices, only Megatron's schedules are included, as
    other libraries slice them; the search itself starts from the sliced blocks of all others.
    """
    allowed = sorted(set(chunk_counts))
    for slices, name in product(slice_counts, NAMES):
        if slices > 1 and name not in MEGATRONS_OWN:
            continue
        more = [chunks for chunks in allowed if chunks > 1]
        for chunks in more if name in OPTIONS else (None,):
            passes = 3 * num_devices * num_microbatches * slices
            if (chunks or 1) * passes > MOST_COMPARED:
                continue  # its block alone is slow to generate
            try:
                baseline = BaselineSpec(name, chunks, slices)
                block = baseline.block(num_devices, num_microbatches)
            except ScheduleError:  # not for these sizes
                continue
            held = len(block.placement) // num_devices
            if held in allowed and held * passes <= MOST_COMPARED:
                yield baseline, block


def with_all_kinds(schedule: Schedule, costs: Costs) -> Schedule:
    """Return the schedule with all kinds of passes that the costs have."""
    for insert in INSERTIONS:
        schedule = insert(schedule, costs)
    return schedule


def evaluate(schedule: Schedule, costs: Costs) -> EvaluatedSchedule:
    """Evaluate the schedule at these costs, with all kinds of passes that the costs have."""
    schedule = with_all_kinds(schedule, costs)
    return EvaluatedSchedule(schedule, costs, simulate(schedule, costs), peak_held(schedule, costs))


def evaluate_baseline(
    baseline: BaselineSpec,
    num_devices: int,
    num_microbatches: int,
    costs_of: Callable[[Placement, str], Costs],
) -> EvaluatedSchedule:
    """Evaluate a catalogue schedule: times and peak memory.

    Raises:
        ScheduleError: the sizes are not supported, or there are no costs of its stages.
    """
    schedule = baseline.make(num_devices, num_microbatches)
    costs = costs_of(schedule.placement, str(baseline))
    return evaluate(schedule.split_overlapped(), costs)._replace(baseline=baseline)


def may_fit(
    block: BuildingBlock, costs: Costs, num_microbatches: int, limits: Sequence[float]
) -> bool:
    """Return whether the block's schedule may fit; False if its steady phase exceeds the limits."""
    if num_microbatches * costs.slices < 2 * block.num_devices:  # it may have no steady phase
        return True
    held = list(map(min, costs.held_after_forward_bytes, costs.held_after_backward_bytes))
    rows = zip(block.peaks(), stages_of(block.placement, block.num_devices), strict=True)
    _, limits = room_in(costs, block.placement, limits)
    return fits([peak * min(held[stage] for stage in own) for peak, own in rows], limits)


def with_fused_backwards(known: EvaluatedSchedule, objective: Objective) -> EvaluatedSchedule:
    """Fuse B and W to BW where that is not slower, if BW has a separate cost.

    B sends its gradient before W has run, and W fills idle time. BW costs less if it hides a
    collective or saves launch overhead. So the better choice depends on the position: BW in the
    steady state, if no pass waits for B; B in warm-up and cool-down, where a chain of B is the
    critical path.
    """
    if known.costs.whole_us is None:
        return known
    # Imported here because numba needs a second to import.
    from megatron_vshape.core.fusing import fuse_backwards

    schedule = fuse_backwards(known.timeline, known.costs, objective)
    return evaluate(schedule, known.costs)._replace(baseline=known.baseline)


def saves(costs: Costs) -> float:
    """Return the share of all passes' time that full backwards save; at least 0."""
    split = [sum(costs.time_us(kind, at) for kind in PARTS) for at in range(costs.num_stages)]
    forward = [costs.time_us(Kind.F, stage) for stage in range(costs.num_stages)]
    whole = costs.whole_us
    if whole is None:
        return 0.0
    return max(0.0, 1 - (sum(forward) + sum(whole)) / sum(split))
