"""Compile the planner's inner loops, which otherwise every process would compile.

The plans are limited by steps, because compilation needs most of a minute but no steps.
"""

from megatron_vshape import Costs
from megatron_vshape.core.model.costs import with_copies
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.core.schedule_names import AUTO

if __name__ == "__main__":
    base = Costs.uniform(3, 12, 1, 2, 1, 0.05)
    with_full_backward = base.having(whole_backward_us=(2.5,) * 12)
    for costs in (base, with_copies(with_full_backward, 1.0)):
        plan_request(PlanRequest(AUTO, 3, 8, costs, limit=4.0, steps=20_000))
