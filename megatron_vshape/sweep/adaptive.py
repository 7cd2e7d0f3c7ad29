"""The adaptive plan as a method of the sweep: the best order for these costs and this memory."""

from collections.abc import Sequence

from megatron_vshape.core.ask import AUTO, Question, best_order
from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import Placement, looping, v_shape
from megatron_vshape.core.model.schedule import Objective, Timeline
from megatron_vshape.sweep.files import SweepError
from megatron_vshape.sweep.grid import Combination


def placements_of(num_devices: int) -> list[Placement]:
    """Return the placements that are planned for, each by itself.

    What the parameters leave of a device's memory differs: in a V the embedding and the head lie on
    one device, in a loop on two.
    """
    return [v_shape(num_devices), looping(num_devices, 2)]


def plan_adaptive(
    combination: Combination,
    placement: Placement,
    costs: Costs,
    limits_bytes: Sequence[float],
    spans_count: bool,
) -> Timeline:
    """Return the best order found on a placement with at most `limits_bytes` on each device.

    With `spans_count`, what counts is the longest time of one device, else that of all.

    Raises:
        SweepError: nothing fits.
    """
    least = min(limits_bytes)
    if least <= 0:
        raise SweepError(f"parameters and their states alone are {-least / 2**30:.1f} GiB too much")
    objective = Objective.SPAN if spans_count else Objective.MAKESPAN
    question = Question(
        AUTO,
        combination.pipeline_parallel,
        combination.num_microbatches,
        costs,
        limit=limits_bytes,
        objective=objective,
        placements=(placement,),
    )
    try:
        schedule = best_order(question).schedule
    except ScheduleError as error:
        raise SweepError(str(error).splitlines()[0]) from None
    return simulate(schedule, costs)
