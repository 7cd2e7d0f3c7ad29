"""Amounts of time and memory that costs have for every stage; `kinds` declares those of passes."""

from dataclasses import dataclass, field
from enum import StrEnum

GIB = 2.0**30
"""Bytes in a GiB."""


class Measure(StrEnum):
    """Kind of an amount; it decides how the amount scales and adds up."""

    TIME = "time"  # of computation
    COPY = "copy"  # time, proportional to the copied memory
    COLLECTIVE = "collective"  # time
    SAVING = "saving"  # time of a full backward relative to B + W; in costs of parts of a model
    ACTIVATION = "activation"  # memory of a microbatch
    WORKSPACE = "workspace"  # memory during a pass; the maximum of passes in sequence
    STATE = "state"  # memory between steps, independent of the microbatch


@dataclass(frozen=True, slots=True)
class Amount:
    """An amount per stage: its name in costs files, and its measure.

    >>> str(STATE_BYTES), STATE_BYTES.measure.value
    ('state_bytes', 'state')
    """

    name: str
    measure: Measure = field(compare=False)

    @property
    def is_time(self) -> bool:
        """Whether this is the duration of a pass or of its collectives."""
        return self.is_nonzero or self.measure is Measure.COLLECTIVE

    @property
    def is_nonzero(self) -> bool:
        """Whether this is the duration of a pass, which must be above 0."""
        return self.measure in (Measure.TIME, Measure.COPY)

    def __bool__(self) -> bool:
        """Whether this is an amount."""
        return bool(self.name)

    def __str__(self) -> str:
        return self.name


NO_AMOUNT = Amount("", Measure.TIME)
"""Of a kind of pass without such an amount; false as a boolean."""

STATE_BYTES = Amount("state_bytes", Measure.STATE)
"""Memory of a stage between steps: weights, gradients and optimizer state."""

DUMMY_BYTES = Amount("dummy_bytes", Measure.STATE)
"""Dummy gradients under Megatron's schedules; see `pieces.under_megatron`."""

SAVED_US = Amount("saved_us", Measure.SAVING)
"""Time of B + W minus that of a full backward, in costs of parts of a model."""

HIDDEN_EXCHANGE_US = Amount("hidden_exchange_us", Measure.SAVING)
"""Time of the collectives of B that a full backward hides."""
