"""Plans by name: the adaptive scheduler at the memory of a published schedule."""

from dataclasses import replace

from megatron_vshape.core.catalogue import make
from megatron_vshape.core.costs import Costs, regroup
from megatron_vshape.core.passes import ScheduleError
from megatron_vshape.core.placement import Placement
from megatron_vshape.core.schedule import Schedule
from megatron_vshape.core.simulate import peak_held, simulate, unit_costs
from megatron_vshape.core.verify import verify

MEMORY_NAMES = ("v-min", "v-half", "v-zb")
PLUS = "+"


def make_plus(
    name: str, num_devices: int, num_microbatches: int, costs: Costs | None = None
) -> Schedule:
    """Return the best order found for `costs` within what `name` without its plus holds.

    Never slower than that schedule itself. Without costs every chunk pass takes one unit.

    Raises:
        ScheduleError: the name is not one of MEMORY_NAMES with a plus, or the costs are of stages
            that the schedule's cannot be made of.
    """
    base = name.removesuffix(PLUS)
    if base not in MEMORY_NAMES or base == name:
        known = ", ".join(each + PLUS for each in MEMORY_NAMES)
        raise ScheduleError(f"there is no schedule {name!r:.40}; with a plus there are {known}")
    published = make(base, num_devices, num_microbatches)
    costs = unit_costs(published) if costs is None else costs
    costs = regroup(costs, published.num_stages, name)
    limit = peak_held(published, costs)
    made = make_within(costs, num_devices, num_microbatches, limit, published.placement)
    best = min((made, published), key=lambda each: simulate(each, costs).makespan)
    return replace(best, name=name)


def make_within(
    costs: Costs,
    num_devices: int,
    num_microbatches: int,
    limit: float | tuple[float, ...],
    placement: Placement,
) -> Schedule:
    """Return the adaptive scheduler's order for a limit in the costs' unit, proved to keep it.

    The placement is the caller's: a model is built for it.

    Raises:
        ScheduleError: nothing fits; the text says the least limit that does.
    """
    # The search brings numba along, which takes a second to import; the names here do not need it.
    from megatron_vshape.core.search import plan

    made = plan(costs, num_devices, num_microbatches, limit, placements=[placement]).schedule
    verify(made, limit, regroup(costs, made.num_stages, "the plan"))
    return replace(made, name="auto")
