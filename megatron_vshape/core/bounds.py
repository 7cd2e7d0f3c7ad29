"""Proven lower bounds of makespan and span, and the least memory that anything fits."""

from collections.abc import Sequence

from megatron_vshape.core.costs import Costs
from megatron_vshape.core.placement import Placement, stages_of


def least_memory(costs: Costs, placement: Placement, num_devices: int) -> tuple[float, ...]:
    """Return what each device holds when microbatches run one after the other.

    No order needs less: before the first B of a microbatch on a device, all its F there have run.
    """
    least = []
    for stages in stages_of(placement, num_devices):
        held = [costs.held_after_forward_bytes[stage] for stage in stages]
        worst = sum(held)
        for at in range(len(stages) - 1, -1, -1):
            worst = max(worst, sum(held[:at]) + costs.held_after_backward_bytes[stages[at]])
        least.append(worst)
    return tuple(least)


def lower_bound(
    costs: Costs,
    placement: Placement,
    num_devices: int,
    num_microbatches: int,
    limits: Sequence[float],
    span: bool = False,
) -> float:
    """Return a value that no order within the limits is below."""
    heads = first_starts(costs, placement, num_devices)
    tails = last_ends(costs, placement, num_devices)
    best = costs.busy_us(placement, num_devices, num_microbatches)
    for device in range(num_devices):
        own = sum(
            costs.forward_us[s] + costs.backward_us[s] + costs.weight_us[s]
            for s in stages_of(placement, num_devices)[device]
        )
        work = own * num_microbatches
        if not span:
            best = max(best, heads[device] + work + tails[device])
    return best


def first_starts(costs: Costs, placement: Placement, num_devices: int) -> list[float]:
    """Return when each device's first pass can start: the first microbatch has to come there."""
    starts: dict[int, float] = {}
    clock = 0.0
    for stage, device in enumerate(placement):
        if stage and device != placement[stage - 1]:
            clock += costs.send_us
        starts.setdefault(device, clock)
        clock += costs.forward_us[stage]
    return [starts[device] for device in range(num_devices)]


def last_ends(costs: Costs, placement: Placement, num_devices: int) -> list[float]:
    """Return zero: a device may be the last to end, with W of its own."""
    return [0.0] * num_devices
