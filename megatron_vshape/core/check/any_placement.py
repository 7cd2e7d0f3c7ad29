"""Lower bound over all placements of the same stages.

This is weaker than the bound of one placement, and shows the possible gain of other placements. A
placement does not change the work of stages, the path of a microbatch, or the minimum lifetime of
its activations.
"""

from collections.abc import Sequence
from itertools import accumulate

from megatron_vshape.core.check.relax import split_no_slower
from megatron_vshape.core.model.costs import Costs


def bound_of_any_placement(
    costs: Costs, num_microbatches: int, limits: Sequence[float], span: bool = False
) -> float:
    """Return a lower bound over all schedules within the limits and all placements.

    * The devices share the work of all microbatches. The device after k others starts after k
      stages and k messages (this does not count for the span).
    * A microbatch passes all stages forward and backward, and every device at least once.
    * A stage works on all microbatches.
    * Activations of a stage live at least until the last stage and back. All devices together
      provide their limits over time.
    """
    costs, devices = split_no_slower(costs), len(limits)
    stages = range(costs.num_stages)
    both = [costs.forward_us[stage] + costs.backward_us[stage] for stage in stages]
    work = [time + weight for time, weight in zip(both, costs.weight_us, strict=True)]
    way = sum(both) + 2 * (devices - 1) * costs.send_us + costs.weight_us[0]
    ahead = list(accumulate(costs.forward_us[: devices - 1], initial=0.0))
    starts = sum(ahead) + costs.send_us * sum(range(devices))
    shared = num_microbatches * sum(work) + (0.0 if span else starts)
    trip = list(accumulate(reversed(both)))[::-1]
    area = sum(
        costs.held_after_forward_bytes[stage] * trip[stage]
        + costs.held_after_backward_bytes[stage] * costs.weight_us[stage]
        for stage in stages
    )
    memory = sum(limits) - sum(costs.fixed_bytes((0,) * costs.num_stages, devices))
    held = num_microbatches * area / memory if memory > 0 else 0.0
    shared += devices * num_microbatches * costs.device_us()
    bound = max(shared / devices, num_microbatches * max(work), held)
    return max(bound, way) * (1 - 1e-9)
