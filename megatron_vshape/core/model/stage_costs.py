"""Time and memory of one stage, or of another part of a model: a layer, the output layer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import fsum
from statistics import median
from typing import NamedTuple

from megatron_vshape.core.model.amounts import HIDDEN_EXCHANGE_US, SAVED_US, Amount, Measure
from megatron_vshape.core.model.kinds import (
    BASIC_AMOUNTS,
    REQUIRED_AMOUNTS,
    TIMES,
    Kind,
    ScheduleError,
    find_amount,
)


class Share(NamedTuple):
    """Layers of a stage by time, activation memory and state, in the unit that `Pieces.layer` is.

    The three are equal if all layers are identical. For a hybrid model, whose layers differ, the
    unit is a GPT's layer, attention and MLP.
    """

    time: float
    memory: float
    state: float

    @classmethod
    def of_stages(cls, layers: Sequence[float], shares: Sequence["Share"]) -> list["Share"]:
        """Compute the share of every stage.

        Args:
            layers: The number of layers of each stage, in model order.
            shares: The share of each layer, in model order; empty if all are identical: one each.
        """
        if not shares:
            return [cls(count, count, count) for count in layers]
        # With shares, layers are distinguishable, so a stage has a range of them, not a number.
        ends = accumulate(map(int, layers), initial=0)
        return [cls.total(shares[start:end]) for start, end in pairwise(ends)]

    @classmethod
    def total(cls, shares: Sequence["Share"]) -> "Share":
        """Add up the shares of several layers; a block of equal parts is exactly their number."""
        columns = zip(*shares, strict=True) if shares else ((), (), ())
        return cls(*(float(f"{fsum(column):.12g}") for column in columns))

    def over(self, units: "Share") -> "Share":
        """Divide by a unit; rounded, so that the parts of a unit add up to it exactly."""
        pairs = zip(self, units, strict=True)
        return Share(*(float(f"{amount / unit if unit else 0.0:.12g}") for amount, unit in pairs))

    def inverse(self) -> "Share":
        """Compute the share that turns a stage of this share into one unit."""
        return Share(*(1 / amount if amount else 0.0 for amount in self))


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Amounts of a part of a model, without launch overhead; missing ones are 0 or a default.

    A stage has the time of a full backward (default: that of B + W). Times of parts are added and
    subtracted, so they have instead the time that a full backward saves, `SAVED_US`, and the same
    of its collectives: see `as_part` and `stages_of_parts`.

    >>> layer = StageCosts.of(1.0, 2.0, 3.0, state_bytes=4.0)
    >>> layer.times(2).plus(layer)[Kind.W.time]
    9.0
    """

    amounts: Mapping[Amount, float]

    @classmethod
    def of(
        cls,
        forward_us: float,
        backward_us: float,
        weight_us: float,
        held_after_forward_bytes: float = 0.0,
        held_after_backward_bytes: float = 0.0,
        **optional: float,
    ) -> "StageCosts":
        """Make costs from the required amounts, and others by their names in costs files."""
        times = forward_us, backward_us, weight_us
        values = (*times, held_after_forward_bytes, held_after_backward_bytes)
        amounts = dict(zip(REQUIRED_AMOUNTS, values, strict=True))
        return cls(amounts | {find_amount(name): value for name, value in optional.items()})

    def __hash__(self) -> int:
        """Hash the amounts in any order, for caches of requests."""
        return hash(frozenset(self.amounts.items()))

    def __getitem__(self, amount: Amount) -> float:
        """Return the value of an amount; 0 if it is missing."""
        return self.amounts.get(amount, 0.0)

    def required(self, amount: Amount) -> float:
        """Return the value of an amount; raises ScheduleError if it is missing."""
        if amount not in self.amounts:
            raise ScheduleError(f"the costs have no {amount}, which a pass of this schedule has")
        return self.amounts[amount]

    @property
    def total_us(self) -> float:
        """Time of all passes of a microbatch with a split backward."""
        exchange_us = self[Kind.F.collective] + self[Kind.B.collective]
        forward_us, backward_us, weight_us = map(self.__getitem__, TIMES)
        return forward_us + backward_us + weight_us + exchange_us

    def compute_us(self, kind: Kind) -> float:
        """Return the computation time of a pass.

        Raises:
            ScheduleError: the costs have no such time.
        """
        if kind.time in self.amounts or (kind.time and kind in kind.does):
            return self.required(kind.time)
        # Zero for a simple kind without a time, a marker such as L: its only part is itself.
        return sum(self.compute_us(part) for part in kind.does if part is not kind)

    def collective_us(self, kind: Kind) -> float:
        """Return the time that a pass waits for collectives of its stage."""
        if kind.collective in self.amounts:
            return self.amounts[kind.collective]
        return sum(self.collective_us(part) for part in kind.does if part is not kind)

    def memory(self, kind: Kind) -> tuple[float, float, float]:
        """Return the memory that a pass allocates at its start, and retains and frees at its end.

        Raises:
            ScheduleError: the costs have no such memory.
        """
        amounts = kind.allocated, kind.retained, kind.freed
        allocated, retained, freed = (self.required(a) if a else 0.0 for a in amounts)
        return allocated, retained, freed

    def workspace(self, kind: Kind) -> float:
        """Return the workspace of a pass."""
        if kind.workspace in self.amounts:
            return self.amounts[kind.workspace]
        return max((self.workspace(part) for part in kind.does if part is not kind), default=0.0)

    def changed(self, changes: Mapping[Amount, float]) -> "StageCosts":
        """Replace or add amounts."""
        return StageCosts({**self.amounts, **changes})

    def increased(self, increases: Mapping[Amount, float]) -> "StageCosts":
        """Add to those of these amounts that the costs have."""
        return self.converted(lambda amount, value: value + increases.get(amount, 0.0))

    def without(self, amounts: Iterable[Amount]) -> "StageCosts":
        """Return the costs without these amounts."""
        removed = frozenset(amounts)
        return StageCosts({a: value for a, value in self.amounts.items() if a not in removed})

    def converted(self, convert: Callable[[Amount, float], float]) -> "StageCosts":
        """Return the costs with each value replaced by `convert(amount, value)`."""
        return StageCosts({a: convert(a, value) for a, value in self.amounts.items()})

    def times(self, factor: float) -> "StageCosts":
        """Scale all amounts but the workspace, because layers run one after another."""
        return self.scaled(Share(factor, factor, factor))

    def scaled(self, share: Share) -> "StageCosts":
        """Scale times, activation memory and state, each by its own factor."""
        factors = {
            Measure.TIME: share.time,
            Measure.COLLECTIVE: share.time,
            Measure.SAVING: share.time,
            Measure.COPY: share.memory,
            Measure.ACTIVATION: share.memory,
            Measure.STATE: share.state,
            Measure.WORKSPACE: 1.0 if share.time else 0.0,
        }
        return self.converted(lambda amount, value: factors[amount.measure] * value)

    def plus(self, part: "StageCosts") -> "StageCosts":
        """Add another part; the workspace is the maximum, because they run in sequence."""
        return StageCosts.total((self, part))

    def over(self, part: "StageCosts") -> "StageCosts":
        """Subtract a part, down to 0; a greater workspace counts in full."""

        # `plus` uses the maximum, which has no inverse: only a greater workspace is certain.
        def difference(amount: Amount, value: float) -> float:
            remainder = max(0.0, value - part[amount])
            is_workspace = amount.measure is Measure.WORKSPACE
            return value if is_workspace and remainder else remainder

        return self.converted(difference)

    def at_least(self, time_us: float) -> "StageCosts":
        """Set a minimum time per pass, since even a stage without layers has kernels."""
        return self.converted(
            lambda amount, value: max(time_us, value) if amount.is_nonzero else value
        )

    @classmethod
    def total(cls, parts: Sequence["StageCosts"]) -> "StageCosts":
        """Add up parts that run in sequence: their workspace is the maximum."""

        def combine(amount: Amount) -> float:
            values = [part[amount] for part in parts]
            return max(values) if amount.measure is Measure.WORKSPACE else fsum(values)

        return cls({amount: combine(amount) for amount in _amounts_of(parts)})

    @classmethod
    def middle(cls, parts: Sequence["StageCosts"]) -> "StageCosts":
        """Return the median of each amount."""
        amounts = _amounts_of(parts)
        return cls({amount: median(part[amount] for part in parts) for amount in amounts})

    def as_part(self) -> "StageCosts":
        """Return a stage's costs with the savings of a full backward instead of its time."""
        split_us = self[Kind.B.time] + self[Kind.W.time]
        savings = {
            SAVED_US: split_us - self.amounts.get(Kind.BW.time, split_us),
            HIDDEN_EXCHANGE_US: self[Kind.B.collective] - self.collective_us(Kind.BW),
        }
        return self.without((Kind.BW.time, Kind.BW.collective)).changed(savings)


def _amounts_of(parts: Iterable[StageCosts]) -> dict[Amount, None]:
    return dict.fromkeys(amount for part in parts for amount in part.amounts)


def extra_amounts_of(parts: Iterable[StageCosts]) -> set[Amount]:
    """Return the amounts of kinds of passes other than F, B, W and BW."""
    return _amounts_of(parts).keys() - {*BASIC_AMOUNTS, SAVED_US, HIDDEN_EXCHANGE_US}


def stages_of_parts(parts: Sequence[StageCosts]) -> tuple[StageCosts, ...]:
    """Return the costs of stages, with the time of a full backward instead of its savings.

    Optional amounts are included if they are above 0 on any stage; those of other kinds of passes
    if any of these has memory.
    """
    nonzero = {amount for part in parts for amount, value in part.amounts.items() if value > 0}
    extra_amounts = extra_amounts_of(parts)
    if all(amount.is_time for amount in extra_amounts & nonzero):
        extra_amounts = set()
    present = [a for a in BASIC_AMOUNTS if a in REQUIRED_AMOUNTS or a in nonzero]
    stages = []
    for part in parts:
        amounts = {amount: part[amount] for amount in (*present, *extra_amounts)}
        if SAVED_US in nonzero:
            # Measurement noise may report savings larger than a pass.
            min_us = max(part[Kind.B.time], part[Kind.W.time])
            full_us = part[Kind.B.time] + part[Kind.W.time] - part[SAVED_US]
            amounts[Kind.BW.time] = max(min_us, full_us)
        if HIDDEN_EXCHANGE_US in nonzero:
            exposed_us = part[Kind.B.collective] - part[HIDDEN_EXCHANGE_US]
            amounts[Kind.BW.collective] = max(0.0, exposed_us)
        stages.append(StageCosts(amounts))
    return tuple(stages)
