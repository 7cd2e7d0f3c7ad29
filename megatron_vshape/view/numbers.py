"""The numbers of a schedule, and their text form."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context

from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.model.costs import Costs, chunk_of, regroup
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.layers import Pieces
from megatron_vshape.core.model.schedule import Schedule, Timeline
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.planner.lighter import lighter_layers
from megatron_vshape.core.planner.vocabulary import is_shared
from megatron_vshape.core.program.lowering import fuse
from megatron_vshape.view.names import plain

GIB = 2.0**30

WORTH_TELLING = 0.02
"""Minimum excess of the busiest rank, or gain of other layers, to be reported."""


@dataclass(frozen=True, slots=True)
class RunNumbers:
    """What a timeline costs beside its times; a chunk is 1 / (2 * devices) of the model.

    Chunks are of activations alone, bytes of all that a device needs if the costs know it.
    """

    timeline: Timeline
    peak_chunks: tuple[float, ...]
    peak_bytes: tuple[float, ...] | None
    relative_peak: float
    """Peak relative to 1F1B: in bytes if known, else in chunks; 1 if 1F1B stores nothing."""


def numbers_of(timeline: Timeline, costs: Costs | None = None) -> RunNumbers:
    """Return the numbers of a timeline; `costs` of the schedule's stages are in bytes if given.

    Bytes are of the order that runs: a W that is one with its B has other ones to work with.
    """
    schedule = timeline.schedule if costs is None else fuse(timeline)
    held, base = peak_held(schedule, costs), base_peak(schedule.num_devices, costs)
    relative = max(held) / base if base else 1.0
    if costs is None:
        return RunNumbers(timeline, held, None, relative)
    chunk = chunk_of(costs, schedule.num_devices) or 1.0
    alone = peak_held(schedule, costs.of_activations())
    return RunNumbers(timeline, tuple(each / chunk for each in alone), held, relative)


def base_peak(num_devices: int, costs: Costs | None = None) -> float:
    """Return the most that 1F1B holds once it has as many microbatches as devices.

    In chunks, or in the unit of the costs' memory; costs of several stages a device are added up.

    Raises:
        ScheduleError: the costs' stages cannot be dealt to the devices.
    """
    schedule = make("1f1b", num_devices, num_devices)
    if costs is None:
        return max(peak_held(schedule))
    return max(peak_held(schedule, regroup(costs, num_devices, "1F1B, for comparison,")))


def peaks_told(schedule: Schedule, costs: Costs) -> list[str]:
    """Return what each device needs at its peak, and what would help where that is too much.

    Too much is more than the largest needs under 1F1B. Nothing of costs that do not know it all.
    """
    if not costs.knows_all:
        return []
    peaks, devices = peak_held(fuse(simulate(schedule, costs)), costs), schedule.num_devices
    each, fixed_bytes = (
        " ".join(fixed(value / GIB) for value in values)
        for values in (peaks, costs.fixed_bytes(schedule.placement, devices))
    )
    lines = [f"{each} GiB, including model states of {fixed_bytes} GiB"]
    if is_shared(schedule):  # 1F1B has the ends whole, of which these costs know nothing
        return lines
    base, most = base_peak(devices, costs), max(peaks)
    if most <= base * (1 + WORTH_TELLING):
        return lines
    device = peaks.index(most)
    ends = {schedule.placement[0], schedule.placement[-1]}
    why = " (embedding and output layer)" if ends == {device} and devices > 1 else ""
    helps = ["vocabulary parallelism"]
    layers, reached = lighter_layers(schedule, costs)
    if reached < most:
        helps.append(f"layers {','.join(map(str, layers))} ({fixed(reached / GIB)} GiB)")
    return [
        *lines,
        f"rank {device}{why} needs {percent(most / base - 1)} more than 1F1B's largest rank; "
        + f"remedies: {', or '.join(helps)}",
    ]


def messages_per_microbatch(schedule: Schedule) -> tuple[int, float]:
    """Return how many activations and gradients of a microbatch cross from device to device.

    And of 1F1B's; 1 on one device, where none has any.
    """
    pairs = zip(schedule.placement, schedule.placement[1:], strict=False)
    messages, least = (
        2 * schedule.slices * sum(here != there for here, there in pairs),
        2 * (schedule.num_devices - 1),
    )
    return messages, messages / least if least else 1.0


def prices_told(costs: Costs) -> list[str]:
    """Return lines on what a pass takes beside its work, and on what was measured or assumed."""
    exchanges = [
        sum(costs.exchanges_us(kind, stage) for stage in range(costs.num_stages))
        for kind in (Kind.F, Kind.B, Kind.BW)
    ]
    shown = ", ".join(
        f"{kind} {fixed(each / 1000)} ms"
        for kind, each in zip((Kind.F, Kind.B, Kind.BW), exchanges, strict=True)
    )
    lines = [
        f"{fixed(costs.send_us)} us per P2P message, {fixed(costs.host_us)} us of launch overhead "
        "per pass"
    ]
    if any(exchanges):
        lines.append(f"exposed collectives per microbatch: {shown}")
    if costs.joint:
        lines.append(f"overlapped passes: costs of {len(costs.joint)} pairs of stages")
    if costs.hidden_share is not None:
        share = percent(costs.hidden_share)
        other = " for other pairs" if costs.joint else ""
        lines.append(f"overlapped passes hide {share} of their communication{other}")
    untold = "the costs file does not name the source of its costs"
    return [*lines, *(list(costs.sources_told()) or [untold])]


def joint_told(schedule: Schedule) -> str:
    """Return how many forwards run beside a backward."""
    forwards = schedule.num_stages * schedule.num_microbatches
    return f"{len(schedule.joint):,} of {forwards:,} forwards overlap with a backward"


def argument(value: float) -> str:
    """Return the shortest text of a number that reads back equal, for a command line."""
    return repr(float(value)).removesuffix(".0")


def note(numbers: RunNumbers) -> str:
    """Return the numbers that stand beside a schedule's title."""
    peak = f"{fixed(max(numbers.peak_chunks))} chunks"
    if numbers.peak_bytes is not None:
        peak = f"{fixed(max(numbers.peak_bytes) / GIB)} GiB"
    return (
        f"bubble {percent(numbers.timeline.bubble)}, "
        f"span bubble {percent(numbers.timeline.span_bubble)}, "
        f"peak {peak} ({percent(numbers.relative_peak)} of 1F1B)"
    )


def idle_told(timeline: Timeline, costs: Costs | None = None) -> list[str]:
    """Return what devices idle on average, which one holds the others up, and what would help.

    The bubble counts against the busiest device alone, and hides what others wait for it; nothing
    is told where they work alike.
    """
    work = timeline.work
    mean, most = sum(work) / len(work), max(work)
    if most <= mean * (1 + WORTH_TELLING):
        return []
    told = [
        f"{percent(timeline.mean_idle)} of the step, on average over the ranks",
        f"rank {work.index(most)} is the bottleneck: {most / mean:.3g}x the mean work per rank",
    ]
    if costs is None or costs.layers is None:
        return told
    placement = timeline.schedule.placement
    pieces = Pieces.of(costs, costs.layers)
    layers = pieces.balanced(sum(costs.layers), placement)
    sizes = placement, len(work), timeline.schedule.num_microbatches
    least, now = (pieces.costs(each).busy_us(*sizes) for each in (layers, costs.layers))
    if least < now * (1 - WORTH_TELLING):
        split = ",".join(map(str, layers))
        told.append(f"layers {split} would reduce it by {percent(1 - least / now)}")
    return told


def enough(held: float) -> str:
    """Return what must be held in 6 digits, rounded up, so that it fits the limit they say."""
    # less what a limit may be exceeded by, or sums of fractions would be rounded up a digit
    rounded = Context(prec=6, rounding=ROUND_CEILING).create_decimal(held * (1 - 1e-9))
    return f"{float(rounded):.6g}"


def fixed(value: float, digits: int = 4) -> str:
    """Return a number with so many digits and no exponent, thousands apart: 14,570 or 0.0123."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def time_text(value: float, in_us: bool) -> str:
    """Return a time of the costs: in ms where those are in us, else as it is."""
    return f"{fixed(value / 1000, 5)} ms" if in_us else fixed(value, 6)


def percent(share: float) -> str:
    """Return a share as text; what rounds to nothing is nothing."""
    return f"{100 * share:.1f} %".replace("-0.0", "0.0")


def labelled(label: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    """Return the lines with the label before the first."""
    return [(label if at == 0 else "", line) for at, line in enumerate(lines)]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows under the first as a plain table: names left, numbers right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        name, *rest = row
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def comparison_rows(numbers: Sequence[RunNumbers]) -> list[list[str]]:
    """Return a heading and a row per schedule: memory, bubbles, time, communication."""
    in_bytes = any(each.peak_bytes is not None for each in numbers)
    heading = ["schedule", "peak", "of 1F1B", "bubble", "span bubble", "makespan", "messages"]
    rows = [heading]
    for each in numbers:
        timeline = each.timeline
        messages, share = messages_per_microbatch(timeline.schedule)
        peak = f"{fixed(max(each.peak_chunks))} chunks"
        if in_bytes and each.peak_bytes is not None:
            peak = f"{fixed(max(each.peak_bytes) / GIB)} GiB"
        rows.append(
            [
                plain(timeline.schedule.name),
                peak,
                percent(each.relative_peak),
                percent(timeline.bubble),
                percent(timeline.span_bubble),
                time_text(timeline.makespan, in_bytes),
                f"{messages} ({share:.3g} x)",
            ]
        )
    return rows
