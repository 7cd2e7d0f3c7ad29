"""Convert the playground's costs to costs of a schedule's stages."""

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.pieces import regroup, with_ends
from megatron_vshape.core.model.stage_costs import StageCosts
from megatron_vshape.core.request import PlanRequest, StageCostFunction
from megatron_vshape.core.schedule_names import AUTO
from megatron_vshape.playground.request import MOST_CHUNKS, CostChoice, FieldError
from megatron_vshape.view.numbers import base_peak

_CHUNKS = (4, 2, 1)
"""Chunks per rank that a plan's costs are merged to, most first."""


class Pricing:
    """Costs of the model, for the stages of any schedule."""

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
        """Whether memory is in bytes and time in microseconds, rather than chunks and passes."""
        return self.measured is not None

    def plan_costs(self, num_devices: int) -> Costs:
        """Return the costs of the stages of a plan; those of a file are merged only if too many."""
        if self.measured is None:
            return self.costs_for(num_devices, MOST_CHUNKS * num_devices)
        stages_per_device, remainder = divmod(self.measured.num_stages, num_devices)
        if remainder or not stages_per_device:
            raise FieldError(
                "costs",
                f"the costs are for {self.measured.num_stages} stages, which cannot be "
                f"distributed over {num_devices} ranks",
            )
        divisors = [
            stages_per_device,
            *(chunks for chunks in _CHUNKS if stages_per_device % chunks == 0),
        ]
        chunks = next(chunks for chunks in divisors if chunks <= MOST_CHUNKS)
        return self.costs_for(num_devices, chunks * num_devices)

    def question(self, devices: int, microbatches: int) -> PlanRequest:
        """Return the request for the best schedule at these costs."""
        costs = self.plan_costs(devices)
        return PlanRequest(AUTO, devices, microbatches, costs, self.cut(devices))

    def cut(self, devices: int) -> StageCostFunction:
        """Return a function from the number of stages to the costs on these devices."""
        return lambda num_stages, _: self.costs_for(devices, num_stages)

    def base_peak(self, num_devices: int) -> float | None:
        """Return the peak of 1F1B at these costs; None if the costs file does not allow it."""
        try:
            return base_peak(num_devices, self.costs_for(num_devices, num_devices))
        except FieldError:
            return None

    def costs_for(self, num_devices: int, num_stages: int) -> Costs:
        """Return the costs of `num_stages` stages on `num_devices` devices.

        Raises:
            FieldError: the stages of the file cannot be merged to these.
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
        ends = (StageCosts.of(*times) for times in (choice.embedding, choice.head))
        return with_ends(costs, *ends)
