"""Costs of parts of a model, and conversion to and from the costs of stages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import fsum
from operator import add, sub
from statistics import median
from typing import Any, Self

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import (
    DUMMY,
    EXCHANGES,
    HELD,
    KINDS,
    STATE,
    TIMES,
    WORKS,
    Kind,
    ScheduleError,
    other_amounts,
)


@dataclass(frozen=True, slots=True)
class Piece:
    """Times and memory of a part of the model: a stage, a layer, the embedding or output layer."""

    forward_us: float
    backward_us: float
    weight_us: float
    held_after_forward_bytes: float
    held_after_backward_bytes: float
    saved_us: float = 0.0  # by a full backward, relative to B + W
    forward_exchange_us: float = 0.0  # time of F's collectives, beside forward_us
    backward_exchange_us: float = 0.0  # time of B's collectives
    hidden_exchange_us: float = 0.0  # of B's collectives, in a full backward
    state_bytes: float = 0.0
    forward_work_bytes: float = 0.0  # workspace of F
    backward_work_bytes: float = 0.0
    weight_work_bytes: float = 0.0
    whole_work_bytes: float = 0.0
    dummy_bytes: float = 0.0  # left allocated by Megatron's own backward
    others: tuple[tuple[str, float], ...] = ()  # amounts of other kinds of passes, by name

    @property
    def time_us(self) -> float:
        """Time of all passes of a microbatch with a split backward."""
        exchange_us = self.forward_exchange_us + self.backward_exchange_us
        return self.forward_us + self.backward_us + self.weight_us + exchange_us

    def times(self, factor: float) -> Self:
        """Scale the piece; the workspace does not scale, because layers run one after another."""
        own: dict[str, Any] = {n: getattr(self, n) if factor else 0.0 for n in WORKS}
        return replace(self._made(lambda value: factor * value, self), **own)

    def plus(self, other: "Piece") -> Self:
        """Add up both pieces; the workspace is the maximum, because they run in sequence."""
        most: dict[str, Any] = {n: max(getattr(self, n), getattr(other, n)) for n in WORKS}
        return replace(self._made(add, self, other), **most)

    def over(self, other: "Piece") -> Self:
        """Subtract the other piece, down to 0; a greater workspace counts in full."""
        # `plus` uses the maximum, which has no inverse: only a greater workspace is certain.
        made = self._made(lambda own, less: max(0.0, own - less), self, other)
        own: dict[str, Any] = {n: getattr(self, n) if getattr(made, n) else 0.0 for n in WORKS}
        return replace(made, **own)

    @classmethod
    def middle(cls, pieces: Iterable[Self]) -> Self:
        """Return the medians of several pieces."""
        return cls._made(lambda *values: median(values), *pieces)

    def at_least(self, time_us: float) -> Self:
        """Set a minimum time per pass, since even a stage without layers has kernels."""
        least: dict[str, Any] = {name: max(time_us, getattr(self, name)) for name in TIMES}
        others = ((n, max(time_us, us) if n.endswith("_us") else us) for n, us in self.others)
        return replace(self, **least, others=tuple(others))

    @classmethod
    def _made(cls, of: Callable[..., float], *pieces: "Piece") -> Self:
        """Combine the amounts of the same name."""
        names = [each.name for each in fields(cls) if each.name != "others"]
        made: dict[str, Any] = {n: of(*(getattr(each, n) for each in pieces)) for n in names}
        tables = [dict(each.others) for each in pieces]
        others = dict.fromkeys(name for table in tables for name in table)
        combined = ((n, of(*(table.get(n, 0.0) for table in tables))) for n in others)
        return cls(**made, others=tuple(combined))


def costs_from_pieces(
    stages: Sequence[Piece],
    send_us: float,
    layers: Sequence[int] | None = None,
    host_us: float = 0.0,
    sources: tuple[tuple[str, str], ...] = (),
    **more: Any,
) -> Costs:
    """Make the costs of these stages, in model order; `more` are further fields.

    Other kinds of passes are included if they have memory on any stage.
    """

    def given(*names: str) -> dict[str, Any]:
        return {name: tuple(getattr(stage, name) for stage in stages) for name in names}

    each = given(*TIMES, *HELD)
    if any(stage.saved_us > 0 for stage in stages):
        # Measurement noise may report savings larger than a pass.
        least = (max(stage.backward_us, stage.weight_us) for stage in stages)
        whole = (s.backward_us + s.weight_us - s.saved_us for s in stages)
        each["whole_backward_us"] = tuple(map(max, least, whole))
    # The third, the collectives of a BW, follows below from its hidden share.
    known = given(*EXCHANGES[:2], STATE, *WORKS, DUMMY)
    each |= {name: values for name, values in known.items() if any(values)}
    if any(stage.hidden_exchange_us > 0 for stage in stages):
        left = (s.backward_exchange_us - s.hidden_exchange_us for s in stages)
        each["whole_exchange_us"] = tuple(max(0.0, exposed) for exposed in left)
    tables = [dict(stage.others) for stage in stages]
    others = {name: tuple(table[name] for table in tables) for name in tables[0]}
    if any(any(values) for name, values in others.items() if not name.endswith("_us")):
        more |= others
    each["layers"] = None if layers is None else tuple(layers)
    made = Costs(send_us=send_us, host_us=host_us, sources=sources, **each)
    return made.having(**more) if more else made


def pieces_from_costs(costs: Costs) -> list[Piece]:
    """Return the costs of each stage as a piece."""
    stages = range(costs.num_stages)
    split = tuple(map(add, costs.backward_us, costs.weight_us))
    forward, backward, whole = (
        [costs.exchanges_us(kind, stage) for stage in stages] for kind in (Kind.F, Kind.B, Kind.BW)
    )
    amounts = costs.lists()
    nothing, single = (0.0,) * costs.num_stages, dict(of_no_stage(costs))
    names = (STATE, *WORKS, DUMMY)
    others = {name: values for name, values in costs.others if name not in single}
    return list(
        # Positional, in the order of Piece's fields: `saved_us` follows HELD, and the hidden
        # collectives follow those of F and B.
        map(
            Piece,
            *(amounts[name] for name in (*TIMES, *HELD)),
            map(sub, split, costs.whole_backward_us or split),
            forward,
            backward,
            map(sub, backward, whole),
            *(amounts.get(name, nothing) for name in names),
            (tuple((n, values[stage]) for n, values in others.items()) for stage in stages),
        )
    )


def with_ends(costs: Costs, first: Piece, last: Piece) -> Costs:
    """Add the costs of the embedding to the first stage, and of the output layer to the last."""
    stages = pieces_from_costs(costs)
    stages[0], stages[-1] = stages[0].plus(first), stages[-1].plus(last)
    return with_pieces(costs, stages)


def with_pieces(costs: Costs, stages: Sequence[Piece]) -> Costs:
    """Return the costs with these stages; other fields do not change."""
    made = costs_from_pieces(stages, costs.send_us)
    rest = {name: each for name, each in costs.others if name in dict(of_no_stage(costs))}
    # None removes an amount that all new stages lack.
    own = dict.fromkeys(costs.lists()) | made.lists() | rest
    return costs.having(**own)


def under_megatron(costs: Costs, message_bytes: float = 0.0) -> Costs:
    """Return the costs under Megatron's schedules rather than those of this package.

    Megatron's full backward allocates a dummy gradient for a weight with a fused accumulation,
    because DDP's overlap waits for a gradient, and never frees it. Its schedules refer to the input
    gradient of a backward until the next one ends, and to the input itself until the next forward
    ends; `message_bytes` is the size of each.
    """
    if costs.state_bytes is not None and costs.dummy_bytes is not None:
        state = tuple(map(add, costs.state_bytes, costs.dummy_bytes))
        costs = replace(costs, state_bytes=state, dummy_bytes=None)
    if not message_bytes:
        return costs
    messages = {Kind.F.works: 2 * message_bytes, Kind.BW.works: message_bytes}
    amounts = costs.lists()
    works = {
        name: (amounts[name][0], *(each + more for each in amounts[name][1:]))
        for name, more in messages.items()
        if name in amounts
    }
    return costs.having(**works)


def of_no_stage(costs: Costs) -> tuple[tuple[str, float], ...]:
    """Return the amounts of kinds without a stage, by name: the maximum over the stages."""
    names = other_amounts(kind for kind in KINDS if kind.of)
    return tuple((name, max(values)) for name, values in costs.others if name in names)


def regroup(costs: Costs, num_stages: int, name: str) -> Costs:
    """Add up adjacent stages to a coarser split of the same model.

    So one file of 2 D stages supports every schedule with one or two chunks per device. Message
    time and launch overhead per pass do not change, since the coarser split has fewer of both.

    Raises:
        ScheduleError: the number of stages in the costs is not a multiple of `num_stages`.
    """
    size, rest = divmod(costs.num_stages, num_stages)
    if rest or not size:
        raise ScheduleError(
            f"the costs are for {costs.num_stages} stages, {name} has {num_stages}; the "
            f"costs need {num_stages} or a multiple of it, which is then added up"
        )

    # A device has one such pass per microbatch, however many stages it has: not added up.
    single = dict(of_no_stage(costs))
    amounts = {
        name: (single[name],) * num_stages
        if name in single
        else tuple(_groups(values, size, max if name in WORKS else fsum))
        for name, values in costs.lists().items()
    }
    return costs.having(
        **amounts,
        layers=None if costs.layers is None else tuple(map(int, _groups(costs.layers, size, sum))),
        # Boundaries inside a group vanish; those behind the last stage of each group remain.
        more_send_us=costs.more_send_us[size - 1 :: size],
    )


def _groups(
    values: Sequence[float], size: int, of_all: Callable[[Sequence[float]], float]
) -> Iterator[float]:
    for first in range(0, len(values), size):
        yield of_all(values[first : first + size])
