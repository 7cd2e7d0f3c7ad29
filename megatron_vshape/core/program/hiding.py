"""Which weight gradients a B may compute while it waits for the other ranks of its stage."""

import itertools
import math
from typing import NamedTuple

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Timeline
from megatron_vshape.core.program.lowering import needed_us


class Beside(NamedTuple):
    """The W right after a B, and the share of its jobs for which that B has time."""

    weights: Pass
    share: float  # above 0, at most 1


def weights_beside(timeline: Timeline, ties_ends: bool = False) -> dict[Pass, Beside]:
    """Return, by B, the W right after it of which it may run jobs between its own kernels.

    With tensor parallelism B waits in every layer for a sum over ranks, which a whole backward
    hides behind its own weight gradients. The W is of another microbatch or stage, so that its
    jobs are there. B ends later by what it runs of them, and by the timeline never so late that
    its reader would wait for it; so nobody is delayed, and W is over sooner.

    Every sum keeps its order: a B adds to gradients of norms and biases, a W to those of linear
    layers. But with `ties_ends` the first stage's B and the last stage's W both add to that of the
    embedding, so those two do not mix.

    The W right before a B has no part in this: it stands there because B's input is not there yet.
    """
    schedule = timeline.schedule
    ends = (0, schedule.num_stages - 1)
    needed = needed_us(timeline)
    joint = set(schedule.beside().values())
    found: dict[Pass, Beside] = {}
    for device in range(schedule.num_devices):
        slots = list(timeline.slots(device))
        for one, other in itertools.pairwise(slots):
            work, after = one.work, other.work
            if (work.kind, after.kind) != (Kind.B, Kind.W) or work[1:] == after[1:]:
                continue
            if work in joint:  # an F runs while it waits
                continue
            if ties_ends and (work.stage, after.stage) == ends:
                continue
            slack_us = needed.get(work, math.inf) - one.end
            length_us = other.end - other.start
            if slack_us > 0:
                share = 1.0 if slack_us >= length_us else slack_us / length_us
                found[work] = Beside(after, share)
    return found
