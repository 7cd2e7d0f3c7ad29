"""Predict a configuration: memory of every pipeline rank and step time.

One predictor for `advise` and `sweep`: costs from counted work, and a simulation of the schedule.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from megatron_vshape.core.budget import Budget
from megatron_vshape.core.check.bounds import LimitError
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import even_layers
from megatron_vshape.core.model.pieces import Pieces, under_megatron
from megatron_vshape.core.model.placement import Placement, default_placements, looping
from megatron_vshape.core.model.schedule import Objective, Schedule, Timeline
from megatron_vshape.core.plan import plan_request, published_schedule
from megatron_vshape.core.request import AUTO, PlanRequest, with_all_kinds
from megatron_vshape.rehearsal.counting import Counted, Ranks, count_all, counted
from megatron_vshape.rehearsal.gpus import Fit
from megatron_vshape.rehearsal.ranks import DryRunConfig
from megatron_vshape.tuning.configurations import (
    ADAPTIVE,
    Configuration,
    Subject,
    SweepError,
    count_stages,
    layers_of_stages,
)
from megatron_vshape.tuning.machine import Machine
from megatron_vshape.view.numbers import GIB, format_sufficient_limit

PATIENCE = 2
"""Time limit of a search with its setup and evaluation, in multiples of its search time."""

TIME_LIMIT = "the time limit (--seconds) has passed"

Key = tuple[object, ...]


@dataclass(slots=True)
class Counts:
    """Count the work of configurations, once per set of sizes, and compute costs for each."""

    subject: Subject
    machine: Machine
    programs: Callable[[], DryRunConfig] | None = None  # None: the installed libraries
    ranks: dict[Key, Ranks | str] = field(default_factory=dict)  # by `key_of_count`
    made: dict[Key, Counted] = field(default_factory=dict)  # by that, GPUs and pipeline ranks

    def count(
        self, configurations: Iterable[Configuration], report: Callable[[int, int], None]
    ) -> tuple[int, int]:
        """Count these configurations; return the numbers of counted and of failed sets of sizes.

        Raises:
            ScheduleError: Megatron or Transformer Engine is not available for the estimate.
        """
        alike = (it.counted_as(self.subject) for it in configurations)
        wanted = {key: it for it in alike if (key := key_of_count(it)) not in self.ranks}
        subject = self.subject
        if not wanted:
            return 0, 0
        if self.programs is None:
            config = DryRunConfig.of(subject.command, self.machine.gpu)
        else:
            config = self.programs()
        commands = [it.counted_command(subject) for it in wanted.values()]
        found = count_all(config, commands, report)
        self.ranks |= zip(wanted, found, strict=True)
        return len(found), sum(isinstance(each, str) for each in found)

    def __call__(self, it: Configuration) -> Counted:
        """Return the costs of a configuration.

        Raises:
            SweepError: the configuration cannot be estimated; the text contains the reason.
        """
        key = key_of_count(it.counted_as(self.subject))
        if key not in self.ranks:
            self.count([it], lambda *_: None)
        ranks, world, pipeline = self.ranks[key], it.num_devices, it.pipeline_parallel
        key = (*key, world, pipeline)
        if key not in self.made:
            command = it.command(self.subject)
            try:
                self.made[key] = counted(ranks, command, self.machine.gpu, world, pipeline)
            except ScheduleError as error:
                raise SweepError(str(error)) from None
        return self.made[key]


def key_of_count(it: Configuration) -> Key:
    """Return the settings that determine the counted work: not the pipeline and its replicas."""
    return (
        it.sequence_length,
        it.microbatch_size,
        it.tensor_parallel,
        it.context_parallel,
        it.expert_parallel,
        it.recompute,
        it.format,
        it.features,
        # Keys of recorded counts must not change: all of them use sequence parallelism.
        *(() if it.sequence_parallel else (False,)),
    )


class Verdict(StrEnum):
    """Result of a prediction."""

    RUNS = "runs"
    OUT_OF_MEMORY = "OOM"
    REJECTED = "does not start"  # by Megatron
    NO_PLAN = "no plan"
    NOT_PLANNED = "not planned"


class RankPeak(NamedTuple):
    """Peak memory of a pipeline rank, in bytes."""

    states: float  # parameters, gradients, optimizer state
    activations: float  # at their peak, with workspace
    buffers: float  # of messages and workspaces
    context: float  # outside of torch's allocator

    @property
    def allocated(self) -> float:
        """Peak in torch's allocator."""
        return self.states + self.activations + self.buffers


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted memory and time of a configuration.

    `Predictor.__call__` simulates only what fits, so its times are None otherwise.
    """

    configuration: Configuration
    verdict: Verdict
    peak_bytes: float  # of the device with the highest peak
    step_s: float | None = None
    mfu: float | None = None  # fraction of the devices' peak
    bubble: float | None = None  # fraction of the pipeline's time in which the busiest device idles
    reason: str = ""
    schedule: Schedule | None = field(default=None, compare=False, repr=False)
    ranks: tuple[RankPeak, ...] = field(default=(), compare=False, repr=False)
    fit: Fit = field(default=Fit.FITS, compare=False)  # of the ranks in their GPUs
    layers: tuple[int, ...] = field(default=(), compare=False, repr=False)  # of every stage
    is_stock: bool = field(default=False, compare=False)  # run by stock Megatron

    @property
    def fits(self) -> bool:
        """Whether the configuration is predicted to run."""
        return self.verdict is Verdict.RUNS


def step(prediction: Prediction) -> float:
    """Return the seconds of a step; infinite if unknown."""
    return math.inf if prediction.step_s is None else prediction.step_s


@dataclass(frozen=True, slots=True)
class Predictor:
    """Predict configurations of one model on one machine from counted costs."""

    subject: Subject
    machine: Machine
    counts: Callable[[Configuration], Counted]
    post_validation: bool = False
    headroom_bytes: float = 0.0  # kept free on every device

    def allocatable_bytes(self, it: Configuration) -> float:
        """Limit of torch's allocator with the configuration's communicators."""
        communicators = self.counts(it).communicators
        return self.machine.gpu.allocatable_bytes(communicators, self.headroom_bytes)

    def __call__(self, it: Configuration, budget: Budget | None = None) -> Prediction:
        """Predict the configuration; a search ends with the budget."""
        try:
            return self.planned(it, budget) if it.schedule == ADAPTIVE else self.published(it)
        except SweepError as error:
            return Prediction(it, Verdict.NO_PLAN, 0.0, reason=str(error))
        except ScheduleError as error:
            raise SweepError(f"{it}: {error}") from None

    def published(
        self,
        it: Configuration,
        layers: Sequence[int] | None = None,
        is_stock: bool = False,
        always: bool = False,
    ) -> Prediction:
        """Predict the configuration's published schedule, or that of its schedule file.

        Args:
            it: the configuration.
            layers: layers of every stage, if not those of the configuration's layout.
            is_stock: as stock Megatron runs it.
            always: predict its times too if it does not fit.

        Raises:
            ScheduleError: the schedule does not exist, or does not support these sizes.
        """
        schedule = published_schedule(it.schedule, it.pipeline_parallel, it.num_microbatches)
        costs = self.costs(it, schedule.placement, layers)
        costs = under_megatron(costs, self.counts(it).message_bytes) if is_stock else costs
        return self.evaluated(it, schedule, costs, always=always, is_stock=is_stock)

    def survey(
        self, configurations: Iterable[Configuration], margin: float, budget: Budget | None = None
    ) -> Iterator[Prediction]:
        """Yield every configuration's prediction; those that need planning come last.

        Planning needs seconds. So an adaptive configuration is planned only if it could come within
        `margin` of the best of its workload without any bubble, or if it has additional arguments.
        The most promising come first, because they exclude most others. The rest is not planned
        once the budget is used up.
        """
        best: dict[tuple[int, int], float] = {}
        least_s = [
            (self.least_s(it) if it.schedule == ADAPTIVE else 0.0, it) for it in configurations
        ]
        for least, it in sorted(least_s, key=lambda each: each[0]):
            fastest = best.get(it.workload, math.inf)
            if it.schedule == ADAPTIVE and budget is not None and budget.stopped():
                yield Prediction(it, Verdict.NOT_PLANNED, 0.0, reason=TIME_LIMIT)
                continue
            if least > fastest * (1 + margin) and not it.arguments:
                slower = f"even without a bubble {100 * (least / fastest - 1):.0f} % slower"
                reason = f"{slower} than the best"
                yield Prediction(it, Verdict.NOT_PLANNED, 0.0, reason=reason)
                continue
            found = self(it, budget)
            best[it.workload] = min(fastest, step(found))
            yield found

    def least_s(self, it: Configuration) -> float:
        """Return the step time without idle time of the busiest device, on the best placement."""
        least = math.inf
        try:
            for placement in _placements(it):
                costs = self.costs(it, placement)
                busy_us = costs.busy_us(placement, it.pipeline_parallel, it.num_microbatches)
                least = min(least, busy_us + self.counts(it).after_us(costs, placement))
        except SweepError:  # reported by its prediction
            return 0.0
        return least * 1e-6

    def pieces(self, it: Configuration) -> Pieces:
        """Return the counted costs of a layer and of both ends."""
        return it.adapted(self.counts(it).pieces, self.subject)

    def costs(
        self, it: Configuration, placement: Placement, layers: Sequence[int] | None = None
    ) -> Costs:
        """Return the costs of stages with these layers, or with those of the layout."""
        pieces = self.pieces(it)
        layers = layers or layers_of_stages(it, self.subject, placement)
        # With passes of no stage, the ends of the model belong to all devices.
        if pieces.others:
            return pieces.costs(tuple(layers))
        costs = self.with_embeddings(pieces, placement).costs(tuple(layers))
        return self.machine.copied(costs) if it.schedule == ADAPTIVE else costs

    def with_embeddings(self, pieces: Pieces, placement: Placement) -> Pieces:
        """Add the copy of the embedding to the last stage, if the model and placement have one."""
        # In a V, the device of the last stage has the embedding anyway.
        if placement[0] == placement[-1] or not self.subject.copies_embedding:
            return pieces
        more = pieces.last.state_bytes + pieces.first.state_bytes
        return replace(pieces, last=replace(pieces.last, state_bytes=more))

    def evaluated(
        self,
        it: Configuration,
        schedule: Schedule,
        costs: Costs,
        timeline: Timeline | None = None,
        always: bool = False,
        is_stock: bool = False,
    ) -> Prediction:
        """Predict a schedule; its times too if it does not fit with `always`.

        `timeline` is given if planning has simulated it already.
        """
        schedule = with_all_kinds(schedule, costs)
        gpu, communicators = self.machine.gpu, self.counts(it).communicators
        outside = gpu.outside_bytes(communicators)
        fixed = costs.fixed_bytes(schedule.placement, schedule.num_devices)
        ranks = tuple(
            RankPeak(own - costs.device_bytes, held - own, costs.device_bytes, outside)
            for own, held in zip(fixed, peak_held(schedule, costs), strict=True)
        )
        needed = list(map(sum, ranks))
        peak = max(needed)
        fit = gpu.fit_of(peak - outside, communicators, self.headroom_bytes)
        found = Prediction(
            it,
            Verdict.RUNS,
            peak,
            schedule=schedule,
            ranks=ranks,
            fit=fit,
            layers=costs.layers or (),
            is_stock=is_stock,
        )
        if fit is not Fit.FITS:
            limit = gpu.memory_bytes - self.headroom_bytes
            gib = f"{peak / GIB:.1f} of {limit / GIB:.1f} GiB on device {needed.index(peak)}"
            found = replace(found, verdict=Verdict.OUT_OF_MEMORY, reason=f"needs {gib}")
            if not always:
                return found
        timeline = timeline or simulate(schedule, costs)
        after_us = self.counts(it).after_us(costs, schedule.placement)
        passes_us, bubble = timeline.makespan, timeline.bubble
        if self.post_validation and not is_stock:  # no barrier between steps
            passes_us, bubble = timeline.span, timeline.span_bubble
        step_s = 1e-6 * (passes_us + after_us)
        return replace(found, step_s=step_s, mfu=self.mfu(it, step_s), bubble=bubble)

    def mfu(self, it: Configuration, step_s: float) -> float:
        """Return the fraction of the devices' peak FLOPS that a step with this time achieves."""
        flops = self.subject.flops(it.sequence_length, it.global_batch_size)
        if self.subject.command.has("--multi-latent-attention"):  # not described by its widths
            counted, ranks = self.counts(it), it.num_devices / it.pipeline_parallel
            microbatch = self.subject.layers * counted.layer_flops + counted.ends_flops
            flops = 3 * microbatch * it.num_microbatches * ranks
        return flops / (step_s * self.machine.gpu.bf16_flops * it.num_devices)

    def planned(self, it: Configuration, budget: Budget | None = None) -> Prediction:
        """Predict the best plan over all placements, with the layers of the configuration's layout.

        The memory left by the parameters depends on the placement: in a V, the embedding and the
        output layer are on one device, in a loop on two.

        Raises:
            SweepError: no plan fits on any placement.
        """
        found, reasons = [], []
        limits = [self.allocatable_bytes(it)] * it.pipeline_parallel
        objective = Objective.SPAN if self.post_validation else Objective.MAKESPAN
        most = self.machine.moved_limit_bytes
        for placement in _placements(it):
            costs = self.costs(it, placement)
            try:
                timeline = plan_adaptive(it, placement, costs, limits, objective, most, budget)
                found.append(self.evaluated(it, timeline.schedule, costs, timeline))
            except SweepError as error:
                reasons.append(str(error))
        if not found:
            raise SweepError(reasons[0])
        return min(found, key=step)

    def planned_with_layers(
        self, it: Configuration, pieces: Pieces, seconds: float
    ) -> Prediction | None:
        """Predict the best plan over all placements, with layers balanced for each of them.

        Args:
            it: the configuration; its layout and schedule are ignored.
            pieces: costs of a layer and of both ends of the model.
            seconds: search time.

        Returns:
            The prediction, or None if no plan fits.
        """
        ranks, num_layers = it.pipeline_parallel, self.subject.layers
        request = PlanRequest(
            AUTO,
            ranks,
            it.num_microbatches,
            limit=self.allocatable_bytes(it),
            layers=(pieces, num_layers),
            costs=pieces.costs(even_layers(2 * ranks, looping(ranks, 2))),
            chunks=tuple(n for n in (1, 2, 3) if n * ranks <= num_layers + 2),
            seconds=seconds,
        )
        try:
            found = plan_request(request, Budget(PATIENCE * seconds))
        except ScheduleError:
            return None
        name = ADAPTIVE if found.baseline is None else str(found.baseline)
        if found.is_megatrons:
            stock = self.published(replace(it, schedule=name), found.costs.layers, is_stock=True)
            if stock.fits:
                return stock
            name = ADAPTIVE  # from a file, this package runs these passes with less memory
        # The search does not include the copy of the embedding on the last stage.
        pieces = self.with_embeddings(pieces, found.schedule.placement)
        costs = pieces.costs(found.costs.layers or ())
        made = self.evaluated(replace(it, schedule=name), found.schedule, costs)
        return made if made.fits else None


def _placements(it: Configuration) -> Sequence[Placement]:
    devices = it.pipeline_parallel
    return default_placements(devices, count_stages(ADAPTIVE, devices))


def plan_adaptive(
    it: Configuration,
    placement: Placement,
    costs: Costs,
    limits_bytes: Sequence[float],
    objective: Objective,
    moved_limit_bytes: float = math.inf,
    budget: Budget | None = None,
) -> Timeline:
    """Plan for a placement with at most `limits_bytes` on each device.

    The plan moves at most `moved_limit_bytes` off each device, if the costs have such passes. The
    search ends with the budget.

    Raises:
        SweepError: the limits are infeasible.
    """
    fixed = max(costs.fixed_bytes(placement, it.pipeline_parallel))
    if fixed >= min(limits_bytes):
        over = (fixed - min(limits_bytes)) / GIB
        raise SweepError(f"parameters and their states alone are {over:.1f} GiB too much")
    request = PlanRequest(
        AUTO,
        it.pipeline_parallel,
        it.num_microbatches,
        costs,
        limit=limits_bytes,
        moved_limit=moved_limit_bytes,
        objective=objective,
        placements=(placement,),
    )
    try:
        schedule = plan_request(request, budget).schedule
    except LimitError as error:
        raise SweepError(
            error.format_message(lambda held: f"{format_sufficient_limit(held / GIB)} GiB")
        ) from None
    except ScheduleError as error:
        raise SweepError(str(error).splitlines()[0]) from None
    return simulate(schedule, costs)
