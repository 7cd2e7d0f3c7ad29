"""Predict a combination: memory of every device and step time."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from megatron_vshape.core.check.bounds import LimitError
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import Pieces
from megatron_vshape.core.model.placement import Placement, default_placements
from megatron_vshape.core.model.schedule import Objective, Schedule, Timeline
from megatron_vshape.core.plan import plan
from megatron_vshape.core.planner.vocabulary import shared_if_told, shared_pieces
from megatron_vshape.core.request import AUTO, PlanRequest
from megatron_vshape.rehearsal.shapes import Counted
from megatron_vshape.sweep.configurations import (
    ADAPTIVE,
    GIVEN,
    NONE,
    Configuration,
    Subject,
    SweepError,
    count_stages,
    layers_of_stages,
)
from megatron_vshape.sweep.machine import Machine
from megatron_vshape.sweep.measured_costs import MeasuredCosts, key_of_shapes
from megatron_vshape.view.numbers import GIB, enough


class Verdict(StrEnum):
    """Result of a prediction."""

    RUNS = "runs"
    OUT_OF_MEMORY = "OOM"
    NO_PLAN = "no plan"
    NOT_PLANNED = "not planned"


class RankPeak(NamedTuple):
    """Peak memory of a pipeline rank, in bytes."""

    states: float  # parameters, gradients, optimizer state
    activations: float  # at their peak, with workspace
    rest: float  # CUDA context, messages and workspaces

    @property
    def total(self) -> float:
        """Total of all parts."""
        return sum(self)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted memory and time of a combination; times are None if it does not fit."""

    combination: Configuration
    verdict: Verdict
    peak_bytes: float  # of the device with the highest peak
    step_s: float | None = None
    mfu: float | None = None  # fraction of the devices' peak
    bubble: float | None = None  # fraction of the pipeline's time in which the busiest device idles
    reason: str = ""
    planned: Schedule | None = field(default=None, compare=False, repr=False)  # by `adaptive`
    ranks: tuple[RankPeak, ...] = field(default=(), compare=False, repr=False)

    @property
    def fits(self) -> bool:
        """Whether the combination is predicted to run."""
        return self.verdict is Verdict.RUNS


@dataclass(frozen=True, slots=True)
class Predictor:
    """Predict combinations of one model on one machine from counted costs."""

    subject: Subject
    machine: Machine
    counts: Callable[[Configuration], Counted]
    post_validation: bool = False
    measured: MeasuredCosts | None = None
    headroom_bytes: float = 0.0  # kept free on every device

    @property
    def limit_bytes(self) -> float:
        """Memory of a device minus the headroom."""
        return self.machine.cluster.device.memory_gib * GIB - self.headroom_bytes

    def __call__(self, combination: Configuration) -> Prediction:
        """Predict the combination."""
        it, planned = combination, None
        try:
            if it.schedule == ADAPTIVE:
                stages, planned = self._planned(it)
                schedule = planned.schedule
            else:
                schedule = _made(it.schedule, it.pipeline_parallel, it.num_microbatches)
                stages = _Stages.of(it, self, schedule.placement)
        except SweepError as error:
            return self._unplanned(it, Verdict.NO_PLAN, str(error))
        try:
            return self._predict(stages, schedule, planned)
        except ScheduleError as error:
            raise SweepError(f"{it}: {error}") from None

    def survey(self, combinations: Iterable[Configuration], margin: float) -> Iterator[Prediction]:
        """Yield every combination's prediction; combinations that need planning come last.

        Planning needs seconds. So an adaptive combination is planned only if it could come within
        `margin` of the best of its workload without any bubble, or if it has additional arguments.
        The most promising come first, because they exclude most others.
        """
        best: dict[tuple[int, int], float] = {}
        least_s = [
            (self._least_s(it) if it.schedule == ADAPTIVE else 0.0, it) for it in combinations
        ]
        for least, it in sorted(least_s, key=lambda each: each[0]):
            fastest = best.get(it.workload, math.inf)
            if least > fastest * (1 + margin) and not it.arguments:
                slower = f"even without a bubble {100 * (least / fastest - 1):.0f} % slower"
                yield self._unplanned(it, Verdict.NOT_PLANNED, f"{slower} than the best")
                continue
            found = self(it)
            best[it.workload] = min(fastest, found.step_s or math.inf)
            yield found

    def _least_s(self, combination: Configuration) -> float:
        """Return the step time on the best placement without idle time of the busiest device."""
        it, least = combination, math.inf
        try:
            every = self._on_placements(it)
        except SweepError:  # reported by its prediction
            return 0.0
        for stages in every:
            sizes = it.pipeline_parallel, it.num_microbatches
            busy = stages.costs.busy_us(stages.placement, *sizes)
            least = min(least, busy + stages.after_us)
        return least * 1e-6

    def _on_placements(self, it: Configuration) -> "list[_Stages]":
        """Return the stages for each placement to plan for, one by one.

        The memory left by the parameters depends on the placement: in a V, the embedding and the
        output layer are on one device, in a loop on two.
        """
        devices = it.pipeline_parallel
        placements = default_placements(devices, count_stages(ADAPTIVE, devices))
        return [_Stages.of(it, self, placement) for placement in placements]

    def _unplanned(self, combination: Configuration, verdict: Verdict, reason: str) -> Prediction:
        return Prediction(combination, verdict, 0.0, reason=reason)

    def _predict(
        self, stages: "_Stages", schedule: Schedule, planned: Timeline | None
    ) -> Prediction:
        """Predict a schedule; planning may have simulated it already."""
        combination = stages.combination
        limit = self.limit_bytes
        schedule = shared_if_told(schedule, stages.costs)
        costs, beside = stages.costs, self.machine.beside_gib * GIB
        fixed = costs.fixed_bytes(schedule.placement, schedule.num_devices)
        ranks = tuple(
            RankPeak(own - costs.device_bytes, held - own, beside + costs.device_bytes)
            for own, held in zip(fixed, peak_held(schedule, costs), strict=True)
        )
        needed = [each.total for each in ranks]
        peak = max(needed)
        found = Prediction(combination, Verdict.RUNS, peak, ranks=ranks)
        if peak > limit:
            gib = f"{peak / GIB:.1f} of {limit / GIB:.1f} GiB on device {needed.index(peak)}"
            return replace(found, verdict=Verdict.OUT_OF_MEMORY, reason=f"needs {gib}")
        timeline = planned or simulate(schedule, stages.costs)
        step_s = self._step_us(stages, timeline) * 1e-6
        return replace(
            found,
            step_s=step_s,
            mfu=self.mfu(combination, step_s),
            bubble=timeline.span_bubble if self.post_validation else timeline.bubble,
            planned=schedule if planned else None,
        )

    def mfu(self, combination: Configuration, step_s: float) -> float:
        """Return the fraction of the devices' peak FLOPS that a step with this time achieves."""
        it = combination
        flops = self.subject.flops(it.sequence_length, it.global_batch_size)
        return flops / (step_s * self.machine.gpu.bf16_flops * it.num_devices)

    def _planned(self, it: Configuration) -> tuple["_Stages", Timeline]:
        """Return the best adaptive schedule over all placements; raises SweepError if none fits."""
        found, reasons = [], []
        spare = self.limit_bytes - self.machine.beside_gib * GIB
        objective = Objective.SPAN if self.post_validation else Objective.MAKESPAN
        for stages in self._on_placements(it):
            try:
                asked = stages.placement, stages.costs, [spare] * it.pipeline_parallel, objective
                timeline = plan_adaptive(it, *asked, self.machine.in_host_bytes)
                found.append((stages, timeline))
            except SweepError as error:
                reasons.append(str(error))
        if not found:
            raise SweepError(reasons[0])
        return min(found, key=lambda each: self._step_us(*each))

    def _step_us(self, stages: "_Stages", timeline: Timeline) -> float:
        return self._pipeline_us(timeline) + stages.after_us

    def _pipeline_us(self, timeline: Timeline) -> float:
        """Return the time of the passes; without a barrier between steps, the maximum per device.

        With processors shared among devices, this is at least the work divided by the processors.
        """
        passes = timeline.span if self.post_validation else timeline.makespan
        shared = self.machine.cluster.shared_processors
        if shared is None:
            return passes
        rows = zip(timeline.starts, timeline.ends, strict=True)
        work = sum(sum(ends) - sum(starts) for starts, ends in rows)
        replicas = self.machine.cluster.num_devices / timeline.schedule.num_devices
        return max(passes, work * replicas / shared)


def plan_adaptive(
    combination: Configuration,
    placement: Placement,
    costs: Costs,
    limits_bytes: Sequence[float],
    objective: Objective,
    in_host_bytes: float = math.inf,
) -> Timeline:
    """Plan for a placement with at most `limits_bytes` on each device.

    At most `in_host_bytes` of each device are offloaded, if the costs have offloading.

    Raises:
        SweepError: the limits are infeasible.
    """
    fixed = max(costs.fixed_bytes(placement, combination.pipeline_parallel))
    if fixed >= min(limits_bytes):
        over = (fixed - min(limits_bytes)) / GIB
        raise SweepError(f"parameters and their states alone are {over:.1f} GiB too much")
    question = PlanRequest(
        AUTO,
        combination.pipeline_parallel,
        combination.num_microbatches,
        costs,
        limit=limits_bytes,
        in_host=in_host_bytes,
        objective=objective,
        placements=(placement,),
    )
    try:
        schedule = plan(question).schedule
    except LimitError as error:
        raise SweepError(error.told(lambda held: f"{enough(held / GIB)} GiB")) from None
    except ScheduleError as error:
        raise SweepError(str(error).splitlines()[0]) from None
    return simulate(schedule, costs)


@lru_cache(maxsize=64)
def _made(name: str, num_devices: int, num_microbatches: int) -> Schedule:
    return plan(PlanRequest(name, num_devices, num_microbatches)).schedule


@dataclass(frozen=True, slots=True)
class _Stages:
    """Stages of a combination: their costs, including permanent memory."""

    combination: Configuration
    placement: Placement
    costs: Costs
    after_us: float  # time after the passes

    @classmethod
    def of(cls, it: Configuration, predictor: Predictor, placement: Placement) -> "_Stages":
        subject, found = predictor.subject, predictor.counts(it)
        pieces = found.pieces
        measured = (predictor.measured or {}).get(key_of_shapes(it))
        if measured is not None and it.recompute in (NONE, GIVEN):
            pieces = _measured(pieces, measured)
        further, layers = subject.mtp_layers, layers_of_stages(it, subject, placement)
        if it.vocab_parallel:
            rows = subject.vocabulary / (it.tensor_parallel * it.pipeline_parallel)
            tokens = it.sequence_length // it.context_parallel * it.microbatch_size
            hidden = tokens * subject.widths(1).hidden / it.tensor_parallel
            held = subject.dtype_bytes * (tokens * rows + hidden) * (1 + further)
            # An all-reduce of hidden states crosses each link once, like a message.
            pieces = shared_pieces(pieces, it.pipeline_parallel, pieces.send_us, held, further)
            sizes = subject.sizes(it.sequence_length)
            pieces = pieces.predicting(further, sizes.merging_in_layers, sizes.predicted)
        elif placement[0] != placement[-1] and subject.copies_embedding:
            # The last stage has a copy of the embedding; in a V, the first device has it anyway.
            more = pieces.last.state_bytes + pieces.first.state_bytes
            pieces = replace(pieces, last=replace(pieces.last, state_bytes=more))
        costs = pieces.costs(layers)
        if it.schedule == ADAPTIVE and not it.vocab_parallel:
            costs = predictor.machine.copied(costs)
        return cls(it, placement, costs, found.after_us(costs, placement))


def _measured(counted: Pieces, measured: Pieces) -> Pieces:
    """Replace times and bytes of counted pieces by measured ones; state and workspace stay.

    A measurement on one device has no collectives, so the counted ones are used.
    """
    made = {}
    for name in ("first", "layer", "last"):
        mine, theirs = getattr(counted, name), getattr(measured, name)
        kept = {"state_bytes": mine.state_bytes}
        for each in ("forward", "backward"):
            kept[f"{each}_exchange_us"] = getattr(theirs, f"{each}_exchange_us") or getattr(
                mine, f"{each}_exchange_us"
            )
        for each in ("forward", "backward", "weight", "whole"):
            kept[f"{each}_work_bytes"] = getattr(mine, f"{each}_work_bytes")
        made[name] = replace(theirs, **kept)
    return replace(measured, **made, device_bytes=counted.device_bytes)
