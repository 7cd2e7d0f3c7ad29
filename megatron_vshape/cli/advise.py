"""megatron-vshape advise: compare a run with the best of stock Megatron and of this package."""

import argparse
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import sub
from pathlib import Path
from typing import Any

from megatron_vshape.cli.files import Output, check_target, is_installed, write_all
from megatron_vshape.cli.hardware import add_cluster_argument, of_cluster
from megatron_vshape.cli.help import MEMORY, MODEL, OUTPUT, SEARCH, group
from megatron_vshape.cli.options import headroom_of
from megatron_vshape.cli.progress import told
from megatron_vshape.cli.rehearse import add_program_arguments, rehearsed
from megatron_vshape.core.baselines import EvaluatedSchedule, judge
from megatron_vshape.core.budget import Budget
from megatron_vshape.core.check.bounds import LimitError
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import Pieces, Share, even_layers, even_with_ends
from megatron_vshape.core.model.pieces import under_megatron
from megatron_vshape.core.model.placement import Placement, looping, v_shape
from megatron_vshape.core.plan import plan
from megatron_vshape.core.planner.vocabulary import held_logits, shared_pieces
from megatron_vshape.core.request import AUTO, MEMORY_NAMES, PlanRequest, known_as
from megatron_vshape.mcore.layout import hybrid
from megatron_vshape.mcore.layout.given_layout import layers_in, layout_of
from megatron_vshape.rehearsal import accuracy, report, shapes
from megatron_vshape.rehearsal.counting import count_all
from megatron_vshape.rehearsal.flags import Command, Sizes, read_command, sizes_of
from megatron_vshape.rehearsal.gpus import GIB, GPUS, Gpu
from megatron_vshape.rehearsal.shapes import Counted, Shape
from megatron_vshape.rehearsal.simulated import megatrons_name

HEADROOM = 0.04
"""Fraction of a GPU's memory that is kept free for fragmentation."""

MOST_SHAPES = 16
PLANNED_SHAPES = 3
"""Maximum number of other parallel configurations to plan for, the best first."""

NEAR = 0.02
"""Minimum possible gain over the best known line for a strategy to be evaluated."""

MOST_SHARED = 4_000
"""Maximum forward passes per step for which vocabulary parallelism is evaluated (minutes above)."""

PATIENCE = 2
"""Time limit of a search with its setup and evaluation, in multiples of its search time."""

KEEP = ("recompute", *shapes.KEPT.values())
ENDS = ("embedding", "loss")
LAYOUT = "--pipeline-model-parallel-layout"
PLANNED = "planned schedule"


@dataclass(frozen=True, slots=True)
class Line:
    """A schedule in a parallel configuration, with its estimated step time and memory."""

    name: str  # of the schedule
    shape: Shape
    known: EvaluatedSchedule
    step_s: float
    mfu: float
    is_stock: bool
    shares: bool = False  # whether all ranks share the vocabulary

    @property
    def most(self) -> float:
        """Memory of the largest rank, in bytes."""
        return max(self.known.peak)

    @property
    def title(self) -> str:
        """Schedule and parallel configuration, formatted."""
        more = ", vocabulary parallelism" if self.shares else ""
        if self.is_stock and not self.is_even:
            more = ", uneven layers"
        return f"{self.name}{more}, {self.shape.told()}"

    @property
    def is_even(self) -> bool:
        """Whether layers, or layers with embedding and output layer, are equal in all stages."""
        layers = self.known.costs.layers or ()
        return len(set(layers)) < 2 or layers == even_with_ends(sum(layers), len(layers))

    def changes_megatron(self, command: Command) -> list[str]:
        """Return the flags that make Megatron run these stages."""
        layers, chunks = self.known.costs.layers or (), self.known.schedule.num_chunks
        if command.pattern:
            return [f"{hybrid.FLAG} '{hybrid.cut(command.pattern, layers)}'"]
        if not self.is_even:
            predicting = command.mtp_layers
            return [f"{LAYOUT} '{layout_of(layers, predicting)}'"]
        words = [f"remove {LAYOUT}"] if command.has(LAYOUT) else []
        if chunks == 1:
            words.append("no virtual stages (1F1B)")
        else:
            words.append(f"--num-virtual-stages-per-pipeline-rank {chunks}")
        if len(set(layers)) > 1:
            words += [f"--account-for-{end}-in-pipeline-split" for end in ENDS]
        return words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "megatron-vshape advise --gpus 128xH100 [OPTIONS] -- pretrain_gpt.py FLAGS..."
    group(parser, MODEL).add_argument(
        "--gpus",
        metavar="NxGPU",
        help=f"Number and type of GPUs, as in 128xH100: {', '.join(GPUS)}; this or --cluster is "
        "required",
    )
    add_cluster_argument(parser)
    group(parser, MEMORY).add_argument(
        "--headroom",
        metavar="SHARE|XGiB",
        help="Part of every GPU's memory to keep free, e.g. for a rollout engine: 5%%, 0.05 or "
        f"4GiB (default: {HEADROOM:.0%}%)",
    )
    group(parser, MODEL).add_argument(
        "--training-share",
        type=float,
        default=1.0,
        metavar="X",
        help="Time of training relative to a full step, below 1 with rollouts (default: 1.0)",
    )
    search = group(parser, SEARCH)
    search.add_argument(
        "--keep",
        default="",
        metavar="NAMES",
        help=f"Settings not to change, with commas: {', '.join(KEEP)} (default: none)",
    )
    search.add_argument(
        "--seconds",
        type=float,
        default=12.0,
        metavar="S",
        help="Time limit in seconds of the search for schedules (default: 12)",
    )
    group(parser, OUTPUT).add_argument(
        "--export",
        type=Path,
        metavar="FILE.json",
        help="Schedule file of the best configuration to write",
    )
    add_program_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Estimate the configurations, print the comparison and the recommendation, and return 0."""
    words = options.command
    if not 0 < options.training_share <= 1:
        raise ScheduleError(
            f"--training-share {options.training_share:g} is not above 0 and at most 1: give the "
            "time of training relative to a full step, such as 0.3"
        )
    if not is_installed("torch"):
        raise ScheduleError("advise runs Megatron: pip install 'megatron-vshape[megatron]'")
    for flag, path in (("--export", options.export), ("--json", options.json)):
        if path is not None:
            check_target(flag, path, (".json",))
    number, gpu = _gpus(options)
    keep = _kept(options.keep)
    command = read_command(words)
    own = shapes.shape_of(command)
    if own.pipeline < 2:
        raise ScheduleError(
            "the command has no pipeline, and advise compares pipeline schedules: set "
            "--pipeline-model-parallel-size to 2 or more, or estimate its memory with rehearse"
        )
    layers = command.layers
    advice = _Advice(command, options, number, gpu, layers)
    left_out: list[str] = []
    wanted = [own]
    for shape, why in shapes.shapes_beside(command, number, keep, layers):
        if why:
            left_out.append(f"{shape.told()}: {why}")
        else:
            wanted.append(shape)
    with told(lambda us: f"{us * 1e-6:.1f} s"):
        advice.count(wanted[:MOST_SHAPES], left_out)
        if own not in advice.counted:
            raise ScheduleError(f"the command could not be estimated: {advice.reasons[own]}")
        lines = advice.lines(own)
    _print(advice, lines, left_out)
    _write(advice, lines)
    return 0


def _gpus(options: argparse.Namespace) -> tuple[int, Gpu]:
    if (options.gpus is None) == (options.cluster is None):
        raise ScheduleError("advise needs one of --gpus NxGPU, as in 128xH100, and --cluster FILE")
    if options.cluster is not None:
        return of_cluster(options.cluster)
    text = options.gpus
    number, _, name = text.lower().partition("x")
    if not number.isdigit() or not int(number) or name not in GPUS:
        raise ScheduleError(
            f"--gpus {text!r:.40} is not a number, an x and a GPU, as in 128xH100; supported GPUs: "
            + ", ".join(GPUS)
        )
    return int(number), GPUS[name]


def _case_of(command: Command, gpu: Gpu) -> str:
    """Return the case whose published errors apply to the command."""
    ranks = command.number("--expert-model-parallel-size", 1)
    tensor = command.number("--tensor-model-parallel-size", 1)
    shards = command.number("--expert-tensor-parallel-size", tensor)
    span = (ranks - 1) * shards + 1
    return accuracy.case_of(command.has("--num-experts"), ranks, span, gpu)


def _kept(text: str) -> list[str]:
    found = [part for part in text.split(",") if part]
    for part in found:
        if part not in KEEP:
            raise ScheduleError(f"--keep {part!r:.40} is not one of {', '.join(KEEP)}")
    return found


class _Advice:
    """Estimates and plans the parallel configurations of a command."""

    def __init__(
        self,
        command: Command,
        options: argparse.Namespace,
        number: int,
        gpu: Gpu,
        layers: int,
    ) -> None:
        self.command, self.options, self.gpu, self.layers = command, options, gpu, layers
        self.sizes: dict[Shape, Sizes] = {}
        self.reasons: dict[Shape, str] = {}  # why a shape could not be counted
        self.counted: dict[Shape, Counted] = {}
        self.number = number
        self.headroom = given = options.headroom or f"{HEADROOM:.0%}"
        kept = headroom_of(given, gpu.memory_bytes, in_bytes=True)
        self.limit = gpu.memory_bytes - gpu.beside_gib * GIB - kept
        self.case = _case_of(command, gpu)

    def count(self, wanted: Sequence[Shape], left_out: list[str]) -> None:
        """Estimate every configuration; append failures to `left_out`, with the reason."""
        asked = rehearsed(self.options, self.command, self.gpu)
        commands = [shape.command(self.command) for shape in wanted]
        every = count_all(asked, commands, lambda *_: None)
        for shape, command, found in zip(wanted, commands, every, strict=True):
            if isinstance(found, str):
                self.reasons[shape] = found
                left_out.append(f"{shape.told()}: {found}")
                continue
            sizes = sizes_of(command, self.number)
            self.sizes[shape] = sizes
            counted = shapes.counted(found, self.gpu, sizes.world, sizes.pipeline, None)
            self.counted[shape] = shapes.of_pattern(counted, command)

    def microbatches(self, shape: Shape) -> int:
        """Return the number of microbatches per step."""
        each = shape.microbatch * self.sizes[shape].replicas
        return self.command.number("--global-batch-size", each) // each

    def lines(self, own: Shape) -> dict[str, Line | None]:
        """Return the lines to print, by the keys of `NAMES`."""
        today = self._today(own)
        stock = [line for shape in self.counted for line in self._stock(shape)]
        stock += [today] if today.is_stock else []
        fitting = [line for line in stock if line.most <= self.limit]
        found: dict[str, Line | None] = {"today": today}
        found["stock"] = min(fitting, key=_step, default=None)
        others = [shape for shape in self.counted if shape != own]
        seconds = self.options.seconds / PLANNED_SHAPES
        # A configuration that does not fit is no baseline: any plan that fits is better.
        now_s = today.step_s if today.most <= self.limit else math.inf
        mine = self._planned(own, seconds, now_s)
        best = [line for line in (mine, found["stock"]) if line is not None]
        planned = 0
        for shape in sorted(others, key=self._least_us):
            fastest = min(map(_step, best), default=math.inf)
            # Sorted by lower bound: none of the remaining configurations can be faster.
            if planned == PLANNED_SHAPES or 1e-6 * self._least_us(shape) > fastest:
                break
            line = self._planned(shape, seconds, fastest)
            if line is not None:
                best.append(line)
                planned += 1
        found["best"] = min(best, key=_step, default=None)
        found["same"] = mine
        found["least"] = self._least_memory([*fitting, *best], found["best"])
        if own.recompute == "full":
            found["DON'T"] = self._named("v-half", own, stock=False)
        return found

    def _least_memory(self, lines: Sequence[Line], best: Line | None) -> Line | None:
        """Return the row with the smallest peak of those as fast as the best within the error."""
        if best is None:
            return None
        slowest_s = best.step_s / (1 - accuracy.threshold(self.case))
        near = [line for line in lines if line.step_s <= slowest_s]
        return min(near, key=lambda line: (line.most, line.step_s))

    def _today(self, own: Shape) -> Line:
        given = self.command.value("--pipeline-schedule")
        name, layers = self._megatrons() if given is None else (given, None)
        line = self._named(name, own, stock=given is None, layers=layers)
        if line is None:
            raise ScheduleError(f"schedule {name} does not exist, or not for these sizes")
        return line

    def _megatrons(self) -> tuple[str, tuple[int, ...] | None]:
        """Return the name of Megatron's schedule for the command, and the layers per stage.

        The layers are None if they do not divide evenly, as when a program creates the layout.
        """
        command = self.command
        pipeline = command.number("--pipeline-model-parallel-size", 1)
        if command.pattern:
            parts = hybrid.parts(command.pattern)
            if len(parts) == 1 and not self.layers % pipeline:  # Megatron cuts it evenly
                parts = (self.layers // pipeline,) * pipeline
            chunks = max(1, len(parts) // pipeline)
            return megatrons_name(chunks), parts if len(parts) > 1 else None
        if layout := command.value(LAYOUT):
            layers, _ = layers_in(layout)
            return megatrons_name(max(1, len(layers) // pipeline)), layers
        ends = [command.has(f"--account-for-{end}-in-pipeline-split") for end in ENDS]
        counted = self.layers + sum(ends)
        chunks = command.number("--num-virtual-stages-per-pipeline-rank", 1)
        if each := command.number("--num-layers-per-virtual-pipeline-stage", 0):
            chunks = max(1, counted // (each * pipeline))
        each, rest = divmod(counted, pipeline * chunks)
        even = [each] * (pipeline * chunks)
        even[0] -= ends[0]
        even[-1] -= ends[1]
        return megatrons_name(chunks), None if rest else tuple(even)

    def _stock(self, shape: Shape) -> Iterator[Line]:
        """Yield Megatron's schedules for all numbers of chunks that divide the layers, or for all.

        Each has an even split of the layers and one balanced by work, or the closest to it that
        fits.
        """
        most = (self.layers + 2) // shape.pipeline
        counts = [n for n in (1, 2, 3, 4, 5, 6, 8, 10, 12) if n <= most]
        dividing = [n for n in counts if self.divides(n * shape.pipeline)]
        many = self.microbatches(shape)
        for chunks in dividing or counts:
            if chunks > 1 and many % shape.pipeline:
                continue
            name = megatrons_name(chunks)
            dealt = self._dealt(shape, looping(shape.pipeline, chunks))
            for layers in (*dealt, *_between(dealt[-1], dealt[0])):
                line = self._named(name, shape, stock=True, layers=layers)
                if line is not None:
                    yield line
                    if line.most <= self.limit and layers not in dealt[:-1]:
                        break

    def divides(self, stages: int) -> bool:
        """Return whether the layers, or layers plus embedding and output layer, divide evenly."""
        counted = (self.layers,) if self.command.pattern else (self.layers, self.layers + 2)
        return any(not each % stages for each in counted)

    def _dealt(self, shape: Shape, placement: Placement) -> list[tuple[int, ...]]:
        """Return the layer splits to try with Megatron's flags: even if possible, and balanced."""
        stages = len(placement)
        even = None
        if not self.layers % stages:
            even = even_layers(self.layers, placement)
        elif not self.command.pattern:  # Megatron counts ends as layers of a GPT only
            even = even_with_ends(self.layers, stages)
        balanced = self.counted[shape].pieces.balanced(self.layers, placement)
        return [balanced] if even in (None, balanced) else [even, balanced]

    def _named(
        self,
        name: str,
        shape: Shape,
        stock: bool,
        layers: tuple[int, ...] | None = None,
        pieces: Pieces | None = None,
    ) -> Line | None:
        """Return the schedule of this name, with these layers if the number of stages matches."""
        pieces = pieces or self.counted[shape].pieces

        def cut(stages: int, _: str) -> Costs:
            own = layers
            if own is None or len(own) != stages:
                own = self._dealt(shape, looping(shape.pipeline, stages // shape.pipeline))[0]
            made = pieces.costs(own)
            return under_megatron(made) if stock else made

        question = PlanRequest(
            name, shape.pipeline, self.microbatches(shape), cut(2 * shape.pipeline, name), cut
        )
        try:
            known = known_as(name, question)
        except ScheduleError:
            return None
        return self._line(name, shape, known, stock)

    def _planned(self, shape: Shape, seconds: float, known_s: float) -> Line | None:
        """Return the fastest line: a plan, a plan with offloading, or vocabulary parallelism.

        The last two are evaluated only if they may be clearly faster than the best so far.
        """
        pieces = self.counted[shape].pieces
        held_s = pieces.layer.held_after_forward_bytes / self.gpu.host_rate
        copying = pieces.with_copies(1e6 * held_s / pieces.layer.forward_us)
        found: list[Line] = []
        for way, least_us in ((pieces, 0.0), (copying, self._least_us(shape))):
            if 1e-6 * least_us <= (1 - NEAR) * min([known_s, *map(_step, found)]):
                line = self._plan(shape, way, seconds / 2)
                found += [] if line is None else [line]
        clearly_s = (1 - NEAR) * min([known_s, *map(_step, found)])
        if self._may_share(shape) and 1e-6 * self._mean_us(shape) <= clearly_s:
            found += self._sharing(shape)
        return min(found, key=_step, default=None)

    def _may_share(self, shape: Shape) -> bool:
        stages = 2 * shape.pipeline
        return (
            not self.command.mtp_layers
            and stages <= self.layers
            and stages * self.microbatches(shape) <= MOST_SHARED
        )

    def _sharing(self, shape: Shape) -> Iterator[Line]:
        """Yield the V schedules with vocabulary parallelism that fit.

        They are not planned: for the 70B model that needed 22 s and was 0.2% faster.
        """
        pieces = self.counted[shape].pieces
        logits = held_logits(pieces, shape.pipeline)
        shared = shared_pieces(pieces, shape.pipeline, pieces.send_us, logits)
        layers = shared.balanced(self.layers, v_shape(shape.pipeline))
        for name in MEMORY_NAMES:
            line = self._named(name, shape, stock=False, layers=layers, pieces=shared)
            if line is not None and line.most <= self.limit:
                yield replace(line, shares=True)

    def _plan(self, shape: Shape, pieces: Pieces, seconds: float) -> Line | None:
        question = PlanRequest(
            AUTO,
            shape.pipeline,
            self.microbatches(shape),
            limit=self.limit,
            layers=(pieces, self.layers),
            costs=pieces.costs(even_layers(2 * shape.pipeline, looping(shape.pipeline, 2))),
            chunks=tuple(n for n in (1, 2, 3) if n * shape.pipeline <= self.layers + 2),
            seconds=seconds,
        )
        try:
            answer = plan(question, Budget(PATIENCE * seconds))
        except (LimitError, ScheduleError):
            return None
        known = judge(answer.schedule, answer.costs)
        planned = PLANNED + " with offloading" * answer.schedule.copies
        name = planned if answer.baseline is None else str(answer.baseline)
        return self._line(name, shape, known, answer.is_megatrons)

    def _least_us(self, shape: Shape) -> float:
        """Return the time of the busiest rank without idle time, in microseconds."""
        return self._busy_us(shape, looping(shape.pipeline, 1), shape.pipeline)

    def _mean_us(self, shape: Shape) -> float:
        """Return the mean time of work per rank, in microseconds."""
        return self._busy_us(shape, (0,) * shape.pipeline, 1) / shape.pipeline

    def _busy_us(self, shape: Shape, devices: Sequence[int], number: int) -> float:
        pieces = self.counted[shape].pieces
        layers = pieces.balanced(self.layers, looping(shape.pipeline, 1))
        return pieces.costs(layers).busy_us(devices, number, self.microbatches(shape))

    def _line(self, name: str, shape: Shape, known: EvaluatedSchedule, stock: bool) -> Line:
        counted = self.counted[shape]
        after_us = counted.after_us(known.costs, known.schedule.placement)
        step_s = 1e-6 * (known.timeline.makespan + after_us)
        shares = counted.pieces.shares
        layers = Share.total(shares).time if shares else self.layers
        flops = 3 * (layers * counted.layer_flops + counted.ends_flops)
        mfu = flops * self.microbatches(shape) / (step_s * self.gpu.bf16_flops * shape.pipeline)
        return Line(name, shape, known, step_s, mfu, stock)


def _between(far: Sequence[int], near: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the layer splits between two splits, one layer closer at a time."""
    layers = list(far)
    while sum(map(abs, map(sub, layers, near))) > 2:
        apart = list(map(sub, layers, near))
        layers[apart.index(max(apart))] -= 1
        layers[apart.index(min(apart))] += 1
        yield tuple(layers)


def _step(line: Line) -> float:
    return line.step_s


NAMES = {
    "today": "today",
    "stock": "best stock",
    "best": "best with this package",
    "same": "current parallelism",
    "least": "least memory within the error",
    "DON'T": "not recommended",
}
"""Names of the rows, by the keys of --json."""


def _print(advice: _Advice, lines: Mapping[str, Line | None], left_out: Sequence[str]) -> None:
    today = lines["today"]
    assert today is not None
    texts = _verdict(advice, today, lines["stock"], lines["best"])
    for text in (*texts, *_full_step(advice.options.training_share, lines)):
        print(report.wrapped(text))
    command = advice.command
    print(
        f"\n{advice.layers} layers, {command.value('--seq-length') or '?'} tokens, batch "
        f"{command.value('--global-batch-size') or '?'}, {advice.number} "
        f"{advice.gpu.name.upper()}. Estimated, not measured."
    )
    shown = _shown(lines)
    print("\n".join(_table(advice, [(NAMES[key], line) for key, line in shown])))
    flags = _flags_of_rows(advice, lines)
    for key, _ in shown:
        if key != "today":
            words = ", ".join(flags[key]) or "the flags of today"
            print(report.wrapped(f"Flags, {NAMES[key]}: {words}."))
    for text in (
        _largest_rank(today),
        *accuracy.sentences(advice.case, advice.gpu),
        "The cost of splitting the backward is not in these errors; measure it with "
        "megatron-vshape rehearse --measure on one GPU.",
        "rehearse runs all layers, advise one layer per stage: peaks and step times differ by "
        "about 1%.",
        *(["Not evaluated: " + "; ".join(left_out)] if left_out else []),
    ):
        print(report.wrapped(text))


def _shown(lines: Mapping[str, Line | None]) -> list[tuple[str, Line]]:
    """Return the rows without duplicates, each with its key."""
    shown: list[tuple[str, Line]] = []
    for key, line in lines.items():
        if line is None or (key == "best" and line.is_stock):
            continue
        if all((line.title, line.step_s) != (each.title, each.step_s) for _, each in shown):
            shown.append((key, line))
    return shown


def _table(advice: _Advice, shown: Sequence[tuple[str, Line]]) -> list[str]:
    names = max(len(name) for name, _ in shown)
    titles = max(len(line.title) for _, line in shown)
    rows = [f"{'':{names}}  {'':{titles}}  {'step':>8}  {'MFU':>6}  GiB by pipeline rank"]
    for name, line in shown:
        peaks = " ".join(report.gib(each) for each in line.known.peak)
        over = "" if line.most <= advice.limit else "  does not fit"
        step = f"{line.step_s:6.2f} s  {100 * line.mfu:5.1f}%"
        rows.append(f"{name:{names}}  {line.title:{titles}}  {step}  {peaks}{over}")
    return rows


def _verdict(advice: _Advice, today: Line, stock: Line | None, best: Line | None) -> list[str]:
    """Return the recommendation, and the comparison with the best of this package.

    Gains within the error of the estimate are no reason to change the configuration.
    """
    within = accuracy.threshold(advice.case)
    if best is None:
        return [
            f"Recommendation: none. No evaluated configuration fits {report.gib(advice.limit)} GiB "
            f"of a GPU ({advice.headroom} and {advice.gpu.beside_gib:g} GiB are kept free)."
        ]
    fits = today.most <= advice.limit
    gain = 1 - best.step_s / today.step_s
    if fits and gain <= within:
        return [
            "Recommendation: keep the current configuration. The best one found is "
            f"{100 * gain:.1f}% faster, within the error of the estimate ({100 * within:.1f}%)."
        ]
    if stock is None or best.step_s <= (1 - within) * stock.step_s:
        beyond = ""
        if stock is not None:
            beyond = f", {100 * (1 - best.step_s / stock.step_s):.0f}% faster than the best stock"
        return [f"Recommendation: {_change(advice, today, best)}{beyond}."]
    texts = [f"Recommendation (no package needed): {_change(advice, today, stock)}."]
    if best.is_stock:
        return [*texts, "No schedule of this package is faster."]
    further = 100 * (1 - best.step_s / stock.step_s)
    return [
        *texts,
        f"This package: another {further:.0f}% faster than the best stock ({best.name}), within "
        f"the error of the estimate ({100 * within:.1f}%).",
    ]


def _full_step(share: float, lines: Mapping[str, Line | None]) -> list[str]:
    """Format the gain of a step of which training is only a share, as with rollouts."""
    today, best = lines["today"], lines["best"]
    if share == 1 or today is None or best is None:
        return []
    gains = [
        f"{100 * share * (1 - line.step_s / today.step_s):.1f}% ({name})"
        for key, name in (("stock", "best stock"), ("best", "best with this package"))
        if (line := lines[key]) is not None and (key == "stock" or not line.is_stock)
    ]
    return [
        f"Full step, of which training takes {100 * share:g}% today: {', '.join(gains)} faster, "
        "and the rest unchanged."
    ]


def _change(advice: _Advice, today: Line, line: Line) -> str:
    """Format the flags to change, and the gain over today."""
    gain = 100 * (1 - line.step_s / today.step_s)
    how = f"{gain:.0f}% faster than today" if gain > 0 else "it fits"
    return f"{', '.join(_flags(advice, today, line))}: {how}"


def _flags(advice: _Advice, today: Line, line: Line, is_best: bool = True) -> list[str]:
    """Return the flags that make today's command run a row; each may be one to remove."""
    words = [] if line.shape.recompute == today.shape.recompute else ["remove --recompute-*"]
    for name, flag in shapes.FLAGS.items():
        if getattr(line.shape, name) != getattr(today.shape, name):
            words.append(f"{flag} {getattr(line.shape, name)}")
    if line.is_stock:
        return words + line.changes_megatron(advice.command)
    target = str(advice.options.export or "plan.json (written by --export plan.json)")
    if not is_best:
        target = line.name
        if line.name.startswith(PLANNED):
            keep = "--keep " + ",".join(KEEP)
            target = f"plan.json (written by advise {keep} --export plan.json with these sizes)"
    words.append(f"--pipeline-schedule {target}")
    if line.shares:
        words.append("--pipeline-vocab-parallel")
    layers = ",".join(map(str, line.known.costs.layers or ()))
    if len(set(line.known.costs.layers or ())) > 1:
        words.append(f"--pipeline-layer-split {layers}")
    return words


def _flags_of_rows(advice: _Advice, lines: Mapping[str, Line | None]) -> dict[str, list[str]]:
    """Return the flags of every row by its key; those of today are none."""
    today, best = lines["today"], lines["best"]
    assert today is not None
    return {
        key: [] if key == "today" else _flags(advice, today, line, line is best)
        for key, line in lines.items()
        if line is not None
    }


def _largest_rank(line: Line) -> str:
    """Format the memory of today's largest rank by component."""
    costs, schedule = line.known.costs, line.known.schedule
    at = max(range(schedule.num_devices), key=line.known.peak.__getitem__)
    fixed = costs.fixed_bytes(schedule.placement, schedule.num_devices)[at]
    return (
        f"Largest rank today: rank {at} with {report.gib(fixed - costs.device_bytes)} GiB of "
        f"weights, gradients and optimizer, {report.gib(costs.device_bytes)} GiB of workspaces and "
        f"P2P buffers, {report.gib(line.known.peak[at] - fixed)} GiB of activations."
    )


def _write(advice: _Advice, lines: Mapping[str, Line | None]) -> None:
    outputs = []
    options, best = advice.options, lines["best"]
    if options.export is not None and best is not None:
        text = replace(best.known.schedule, name="advised").to_json()
        outputs.append(Output("--export", options.export, lambda path: _text(path, text)))
    if options.json is not None:
        flags = _flags_of_rows(advice, lines)
        content = {
            what: _plain(line) | {"flags": flags[what]}
            for what, line in lines.items()
            if line is not None
        }
        made = json.dumps(content, indent=1) + os.linesep
        outputs.append(Output("--json", options.json, lambda path: _text(path, made)))
    write_all(outputs)
    for each in outputs:
        print(f"wrote {each.path}")


def _text(path: Path, text: str) -> None:
    path.write_text(text)


def _plain(line: Line) -> dict[str, Any]:
    return {
        "schedule": line.name,
        "shape": {
            "tensor": line.shape.tensor,
            "pipeline": line.shape.pipeline,
            "recompute": line.shape.recompute,
            "context": line.shape.context,
            "experts": line.shape.experts,
            "microbatch": line.shape.microbatch,
        },
        "shares_vocabulary": line.shares,
        "step_s": line.step_s,
        "mfu": line.mfu,
        "peak_bytes": list(line.known.peak),
        "layers": list(line.known.costs.layers or ()),
        "is_stock": line.is_stock,
    }
