"""Key figures of a schedule, its memory over time, and their text form."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context

from megatron_vshape.core.check.simulate import (
    costs_of,
    held_curve,
    peak_held,
    peak_moved,
    simulate,
)
from megatron_vshape.core.model.amounts import STATE_BYTES
from megatron_vshape.core.model.costs import Costs, chunk_of
from megatron_vshape.core.model.kinds import FROM_HOST, MOVING_NAME, PROCESSOR, TO_HOST
from megatron_vshape.core.model.pieces import regroup
from megatron_vshape.core.model.placement import chunks_of
from megatron_vshape.core.model.schedule import Schedule, Timeline
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.lowering import fuse
from megatron_vshape.view.names import plain

GIB = 2.0**30

_MIN_IMBALANCE = 0.02
"""Minimum excess of the busiest rank over the mean to be reported."""


@dataclass(frozen=True, slots=True)
class RunNumbers:
    """Memory of a timeline; a chunk is 1 / (2 * devices) of the model.

    Chunks count activations only; bytes count all memory of a rank that the costs include.
    """

    timeline: Timeline
    peak_chunks: tuple[float, ...]
    peak_bytes: tuple[float, ...] | None
    relative_peak: float
    """Peak relative to 1F1B: in bytes if known, else in chunks; 1 if 1F1B stores nothing."""

    @property
    def peak_text(self) -> str:
        """The peak of all ranks: in GiB if known, else in chunks."""
        if self.peak_bytes is None:
            return f"{fixed(max(self.peak_chunks))} chunks"
        return f"{fixed(max(self.peak_bytes) / GIB)} GiB"


def numbers_of(timeline: Timeline, costs: Costs | None = None) -> RunNumbers:
    """Compute the memory of a timeline; `costs` of the schedule's stages, if given, are in bytes.

    Bytes are those of the executed order, in which B and W may be fused and so have another
    workspace.
    """
    schedule = timeline.schedule if costs is None else fuse(timeline)
    peaks, base = peak_held(schedule, costs), base_peak(schedule.num_devices, costs)
    relative = max(peaks) / base if base else 1.0
    if costs is None:
        return RunNumbers(timeline, peaks, None, relative)
    chunk = chunk_of(costs, schedule.num_devices) or 1.0
    activation_peaks = peak_held(schedule, costs.of_activations())
    return RunNumbers(timeline, tuple(peak / chunk for peak in activation_peaks), peaks, relative)


def base_peak(num_devices: int, costs: Costs | None = None) -> float:
    """Return the peak of 1F1B with as many microbatches as devices.

    In chunks, or in the unit of the costs' memory. Costs of several stages per device are added up.

    Raises:
        ScheduleError: the stages of the costs cannot be distributed over the devices.
    """
    schedule = make("1f1b", num_devices, num_devices)
    if costs is None:
        return max(peak_held(schedule))
    return max(peak_held(schedule, regroup(costs, num_devices, "1F1B, for comparison,")))


def peak_lines(schedule: Schedule, costs: Costs) -> list[str]:
    """Format the peak memory of each rank; empty if the costs do not include all memory."""
    if STATE_BYTES not in costs.by_stage:
        return []
    peaks, states = (
        " ".join(fixed(value / GIB) for value in values)
        for values in (
            peak_held(fuse(simulate(schedule, costs)), costs),
            costs.fixed_bytes(schedule.placement, schedule.num_devices),
        )
    )
    return [f"{peaks} GiB, including model states of {states} GiB"]


def messages_per_microbatch(schedule: Schedule) -> tuple[int, float]:
    """Return the number of P2P messages per microbatch, and its ratio to 1F1B's.

    The ratio is 1 on one device, where 1F1B has no messages.
    """
    pairs = zip(schedule.placement, schedule.placement[1:], strict=False)
    num_hops = sum(device != next_device for device, next_device in pairs)
    messages = 2 * num_hops * schedule.num_microbatches // schedule.unsliced_microbatches
    base_messages = 2 * (schedule.num_devices - 1)
    return messages, messages / base_messages if base_messages else 1.0


def overhead_lines(costs: Costs) -> list[str]:
    """Format the overheads of a pass, and the sources of the costs (measured or assumed)."""
    send, host = fixed(costs.send_us), fixed(costs.host_us)
    no_source_text = "the costs file does not name the source of its costs"
    return [
        f"{send} us per P2P message, {host} us of launch overhead per pass",
        *(source_lines(costs) or [no_source_text]),
    ]


def layer_lines(costs: Costs) -> list[str]:
    """Format the flag that splits the layers as the costs do; none if the split is even."""
    layers = costs.layers or ()
    if len(set(layers)) < 2:
        return []
    return [f"--pipeline-layer-split {','.join(map(str, layers))}"]


def source_lines(costs: Costs) -> list[str]:
    """Format one line per source of the costs, with the names of its values."""
    by_text: dict[str, list[str]] = {}
    for name, text in costs.sources:
        by_text.setdefault(text, []).append(name)
    return [f"{', '.join(names)}: {text}" for text, names in by_text.items()]


def argument(value: float) -> str:
    """Format a number as the shortest text that reads back equal, for a command line."""
    return repr(float(value)).removesuffix(".0")


def note(numbers: RunNumbers) -> str:
    """Format the key figures next to a schedule's title."""
    return (
        f"bubble {percent(numbers.timeline.bubble)}, "
        f"span bubble {percent(numbers.timeline.span_bubble)}, "
        f"peak {numbers.peak_text} ({percent(numbers.relative_peak)} of 1F1B)"
    )


def idle_lines(timeline: Timeline) -> list[str]:
    """Format the mean idle time and the bottleneck rank; empty if the ranks have equal work.

    The bubble compares with the busiest rank only, and does not show that others wait for it.
    """
    work = timeline.work
    mean, max_work = sum(work) / len(work), max(work)
    if max_work <= mean * (1 + _MIN_IMBALANCE):
        return []
    return [
        f"{percent(timeline.mean_idle)} of the step, on average over the ranks",
        f"rank {work.index(max_work)} is the bottleneck: {max_work / mean:.3g}x the mean work per "
        "rank",
    ]


def format_sufficient_limit(memory: float) -> str:
    """Format memory with 6 digits, rounded up, so that the printed value is a sufficient limit."""
    # Minus the tolerance of limits; otherwise sums of fractions would be rounded up by a digit.
    rounded = Context(prec=6, rounding=ROUND_CEILING).create_decimal(memory * (1 - 1e-9))
    return f"{float(rounded):.6g}"


def fixed(value: float, digits: int = 4) -> str:
    """Format a number with `digits` digits and no exponent, as 14,570 or 0.0123."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def time_text(value: float, in_us: bool) -> str:
    """Format a time: in ms if the costs are in us, otherwise without unit."""
    return f"{fixed(value / 1000, 5)} ms" if in_us else fixed(value, 6)


@dataclass(frozen=True, slots=True)
class UnitFormat:
    """Formats times and memory: in ms and GiB with a costs file, otherwise in those of --cost."""

    chunk: float  # its memory, in the unit of the costs
    in_bytes: bool
    has_states: bool  # memory includes all tensors, so that chunks do not measure it

    @classmethod
    def of(cls, costs: Costs, num_devices: int, in_bytes: bool) -> "UnitFormat":
        """Return the units of these costs."""
        return cls(chunk_of(costs, num_devices), in_bytes, STATE_BYTES in costs.by_stage)

    def time(self, value: float) -> str:
        """Format a time."""
        return time_text(value, self.in_bytes)

    def memory(self, value: float, number: Callable[[float], str] = fixed) -> str:
        """Format memory."""
        chunks = f"{number(value / self.chunk)} chunks"
        if not self.in_bytes:
            return chunks
        return f"{number(value / GIB)} GiB" + ("" if self.has_states else f" ({chunks})")


def percent(share: float) -> str:
    """Format a share as a percentage, without a negative zero."""
    return f"{100 * share:.1f} %".replace("-0.0", "0.0")


def labelled(label: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    """Return the lines with the label before the first."""
    return [(label if index == 0 else "", line) for index, line in enumerate(lines)]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a plain table: names left-aligned, numbers right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        name, *numbers = row
        cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def comparison_rows(numbers: Sequence[RunNumbers]) -> list[list[str]]:
    """Return a heading and a row per schedule: memory, bubbles, time, communication."""
    in_bytes = any(run.peak_bytes is not None for run in numbers)
    heading = ["schedule", "peak", "of 1F1B", "bubble", "span bubble", "makespan", "messages"]
    rows = [heading]
    for run in numbers:
        timeline = run.timeline
        messages, share = messages_per_microbatch(timeline.schedule)
        rows.append(
            [
                plain(timeline.schedule.name),
                run.peak_text,
                percent(run.relative_peak),
                percent(timeline.bubble),
                percent(timeline.span_bubble),
                time_text(timeline.makespan, in_bytes),
                f"{messages} ({share:.3g} x)",
            ]
        )
    return rows


def held_steps(timeline: Timeline, costs: Costs, device: int) -> list[tuple[float, float]]:
    """Return (time, memory from then on) at each change, in the unit of the costs.

    A simulated and a measured timeline have the same steps at different times, because allocation
    and freeing follow from the pass order. The last step is to zero.
    """
    costs = costs_of(timeline.schedule, costs)
    curve = held_curve(timeline.schedule, costs, device)
    # The second pass of an F&B pair starts with its F, so it is not a separate step.
    partners = set(timeline.schedule.overlapped_pairs().values())
    pairs = [
        (slot, memory)
        for slot, memory in zip(timeline.slots(device), curve, strict=True)
        if slot.work.kind.resource == PROCESSOR and slot.work not in partners
    ]
    slots, memory_during = [slot for slot, _ in pairs], [memory for _, memory in pairs]
    steps: list[tuple[float, float]] = []

    def step(time: float, memory: float) -> None:
        if steps and steps[-1][0] == time:
            steps.pop()
        if memory != (steps[-1][1] if steps else 0.0):
            steps.append((time, memory))

    for index, slot in enumerate(slots):
        step(slot.start, memory_during[index])
        if index + 1 == len(slots):
            step(slot.end, 0.0)
            break
        # Between two passes, the memory is that of the next pass without its new allocations.
        work = slots[index + 1].work
        allocated = costs.changes(work.kind)[0][work.stage] + costs.workspace(work.kind)[work.stage]
        step(slot.end, memory_during[index + 1] - allocated)
    return steps


def trade_lines(
    timeline: Timeline, costs: Costs, format_memory: Callable[[float], str]
) -> Iterator[tuple[str, str]]:
    """Yield a label and a line about moved memory, if the costs have it."""
    schedule = timeline.schedule
    if costs.copies:
        copied = Counter(work.stage for work in schedule.moving_passes())
        share = sum(copied.values()) / (schedule.num_stages * schedule.num_microbatches)
        chunks = chunks_of(schedule.placement)
        by_chunk = Counter[int]()
        for stage, count in copied.items():
            by_chunk[chunks[stage]] += count
        of_chunk = schedule.num_devices * schedule.num_microbatches
        parts = ", ".join(
            f"{percent(by_chunk[c] / of_chunk)} of chunk {c}" for c in sorted(by_chunk)
        )
        busy = percent(link_share(timeline))
        peak = format_memory(max(peak_moved(schedule, costs)))
        line = f"{percent(share)} of the activations ({parts}); at most {peak} of host memory per "
        line += f"rank; host link busy {busy}"
        yield MOVING_NAME, line if copied else "none (no gain)"


def link_share(timeline: Timeline) -> float:
    """Return the share of the step in which the busiest host link copies."""
    busiest = 0.0
    for lane in timeline.schedule.queues():
        if any(work.kind.resource in (TO_HOST, FROM_HOST) for work in lane.passes):
            starts, ends = timeline.starts[lane.device], timeline.ends[lane.device]
            busiest = max(
                busiest, sum(ends[position] - starts[position] for position in lane.positions)
            )
    return busiest / timeline.makespan
