"""Measured costs in place of analytic ones, where a costs file is for the same shapes."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import Pieces
from megatron_vshape.sweep.files import Loaded, Measured, SweepError
from megatron_vshape.sweep.grid import Combination
from megatron_vshape.sweep.layer import Part

Key = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class MeasuredStage:
    """A costs file taken apart: what a layer takes, and the two ends beside theirs."""

    pieces: Pieces

    @property
    def send_us(self) -> float:
        """Return the measured time of a message."""
        return self.pieces.send_us

    def parts(self, first: Part, layer: Part, last: Part) -> tuple[Part, Part, Part]:
        """Return the three pieces with measured times and memory; parameters stay.

        One device was measured: the pieces are without communication, and nothing is recomputed.
        """
        pairs = (first, self.pieces.first), (layer, self.pieces.layer), (last, self.pieces.last)
        first, layer, last = (replace(part, **asdict(piece)) for part, piece in pairs)
        return first, layer, last


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """The costs files of a sweep by what they were measured with."""

    stages: dict[Key, MeasuredStage]

    @classmethod
    def load(cls, loaded: Loaded) -> "MeasuredCosts":
        """Return the costs files that the sweep names.

        Raises:
            SweepError: one cannot be read, or has too few stages to tell the ends apart.
        """
        stages = {}
        for entry in loaded.sweep.measured_costs:
            path = loaded.path.parent / entry.costs
            stages[_key(entry)] = _read(path, entry)
        return cls(stages)

    def find(self, it: Combination) -> MeasuredStage | None:
        """Return the costs measured with the combination's shapes; None if there are none."""
        return self.stages.get(_key(it))


def _key(it: Measured | Combination) -> Key:
    return (it.sequence_length, it.microbatch_size, it.tensor_parallel, it.context_parallel)


def _read(path: Path, entry: Measured) -> MeasuredStage:
    try:
        costs = Costs.load(path)
    except ScheduleError as error:
        raise SweepError(str(error)) from None
    if costs.num_stages < 3:
        raise SweepError(
            f"{path} has {costs.num_stages} stages; a first, a middle and a last one are needed"
        )
    even = (entry.layers_per_stage,) * costs.num_stages
    return MeasuredStage(Pieces.of(costs, costs.layers or even))
