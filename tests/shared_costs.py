"""Costs with vocabulary parallelism, from the costs of embedding and output layer."""

from dataclasses import replace

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.pieces import Pieces
from megatron_vshape.core.model.stage_costs import StageCosts
from megatron_vshape.core.planner.vocabulary import shared_pieces


def shared_costs(
    costs: Costs,
    first: StageCosts,
    last: StageCosts,
    num_devices: int,
    sum_us: float,
    logits_bytes: float = 0.0,
) -> Costs:
    """Return costs in which every device has its part of the first and last piece."""
    stage = StageCosts.of(min(costs.forward_us), 0.0, 0.0)
    shared = shared_pieces(Pieces(stage, first, last, 0.0), num_devices, sum_us, logits_bytes)
    of_device = shared.of_device.amounts.items()
    extra_costs = {amount: (value,) * costs.num_stages for amount, value in of_device}
    return replace(costs.having(extra_costs), device_bytes=costs.device_bytes + shared.device_bytes)
