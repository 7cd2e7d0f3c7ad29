"""Weight gradients that a B can compute while it waits for other ranks of its stage."""

import itertools
import math
from typing import NamedTuple

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Timeline
from megatron_vshape.core.program.lowering import needed_us


class Beside(NamedTuple):
    """The W right after a B, and the share of its jobs that B can run without delay."""

    weights: Pass
    share: float  # above 0, at most 1


def deferred_weight_overlap(timeline: Timeline, ties_ends: bool = False) -> dict[Pass, Beside]:
    """Return for each B the next W whose jobs it can run between its own kernels.

    With tensor parallelism, B waits in every layer for an all-reduce, which a full backward hides
    behind its weight gradients. The W is of another microbatch or stage, so its jobs exist. B ends
    later by the jobs that it runs, but according to the timeline its reader does not wait. So no
    pass is delayed, and W ends earlier.

    Every sum keeps its order: B adds to gradients of norms and biases, W to those of linear layers.
    With `ties_ends` (tied embeddings), B of the first stage and W of the last both add to the
    embedding's gradient, so these two are not combined.

    The W right before a B is not used: it runs there because B's input has not arrived yet.
    """
    schedule = timeline.schedule
    ends = (0, schedule.num_stages - 1)
    needed = needed_us(timeline)
    overlapped = set(schedule.overlapped_pairs().values())
    found: dict[Pass, Beside] = {}
    for device in range(schedule.num_devices):
        slots = list(timeline.slots(device))
        for one, other in itertools.pairwise(slots):
            work, after = one.work, other.work
            if (work.kind, after.kind) != (Kind.B, Kind.W) or work[1:] == after[1:]:
                continue
            if work in overlapped:  # its F already fills the wait
                continue
            if ties_ends and (work.stage, after.stage) == ends:
                continue
            slack_us = needed.get(work, math.inf) - one.end
            length_us = other.end - other.start
            if slack_us > 0:
                share = 1.0 if slack_us >= length_us else slack_us / length_us
                found[work] = Beside(after, share)
    return found
