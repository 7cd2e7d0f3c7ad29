"""From a schedule's name or file to the programs of every number of microbatches."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_vshape.core.ask import AUTO, PLUS_NAMES, Question, ask, find
from megatron_vshape.core.check.bounds import least_memory
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import Placement, looping, stages_of, v_shape
from megatron_vshape.core.model.schedule import Schedule, Timeline
from megatron_vshape.core.program.hiding import Beside, weights_beside
from megatron_vshape.core.program.instructions import Program
from megatron_vshape.core.program.lowering import forward_wave, lower
from megatron_vshape.mcore.setup.arguments import PipelineOptions, schedule_names

logger = logging.getLogger(__name__)

GIB = 2.0**30

START = "v-half"
"""What auto runs until it knows the costs."""

MESSAGES = 9
"""Messages for which a device is thought to need memory at most, until a plan says it is more."""


CHUNKS = (2, 4)
"""Stages a device may hold under auto: as many as the costs file tells apart."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one training step does, and what it is predicted to take."""

    schedule: Schedule
    timeline: Timeline  # in us of the costs, or in passes of one of 2 * devices stages
    program: Program
    estimate: Costs | None = None  # in chunks, where stages differ
    beside: Mapping[Pass, Beside] = field(default_factory=dict)  # by B, what it runs of a W

    @property
    def peak_chunks(self) -> float:
        """Return the most any device holds; 1F1B holds 2 * devices such chunks."""
        return max(peak_held(self.schedule, self.estimate))

    def peak_bytes(self, costs: Costs) -> tuple[float, ...]:
        """Return the most every device holds, where `costs` says what a stage holds in bytes."""
        return peak_held(self.program.schedule, costs)


@dataclass(slots=True)
class Planner:
    """Makes and keeps the programs of one schedule.

    Every rank does so by itself; the same inputs give the same plan, so nothing is exchanged.
    """

    num_devices: int
    name: str
    from_file: Schedule | None = None
    keeps_backward_whole: bool = False  # every B takes its W along
    costs: Costs | None = None  # in us and bytes; with None every chunk pass takes one unit,
    estimate: Costs | None = None  # or this, in such units, where stages have unlike layers
    limit_bytes: float | None = None  # of a device, for auto; None: activations as 1F1B holds
    static_bytes: tuple[float, ...] = ()  # of every device: what is there besides activations
    message_bytes: float = 0.0  # of one message; what waits to be read or taken counts too
    hides: bool = False  # a B that waits for tensor-parallel ranks runs jobs of the W after it
    ties_ends: bool = False  # the first and the last stage add to one gradient
    kernels: bool = False  # messages are kernels, as on NCCL
    _takes: bool = False  # and their length is known only when they are there
    _messages: int = MESSAGES
    _training: dict[int, Plan] = field(default_factory=dict)
    _evaluation: dict[int, Program] = field(default_factory=dict)
    _bubbles: dict[tuple[int, Costs], float] = field(default_factory=dict)

    @property
    def placement(self) -> Placement:
        """Return the device of every stage, which no number of microbatches changes."""
        if self.plans_by_costs:
            # a model is built for one placement: that of the best plans for so many stages
            chunks = 2 if self.costs is None else self.costs.num_stages // self.num_devices
            if chunks == 2:
                return v_shape(self.num_devices)
            return looping(self.num_devices, chunks)
        return self._first().placement

    @property
    def plans_by_costs(self) -> bool:
        """Return whether the adaptive scheduler makes the order."""
        return self.name == AUTO or self.name in PLUS_NAMES

    def adopt(self, costs: Costs) -> None:
        """Plan with these costs from now on; every rank must do so between the same steps."""
        self.costs = costs
        self._training.clear()

    def reserve(self, static_bytes: Sequence[float], message_bytes: float | None = None) -> None:
        """Keep so much of the limit free on every device, and for messages of that size.

        All ranks pass the same.
        """
        self.static_bytes = tuple(static_bytes)
        if message_bytes is not None:
            self.message_bytes = message_bytes
        self._training.clear()

    @property
    def reserved_bytes(self) -> tuple[float, ...]:
        """Return what is kept free on every device: what is there, and room for messages."""
        static = self.static_bytes or (0.0,) * self.num_devices
        return tuple(each + self._messages * self.message_bytes for each in static)

    def expect_any_length(self) -> None:
        """Make programs from now on for messages whose length is known only when they are there."""
        if not self._takes:
            self._takes = True
            self._training.clear()
            self._evaluation.clear()

    def training(self, num_microbatches: int) -> Plan:
        """Return the plan of a training step.

        Raises:
            ScheduleError: the schedule comes from a file and is for another number.
        """
        if num_microbatches not in self._training:
            plan = self._plan(num_microbatches)
            most = max(map(plan.program.most_messages, range(self.num_devices)))
            if self.limit_bytes is not None and most > self._messages:
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

    def _plan(self, num_microbatches: int) -> Plan:
        schedule = self._schedule(num_microbatches)
        if self.keeps_backward_whole:
            schedule = whole_backwards(schedule)
        costs = self._costs_of(schedule)
        timeline = simulate(schedule, costs)
        program = lower(schedule, timeline, kernels=self.kernels, takes=self._takes)
        return Plan(schedule, timeline, program, self.estimate, self._beside(program, costs))

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
            wave = forward_wave(self.placement, self.num_devices, num_microbatches)
            self._evaluation[num_microbatches] = lower(
                wave, kernels=self.kernels, takes=self._takes
            )
        return self._evaluation[num_microbatches]

    def smallest(self) -> Program:
        """Return a program that uses every stream which any other of this planner's uses."""
        if self.plans_by_costs:
            return lower(one_microbatch(self.placement, self.num_devices))
        return lower(self._first())

    def _first(self) -> Schedule:
        """Return the schedule of a file, or the smallest of the name."""
        return self.from_file or ask(Question(self.name, self.num_devices, 1)).schedule

    def _beside(self, program: Program, costs: Costs | None) -> Mapping[Pass, Beside]:
        if not self.hides:
            return {}
        return weights_beside(simulate(program.schedule, costs), self.ties_ends)

    def _costs_of(self, schedule: Schedule) -> Costs | None:
        """Return the costs if they are for this schedule's stages."""
        fits = self.costs is not None and self.costs.num_stages == schedule.num_stages
        return self.costs if fits else self.estimate

    def _schedule(self, num_microbatches: int) -> Schedule:
        if self.from_file is not None and self.from_file.num_microbatches != num_microbatches:
            raise ScheduleError(
                f"the schedule file {self.name} is for {self.from_file.num_microbatches} "
                f"microbatches, this run has {num_microbatches} in a step: make "
                "--global-batch-size / (--micro-batch-size x data-parallel size) fit"
            )
        question = Question(self.from_file or self.name, self.num_devices, num_microbatches)
        if self.name in PLUS_NAMES:
            question = replace(question, costs=self.costs or self.estimate)
        if self.name == AUTO:
            return self._automatic(question)
        return ask(question).schedule

    def _automatic(self, question: Question) -> Schedule:
        """Return the best order within the limit; while nothing is measured, a known one."""
        if self.costs is None:
            return ask(replace(question, name=START)).schedule
        limit = None
        if self.limit_bytes is not None:
            limit = tuple(self.limit_bytes - each for each in self.reserved_bytes)
            self._check_fits(limit)
        asked = replace(question, costs=self.costs, limit=limit, placements=(self.placement,))
        return replace(ask(asked).schedule, name=AUTO)

    def _check_fits(self, left: Sequence[float]) -> None:
        """Raise ScheduleError, with what each device needs, if one microbatch does not fit."""
        if self.costs is None or self.limit_bytes is None:
            return
        need = least_memory(self.costs, self.placement, self.num_devices)
        if all(n <= has for n, has in zip(need, left, strict=True)):
            return
        least = max(n + self.limit_bytes - has for n, has in zip(need, left, strict=True))
        rows = "; ".join(
            f"rank {rank}: {(self.limit_bytes - has) / GIB:.3f} GiB besides activations and at "
            f"least {n / GIB:.3f} GiB of them"
            for rank, (n, has) in enumerate(zip(need, left, strict=True))
        )
        raise ScheduleError(
            f"nothing fits --pipeline-memory-limit {self.limit_bytes / GIB:g}: {rows}; the least "
            f"limit is {math.ceil(1000 * least / GIB) / 1000:.3f} GiB"
        )


def make_planner(name: str, num_devices: int, options: PipelineOptions | None = None) -> Planner:
    """Return the planner of the schedule that `name` names, or of the file at that path.

    `options` say which costs and which limit it plans for.

    Raises:
        ScheduleError: neither a name nor a file, an unreadable file, one for another number of
            devices, incomplete, deadlocking or with microbatches out of turn.
    """
    costs = _costs_in(options)
    if name == AUTO or name in PLUS_NAMES:
        return _adaptive(name, num_devices, costs, options)
    if options is not None and options.memory_limit_gib is not None:
        raise ScheduleError(
            f"--pipeline-memory-limit is for --pipeline-schedule auto; {name} holds what it holds"
        )
    schedule = find(name, schedule_names())
    if isinstance(schedule, str):
        return Planner(num_devices, name, costs=costs)
    if schedule.num_devices != num_devices:
        raise ScheduleError(
            f"the schedule file {name} is for {schedule.num_devices} devices, this run has "
            f"{num_devices} pipeline ranks: make --pipeline-model-parallel-size fit"
        )
    try:
        _check_in_turn(schedule)
        lower(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"the schedule file {name} cannot run: {error}") from None
    return Planner(num_devices, name, schedule, costs=costs)


def _check_in_turn(schedule: Schedule) -> None:
    """Raise ScheduleError unless the F, and the B, of every stage run microbatch by microbatch.

    The trainer reads the batches one after the other, on the first stage and on the last, and
    Transformer Engine's first whole backward of a step sets the gradients that others add to.
    """
    for device, row in enumerate(schedule.order):
        last: dict[tuple[bool, int], Pass] = {}
        for work in row:
            if work.kind is Kind.W:
                continue
            sort = work.kind is Kind.F, work.stage
            before = last.get(sort)
            if before is not None and before.microbatch > work.microbatch:
                raise ScheduleError(
                    f"{before} stands before {work} on device {device}, and a trainer gives every "
                    "stage the microbatches in turn: number them in the order in which they run"
                )
            last[sort] = work


def _costs_in(options: PipelineOptions | None) -> Costs | None:
    if options is None or options.costs_file is None:
        return None
    return Costs.load(options.costs_file)


def _adaptive(
    name: str, num_devices: int, costs: Costs | None, options: PipelineOptions | None
) -> Planner:
    """Return a planner for the adaptive scheduler.

    Raises:
        ScheduleError: auto has neither costs nor steps to measure them in, the costs are for
            other stages, or the limit is none.
    """
    allowed = CHUNKS if name == AUTO else CHUNKS[:1]
    if costs is not None and costs.num_stages not in [each * num_devices for each in allowed]:
        counts = " or ".join(str(each * num_devices) for each in allowed)
        raise ScheduleError(
            f"--pipeline-costs is for {costs.num_stages} stages, --pipeline-schedule {name} on "
            f"{num_devices} pipeline ranks has {counts}"
        )
    limit = None if options is None else options.memory_limit_gib
    if limit is not None and not 0 < limit < float("inf"):
        raise ScheduleError(f"--pipeline-memory-limit {limit:g} is not a number of GiB above 0")
    profiles = options is not None and options.profile_steps is not None
    if name == AUTO and costs is None and not profiles:
        raise ScheduleError(
            "--pipeline-schedule auto needs costs: give --pipeline-costs FILE, or "
            "--pipeline-profile-iterations A:B to measure them"
        )
    limit_bytes = None if limit is None else limit * GIB
    return Planner(num_devices, name, costs=costs, limit_bytes=limit_bytes)


def whole_backwards(schedule: Schedule) -> Schedule:
    """Return the schedule with every B made BW, and no W.

    For recomputed layers: between B and W all activations of a layer would be there, which
    recomputing is to avoid. No pass waits for a W, so the order stays legal.
    """
    rows = tuple(
        tuple(
            work._replace(kind=Kind.BW) if work.kind is Kind.B else work
            for work in row
            if work.kind is not Kind.W
        )
        for row in schedule.order
    )
    return replace(schedule, order=rows)


def one_microbatch(placement: Placement, num_devices: int) -> Schedule:
    """Return the schedule of a single microbatch: all there is to send, once."""
    rows = []
    for stages in stages_of(placement, num_devices):
        backward = (Pass(kind, s, 0) for s in reversed(stages) for kind in (Kind.B, Kind.W))
        rows.append((*(Pass(Kind.F, s, 0) for s in stages), *backward))
    return Schedule("one microbatch", num_devices, 1, placement, tuple(rows))
