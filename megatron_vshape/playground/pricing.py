"""From the costs that the page shows to the costs of a schedule's stages."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_vshape.core.costs import Costs
from megatron_vshape.core.passes import ScheduleError
from megatron_vshape.playground.request import CostChoice, FieldError


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

    def costs_for(self, num_devices: int, num_stages: int) -> Costs:
        """Return the costs of `num_stages` stages on `num_devices` devices.

        Raises:
            FieldError: the file's stages cannot be added up to these.
        """
        if self.measured is not None:
            return _regroup(self.measured, num_stages)
        choice = self.choice
        costs = Costs.uniform(
            num_devices, num_stages, choice.forward, choice.backward, choice.weight, choice.send
        )
        ends = ((0, choice.embedding), (num_stages - 1, choice.head))
        for stage, extra in ends:
            costs = replace(
                costs,
                forward_us=_added(costs.forward_us, stage, extra.forward),
                backward_us=_added(costs.backward_us, stage, extra.backward),
                weight_us=_added(costs.weight_us, stage, extra.weight),
                held_after_forward_bytes=_added(costs.held_after_forward_bytes, stage, extra.held),
                held_after_backward_bytes=_added(
                    costs.held_after_backward_bytes, stage, extra.held
                ),
            )
        return costs


def _added(values: tuple[float, ...], at: int, more: float) -> tuple[float, ...]:
    return (*values[:at], values[at] + more, *values[at + 1 :])


def _regroup(costs: Costs, num_stages: int) -> Costs:
    """Return the costs of a coarser cut of the same model: neighbouring stages added up."""
    size, rest = divmod(costs.num_stages, num_stages)
    if rest or not size:
        raise FieldError(
            "costs",
            f"the costs file is for {costs.num_stages} stages, this schedule has {num_stages}; "
            f"the file needs {num_stages} or a multiple of it",
        )

    def sums(values: Sequence[float]) -> Iterator[float]:
        for first in range(0, len(values), size):
            yield math.fsum(values[first : first + size])

    return replace(
        costs,
        forward_us=tuple(sums(costs.forward_us)),
        backward_us=tuple(sums(costs.backward_us)),
        weight_us=tuple(sums(costs.weight_us)),
        held_after_forward_bytes=tuple(sums(costs.held_after_forward_bytes)),
        held_after_backward_bytes=tuple(sums(costs.held_after_backward_bytes)),
    )
