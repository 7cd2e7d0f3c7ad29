"""Profile a run's own steps, plan anew from them, and show planned beside measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from megatron_vshape.core.costs import Costs
from megatron_vshape.core.lowering import Program
from megatron_vshape.core.passes import ScheduleError
from megatron_vshape.core.schedule import Slot, Timeline
from megatron_vshape.core.simulate import peak_held, simulate
from megatron_vshape.mcore.session import Pipeline
from megatron_vshape.runtime.measure import (
    Held,
    PassTimer,
    gather_slots,
    measure_send_us,
    measured_costs,
    merge,
)
from megatron_vshape.runtime.p2p import Transport

logger = logging.getLogger(__name__)

GIB = 2.0**30


class Profiler:
    """Follows the training steps of this process and acts when the last profiled one is over.

    All ranks of the world call it for the same steps; each then computes the same costs, and
    from these the same plan, by itself.
    """

    def __init__(self, pipeline: Pipeline, on_replan: Callable[[], None]) -> None:
        self._pipeline = pipeline
        self._on_replan = on_replan
        self._steps = 0
        self._rows: list[tuple[Program, list[Slot]]] = []

    def begin_step(self, torch_device: torch.device) -> PassTimer | None:
        """Count a training step and return what is to observe it, if it is profiled."""
        self._steps += 1
        first, last = self._pipeline.options.profile_steps or (0, -1)
        return PassTimer(torch_device) if first <= self._steps <= last else None

    def end_step(
        self,
        timer: PassTimer | None,
        program: Program,
        transport: Transport,
        message: torch.Tensor,
        held: Held,
        group: dist.ProcessGroup,
    ) -> None:
        """Keep the step's times; after the last one, work out the costs and use them."""
        if timer is None:
            return
        self._rows.append((program, timer.slots()))
        _, last = self._pipeline.options.profile_steps or (0, -1)
        if self._steps < last:
            return
        timelines = [merge(p.schedule, gather_slots(row, group)) for p, row in self._rows]
        self._rows.clear()
        send_us = measure_send_us(program, group.rank(), transport, message)
        costs = self._agreed_costs(timelines, send_us, held, group)
        self._show(timelines[-1], costs)
        planner = self._pipeline.planner
        if planner.plans_by_costs:
            self._replan(program, costs)
        else:
            planner.costs = costs

    def _agreed_costs(
        self,
        timelines: Sequence[Timeline],
        send_us: float | None,
        held: Held,
        group: dist.ProcessGroup,
    ) -> Costs:
        """Return the costs that all pipelines of the world measured, their medians."""
        mine = (send_us, dict(held))
        everyones: list[Any] = [mine] * group.size()
        dist.all_gather_object(everyones, mine, group=group)
        sends = [each for each, _ in everyones if each is not None]
        all_held = {stage: pair for _, one in everyones for stage, pair in one.items()}
        own = measured_costs(timelines, fmean(sends) if sends else 0.0, all_held)
        world: list[Costs] = [own] * dist.get_world_size()
        dist.all_gather_object(world, own)
        return middle_of(world)

    def _replan(self, program: Program, costs: Costs) -> None:
        planner = self._pipeline.planner
        before = simulate(program.schedule, costs)
        planner.adopt(costs)
        try:
            plan = planner.training(program.schedule.num_microbatches)
        except ScheduleError as error:
            raise SystemExit(f"megatron-vshape: {error}") from None
        self._on_replan()
        if dist.get_rank() == 0:
            logger.warning(
                "measured costs: %s step %.1f ms, bubble %.1f %%, peak %.3f GiB -> "
                "%s step %.1f ms, bubble %.1f %%, peak %.3f GiB, from the next step on",
                *_facts(before, costs),
                *_facts(plan.timeline, costs),
            )

    def _show(self, measured: Timeline, costs: Costs) -> None:
        """Write the trace and print predicted beside measured, on the first rank."""
        if dist.get_rank() != 0:
            return
        planned = simulate(measured.schedule, costs)
        logger.warning("%s", comparison(planned, measured, costs))
        folder = self._pipeline.options.trace_folder
        if folder is not None:
            write_trace_files(Path(folder), planned, measured, costs)


def _facts(timeline: Timeline, costs: Costs) -> tuple[str, float, float, float]:
    peak = max(peak_held(timeline.schedule, costs)) / GIB
    return timeline.schedule.name, timeline.makespan / 1e3, 100 * timeline.bubble, peak


def comparison(planned: Timeline, measured: Timeline, costs: Costs) -> str:
    """Return the table of a step's predicted and measured figures."""
    ratio = measured.makespan / planned.makespan
    peaks = ", ".join(f"{each / 2**20:.2f}" for each in peak_held(planned.schedule, costs))
    return (
        f"profiled step of {measured.schedule.name}: predicted, measured\n"
        f"  step    {planned.makespan / 1e3:9.2f} ms {measured.makespan / 1e3:9.2f} ms "
        f"(measured / predicted {ratio:.3f})\n"
        f"  bubble  {100 * planned.bubble:9.2f} %  {100 * measured.bubble:9.2f} %\n"
        f"  activations, MiB per rank: {peaks}; message {costs.send_us:.0f} us"
    )


def middle_of(costs: Sequence[Costs]) -> Costs:
    """Return costs that are the medians of several measurements of the same stages."""

    def middle(name: str) -> tuple[float, ...]:
        return tuple(map(median, zip(*(getattr(each, name) for each in costs), strict=True)))

    return Costs(
        middle("forward_us"),
        middle("backward_us"),
        middle("weight_us"),
        median(each.send_us for each in costs),
        middle("held_after_forward_bytes"),
        middle("held_after_backward_bytes"),
    )


def write_trace_files(folder: Path, planned: Timeline, measured: Timeline, costs: Costs) -> None:
    """Write trace.json (Perfetto), costs.json and, where matplotlib is, timeline.svg.

    What cannot be written is logged and not fatal: a run does not end for a picture.
    """
    from megatron_vshape.view.chrome_trace import write_planned_and_measured

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "trace.json").open("w", encoding="utf-8") as stream:
            write_planned_and_measured(planned, measured, stream, costs)
        (folder / "costs.json").write_text(costs.to_json(), encoding="utf-8")
        _draw(folder / "timeline.svg", {"planned": planned, "measured": measured})
    except OSError as error:
        logger.warning("--pipeline-trace %s: %s", folder, error)


def _draw(path: Path, timelines: Mapping[str, Timeline]) -> None:
    try:
        from megatron_vshape.view import figure
    except ImportError:
        logger.warning("no picture in %s: matplotlib is not installed", path.parent)
        return
    notes = [f"bubble {100 * each.bubble:.1f} %" for each in timelines.values()]
    units = figure.MILLISECONDS_AND_GIB
    figure.save(
        figure.comparison_figure(list(timelines.values()), list(timelines), notes, units), path
    )
