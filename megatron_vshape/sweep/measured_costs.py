"""Measured costs in place of analytic ones, where a costs file is for the same shapes."""

from dataclasses import dataclass

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.layers import Pieces
from megatron_vshape.sweep.files import Loaded, Measured, SweepError
from megatron_vshape.sweep.grid import Combination

Key = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """The costs files of a sweep, taken apart, by what they were measured with.

    One device was measured: the pieces are without communication, and nothing is recomputed.
    """

    pieces: dict[Key, Pieces]

    @classmethod
    def load(cls, loaded: Loaded) -> "MeasuredCosts":
        """Return the costs files that the sweep names.

        Raises:
            ScheduleError: one cannot be read, or has too few stages to tell the ends apart.
        """
        pieces = {}
        for entry in loaded.sweep.measured_costs:
            path = loaded.path.parent / entry.costs
            costs = Costs.load(path)
            if costs.num_stages < 3:
                raise SweepError(
                    f"{path} has {costs.num_stages} stages; a first, a middle and a last one are "
                    "needed"
                )
            even = (entry.layers_per_stage,) * costs.num_stages
            pieces[_key(entry)] = Pieces.of(costs, costs.layers or even)
        return cls(pieces)

    def find(self, it: Combination) -> Pieces | None:
        """Return the costs measured with the combination's shapes; None if there are none."""
        return self.pieces.get(_key(it))


def _key(it: Measured | Combination) -> Key:
    return (it.sequence_length, it.microbatch_size, it.tensor_parallel, it.context_parallel)
