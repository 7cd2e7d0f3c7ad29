"""Measured costs in place of analytic ones, where a costs file is for the same shapes."""

from dataclasses import dataclass
from pathlib import Path

from megatron_vshape.core.costs import Costs
from megatron_vshape.core.passes import ScheduleError
from megatron_vshape.sweep.files import Loaded, Measured, SweepError
from megatron_vshape.sweep.grid import Combination
from megatron_vshape.sweep.layer import Part

Key = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class MeasuredStage:
    """A costs file taken apart: what a middle stage takes, and the two ends beside it."""

    costs: Costs
    layers_per_stage: int

    @property
    def send_us(self) -> float:
        """Return the measured time of a message."""
        return self.costs.send_us

    def parts(self, first: Part, layer: Part, last: Part) -> tuple[Part, Part, Part]:
        """Return the three pieces with measured times and memory; parameters stay.

        One device was measured: the pieces are without communication, and nothing is recomputed.
        """
        middle = self._stage(self.costs.num_stages // 2)
        measured = middle.times(1 / self.layers_per_stage)
        return (
            _over(first, self._stage(0), middle),
            _with(layer, measured),
            _over(last, self._stage(self.costs.num_stages - 1), middle),
        )

    def _stage(self, stage: int) -> Part:
        costs = self.costs
        return Part(
            costs.forward_us[stage],
            costs.backward_us[stage],
            costs.weight_us[stage],
            costs.held_after_forward_bytes[stage],
            costs.held_after_backward_bytes[stage],
        )


def _with(part: Part, measured: Part) -> Part:
    return measured + Part(parameters=part.parameters)


def _over(part: Part, stage: Part, middle: Part) -> Part:
    """Return what the end's stage takes beyond a middle one, at least nothing."""
    more = stage + middle.times(-1.0)
    return Part(
        max(0.0, more.forward_us),
        max(0.0, more.backward_us),
        max(0.0, more.weight_us),
        max(0.0, more.kept_after_forward_bytes),
        max(0.0, more.kept_after_backward_bytes),
        part.parameters,
    )


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
    return MeasuredStage(costs, entry.layers_per_stage)
