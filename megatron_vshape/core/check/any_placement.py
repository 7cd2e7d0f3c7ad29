"""A lower bound for every placement of the same stages: which stages share a device is left open.

Weaker than a placement's own bound, and what the others may still gain. Where stages lie does not
change their work, the way of a microbatch through all of them, or how long it is held at least.
"""

from collections.abc import Sequence
from itertools import accumulate

from megatron_vshape.core.check.relax import split_no_slower
from megatron_vshape.core.model.costs import Costs


def bound_of_any_placement(
    costs: Costs, num_microbatches: int, limits: Sequence[float], span: bool = False
) -> float:
    """Return a value that no order within the limits is below, wherever the stages lie.

    * The devices share the work of all microbatches. The one after k others begins with a stage
      after k others, k messages later; for the span that counts for nothing.
    * A microbatch passes all stages forward and back, and every device once at least.
    * A stage works for all microbatches.
    * A microbatch is held on a stage for as long as it takes to the last stage and back; all
      devices together can give their limits, all the time.
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
