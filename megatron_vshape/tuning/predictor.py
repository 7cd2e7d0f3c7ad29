"""Predict a configuration: memory of every pipeline rank and step time.

One predictor for `advise` and `sweep`: costs from counted work, and a simulation of the schedule.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple, Protocol

from megatron_vshape.core.budget import Budget
from megatron_vshape.core.check.bounds import LimitError
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.model.amounts import STATE_BYTES
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import even_layers
from megatron_vshape.core.model.pieces import Pieces, under_megatron
from megatron_vshape.core.model.placement import Placement, default_placements, looping
from megatron_vshape.core.model.schedule import Objective, Schedule, Timeline
from megatron_vshape.core.plan import plan_request, published_schedule
from megatron_vshape.core.planner.vocabulary import with_vocabulary_passes
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.core.schedule_names import AUTO
from megatron_vshape.rehearsal.configuration_costs import (
    CountedCosts,
    Ranks,
    costs_of_counted_ranks,
    reports_of_commands,
)
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

_PATIENCE = 2
"""Time limit of a search with its setup and evaluation, in multiples of its search time."""

TIME_LIMIT = "the time limit (--seconds) has passed"

Key = tuple[object, ...]


class CostSource(Protocol):
    """Costs of configurations: `Counts`, or a replacement."""

    def costs_of(self, config: Configuration) -> CountedCosts:
        """Return the costs of a configuration."""


@dataclass(frozen=True, slots=True)
class FixedCosts:
    """The same costs for every configuration."""

    costs: CountedCosts

    def costs_of(self, config: Configuration) -> CountedCosts:
        """Return the costs."""
        return self.costs


@dataclass(slots=True)
class Counts:
    """Count the work of configurations, once per set of sizes, and compute costs for each."""

    subject: Subject
    machine: Machine
    # None: with the installed libraries.
    make_dry_run_config: Callable[[], DryRunConfig] | None = None
    ranks: dict[Key, Ranks | str] = field(default_factory=dict)  # by `key_of_count`
    costs: dict[Key, CountedCosts] = field(default_factory=dict)  # by that, GPUs and pipeline ranks

    def count(
        self, configurations: Iterable[Configuration], report: Callable[[int, int], None]
    ) -> tuple[int, int]:
        """Count these configurations; return the numbers of counted and of failed sets of sizes.

        Raises:
            ScheduleError: Megatron or Transformer Engine is not available for the estimate.
        """
        counted_configs = (config.counted_as(self.subject) for config in configurations)
        missing = {
            key: config
            for config in counted_configs
            if (key := key_of_count(config)) not in self.ranks
        }
        subject = self.subject
        if not missing:
            return 0, 0
        if self.make_dry_run_config is None:
            dry_run_config = DryRunConfig.of(subject.command, self.machine.gpu)
        else:
            dry_run_config = self.make_dry_run_config()
        commands = [config.counted_command(subject) for config in missing.values()]
        results = reports_of_commands(dry_run_config, commands, report)
        self.ranks |= zip(missing, results, strict=True)
        return len(results), sum(isinstance(result, str) for result in results)

    def costs_of(self, config: Configuration) -> CountedCosts:
        """Return the costs of a configuration, from dry runs of a small model.

        `configuration_costs` runs them, and `step_time` converts their counted work to times.

        Raises:
            SweepError: the configuration cannot be estimated; the text contains the reason.
        """
        key = key_of_count(config.counted_as(self.subject))
        if key not in self.ranks:
            self.count([config], lambda *_: None)
        reports, world, pipeline = self.ranks[key], config.num_devices, config.pipeline_parallel
        key = (*key, world, pipeline)
        if key not in self.costs:
            command = config.command(self.subject)
            try:
                self.costs[key] = costs_of_counted_ranks(
                    reports, command, self.machine.gpu, world, pipeline
                )
            except ScheduleError as error:
                raise SweepError(str(error)) from None
        return self.costs[key]


def key_of_count(config: Configuration) -> Key:
    """Return the settings that determine the counted work: not the pipeline and its replicas."""
    return (
        config.sequence_length,
        config.microbatch_size,
        config.tensor_parallel,
        config.context_parallel,
        config.expert_parallel,
        config.recompute,
        config.format,
        config.features,
        # Keys of recorded counts must not change: all of them use sequence parallelism.
        *(() if config.sequence_parallel else (False,)),
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


def step_seconds(prediction: Prediction) -> float:
    """Return the seconds of a step; infinite if unknown."""
    return math.inf if prediction.step_s is None else prediction.step_s


@dataclass(frozen=True, slots=True)
class Predictor:
    """Predict configurations of one model on one machine from counted costs."""

    subject: Subject
    machine: Machine
    counts: CostSource
    post_validation: bool = False
    headroom_bytes: float = 0.0  # kept free on every device

    def allocatable_bytes(self, config: Configuration) -> float:
        """Limit of torch's allocator with the configuration's communicators."""
        communicators = self.counts.costs_of(config).communicators
        return self.machine.gpu.allocatable_bytes(communicators, self.headroom_bytes)

    def __call__(self, config: Configuration, budget: Budget | None = None) -> Prediction:
        """Predict the configuration; a search ends with the budget."""
        try:
            return (
                self.planned(config, budget)
                if config.schedule == ADAPTIVE
                else self.published(config)
            )
        except SweepError as error:
            return Prediction(config, Verdict.NO_PLAN, 0.0, reason=str(error))
        except ScheduleError as error:
            raise SweepError(f"{config}: {error}") from None

    def published(
        self,
        config: Configuration,
        layers: Sequence[int] | None = None,
        is_stock: bool = False,
        always: bool = False,
    ) -> Prediction:
        """Predict the configuration's published schedule, or that of its schedule file.

        Args:
            config: the configuration.
            layers: layers of every stage, if not those of the configuration's layout.
            is_stock: as stock Megatron runs it.
            always: predict its times too if it does not fit.

        Raises:
            ScheduleError: the schedule does not exist, or does not support these sizes.
        """
        schedule = published_schedule(
            config.schedule, config.pipeline_parallel, config.num_microbatches
        )
        costs = self.costs(config, schedule.placement, layers)
        if is_stock:
            costs = under_megatron(costs, self.counts.costs_of(config).message_bytes)
        return self.evaluated(config, schedule, costs, always=always, is_stock=is_stock)

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
        bounds = [
            (self.least_s(config) if config.schedule == ADAPTIVE else 0.0, config)
            for config in configurations
        ]
        for bound_s, config in sorted(bounds, key=lambda bound: bound[0]):
            fastest = best.get(config.workload, math.inf)
            if config.schedule == ADAPTIVE and budget is not None and budget.stopped():
                yield Prediction(config, Verdict.NOT_PLANNED, 0.0, reason=TIME_LIMIT)
                continue
            if bound_s > fastest * (1 + margin) and not config.arguments:
                slower = f"even without a bubble {100 * (bound_s / fastest - 1):.0f} % slower"
                reason = f"{slower} than the best"
                yield Prediction(config, Verdict.NOT_PLANNED, 0.0, reason=reason)
                continue
            prediction = self(config, budget)
            best[config.workload] = min(fastest, step_seconds(prediction))
            yield prediction

    def least_s(self, config: Configuration) -> float:
        """Return the step time without idle time of the busiest device, on the best placement."""
        min_us = math.inf
        try:
            for placement in _placements(config):
                costs = self.costs(config, placement)
                busy_us = costs.busy_us(
                    placement, config.pipeline_parallel, config.num_microbatches
                )
                min_us = min(
                    min_us, busy_us + self.counts.costs_of(config).after_us(costs, placement)
                )
        except SweepError:  # reported by its prediction
            return 0.0
        return min_us * 1e-6

    def pieces(self, config: Configuration) -> Pieces:
        """Return the counted costs of a layer, the embedding and the output layer."""
        return config.adapted(self.counts.costs_of(config).pieces, self.subject)

    def costs(
        self, config: Configuration, placement: Placement, layers: Sequence[int] | None = None
    ) -> Costs:
        """Return the costs of stages with these layers, or with those of the layout."""
        pieces = self.pieces(config)
        layers = layers or layers_of_stages(config, self.subject, placement)
        # With vocabulary parallelism, embedding and output layer are sharded over all ranks.
        if pieces.of_device.amounts:
            return pieces.costs(tuple(layers))
        costs = self.with_embeddings(pieces, placement).costs(tuple(layers))
        return self.machine.copied(costs) if config.schedule == ADAPTIVE else costs

    def with_embeddings(self, pieces: Pieces, placement: Placement) -> Pieces:
        """Add the copy of the embedding to the last stage, if the model and placement have one."""
        # In a V, the device of the last stage has the embedding anyway.
        if placement[0] == placement[-1] or not self.subject.copies_embedding:
            return pieces
        state_bytes = pieces.last[STATE_BYTES] + pieces.first[STATE_BYTES]
        return replace(pieces, last=pieces.last.changed({STATE_BYTES: state_bytes}))

    def evaluated(
        self,
        config: Configuration,
        schedule: Schedule,
        costs: Costs,
        timeline: Timeline | None = None,
        always: bool = False,
        is_stock: bool = False,
    ) -> Prediction:
        """Predict the peaks of a schedule (`peak_held`) and the time of its step.

        The step is the makespan of `simulate` (with post-validation, the span) plus gradient
        reduction and optimizer (`after_us`). A schedule that does not fit has times only with
        `always`. `timeline` is given if planning has simulated it already.
        """
        schedule = with_vocabulary_passes(schedule, costs)
        gpu, communicators = self.machine.gpu, self.counts.costs_of(config).communicators
        outside = gpu.outside_bytes(communicators)
        fixed = costs.fixed_bytes(schedule.placement, schedule.num_devices)
        update_share = self.counts.costs_of(config).update_share
        ranks = tuple(
            RankPeak(
                fixed_bytes - costs.device_bytes,
                # The peak is in the passes or, with few activations, in the optimizer's step.
                max(peak_bytes - fixed_bytes, update_share * (fixed_bytes - costs.device_bytes)),
                costs.device_bytes,
                outside,
            )
            for fixed_bytes, peak_bytes in zip(fixed, peak_held(schedule, costs), strict=True)
        )
        rank_peaks = list(map(sum, ranks))
        peak = max(rank_peaks)
        fit = gpu.fit_of(peak - outside, communicators, self.headroom_bytes)
        prediction = Prediction(
            config,
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
            gib = f"{peak / GIB:.1f} of {limit / GIB:.1f} GiB on device {rank_peaks.index(peak)}"
            prediction = replace(prediction, verdict=Verdict.OUT_OF_MEMORY, reason=f"needs {gib}")
            if not always:
                return prediction
        timeline = timeline or simulate(schedule, costs)
        after_us = self.counts.costs_of(config).after_us(costs, schedule.placement)
        passes_us, bubble = timeline.makespan, timeline.bubble
        if self.post_validation and not is_stock:  # no barrier between steps
            passes_us, bubble = timeline.span, timeline.span_bubble
        step_s = 1e-6 * (passes_us + after_us)
        return replace(prediction, step_s=step_s, mfu=self.mfu(config, step_s), bubble=bubble)

    def mfu(self, config: Configuration, step_s: float) -> float:
        """Return the fraction of the devices' peak FLOPS that a step with this time achieves."""
        flops = self.subject.flops(config.sequence_length, config.global_batch_size)
        if self.subject.command.has("--multi-latent-attention"):  # not described by its widths
            counted = self.counts.costs_of(config)
            ranks = config.num_devices / config.pipeline_parallel
            microbatch = self.subject.layers * counted.layer_flops + counted.ends_flops
            flops = 3 * microbatch * config.num_microbatches * ranks
        return flops / (step_s * self.machine.gpu.bf16_flops * config.num_devices)

    def planned(self, config: Configuration, budget: Budget | None = None) -> Prediction:
        """Predict the best plan over all placements, with the layers of the configuration's layout.

        The memory left by the parameters depends on the placement: in a V, the embedding and the
        output layer are on one device, in a loop on two.

        Raises:
            SweepError: no plan fits on any placement.
        """
        predictions, reasons = [], []
        limits = [self.allocatable_bytes(config)] * config.pipeline_parallel
        objective = Objective.SPAN if self.post_validation else Objective.MAKESPAN
        moved_limit_bytes = self.machine.moved_limit_bytes
        for placement in _placements(config):
            costs = self.costs(config, placement)
            try:
                timeline = plan_adaptive(
                    config, placement, costs, limits, objective, moved_limit_bytes, budget
                )
                predictions.append(self.evaluated(config, timeline.schedule, costs, timeline))
            except SweepError as error:
                reasons.append(str(error))
        if not predictions:
            raise SweepError(reasons[0])
        return min(predictions, key=step_seconds)

    def planned_with_layers(
        self, config: Configuration, pieces: Pieces, seconds: float
    ) -> Prediction | None:
        """Predict the best plan over all placements, with layers balanced for each of them.

        Args:
            config: the configuration; its layout and schedule are ignored.
            pieces: costs of a layer, the embedding and the output layer.
            seconds: search time.

        Returns:
            The prediction, or None if no plan fits.
        """
        ranks, num_layers = config.pipeline_parallel, self.subject.layers
        request = PlanRequest(
            AUTO,
            ranks,
            config.num_microbatches,
            limit=self.allocatable_bytes(config),
            layers=(pieces, num_layers),
            costs=pieces.costs(even_layers(2 * ranks, looping(ranks, 2))),
            chunks=tuple(n for n in (1, 2, 3) if n * ranks <= num_layers + 2),
            seconds=seconds,
        )
        try:
            result = plan_request(request, Budget(_PATIENCE * seconds))
        except ScheduleError:
            return None
        name = ADAPTIVE if result.plan.baseline is None else str(result.plan.baseline)
        if result.plan.is_megatrons:
            stock = self.published(
                replace(config, schedule=name), result.costs.layers, is_stock=True
            )
            if stock.fits:
                return stock
            name = ADAPTIVE  # from a file, this package runs these passes with less memory
        # The search does not include the copy of the embedding on the last stage.
        pieces = self.with_embeddings(pieces, result.schedule.placement)
        costs = pieces.costs(result.costs.layers or ())
        prediction = self.evaluated(replace(config, schedule=name), result.schedule, costs)
        return prediction if prediction.fits else None


def _placements(config: Configuration) -> Sequence[Placement]:
    devices = config.pipeline_parallel
    return default_placements(devices, count_stages(ADAPTIVE, devices))


def plan_adaptive(
    config: Configuration,
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
    fixed = max(costs.fixed_bytes(placement, config.pipeline_parallel))
    if fixed >= min(limits_bytes):
        over = (fixed - min(limits_bytes)) / GIB
        raise SweepError(f"parameters and their states alone are {over:.1f} GiB too much")
    request = PlanRequest(
        AUTO,
        config.pipeline_parallel,
        config.num_microbatches,
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
            error.format_message(
                lambda num_bytes: f"{format_sufficient_limit(num_bytes / GIB)} GiB"
            )
        ) from None
    except ScheduleError as error:
        raise SweepError(str(error).splitlines()[0]) from None
    return simulate(schedule, costs)
