"""Costs of parts of a model: layer, embedding, output layer; and the costs of stages from them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from math import fsum
from operator import add, sub
from statistics import median
from typing import Any, NamedTuple, Self, TypeVar

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import (
    DUMMY,
    EXCHANGES,
    HELD,
    KINDS,
    MOVING,
    STATE,
    TIMES,
    WORKS,
    Kind,
    ScheduleError,
    other_amounts,
)
from megatron_vshape.core.model.layers import balanced_cuts, check_stages, even_layers, rounded
from megatron_vshape.core.model.placement import Placement, looping

MIN_LAYERS = 1e-3
"""Minimum time of a first or last stage without layers, in layers, for some kernels."""

_MERGING_IN_LAYERS = 0.15
"""Cost of merging two hidden states for multi-token prediction, in layers of a GPT with h = s;
`Widths` computes it for other sizes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Times and memory of a part of the model: a stage, a layer, the embedding or output layer."""

    forward_us: float
    backward_us: float
    weight_us: float
    held_after_forward_bytes: float
    held_after_backward_bytes: float
    saved_us: float = 0.0  # by a full backward, relative to B + W
    forward_exchange_us: float = 0.0  # time of F's collectives, in addition to forward_us
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
        workspace: dict[str, Any] = {n: getattr(self, n) if factor else 0.0 for n in WORKS}
        return replace(self._combined(lambda value: factor * value, self), **workspace)

    def plus(self, piece: "Piece") -> Self:
        """Add up both pieces; the workspace is the maximum, because they run in sequence."""
        workspace: dict[str, Any] = {n: max(getattr(self, n), getattr(piece, n)) for n in WORKS}
        return replace(self._combined(add, self, piece), **workspace)

    def over(self, piece: "Piece") -> Self:
        """Subtract the other piece, down to 0; a greater workspace counts in full."""
        # `plus` uses the maximum, which has no inverse: only a greater workspace is certain.
        difference = self._combined(
            lambda amount, subtrahend: max(0.0, amount - subtrahend), self, piece
        )
        workspace: dict[str, Any] = {
            n: getattr(self, n) if getattr(difference, n) else 0.0 for n in WORKS
        }
        return replace(difference, **workspace)

    @classmethod
    def middle(cls, pieces: Iterable[Self]) -> Self:
        """Return the medians of several pieces."""
        return cls._combined(lambda *values: median(values), *pieces)

    def at_least(self, time_us: float) -> Self:
        """Set a minimum time per pass, since even a stage without layers has kernels."""
        times_us: dict[str, Any] = {name: max(time_us, getattr(self, name)) for name in TIMES}
        extra_amounts = (
            (n, max(time_us, us) if n.endswith("_us") else us) for n, us in self.others
        )
        return replace(self, **times_us, others=tuple(extra_amounts))

    @classmethod
    def _combined(cls, combine: Callable[..., float], *pieces: "Piece") -> Self:
        """Combine the amounts of the same name."""
        names = [field.name for field in fields(cls) if field.name != "others"]
        amounts: dict[str, Any] = {
            n: combine(*(getattr(piece, n) for piece in pieces)) for n in names
        }
        tables = [dict(piece.others) for piece in pieces]
        extra_names = dict.fromkeys(name for table in tables for name in table)
        extra_amounts = (
            (n, combine(*(table.get(n, 0.0) for table in tables))) for n in extra_names
        )
        return cls(**amounts, others=tuple(extra_amounts))


_AnyPiece = TypeVar("_AnyPiece", bound=Piece)


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

    def of(self, piece: _AnyPiece) -> _AnyPiece:
        """Scale the costs of one unit to this share."""
        scaled_piece = piece.times(self.time)
        if self.time == self.memory == self.state:
            return scaled_piece
        # Times of other kinds of passes are proportional to their memory.
        extra_amounts = tuple((name, value * self.memory) for name, value in piece.others)
        for field in fields(piece):
            name, value = field.name, getattr(piece, field.name)
            if name in (STATE, DUMMY):
                scaled_piece = replace(scaled_piece, **{name: value * self.state})
            elif name != "others" and not (name.endswith("_us") or name in WORKS):
                scaled_piece = replace(scaled_piece, **{name: value * self.memory})
        return replace(scaled_piece, others=extra_amounts)


class Encoder(NamedTuple):
    """The cost of an image encoder: its forward takes as long as that of `layers` layers."""

    layers: float
    is_frozen: bool = False  # no backward


@dataclass(frozen=True, slots=True)
class Pieces:
    """Costs of one layer, and additional costs of the embedding and the output layer."""

    layer: Piece
    first: Piece
    last: Piece
    send_us: float
    host_us: float = 0.0  # per pass, independent of its layers
    sources: tuple[tuple[str, str], ...] = ()  # sources of the costs
    others: tuple[tuple[str, float], ...] = ()  # amounts of passes without a stage, by name
    by_microbatch: tuple[tuple[str, tuple[float, ...]], ...] = ()  # as in `Costs`
    more_send_us: float | None = None  # per stage boundary
    device_bytes: float = 0.0  # as in `Costs`
    shares: tuple[Share, ...] = ()  # of each layer, in model order; empty if all are identical

    @classmethod
    def of(cls, costs: Costs, layers: Sequence[float], shares: tuple[Share, ...] = ()) -> "Pieces":
        """Compute the pieces of stages with `layers` layers each, of these shares.

        A layer is the median over the inner stages. With two stages, the one with the lower time
        per layer counts as having layers only.

        Raises:
            ScheduleError: there is another number of stages, or none has layers.
        """
        if len(layers) != costs.num_stages:
            raise ScheduleError(
                f"the costs are for {costs.num_stages} stages, and layers are given for "
                f"{len(layers)}"
            )
        stages = pieces_from_costs(costs)
        parts = Share.of_stages(layers, shares)
        pairs = zip(stages, parts, strict=True)
        unit_pieces = [part.inverse().of(stage) if part.time else None for stage, part in pairs]
        # The outer stages include the embedding or output layer.
        layer_pieces = [piece for piece in unit_pieces[1:-1] if piece is not None]
        if not layer_pieces:
            outer_pieces = [piece for piece in unit_pieces if piece is not None]
            if not outer_pieces:
                raise ScheduleError("the costs are for stages without layers")
            layer_pieces = [min(outer_pieces, key=lambda piece: piece.time_us)]
        layer = Piece.middle(layer_pieces)
        return cls(
            layer,
            stages[0].over(parts[0].of(layer)),
            stages[-1].over(parts[-1].of(layer)),
            costs.send_us,
            costs.host_us,
            costs.sources,
            _amounts_without_stage(costs),
            costs.by_microbatch,
            median(costs.more_send_us) if costs.more_send_us else None,
            costs.device_bytes,
            shares,
        )

    @classmethod
    def estimated(
        cls,
        head_in_layers: float,
        layers_per_chunk: float,
        times: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 0.0),
    ) -> "Pieces":
        """Estimate pieces from the times of a chunk's F, B and W and of a message, in their unit.

        A chunk has `layers_per_chunk` layers and activation memory 1. The embedding has no GEMMs
        and negligible time. The output layer's logits are not counted as memory, so that the peak
        of 1F1B stays 2 x devices chunks.
        """
        forward, backward, weight, send_us = times
        layer = Piece(forward, backward, weight, 1.0, 1.0).times(1 / layers_per_chunk)
        head = replace(
            layer.times(head_in_layers), held_after_forward_bytes=0.0, held_after_backward_bytes=0.0
        )
        return cls(layer, layer.times(0.0), head, send_us)

    def with_encoder(self, encoder: Encoder) -> "Pieces":
        """Add an encoder to the first stage."""
        piece = self.layer.times(encoder.layers)
        if encoder.is_frozen:
            piece = Piece(piece.forward_us, 0.0, 0.0, 0.0, 0.0)
        return replace(self, first=self.first.plus(piece))

    def costs(self, layers: Sequence[int]) -> Costs:
        """Compute the costs of stages with these numbers of layers."""
        stages = [share.of(self.layer) for share in Share.of_stages(layers, self.shares)]
        stages[0] = stages[0].plus(self.first)
        stages[-1] = stages[-1].plus(self.last)
        min_us = MIN_LAYERS * self.layer.time_us

        stages = [stage.at_least(min_us) for stage in stages]
        extra_fields: dict[str, Any] = {
            name: (amount,) * len(stages) for name, amount in self.others
        }
        extra_fields |= {"by_microbatch": self.by_microbatch, "device_bytes": self.device_bytes}
        if self.more_send_us is not None:
            extra_fields["more_send_us"] = (self.more_send_us,) * (len(stages) - 1)
        return costs_from_pieces(
            stages, self.send_us, layers, self.host_us, self.sources, **extra_fields
        )

    def with_copies(self, forwards: float) -> "Pieces":
        """Make all activations of a layer movable; a copy one way costs `forwards` times F."""
        copy_us, activation_bytes = (
            forwards * self.layer.forward_us,
            self.layer.held_after_forward_bytes,
        )
        extra_amounts = tuple(
            (n, copy_us if n.endswith("_us") else activation_bytes) for n in other_amounts(MOVING)
        )
        return replace(self, layer=replace(self.layer, others=extra_amounts))

    def predicting(
        self, count: int, merging_in_layers: float = _MERGING_IN_LAYERS, share: Share | None = None
    ) -> "Pieces":
        """Add `count` layers of multi-token prediction to the last stage, each of this share."""
        layer = self.layer if share is None else share.of(self.layer)
        return replace(self, last=with_predicting(self.last, layer, count, merging_in_layers))

    def balanced(
        self, num_layers: int, placement: Placement, least_first: int = 0
    ) -> tuple[int, ...]:
        """Compute the number of layers of every stage with the least work on the busiest device.

        Each layer goes to the device with the least work, and there to the stage with the least
        work. For equal layers this is optimal. Inner stages have at least one layer. With equal
        layers, the first stage has at least `least_first`.

        Raises:
            ScheduleError: there are fewer layers than that.
        """
        # The outer stages start empty: the embedding and output layer alone make them useful.
        layers = [least_first, *(1,) * (len(placement) - 2), 0] if len(placement) > 1 else [0]
        check_stages(num_layers, sum(layers), len(placement))
        layer_us = self.layer.time_us or 1.0
        min_us = MIN_LAYERS * layer_us
        ends_us = max(self.first.time_us, min_us), max(self.last.time_us, min_us)
        # Greedy assignment is optimal for equal layers only, which may go to any stage.
        if len({share.time for share in self.shares}) > 1:
            times_us = [share.time * layer_us for share in self.shares]
            return balanced_cuts(times_us, placement, ends_us, *self._in_blocks(placement))
        stage_us = [count * layer_us for count in layers]
        stage_us[0] += ends_us[0]
        stage_us[-1] += ends_us[-1]
        device_us = [0.0] * (max(placement) + 1)
        for stage, device in enumerate(placement):
            device_us[device] += stage_us[stage]

        def load(stage: int) -> tuple[float, float, int]:
            # Among equals the latest stage: activations of early stages live longest.
            return rounded(device_us[placement[stage]]), rounded(stage_us[stage]), -stage

        for _ in range(num_layers - sum(layers)):
            stage = min(range(len(placement)), key=load)
            layers[stage] += 1
            stage_us[stage] += layer_us
            device_us[placement[stage]] += layer_us
        return tuple(layers)

    def _in_blocks(self, placement: Placement) -> Iterator[list[int]]:
        """Yield the balanced layers of stages of complete blocks, if a block of layers repeats."""
        shares, total = self.shares, len(self.shares)
        # The smallest period of the layer pattern, such as 8 for "7 Mamba, 1 attention".
        periods = (period for period in range(2, total // 2 + 1) if not total % period)
        period = next(
            (period for period in periods if shares == shares[:period] * (total // period)), None
        )
        if period is not None and total // period >= len(placement):
            layer = Share.total(shares[:period]).of(self.layer)
            blocks = replace(self, layer=layer, shares=()).balanced(total // period, placement)
            yield [count * period for count in blocks]


def without_ends(pieces: Pieces) -> Pieces:
    """Return the pieces without embedding, output layer and other kinds of passes."""
    # Only a costs file has times of other kinds for stages that lack both ends.
    layer = replace(pieces.layer, others=())
    no_costs = layer.times(0.0)
    return replace(pieces, layer=layer, first=no_costs, last=no_costs, others=())


def with_predicting(head: _AnyPiece, layer: _AnyPiece, count: int, merging: float) -> _AnyPiece:
    """Return the last stage's additional costs with `count` multi-token-prediction layers.

    Each adds a layer, and the merging of two hidden states (time of `merging` layers, negligible
    memory). Each also adds the output layer again, if it is in the stage, with the same weights.
    """
    once = {name: getattr(head, name) for name in (STATE, DUMMY)}
    heads = replace(head.times(1 + count), **once)
    layers = layer.times(count)
    longer = replace(
        layers.times(1 + merging),
        held_after_forward_bytes=layers.held_after_forward_bytes,
        held_after_backward_bytes=layers.held_after_backward_bytes,
    )
    return heads.plus(longer)


def costs_from_pieces(
    stages: Sequence[Piece],
    send_us: float,
    layers: Sequence[int] | None = None,
    host_us: float = 0.0,
    sources: tuple[tuple[str, str], ...] = (),
    **extra_fields: Any,
) -> Costs:
    """Make the costs of these stages, in model order; `extra_fields` are further fields.

    Other kinds of passes are included if they have memory on any stage.
    """

    def columns(*names: str) -> dict[str, Any]:
        return {name: tuple(getattr(stage, name) for stage in stages) for name in names}

    amounts = columns(*TIMES, *HELD)
    if any(stage.saved_us > 0 for stage in stages):
        # Measurement noise may report savings larger than a pass.
        min_us = (max(stage.backward_us, stage.weight_us) for stage in stages)
        full_us = (s.backward_us + s.weight_us - s.saved_us for s in stages)
        amounts["whole_backward_us"] = tuple(map(max, min_us, full_us))
    # The third, the collectives of a BW, follows below from its hidden share.
    optional_amounts = columns(*EXCHANGES[:2], STATE, *WORKS, DUMMY)
    amounts |= {name: values for name, values in optional_amounts.items() if any(values)}
    if any(stage.hidden_exchange_us > 0 for stage in stages):
        exposed_us = (s.backward_exchange_us - s.hidden_exchange_us for s in stages)
        amounts["whole_exchange_us"] = tuple(max(0.0, exchange_us) for exchange_us in exposed_us)
    tables = [dict(stage.others) for stage in stages]
    extra_amounts = {name: tuple(table[name] for table in tables) for name in tables[0]}
    if any(any(values) for name, values in extra_amounts.items() if not name.endswith("_us")):
        extra_fields |= extra_amounts
    amounts["layers"] = None if layers is None else tuple(layers)
    costs = Costs(send_us=send_us, host_us=host_us, sources=sources, **amounts)
    return costs.having(**extra_fields) if extra_fields else costs


def pieces_from_costs(costs: Costs) -> list[Piece]:
    """Return the costs of each stage as a piece."""
    stages = range(costs.num_stages)
    split = tuple(map(add, costs.backward_us, costs.weight_us))
    forward, backward, full_backward = (
        [costs.exchanges_us(kind, stage) for stage in stages] for kind in (Kind.F, Kind.B, Kind.BW)
    )
    amounts = costs.lists()
    nothing, single = (0.0,) * costs.num_stages, dict(_amounts_without_stage(costs))
    names = (STATE, *WORKS, DUMMY)
    extra_amounts = {name: values for name, values in costs.others if name not in single}
    return list(
        # Positional, in the order of Piece's fields: `saved_us` follows HELD, and the hidden
        # collectives follow those of F and B.
        map(
            Piece,
            *(amounts[name] for name in (*TIMES, *HELD)),
            map(sub, split, costs.whole_backward_us or split),
            forward,
            backward,
            map(sub, backward, full_backward),
            *(amounts.get(name, nothing) for name in names),
            (tuple((n, values[stage]) for n, values in extra_amounts.items()) for stage in stages),
        )
    )


def with_ends(costs: Costs, first: Piece, last: Piece) -> Costs:
    """Add the costs of the embedding to the first stage, and of the output layer to the last."""
    stages = pieces_from_costs(costs)
    stages[0], stages[-1] = stages[0].plus(first), stages[-1].plus(last)
    return with_pieces(costs, stages)


def with_pieces(costs: Costs, stages: Sequence[Piece]) -> Costs:
    """Return the costs with these stages; other fields do not change."""
    new_costs = costs_from_pieces(stages, costs.send_us)
    single_amounts = {
        name: values for name, values in costs.others if name in dict(_amounts_without_stage(costs))
    }
    # None removes an amount that all new stages lack.
    changes = dict.fromkeys(costs.lists()) | new_costs.lists() | single_amounts
    return costs.having(**changes)


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
    extra_by_name = {Kind.F.works: 2 * message_bytes, Kind.BW.works: message_bytes}
    amounts = costs.lists()
    workspaces = {
        name: (amounts[name][0], *(workspace + extra_bytes for workspace in amounts[name][1:]))
        for name, extra_bytes in extra_by_name.items()
        if name in amounts
    }
    return costs.having(**workspaces)


def _amounts_without_stage(costs: Costs) -> tuple[tuple[str, float], ...]:
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
    size, remainder = divmod(costs.num_stages, num_stages)
    if remainder or not size:
        raise ScheduleError(
            f"the costs are for {costs.num_stages} stages, {name} has {num_stages}; the "
            f"costs need {num_stages} or a multiple of it, which is then added up"
        )

    # A device has one such pass per microbatch, however many stages it has: not added up.
    single = dict(_amounts_without_stage(costs))
    amounts = {
        name: (single[name],) * num_stages
        if name in single
        else tuple(_combine_groups(values, size, max if name in WORKS else fsum))
        for name, values in costs.lists().items()
    }
    return costs.having(
        **amounts,
        layers=None
        if costs.layers is None
        else tuple(map(int, _combine_groups(costs.layers, size, sum))),
        # Boundaries inside a group vanish; those behind the last stage of each group remain.
        more_send_us=costs.more_send_us[size - 1 :: size],
    )


def _combine_groups(
    values: Sequence[float], size: int, combine: Callable[[Sequence[float]], float]
) -> Iterator[float]:
    for first in range(0, len(values), size):
        yield combine(values[first : first + size])


def recut(
    costs: Costs,
    num_stages: int,
    num_devices: int,
    name: str,
    num_layers: int | None = None,
    shares: tuple[Share, ...] = (),
) -> Costs:
    """Convert costs to another number of stages of the same model.

    Adjacent stages are added up if that suffices. Otherwise the layers are distributed again, which
    requires their number: evenly if they were even, otherwise balanced. `num_layers` is the total
    if the costs do not specify it and all stages have equal layers. `shares` are those of the
    layers, if they are not identical.

    Raises:
        ScheduleError: the stages cannot be added up, and the layers are unknown or too few.
    """
    layers = costs.layers
    total = num_layers if layers is None else sum(layers)
    if total is None or costs.num_stages % num_stages == 0:
        return regroup(costs, num_stages, name)
    even = layers is None or len(set(layers)) == 1
    pieces = Pieces.of(costs, layers or (total / costs.num_stages,) * costs.num_stages, shares)
    placement = looping(num_devices, num_stages // num_devices)
    return pieces.costs((even_layers if even else pieces.balanced)(total, placement))
