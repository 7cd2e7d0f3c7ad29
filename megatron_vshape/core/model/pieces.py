"""Costs of parts of a model: layer, embedding, output layer; and the costs of stages from them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from megatron_vshape.core.model.amounts import DUMMY_BYTES, STATE_BYTES, Amount
from megatron_vshape.core.model.costs import ByMicrobatch, Costs
from megatron_vshape.core.model.kinds import HELD, KINDS, MOVING, Kind, ScheduleError, other_amounts
from megatron_vshape.core.model.layers import balanced_cuts, check_stages, even_layers, rounded
from megatron_vshape.core.model.placement import Placement, looping
from megatron_vshape.core.model.stage_costs import (
    Share,
    StageCosts,
    extra_amounts_of,
    stages_of_parts,
)

MIN_LAYERS = 1e-3
"""Minimum time of a first or last stage without layers, in layers, for some kernels."""

_MERGING_IN_LAYERS = 0.15
"""Cost of merging two hidden states for multi-token prediction, in layers of a GPT with h = s;
`Widths` computes it for other sizes."""

NOTHING = StageCosts.of(0.0, 0.0, 0.0)
"""Costs of an embedding or output layer that costs nothing."""


class Encoder(NamedTuple):
    """The cost of an image encoder: its forward takes as long as that of `layers` layers."""

    layers: float
    is_frozen: bool = False  # no backward


@dataclass(frozen=True, slots=True)
class Pieces:
    """Costs of one layer, and additional costs of the embedding and the output layer."""

    layer: StageCosts
    first: StageCosts
    last: StageCosts
    send_us: float
    host_us: float = 0.0  # per pass, independent of its layers
    sources: tuple[tuple[str, str], ...] = ()  # sources of the costs
    of_device: StageCosts = StageCosts({})  # of passes without a stage
    by_microbatch: ByMicrobatch = ()  # as in `Costs`
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
        stages = [stage.without(_device_amounts()).as_part() for stage in costs.stages]
        stage_shares = Share.of_stages(layers, shares)
        pairs = zip(stages, stage_shares, strict=True)
        unit_pieces = [s.scaled(share.inverse()) if share.time else None for s, share in pairs]
        # The outer stages include the embedding or output layer.
        layer_pieces = [piece for piece in unit_pieces[1:-1] if piece is not None]
        if not layer_pieces:
            outer_pieces = [piece for piece in unit_pieces if piece is not None]
            if not outer_pieces:
                raise ScheduleError("the costs are for stages without layers")
            layer_pieces = [min(outer_pieces, key=lambda piece: piece.total_us)]
        layer = StageCosts.middle(layer_pieces)
        return cls(
            layer,
            stages[0].over(layer.scaled(stage_shares[0])),
            stages[-1].over(layer.scaled(stage_shares[-1])),
            costs.send_us,
            costs.host_us,
            costs.sources,
            _costs_of_device(costs),
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
        layer = StageCosts.of(forward, backward, weight, 1.0, 1.0).times(1 / layers_per_chunk)
        head = layer.times(head_in_layers).changed(dict.fromkeys(HELD, 0.0))
        return cls(layer, layer.times(0.0), head, send_us)

    def with_encoder(self, encoder: Encoder) -> "Pieces":
        """Add an encoder to the first stage."""
        piece = self.layer.times(encoder.layers)
        if encoder.is_frozen:
            piece = StageCosts.of(piece[Kind.F.time], 0.0, 0.0)
        return replace(self, first=self.first.plus(piece))

    def costs(self, layers: Sequence[int]) -> Costs:
        """Compute the costs of stages with these numbers of layers."""
        stages = [self.layer.scaled(share) for share in Share.of_stages(layers, self.shares)]
        stages[0] = stages[0].plus(self.first)
        stages[-1] = stages[-1].plus(self.last)
        min_us = MIN_LAYERS * self.layer.total_us
        complete = stages_of_parts([stage.at_least(min_us) for stage in stages])
        extra_us = () if self.more_send_us is None else (self.more_send_us,) * (len(stages) - 1)
        return Costs(
            tuple(stage.changed(self.of_device.amounts) for stage in complete),
            self.send_us,
            tuple(layers),
            host_us=self.host_us,
            sources=self.sources,
            by_microbatch=self.by_microbatch,
            more_send_us=extra_us,
            device_bytes=self.device_bytes,
        )

    def with_copies(self, forwards: float) -> "Pieces":
        """Make all activations of a layer movable; a copy one way costs `forwards` times F."""
        copy_us = forwards * self.layer[Kind.F.time]
        values = copy_us, self.layer[Kind.F.allocated], copy_us
        copies = dict(zip(other_amounts(MOVING), values, strict=True))
        return replace(self, layer=self.layer.changed(copies))

    def predicting(
        self, count: int, merging_in_layers: float = _MERGING_IN_LAYERS, share: Share | None = None
    ) -> "Pieces":
        """Add `count` layers of multi-token prediction to the last stage, each of this share."""
        layer = self.layer if share is None else self.layer.scaled(share)
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
        layer_us = self.layer.total_us or 1.0
        min_us = MIN_LAYERS * layer_us
        ends_us = max(self.first.total_us, min_us), max(self.last.total_us, min_us)
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
            layer = self.layer.scaled(Share.total(shares[:period]))
            blocks = replace(self, layer=layer, shares=()).balanced(total // period, placement)
            yield [count * period for count in blocks]


def without_ends(pieces: Pieces) -> Pieces:
    """Return the pieces without embedding, output layer and other kinds of passes."""
    # Only a costs file has times of other kinds for stages that lack both ends.
    layer = pieces.layer.without(extra_amounts_of([pieces.layer]))
    no_costs = layer.times(0.0)
    return replace(pieces, layer=layer, first=no_costs, last=no_costs, of_device=StageCosts({}))


def with_predicting(head: StageCosts, layer: StageCosts, count: int, merging: float) -> StageCosts:
    """Return the last stage's additional costs with `count` multi-token-prediction layers.

    Each adds a layer, and the merging of two hidden states (time of `merging` layers, negligible
    memory). Each also adds the output layer again, if it is in the stage, with the same weights.
    """
    heads = head.scaled(Share(1 + count, 1 + count, 1))
    layers = layer.times(count)
    longer = layers.times(1 + merging).changed({amount: layers[amount] for amount in HELD})
    return heads.plus(longer)


def with_ends(costs: Costs, first: StageCosts, last: StageCosts) -> Costs:
    """Add the costs of the embedding to the first stage, and of the output layer to the last."""
    parts = [stage.without(_device_amounts()).as_part() for stage in costs.stages]
    parts[0], parts[-1] = parts[0].plus(first), parts[-1].plus(last)
    pairs = zip(costs.stages, stages_of_parts(parts), strict=True)
    # Passes without a stage stay.
    kept_amounts = _device_amounts() & costs.by_stage.keys()
    stages = (new.changed({amount: old[amount] for amount in kept_amounts}) for old, new in pairs)
    return replace(costs, stages=tuple(stages))


def under_megatron(costs: Costs, message_bytes: float = 0.0) -> Costs:
    """Return the costs under Megatron's schedules rather than those of this package.

    Megatron's full backward allocates a dummy gradient for a weight with a fused accumulation,
    because DDP's overlap waits for a gradient, and never frees it. Its schedules refer to the input
    gradient of a backward until the next one ends, and to the input itself until the next forward
    ends; `message_bytes` is the size of each.
    """
    first, *later_stages = costs.stages
    message = {Kind.F.workspace: 2 * message_bytes, Kind.BW.workspace: message_bytes}
    received = [stage.increased(message) for stage in later_stages]
    stages = (stage.increased({STATE_BYTES: stage[DUMMY_BYTES]}) for stage in (first, *received))
    if STATE_BYTES in costs.by_stage:
        stages = (stage.without([DUMMY_BYTES]) for stage in stages)
    return replace(costs, stages=tuple(stages))


def _device_amounts() -> frozenset[Amount]:
    """Return the amounts of kinds without a stage: a device has one such pass per microbatch."""
    return frozenset(other_amounts(kind for kind in KINDS if kind.of))


def _costs_of_device(costs: Costs) -> StageCosts:
    """Return the amounts of kinds without a stage: the maximum over the stages."""
    present = _device_amounts() & costs.by_stage.keys()
    return StageCosts({a: max(stage[a] for stage in costs.stages) for a in present})


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

    starts = range(0, costs.num_stages, size)
    # A device has one pass without a stage per microbatch, however many stages it has.
    of_device = _costs_of_device(costs).amounts
    stages = (StageCosts.total(costs.stages[start : start + size]) for start in starts)
    return replace(
        costs,
        stages=tuple(stage.changed(of_device) for stage in stages),
        layers=None
        if costs.layers is None
        else tuple(sum(costs.layers[start : start + size]) for start in starts),
        # Boundaries inside a group vanish; those behind the last stage of each group remain.
        more_send_us=costs.more_send_us[size - 1 :: size],
    )


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
