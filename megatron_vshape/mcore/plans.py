"""From a schedule's name or file to the programs of every number of microbatches."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_vshape.core import catalogue
from megatron_vshape.core.costs import Costs
from megatron_vshape.core.lowering import Program, lower
from megatron_vshape.core.passes import Kind, Pass, ScheduleError
from megatron_vshape.core.placement import Placement
from megatron_vshape.core.schedule import Schedule, Timeline, load_schedule
from megatron_vshape.core.simulate import peak_held, simulate
from megatron_vshape.core.verify import verify
from megatron_vshape.mcore.arguments import schedule_names

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one training step does, and what it is predicted to take."""

    schedule: Schedule
    timeline: Timeline  # in units of one pass of one of 2 * devices stages
    program: Program

    @property
    def peak_chunks(self) -> float:
        """Return the most any device holds; 1F1B holds 2 * devices such chunks."""
        return max(peak_held(self.schedule))

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
    _training: dict[int, Plan] = field(default_factory=dict)
    _evaluation: dict[int, Program] = field(default_factory=dict)

    @property
    def placement(self) -> Placement:
        """Return the device of every stage, which no number of microbatches changes."""
        schedule = self.from_file or catalogue.make(self.name, self.num_devices, 1)
        return schedule.placement

    def training(self, num_microbatches: int) -> Plan:
        """Return the plan of a training step.

        Raises:
            ScheduleError: the schedule comes from a file and is for another number.
        """
        if num_microbatches not in self._training:
            schedule = self._schedule(num_microbatches)
            if self.keeps_backward_whole:
                schedule = whole_backwards(schedule)
            timeline = simulate(schedule)
            plan = Plan(schedule, timeline, lower(schedule, timeline))
            self._training[num_microbatches] = plan
            logger.info(
                "planned %s for %d devices and %d microbatches: bubble %.1f %%, peak %g chunks",
                schedule.name,
                schedule.num_devices,
                num_microbatches,
                100 * timeline.bubble,
                plan.peak_chunks,
            )
        return self._training[num_microbatches]

    def evaluation(self, num_microbatches: int) -> Program:
        """Return the program of forward passes alone."""
        if num_microbatches not in self._evaluation:
            wave = forward_wave(self.placement, self.num_devices, num_microbatches)
            self._evaluation[num_microbatches] = lower(wave)
        return self._evaluation[num_microbatches]

    def smallest(self) -> Program:
        """Return a program that uses every stream which any other of this planner's uses."""
        if self.from_file is not None:
            return lower(self.from_file)
        return lower(catalogue.make(self.name, self.num_devices, 1))

    def _schedule(self, num_microbatches: int) -> Schedule:
        if self.from_file is None:
            return catalogue.make(self.name, self.num_devices, num_microbatches)
        if self.from_file.num_microbatches != num_microbatches:
            raise ScheduleError(
                f"the schedule file {self.name} is for {self.from_file.num_microbatches} "
                f"microbatches, this run has {num_microbatches} in a step: make "
                "--global-batch-size / (--micro-batch-size x data-parallel size) fit"
            )
        return self.from_file


def make_planner(name: str, num_devices: int) -> Planner:
    """Return the planner of the schedule that `name` names, or of the file at that path.

    Raises:
        ScheduleError: neither a name nor a file, an unreadable file, one for another number of
            devices, incomplete or deadlocking.
    """
    if name in catalogue.NAMES:
        return Planner(num_devices, name)
    if not Path(name).suffix and not Path(name).exists():
        raise ScheduleError(
            f"there is no schedule {name!r}: choose one of {', '.join(schedule_names())}, or name "
            "a schedule file"
        )
    schedule = load_schedule(name)
    if schedule.num_devices != num_devices:
        raise ScheduleError(
            f"the schedule file {name} is for {schedule.num_devices} devices, this run has "
            f"{num_devices} pipeline ranks: make --pipeline-model-parallel-size fit"
        )
    try:
        verify(schedule)
        lower(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"the schedule file {name} cannot run: {error}") from None
    return Planner(num_devices, name, schedule)


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


def forward_wave(placement: Placement, num_devices: int, num_microbatches: int) -> Schedule:
    """Return forward passes alone, each device in the order in which they can arrive.

    A device with c stages takes c passes per microbatch, so microbatch m reaches stage s at
    about c * m + s. A pass and what it reads stand in this order too, so it cannot deadlock.
    """
    chunks = len(placement) // num_devices
    passes = sorted(
        (Pass(Kind.F, s, m) for s in range(len(placement)) for m in range(num_microbatches)),
        key=lambda work: (chunks * work.microbatch + work.stage, work.stage),
    )
    rows = [[work for work in passes if placement[work.stage] == d] for d in range(num_devices)]
    return Schedule("evaluation", num_devices, num_microbatches, placement, tuple(map(tuple, rows)))
