"""Memory of a rank over time, as a step curve for figures and traces."""

from megatron_vshape.core.check.simulate import costs_of, held_curve
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import PROCESSOR
from megatron_vshape.core.model.placement import chunks_of
from megatron_vshape.core.model.schedule import Timeline


def held_steps(timeline: Timeline, costs: Costs, device: int) -> list[tuple[float, float]]:
    """Return (time, memory from then on) at each change, in the unit of the costs.

    A simulated and a measured timeline have the same steps at different times, because allocation
    and freeing follow from the pass order. The last step is to zero.
    """
    costs = costs_of(timeline.schedule, costs)
    curve = held_curve(timeline.schedule, costs, device)
    # The second pass of an F&B pair starts with its F, so it is not a separate step.
    beside = set(timeline.schedule.overlapped_pairs().values())
    pairs = [
        (slot, held)
        for slot, held in zip(timeline.slots(device), curve, strict=True)
        if slot.work.kind.resource == PROCESSOR and slot.work not in beside
    ]
    slots, during = [slot for slot, _ in pairs], [held for _, held in pairs]
    steps: list[tuple[float, float]] = []

    def step(time: float, held: float) -> None:
        if steps and steps[-1][0] == time:
            steps.pop()
        if held != (steps[-1][1] if steps else 0.0):
            steps.append((time, held))

    for at, slot in enumerate(slots):
        step(slot.start, during[at])
        if at + 1 == len(slots):
            step(slot.end, 0.0)
            break
        # Between two passes, the memory is that of the next pass without its new allocations.
        work = slots[at + 1].work
        new = costs.changes(work.kind)[0][work.stage] + costs.works(work.kind)[work.stage]
        step(slot.end, during[at + 1] - new)
    return steps


def costs_up_to(timeline: Timeline, costs: Costs, chunk: int) -> Costs:
    """Return the costs with the memory of the chunks up to `chunk` only."""
    chunks = chunks_of(timeline.schedule.placement)
    costs = costs_of(timeline.schedule, costs)

    def early(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(
            value if mine <= chunk else 0.0 for value, mine in zip(values, chunks, strict=True)
        )

    held = {name: early(each) for name, each in costs.lists().items() if not name.endswith("_us")}
    return costs.having(**held)
