"""The one question: which order, at which costs, in how much memory.

The command line, the page, the trainer and the sweep ask it, each in its own words and units. What
they must agree on is decided here: what a name stands for, what no name is, what a limit is where
none is given, and that no plan is worse than a published schedule that fits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

from megatron_vshape.core.check.bounds import each_limit, fits, lower_bound
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.costs import Costs, regroup
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import Placement, stages_of
from megatron_vshape.core.model.schedule import Objective, Plan, Schedule, Timeline, load_schedule
from megatron_vshape.core.paper.building_block import BuildingBlock
from megatron_vshape.core.paper.catalogue import NAMES, make, make_block, no_such_schedule
from megatron_vshape.core.program.lowering import whole_backwards

AUTO = "auto"
"""The best order within a limit."""

PLUS = "+"
MEMORY_NAMES = ("v-min", "v-half", "v-zb")
PLUS_NAMES = tuple(name + PLUS for name in MEMORY_NAMES)
"""The best order in the memory of the schedule before the plus, on its placement."""

SUFFIXES = (".json", ".csv")
"""Of schedule files."""

MOST_COMPARED = 20_000
"""Passes of a published schedule that a plan is compared with; making a larger one takes longer
than planning, which begins from the same blocks."""

_SAME = 1e-9
"""Values this close are one, so that rounding alone prefers nothing."""

Cut = Callable[[int, str], Costs]
"""Returns the costs of the model cut into so many stages; the text names what has them."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked; times and memory are in the units of `costs`.

    Without costs a pass of one of 2 * devices stages takes one unit and such a stage holds one.
    """

    name: str | Schedule  # of the catalogue, with a plus, AUTO or a file; or what a file holds
    num_devices: int
    num_microbatches: int
    costs: Costs | None = None  # of as many stages as a plan may have
    cut: Cut | None = None  # None: neighbouring stages of the costs are added up
    limit: float | Sequence[float] | None = None  # for AUTO, of all devices or each; None: 1F1B's
    objective: Objective = Objective.MAKESPAN
    placements: tuple[Placement, ...] = ()  # those that AUTO may choose from; (): any
    choices: tuple[tuple[str, int], ...] = ()  # what `make` takes of this name besides the sizes
    steps: int | None = None  # the budget of planning; None: what takes about a second
    seconds: float | None = None  # search so long instead
    progress: Callable[[int, float, float], None] | None = None  # steps, best value, lower bound

    def whole(self) -> Costs:
        """Return the costs of as many stages as a plan may have."""
        return self.costs or self.costs_of(2 * self.num_devices, "a plan")

    def costs_of(self, num_stages: int, name: str) -> Costs:
        """Return the costs of so many stages; raises ScheduleError if they cannot be had."""
        if self.cut is not None:
            return self.cut(num_stages, name)
        if self.costs is None:
            return Costs.uniform(self.num_devices, num_stages)
        return regroup(self.costs, num_stages, name)

    def allows(self, placement: Placement) -> bool:
        """Return whether a plan may have this placement."""
        if self.placements:
            return placement in self.placements
        return len(placement) <= self.whole().num_stages


class Known(NamedTuple):
    """A published schedule at the question's costs, in their units."""

    schedule: Schedule
    costs: Costs
    timeline: Timeline
    peak: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """A schedule that can run, the costs of its stages, and the block that it is made from."""

    schedule: Schedule
    costs: Costs
    block: BuildingBlock | None = None


@dataclass(frozen=True, slots=True)
class Planned(Answer):
    """A plan for the limits of every device.

    `known` are the published schedules that it was compared with: those that could be better.
    """

    plan: Plan = field(kw_only=True)
    limits: tuple[float, ...] = field(kw_only=True)
    known: tuple[Known, ...] = field(kw_only=True)


def ask(question: Question) -> Answer:
    """Return the schedule that is asked for; where it is planned, a `Planned`.

    Raises:
        LimitError: nothing fits the limit.
        ScheduleError: there is no such schedule, it is not for these sizes, its file cannot be
            read or run, or the costs are of other stages.
    """
    name = question.name
    if isinstance(name, str):
        name = find(name)
    if name == AUTO:
        return best_order(question)
    if name in PLUS_NAMES:
        return _at_memory_of(str(name).removesuffix(PLUS), question)
    block = None
    if isinstance(name, str):
        sizes, choices = (question.num_devices, question.num_microbatches), dict(question.choices)
        block = make_block(name, *sizes, **choices)
        name = make(name, *sizes, **choices)
    return Answer(name, question.costs_of(name.num_stages, name.name), block)


def find(name: str, names: Sequence[str] = (*NAMES, *PLUS_NAMES, AUTO)) -> str | Schedule:
    """Return the name if it is one of `names`, else the schedule in the file at that path, proved.

    Raises:
        ScheduleError: there is neither, or the file cannot be read or its schedule not run.
    """
    if name in names:
        return name
    path = Path(name)
    if path.suffix not in SUFFIXES and not path.exists():
        raise no_such_schedule(name, names, "; a schedule file ends in .json or .csv")
    schedule = load_schedule(path)
    try:
        verify(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"the schedule file {path} cannot run: {error}") from None
    return schedule


def limit_of_1f1b(costs: Costs) -> float:
    """Return what 1F1B holds on its first device: as many microbatches of its layers as devices."""
    return sum(costs.held_after_forward_bytes)


def judge(schedule: Schedule, costs: Costs) -> Known:
    """Return the schedule with its times and its peaks."""
    return Known(schedule, costs, simulate(schedule, costs), peak_held(schedule, costs))


def _at_memory_of(name: str, question: Question) -> Answer:
    """Return the best order in the memory of a schedule; that one, if nothing is better."""
    published = make(name, question.num_devices, question.num_microbatches)
    named = name + PLUS
    known = judge(published, question.costs_of(published.num_stages, named))
    limit, placements = known.peak, (published.placement,)
    asked = replace(question, costs=known.costs, limit=limit, placements=placements)
    answer = best_order(asked, known)
    return replace(answer, schedule=replace(answer.schedule, name=named))


def best_order(question: Question, *known: Known) -> Planned:
    """Return the adaptive scheduler's order, or a published schedule that fits and is better.

    Of these, those that could be better are compared, and `known` in any case. What the question
    names is not looked at.

    Raises:
        LimitError: nothing fits the limit.
        ScheduleError: the counts, the costs and the placements do not match.
    """
    # The search brings numba along, which takes a second to import; the names do not need it.
    from megatron_vshape.core.splitting import joined

    costs = question.whole()
    limit = limit_of_1f1b(costs) if question.limit is None else question.limit
    limits = each_limit(limit, question.num_devices)
    made, goal = _split_or_whole(question, limits), question.objective
    own = question.costs_of(made.schedule.num_stages, "the plan")
    rivals = (*known, *_rivals(question, limits, made.value))
    known = tuple(
        each
        if each.costs.whole_us is None
        else judge(joined(each.schedule, each.costs, goal), each.costs)
        for each in rivals
    )
    for each in known:
        better = goal.of(each.timeline) < made.value * (1 - _SAME)
        if better and fits(each.peak, limits):
            made, own = _plan_of(each, limits, made, each.schedule.name), each.costs
    verify(made.schedule, limits, own)
    return Planned(made.schedule, own, plan=made, limits=limits, known=known)


def _split_or_whole(question: Question, limits: Sequence[float]) -> Plan:
    """Return the plan with its backwards split where that pays at the prices of the question."""
    from megatron_vshape.core.planner.search import plan
    from megatron_vshape.core.splitting import WORTH, joined, saves, split_where_it_pays

    costs, goal = question.whole(), question.objective
    chooses = saves(costs) >= WORTH
    planned = partial(
        plan,
        costs,
        question.num_devices,
        question.num_microbatches,
        limits,
        goal,
        placements=question.placements,
        steps=question.steps,
        seconds=None if question.seconds is None else question.seconds / (1 + chooses),
        progress=question.progress,
    )
    made = planned()
    own = question.costs_of(made.schedule.num_stages, "the plan")
    if own.whole_us is None:
        return made
    starts = [made.schedule, joined(made.schedule, own, goal)]
    found = [judge(starts[-1], own)]
    if chooses:
        whole = whole_backwards(planned(whole=True).schedule)
        alike = whole.placement == made.schedule.placement
        for each in [[*starts, whole]] if alike else [starts, [whole]]:
            own = question.costs_of(each[0].num_stages, "the plan")
            chosen = split_where_it_pays(each, own, limits, goal, made.steps // 2)
            found.append(judge(chosen, own))
    best = min(found, key=lambda each: goal.of(each.timeline))
    return _plan_of(best, limits, made, made.source)


def _rivals(question: Question, limits: Sequence[float], value: float) -> Iterator[Known]:
    """Yield the published schedules that a plan of this value may have to give way to.

    Those that cannot be better or cannot fit are not made.
    """
    devices, microbatches = question.num_devices, question.num_microbatches
    spans = question.objective is Objective.SPAN
    for name in NAMES:
        try:
            block = make_block(name, devices, microbatches)
            costs = question.costs_of(len(block.placement), name)
        except ScheduleError:  # not for these sizes, or for stages that the costs do not tell apart
            continue
        placement = block.placement
        if not question.allows(placement) or 3 * len(placement) * microbatches > MOST_COMPARED:
            continue
        least = lower_bound(costs, placement, devices, microbatches, limits, span=spans)
        if least < value * (1 - _SAME) and _may_fit(block, costs, microbatches, limits):
            yield judge(_made(name, devices, microbatches), costs)


def _may_fit(
    block: BuildingBlock, costs: Costs, num_microbatches: int, limits: Sequence[float]
) -> bool:
    """Return whether the block's schedule may fit; no, if its stable phase alone does not."""
    if num_microbatches < 2 * block.num_devices:  # it may have none
        return True
    held = list(map(min, costs.held_after_forward_bytes, costs.held_after_backward_bytes))
    rows = zip(block.peaks(), stages_of(block.placement, block.num_devices), strict=True)
    return fits([peak * min(held[stage] for stage in own) for peak, own in rows], limits)


@lru_cache(maxsize=len(NAMES))  # a frontier asks for the same ones at every limit
def _made(name: str, num_devices: int, num_microbatches: int) -> Schedule:
    return make(name, num_devices, num_microbatches)


def _plan_of(known: Known, limits: Sequence[float], made: Plan, source: str) -> Plan:
    """Return a schedule as the plan in place of the one that was made."""
    schedule, costs, timeline, peak = known
    sizes = schedule.placement, schedule.num_devices, schedule.num_microbatches
    bound = lower_bound(costs, *sizes, limits, span=made.objective is Objective.SPAN)
    value = made.objective.of(timeline)
    return replace(
        made,
        schedule=replace(schedule, name=made.schedule.name),
        value=value,
        busy=timeline.busy,
        lower_bound=min(bound, value),
        peak=peak,
        source=source,
    )
