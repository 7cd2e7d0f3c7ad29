"""The adaptive plan as a method of the sweep: the best order for these costs and this memory."""

from collections.abc import Iterator, Sequence

from megatron_vshape.core import catalogue
from megatron_vshape.core.costs import Costs
from megatron_vshape.core.passes import ScheduleError
from megatron_vshape.core.placement import Placement, looping, v_shape
from megatron_vshape.core.schedule import Schedule, Timeline
from megatron_vshape.core.simulate import simulate
from megatron_vshape.core.verify import verify
from megatron_vshape.sweep.files import SweepError
from megatron_vshape.sweep.grid import Combination

KNOWN = ("v-zb", "v-half", "v-min", "interleaved-1f1b")
"""Where one of them is on the placement, fits and is better than the plan, it is the plan."""


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
    found: list[Schedule] = []
    reasons: list[str] = []
    for schedule in _candidates(combination, placement, costs, limits_bytes, spans_count, reasons):
        try:
            verify(schedule, limits_bytes, costs)
            found.append(schedule)
        except ScheduleError as error:
            reasons.append(str(error).splitlines()[0])
    if not found:
        raise SweepError(reasons[0])

    timelines = (simulate(schedule, costs) for schedule in found)
    return min(timelines, key=lambda each: each.span if spans_count else each.makespan)


def _candidates(
    combination: Combination,
    placement: Placement,
    costs: Costs,
    limits_bytes: Sequence[float],
    spans_count: bool,
    reasons: list[str],
) -> Iterator[Schedule]:
    """Yield the planner's order and the catalogue's; why there is no plan goes to `reasons`."""
    # Planning needs numpy, and numba to be quick; a sweep without this method needs neither.
    from megatron_vshape.core.search import Objective, plan

    sizes = (combination.pipeline_parallel, combination.num_microbatches)
    objective = Objective.SPAN if spans_count else Objective.MAKESPAN
    try:
        yield plan(costs, *sizes, limits_bytes, objective, placements=[placement]).schedule
    except ScheduleError as error:
        reasons.append(str(error).splitlines()[0])
    for name in KNOWN:
        try:
            known = catalogue.make(name, *sizes)
        except ScheduleError:  # not every order exists for every number of microbatches
            continue
        if known.placement == placement:
            yield known
