"""Measured costs that replace counted ones for matching sizes."""

from collections.abc import Mapping

from megatron_vshape.core.model.costs import Costs, without_copies
from megatron_vshape.core.model.layers import Pieces
from megatron_vshape.core.planner.vocabulary import tells_shared
from megatron_vshape.tuning.configurations import SweepError
from megatron_vshape.tuning.files import Loaded
from megatron_vshape.tuning.predictor import Sizes

MeasuredCosts = Mapping[Sizes, Pieces]
"""Costs per layer from a sweep's costs files, by their settings.

One device was measured, so the pieces have no communication and no recomputation.
"""


def load_measured(loaded: Loaded) -> MeasuredCosts:
    """Load the costs files of the sweep.

    Raises:
        ScheduleError: a file cannot be read, or has too few stages to separate the first and the
            last.
    """
    if loaded.sweep.measured_costs and loaded.subject.command.pattern:
        raise SweepError(
            f"{loaded.path}: measured_costs has costs of identical layers, and those of "
            "--hybrid-layer-pattern differ: remove measured_costs"
        )
    pieces = {}
    for entry in loaded.sweep.measured_costs:
        path = loaded.path.parent / entry.costs
        costs = Costs.load(path)
        if costs.num_stages < 3:
            raise SweepError(
                f"{path} has {costs.num_stages} stages; a first, a middle and a last one are needed"
            )
        if tells_shared(costs):
            raise SweepError(
                f"{path} is of a vocabulary that all devices share: a sweep needs costs of stages "
                "that have the model's ends, and shares those itself"
            )
        even = (entry.layers_per_stage,) * costs.num_stages
        # The cluster file specifies the link for copies.
        shards = entry.tensor_parallel, entry.context_parallel
        sizes = entry.sequence_length, entry.microbatch_size, *shards
        pieces[sizes] = Pieces.of(without_copies(costs), costs.layers or even)
    return pieces
