"""The prediction of one combination: memory of every device and time of a step."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from megatron_vshape.core.ask import AUTO, Question, ask, best_order
from megatron_vshape.core.check.bounds import LimitError
from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import Placement, default_placements, stages_of
from megatron_vshape.core.model.schedule import Objective, Schedule, Timeline
from megatron_vshape.core.planner.vocabulary import shared_costs, shared_if_told
from megatron_vshape.sweep.files import Model, Recompute, SweepError
from megatron_vshape.sweep.grid import ADAPTIVE, Combination, count_stages, layers_of_stages
from megatron_vshape.sweep.layer import Layers, Part, model_flops
from megatron_vshape.sweep.machine import Machine
from megatron_vshape.sweep.measured_costs import MeasuredCosts, key_of_shapes
from megatron_vshape.view.numbers import GIB, enough

LEAST_US = 1.0
"""A stage without layers still starts a kernel."""


class Verdict(StrEnum):
    """What the prediction says of a combination."""

    RUNS = "runs"
    OUT_OF_MEMORY = "OOM"
    NO_PLAN = "no plan"
    NOT_PLANNED = "not planned"


class RankPeak(NamedTuple):
    """What a pipeline rank needs at its peak, in bytes."""

    states: float  # parameters, gradients, and the optimizer's
    activations: float  # at their peak, with what fragments of memory take
    rest: float  # the context, messages and working buffers

    @property
    def total(self) -> float:
        """Return all of it."""
        return sum(self)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a combination is predicted to take; times are None where it does not fit."""

    combination: Combination
    verdict: Verdict
    peak_bytes: float  # of the device that needs most
    step_s: float | None = None
    mfu: float | None = None  # fraction of the devices' peak
    bubble: float | None = None  # fraction of the pipeline's time in which the busiest device idles
    reason: str = ""
    planned: Schedule | None = field(default=None, compare=False, repr=False)  # by `adaptive`
    ranks: tuple[RankPeak, ...] = field(default=(), compare=False, repr=False)

    @property
    def fits(self) -> bool:
        """Return whether the combination is predicted to run."""
        return self.verdict is Verdict.RUNS


@dataclass(frozen=True, slots=True)
class Predictor:
    """Predicts combinations of one model on one machine."""

    model: Model
    machine: Machine
    post_validation: bool = False
    measured: MeasuredCosts | None = None
    headroom_bytes: float = 0.0  # of every device, kept free

    @property
    def limit_bytes(self) -> float:
        """Return the memory of a device, without what is kept free."""
        return self.machine.cluster.device.memory_gib * GIB - self.headroom_bytes

    def __call__(self, combination: Combination) -> Prediction:
        """Return what the combination takes."""
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

    def survey(self, combinations: Iterable[Combination], margin: float) -> Iterator[Prediction]:
        """Yield every combination's prediction, those that need planning last.

        Planning takes seconds, so an adaptive combination is only planned if it could come
        within `margin` of the best of its workload, were it free of bubbles, or has arguments of
        its own; the most promising come first, for they leave the fewest to plan.
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

    def _least_s(self, combination: Combination) -> float:
        """Return the step's time on the best placement if the busiest device never idled."""
        it, least = combination, math.inf
        for stages in self._on_placements(it):
            sizes = it.pipeline_parallel, it.num_microbatches
            busy = stages.costs.busy_us(stages.placement, *sizes)
            least = min(least, self.machine.assume.pace * busy + stages.after_us())
        return least * 1e-6

    def _on_placements(self, it: Combination) -> "list[_Stages]":
        """Return the stages on each placement that is planned for, each by itself.

        What the parameters leave of a device's memory differs: in a V the embedding and the head
        lie on one device, in a loop on two.
        """
        devices = it.pipeline_parallel
        placements = default_placements(devices, count_stages(ADAPTIVE, devices))
        return [_Stages.of(it, self, placement) for placement in placements]

    def _unplanned(self, combination: Combination, verdict: Verdict, reason: str) -> Prediction:
        return Prediction(combination, verdict, 0.0, reason=reason)

    def _predict(
        self, stages: "_Stages", schedule: Schedule, planned: Timeline | None
    ) -> Prediction:
        """Return the prediction of a schedule, whose planning may have simulated it already."""
        combination = stages.combination
        limit = self.limit_bytes
        schedule = shared_if_told(schedule, stages.costs)
        held = peak_held(schedule, stages.costs)
        rest, fragments = stages.rest_bytes(), 1 + self.machine.assume.fragmentation
        ranks = tuple(
            RankPeak(states, fragments * dynamic, rest)
            for states, dynamic in zip(stages.states_bytes(), held, strict=True)
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

    def mfu(self, combination: Combination, step_s: float) -> float:
        """Return the fraction of the devices' peak that a step of so long a time makes use of."""
        it = combination
        flops = model_flops(self.model, it.sequence_length, it.global_batch_size)
        return flops / (step_s * 1e6 * self.machine.peak_flops_per_us * it.num_devices)

    def _planned(self, it: Combination) -> tuple["_Stages", Timeline]:
        """Return the best adaptive order of any placement; raises SweepError where none fits."""
        reserve = 1 + self.machine.assume.fragmentation
        found, reasons = [], []
        objective = Objective.SPAN if self.post_validation else Objective.MAKESPAN
        for stages in self._on_placements(it):
            spare = [(self.limit_bytes - fixed) / reserve for fixed in stages.fixed_bytes()]
            try:
                asked = stages.placement, stages.costs, spare, objective
                timeline = plan_adaptive(it, *asked, self.machine.in_host_bytes)
                found.append((stages, timeline))
            except SweepError as error:
                reasons.append(str(error))
        if not found:
            raise SweepError(reasons[0])
        return min(found, key=lambda each: self._step_us(*each))

    def _step_us(self, stages: "_Stages", timeline: Timeline) -> float:
        return self.machine.assume.pace * self._pipeline_us(timeline) + stages.after_us()

    def _pipeline_us(self, timeline: Timeline) -> float:
        """Return the time of the passes; without barrier between steps, that of one device.

        Devices that share too few processors take at least their work divided by those.
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
    combination: Combination,
    placement: Placement,
    costs: Costs,
    limits_bytes: Sequence[float],
    objective: Objective,
    in_host_bytes: float = math.inf,
) -> Timeline:
    """Return the best order found on a placement with at most `limits_bytes` on each device.

    Of each at most `in_host_bytes` wait in host memory, where the costs have copies.

    Raises:
        SweepError: nothing fits.
    """
    least = min(limits_bytes)
    if least <= 0:
        raise SweepError(f"parameters and their states alone are {-least / GIB:.1f} GiB too much")
    question = Question(
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
        schedule = best_order(question).schedule
    except LimitError as error:
        raise SweepError(error.told(lambda held: f"{enough(held / GIB)} GiB")) from None
    except ScheduleError as error:
        raise SweepError(str(error).splitlines()[0]) from None
    return simulate(schedule, costs)


@lru_cache(maxsize=64)
def _made(name: str, num_devices: int, num_microbatches: int) -> Schedule:
    return ask(Question(name, num_devices, num_microbatches)).schedule


@dataclass(frozen=True, slots=True)
class _Stages:
    """A combination's stages: their costs, and what their devices hold all the time."""

    combination: Combination
    layers: Layers
    parts: tuple[Part, ...]
    placement: Placement
    costs: Costs
    everywhere: float = 0.0  # parameters, on every device, of a vocabulary that all share

    @classmethod
    def of(cls, it: Combination, predictor: Predictor, placement: Placement) -> "_Stages":
        # Recomputation runs the backward whole: a split one would keep what it recomputed.
        split = _splits(it.schedule) and it.recompute is Recompute.NONE
        layers = Layers(predictor.model, it, predictor.machine, split)
        first, layer, last = layers.first(), layers.layer_kernels(), layers.last_kernels()
        message_us = layers.message_us()
        found = (predictor.measured or {}).get(key_of_shapes(it))
        if found:
            first, layer = first.measured(found.first), layer.measured(found.layer)
            last, message_us = last.measured(found.last), found.send_us
        layer, last = layers.layer(layer), layers.last(last)
        counts = layers_of_stages(it, predictor.model, placement)
        parts = [layer.times(count) for count in counts]
        if it.vocab_parallel:
            parts[-1] = parts[-1].plus(layers.predicting(last.times(0), layer))
        else:
            parts[0] = parts[0].plus(first)
            parts[-1] = parts[-1].plus(layers.predicting(last, layer))
            if predictor.model.mtp_layers and placement[0] != placement[-1]:  # its own embedding
                more = parts[-1].parameters + first.parameters
                parts[-1] = replace(parts[-1], parameters=more)
        costs = Costs.of([part.at_least(LEAST_US) for part in parts], message_us)
        if not it.vocab_parallel:
            costs = predictor.machine.copied(costs) if it.schedule == ADAPTIVE else costs
            return cls(it, layers, tuple(parts), placement, costs)
        devices, times = it.pipeline_parallel, 1 + predictor.model.mtp_layers
        # A sum of hidden states goes once over every link, as a message does over one.
        costs = shared_costs(
            costs,
            first.times(times),
            last.times(times),
            devices,
            message_us * times,
            layers.own_logits_bytes() * times,
        )
        each = (first.parameters + last.parameters) / devices
        return cls(it, layers, tuple(parts), placement, costs, each)

    def fixed_bytes(self) -> list[float]:
        """Return what each device holds beside activations."""
        rest = self.rest_bytes()
        return [rest + states for states in self.states_bytes()]

    def rest_bytes(self) -> float:
        """Return what each device holds beside activations, parameters and their states."""
        it, assume = self.combination, self.layers.machine.assume
        streams = 2 * len(self.parts) // it.pipeline_parallel
        messages = streams * (assume.receive_window + 1) * self.layers.message_bytes()
        return assume.context_gib * GIB + messages + self.layers.working_bytes()

    def states_bytes(self) -> list[float]:
        """Return what each device holds of parameters, gradients and the optimizer's states."""
        model, it, assume = self.layers.model, self.combination, self.layers.machine.assume
        state = assume.parameter_state_bytes / (it.data_parallel * it.context_parallel)
        each = model.parameter_bytes + model.gradient_bytes + state
        return [parameters * each for parameters in self._parameters()]

    def after_us(self) -> float:
        """Return the time after the passes: gradient reduction, optimizer, parameter gathering."""
        it, model, machine = self.combination, self.layers.model, self.layers.machine
        parameters = max(self._parameters())
        replicas = it.data_parallel * it.context_parallel
        reduce_us = machine.collective_us(
            model.gradient_bytes * parameters, replicas, it.tensor_parallel
        )
        gather_us = machine.collective_us(
            model.parameter_bytes * parameters, replicas, it.tensor_parallel
        )
        # Gradients are cleared and their norm is read; Adam reads four numbers and writes three.
        touched = 2 * model.gradient_bytes * parameters
        touched += (model.gradient_bytes + 24 + model.parameter_bytes) * parameters / replicas
        return reduce_us + gather_us + touched / machine.memory_bytes_per_us

    def _parameters(self) -> list[float]:
        """Return how many parameters each device holds."""
        rows = stages_of(self.placement, self.combination.pipeline_parallel)
        return [
            self.everywhere + sum(self.parts[stage].parameters for stage in row) for row in rows
        ]


@lru_cache(maxsize=64)
def _splits(name: str) -> bool:
    return name == ADAPTIVE or _made(name, 2, 2).splits_backward
