"""Critical path of one microbatch, as the basis of lower bounds."""

from typing import NamedTuple

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.placement import Placement


class Ways(NamedTuple):
    """Shortest times on the path of one microbatch, by stage."""

    forward: tuple[float, ...]  # until F(s) can start
    round_trip: tuple[float, ...]  # from the start of F(s) to the end of B(s)
    drain: tuple[float, ...]  # from the end of B(s) to the end of B(0) and its W


def ways_of(costs: Costs, placement: Placement) -> Ways:
    """Return the shortest times for a placement's stages."""
    stages = len(placement)
    away = [placement[stage] != placement[stage - 1] for stage in range(1, stages)]
    hop = [costs.message_us(s, s + 1) if far else 0.0 for s, far in enumerate(away)]
    forward, drain = [0.0], [costs.weight_us[0]]
    for stage in range(1, stages):
        forward.append(forward[-1] + costs.forward_us[stage - 1] + hop[stage - 1])
        drain.append(drain[-1] + costs.backward_us[stage - 1] + hop[stage - 1])
    trip = [costs.forward_us[-1] + costs.backward_us[-1]]
    for stage in reversed(range(stages - 1)):
        own = costs.forward_us[stage] + costs.backward_us[stage]
        trip.append(trip[-1] + own + 2 * hop[stage])
    return Ways(tuple(forward), tuple(reversed(trip)), tuple(drain))
