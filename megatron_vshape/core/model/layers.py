"""Layers per stage: given, or balanced against the cost of the embedding and the output layer.

Unequal layers are split with the least work on the busiest device (`balanced_cuts`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, combinations, pairwise
from math import fsum
from statistics import median
from typing import Any, NamedTuple, TypeVar

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import (
    DUMMY,
    MOVING,
    STATE,
    WORKS,
    ScheduleError,
    other_amounts,
)
from megatron_vshape.core.model.pieces import (
    Piece,
    costs_from_pieces,
    of_no_stage,
    pieces_from_costs,
    regroup,
)
from megatron_vshape.core.model.placement import Placement, looping

AUTO_SPLIT = "auto"

LEAST = 1e-3
"""Minimum time of a first or last stage without layers, in layers, for some kernels."""

MERGING = 0.15
"""Cost of merging two hidden states for multi-token prediction, in layers of a GPT with h = s;
`Widths` computes it for other sizes."""


AnyPiece = TypeVar("AnyPiece", bound=Piece)


class Share(NamedTuple):
    """Layers of a stage by time, activation memory and state, in the unit that `Pieces.layer` is.

    The three are equal if all layers are identical. For a hybrid model, whose layers differ, the
    unit is a GPT's layer, attention and MLP.
    """

    time: float
    held: float
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
        return Share(*(float(f"{each / unit if unit else 0.0:.12g}") for each, unit in pairs))

    def inverse(self) -> "Share":
        """Compute the share that turns a stage of this share into one unit."""
        return Share(*(1 / each if each else 0.0 for each in self))

    def of(self, piece: AnyPiece) -> AnyPiece:
        """Scale the costs of one unit to this share."""
        made = piece.times(self.time)
        if self.time == self.held == self.state:
            return made
        # Times of other kinds of passes are proportional to their memory.
        others = tuple((name, value * self.held) for name, value in piece.others)
        for each in fields(piece):
            name, value = each.name, getattr(piece, each.name)
            if name in (STATE, DUMMY):
                made = replace(made, **{name: value * self.state})
            elif name != "others" and not (name.endswith("_us") or name in WORKS):
                made = replace(made, **{name: value * self.held})
        return replace(made, others=others)


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
        each = [part.inverse().of(stage) if part.time else None for stage, part in pairs]
        # The outer stages include the embedding or output layer.
        known = [piece for piece in each[1:-1] if piece is not None]
        if not known:
            ends = [piece for piece in each if piece is not None]
            if not ends:
                raise ScheduleError("the costs are for stages without layers")
            known = [min(ends, key=lambda piece: piece.time_us)]
        layer = Piece.middle(known)
        return cls(
            layer,
            stages[0].over(parts[0].of(layer)),
            stages[-1].over(parts[-1].of(layer)),
            costs.send_us,
            costs.host_us,
            costs.sources,
            of_no_stage(costs),
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

    def costs(self, layers: Sequence[int]) -> Costs:
        """Compute the costs of stages with these numbers of layers."""
        stages = [share.of(self.layer) for share in Share.of_stages(layers, self.shares)]
        stages[0] = stages[0].plus(self.first)
        stages[-1] = stages[-1].plus(self.last)
        least = LEAST * self.layer.time_us

        stages = [stage.at_least(least) for stage in stages]
        others: dict[str, Any] = {name: (each,) * len(stages) for name, each in self.others}
        others |= {"by_microbatch": self.by_microbatch, "device_bytes": self.device_bytes}
        if self.more_send_us is not None:
            others["more_send_us"] = (self.more_send_us,) * (len(stages) - 1)
        return costs_from_pieces(stages, self.send_us, layers, self.host_us, self.sources, **others)

    def with_copies(self, forwards: float) -> "Pieces":
        """Make all activations of a layer movable; a copy one way costs `forwards` times F."""
        time, held = forwards * self.layer.forward_us, self.layer.held_after_forward_bytes
        others = tuple((n, time if n.endswith("_us") else held) for n in other_amounts(MOVING))
        return replace(self, layer=replace(self.layer, others=others))

    def predicting(
        self, count: int, merging_in_layers: float = MERGING, each: Share | None = None
    ) -> "Pieces":
        """Add `count` layers of multi-token prediction to the last stage, each of this share."""
        layer = self.layer if each is None else each.of(self.layer)
        return replace(self, last=with_predicting(self.last, layer, count, merging_in_layers))

    def balanced(self, num_layers: int, placement: Placement) -> tuple[int, ...]:
        """Compute the number of layers of every stage with the least work on the busiest device.

        Each layer goes to the device with the least work, and there to the stage with the least
        work. For equal layers this is optimal. Inner stages have at least one layer.

        Raises:
            ScheduleError: there are fewer layers than inner stages.
        """
        # The outer stages start empty: the embedding and output layer alone make them useful.
        layers = [0, *(1,) * (len(placement) - 2), 0] if len(placement) > 1 else [0]
        check_stages(num_layers, sum(layers), len(placement))
        of_layer = self.layer.time_us or 1.0
        least = LEAST * of_layer
        ends_us = max(self.first.time_us, least), max(self.last.time_us, least)
        # Greedy assignment is optimal for equal layers only, which may go to any stage.
        if len({share.time for share in self.shares}) > 1:
            times_us = [share.time * of_layer for share in self.shares]
            return balanced_cuts(times_us, placement, ends_us, *self._in_blocks(placement))
        stage_us = [count * of_layer for count in layers]
        stage_us[0] += ends_us[0]
        stage_us[-1] += ends_us[-1]
        device_us = [0.0] * (max(placement) + 1)
        for stage, device in enumerate(placement):
            device_us[device] += stage_us[stage]

        def load(stage: int) -> tuple[float, float, int]:
            # Among equals the latest stage: activations of early stages live longest.
            return _rounded(device_us[placement[stage]]), _rounded(stage_us[stage]), -stage

        for _ in range(num_layers - sum(layers)):
            stage = min(range(len(placement)), key=load)
            layers[stage] += 1
            stage_us[stage] += of_layer
            device_us[placement[stage]] += of_layer
        return tuple(layers)

    def _in_blocks(self, placement: Placement) -> Iterator[list[int]]:
        """Yield the balanced layers of stages of complete blocks, if a block of layers repeats."""
        shares, total = self.shares, len(self.shares)
        # The smallest period of the layer pattern, such as 8 for "7 Mamba, 1 attention".
        sizes = (size for size in range(2, total // 2 + 1) if not total % size)
        size = next((each for each in sizes if shares == shares[:each] * (total // each)), None)
        if size is not None and total // size >= len(placement):
            layer = Share.total(shares[:size]).of(self.layer)
            blocks = replace(self, layer=layer, shares=()).balanced(total // size, placement)
            yield [count * size for count in blocks]


def _rounded(time_us: float) -> float:
    """Round off the last bits, in which sums of the same terms may differ."""
    return float(f"{time_us:.9g}")


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


def without_ends(pieces: Pieces) -> Pieces:
    """Return the pieces without embedding, output layer and other kinds of passes."""
    # Only a costs file has times of other kinds for stages that lack both ends.
    layer = replace(pieces.layer, others=())
    nothing = layer.times(0.0)
    return replace(pieces, layer=layer, first=nothing, last=nothing, others=())


def with_predicting(head: AnyPiece, layer: AnyPiece, count: int, merging: float) -> AnyPiece:
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


def check_stages(num_layers: int, least: int, num_stages: int) -> None:
    """Raise ScheduleError if there are too few layers for the inner stages."""
    if num_layers < max(least, 1):
        layers = "1 layer is" if num_layers == 1 else f"{num_layers} layers are"
        raise ScheduleError(
            f"{layers} too few for {num_stages} stages: only the first and the last "
            f"may be without, so make --num-layers at least {max(least, 1)}"
        )


def even_layers(num_layers: int, placement: Placement) -> tuple[int, ...]:
    """Return the same number of layers for every stage.

    Raises:
        ScheduleError: the layers do not divide evenly among the stages.
    """
    stages, devices = len(placement), max(placement) + 1
    below, rest = divmod(num_layers, stages)
    if rest:
        near = f", such as {below * stages} or {(below + 1) * stages}" if below else ""
        split = ""
        if num_layers >= stages - 2:
            split = f", or add --layer-split {AUTO_SPLIT} (to training: --pipeline-layer-split)"
        raise ScheduleError(
            f"{num_layers} layers do not divide among {stages} stages ({devices} devices "
            f"with {stages // devices} each): give a multiple of {stages}{near}{split}"
        )
    return (below,) * stages


def even_with_ends(num_layers: int, num_stages: int) -> tuple[int, ...] | None:
    """Return an even split that counts embedding and output layer as one layer each, or None."""
    each, rest = divmod(num_layers + 2, num_stages)
    return None if rest else (each - 1, *(each,) * (num_stages - 2), each - 1)


def parse_layers(text: str, num_layers: int, placement: Placement) -> tuple[int, ...]:
    """Parse the layers of every stage in `--pipeline-layer-split N,N,...`.

    Raises:
        ScheduleError: not integers, not one per stage, another total, or an inner stage without
            layers, which would have nothing to train.
    """
    flag, stages, devices = "--pipeline-layer-split", len(placement), max(placement) + 1
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ScheduleError(
            f"{flag} {text!r:.80} is neither {AUTO_SPLIT} nor whole numbers with commas, as in "
            "2,3,3,2"
        ) from None
    if len(layers) != stages:
        raise ScheduleError(
            f"{flag} {text:.80} has {len(layers)} numbers and the schedule {stages} stages "
            f"({devices} devices with {stages // devices} each): give one number per stage, in the "
            "model's order"
        )
    if min(layers) < 0:
        raise ScheduleError(f"{flag} {text:.80} gives a stage {min(layers)} layers")
    if sum(layers) != num_layers:
        raise ScheduleError(
            f"{flag} {text:.80} adds up to {sum(layers)} layers and the model has {num_layers}"
        )
    check_layers(f"{flag} {text:.80}", layers)
    return layers


def check_layers(what: str, layers: Sequence[int]) -> None:
    """Raise ScheduleError, which names `what`, if an inner stage has no layers."""
    for stage, count in enumerate(layers[1:-1], start=1):
        if not count:
            raise ScheduleError(
                f"{what} leaves stage {stage} without layers: only the first and the last stage, "
                "which have the embedding and the output layer, may be without"
            )


@dataclass(frozen=True, slots=True)
class Widths:
    """Sizes that determine the GEMMs of a layer and of the output layer, per token."""

    hidden: int
    attention: int  # heads x size of a head
    key_value: int  # keys and values together
    feed_forward: float  # of the linear layers of a token; the mean if layers differ
    gated: bool
    sequence: int
    vocabulary: int

    @property
    def head_in_layers(self) -> float:
        """Cost of the output layer's GEMMs in layers, independent of tensor parallelism."""
        return self.hidden * self.vocabulary / self.layer

    @property
    def merging_in_layers(self) -> float:
        """Cost of merging two hidden states for multi-token prediction, in layers."""
        return 2 * self.hidden**2 / self.layer

    @property
    def layer(self) -> float:
        """Return the products of a layer of a GPT: attention and feed-forward."""
        return self.attention_layer + self.feed_forward_layer(self.feed_forward)

    @property
    def attention_weights(self) -> float:
        """Return the weights of the projections of an attention layer."""
        return self.hidden * (2 * self.attention + self.key_value)

    @property
    def attention_layer(self) -> float:
        """Return the products of an attention layer, with the causal half of the scores' two."""
        return self.attention_weights + self.sequence * self.attention

    def feed_forward_layer(self, width: float) -> float:
        """Return the products of a feed-forward layer of this width, which are its weights."""
        return self.hidden * width * (3 if self.gated else 2)


MOST_SHIFTED = 2
"""Layers that a cut moves by in one step of the search."""

MOST_TOGETHER = 8
"""Neighbouring cuts that move together."""


def balanced_cuts(
    times_us: Sequence[float],
    placement: Placement,
    ends_us: tuple[float, float],
    *starts: Sequence[int],
) -> tuple[int, ...]:
    """Compute the number of layers of every stage, in model order.

    Local search: a step shifts one cut, or several neighbouring cuts together, if that lowers the
    load of the busiest device (then of the second busiest, and so on). Then, with no device busier
    than that, as long as it makes the stages more even. Inner stages have at least one layer.

    Args:
        times_us: The time of each layer, in model order.
        placement: The device of each stage.
        ends_us: The time of the embedding in the first stage, and of the output layer in the last.
        starts: Further layer counts of the stages to start from: the busiest device of the result
            is never busier than theirs.
    """
    sums = tuple(accumulate(times_us, initial=0.0))

    def loads(cuts: Sequence[int]) -> list[float]:
        return _loads(cuts, sums, placement, ends_us)

    begins = [_proportional(sums, placement, ends_us)]
    begins += [list(accumulate(layers, initial=0)) for layers in starts]
    # Start and result of the first search both start the second one, for another local optimum.
    found = [*begins, *(_improved(cuts, loads) for cuts in begins)]
    most = min(max(loads(cuts)) for cuts in found)

    def unevenness(cuts: Sequence[int]) -> tuple[float, float]:
        # The maximum stays the first criterion: evenness never costs step time.
        above = max(0.0, max(loads(cuts)) - most)
        return above, _rounded(sum(each**2 for each in _stages(cuts, sums, ends_us)))

    cuts = min((_improved(cuts, unevenness) for cuts in found), key=unevenness)
    return tuple(end - start for start, end in pairwise(cuts))


def _proportional(
    sums: Sequence[float], placement: Placement, ends_us: tuple[float, float]
) -> list[int]:
    """Cut where the time of all layers and ends before is nearest to that of even stages."""
    stages = len(placement)
    each = (sums[-1] + sum(ends_us)) / stages
    cuts = [0]
    for stage in range(1, stages):
        # The previous stage needs a layer unless it is the first; so does each later inner stage.
        least = cuts[-1] + (stage > 1)
        most = len(sums) - 1 - (stages - 1 - stage)
        at = stage * each - ends_us[0]
        cuts.append(min(range(least, most + 1), key=lambda cut: abs(sums[cut] - at)))
    return [*cuts, len(sums) - 1]


def _improved(cuts: list[int], measure: Callable[[Sequence[int]], Any]) -> list[int]:
    """Shift cuts as long as that lowers the measure."""
    best = measure(cuts)
    while True:
        tried = ((measure(near), near) for near in _shifted(cuts))
        reached, near = min(tried, default=(best, cuts))
        if not reached < best:
            return cuts
        best, cuts = reached, near


def _loads(
    cuts: Sequence[int], sums: Sequence[float], placement: Placement, ends_us: tuple[float, float]
) -> list[float]:
    """Compute the time of every device, the busiest first."""
    loads = [0.0] * (max(placement) + 1)
    for device, time_us in zip(placement, _stages(cuts, sums, ends_us), strict=True):
        loads[device] += time_us
    return sorted(map(_rounded, loads), reverse=True)


def _stages(
    cuts: Sequence[int], sums: Sequence[float], ends_us: tuple[float, float]
) -> list[float]:
    """Compute the time of every stage."""
    stages = [sums[end] - sums[start] for start, end in pairwise(cuts)]
    stages[0] += ends_us[0]
    stages[-1] += ends_us[1]
    return stages


def _shifted(cuts: Sequence[int]) -> Iterator[list[int]]:
    """Yield cuts of which neighbouring ones are shifted by a few layers, all by the same number."""
    # Adjacent cuts that shift together move layers between distant stages.
    inner = len(cuts) - 1
    for first, behind in combinations(range(1, inner + 1), 2):
        if behind - first > MOST_TOGETHER:
            continue
        for by in range(-MOST_SHIFTED, MOST_SHIFTED + 1):
            near = [*cuts[:first], *(cut + by for cut in cuts[first:behind]), *cuts[behind:]]
            if by and _are_stages(near):
                yield near


def _are_stages(cuts: Sequence[int]) -> bool:
    """Check that every inner stage has a layer, and no end a negative number."""
    first, *inner, last = (end - start for start, end in pairwise(cuts))
    return first >= 0 and last >= 0 and all(count > 0 for count in inner)
