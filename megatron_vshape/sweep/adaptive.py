"""The adaptive plan as a method of the sweep: the best order for these costs and this memory."""

from megatron_vshape.core.costs import Costs
from megatron_vshape.core.schedule import Schedule
from megatron_vshape.sweep.files import SweepError


def plan_adaptive(
    num_devices: int, num_microbatches: int, costs: Costs, limit_bytes: float
) -> Schedule:
    """Return the order that the planner finds under `limit_bytes` per device.

    Raises:
        SweepError: nothing fits, or this version has no planner yet.
    """
    raise SweepError("this version has no adaptive planner; leave the schedule 'adaptive' out")
