"""Plan requests: the best schedule for given costs within a memory limit.

The command line, the playground, the trainer and the sweep all use this module, with their own
terms and units. It defines their common rules:

* the meaning of schedule names, and errors for unknown names;
* the default memory limit;
* no plan is worse than an evaluated schedule that fits;
* among equal times, the plan with less memory is chosen.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from operator import sub
from pathlib import Path
from typing import NamedTuple

from megatron_vshape.core.baselines import (
    SAME,
    BaselineSpec,
    EvaluatedSchedule,
    joined,
    judge,
    judge_rival,
    may_fit,
    rivals_of,
)
from megatron_vshape.core.check.bounds import LimitError, bound_at, each_limit, fits
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import Pieces
from megatron_vshape.core.model.offload_costs import without_copies
from megatron_vshape.core.model.pieces import regroup
from megatron_vshape.core.model.placement import Placement, default_placements, v_shape
from megatron_vshape.core.model.schedule import Objective, Plan, Schedule, load_schedule
from megatron_vshape.core.paper.building_block import BuildingBlock
from megatron_vshape.core.paper.catalogue import (
    EVERY_NAME,
    OPTIONS,
    make,
    make_block,
    no_such_schedule,
)
from megatron_vshape.core.planner.lighter import fitting_layers
from megatron_vshape.core.planner.vocabulary import (
    WAITING,
    most_logits_bytes,
    share_vocabulary,
    shared_if_told,
    tells_shared,
    without_shared,
)
from megatron_vshape.core.program.lowering import lower, whole_backwards

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

Cut = Callable[[int, str], Costs]
"""Returns the costs of the model cut into that number of stages; the text names their user."""


def _ignored(_: object) -> None:
    """Ignore a result."""


def _never() -> bool:
    return False


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
    cut: Cut | None = None  # None: adjacent stages of the costs are added up
    # Memory limit for AUTO: of all devices, or of each; a name for its peak; None: that of 1F1B.
    limit: float | Sequence[float] | str | None = None
    in_host: float = math.inf  # maximum host memory per device for AUTO
    objective: Objective = Objective.MAKESPAN
    placements: tuple[Placement, ...] = ()  # allowed for AUTO; (): any
    chunks: tuple[int, ...] = ()  # stages per device for AUTO; (): up to the stages of `costs`
    overlapped: bool = False  # keep F&B pairs of a named schedule
    choices: tuple[tuple[str, int], ...] = ()  # further arguments of `make`
    slices: int | tuple[int, ...] = 1  # per microbatch; AUTO chooses from several
    steps: int | None = None  # search steps; None: the default of `search.plan`
    seconds: float | None = None  # search time instead of steps
    progress: Callable[[int, float, float], None] | None = None  # steps, best value, lower bound
    found: Callable[[Callable[[], "Planned"]], None] = _ignored  # gets a function for the best plan
    stopped: Callable[[], bool] = _never  # whether to end with the best result so far
    # Instead of `cut`: a model of that number of layers, balanced for every placement.
    layers: tuple[Pieces, int] | None = None

    def whole(self) -> Costs:
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

    def changed(self, change: Callable[[Costs], Costs]) -> "PlanRequest":
        """Return the request with changed costs."""
        costs, cut = None if self.costs is None else change(self.costs), self.cut
        if cut is None:
            return replace(self, costs=costs)
        return replace(self, costs=costs, cut=lambda stages, name: change(cut(stages, name)))

    def slice_counts(self) -> tuple[int, ...]:
        """Return the allowed numbers of slices per microbatch.

        Raises:
            ScheduleError: slices are required, but the costs have passes that do not support
                slices.
        """
        counts = (self.slices,) if isinstance(self.slices, int) else self.slices
        if max(counts) == 1:
            return (1,)
        if not tells_shared(self.whole()):
            return counts
        if 1 in counts:
            return (1,)
        raise ScheduleError(
            "slices do not support a shared vocabulary, which the costs contain: remove --slices, "
            "or remove the shared vocabulary from the costs"
        )

    def chunk_counts(self) -> tuple[int, ...]:
        """Return the allowed numbers of stages per device."""
        if self.placements:
            counts = {len(each) // self.num_devices for each in self.placements}
            return tuple(sorted(counts))
        return self.chunks or tuple(range(1, self.whole().num_stages // self.num_devices + 1))

    def allows(self, placement: Placement) -> bool:
        """Return whether a plan may have this placement."""
        if self.placements:
            return placement in self.placements
        return len(placement) // self.num_devices in self.chunk_counts()


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A feasible schedule, the costs of its stages, and its building block."""

    schedule: Schedule
    costs: Costs
    block: BuildingBlock | None = None


@dataclass(frozen=True, slots=True)
class Planned(PlanResult):
    """A plan within the limits of every device.

    Attributes:
        plan: the search result.
        limits: memory limit of each device.
        known: the evaluated schedules that could be better.
        is_known: the catalogue entry of the schedule, as interleaved-1f1b:4; None for a new
            schedule.
        is_megatrons: whether Megatron runs it.
        searched_bound: lower bound over the searched placements.
    """

    plan: Plan = field(kw_only=True)
    limits: tuple[float, ...] = field(kw_only=True)
    known: tuple[EvaluatedSchedule, ...] = field(kw_only=True)
    is_known: BaselineSpec | None = field(kw_only=True, default=None)
    is_megatrons: bool = field(kw_only=True, default=False)
    searched_bound: float = field(kw_only=True, default=0.0)


def ask(question: PlanRequest) -> PlanResult:
    """Make or plan the requested schedule; a planned one is a `Planned`.

    Raises:
        LimitError: the limit is infeasible.
        ScheduleError: the schedule does not exist or does not support these sizes, its file is
            unreadable or infeasible, or the costs are for other stages.
    """
    name = question.name
    if isinstance(name, str):
        name = find(name)
    if name == AUTO:
        return best_order(question)
    slices = question.slices
    if not isinstance(slices, int):
        raise ScheduleError(
            f"only {AUTO} chooses from several numbers of slices; {name} supports one, not "
            f"{', '.join(map(str, slices))}"
        )
    if name in PLUS_NAMES:
        return _at_memory_of(BaselineSpec(str(name).removesuffix(PLUS), slices=slices), question)
    block = None
    if isinstance(name, str):
        sizes = question.num_devices, question.num_microbatches
        choices = dict(question.choices, slices=slices)
        own = with_chunks(name) or BaselineSpec(name)
        choices |= {} if own.chunks is None else {"num_chunks": own.chunks}
        block = make_block(own.name, *sizes, **choices)
        made = make(own.name, *sizes, **choices)
        # The name includes the chunks, to distinguish several schedules of one name.
        name = made if own.chunks is None else replace(made, name=name)
    costs = question.costs_of(name.placement, name.name)
    if block is not None and not question.overlapped:
        name = name.split_overlapped()
    return PlanResult(shared_if_told(name, costs), costs, block)


def find(name: str, names: Sequence[str] = (*SCHEDULE_NAMES, AUTO)) -> str | Schedule:
    """Return the name if it is one of `names`; otherwise load and verify a schedule file.

    A name may be followed by a colon and the stages per device (see `with_chunks`).

    Raises:
        ScheduleError: the name is unknown, or the file is unreadable or its schedule infeasible.
    """
    own = with_chunks(name)
    if (name if own is None else own.name) in names:
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


def known_as(text: str, question: PlanRequest) -> EvaluatedSchedule:
    """Evaluate a named schedule at the request's costs.

    `text` is a catalogue name, possibly with a colon and the stages per device, as
    interleaved-1f1b:4; or a schedule file.

    Raises:
        ScheduleError: the name is unknown or does not support this size, or the costs are for other
            stages.
    """
    sizes = question.num_devices, question.num_microbatches
    found = find(text, EVERY_NAME)
    if isinstance(found, str):
        return judge_rival(with_chunks(found) or BaselineSpec(found), *sizes, question.costs_of)
    own = found.num_devices, found.num_microbatches // found.slices
    if own != sizes:
        raise ScheduleError(
            f"{text} is for {own[0]} devices and {own[1]} microbatches, "
            f"not for {sizes[0]} and {sizes[1]}"
        )
    return judge(found, question.costs_of(found.placement, found.name))


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
        takers = " or ".join(f"{each}:4" for each in OPTIONS)
        raise ScheduleError(
            f"{text!r:.60} is not a schedule: a number of chunks per rank can follow "
            f"the colon of {takers}"
        )
    return BaselineSpec(name, int(chunks))


def limits_of(question: PlanRequest) -> tuple[float, ...]:
    """Return the memory limit of every device; by default, or for a name, a schedule's peak."""
    limit = question.limit
    if limit is None:
        limit = "1f1b"
    if isinstance(limit, str):
        limit = max(known_as(limit, question).peak)
    return each_limit(limit, question.num_devices)


def _at_memory_of(rival: BaselineSpec, question: PlanRequest) -> PlanResult:
    """Plan with the memory and placement of a schedule; at worst, return that schedule."""
    sizes = question.num_devices, question.num_microbatches
    known = judge_rival(rival, *sizes, question.costs_of)
    limit, placements = known.peak, (known.schedule.placement,)
    asked = replace(question, costs=known.costs, limit=limit, placements=placements)
    answer = best_order(asked, known)
    return replace(answer, schedule=replace(answer.schedule, name=rival.name + PLUS))


def best_order(question: PlanRequest, *known: EvaluatedSchedule) -> Planned:
    """Search for the best schedule, or return a better evaluated schedule that fits.

    Evaluated schedules are those that could be better, and `known`. Among equal times, the result
    with less memory is chosen; among equal ones, Megatron's. The name in the request is ignored.

    Raises:
        LimitError: the limit is infeasible.
        ScheduleError: the counts, the costs and the placements do not match.
    """
    limits, goal = limits_of(question), question.objective
    question = replace(question, limit=limits)
    whole = question.whole()
    searched = question.placements or default_placements(
        question.num_devices, whole.num_stages, whole.copies
    )
    found: list[Planned] = []
    refused: ScheduleError | None = None
    # Placements with separate costs need separate searches.
    each_asked = _by_costs(question, searched)
    for asked in each_asked:
        if found and question.stopped():
            break
        try:
            found.append(_planned(asked, limits))
            question.found(partial(found.__getitem__, len(found) - 1))
        except LimitError as error:  # evaluated schedules may have other placements
            refused = error
        except ScheduleError as error:  # no schedule was found for these costs
            if len(each_asked) == 1:
                raise
            refused = refused or error
    value = min((each.plan.value for each in found), default=math.inf)
    rivals = [joined(each, goal) for each in (*known, *_rivals(question, limits, value))]
    found += [as_planned(each, limits, goal) for each in rivals if fits(each.peak, limits)]
    if not found:
        raise refused or ScheduleError("nothing fits")
    best = min(found, key=_rank)
    verify(best.schedule, limits, best.costs)
    bounds = [_bound(question, placement, limits) for placement in searched]
    bound = min(best.plan.value, best.plan.lower_bound, *bounds)
    return replace(best, known=tuple(rivals), searched_bound=bound)


def best_known(question: PlanRequest) -> Planned | None:
    """Return the fastest published schedule within the limits, or None if none fits.

    It ignores the request's time limit: the evaluation takes about a second.
    """
    limits, goal = limits_of(question), question.objective
    question = replace(question, stopped=_never)
    known = [joined(each, goal) for each in _rivals(question, limits, math.inf)]
    fitting = [as_planned(each, limits, goal) for each in known if fits(each.peak, limits)]
    return min(fitting, key=_rank, default=None)


def with_more(question: PlanRequest, answer: Planned, more: float) -> float:
    """Return the objective's value on the answer's placement with `more` memory per device.

    Never higher than without, since plans for lower limits remain valid.
    """
    asked = replace(
        question,
        costs=answer.costs,
        placements=(answer.schedule.placement,),
        slices=answer.schedule.slices,
        layers=None,
        cut=None,
        seconds=None,
        progress=_stopping(question),
    )
    found = _planned(asked, tuple(limit + more for limit in answer.limits))
    return min(answer.plan.value, found.plan.value)


def _by_costs(question: PlanRequest, placements: Sequence[Placement]) -> list[PlanRequest]:
    """Return the search requests: one for all placements with common costs."""
    if question.layers is None:
        return [question]
    return [_on(question, placement, 1 / len(placements)) for placement in placements]


def _on(question: PlanRequest, placement: Placement, share: float = 1.0) -> PlanRequest:
    """Return the request for this placement only, with a share of its time."""
    costs = question.costs_of(placement, "a plan")
    seconds = None if question.seconds is None else share * question.seconds
    return replace(question, costs=costs, placements=(placement,), seconds=seconds)


def _rank(answer: Planned) -> tuple[float, float, bool]:
    """Return the sort key of an answer; values within rounding are equal."""
    value, peak = (float(f"{each:.9g}") for each in (answer.plan.value, max(answer.plan.peak)))
    return value, peak, not answer.is_megatrons


def _planned(question: PlanRequest, limits: tuple[float, ...]) -> Planned:
    """Return the search result, with backwards split where that pays off at the request's costs."""
    # Imported here because numba needs a second to import, which names do not require.
    from megatron_vshape.core.planner.search import plan
    from megatron_vshape.core.splitting import WORTH, saves

    costs, goal = question.whole(), question.objective
    slices, trades = question.slice_counts(), costs.copies
    if tells_shared(costs):
        return _shared(replace(question, slices=slices), limits)
    chooses = max(saves(costs.sliced(each)) for each in slices) >= WORTH
    planned = partial(
        plan,
        costs,
        question.num_devices,
        question.num_microbatches,
        limits,
        goal,
        placements=question.placements,
        slices=slices,
        steps=question.steps,
        seconds=None if question.seconds is None else question.seconds / (1 + chooses),
        progress=question.progress,
        trades=trades,
        in_host=question.in_host,
    )

    def begun(best: Callable[[], Plan]) -> None:
        question.found(lambda: _in_order_alone(best(), question, limits))

    return _split(question, limits, planned, planned(begun=begun), chooses)


def _in_order_alone(made: Plan, question: PlanRequest, limits: tuple[float, ...]) -> Planned:
    """Convert a search result to an answer, with its split and full backwards as planned."""
    costs = question.costs_of(made.schedule.placement, "the plan")
    return Planned(made.schedule, costs, plan=made, limits=limits, known=())


def _shared(question: PlanRequest, limits: tuple[float, ...]) -> Planned:
    """Return the best schedule with vocabulary parallelism.

    It searches every placement; with memory for the logits of few microbatches, if those of many
    are large; and without optional strategies, because the best schedule without vocabulary
    parallelism may not be the best with it.
    """
    whole, goal = question.whole(), question.objective
    found: list[tuple[EvaluatedSchedule, Plan]] = []
    refused = ScheduleError("nothing fits")
    large = most_logits_bytes(whole) > max(whole.held_after_forward_bytes)
    placements = question.placements or default_placements(
        len(limits), whole.num_stages, whole.copies
    )
    asked = [_on(question, each, 1 / len(placements)) for each in placements]
    if whole.copies:
        alone = [without_copies(each.whole()) for each in asked]
        asked += [replace(e, costs=own, cut=None) for e, own in zip(asked, alone, strict=True)]
    for each in asked:
        fitting: list[tuple[EvaluatedSchedule, Plan]] = []
        for waiting in sorted(WAITING, reverse=True):
            if fitting and not large:
                break
            try:
                fitting.append(_shared_with(each, limits, waiting))
            except LimitError as error:
                refused = error
        found += fitting
    if not found:
        raise refused
    best, made = min(found, key=lambda each: goal.of(each[0].timeline))
    costs = question.costs_of(best.schedule.placement, "the plan")
    plan = _plan_of(best._replace(costs=costs), limits, goal, made.source, made.steps)
    return Planned(plan.schedule, costs, plan=plan, limits=limits, known=())


def _shared_with(
    question: PlanRequest, limits: tuple[float, ...], waiting: int
) -> tuple[EvaluatedSchedule, Plan]:
    """Plan with vocabulary parallelism and the logits of `waiting` microbatches in memory.

    Returns the schedule and the plan of its F, B and W. Their search has the memory that the logits
    leave; the vocabulary passes then use all memory that the plan leaves.
    """
    costs = question.whole()
    logits = most_logits_bytes(costs, waiting)
    room = tuple(limit - logits for limit in limits)
    bare = replace(question, costs=without_shared(costs), cut=None, layers=None)
    try:
        made = _planned(bare, room).plan
    except LimitError as error:
        each = (error.limit + logits, error.need + logits, error.least + logits)
        raise LimitError(error.device, *each) from None
    spare, ways = min(map(sub, room, made.peak)), [each for each in WAITING if each <= waiting]
    return judge(share_vocabulary(made.schedule, costs, spare, ways), costs), made


def _split(
    question: PlanRequest,
    limits: tuple[float, ...],
    planned: Callable[..., Plan],
    made: Plan,
    chooses: bool,
) -> Planned:
    """Return the best of three plans: all backwards split, adjacent B and W fused, none split."""
    goal = question.objective
    own = question.costs_of(made.schedule.placement, "the plan")
    if own.whole_us is None:
        return Planned(made.schedule, own, plan=made, limits=limits, known=())
    split = judge(made.schedule, own)
    found = [joined(split, goal), split]
    if chooses:
        whole = whole_backwards(planned(whole=True).schedule)
        found.append(judge(whole, question.costs_of(whole.placement, "the plan")))
    found = [each for each in found if fits(each.peak, limits)]
    best = min(found, key=lambda each: goal.of(each.timeline))
    taken = _plan_of(best, limits, goal, made.source, made.steps)
    taken = replace(taken, tried=made.tried)
    return Planned(taken.schedule, best.costs, plan=taken, limits=limits, known=())


def _bound(question: PlanRequest, placement: Placement, limits: Sequence[float]) -> float:
    costs, goal = question.costs_of(placement, "a plan"), question.objective
    return min(
        _least(costs, placement, question.num_microbatches, tuple(limits), goal, slices)
        for slices in question.slice_counts()
    )


def _rivals(
    question: PlanRequest, limits: Sequence[float], value: float
) -> Iterator[EvaluatedSchedule]:
    """Yield the evaluated schedules that may be better than a plan of this value.

    Schedules that cannot be better or cannot fit are not generated.
    """
    for each in _possible(question, limits):
        if value < math.inf and question.stopped():
            return
        if question.allows(each.placement) and each.may_fit and each.least <= value * (1 + SAME):
            yield _made(question, each)


class BaselineEstimate(NamedTuple):
    """A published schedule that has not been generated: its placement and lower bound."""

    rival: BaselineSpec
    placement: Placement
    may_fit: bool
    least: float  # of the objective


def _possible(question: PlanRequest, limits: Sequence[float]) -> Iterator[BaselineEstimate]:
    """Yield the published schedules of these sizes for which there are costs."""
    sizes = question.num_devices, question.num_microbatches
    counts = question.chunk_counts(), question.slice_counts()
    for rival, block in rivals_of(*sizes, *counts):
        try:
            costs = question.costs_of(block.placement, str(rival))
        except ScheduleError:  # the costs do not have its stages
            continue
        slices, placement = rival.slices, block.placement
        numbers = slices * question.num_microbatches
        possible = may_fit(block, costs.sliced(slices), numbers, limits)
        alone, whole = without_copies(costs), question.num_microbatches
        least = _least(alone, placement, whole, tuple(limits), question.objective, slices)
        yield BaselineEstimate(rival, block.placement, possible, least)


_least = lru_cache(maxsize=256)(bound_at)
"""Bounds of placements, cached because they are required before and after a search."""


def _made(question: PlanRequest, possible: BaselineEstimate) -> EvaluatedSchedule:
    sizes = question.num_devices, question.num_microbatches
    return judge_rival(possible.rival, *sizes, question.costs_of)


def compare(
    question: PlanRequest, answer: Planned
) -> Iterator[EvaluatedSchedule | BaselineEstimate]:
    """Yield Megatron's and the published schedules for a comparison with the answer.

    Schedules that do not fit or cannot be faster are not generated unless Megatron runs them,
    because that is slow with many stages. After the request is stopped, no schedule is generated.
    """
    sizes = question.num_devices, question.num_microbatches
    made = {known.rival: known for known in answer.known}
    for each in _possible(question, answer.limits):
        if each.rival in made:
            yield made[each.rival]
        elif not question.stopped() and (
            each.rival.chunks is None or each.rival.is_megatrons(*sizes)
        ):
            yield joined(_made(question, each), question.objective)
        else:
            yield each


def as_planned(
    known: EvaluatedSchedule, limits: tuple[float, ...], objective: Objective
) -> Planned:
    """Convert an evaluated schedule to an answer."""
    plan = _plan_of(known, limits, objective, str(known.rival or known.schedule.name))
    answer = Planned(plan.schedule, known.costs, plan=plan, limits=limits, known=())
    return replace(answer, is_known=known.rival, is_megatrons=known.is_megatrons)


def _plan_of(
    known: EvaluatedSchedule,
    limits: Sequence[float],
    objective: Objective,
    source: str,
    steps: int = 0,
) -> Plan:
    """Convert a schedule to a plan."""
    schedule, costs, timeline, peak, _ = known
    sizes = schedule.placement, schedule.num_microbatches // schedule.slices
    bound = bound_at(costs, *sizes, limits, objective, schedule.slices)
    value = objective.of(timeline)
    named = replace(schedule, name="plan")
    bound = min(bound, value)
    return Plan(named, objective, value, timeline.busy, bound, peak, source, steps)


def _stopping(question: PlanRequest) -> Callable[[int, float, float], None] | None:
    """Return a progress callback that ends a search once the request is stopped."""
    if question.stopped is _never:
        return None

    def stop(*_: float) -> None:
        if question.stopped():
            raise KeyboardInterrupt

    return stop
