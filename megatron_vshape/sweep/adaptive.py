"""The adaptive plan as a method of the sweep: the best order for these costs and this memory."""

from collections.abc import Sequence

from megatron_vshape.core.costs import Costs
from megatron_vshape.core.passes import ScheduleError
from megatron_vshape.core.schedule import Schedule
from megatron_vshape.core.verify import verify
from megatron_vshape.sweep.files import SweepError
from megatron_vshape.sweep.grid import Combination


def plan_adaptive(
    combination: Combination, costs: Costs, limits_bytes: Sequence[float], spans_count: bool
) -> Schedule:
    """Return the order that the planner finds with at most `limits_bytes` on each device.

    With `spans_count`, what counts is the longest time of one device, else that of all.

    Raises:
        SweepError: nothing fits.
    """
    # Planning needs numpy, and numba to be quick; a sweep without this method needs neither.
    from megatron_vshape.core.search import Objective, plan

    least = min(limits_bytes)
    if least <= 0:
        raise SweepError(f"parameters and their states alone are {-least / 2**30:.1f} GiB too much")
    try:
        found = plan(
            costs,
            combination.pipeline_parallel,
            combination.num_microbatches,
            limits_bytes,
            Objective.SPAN if spans_count else Objective.MAKESPAN,
        )
        verify(found.schedule)
    except ScheduleError as error:
        raise SweepError(str(error).splitlines()[0]) from None
    return found.schedule
