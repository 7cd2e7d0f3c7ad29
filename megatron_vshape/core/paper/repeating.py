"""Step 2: copies of the building block, one every interval."""

from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Schedule, Timeline
from megatron_vshape.core.paper.building_block import BuildingBlock


def repeat(block: BuildingBlock, num_microbatches: int) -> Timeline:
    """Return the block repeated until `num_microbatches` are in; times are slots.

    A block cannot collide with its copies: `BuildingBlock` refuses one that would.
    """
    rows: list[list[tuple[int, int, Pass]]] = [[] for _ in range(block.num_devices)]
    for (kind, stage, within), start, length in block.passes:
        row = rows[block.placement[stage]]
        for copy, microbatch in enumerate(range(within, num_microbatches, block.num_microbatches)):
            begin = start + copy * block.interval
            row.append((begin, begin + length, Pass(kind, stage, microbatch)))
    for row in rows:
        row.sort()
    order = tuple(tuple(work for _, _, work in row) for row in rows)
    schedule = Schedule(block.name, block.num_devices, num_microbatches, block.placement, order)
    starts = tuple(tuple(float(start) for start, _, _ in row) for row in rows)
    ends = tuple(tuple(float(end) for _, end, _ in row) for row in rows)
    return Timeline(schedule, starts, ends)
