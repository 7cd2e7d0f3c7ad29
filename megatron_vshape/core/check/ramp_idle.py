"""Lower bound from the idle time of a device in warm-up and cool-down, under its memory limit.

Until a time t after the start, a device works only on microbatches that can have arrived by then
and that fit its memory. The remaining time to t is idle. The same applies backwards from the end of
the step, with W before B and B before F. If the two intervals do not overlap, their idle times add
up.

For each pass type, the count of passes started by t is limited by

* the path from the start of the step, and the earlier passes on the device;
* the count of the previous pass type of the microbatch;
* the memory limit.

With a weight on memory (a Lagrange multiplier), the maximum work is a sum over single microbatches,
and each weight gives a bound. The bound does not assume that passes of a type run in microbatch
order.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.placement import Placement

Floats = npt.NDArray[np.float64]

_MAX_TIMES = 24
"""Maximum times evaluated at warm-up and cool-down."""
_MAX_MULTIPLIERS = 8
_MAX_INSIDE = 64
"""Further microbatches count as if all their work could run at once."""
_ROUNDING = 1e-9


class PathTimes(NamedTuple):
    """Shortest times on the path of one microbatch through the stages, per stage."""

    forward: tuple[float, ...]  # until F(s) can start
    round_trip: tuple[float, ...]  # from the start of F(s) to the end of B(s)
    drain: tuple[float, ...]  # from the end of B(s) to the end of B(0) and its W


def path_times(costs: Costs, placement: Placement) -> PathTimes:
    """Compute the shortest times on the path of one microbatch: passes and messages, no waiting."""
    stages = len(placement)
    is_remote = [placement[stage] != placement[stage - 1] for stage in range(1, stages)]
    message_us = [
        costs.message_us(s, s + 1) if is_far else 0.0 for s, is_far in enumerate(is_remote)
    ]
    forward, drain = [0.0], [costs.weight_us[0]]
    for stage in range(1, stages):
        forward.append(forward[-1] + costs.forward_us[stage - 1] + message_us[stage - 1])
        drain.append(drain[-1] + costs.backward_us[stage - 1] + message_us[stage - 1])
    trip = [costs.forward_us[-1] + costs.backward_us[-1]]
    for stage in reversed(range(stages - 1)):
        stage_us = costs.forward_us[stage] + costs.backward_us[stage]
        trip.append(trip[-1] + stage_us + 2 * message_us[stage])
    return PathTimes(tuple(forward), tuple(reversed(trip)), tuple(drain))


class _Line(NamedTuple):
    """Passes of a microbatch on a device, in order from one end of the step.

    A W belongs to its B: forwards it may follow after the end of B, backwards it precedes B.
    """

    start: Floats  # [pass, microbatch] earliest, from that end of the step
    ticks: Floats  # [pass]
    weight: Floats  # [pass] time of the W; 0 for F
    activation: Floats  # [pass] from the start of F to the end of B
    retained: Floats  # [pass] from the end of B to the end of W; 0 for F
    backwards: bool


def end_with_idle(
    costs: Costs,
    paths: PathTimes,
    stages: Sequence[int],
    num_microbatches: int,
    limits: tuple[float, float],
    bound: float,
    span: bool,
) -> float:
    """Compute a lower bound of a device's end: its work plus its idle time at start and end.

    Within a time t after the start, the device can only work on microbatches that have arrived and
    fit its memory; the rest of t is idle. The same applies backwards from the end of the step.

    Args:
        costs: costs with split backwards.
        paths: shortest times on the path of a microbatch.
        stages: stages of the device.
        num_microbatches: microbatches per step.
        limits: memory limit of the device, and of the device with stage 0.
        bound: a known lower bound; a greater one separates warm-up and cool-down more.
        span: time ends with the last pass of the device, not with the step.
    """
    lines = [
        _line(costs, paths, stages, num_microbatches, limits, backwards, span)
        for backwards in (False, True)
    ]
    work = num_microbatches * float((lines[0].ticks + lines[0].weight).sum())
    limit = _round_limit_down(costs, stages, limits[0])
    curves = []
    for line in lines:
        # Beyond `bound`, because the loop below raises it.
        times = _times_to_evaluate(line, 2 * bound)
        idle = np.maximum(times - _max_work(line, times, num_microbatches, limit), 0.0)
        curves.append((times, np.maximum.accumulate(idle)))  # idle time never decreases
    (start_times, start_idle), (end_times, end_idle) = curves
    total_idle = start_idle[:, None] + end_idle[None, :]
    total_times = start_times[:, None] + end_times[None, :]
    # A better bound separates the two intervals more, so repeat until nothing improves.
    while True:
        end = work + float(np.max(np.where(total_times <= bound, total_idle, 0.0)))
        if end <= bound:
            return bound
        bound = end


def _round_limit_down(costs: Costs, stages: Sequence[int], limit: float) -> float:
    """Round the limit down to a multiple of the activation size, if there is only one size."""
    sizes = {costs.held_after_forward_bytes[stage] for stage in stages}
    sizes |= {costs.held_after_backward_bytes[stage] for stage in stages}
    # With one size s, a device has k s in memory for an integer k: a limit of 5.9 s is one of 5 s.
    positive_sizes = [size for size in sizes if size > 0]
    if len(positive_sizes) != 1 or not np.isfinite(limit):
        return limit * (1 + _ROUNDING)
    return (
        float(np.floor(limit / positive_sizes[0] * (1 + _ROUNDING) + _ROUNDING)) * positive_sizes[0]
    )


def _line(
    costs: Costs,
    paths: PathTimes,
    stages: Sequence[int],
    num_microbatches: int,
    limits: tuple[float, float],
    backwards: bool,
    span: bool,
) -> _Line:
    stage_indices = list(stages)
    f, b, w, activation, retained, trip, drain, forward = (
        np.array(values, np.float64)[stage_indices]
        for values in (
            *(costs.forward_us, costs.backward_us, costs.weight_us),
            *(costs.held_after_forward_bytes, costs.held_after_backward_bytes),
            *(paths.round_trip, paths.drain, paths.forward),
        )
    )
    zeros = np.zeros(len(stage_indices))
    # Time counts from the end of the step, so a pass starts at its end: B at `drain`, and F earlier
    # in the step by the rest of the round trip.
    if backwards:
        start = np.concatenate([drain, (drain + trip - f)[::-1]])
        # The last B of a device precedes at least its W, even if stage 0 drains faster. For the
        # span, time counts from the end of the device's last pass.
        start += max(0.0, w[0] - start[0]) if not span else w[0] - start[0]
        ticks, weight = np.concatenate([b, f[::-1]]), np.concatenate([w, zeros])
        activation = np.concatenate([activation, activation[::-1]])
        retained = np.concatenate([retained, zeros])
    else:
        start = np.concatenate([forward, (forward + trip - b)[::-1]])
        ticks, weight = np.concatenate([f, b[::-1]]), np.concatenate([zeros, w[::-1]])
        activation = np.concatenate([activation, activation[::-1]])
        retained = np.concatenate([zeros, retained[::-1]])
    count = min(num_microbatches, _MAX_INSIDE)
    number = np.arange(count)
    # All devices run one pass of a type at a time; this device, one pass of any type.
    elapsed = np.concatenate([[0.0], np.cumsum(ticks)])
    starts = np.maximum(
        start[:, None] + number * _pace(costs, stage_indices, backwards)[:, None],
        start[0] + number * elapsed[1:, None] + elapsed[:-1, None],
    )
    entry = _entries(
        starts[0], limits[0], costs.held_after_forward_bytes[stage_indices[0]], trip[0]
    )
    # The span of a device does not depend on the time at which stage 0 ends.
    if not (span and backwards):
        size = costs.held_after_forward_bytes[0]
        origin = paths.drain[0] if backwards else 0.0
        first = _entries(np.full(count, origin), limits[1], size, paths.round_trip[0])
        entry = np.maximum(entry, first + (start[0] - origin))
    starts = np.maximum(starts, entry + (start - start[0])[:, None])
    return _Line(starts, ticks, weight, activation, retained, backwards)


def _pace(costs: Costs, stages: Sequence[int], backwards: bool) -> Floats:
    """Return the minimum interval of microbatches at each pass: the longest pass up to it."""
    outward, returning = (
        (costs.backward_us, costs.forward_us)
        if backwards
        else (costs.forward_us, costs.backward_us)
    )
    up = [max(outward[: stage + 1]) for stage in stages]
    down = [max(*outward, *returning[stage:]) for stage in reversed(stages)]
    return np.array(up + down)


def _entries(earliest: Floats, limit: float, size: float, trip: float) -> Floats:
    """Return the earliest times to enter a stage that each microbatch leaves after `trip`."""
    times = earliest.copy()
    # With k microbatches inside, the next one enters when the k-th before it has left.
    if size > 0 and limit / size < len(times):
        inside = max(1, int(limit / size * (1 + _ROUNDING) + _ROUNDING))
        for number in range(inside, len(times)):
            times[number] = max(times[number], times[number - inside] + trip)
    return times


def _times_to_evaluate(line: _Line, bound: float) -> Floats:
    """Return the times to evaluate: those right before new work can start."""
    times = np.unique(line.start)
    times = times[times <= bound]
    if len(times) > _MAX_TIMES:
        first_starts = line.start[:, : max(1, _MAX_TIMES // len(line.start))]
        times = np.unique(first_starts[first_starts <= bound])
    return np.concatenate([[0.0], times])


def _max_work(line: _Line, times: Floats, num_microbatches: int, limit: float) -> Floats:
    """Return, for each time, an upper bound of the work done by then."""
    elapsed = times[:, None, None] - line.start[None, :, :]  # [time, pass, microbatch]
    ticks, weight = line.ticks[None, :, None], line.weight[None, :, None]
    activation, retained = line.activation[None, :, None], line.retained[None, :, None]
    work, has_ended = np.clip(elapsed, 0.0, ticks), elapsed >= ticks
    has_weight = line.weight > 0
    if line.backwards:  # W before B, with the memory of B
        work = np.where(has_weight[:, None], work + weight, work)
        memory = np.where(has_weight[:, None], activation, -activation * has_ended)
    else:
        work = np.where(has_weight[:, None], work + np.clip(elapsed - ticks, 0.0, weight), work)
        freed = activation * has_ended - retained * (has_ended & (elapsed < ticks + weight))
        memory = np.where(has_weight[:, None], -freed, activation)
    work = np.where(elapsed > 0, work, -np.inf)
    # Microbatches after _MAX_INSIDE: all of their work, as soon as the last inside can start.
    num_outside = (times > line.start[0, -1]) * (num_microbatches - line.start.shape[1])
    outside_work = num_outside * float((line.ticks + line.weight).sum())
    best = np.full(len(times), np.inf)
    for multiplier in _multipliers(line, limit):
        gain, base = work - multiplier * memory, multiplier * limit if multiplier else 0.0
        if line.backwards:  # W of other microbatches, if worth their memory
            weight_gain = np.maximum(0.0, line.weight - multiplier * line.retained)
            gain -= weight_gain[:, None]
            base += float(weight_gain.sum()) * num_microbatches
        # By this time, a microbatch has run a prefix of its passes: the prefix with the greatest
        # gain.
        max_gain = np.maximum(np.cumsum(gain, axis=1).max(axis=1), 0.0).sum(axis=1)
        best = np.minimum(best, max_gain + base)
    max_work: Floats = best + outside_work
    return max_work


def _multipliers(line: _Line, limit: float) -> Iterator[float]:
    """Yield weights of memory (time per unit of memory) at which the maximum work may change."""
    yield 0.0
    if not np.isfinite(limit):
        return
    sign = np.where(line.weight > 0, -1.0, 1.0) * (-1 if line.backwards else 1)
    memory_sums = np.concatenate([[0.0], np.cumsum(sign * line.activation)])
    work_sums = np.concatenate([[0.0], np.cumsum(line.ticks + line.weight)])
    memory_steps = memory_sums[None, :] - memory_sums[:, None]
    work_steps = work_sums[None, :] - work_sums[:, None]
    usable = (np.abs(memory_steps) > _ROUNDING * memory_sums.max()) & (
        work_steps / np.where(memory_steps, memory_steps, 1) > 0
    )
    ratios = [*(work_steps[usable] / memory_steps[usable])]
    ratios += [
        weight_us / retained
        for weight_us, retained in zip(line.weight, line.retained, strict=True)
        if retained > 0
    ]
    # Every weight gives a valid bound, so a sample is enough.
    multipliers = np.unique(np.round(ratios, 12))
    yield from multipliers[:: -(-len(multipliers) // _MAX_MULTIPLIERS) or 1].tolist()
