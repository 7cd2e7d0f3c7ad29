"""Profile training steps, plan again from the measured costs, and measure the bubble.

The plan depends on costs from a few measured steps, and other programs may have disturbed these
steps. A schedule does not change the result of a step, so the run then tries both the plan and the
best named schedule (`Trial`).
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import torch
import torch.distributed as dist

from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.model.amounts import GIB
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.files import MEASURED
from megatron_vshape.core.model.schedule import Schedule, Slot, Timeline
from megatron_vshape.core.model.stage_costs import StageCosts, stages_of_parts
from megatron_vshape.core.program.instructions import Program
from megatron_vshape.mcore.layout.stage_map import better_split
from megatron_vshape.mcore.observe.report import (
    Checked,
    PredictedStep,
    RunReport,
    max_of_replicas,
    shares_processors,
    with_allocated,
)
from megatron_vshape.mcore.refusals import refusing
from megatron_vshape.mcore.setup.plans import PlannedStep, Planner
from megatron_vshape.mcore.setup.run_config import RunConfig
from megatron_vshape.runtime.hosts import gather_objects
from megatron_vshape.runtime.measure import (
    PassTimer,
    clocks_ahead_us,
    gather_slots,
    measure_send_us,
    measured_costs,
    merge,
    undisturbed,
)
from megatron_vshape.runtime.offload import with_copies
from megatron_vshape.runtime.p2p import Transport

TURN = 2
"""Consecutive steps per schedule. The number is small so that a disturbance affects both
schedules."""

TURNS = 6
"""Turns of each schedule."""

PLAN, NAMED = range(2)

RUNS = tuple(
    schedule
    for turn in range(TURNS)
    for schedule in ((PLAN, NAMED) if turn % 2 == 0 else (NAMED, PLAN))
    for _ in range(TURN)
)
"""Schedule of every step of a trial; the order alternates because machines drift."""


def typical(values: Iterable[float]) -> float:
    """Return the median of the lower half, because disturbances only make a step longer.

    The first step of a schedule is also longer, because it allocates memory.
    """
    sorted_values = sorted(values)
    return median(sorted_values[: (len(sorted_values) + 1) // 2])


class Trial:
    """Alternates two schedules for some steps; all ranks call it for the same steps.

    The times of rank 0 decide for all ranks.
    """

    def __init__(self, planner: Planner, plan: PlannedStep, named_plan: PlannedStep) -> None:
        """Start with the plan in the next step."""
        self._planner = planner
        self._schedules = plan, named_plan
        self._times_s: tuple[list[float], list[float]] = [], []
        self._steps = 0
        planner.use(plan)

    def end_step(self, previous_s: float | None, num_microbatches: int) -> int | None:
        """Count a step and choose the schedule of the next one.

        `previous_s` is the duration of the previous step, None if unknown. Returns PLAN or NAMED at
        the end of the trial, and None before. A step with another number of microbatches ends the
        trial in favor of the plan.
        """
        if num_microbatches != self._schedules[PLAN].schedule.num_microbatches:
            return self._keep(PLAN)
        previous_step = self._steps - 1
        if previous_s is not None and previous_step >= 0:
            self._times_s[RUNS[previous_step]].append(previous_s)
        self._steps += 1
        if self._steps < len(RUNS):
            self._planner.use(self._schedules[RUNS[self._steps]])
            return None
        rank_zero = self._planner.rank_zero
        return self._keep(self._faster() if rank_zero is None else rank_zero(self._faster))

    def _faster(self) -> int:
        """Compare the measured steps; the plan wins if evaluations left nothing to compare."""
        if not all(self._times_s):
            return PLAN
        times_s = [typical(times) for times in self._times_s]
        faster = NAMED if times_s[NAMED] < times_s[PLAN] else PLAN
        names = [plan.schedule.name for plan in self._schedules]
        steps = (f"{name} {1e3 * time:.2f} ms" for name, time in zip(names, times_s, strict=True))
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.warning("measured steps: %s; keeping %s", ", ".join(steps), names[faster])
        return faster

    def _keep(self, winner: int) -> int:
        self._planner.use(self._schedules[winner])
        return winner


logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Profiler:
    """Observes the training steps of this process and plans again after the last profiled step.

    All ranks of the world call it for the same steps. Each computes the same costs, and one rank
    plans for all. One step later, an equal number of steps is timed to check the prediction, which
    does not use these times. With schedule auto, a trial then compares the plan with the best named
    schedule, and the run keeps the faster one.
    """

    pipeline: RunConfig
    planner: Planner
    report: RunReport
    _steps: int = 0
    _profiled: tuple[int, int] = field(init=False)
    _checked: tuple[int, int] = field(init=False)
    _rest_us: float = 0.0
    _trial: Trial | None = None  # set while the plan and a named schedule alternate
    _named: PlannedStep | None = None  # the best named schedule, in a trial
    _is_tried: bool = False
    _rows: list[tuple[Program, list[Slot]]] = field(default_factory=list)
    _prediction: PredictedStep | None = None
    _costs: Costs | None = None

    def __post_init__(self) -> None:
        options = self.pipeline.options
        self._profiled = options.profile_steps or (0, -1)
        self._checked = options.checked_steps

    @property
    def profiles_next(self) -> bool:
        """Return whether the passes of the next training step are timed."""
        return self._times(self._steps + 1)

    @property
    def order_is_last(self) -> bool:
        """Whether the schedule is final: neither a measurement nor a trial changes it."""
        options = self.pipeline.options
        if not (self.pipeline.choice.plans_by_costs and options.profile_steps):
            return True
        if self.pipeline.has_trial:
            # The two schedules of a trial alternate until it ends.
            return self._is_tried and self._trial is None
        return self._steps > self._checked[1]

    def begin_step(self, torch_device: torch.device) -> PassTimer | None:
        """Count a training step; return a timer if the step is profiled."""
        self._steps += 1
        return PassTimer(torch_device) if self._times(self._steps) else None

    def _times(self, step: int) -> bool:
        return any(first <= step <= last for first, last in (self._profiled, self._checked))

    def end_step(
        self,
        timer: PassTimer | None,
        program: Program,
        transport: Transport,
        group: dist.ProcessGroup,
    ) -> None:
        """Store the times of a step; after the last one, compute costs or check the prediction."""
        self._end_trial_step(program.schedule)
        if timer is None:
            return
        self._rows.append((program, timer.slots()))
        if self._steps not in (self._profiled[1], self._checked[1]):
            return
        gathered = [(step_program, gather_slots(row, group)) for step_program, row in self._rows]
        self._rows.clear()
        message = transport.blank()
        ahead_us = _clocks_ahead_us(program, transport, message, group)
        timelines = [
            merge(step_program.schedule, rows, ahead_us) for step_program, rows in gathered
        ]
        # First the costs for a prediction; the second group of steps checks this prediction.
        if self._prediction is None:
            send_us = measure_send_us(program, group.rank(), transport, message)
            costs = self._agreed_costs(timelines, send_us, group)
            if self.report.memory.moved:
                costs = with_copies(costs, self.report.memory.moved, message.device)
            self._costs = costs
            self._rest_us = _rest_us([rows for _, rows in gathered], timelines)
            self._reserve_within_passes(group)
            self._prediction = self._predict(program, self._costs, self._rest_us)
        else:
            self._compare(self._prediction, timelines)
            self._start_trial(program.schedule)
        folder = self.pipeline.options.trace_folder
        if folder is not None and self._costs is not None and dist.get_rank() == 0:
            planned = simulate(timelines[-1].schedule, self._costs)
            _write_trace_files(Path(folder), planned, timelines[-1], self._costs)

    def _reserve_within_passes(self, group: dist.ProcessGroup) -> None:
        """Reserve memory for temporary allocations of passes within the memory limit."""
        planner, local_bytes = self.planner, self.report.memory.within_passes
        if planner.choice.limit_bytes is None:
            return
        max_bytes = max_of_replicas(local_bytes, group, float)
        planner.reserve([a + b for a, b in zip(planner.static_bytes, max_bytes, strict=True)])
        if any(max_bytes):
            gib = ", ".join(f"{num_bytes / GIB:.3f}" for num_bytes in max_bytes)
            self._log("passes allocate and free, kept free of activations, GiB per rank: %s", gib)

    def _predict(self, program: Program, costs: Costs, rest_us: float) -> PredictedStep:
        """Adopt the costs for later steps, plan again if required, and log the prediction."""
        planner = self.planner
        current_prediction = prediction_of(program.schedule, costs, rest_us)
        planner.adopt(costs)
        if not planner.choice.plans_by_costs:
            self._log("measured costs: %s", format_costs(current_prediction))
            return current_prediction
        with refusing():
            plan = planner.plan_step(program.schedule.num_microbatches)
        self.report.remeasure()
        choice, stage_map = planner.choice, self.pipeline.stage_map
        layers = better_split(costs, stage_map, choice.layer_shares)
        if layers is not None and not choice.shards_output_layer:
            text = ",".join(map(str, layers))
            self._log("the next run is faster with --pipeline-layer-split %s", text)
        plan_prediction = prediction_of(plan.program.schedule, costs, rest_us)
        self._log(
            "measured costs: %s -> %s, from the next step on",
            format_costs(current_prediction),
            format_costs(plan_prediction),
        )
        return plan_prediction

    def _start_trial(self, schedule: Schedule) -> None:
        """Start the trial of the plan against the best named schedule, once per run."""
        planner = self.planner
        if self._is_tried or not self.pipeline.has_trial:
            return
        self._is_tried = True
        with refusing():
            plan = planner.plan_step(schedule.num_microbatches)
            self._named = planner.best_by_name(plan)
        if self._named is not None:
            self._trial = Trial(planner, plan, self._named)
            self._log("comparing the plan with %s in the next steps", self._named.schedule.name)

    def _end_trial_step(self, schedule: Schedule) -> None:
        """Count a step of the trial; after the last one, keep the winner and check it."""
        if self._trial is None or self._named is None or self._costs is None:
            return
        winner = self._trial.end_step(self.report.last_step_s, schedule.num_microbatches)
        if winner is None:
            return
        self._trial = None
        self._save_schedule(schedule.num_microbatches)
        if winner == NAMED:  # only the plan has been compared with its prediction
            named_schedule = self._named.program.schedule
            self._prediction = prediction_of(named_schedule, self._costs, self._rest_us)
            length = self._profiled[1] - self._profiled[0]
            self._checked = self._steps + 2, self._steps + 2 + length
        self.report.remeasure()

    def _save_schedule(self, num_microbatches: int) -> None:
        """Write the winning schedule to the trace folder, for a restart."""
        folder = self.pipeline.options.trace_folder
        if folder is None or dist.get_rank() != 0:
            return
        schedule = self.planner.plan_step(num_microbatches).schedule
        try:
            (Path(folder) / "schedule.json").write_text(schedule.to_json(), encoding="utf-8")
        except OSError as error:
            logger.warning("--pipeline-trace %s: %s", folder, error)

    def _compare(self, prediction: PredictedStep, timelines: Sequence[Timeline]) -> None:
        """Compare measured steps with the prediction."""
        num_microbatches = prediction.num_microbatches
        timelines = [
            timeline
            for timeline in timelines
            if timeline.schedule.num_microbatches == num_microbatches
        ]
        if not timelines:  # the number of microbatches has changed since
            return
        makespan_us = median(timeline.makespan for timeline in timelines)
        bubble = median(timeline.bubble for timeline in timelines)
        checked = Checked(prediction, makespan_us, bubble, not shares_processors())
        self.report.compare(checked)
        self._log("%s, in %d steps", format_comparison(checked), len(timelines))

    @staticmethod
    def _log(text: str, *values: object) -> None:
        if dist.get_rank() == 0:
            logger.warning(text, *values)

    def _agreed_costs(
        self,
        timelines: Sequence[Timeline],
        send_us: float | None,
        group: dist.ProcessGroup,
    ) -> Costs:
        """Return the median of the costs that all pipelines of the world have measured."""
        memory = self.report.memory
        measurements = gather_objects((send_us, memory.held, memory.allocated), group)
        sends_us = [time_us for time_us, _, _ in measurements if time_us is not None]
        memory_by_stage = {
            stage: pair for _, rank_memory, _ in measurements for stage, pair in rank_memory.items()
        }
        steps, disturbed_steps = undisturbed(timelines)
        for step, device, factor in disturbed_steps:
            number = self._profiled[0] + step
            self._log(
                "step %d is left out of the costs: passes of pipeline rank %d took %.2f times what "
                "they take in the median step",
                *(number, device, factor),
            )
        send_us = fmean(sends_us) if sends_us else 0.0
        costs = measured_costs(steps, send_us, memory_by_stage)
        costs = with_allocated(costs, [allocated for _, _, allocated in measurements])
        # Replicas must plan the same schedule, because different ones would reduce gradients in
        # different orders.
        costs_of_ranks = gather_objects(costs)
        source = _source(
            f"{MEASURED} in training on {len(costs_of_ranks)} ranks", self.report, steps[0]
        )
        layers = self.pipeline.stage_map.layers
        return replace(_median_costs(costs_of_ranks), layers=layers).with_source(source)


def _source(text: str, report: RunReport, step: Timeline) -> str:
    """Return a description of the measurement: date, machine and sizes."""
    machine = platform.processor() or platform.machine()
    if torch.cuda.is_available():
        machine = torch.cuda.get_device_name()
    today = datetime.now().astimezone().date().isoformat()
    count = step.schedule.num_microbatches
    return f"{text}, {today}, {machine}, {count} microbatches, {report.tokens} tokens a step"


def _clocks_ahead_us(
    program: Program, transport: Transport, message: torch.Tensor, group: dist.ProcessGroup
) -> list[float]:
    """Return the clock offset of each rank from rank 0 in us, measured with small messages."""
    transport.expect((1, 1, 1), message.dtype)
    try:
        return clocks_ahead_us(program, group.rank(), transport, transport.blank(), group)
    finally:
        transport.expect(message.shape, message.dtype)


def prediction_of(schedule: Schedule, costs: Costs, rest_us: float) -> PredictedStep:
    """Predict the figures of a step with this schedule."""
    timeline = simulate(schedule, costs)
    peaks = peak_held(schedule, costs)
    return PredictedStep(
        schedule.name,
        schedule.num_microbatches,
        timeline.makespan,
        rest_us,
        timeline.bubble,
        peaks,
    )


def format_costs(prediction: PredictedStep) -> str:
    """Format the prediction in one line."""
    return (
        f"{prediction.name} step {prediction.step_us / 1e3:.1f} ms (passes "
        f"{prediction.makespan_us / 1e3:.1f} ms), bubble {100 * prediction.bubble:.1f} %, "
        f"peak {max(prediction.peak_bytes) / GIB:.3f} GiB"
    )


def format_comparison(checked: Checked) -> str:
    """Format predicted and measured figures in one line."""
    predicted = checked.prediction
    return (
        f"predicted for {predicted.name}, and measured later: "
        f"passes {predicted.makespan_us / 1e3:.2f} ms, {checked.makespan_us / 1e3:.2f} ms "
        f"(measured / predicted {checked.makespan_us / predicted.makespan_us:.3f}); "
        f"bubble {100 * predicted.bubble:.2f} %, {100 * checked.bubble:.2f} %"
    )


def _rest_us(steps: Sequence[Sequence[Sequence[Slot]]], timelines: Sequence[Timeline]) -> float:
    """Return the time per step without any pass in us; 0 if there is only one step.

    This is the time of gradient finalization, optimizer and log. `steps` are the slots per step and
    device. An evaluation between two steps affects one value but not the median.
    """
    starts = [rows[0][0].start for rows in steps]
    periods = [next_start - start for start, next_start in pairwise(starts)]
    rests = [
        period - timeline.makespan for period, timeline in zip(periods, timelines, strict=False)
    ]
    return max(median(rests), 0.0) if rests else 0.0


def _median_costs(costs: Sequence[Costs]) -> Costs:
    """Return the median of several cost measurements of the same stages."""

    parts = ([stage.as_part() for stage in measurement.stages] for measurement in costs)
    middle = [StageCosts.middle(measured) for measured in zip(*parts, strict=True)]
    send_us, host_us = (
        median(times_us) for times_us in zip(*((c.send_us, c.host_us) for c in costs), strict=True)
    )
    extra_amounts = {a: [part[a] for part in middle] for a in costs[0].extra_amounts}
    return Costs(stages_of_parts(middle), send_us, host_us=host_us).having(extra_amounts)


def _write_trace_files(folder: Path, planned: Timeline, measured: Timeline, costs: Costs) -> None:
    """Write trace.json (Perfetto) and costs.json.

    Write errors are logged and do not stop the run.
    """
    from megatron_vshape.view.chrome_trace import write_planned_and_measured

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "trace.json").open("w", encoding="utf-8") as stream:
            write_planned_and_measured(planned, measured, stream, costs)
        (folder / "costs.json").write_text(costs.to_json(), encoding="utf-8")
    except OSError as error:
        logger.warning("--pipeline-trace %s: %s", folder, error)


Logs = Callable[[int], bool]
"""Returns whether the trainer logs the step at this offset from the current one."""

_PredictBubble = Callable[[int], float]
"""Returns the expected bubble of a training step with this number of microbatches."""


@dataclass(frozen=True, slots=True)
class Figures:
    """This package's metrics for the log of one iteration: fractions of 1, None if unknown."""

    iteration: int
    predicted_bubble: float | None = None
    bubble: float | None = None

    def text(self) -> str:
        """Return the text to append to Megatron's log line."""
        return "".join(
            f" {name}: {100 * share:.1f} % |" for name, share in self._known_shares().items()
        )

    def scalars(self) -> dict[str, float]:
        """Return the values by their names in TensorBoard and W&B."""
        return {
            name.lower().replace(" ", "-"): share for name, share in self._known_shares().items()
        }

    def _known_shares(self) -> dict[str, float]:
        shares = {"bubble": self.bubble, "predicted bubble": self.predicted_bubble}
        return {name: share for name, share in shares.items() if share is not None}


@dataclass(eq=False)
class BubbleMeter:
    """Measures the share of idle time in training steps that are logged, and in no other steps."""

    logs: Logs
    predict: _PredictBubble
    _timer: PassTimer | None = None
    _torch_device: torch.device = torch.device("cpu")
    _num_microbatches: int = 0

    def begin_step(
        self, num_microbatches: int, torch_device: torch.device, profiled: PassTimer | None = None
    ) -> PassTimer | None:
        """Return the timer of the next step: `profiled` if given, else a new one if needed."""
        self._num_microbatches, self._torch_device = num_microbatches, torch_device
        self._timer = None
        if not self.logs(0):
            return profiled
        self._timer = profiled or PassTimer(torch_device, aligned=False)
        return self._timer

    @property
    def times_next(self) -> bool:
        """Return whether the passes of the next step are timed."""
        return self.logs(1)

    def figures(self, iteration: int, pipeline_group: dist.ProcessGroup) -> Figures:
        """Return the bubbles of the step; all ranks of the pipeline call this for the same steps.

        As in a simulated timeline, the bubble is the share of the step in which the busiest rank is
        idle. Ranks enter a step together, because the optimizer before it needs the gradients of
        all ranks. So the duration of the step is that of the rank that ends last.
        """
        predicted = None
        if self._num_microbatches:
            predicted = self.predict(self._num_microbatches)
        if self._timer is None:
            return Figures(iteration, predicted)
        times = self._timer.busy_and_whole()
        max_times = torch.tensor(times, dtype=torch.float64, device=self._torch_device)
        self._timer = None
        dist.all_reduce(max_times, op=dist.ReduceOp.MAX, group=pipeline_group)
        busy_us, whole_us = max_times.tolist()
        bubble = 1 - busy_us / whole_us if whole_us else None  # None: no pass was observed
        return Figures(iteration, predicted, bubble)
