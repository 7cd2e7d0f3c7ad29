"""From the choice of a schedule to the programs of every number of microbatches."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_vshape.core.ask import AUTO, PLUS_NAMES, Question, ask, limits_of
from megatron_vshape.core.check.bounds import fits, least_memory
from megatron_vshape.core.check.simulate import peak_held, peak_shared, simulate
from megatron_vshape.core.model.costs import Costs, chunk_of
from megatron_vshape.core.model.kinds import (
    STATE,
    Kind,
    ScheduleError,
)
from megatron_vshape.core.model.layers import recut
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import Placement, stages_of
from megatron_vshape.core.model.schedule import Schedule, Timeline
from megatron_vshape.core.planner.joint_orders import joint_orders
from megatron_vshape.core.planner.vocabulary import (
    WAITING,
    in_proportion,
    most_logits_bytes,
    share_forwards,
    shared_if_told,
    uniform_shared,
    without_shared,
)
from megatron_vshape.core.program.hiding import Beside, weights_beside
from megatron_vshape.core.program.instructions import Program
from megatron_vshape.core.program.lowering import forward_wave, lower, whole_backwards
from megatron_vshape.core.rivals import judge_rival, rivals_of
from megatron_vshape.mcore.setup.choice import GIB, Choice
from megatron_vshape.mcore.setup.one_planner import OnePlanner

logger = logging.getLogger(__name__)

START = "v-half"
"""Schedule of auto until costs are measured."""

MESSAGES = 9
"""Assumed P2P messages in memory per rank, until a plan defines them."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """What one training step does, and what it is predicted to take."""

    schedule: Schedule
    timeline: Timeline  # in us of the costs, or in passes of one of 2 * devices stages
    program: Program
    costs: Costs | None = None  # that the timeline is of; None: all passes are alike
    beside: Mapping[Pass, Beside] = field(default_factory=dict)  # by B, what it runs of a W

    @property
    def peak_chunks(self) -> float:
        """Return the most any device holds, in chunks of 1 / (2 * devices) of the model."""
        if self.costs is None:
            return max(peak_held(self.schedule))
        peak = max(peak_held(self.schedule, self.costs.of_activations()))
        return peak / chunk_of(self.costs, len(self.schedule.order))

    @property
    def most_messages(self) -> int:
        """Return the most messages for which any device needs memory at once."""
        return max(map(self.program.most_messages, range(self.schedule.num_devices)))

    @property
    def relative_peak(self) -> float:
        """Return the most any device holds, over what 1F1B does of as many microbatches as ranks.

        Where the costs' stages cannot be added up to 1F1B's, its stages count as alike.
        """
        ranks = self.schedule.num_devices
        try:
            (most, *_) = limits_of(Question(AUTO, ranks, ranks, self.costs))
        except ScheduleError:
            return self.peak_chunks / (2 * ranks)
        return max(peak_held(self.schedule, self.costs)) / most

    def peak_bytes(
        self, costs: Costs, shared: Mapping[int, tuple[float, float]] | None = None
    ) -> tuple[float, ...]:
        """Return the most every device holds, where `costs` says what a stage holds in bytes.

        And `shared`, by stage, what slices of a microbatch share and owe each other.
        """
        if not shared:
            return peak_held(self.program.schedule, costs)
        return peak_shared(self.program.schedule, costs, shared)


class Planner:
    """Makes and keeps the programs of one schedule.

    An order that is searched for rank 0 finds for all, which call `training` for the same numbers
    in turn; all else every rank makes by itself, and the same inputs give the same.
    """

    def __init__(self, choice: Choice, once: OnePlanner | None = None) -> None:
        """Take what is planned; costs, memory and messages of the run itself come later.

        Without `once` the process searches alone.
        """
        self.choice = choice
        self.once = once
        self.costs = choice.costs  # the choice's, until others are adopted
        # Of every device: what is there besides activations.
        self.static_bytes = (0.0,) * choice.num_devices
        self._message_bytes = 0.0  # of one; what waits to be read or taken counts too
        self._messages = MESSAGES
        self._takes = False  # the length of messages is known only when they are there
        self._training: dict[int, PlannedStep] = {}
        self._evaluation: dict[int, Program] = {}
        self._bubbles: dict[tuple[int, Costs], float] = {}

    def adopt(self, costs: Costs) -> None:
        """Plan and predict with these costs from now on.

        Every rank must do so between the same steps. An order that costs do not make stays.
        """
        self.costs = costs
        if self.choice.plans_by_costs:
            self._training.clear()

    def reserve(self, static_bytes: Sequence[float], message_bytes: float | None = None) -> None:
        """Keep so much of the limit free on every device, and for messages of that size.

        All ranks pass the same.
        """
        self.static_bytes = tuple(static_bytes)
        if message_bytes is not None:
            self._message_bytes = message_bytes
        self._training.clear()

    @property
    def reserved_bytes(self) -> tuple[float, ...]:
        """Return what is kept free on every device: what is there, and room for messages."""
        return tuple(each + self._messages * self._message_bytes for each in self.static_bytes)

    def choose_slices(self, counts: tuple[int, ...]) -> None:
        """Choose from these numbers of slices from now on."""
        if counts != self.choice.slices:
            self.choice = replace(self.choice, slices=counts)
            self._training.clear()

    def expect_any_length(self) -> None:
        """Make programs from now on for messages whose length is known only when they are there."""
        if not self._takes:
            self._takes = True
            self._training.clear()
            self._evaluation.clear()

    def training(self, num_microbatches: int) -> PlannedStep:
        """Return the plan of a training step.

        Raises:
            ScheduleError: the schedule comes from a file and is for another number.
        """
        if num_microbatches not in self._training:
            plan = self._plan(num_microbatches)
            most = plan.most_messages
            if self.choice.limit_bytes is not None and most > self._messages:
                self._messages = most  # this plan has promised memory that its messages take
                return self.training(num_microbatches)
            self._training[num_microbatches] = plan
            logger.info(
                "planned %s for %d devices and %d microbatches: bubble %.1f %%, peak %g chunks",
                plan.schedule.name,
                plan.schedule.num_devices,
                num_microbatches,
                100 * plan.timeline.bubble,
                plan.peak_chunks,
            )
        return self._training[num_microbatches]

    def _plan(self, num_microbatches: int) -> PlannedStep:
        if self.once is not None and self.choice.plans_by_costs:
            return self._made(self.once(lambda: self._schedule(num_microbatches)))
        return self._made(self._schedule(num_microbatches))

    def _made(self, schedule: Schedule) -> PlannedStep:
        if self.choice.keeps_backward_whole:
            schedule = whole_backwards(schedule)
        elif self.choice.whole_stages:
            schedule = whole_backwards(schedule, self.choice.whole_stages)
        costs = self._costs_of(schedule)
        if costs is not None:
            schedule = shared_if_told(schedule, costs)
        timeline = simulate(schedule, costs)
        program = lower(schedule, timeline, kernels=self.choice.kernels, takes=self._takes)
        return PlannedStep(schedule, timeline, program, costs, self._beside(program, costs))

    def run(self, plan: PlannedStep) -> None:
        """Have steps of as many microbatches run this plan from now on, as all ranks do."""
        self._training[plan.schedule.num_microbatches] = plan

    def best_by_name(self, plan: PlannedStep) -> PlannedStep | None:
        """Select the schedule by name with the shortest predicted step, all ranks the same.

        It uses the placement of the model and fits the memory limit of the plan. None if no such
        schedule exists, or if the best one is the plan itself.
        """
        count = plan.schedule.num_microbatches

        def schedules() -> list[Schedule]:
            return list(self._known(count))

        known = schedules() if self.once is None else self.once(schedules)
        limits = limits_of(self._asked(Question(AUTO, self.choice.num_devices, count)))
        by_rank = [limit for _, limit in sorted(zip(self.choice.ranks, limits, strict=True))]
        fitting = [each for each in map(self._made, known) if self._fits(each, by_rank)]
        best = min(fitting, key=lambda each: each.timeline.makespan, default=None)
        if best is None or best.program.schedule.order == plan.program.schedule.order:
            return None
        return best

    def _fits(self, step: PlannedStep, limits: Sequence[float]) -> bool:
        """Check activations and messages of a step against the memory limit of every rank."""
        if step.costs is None:
            return False
        has_room = self.choice.limit_bytes is None or step.most_messages <= self._messages
        return has_room and fits(peak_held(step.schedule, step.costs), limits)

    def _known(self, num_microbatches: int) -> Iterator[Schedule]:
        """Yield the published orders on the placement that the model is built for."""
        choice, costs = self.choice, self._allowed(self._known_costs)
        chunks = (len(choice.planned) // choice.num_devices,)
        for rival, block in rivals_of(choice.num_devices, num_microbatches, chunks):
            if block.placement == choice.planned and costs.num_stages == len(block.placement):
                sizes = choice.num_devices, num_microbatches
                known = judge_rival(rival, *sizes, lambda *_: costs)
                yield replace(known.schedule, name=rival.name).renumbered(choice.ranks)

    def predicted_bubble(self, num_microbatches: int) -> float:
        """Return the bubble of a training step at the costs that are known by now."""
        plan = self.training(num_microbatches)
        costs = self._costs_of(plan.schedule)
        if costs is None:
            return plan.timeline.bubble
        key = num_microbatches, costs
        if key not in self._bubbles:
            self._bubbles[key] = simulate(plan.schedule, costs).bubble
        return self._bubbles[key]

    def evaluation(self, num_microbatches: int) -> Program:
        """Return the program of forward passes alone."""
        if num_microbatches not in self._evaluation:
            wave = forward_wave(self.choice.placement, self.choice.num_devices, num_microbatches)
            if self.choice.shares:
                wave = share_forwards(wave)
            self._evaluation[num_microbatches] = lower(
                wave, kernels=self.choice.kernels, takes=self._takes
            )
        return self._evaluation[num_microbatches]

    def smallest(self) -> Program:
        """Return a program that uses every stream which any other of this planner's uses."""
        least = one_microbatch(self.choice.placement, self.choice.num_devices)
        costs = self._costs_of(least)
        return lower(least if costs is None else shared_if_told(least, costs))

    @property
    def _known_costs(self) -> Costs:
        if self.costs is None:
            raise RuntimeError("an order is to be planned by costs, and none are known yet")
        return self.costs

    def _beside(self, program: Program, costs: Costs | None) -> Mapping[Pass, Beside]:
        if not self.choice.hides:
            return {}
        return weights_beside(simulate(program.schedule, costs), self.choice.ties_ends)

    def _costs_of(self, schedule: Schedule) -> Costs | None:
        """Return the costs if they are for this schedule's stages."""
        costs = self.costs
        if costs is None or costs.num_stages != schedule.num_stages:
            costs = self._estimate(schedule)
        return self._of_run(costs, schedule.num_stages)

    def _of_run(self, costs: Costs | None, num_stages: int) -> Costs | None:
        """Return costs that tell of a shared vocabulary if the run shares it, and only then.

        What these passes take is estimated if it is not known.
        """
        if not self.choice.shares:
            return costs and without_shared(costs)
        uniform = uniform_shared(self.choice.num_devices, num_stages)
        return in_proportion(costs or uniform, self.choice.estimate or uniform)

    def _estimate(self, schedule: Schedule) -> Costs | None:
        """Return the choice's, with copies of all that a stage holds, each as long as its F."""
        estimate = self.choice.estimate
        if estimate is None or not schedule.copies:
            return estimate
        held, as_forward = estimate.held_after_forward_bytes, estimate.forward_us
        return estimate.with_copies_of(as_forward, held, as_forward)

    def _schedule(self, num_microbatches: int) -> Schedule:
        return self._ordered(num_microbatches).renumbered(self.choice.ranks)

    def _ordered(self, num_microbatches: int) -> Schedule:
        """Return the order of passes on devices as the schedule's name or file counts them."""
        choice = self.choice
        file = choice.from_file
        if file is not None and file.num_microbatches != num_microbatches * file.slices:
            raise ScheduleError(
                f"the schedule file {choice.name} is for {file.num_microbatches // file.slices} "
                f"microbatches, this run has {num_microbatches} in a step: make "
                "--global-batch-size / (--micro-batch-size x data-parallel size) fit"
            )
        question = Question(
            file or choice.name,
            choice.num_devices,
            num_microbatches,
            joint=choice.may_join,
            slices=choice.slices,
        )
        if choice.name in PLUS_NAMES:
            costs = self.costs or choice.estimate
            question = replace(question, costs=costs and self._allowed(costs))
        if choice.name == AUTO:
            return self._automatic(question)
        return self._answered(question)

    def _answered(self, question: Question) -> Schedule:
        """Return the answer; with joint passes or with copies to the host, which no run has both.

        The better of two plans, where both are told of.
        """
        costs = question.costs
        if costs is None or not (costs.joins and costs.copies):
            return ask(question).schedule
        found = [ask(question.changed(each)) for each in (Costs.never_joined, Costs.without_copies)]
        times = [question.objective.of(simulate(each.schedule, each.costs)) for each in found]
        return found[times.index(min(times))].schedule

    def _allowed(self, costs: Costs) -> Costs:
        """Return costs by which no pass is planned that the run gets later, or cannot have."""
        costs = self._of_run(costs, costs.num_stages) or costs
        return costs if self.choice.may_join else costs.never_joined()

    def _automatic(self, question: Question) -> Schedule:
        """Return the best order within the limit; while nothing is measured, a known one."""
        if self.costs is None:
            return self._start(question)
        return replace(self._answered(self._asked(question)), name=AUTO)

    def _asked(self, question: Question) -> Question:
        """Return the question of the best order at the costs that are known, within the limit."""
        costs, layers = self._allowed(self._known_costs), self.choice.num_layers
        limit = self.choice.limit_of
        if self.choice.limit_bytes is not None:  # of which the run keeps its own state free
            costs = costs.having(**{STATE: None}) if costs.knows_all else costs
        left = self._left_bytes(costs)
        if left is not None:
            limit = tuple(left[rank] for rank in self.choice.ranks)
        placements = (self.choice.planned,)

        def cut(num_stages: int, name: str) -> Costs:
            shares = self.choice.layer_shares
            return recut(costs, num_stages, question.num_devices, name, layers, shares)

        within = replace(question, limit=limit, in_host=self.choice.in_host_bytes)
        return replace(within, costs=costs, cut=cut, placements=placements)

    def _start(self, question: Question) -> Schedule:
        """Return a known order until something is measured: where passes may join, some do.

        What a pair takes is then measured too.
        """
        sizes = question.num_devices, question.num_microbatches
        joint = list(joint_orders(*sizes)) if self.choice.may_join else []
        if joint and joint[-1].placement == self.choice.planned:
            # That which holds least, hardly more than the other.
            return replace(joint[-1], name=f"{START}-joint")
        return ask(replace(question, name=START)).schedule

    def _left_bytes(self, costs: Costs) -> tuple[float, ...] | None:
        """Return what the limit leaves for activations on every device; None without a limit.

        Raises:
            ScheduleError: one microbatch does not fit; says what each device needs.
        """
        limit, reserved = self.choice.limit_bytes, self.reserved_bytes
        if limit is None:
            return None
        left = tuple(limit - each for each in reserved)
        held = least_memory(costs, self.choice.placement, self.choice.num_devices)
        need = [each + most_logits_bytes(costs, min(WAITING)) for each in held]
        if all(n <= has for n, has in zip(need, left, strict=True)):
            return left
        least = max(n + kept for n, kept in zip(need, reserved, strict=True))
        rows = "; ".join(
            f"rank {rank}: {kept / GIB:.3f} GiB besides activations and at "
            f"least {n / GIB:.3f} GiB of them"
            for rank, (n, kept) in enumerate(zip(need, reserved, strict=True))
        )
        raise ScheduleError(
            f"nothing fits --pipeline-memory-limit {limit / GIB:g}: {rows}; the least "
            f"limit is {math.ceil(1000 * least / GIB) / 1000:.3f} GiB"
        )


def one_microbatch(placement: Placement, num_devices: int) -> Schedule:
    """Return the schedule of a single microbatch: all there is to send, once."""
    rows = []
    for stages in stages_of(placement, num_devices):
        backward = (Pass(kind, s, 0) for s in reversed(stages) for kind in (Kind.B, Kind.W))
        rows.append((*(Pass(Kind.F, s, 0) for s in stages), *backward))
    return Schedule("one microbatch", num_devices, 1, placement, tuple(rows))
