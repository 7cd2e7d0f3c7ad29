"""What the passes of every stage cost: time and memory."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from operator import add, mul
from pathlib import Path
from statistics import median
from typing import Any, Self

from megatron_vshape.core.model.files import (
    check_keys,
    is_number,
    is_whole,
    parse_object,
    read_text,
)
from megatron_vshape.core.model.kinds import (
    BESIDE,
    DEVICE,
    KINDS,
    NO_RECOMPUTE,
    OFFLOAD,
    PARTS,
    PROCESSOR,
    Kind,
    ScheduleError,
    is_setting,
)

LEAST, MOST = 1e-6, 1e15
"""Of a time, and of what is held; times stay far from where floats end."""

MAX_RATIO = 1e9
"""Of the longest time to the shortest: the sums of a step's times must not lose the shortest."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Times and held memory of a part of the model: a stage, a layer, what an end has beside."""

    forward_us: float
    backward_us: float
    weight_us: float
    held_after_forward_bytes: float
    held_after_backward_bytes: float
    saved_us: float = 0.0  # by a whole backward, beside B + W
    forward_exchange_us: float = 0.0  # that F waits for other ranks of its stage, beside forward_us
    backward_exchange_us: float = 0.0  # that B does
    hidden_exchange_us: float = 0.0  # of B's, in a whole backward
    copy_out_us: float = 0.0  # to the host, of what may wait there
    offloaded_bytes: float = 0.0
    copy_back_us: float = 0.0

    @property
    def time_us(self) -> float:
        """Return the time of all passes of a microbatch, its backward split."""
        exchange_us = self.forward_exchange_us + self.backward_exchange_us
        return self.forward_us + self.backward_us + self.weight_us + exchange_us

    def times(self, factor: float) -> Self:
        """Return `factor` of this piece."""
        return type(self)(*(factor * value for value in self._values()))

    def plus(self, other: "Piece") -> Self:
        """Return both pieces together."""
        return type(self)(*map(add, self._values(), other._values()))

    def over(self, other: "Piece") -> Self:
        """Return what this piece has beyond the other, at least nothing."""
        pairs = zip(self._values(), other._values(), strict=True)
        return type(self)(*(max(0.0, a - b) for a, b in pairs))

    @classmethod
    def middle(cls, pieces: Iterable[Self]) -> Self:
        """Return the medians of several pieces."""
        return cls(*map(median, zip(*(each._values() for each in pieces), strict=True)))

    def at_least(self, time_us: float) -> Self:
        """Return the piece with no pass shorter than this: a stage without layers has kernels."""
        changed = {name: max(time_us, getattr(self, name)) for name in (*_PER_STAGE[:3], *_COPIES)}
        return replace(self, **changed)

    def _values(self) -> Iterator[float]:
        return (getattr(self, each.name) for each in fields(self))


@dataclass(frozen=True, slots=True)
class Costs:
    """Times and held memory of every stage, in model order.

    Times are in microseconds or any other unit used throughout, memory likewise in bytes or in
    chunks. A stage holds `held_after_forward_bytes` per microbatch from the start of F, then
    `held_after_backward_bytes` from the end of B, and nothing from the end of W on. `layers` says
    how many layers every stage had when that was measured, where it is known.

    A pass takes what it computes, the exchanges with other ranks of its stage (tensor and expert
    parallel) that it waits for, and `host_us`, whatever its size: so twice the stages take twice as
    much of that. A BW computes for `whole_backward_us` and waits for `whole_exchange_us`, where
    these are not those of B and W; exchanges hide in it that a split one waits for. A message takes
    `send_us` between any two stages of other devices. `sources` tell of what stands here by name
    whether it was measured or assumed, and how.

    A joint pass takes what `joint` has for it, by the name `F0&B7` or `F0&BW7` of its stages. Of a
    pair that is not there, `hidden_share` of both passes' exchanges is behind what the other
    computes; without it a pair takes as long as its passes one after the other.

    >>> from megatron_vshape import Costs
    >>> costs = Costs.uniform(num_devices=2, num_stages=4, forward=1, backward=1.2, weight=0.8)
    >>> costs.backward_us, costs.held_after_forward_bytes
    ((1.2, 1.2, 1.2, 1.2), (1.0, 1.0, 1.0, 1.0))
    """

    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]
    weight_us: tuple[float, ...]
    send_us: float
    held_after_forward_bytes: tuple[float, ...]
    held_after_backward_bytes: tuple[float, ...]
    layers: tuple[int, ...] | None = None
    whole_backward_us: tuple[float, ...] | None = None  # None: B + W
    host_us: float = 0.0  # of a pass of the processor: what launching and running it takes beside
    forward_exchange_us: tuple[float, ...] | None = None  # None: nothing
    backward_exchange_us: tuple[float, ...] | None = None
    whole_exchange_us: tuple[float, ...] | None = None  # None: as B's
    sources: tuple[tuple[str, str], ...] = ()  # "measured ..." or "assumed ...", by name
    others: tuple[tuple[str, tuple[float, ...]], ...] = ()  # what other kinds take or hold, by name
    recompute: tuple[tuple[str, "Costs"], ...] = ()
    half_duplex: bool = False
    joint: tuple[tuple[str, float], ...] = ()
    hidden_share: float | None = None

    def __post_init__(self) -> None:
        self._check()

    @classmethod
    def uniform(
        cls,
        num_devices: int,
        num_stages: int,
        forward: float = 1.0,
        backward: float = 1.0,
        weight: float = 1.0,
        send: float = 0.0,
        host: float = 0.0,
        *,
        kinds: Iterable[Kind] = (),
    ) -> "Costs":
        """Return equal costs, given for one of 2 * num_devices stages and scaled to `num_stages`.

        So every placement does the same work and holds memory in the same unit, the chunk: the
        activations of one microbatch in 1 / (2 * num_devices) of the model. What a message takes,
        and the host for a pass, is the same at any number of stages. What other `kinds` than F, B
        and W take and hold is 1.
        """
        scale = 2 * num_devices / num_stages

        def alike(value: float) -> tuple[float, ...]:
            return (value * scale,) * num_stages

        one = alike(1.0)
        others = tuple((name, one) for name in _names_of_others(kinds))
        times = alike(forward), alike(backward), alike(weight)
        return cls(*times, send, one, one, host_us=host, others=others)

    @classmethod
    def of(
        cls,
        stages: Sequence[Piece],
        send_us: float,
        layers: Sequence[int] | None = None,
        host_us: float = 0.0,
        sources: tuple[tuple[str, str], ...] = (),
        half_duplex: bool = False,
    ) -> "Costs":
        """Return the costs of these stages, in model order; with copies, if any has some to copy.

        A stage that has nothing to copy then needs times for that nevertheless.
        """
        each: dict[str, Any] = {
            name: tuple(getattr(stage, name) for stage in stages) for name in _PER_STAGE
        }
        each["layers"] = None if layers is None else tuple(layers)
        if any(stage.saved_us > 0 for stage in stages):
            # Where little is there to measure, noise may say that it saves more than a pass.
            least = (max(stage.backward_us, stage.weight_us) for stage in stages)
            whole = (s.backward_us + s.weight_us - s.saved_us for s in stages)
            each["whole_backward_us"] = tuple(map(max, least, whole))
        for name in ("forward_exchange_us", "backward_exchange_us"):
            if any(getattr(stage, name) > 0 for stage in stages):
                each[name] = tuple(getattr(stage, name) for stage in stages)
        if any(stage.hidden_exchange_us > 0 for stage in stages):
            left = (s.backward_exchange_us - s.hidden_exchange_us for s in stages)
            each["whole_exchange_us"] = tuple(max(0.0, exposed) for exposed in left)
        if any(stage.offloaded_bytes > 0 for stage in stages):
            each["half_duplex"] = half_duplex
            each["others"] = tuple(
                (name, tuple(getattr(stage, name) for stage in stages)) for name in _OF_COPIES
            )
        return cls(send_us=send_us, host_us=host_us, sources=sources, **each)

    def stages(self) -> list[Piece]:
        """Return every stage by itself."""
        split = enumerate(map(add, self.backward_us, self.weight_us))
        saved = (both - self._computes_us(Kind.BW, stage) for stage, both in split)
        stages = range(self.num_stages)
        forward, backward, whole = (
            [self.exchanges_us(kind, stage) for stage in stages]
            for kind in (Kind.F, Kind.B, Kind.BW)
        )
        hidden = (b - left for b, left in zip(backward, whole, strict=True))
        own = (getattr(self, name) for name in _PER_STAGE)
        nothing, others = (0.0,) * self.num_stages, dict(self.others)
        copies = (others.get(name, nothing) for name in _OF_COPIES)
        return list(map(Piece, *own, saved, forward, backward, hidden, *copies))

    @property
    def num_stages(self) -> int:
        """Return how many stages the costs are for."""
        return len(self.forward_us)

    def time_us(self, kind: Kind, stage: int) -> float:
        """Return how long a pass of `kind` takes on `stage`, everything counted."""
        host_us = self.host_us if kind.resource == PROCESSOR else 0.0
        return self._computes_us(kind, stage) + self.exchanges_us(kind, stage) + host_us

    def _computes_us(self, kind: Kind, stage: int) -> float:
        times = self._named(kind.time)
        if times is not None:
            return times[stage]
        return sum(self._computes_us(part, stage) for part in kind.does if part is not kind)

    def exchanges_us(self, kind: Kind, stage: int) -> float:
        """Return how long a pass of `kind` waits for other ranks of its stage."""
        times = self._named(kind.exchange)
        if times is not None:
            return times[stage]
        return sum(self.exchanges_us(part, stage) for part in kind.does if part is not kind)

    def joint_us(self, forward: int, kind: Kind, backward: int) -> float:
        """Return how long F of a stage takes beside a pass of `kind`, B or BW, of another."""
        known = next(
            (us for name, us in self.joint if name == joint_name(forward, kind, backward)), None
        )
        if known is not None:
            return known
        alone = self.time_us(Kind.F, forward) + self.time_us(kind, backward)
        exchanges = self.exchanges_us(Kind.F, forward) + self.exchanges_us(kind, backward)
        return max(alone - (self.hidden_share or 0.0) * exchanges, exchanges)

    @property
    def joins(self) -> bool:
        """Return whether these say what joint passes take; else none is planned."""
        return bool(self.joint) or self.hidden_share is not None

    @property
    def share_hidden(self) -> float | None:
        """Return the share of the exchanges that hides in a joint pass: given, or as measured.

        None where neither is known, or nothing waits.
        """
        if self.hidden_share is not None or not self.joint:
            return self.hidden_share
        shares = []
        for name, price in self.joint:
            forward, kind, backward = _pair_of(name)
            waits = self.exchanges_us(Kind.F, forward) + self.exchanges_us(kind, backward)
            alone = self.time_us(Kind.F, forward) + self.time_us(kind, backward)
            if waits:
                shares.append((alone - price) / waits)
        return min(max(median(shares), 0.0), 1.0) if shares else None

    def never_joined(self) -> "Costs":
        """Return the costs of a machine on which no pass runs beside another."""
        return replace(self, joint=(), hidden_share=None) if self.joins else self

    def joined_no_slower(self) -> "Costs":
        """Return costs without joint passes at which none would be faster than its two passes.

        What runs at these costs runs at those, every joint pass as its F and then its backward, no
        later and holding no more. Each pass is spared what may hide of its exchange, and half of
        what a measured pair saves beyond that.
        """
        if not self.joins:
            return self
        stages, hidden = range(self.num_stages), self.hidden_share or 0.0
        left = {
            kind: [self.time_us(kind, s) - hidden * self.exchanges_us(kind, s) for s in stages]
            for kind in (Kind.F, Kind.B, Kind.BW)
        }
        spared = {kind: [0.0] * self.num_stages for kind in left}
        for name, price in self.joint:
            f, kind, b = _pair_of(name)
            half = (left[Kind.F][f] + left[kind][b] - price) / 2
            for each, stage in ((Kind.F, f), (kind, b)):
                spared[each][stage] = max(spared[each][stage], half)
        forward, backward, whole = (
            tuple(max(t - s, t / 1000) for t, s in zip(left[kind], spared[kind], strict=True))
            for kind in left
        )
        return replace(
            self.in_passes(),
            forward_us=forward,
            backward_us=backward,
            whole_backward_us=tuple(map(max, whole, backward)),
        )

    @property
    def whole_us(self) -> tuple[float, ...] | None:
        """Return what a BW takes on every stage; None if that is B + W, so that joining is free."""
        both = self.whole_backward_us, self.whole_exchange_us
        if both == (None, None) and not self.host_us:
            return None
        return tuple(self.time_us(Kind.BW, stage) for stage in range(self.num_stages))

    def in_passes(self) -> "Costs":
        """Return the costs with all that a pass takes in its own time, exchanges and host too.

        Without the price list, so `at` comes before, and without joint passes.
        """
        if self.joins:
            return self.never_joined().in_passes()
        if not self.host_us and all(getattr(self, name) is None for name in _EXCHANGES):
            return replace(self, recompute=()) if self.recompute else self
        stages = range(self.num_stages)
        forward, backward, weight = (
            tuple(self.time_us(kind, stage) for stage in stages) for kind in PARTS
        )
        return replace(
            self,
            forward_us=forward,
            backward_us=backward,
            weight_us=weight,
            whole_backward_us=self.whole_us,
            host_us=0.0,
            forward_exchange_us=None,
            backward_exchange_us=None,
            whole_exchange_us=None,
            recompute=(),
        )

    def with_copies(self, forwards: float, half_duplex: bool = False) -> "Costs":
        """Return the costs where all that a stage holds may be copied, in so many F one way.

        In those of a stage in the middle: what the ends compute beside their layers holds nothing.
        """
        held = self.held_after_forward_bytes
        each = median(us / more for us, more in zip(self.forward_us, held, strict=True) if more)
        times = tuple(max(forwards * each * more, LEAST * forwards * each) for more in held)
        return self.with_copies_of(times, held, times, half_duplex)

    def with_copies_of(
        self,
        out_us: tuple[float, ...],
        moved_bytes: tuple[float, ...],
        back_us: tuple[float, ...],
        half_duplex: bool = False,
    ) -> "Costs":
        """Return the costs where so much of every stage may be copied, in so long each way."""
        amounts = out_us, moved_bytes, back_us
        own = self.without_copies()
        others = (*own.others, *zip(_OF_COPIES, amounts, strict=True))
        made = replace(own, others=others, recompute=(), half_duplex=half_duplex)
        settings = ((name, made.with_prices(name, each.lists())) for name, each in own.recompute)
        return replace(made, recompute=tuple(settings))

    @property
    def trades(self) -> bool:
        """Return whether these say what memory may be traded for, beside the order."""
        return self.copies or bool(self.recompute)

    @property
    def copies(self) -> bool:
        """Return whether these say what it takes that activations wait in host memory."""
        return set(_names_of_others(OFFLOAD)) <= {name for name, _ in self.others}

    def without_copies(self) -> "Costs":
        """Return the costs of stages whose activations never wait in host memory."""
        left = tuple(each for each in self.others if each[0] not in _names_of_others(OFFLOAD))
        others = tuple((setting, each.without_copies()) for setting, each in self.recompute)
        return replace(self, others=left, recompute=others, half_duplex=False)

    def in_order_alone(self) -> "Costs":
        """Return the costs without copies to the host and without a price list of recompute."""
        return replace(self, recompute=()).without_copies()

    def with_prices(self, setting: str, prices: Mapping[str, tuple[float, ...]]) -> "Costs":
        """Return the costs where `prices`, by name and with a value per stage, replace these.

        The same share of what is held is copied to the host and back, unless they say otherwise.

        Raises:
            ScheduleError: a name that these lack, or a whole backward that may differ is missing.
        """
        known = self.lists()
        for name in prices:
            if name not in known:
                raise ScheduleError(
                    f"recompute {setting!r:.60} has {name!r:.40}, which does not stand beside "
                    f"recompute; it may hold {', '.join(known)}"
                )
        splits = {"backward_us", "weight_us"}.intersection(prices)
        if splits and "whole_backward_us" in known and "whole_backward_us" not in prices:
            raise ScheduleError(
                f"recompute {setting!r:.60} lacks whole_backward_us, which stands beside recompute"
            )
        held = prices.get("held_after_forward_bytes", self.held_after_forward_bytes)
        pairs = zip(held, self.held_after_forward_bytes, strict=False)
        share = [new / old if old else 1.0 for new, old in pairs]
        moved = _names_of_others(OFFLOAD)
        changed = {name: each for name, each in prices.items() if name not in dict(self.others)}
        others = tuple(
            (name, prices.get(name, tuple(map(mul, each, share)) if name in moved else each))
            for name, each in self.others
        )
        return replace(self, recompute=(), others=others, **changed)  # type: ignore[arg-type]

    def with_prices_of(self, setting: str, other: "Costs") -> "Costs":
        """Return the costs where those of the same stages with a setting replace these."""
        known, prices = self.lists(), other.lists()
        whole_us = tuple(map(add, other.backward_us, other.weight_us))
        prices.setdefault("whole_backward_us", whole_us)
        return self.with_prices(setting, {name: prices[name] for name in known if name in prices})

    def at(self, settings: Sequence[str]) -> "Costs":
        """Return the costs of stages that have these settings; of none, or of `none` alone, these.

        Costs without a price list are of whatever the stages do, and are taken as they are.

        Raises:
            ScheduleError: the list lacks a setting, or there are more or fewer than stages.
        """
        if not self.recompute or not settings:
            return self
        if len(settings) != self.num_stages:
            raise ScheduleError(
                f"the costs are for {self.num_stages} stages, {len(settings)} have a setting of "
                "recompute"
            )
        by_name = {NO_RECOMPUTE: self} | dict(self.recompute)
        missing = next((each for each in settings if each not in by_name), None)
        if missing is not None:
            raise ScheduleError(
                f"the costs have no prices of recompute {missing!r:.60}; they have "
                f"{', '.join(by_name)}"
            )
        given = [by_name[setting] for setting in settings]
        changed: dict[str, Any] = {
            name: tuple(getattr(each, name)[stage] for stage, each in enumerate(given))
            for name in (*_PER_STAGE, *_TIMES)
            if getattr(self, name) is not None
        }
        others = zip(self.others, *(each.others for each in given), strict=True)
        changed["others"] = tuple(
            (own[0], tuple(each[1][stage] for stage, each in enumerate(rest)))
            for own, *rest in others
        )
        return replace(self, recompute=(), **changed)

    def changes(self, kind: Kind) -> tuple[Sequence[float], Sequence[float]]:
        """Return, by stage, how much more is held when such a pass starts, and when it ends."""
        takes, keeps, frees = self.held(kind)
        return takes, [more - less for more, less in zip(keeps, frees, strict=True)]

    def held(self, kind: Kind) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
        """Return, by stage, what a pass takes when it starts, and keeps and frees when it ends."""
        nothing = (0.0,) * self.num_stages
        takes, keeps, frees = (
            self._named(name) or nothing for name in (kind.takes, kind.keeps, kind.frees)
        )
        return takes, keeps, frees

    def _named(self, name: str) -> tuple[float, ...] | None:
        """Return the amounts of this name, one per stage; None if they follow from others.

        Raises:
            ScheduleError: a kind of pass has such amounts, and these costs do not.
        """
        if not name or name in _KNOWN:
            found: tuple[float, ...] | None = getattr(self, name) if name else None
            return found
        for known, amounts in self.others:
            if known == name:
                return amounts
        raise ScheduleError(f"the costs have no {name}, which a pass of this schedule has")

    def split_no_slower(self) -> "Costs":
        """Return costs at which a split backward loses nothing to a whole one, if these differ.

        Nor do an F and a backward one after the other to a joint pass.

        What runs at these costs runs at those, every BW as B and W, no later and holding no more:
        so bounds for these hold.
        """
        priced = self.joined_no_slower().in_passes()
        # a BW holds what its F left until it ends, even if a B left more for its W
        held = map(min, self.held_after_forward_bytes, self.held_after_backward_bytes)
        priced = replace(priced, held_after_backward_bytes=tuple(held))
        if priced.whole_backward_us is None:
            return priced
        backward, weight = [], []
        for b, w, whole in zip(
            priced.backward_us, priced.weight_us, priced.whole_backward_us, strict=True
        ):
            weight.append(min(w, max(whole - b, whole / 1000)))  # above 0, as a time is
            backward.append(min(b, whole - weight[-1]))
        return replace(
            priced, backward_us=tuple(backward), weight_us=tuple(weight), whole_backward_us=None
        )

    def never_split(self) -> "Costs":
        """Return costs at which B is a whole backward, and W next to nothing, as a time is."""
        whole = [self.time_us(Kind.BW, stage) for stage in range(self.num_stages)]
        rest = 1e-6  # of it
        return replace(
            self.in_passes(),
            backward_us=tuple(each * (1 - rest) for each in whole),
            weight_us=tuple(max(each * rest, LEAST) for each in whole),
            whole_backward_us=None,
            held_after_backward_bytes=(0.0,) * self.num_stages,
        )

    def busy_us(self, placement: Sequence[int], num_devices: int, num_microbatches: int) -> float:
        """Return the least work of the busiest device, every backward split or whole."""
        work = [0.0] * num_devices
        for stage, device in enumerate(placement):
            forward, *split = (self.time_us(kind, stage) for kind in PARTS)
            work[device] += forward + min(sum(split), self.time_us(Kind.BW, stage))
        return (max(work) + self.device_us()) * num_microbatches

    def device_us(self) -> float:
        """Return what the passes take at least that a device has once a microbatch, not a stage.

        Those that read what some stage makes, which come after it.
        """
        return sum(
            min(values)
            for kind in KINDS
            for name, values in self.others
            if kind.of == DEVICE and kind.reads and kind.time == name
        )

    def of_no_stage(self) -> tuple[tuple[str, float], ...]:
        """Return what passes take and hold that are no stage's, by name: the most that is told."""
        names = _names_of_others(kind for kind in KINDS if kind.of)
        return tuple((name, max(values)) for name, values in self.others if name in names)

    def with_source(self, text: str, *names: str) -> "Costs":
        """Return the costs with `text` as the source of these figures, or of all without one."""
        told = dict(self.sources)
        given = [name for name in (*_FIELDS, *_TIMES) if getattr(self, name) is not None]
        for name in names or [each for each in (*given, "host_us") if each not in told]:
            told[name] = text
        return replace(self, sources=tuple(told.items()))

    def sources_told(self) -> Iterator[str]:
        """Yield a line for each source, which names what is from it."""
        by_text: dict[str, list[str]] = {}
        for name, text in self.sources:
            by_text.setdefault(text, []).append(name)
        for text, names in by_text.items():
            yield f"{', '.join(names)}: {text}"

    def to_json(self) -> str:
        """Return the costs file's text."""
        given = {name: getattr(self, name) for name in (*_FIELDS, *_OPTIONAL)}
        known = {name: value for name, value in given.items() if value is not None}
        if self.host_us:
            known["host_us"] = self.host_us
        if self.sources:
            known["sources"] = dict(self.sources)
        if self.half_duplex:
            known["half_duplex"] = True
        if self.joint:
            known["joint"] = dict(self.joint)
        if self.hidden_share is not None:
            known["hidden_share"] = self.hidden_share
        if self.recompute:
            known["recompute"] = {name: each.lists() for name, each in self.recompute}
        return json.dumps(known | dict(self.others), indent=1)

    def lists(self) -> dict[str, tuple[float, ...]]:
        """Return all that is given for every stage, by name."""
        given = {name: getattr(self, name) for name in (*_PER_STAGE, *_TIMES)}
        return {name: each for name, each in given.items() if each is not None} | dict(self.others)

    @classmethod
    def from_json(cls, text: str) -> "Costs":
        """Return the costs that a costs file holds.

        Raises:
            ScheduleError: not JSON, a key is missing or unknown, or a value is not a cost.
        """
        data = parse_object(text, "the costs file")
        layers = _whole_numbers("layers", data.pop("layers")) if "layers" in data else None
        host_us = _numbers("host_us", [data.pop("host_us", 0.0)])[0]
        sources = _sources(data.pop("sources", {}))
        recompute, half_duplex = data.pop("recompute", {}), data.pop("half_duplex", False)
        if not isinstance(half_duplex, bool):
            raise ScheduleError(f"half_duplex is {half_duplex!r:.40}; it must be true or false")
        joint, hidden = _joint(data.pop("joint", {})), data.pop("hidden_share", None)
        if hidden is not None and not is_number(hidden):
            raise ScheduleError(f"hidden_share is {hidden!r:.40}; it must be a number from 0 to 1")
        optional = {name: _numbers(name, data.pop(name)) for name in _TIMES if name in data}
        others = tuple(
            (each, _numbers(each, data.pop(each)))
            for each in _names_of_others(KINDS)
            if each in data
        )
        check_keys(data, _FIELDS, "the costs file")
        send_us = _numbers("send_us", [data["send_us"]])[0]
        lists: dict[str, Any] = {name: _numbers(name, data[name]) for name in _PER_STAGE}
        if not any(lists["held_after_forward_bytes"]):
            raise ScheduleError(
                "held_after_forward_bytes is 0 for every stage; some must hold more"
            )
        lists |= optional
        made = cls(
            send_us=send_us,
            **lists,
            layers=layers,
            host_us=host_us,
            sources=sources,
            others=others,
            half_duplex=half_duplex,
            joint=joint,
            hidden_share=hidden,
        )
        return replace(made, recompute=tuple(_settings(recompute, made)))

    @classmethod
    def load(cls, path: str | Path) -> "Costs":
        """Return the costs in the file at `path`; raises ScheduleError naming the file."""
        text = read_text(path, "the costs file")
        try:
            return cls.from_json(text)
        except ScheduleError as error:
            raise ScheduleError(f"the costs file {path} is not valid: {error}") from None

    def _check(self) -> None:
        values_of = {name: getattr(self, name) for name in _PER_STAGE} | dict(self.others)
        given = {name: getattr(self, name) for name in _TIMES}
        values_of |= {name: values for name, values in given.items() if values is not None}
        for name, values in values_of.items():
            if len(values) != len(self.forward_us) or not values:
                raise ScheduleError(
                    f"the costs have {len(values)} values of {name} and {len(self.forward_us)} of "
                    "forward_us; there must be one of each per stage"
                )
            for stage, value in enumerate(values):
                _check_value(name, f"{name} of stage {stage}", value, name in _EXCHANGES)
        self._check_layers()
        self._check_recompute()
        self._check_joint()
        _check_value("send_us", "send_us", self.send_us, may_be_zero=True)
        _check_value("host_us", "host_us", self.host_us, may_be_zero=True)
        times = [time for name in values_of if name.endswith("_us") for time in values_of[name]]
        times += [price for _, price in self.joint]
        longest = max(*times, self.send_us, self.host_us)
        shortest = min(filter(None, times))
        if longest > MAX_RATIO * shortest:
            raise ScheduleError(
                f"the times reach from {shortest} to {longest}; none may be more than "
                f"{MAX_RATIO:g} times another"
            )

    def _check_recompute(self) -> None:
        for setting, each in self.recompute:
            if not is_setting(setting) or setting == NO_RECOMPUTE:
                raise ScheduleError(
                    f"recompute has prices of {setting!r:.40}; a setting is full, or modules with "
                    f"commas, as in layernorm,mlp, and what stands beside the list is "
                    f"{NO_RECOMPUTE}"
                )
            own, other = self.lists(), each.lists()
            if own.keys() != other.keys() or self.num_stages != each.num_stages:
                raise ScheduleError(
                    f"the prices of recompute {setting} are {', '.join(other)} of "
                    f"{each.num_stages} stages, those without it {', '.join(own)} of "
                    f"{self.num_stages}; they must be of the same"
                )

    def _check_joint(self) -> None:
        for name, price in self.joint:
            match = _JOINT.fullmatch(name)
            if match is None or max(map(int, match.groups())) >= self.num_stages:
                raise ScheduleError(
                    f"joint has {name!r:.40}; it must name two of the {self.num_stages} stages, "
                    "that of the F and that of the B or BW beside it, as in F0&B7 or F0&BW7"
                )
            _check_value("joint_us", f"joint {name}", price)
        if self.hidden_share is not None and not 0 <= self.hidden_share <= 1:
            raise ScheduleError(f"hidden_share is {self.hidden_share}; it must be from 0 to 1")

    def _check_layers(self) -> None:
        if self.layers is None:
            return
        if len(self.layers) != len(self.forward_us):
            raise ScheduleError(
                f"the costs have {len(self.layers)} values of layers and {len(self.forward_us)} "
                "of forward_us; there must be one of each per stage"
            )
        if min(self.layers) < 0:
            raise ScheduleError(f"layers holds {min(self.layers)}; no stage has so many")


def _check_value(name: str, what: str, value: float, may_be_zero: bool = False) -> None:
    """Raise ScheduleError unless the value is one that can be reckoned with."""
    may_be_zero = may_be_zero or not name.endswith("_us")
    if not math.isfinite(value) or value < 0 or not (value or may_be_zero):
        wanted = "finite and not below 0" if may_be_zero else "a finite number above 0"
        raise ScheduleError(f"{what} is {value}; it must be {wanted}")
    if value > MOST or (value < LEAST and not may_be_zero):
        raise ScheduleError(f"{what} is {value}; it must be from {LEAST:g} to {MOST:g}")


_PER_STAGE = tuple(each.name for each in fields(Piece)[:5])
_OF_COPIES = tuple(each.name for each in fields(Piece)[-3:])
_COPIES = _OF_COPIES[::2]  # their times
_EXCHANGES = ("forward_exchange_us", "backward_exchange_us", "whole_exchange_us")
_TIMES = ("whole_backward_us", *_EXCHANGES)  # of every stage, where they are known
_OPTIONAL = ("layers", *_TIMES)
_FIELDS = (*_PER_STAGE[:3], "send_us", *_PER_STAGE[3:])
_ALONE = ("host_us", "sources", "recompute", "half_duplex", "joint", "hidden_share")
_KNOWN = frozenset((*_FIELDS, *_OPTIONAL, *_ALONE))
_JOINT = re.compile(r"F([0-9]{1,9})&BW?([0-9]{1,9})", re.ASCII)

MEASURED, ASSUMED = "measured", "assumed"
"""How the source of a figure begins."""


def joint_name(forward: int, kind: Kind, backward: int) -> str:
    """Return by what name costs have the price of F of a stage beside B or BW of another."""
    return f"{Kind.F}{forward}{BESIDE}{kind}{backward}"


def _pair_of(name: str) -> tuple[int, Kind, int]:
    """Return the F's stage, the kind beside it and its stage of a name by `joint_name`."""
    forward, beside = name.removeprefix(Kind.F).split(BESIDE)
    kind = Kind.BW if beside.startswith(Kind.BW) else Kind.B
    return int(forward), kind, int(beside.removeprefix(kind))


def _joint(given: object) -> tuple[tuple[str, float], ...]:
    """Return the prices of joint passes read from JSON."""
    if not isinstance(given, dict):
        raise ScheduleError(f"joint is {given!r:.60}; it must be an object with a price per pair")
    return tuple((name, _numbers(f"joint {name}", [price])[0]) for name, price in given.items())


def _names_of_others(kinds: Iterable[Kind]) -> list[str]:
    """Return what passes of these kinds take and hold, by the table, that no costs must have."""
    names = (
        name
        for kind in kinds
        for name in (kind.time, kind.exchange, kind.takes, kind.keeps, kind.frees)
    )
    return [name for name in dict.fromkeys(names) if name and name not in _KNOWN]


def _sources(given: object) -> tuple[tuple[str, str], ...]:
    """Return the sources read from JSON; raises ScheduleError unless they are of figures here."""
    if not isinstance(given, dict):
        raise ScheduleError(f"sources is {given!r:.60}; it must be an object with a text per name")
    for name, text in given.items():
        if name not in _KNOWN and name not in _names_of_others(KINDS):
            raise ScheduleError(f"sources tells of {name!r:.40}, which no costs file has")
        if not isinstance(text, str) or not text.startswith((MEASURED, ASSUMED)):
            raise ScheduleError(
                f"the source of {name} is {text!r:.60}; it must begin with {MEASURED} or {ASSUMED}"
            )
    return tuple(given.items())


def _settings(given: object, own: Costs) -> Iterator[tuple[str, Costs]]:
    """Yield the costs of every setting read from JSON, which has what differs from `own`.

    The same share of what is held is copied to the host and back, unless it says otherwise.

    Raises:
        ScheduleError: not an object of objects, a name that `own` lacks, or a whole backward that
            may differ is missing.
    """
    if not isinstance(given, dict):
        raise ScheduleError(
            f"recompute is {given!r:.60}; it must be an object with the prices of each setting"
        )
    for setting, prices in given.items():
        if not isinstance(prices, dict):
            raise ScheduleError(
                f"recompute {setting!r:.60} is {prices!r:.60}; it must be an object with prices"
            )
        lists = {name: _numbers(name, values) for name, values in prices.items()}
        yield setting, own.with_prices(setting, lists)


def _numbers(name: str, values: object) -> tuple[float, ...]:
    """Return the numbers in a list read from JSON."""
    if not isinstance(values, list) or not values:
        raise ScheduleError(f"{name} is {values!r:.60}; it must be a list with a number per stage")
    for value in values:
        if not is_number(value):
            raise ScheduleError(f"{name} holds {value!r:.60}, which is not a number")
    try:
        return tuple(map(float, values))
    except OverflowError:
        raise ScheduleError(f"{name} holds a number too large for a float") from None


def _whole_numbers(name: str, values: object) -> tuple[int, ...]:
    """Return the whole numbers in a list read from JSON."""
    for value in values if isinstance(values, list) else [values]:
        if not isinstance(values, list) or not is_whole(value):
            raise ScheduleError(f"{name} is {values!r:.60}; it must be a whole number per stage")
    return tuple(values) if isinstance(values, list) else ()


def held_text(held: float) -> str:
    """Return what is held in 12 digits: a limit read back from them is as good as `held`."""
    return f"{held:,.12g}"


def chunk_of(costs: Costs, num_devices: int) -> float:
    """Return what a chunk holds: 1 / (2 * num_devices) of a microbatch's activations in the model.

    In the unit of the costs' memory. Where stages hold the same, 1F1B holds 2 * num_devices.
    """
    return math.fsum(costs.held_after_forward_bytes) / (2 * num_devices)


def regroup(costs: Costs, num_stages: int, name: str) -> Costs:
    """Return the costs of a coarser cut of the same model: neighbouring stages added up.

    So one file of 2 D stages serves every schedule of one or two chunks a device. What a message
    takes stays, and what the host takes for a pass: of the coarser cut there are fewer of both.

    Raises:
        ScheduleError: the stages do not go evenly into the file's.
    """
    size, rest = divmod(costs.num_stages, num_stages)
    if rest or not size:
        raise ScheduleError(
            f"the costs are for {costs.num_stages} stages, {name} has {num_stages}; the "
            f"costs need {num_stages} or a multiple of it, which is then added up"
        )

    names = [name for name in (*_PER_STAGE, *_OPTIONAL) if getattr(costs, name) is not None]
    changed: dict[str, Any] = {name: tuple(_sums(getattr(costs, name), size)) for name in names}
    single = dict(costs.of_no_stage())
    changed["others"] = tuple(
        (name, (single[name],) * num_stages if name in single else tuple(_sums(each, size)))
        for name, each in costs.others
    )
    if costs.layers is not None:
        changed["layers"] = tuple(map(int, changed["layers"]))
    changed["joint"] = tuple(_joint_sums(costs, num_stages))
    finer = replace(costs, recompute=())
    changed["recompute"] = tuple(
        (setting, regroup(each, num_stages, name)) for setting, each in costs.recompute
    )
    return replace(finer, **changed)


def _joint_sums(costs: Costs, num_stages: int) -> Iterator[tuple[str, float]]:
    """Yield the prices of the pairs of a coarser cut of which all parts are known.

    The first stage of F runs beside the last one of the backward, and so on.
    """
    known, size = dict(costs.joint), costs.num_stages // num_stages
    pairs = product(range(num_stages), (Kind.B, Kind.BW), range(num_stages))
    for forward, kind, backward in pairs if known else ():
        names = [
            joint_name(forward * size + at, kind, (backward + 1) * size - 1 - at)
            for at in range(size)
        ]
        if all(name in known for name in names):
            yield joint_name(forward, kind, backward), math.fsum(map(known.__getitem__, names))


def _sums(values: tuple[float, ...], size: int) -> Iterator[float]:
    for first in range(0, len(values), size):
        yield math.fsum(values[first : first + size])
