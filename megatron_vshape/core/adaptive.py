"""Plans by name: the adaptive scheduler at the memory of a published schedule."""

from megatron_vshape.core.ask import PLUS_NAMES, Question, ask
from megatron_vshape.core.catalogue import no_such_schedule
from megatron_vshape.core.costs import Costs
from megatron_vshape.core.schedule import Schedule


def make_plus(
    name: str, num_devices: int, num_microbatches: int, costs: Costs | None = None
) -> Schedule:
    """Return the best order found for `costs` within what `name` without its plus holds.

    Never slower than that schedule itself. Without costs every chunk pass takes one unit.

    Raises:
        ScheduleError: the name is not one of PLUS_NAMES, or the costs are of stages that the
            schedule's cannot be made of.
    """
    if name not in PLUS_NAMES:
        raise no_such_schedule(name, PLUS_NAMES)
    return ask(Question(name, num_devices, num_microbatches, costs)).schedule
