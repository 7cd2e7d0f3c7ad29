"""Flags of this package that lower the peak memory of a training command.

The peak follows from one counted layer (`rehearsal.counting`), as in `advise`, so that no further
pipeline is run: such an estimate is within about 1% of the estimate of all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_vshape.core.check.simulate import peak_held
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import Pieces, even_layers
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.planner.lighter import lighter_layers
from megatron_vshape.core.planner.vocabulary import held_logits, shared_if_told, shared_pieces

NAMES = ("v-half", "v-min")
"""Schedules to try: the one with the smaller bubble first."""

PER_RANK = 4
"""Microbatches per rank that are looked at: a schedule reaches its peak in the first ones."""

MOST_RANKS = 8
"""Pipeline ranks up to which a layer split is searched for (minutes above)."""

LEAST_SAVED = 0.03
"""Share of the peak: less is within the error of the estimate."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """Flags, and the estimated peak of every pipeline rank with them."""

    flags: dict[str, Any]  # as `Command.having` takes them
    peak_bytes: tuple[float, ...]

    @property
    def text(self) -> str:
        """Return the flags as on a command line."""
        words = []
        for name, value in self.flags.items():
            flag = "--" + name.replace("_", "-")
            words.append(flag if value is True else f"{flag} {value}")
        return " ".join(words)

    @property
    def most_bytes(self) -> float:
        """Return the peak of the largest rank."""
        return max(self.peak_bytes)

    @property
    def largest(self) -> int:
        """Return the rank with the largest peak."""
        return self.peak_bytes.index(self.most_bytes)


def remedies(
    pieces: Pieces, num_layers: int, ranks: int, microbatches: int, can_share: bool
) -> list[Remedy]:
    """Return flags that could lower the peak, in the order in which a user would try them.

    `can_share` allows vocabulary parallelism; without it layers are moved between ranks.
    """
    microbatches = min(microbatches, PER_RANK * ranks)
    found: list[Remedy] = []
    for name in NAMES:
        try:
            schedule = make(name, ranks, microbatches)
            found += _of_schedule(name, schedule, pieces, num_layers, can_share)
        except ScheduleError:  # too few layers or microbatches
            continue
    return found


def _of_schedule(
    name: str, schedule: Schedule, pieces: Pieces, num_layers: int, can_share: bool
) -> Iterator[Remedy]:
    ranks, flags = schedule.num_devices, {"pipeline_schedule": name}
    layers = _layers(pieces, num_layers, schedule)
    costs = pieces.costs(layers)
    yield Remedy(flags | _split(layers), tuple(peak_held(schedule, costs)))
    if can_share:
        shared = shared_pieces(pieces, ranks, pieces.send_us, held_logits(pieces, ranks))
        layers = _layers(shared, num_layers, schedule)
        yield _shared(flags, schedule, shared.costs(layers), layers)
    elif ranks <= MOST_RANKS:
        layers, _ = lighter_layers(make(name, ranks, 2 * ranks), costs, pieces.shares)
        yield Remedy(flags | _split(layers), tuple(peak_held(schedule, pieces.costs(layers))))


def _shared(
    flags: dict[str, Any], schedule: Schedule, costs: Costs, layers: Sequence[int]
) -> Remedy:
    flags = flags | {"pipeline_vocab_parallel": True} | _split(layers)
    return Remedy(flags, tuple(peak_held(shared_if_told(schedule, costs), costs)))


def _layers(pieces: Pieces, num_layers: int, schedule: Schedule) -> tuple[int, ...]:
    """Return the layers per stage: even, or balanced if they do not divide."""
    if num_layers % schedule.num_stages:
        return pieces.balanced(num_layers, schedule.placement)
    return even_layers(num_layers, schedule.placement)


def _split(layers: Sequence[int]) -> dict[str, Any]:
    if len(set(layers)) == 1:
        return {}
    return {"pipeline_layer_split": ",".join(map(str, layers))}


def in_order(found: Sequence[Remedy], peak_bytes: float, limit_bytes: float) -> list[Remedy]:
    """Return the remedies that lower the peak, most useful first.

    If the run does not fit: those that fit, simplest first, then the smallest. If it fits: of the
    first schedule that helps, the smallest first.
    """
    lower = [each for each in found if each.most_bytes <= (1 - LEAST_SAVED) * peak_bytes]
    if peak_bytes > limit_bytes:
        return sorted(lower, key=lambda each: (max(0.0, each.most_bytes - limit_bytes),))
    return sorted(lower, key=lambda each: (_rank(each), each.most_bytes))


def _rank(remedy: Remedy) -> int:
    return NAMES.index(remedy.flags["pipeline_schedule"])
