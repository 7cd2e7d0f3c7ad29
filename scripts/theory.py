"""The theory table: peak memory and bubble of schedules, made or from their building blocks.

In addition to the published schedules, it has earlier methods that the paper (arXiv 2405.15362)
compares: GEMS and Chimera, which store the model twice, in opposite directions, and
BPipe, which moves activations between devices. All figures are for equal passes, free messages.
"""

import itertools
import math
from dataclasses import dataclass, replace

from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import v_shape
from megatron_vshape.core.paper.blocks import BlockPass, BuildingBlock, one_f_one_b
from megatron_vshape.core.paper.catalogue import make

THEORY = ("1f1b", "v-min", "v-half", "v-zb")
"""The rows of the paper's table of memory and bubble."""

ATTEMPTS = ("gems", "chimera", "bpipe")
"""Earlier methods, analysed but not executable."""


@dataclass(frozen=True, slots=True)
class Analysis:
    """Figures of a schedule: memory in chunks, time in chunk passes.

    A chunk is 1 / (2 d) of the model, so that 1F1B needs 2 d.
    """

    peak: float
    overhead: float  # makespan - work
    span_overhead: float  # longest time of one device - work: the cost of a step without barrier
    note: str = ""
    repeats: bool = False  # whether the bubble grows with every microbatch


def analyse(name: str, num_devices: int, num_microbatches: int) -> Analysis:
    """Return the figures of a published schedule or of one of `ATTEMPTS`.

    Raises:
        ScheduleError: there is no such schedule, or a count is impossible.
    """
    attempts = {"gems": _gems, "chimera": _chimera, "bpipe": _bpipe}
    if name in attempts:
        if num_devices < 2 or num_devices % 2 or num_microbatches < 1:
            raise ScheduleError(
                f"{name} is analysed for an even number of devices and at least 1 microbatch, not "
                f"for {num_devices} devices and {num_microbatches}"
            )
        return attempts[name](num_devices, num_microbatches)
    schedule = make(name, num_devices, num_microbatches)
    timeline = simulate(schedule)
    span_overhead = timeline.span - timeline.busy
    return Analysis(max(peak_held(schedule)), timeline.overhead, span_overhead)


def _bidirectional_block(
    name: str, num_devices: int, interval: int, hop_slots: int, delay_slots: int
) -> BuildingBlock:
    """Return the block of two microbatches in opposite directions.

    Stages d to 2 d - 1 are the second copy of the model, from the last device to the first.
    Forwards move by `hop_slots`, full backwards by 2 slots, without a gap at the last stage; the
    second microbatch starts `delay_slots` later.
    """
    d = num_devices
    passes = []
    for copy, device in itertools.product(range(2), range(d)):
        start_slot = copy * delay_slots
        backward_slot = start_slot + hop_slots * (d - 1) + 1 + 2 * (d - 1 - device)
        passes.append(
            BlockPass(Pass(Kind.F, copy * d + device, 0), start_slot + hop_slots * device)
        )
        passes.append(BlockPass(Pass(Kind.BW, copy * d + device, 0), backward_slot, 2))
    return BuildingBlock(name, d, v_shape(d), interval, tuple(passes))


def _gems(num_devices: int, num_microbatches: int) -> Analysis:
    """Return GEMS: a microbatch enters at one device when the other's backward leaves there.

    Its forwards follow the backwards through the devices at their pace, so that a device stores
    one microbatch at a time and is idle for most of it.
    """
    d, m = num_devices, num_microbatches
    half = 2 * d + 1  # slots until the second microbatch reaches the last device of the first
    block = _bidirectional_block("gems", d, interval=2 * half, hop_slots=2, delay_slots=half)
    idle = m * half - 3 * m
    return Analysis(
        peak=2 * max(block.peaks()),
        overhead=2 * (idle + d - 1),
        span_overhead=2 * idle,
        note="two copies of the weights",
        repeats=True,
    )


def _chimera(num_devices: int, _num_microbatches: int) -> Analysis:
    """Return Chimera: 1F1B in both directions at once, half of the microbatches each.

    A device pairs a long lifespan with a short one, as in a V, but needs a second copy of
    the weights. The bubble is that of its paper: d / 2 - 1 forwards and d / 2 - 1 backwards.
    """
    interval = 6  # slots, in which a microbatch enters in either direction
    lives = sorted(one_f_one_b(num_devices).lives().items())
    lifespans = [end - start for _, (start, end) in lives]
    pairs = zip(lifespans, reversed(lifespans), strict=True)
    peak = max(sum(math.ceil(span / interval) for span in pair) for pair in pairs)
    idle = 3 * (num_devices // 2 - 1)
    return Analysis(
        peak=2 * peak,
        overhead=2 * idle,
        span_overhead=2 * idle,
        note="two copies of the weights; an even number of microbatches",
    )


def _bpipe(num_devices: int, num_microbatches: int) -> Analysis:
    """Return BPipe: 1F1B whose first devices store activations on the last ones.

    Device i and its partner d - 1 - i share d + 1 microbatches, and one is in transfer.
    """
    plain = analyse("1f1b", num_devices, num_microbatches)
    bounds = one_f_one_b(num_devices).peak_bounds()
    shared = max(
        math.ceil((bound + partner + 1) / 2)
        for bound, partner in zip(bounds, reversed(bounds), strict=True)
    )
    note = "activations travel between devices i and d - 1 - i"
    return replace(plain, peak=2 * shared, note=note)
