"""From the choice of a schedule to the programs for every number of microbatches.

One rank plans for all, but each rank builds its program from its own copy of costs and files, so
ranks that depend on each other compare their programs before a step (`Agreement`).
"""

from __future__ import annotations

import gc
import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from megatron_vshape.core.check.bounds import fits, min_memory
from megatron_vshape.core.check.simulate import peak_held, peak_shared, simulate
from megatron_vshape.core.evaluation import evaluate_named, limits_of
from megatron_vshape.core.model.amounts import GIB, STATE_BYTES
from megatron_vshape.core.model.costs import Costs, chunk_of, with_copies_of
from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.pieces import recut
from megatron_vshape.core.model.placement import Placement, stages_of
from megatron_vshape.core.model.schedule import Schedule, Timeline
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.planner.vocabulary import (
    PENDING_LOGITS,
    in_proportion,
    most_logits_bytes,
    share_forwards,
    uniform_shared,
    with_vocabulary_passes,
    without_shared,
)
from megatron_vshape.core.program.instructions import Program
from megatron_vshape.core.program.lowering import (
    DeferredWgradOverlap,
    deferred_weight_overlap,
    forward_wave,
    lower,
    pair_adjacent,
    with_full_backwards,
)
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.core.schedule_names import AUTO, baselines_of
from megatron_vshape.mcore.setup.one_planner import RankZeroPlanner
from megatron_vshape.mcore.setup.run_config import ScheduleChoice
from megatron_vshape.runtime.hosts import gather_objects

logger = logging.getLogger(__name__)

START = "v-half"
"""Schedule of auto until costs are measured."""

MESSAGES = 9
"""Assumed P2P messages in memory per rank, until a plan defines the number."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A planned training step with its predictions."""

    schedule: Schedule  # before `lower` fuses adjacent B and W
    timeline: Timeline  # in us with costs, else in passes of one of 2 * devices stages
    program: Program
    costs: Costs | None = None  # the costs of the timeline; None: all passes are equal
    # B -> W jobs it overlaps with.
    wgrad_overlaps: Mapping[Pass, DeferredWgradOverlap] = field(default_factory=dict)

    @property
    def peak_chunks(self) -> float:
        """Return the highest activation peak in chunks of 1 / (2 * devices) of the model."""
        if self.costs is None:
            return max(peak_held(self.schedule))
        peak = max(peak_held(self.schedule, self.costs.of_activations()))
        return peak / chunk_of(self.costs, len(self.schedule.order))

    @property
    def peak_messages(self) -> int:
        """Return the maximum number of P2P messages in memory on any device."""
        return max(map(self.program.peak_messages, range(self.schedule.num_devices)))

    @property
    def relative_peak(self) -> float:
        """Return the largest peak relative to 1F1B with one microbatch per rank.

        If the stages of the costs cannot be combined to those of 1F1B, all stages count as equal.
        """
        ranks = self.schedule.num_devices
        try:
            (peak_of_1f1b, *_) = limits_of(PlanRequest(AUTO, ranks, ranks, self.costs))
        except ScheduleError:
            return self.peak_chunks / (2 * ranks)
        return max(peak_held(self.schedule, self.costs)) / peak_of_1f1b

    def peak_bytes(
        self, costs: Costs, shared: Mapping[int, tuple[float, float]] | None = None
    ) -> tuple[float, ...]:
        """Return the peak activation memory of every device for stages with the bytes of `costs`.

        `shared` has, per stage, the bytes that the passes of a microbatch share and those of their
        gradients.
        """
        if not shared:
            return peak_held(self.program.schedule, costs)
        return peak_shared(self.program.schedule, costs, shared)


class Planner:
    """Plans and caches the programs of one schedule.

    Rank 0 runs every search for all ranks, which call `plan_step` for the same numbers in the same
    order. Everything else is deterministic, so every rank computes it for itself.
    """

    def __init__(self, choice: ScheduleChoice, rank_zero: RankZeroPlanner | None = None) -> None:
        """Set the choice; costs, memory and P2P sizes of the run follow later.

        Without `rank_zero` the process searches for itself.
        """
        self.choice = choice
        self.rank_zero = rank_zero
        self.costs = choice.costs  # until `adopt` replaces them
        # Memory per device other than activations.
        self.static_bytes = (0.0,) * choice.num_devices
        self._message_bytes = 0.0  # per P2P message, sent or received
        self._messages = MESSAGES
        self._length_on_arrival = False  # message lengths are known only on arrival
        self._training: dict[int, PlannedStep] = {}
        self._evaluation: dict[int, Program] = {}
        self._bubbles: dict[tuple[int, Costs], float] = {}

    def adopt(self, costs: Costs) -> None:
        """Plan and predict with these costs from now on.

        All ranks must call this between the same two steps. A schedule that does not depend on
        costs stays.
        """
        self.costs = costs
        if self.choice.plans_by_costs:
            self._training.clear()

    def reserve(self, static_bytes: Sequence[float], message_bytes: float | None = None) -> None:
        """Reserve this memory of the limit per device, and space for messages of this size.

        All ranks pass the same values.
        """
        # Plans made before were for a limit without this memory.
        self.static_bytes = tuple(static_bytes)
        if message_bytes is not None:
            self._message_bytes = message_bytes
        self._training.clear()

    @property
    def reserved_bytes(self) -> tuple[float, ...]:
        """Return the reserved memory per device: static memory and P2P messages."""
        return tuple(
            state_bytes + self._messages * self._message_bytes for state_bytes in self.static_bytes
        )

    def narrow_slices(self, counts: tuple[int, ...]) -> None:
        """Choose only among these numbers of slices per microbatch from now on."""
        if counts != self.choice.slices:
            self.choice = replace(self.choice, slices=counts)
            self._training.clear()

    def expect_length_on_arrival(self) -> None:
        """Make programs for messages whose length is known only on arrival from now on."""
        if not self._length_on_arrival:
            self._length_on_arrival = True
            self._training.clear()
            self._evaluation.clear()

    def plan_step(self, num_microbatches: int) -> PlannedStep:
        """Make the schedule of a step and lower it to a program, or return the plan made before.

        The schedule is made by name, from the file or by search.

        Raises:
            ScheduleError: The schedule is from a file for another number of microbatches, or
                nothing fits the memory limit.
        """
        plan = recall(self._training, num_microbatches)
        if plan is None:
            plan = self._plan(num_microbatches)
            # Messages need memory, too, and only the plan knows their number. It grows with every
            # turn of this loop and a step has finitely many messages, so the loop ends.
            while self.choice.limit_bytes is not None and plan.peak_messages > self._messages:
                self._messages = plan.peak_messages
                plan = self._plan(num_microbatches)
            if self.choice.plans_by_costs:  # keep all plans: each takes seconds of search
                self._training[num_microbatches] = plan
            else:
                keep(self._training, num_microbatches, plan)
            logger.info(
                "planned %s for %d devices and %d microbatches: bubble %.1f %%, peak %g chunks",
                plan.schedule.name,
                plan.schedule.num_devices,
                num_microbatches,
                100 * plan.timeline.bubble,
                plan.peak_chunks,
            )
        return plan

    def _plan(self, num_microbatches: int) -> PlannedStep:
        """Make the schedule by name, from the file or by search, and build its step."""
        # Every rank makes it for itself: the result depends on the options only.
        if not self.choice.plans_by_costs:
            with no_collection():
                return self._build_step(self._schedule(num_microbatches))
        if self.rank_zero is not None:
            # Searches end by time and differ between ranks, so rank 0 searches for all. The rest is
            # deterministic, and cheaper to repeat than to send.
            return self._build_step(self.rank_zero(lambda: self._schedule(num_microbatches)))
        return self._build_step(self._schedule(num_microbatches))

    def _build_step(self, schedule: Schedule) -> PlannedStep:
        """Return the step of a schedule: the passes of this run, their times, and its programs."""
        # 1. Full backwards: a split would keep recomputed activations until W, and CUDA graphs of
        #    full layers have no W of their own.
        if self.choice.keeps_full_backward:
            schedule = with_full_backwards(schedule)
        elif self.choice.whole_stages:
            schedule = with_full_backwards(schedule, self.choice.whole_stages)
        costs = self._costs_of(schedule)
        # 2. Passes of features, which are placed between the F, B and W that the run has.
        if costs is not None:
            schedule = with_vocabulary_passes(schedule, costs)
        # 3. Pairs of adjacent F and B; after 2, whose passes could come between the two.
        if self.choice.may_overlap:
            schedule = pair_adjacent(schedule, costs)
        # 4. Times. P2P messages are posted in the order in which this timeline expects them.
        timeline = simulate(schedule, costs)
        # 5. Programs of all ranks, which `lower` proves free of deadlocks.
        program = lower(
            schedule,
            timeline,
            kernels=self.choice.kernels,
            length_on_arrival=self._length_on_arrival,
        )
        # 6. Weight gradients for waits in B, which only Megatron's local layers expose.
        wgrad_overlaps: Mapping[Pass, DeferredWgradOverlap] = {}
        if self.choice.fills_waits:
            step_timeline = simulate(program.schedule, costs)
            wgrad_overlaps = deferred_weight_overlap(step_timeline, self.choice.ties_ends)
        return PlannedStep(schedule, timeline, program, costs, wgrad_overlaps)

    def use(self, plan: PlannedStep) -> None:
        """Use this plan in all later steps with its number of microbatches; all ranks call this."""
        self._training[plan.schedule.num_microbatches] = plan

    def best_by_name(self, plan: PlannedStep) -> PlannedStep | None:
        """Return the named schedule with the shortest predicted step; equal on all ranks.

        It uses the placement of the model and fits the memory limit of the plan. None if no such
        schedule exists, or if the best one equals the plan.
        """
        count = plan.schedule.num_microbatches

        def schedules() -> list[Schedule]:
            return list(self._known(count))

        # As in `_plan`, rank 0 makes the schedules for all ranks.
        candidates = schedules() if self.rank_zero is None else self.rank_zero(schedules)
        limits = limits_of(
            self._request_at_costs(PlanRequest(AUTO, self.choice.num_devices, count))
        )
        # Limits are per device of the planned numbering, programs per rank.
        by_rank = [limit for _, limit in sorted(zip(self.choice.ranks, limits, strict=True))]
        fitting = [step for step in map(self._build_step, candidates) if self._fits(step, by_rank)]
        best = min(fitting, key=lambda step: step.timeline.makespan, default=None)
        if best is None or best.program.schedule.order == plan.program.schedule.order:
            return None
        return best

    def _fits(self, step: PlannedStep, limits: Sequence[float]) -> bool:
        """Return whether activations and messages of a step fit the memory limit of every rank."""
        if step.costs is None:
            return False
        has_room = self.choice.limit_bytes is None or step.peak_messages <= self._messages
        return has_room and fits(peak_held(step.schedule, step.costs), limits)

    def _known(self, num_microbatches: int) -> Iterator[Schedule]:
        """Yield the published schedules with the placement of the model."""
        choice, costs = self.choice, self._supported_costs(self._known_costs)
        devices = choice.num_devices
        chunks = (len(choice.stage_devices) // devices,)
        request = PlanRequest(AUTO, devices, num_microbatches, costs, lambda *_: costs)
        for baseline, block in baselines_of(devices, num_microbatches, chunks):
            if block.placement == choice.stage_devices and costs.num_stages == len(block.placement):
                evaluated = evaluate_named(baseline, request)
                yield replace(evaluated.schedule, name=baseline.name).renumbered(choice.ranks)

    def predicted_bubble(self, num_microbatches: int) -> float:
        """Return the bubble of a training step at the current costs."""
        plan = self.plan_step(num_microbatches)
        costs = self._costs_of(plan.schedule)
        if costs is None:
            return plan.timeline.bubble
        key = num_microbatches, costs
        if key not in self._bubbles:
            self._bubbles[key] = simulate(plan.schedule, costs).bubble
        return self._bubbles[key]

    def evaluation_program(self, num_microbatches: int) -> Program:
        """Make the program of an evaluation step, which has only forward passes, or recall it."""
        program = recall(self._evaluation, num_microbatches)
        if program is not None:
            return program
        with no_collection():
            # Without backwards no memory has to be balanced: all schedules run the F of a placement
            # alike.
            wave = forward_wave(self.choice.placement, self.choice.num_devices, num_microbatches)
            if self.choice.shards_output_layer:
                wave = share_forwards(wave)
            program = lower(
                wave, kernels=self.choice.kernels, length_on_arrival=self._length_on_arrival
            )
        keep(self._evaluation, num_microbatches, program)
        return program

    def smallest(self) -> Program:
        """Return a small program that uses every P2P stream of this planner's other programs."""
        schedule = one_microbatch(self.choice.placement, self.choice.num_devices)
        costs = self._costs_of(schedule)
        return lower(schedule if costs is None else with_vocabulary_passes(schedule, costs))

    @property
    def _known_costs(self) -> Costs:
        if self.costs is None:
            raise RuntimeError("an order is to be planned by costs, and none are known yet")
        return self.costs

    def _costs_of(self, schedule: Schedule) -> Costs | None:
        """Return the costs if they match this schedule's stages, else the estimate."""
        costs = self.costs
        # A named schedule may have other stages than the costs: its estimates are then relative.
        if costs is None or costs.num_stages != schedule.num_stages:
            costs = self._estimate(schedule)
        return adapted_costs(self.choice, costs, schedule.num_stages)

    def _estimate(self, schedule: Schedule) -> Costs | None:
        """Return the estimate; copies of a stage's activations last as long as its F."""
        estimate = self.choice.estimate
        if estimate is None or not schedule.copies:
            return estimate
        memory, as_forward = estimate.held_after_forward_bytes, estimate.forward_us
        return with_copies_of(estimate, as_forward, memory, as_forward)

    def _schedule(self, num_microbatches: int) -> Schedule:
        """Make the schedule, with its devices numbered as pipeline ranks."""
        return self._make_schedule(num_microbatches).renumbered(self.choice.ranks)

    def _make_schedule(self, num_microbatches: int) -> Schedule:
        """Make the schedule by name, from the file or by search, in its own device numbering."""
        choice = self.choice
        file = choice.from_file
        if file is not None and file.unsliced_microbatches != num_microbatches:
            raise ScheduleError(
                f"the schedule file {choice.name} is for {file.unsliced_microbatches} "
                f"microbatches, this run has {num_microbatches} in a step: make "
                "--global-batch-size / (--micro-batch-size x data-parallel size) fit"
            )
        if file is not None:
            return file
        # Until costs are measured, auto runs a schedule by name, too. No search: the name's block
        # of one microbatch is repeated.
        if not choice.plans_by_costs or (choice.name == AUTO and self.costs is None):
            schedule = choice.published(
                START if choice.name == AUTO else choice.name, num_microbatches
            )
            # F and B of a published pair overlap only in Megatron's layer plans.
            return schedule if choice.may_overlap else schedule.split_overlapped()
        request = choice.request(num_microbatches)
        if choice.name == AUTO:
            return replace(plan_request(self._request_at_costs(request)).schedule, name=AUTO)
        costs = self.costs or choice.estimate
        return plan_request(replace(request, costs=costs and self._supported_costs(costs))).schedule

    def _supported_costs(self, costs: Costs) -> Costs:
        """Return costs without passes that the run adds later or does not support."""
        return adapted_costs(self.choice, costs, costs.num_stages) or costs

    def _request_at_costs(self, question: PlanRequest) -> PlanRequest:
        """Return the plan request of the best schedule at the current costs within the limit."""
        costs, layers = self._supported_costs(self._known_costs), self.choice.num_layers
        limit: str | tuple[float, ...] | None = self.choice.limit_of
        if self.choice.limit_bytes is not None:  # the run reserves the measured state itself
            costs = costs.without([STATE_BYTES])
        available = self._left_bytes(costs)
        if available is not None:
            # The limit is per rank, but a plan request numbers the devices.
            limit = tuple(available[rank] for rank in self.choice.ranks)
        placements = (self.choice.stage_devices,)

        def cut_stages(num_stages: int, name: str) -> Costs:
            shares = self.choice.layer_shares
            return recut(costs, num_stages, question.num_devices, name, layers, shares)

        return replace(
            question,
            limit=limit,
            costs=costs,
            stage_cost_function=cut_stages,
            placements=placements,
        )

    def _left_bytes(self, costs: Costs) -> tuple[float, ...] | None:
        """Return the memory that the limit leaves for activations per device; None without a limit.

        Raises:
            ScheduleError: One microbatch does not fit; the message has the need of each device.
        """
        limit, reserved = self.choice.limit_bytes, self.reserved_bytes
        if limit is None:
            return None
        available = tuple(limit - reserved_memory for reserved_memory in reserved)
        min_bytes = min_memory(costs, self.choice.placement, self.choice.num_devices)
        # A schedule needs at least one microbatch at a time, plus its logits in a separate pass.
        logits_bytes = most_logits_bytes(costs, min(PENDING_LOGITS))
        required = [num_bytes + logits_bytes for num_bytes in min_bytes]
        if all(n <= limit_of_rank for n, limit_of_rank in zip(required, available, strict=True)):
            return available
        min_limit = max(
            n + reserved_memory for n, reserved_memory in zip(required, reserved, strict=True)
        )
        rows = "; ".join(
            f"rank {rank}: {reserved_memory / GIB:.3f} GiB besides activations and at "
            f"least {n / GIB:.3f} GiB of them"
            for rank, (n, reserved_memory) in enumerate(zip(required, reserved, strict=True))
        )
        raise ScheduleError(
            f"nothing fits --pipeline-memory-limit {limit / GIB:g}: {rows}; the least "
            f"limit is {math.ceil(1000 * min_limit / GIB) / 1000:.3f} GiB"
        )


def adapted_costs(choice: ScheduleChoice, costs: Costs | None, num_stages: int) -> Costs | None:
    """Return the costs of a run: with vocabulary passes if it shares the vocabulary, else without.

    Costs of vocabulary passes are estimated if unknown. None: all passes have equal costs.
    """
    if not choice.shards_output_layer:
        return costs and without_shared(costs)
    uniform = uniform_shared(choice.num_devices, num_stages)
    return in_proportion(costs or uniform, choice.estimate or uniform)


def one_microbatch(placement: Placement, num_devices: int) -> Schedule:
    """Return the schedule of a single microbatch, which sends every message once."""
    rows = []
    for stages in stages_of(placement, num_devices):
        backward = (Pass(kind, s, 0) for s in reversed(stages) for kind in (Kind.B, Kind.W))
        rows.append((*(Pass(Kind.F, s, 0) for s in stages), *backward))
    return Schedule("one microbatch", num_devices, 1, placement, tuple(rows))


MOST_MICROBATCHES = 8192
"""Maximum microbatches of the plans kept: about 150 MiB of host memory per rank at PP 8.

Dynamic batches can have a thousand different counts, and a plan grows with its count.
"""

_Plan = TypeVar("_Plan")


def recall(plans: dict[int, _Plan], num_microbatches: int) -> _Plan | None:
    """Return the plan of a number of microbatches, if it is kept, and note its use."""
    plan = plans.pop(num_microbatches, None)
    if plan is not None:
        plans[num_microbatches] = plan
    return plan


def keep(plans: dict[int, _Plan], num_microbatches: int, plan: _Plan) -> None:
    """Keep a plan, and drop those that have not been used for the longest time."""
    plans[num_microbatches] = plan
    while len(plans) > 1 and sum(plans) > MOST_MICROBATCHES:
        del plans[next(iter(plans))]


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause the cyclic garbage collector.

    A plan has tens of thousands of objects and no cycles. They would trigger full collections,
    each of which visits every object of the trainer and takes longer than the plan itself.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Record(NamedTuple):
    """The program of a rank, for the comparison with other ranks."""

    num_microbatches: int
    text_hash: str


class Agreement:
    """Compares the programs of ranks that depend on each other, once per program."""

    def __init__(self) -> None:
        self._agreed: dict[int, Program] = {}  # by number of microbatches

    def check(
        self,
        program: Program,
        wgrad_overlaps: Mapping[Pass, DeferredWgradOverlap] | None = None,
        num_microbatches: int | None = None,
        groups: Sequence[dist.ProcessGroup | None] = (None,),
    ) -> None:
        """Check that all ranks run this program; all ranks call this for the same steps.

        Ranks of one pipeline with different programs could wait for each other forever. The same is
        true for ranks that run different passes around a tensor-parallel, context-parallel or
        expert-parallel collective.

        Args:
            program: The program of this step.
            wgrad_overlaps: The W jobs that run inside each B.
            num_microbatches: The trainer's number; None: that of the program.
            groups: Groups whose ranks need the same program, directly or through a common rank.
                None in it is the group of all ranks.

        Raises:
            ScheduleError: On all ranks, if one has a different program.
        """
        schedule = program.schedule
        # Plans are kept, so a program that was compared before is the same object. The steps after
        # the first need no collective.
        if recall(self._agreed, schedule.num_microbatches) is program:
            return
        text = f"{schedule.placement} {program.text()} {sorted((wgrad_overlaps or {}).items())}"
        # A hash, because the text of a program can have megabytes.
        record_of_rank = _Record(
            num_microbatches or schedule.num_microbatches,
            hashlib.sha256(text.encode()).hexdigest(),
        )
        records = {dist.get_rank(): record_of_rank}
        for group in groups:
            parts = gather_objects(records, group)
            records = {rank: record for part in parts for rank, record in part.items()}
        _check_records(records)
        keep(self._agreed, schedule.num_microbatches, program)


def _check_records(records: Mapping[int, _Record]) -> None:
    """Raise ScheduleError unless all ranks run the same program."""
    first = min(records)
    expected = records[first]
    for rank, record in sorted(records.items()):
        if record.num_microbatches != expected.num_microbatches:
            raise ScheduleError(
                f"rank {rank} runs {record.num_microbatches} microbatches in this step, rank "
                f"{first} runs {expected.num_microbatches}: the ranks of a pipeline need the same "
                "number, and so do all data-parallel replicas with expert parallelism, a searched "
                "schedule or a schedule file. Pass the same num_microbatches on all of these ranks"
            )
        if record != expected:
            raise ScheduleError(
                f"rank {rank} has planned another order than rank {first} for "
                f"{expected.num_microbatches} microbatches: give every node the same costs and "
                "schedule files"
            )
