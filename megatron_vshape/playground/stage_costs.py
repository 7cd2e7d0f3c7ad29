"""From the costs that the page shows to the costs of a schedule's stages."""

from megatron_vshape.core.ask import AUTO, Cut, Question
from megatron_vshape.core.model.costs import Costs, Piece, regroup
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import with_ends
from megatron_vshape.playground.request import CostChoice, Extra, FieldError
from megatron_vshape.view.numbers import base_peak

_CHUNKS = (4, 2, 1)
"""Stages a device that a plan's costs are added up to, the most first."""


class Pricing:
    """The costs of the model, ready to be cut into the stages of any schedule."""

    def __init__(self, choice: CostChoice) -> None:
        self.choice = choice
        self.measured: Costs | None = None
        if choice.file is not None:
            try:
                self.measured = Costs.from_json(choice.file.text)
            except ScheduleError as error:
                raise FieldError("costs", f"{choice.file.name}: {error}") from None

    @property
    def in_bytes(self) -> bool:
        """Return whether memory is bytes and time microseconds, not chunks and passes."""
        return self.measured is not None

    def plan_costs(self, num_devices: int, most_chunks: int) -> Costs:
        """Return the costs of as many stages as a plan of up to `most_chunks` a device may have.

        A costs file has them added up only where it tells more stages apart than that.
        """
        if self.measured is None:
            return self.costs_for(num_devices, most_chunks * num_devices)
        own, rest = divmod(self.measured.num_stages, num_devices)
        if rest or not own:
            raise FieldError(
                "costs",
                f"the costs are for {self.measured.num_stages} stages, which cannot be "
                "distributed over "
                f"{num_devices} devices",
            )
        fitting = [own, *(each for each in _CHUNKS if own % each == 0)]
        chunks = next(each for each in fitting if each <= most_chunks)
        return self.costs_for(num_devices, chunks * num_devices)

    def question(self, devices: int, microbatches: int, most_chunks: int) -> Question:
        """Return the question for the best order at these costs, or for what it then names."""
        costs = self.plan_costs(devices, most_chunks)
        return Question(AUTO, devices, microbatches, costs, self.cut(devices))

    def cut(self, devices: int) -> Cut:
        """Return what gives the costs of any number of stages on so many devices."""
        return lambda num_stages, _: self.costs_for(devices, num_stages)

    def base_peak(self, num_devices: int) -> float | None:
        """Return what 1F1B holds at these costs; None if a costs file does not say."""
        try:
            return base_peak(num_devices, self.costs_for(num_devices, num_devices))
        except FieldError:
            return None

    def costs_for(self, num_devices: int, num_stages: int) -> Costs:
        """Return the costs of `num_stages` stages on `num_devices` devices.

        Raises:
            FieldError: the file's stages cannot be added up to these.
        """
        if self.measured is not None:
            try:
                return regroup(self.measured, num_stages, "this schedule")
            except ScheduleError as error:
                raise FieldError("costs", str(error)) from None
        choice = self.choice
        costs = Costs.uniform(
            num_devices, num_stages, choice.forward, choice.backward, choice.weight, choice.send
        )
        return with_ends(costs, *map(_piece, (choice.embedding, choice.head)))


def _piece(more: Extra) -> Piece:
    return Piece(more.forward, more.backward, more.weight, more.held, more.held)
