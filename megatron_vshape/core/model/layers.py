"""Layer splits: layers per stage as given, evenly, or with the least work on the busiest device."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from typing import Any, TypeVar

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import Placement

AUTO_SPLIT = "auto"


def rounded(time_us: float) -> float:
    """Round off the last bits, in which sums of the same terms may differ."""
    return float(f"{time_us:.9g}")


def check_stages(num_layers: int, min_layers: int, num_stages: int) -> None:
    """Raise ScheduleError if there are too few layers for the inner stages."""
    if num_layers < max(min_layers, 1):
        layers = "1 layer is" if num_layers == 1 else f"{num_layers} layers are"
        raise ScheduleError(
            f"{layers} too few for {num_stages} stages: only the first and the last "
            f"may be without, so make --num-layers at least {max(min_layers, 1)}"
        )


def even_layers(num_layers: int, placement: Placement) -> tuple[int, ...]:
    """Return the same number of layers for every stage.

    Raises:
        ScheduleError: the layers do not divide evenly among the stages.
    """
    stages, devices = len(placement), max(placement) + 1
    layers_per_stage, remainder = divmod(num_layers, stages)
    if remainder:
        multiples = (
            f", such as {layers_per_stage * stages} or {(layers_per_stage + 1) * stages}"
            if layers_per_stage
            else ""
        )
        split = ""
        if num_layers >= stages - 2:
            split = f", or add --layer-split {AUTO_SPLIT} (to training: --pipeline-layer-split)"
        raise ScheduleError(
            f"{num_layers} layers do not divide among {stages} stages ({devices} devices "
            f"with {stages // devices} each): give a multiple of {stages}{multiples}{split}"
        )
    return (layers_per_stage,) * stages


def even_with_ends(num_layers: int, num_stages: int) -> tuple[int, ...] | None:
    """Return an even split that counts embedding and output layer as one layer each, or None."""
    layers_per_stage, remainder = divmod(num_layers + 2, num_stages)
    return (
        None
        if remainder
        else (layers_per_stage - 1, *(layers_per_stage,) * (num_stages - 2), layers_per_stage - 1)
    )


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


def check_layers(label: str, layers: Sequence[int]) -> None:
    """Raise ScheduleError, which names `label`, if an inner stage has no layers."""
    for stage, count in enumerate(layers[1:-1], start=1):
        if not count:
            raise ScheduleError(
                f"{label} leaves stage {stage} without layers: only the first and the last stage, "
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


_MAX_SHIFT = 2
"""Layers that a cut moves by in one step of the search."""

_MAX_SHIFTED_CUTS = 8
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
        """Compute the time of every device, the busiest first."""
        device_us = [0.0] * (max(placement) + 1)
        for device, time_us in zip(placement, _stages(cuts, sums, ends_us), strict=True):
            device_us[device] += time_us
        return sorted(map(rounded, device_us), reverse=True)

    starting_cuts = [_proportional(sums, placement, ends_us)]
    starting_cuts += [list(accumulate(layers, initial=0)) for layers in starts]
    # Start and result of the first search both start the second one, for another local optimum.
    candidates = [*starting_cuts, *(descend(cuts, loads, _shifted) for cuts in starting_cuts)]
    max_load_us = min(max(loads(cuts)) for cuts in candidates)

    def unevenness(cuts: Sequence[int]) -> tuple[float, float]:
        # The maximum stays the first criterion: evenness never costs step time.
        excess_us = max(0.0, max(loads(cuts)) - max_load_us)
        return excess_us, rounded(sum(time_us**2 for time_us in _stages(cuts, sums, ends_us)))

    cuts = min((descend(cuts, unevenness, _shifted) for cuts in candidates), key=unevenness)
    return tuple(end - start for start, end in pairwise(cuts))


def _proportional(
    sums: Sequence[float], placement: Placement, ends_us: tuple[float, float]
) -> list[int]:
    """Cut where the time of all layers and ends before is nearest to that of even stages."""
    stages = len(placement)
    mean_us = (sums[-1] + sum(ends_us)) / stages
    cuts = [0]
    for stage in range(1, stages):
        # The previous stage needs a layer unless it is the first; so does each later inner stage.
        lowest = cuts[-1] + (stage > 1)
        highest = len(sums) - 1 - (stages - 1 - stage)
        target_us = stage * mean_us - ends_us[0]
        cuts.append(min(range(lowest, highest + 1), key=lambda layer: abs(sums[layer] - target_us)))
    return [*cuts, len(sums) - 1]


_Split = TypeVar("_Split", list[int], tuple[int, ...])


def descend(
    split: _Split, measure: Callable[[_Split], Any], neighbors: Callable[[_Split], Iterable[_Split]]
) -> _Split:
    """Replace a split by its best neighbor as long as that lowers the measure, down to 0."""
    best = measure(split)
    while best:
        candidates = ((measure(neighbor), neighbor) for neighbor in neighbors(split))
        value, neighbor = min(candidates, default=(best, split))
        if not value < best:
            break
        best, split = value, neighbor
    return split


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
    for first, stop in combinations(range(1, inner + 1), 2):
        if stop - first > _MAX_SHIFTED_CUTS:
            continue
        for shift in range(-_MAX_SHIFT, _MAX_SHIFT + 1):
            neighbor = [
                *cuts[:first],
                *(boundary + shift for boundary in cuts[first:stop]),
                *cuts[stop:],
            ]
            if shift and _are_stages(neighbor):
                yield neighbor


def _are_stages(cuts: Sequence[int]) -> bool:
    """Check that every inner stage has a layer, and no end a negative number."""
    first, *inner, last = (end - start for start, end in pairwise(cuts))
    return first >= 0 and last >= 0 and all(count > 0 for count in inner)
