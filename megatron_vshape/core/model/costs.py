"""Costs of the passes of every stage: time and memory."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from operator import add, sub
from pathlib import Path
from statistics import median
from typing import Any, Generic, Self, TypeVar, cast

from megatron_vshape.core.model.costs_file import read_costs, text_of
from megatron_vshape.core.model.files import read_text
from megatron_vshape.core.model.kinds import (
    COPY_BACK,
    COPY_OUT,
    DEVICE,
    DUMMY,
    EXCHANGES,
    HELD,
    KINDS,
    KNOWN_ALONE,
    OFFLOAD,
    PARTS,
    PROCESSOR,
    RELEASE,
    STATE,
    TIMES,
    WORKS,
    Kind,
    ScheduleError,
    amount_names,
    other_amounts,
)

LEAST, MOST = 1e-6, 1e15
"""Upper bounds of times and memory, far below the range of floats."""

MAX_RATIO = 1e9
"""Maximum ratio of the longest to the shortest time, so that sums do not lose the shortest."""


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
    copy_out_us: float = 0.0  # to the host, of the activations that can be offloaded
    offloaded_bytes: float = 0.0
    copy_back_us: float = 0.0
    state_bytes: float = 0.0
    forward_work_bytes: float = 0.0  # workspace of F
    backward_work_bytes: float = 0.0
    weight_work_bytes: float = 0.0
    whole_work_bytes: float = 0.0
    dummy_bytes: float = 0.0  # left allocated by Megatron's own backward

    @property
    def time_us(self) -> float:
        """Time of all passes of a microbatch with a split backward."""
        exchange_us = self.forward_exchange_us + self.backward_exchange_us
        return self.forward_us + self.backward_us + self.weight_us + exchange_us

    def times(self, factor: float) -> Self:
        """Scale the piece; the workspace does not scale, because layers run one after another."""
        own = {name: getattr(self, name) if factor else 0.0 for name in WORKS}
        return replace(type(self)(*(factor * value for value in self._values())), **own)

    def plus(self, other: "Piece") -> Self:
        """Add up both pieces; the workspace is the maximum, because they run in sequence."""
        most = {name: max(getattr(self, name), getattr(other, name)) for name in WORKS}
        return replace(type(self)(*map(add, self._values(), other._values())), **most)

    def over(self, other: "Piece") -> Self:
        """Subtract the other piece, down to 0; a greater workspace counts in full."""
        beyond = map(sub, self._values(), other._values())
        made = type(self)(*(max(0.0, each) for each in beyond))
        own = {name: getattr(self, name) if getattr(made, name) else 0.0 for name in WORKS}
        return replace(made, **own)

    @classmethod
    def middle(cls, pieces: Iterable[Self]) -> Self:
        """Return the medians of several pieces."""
        return cls(*map(median, zip(*(each._values() for each in pieces), strict=True)))

    def at_least(self, time_us: float) -> Self:
        """Set a minimum time per pass, since even a stage without layers has kernels."""
        names = (*TIMES, COPY_OUT.time, COPY_BACK.time)
        return replace(self, **{name: max(time_us, getattr(self, name)) for name in names})

    def _values(self) -> Iterator[float]:
        return (getattr(self, each.name) for each in fields(self))


Amounts = tuple[float, ...]
"""One value per stage."""

_Known = TypeVar("_Known", Amounts, Amounts | None)


class _Named(Generic[_Known]):
    """Field of `Costs.amounts` by name; None if the value follows from others."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, costs: "Costs | None", owner: type) -> _Known:
        amounts = () if costs is None else costs.amounts  # on the class, as documentation tools do
        for name, values in amounts:
            if name == self.name:
                return values
        return cast(_Known, None)


@dataclass(frozen=True, slots=True, init=False)
class Costs:
    """Times and activation memory of every stage, in model order.

    `amounts` have the names of the kinds' rows, and can be given as keyword arguments (None omits
    one). Times are in microseconds or any other common unit; memory is in bytes or chunks. A stage
    has `held_after_forward_bytes` of activation memory per microbatch from the start of F,
    `held_after_backward_bytes` from the end of B, and none from the end of W. `layers` is the
    number of layers of every stage at the measurement, if known.

    Memory: if known, a stage permanently has `state_bytes`, a pass has the workspace of its kind
    (`works`), and a device has `device_bytes`. With these, the memory of a device is complete.

    Time of a pass: its computation, the collectives with other ranks of its stage (tensor and
    expert parallel) that it waits for, and the launch overhead `host_us`, which is constant per
    pass. A BW has `whole_backward_us` and `whole_exchange_us` if these differ from B + W; a full
    backward hides collectives that a split one waits for. A P2P message between stages on different
    devices takes `send_us`, plus `more_send_us` of the boundary. `sources` specify, by name,
    whether and how a value was measured or assumed.

    Variable-length microbatches: `by_microbatch` has a factor for each microbatch of a step, by the
    name of a time or of the memory after F or B. Overlapped passes have no such factors.

    Overlapped forward-backward (F&B): a pair takes the time of its passes without their
    collectives, which are hidden behind the other pass, but at least the time of the collectives.

    >>> from megatron_vshape import Costs
    >>> costs = Costs.uniform(num_devices=2, num_stages=4, forward=1, backward=1.2, weight=0.8)
    >>> costs.backward_us, costs.held_after_forward_bytes
    ((1.2, 1.2, 1.2, 1.2), (1.0, 1.0, 1.0, 1.0))
    """

    amounts: tuple[tuple[str, Amounts], ...]
    send_us: float
    layers: tuple[int, ...] | None
    host_us: float  # launch overhead of a pass of the processor
    sources: tuple[tuple[str, str], ...]  # "measured ..." or "assumed ...", by name
    by_microbatch: tuple[tuple[str, Amounts], ...]  # factors by name
    more_send_us: Amounts  # added to send_us, per boundary behind each stage
    device_bytes: float  # of every device: workspaces, message buffers

    forward_us = _Named[Amounts]()
    backward_us = _Named[Amounts]()
    weight_us = _Named[Amounts]()
    held_after_forward_bytes = _Named[Amounts]()
    held_after_backward_bytes = _Named[Amounts]()
    whole_backward_us = _Named[Amounts | None]()  # None: B + W
    forward_exchange_us = _Named[Amounts | None]()  # None: 0
    backward_exchange_us = _Named[Amounts | None]()
    whole_exchange_us = _Named[Amounts | None]()  # None: as B

    def __init__(
        self,
        forward_us: Amounts | None = None,
        backward_us: Amounts | None = None,
        weight_us: Amounts | None = None,
        send_us: float = 0.0,
        held_after_forward_bytes: Amounts | None = None,
        held_after_backward_bytes: Amounts | None = None,
        layers: tuple[int, ...] | None = None,
        *,
        amounts: tuple[tuple[str, Amounts], ...] = (),
        host_us: float = 0.0,
        sources: tuple[tuple[str, str], ...] = (),
        by_microbatch: tuple[tuple[str, Amounts], ...] = (),
        more_send_us: Amounts = (),
        device_bytes: float = 0.0,
        **more: Amounts | None,
    ) -> None:
        """Set the fields; keyword arguments override `amounts`.

        Raises:
            ScheduleError: an amount is invalid, not given for every stage, or unknown to all kinds.
        """
        held = held_after_forward_bytes, held_after_backward_bytes
        given = zip((*TIMES, *HELD), (forward_us, backward_us, weight_us, *held), strict=True)
        own = dict(amounts) | {name: each for name, each in given if each is not None} | more
        unknown = own.keys() - set(names := amount_names(KINDS))
        if unknown:
            raise ScheduleError(f"no kind of pass has {min(unknown)!r:.40}")
        known = ((name, own.get(name)) for name in names)
        in_turn = tuple((name, each) for name, each in known if each is not None)
        values = in_turn, send_us, layers, host_us, sources
        more_values = by_microbatch, more_send_us, device_bytes
        for each, value in zip(fields(self), (*values, *more_values), strict=True):
            object.__setattr__(self, each.name, value)
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
        """Make equal costs, given for one of 2 * num_devices stages and scaled to `num_stages`.

        So every placement has the same work, and the same unit of memory, the chunk: the
        activations of one microbatch in 1 / (2 * num_devices) of the model. Message time and launch
        overhead do not depend on the number of stages. Time and memory of `kinds` other than F, B
        and W are 1.
        """
        scale = 2 * num_devices / num_stages

        def alike(value: float) -> tuple[float, ...]:
            return (value * scale,) * num_stages

        one = alike(1.0)
        times = alike(forward), alike(backward), alike(weight)
        works = {kind.works for kind in kinds}  # workspace is 0 for these
        names = [name for name in other_amounts(kinds) if name not in works]
        others: dict[str, Any] = dict.fromkeys(names, one)
        return cls(*times, send, one, one, host_us=host, **others)

    @classmethod
    def of(
        cls,
        stages: Sequence[Piece],
        send_us: float,
        layers: Sequence[int] | None = None,
        host_us: float = 0.0,
        sources: tuple[tuple[str, str], ...] = (),
        **beside: Any,
    ) -> "Costs":
        """Make the costs of these stages, in model order; with offloading if any stage supports it.

        A stage without offloadable memory then still needs copy times. `beside` are further fields.
        """

        def given(*names: str) -> dict[str, Any]:
            return {name: tuple(getattr(stage, name) for stage in stages) for name in names}

        each = given(*TIMES, *HELD)
        if any(stage.saved_us > 0 for stage in stages):
            # Measurement noise may report savings larger than a pass.
            least = (max(stage.backward_us, stage.weight_us) for stage in stages)
            whole = (s.backward_us + s.weight_us - s.saved_us for s in stages)
            each["whole_backward_us"] = tuple(map(max, least, whole))
        known = given(*EXCHANGES[:2], STATE, *WORKS, DUMMY)
        each |= {name: values for name, values in known.items() if any(values)}
        if any(stage.hidden_exchange_us > 0 for stage in stages):
            left = (s.backward_exchange_us - s.hidden_exchange_us for s in stages)
            each["whole_exchange_us"] = tuple(max(0.0, exposed) for exposed in left)
        if any(stage.offloaded_bytes > 0 for stage in stages):
            each |= given(*other_amounts(OFFLOAD))
        each["layers"] = None if layers is None else tuple(layers)
        return cls(send_us=send_us, host_us=host_us, sources=sources, **each, **beside)

    def with_stages(self, stages: Sequence[Piece]) -> "Costs":
        """Return the costs with these stages; other fields do not change."""
        made = Costs.of(stages, self.send_us)
        rest = {name: each for name, each in self.others if name not in other_amounts(OFFLOAD)}
        return replace(self, amounts=made.amounts).having(**rest)

    def having(self, **amounts: Amounts | None) -> "Costs":
        """Return the costs with these amounts by name; None removes one."""
        more: dict[str, Any] = dict(amounts)
        return replace(self, **more)

    def stages(self) -> list[Piece]:
        """Return the costs of each stage as a piece."""
        split = enumerate(map(add, self.backward_us, self.weight_us))
        saved = (both - self._computes_us(Kind.BW, stage) for stage, both in split)
        stages = range(self.num_stages)
        forward, backward, whole = (
            [self.exchanges_us(kind, stage) for stage in stages]
            for kind in (Kind.F, Kind.B, Kind.BW)
        )
        hidden = (b - left for b, left in zip(backward, whole, strict=True))
        own = (getattr(self, name) for name in (*TIMES, *HELD))
        nothing, known = (0.0,) * self.num_stages, self.lists()
        others = (*other_amounts(OFFLOAD), STATE, *WORKS, DUMMY)
        rest = (known.get(name, nothing) for name in others)
        return list(map(Piece, *own, saved, forward, backward, hidden, *rest))

    @property
    def others(self) -> tuple[tuple[str, Amounts], ...]:
        """Amounts of kinds other than F, B, W and BW, by name."""
        own = (*TIMES, *HELD, *KNOWN_ALONE)
        return tuple(each for each in self.amounts if each[0] not in own)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.forward_us)

    def time_us(self, kind: Kind, stage: int) -> float:
        """Return the total time of a pass of `kind` on `stage`."""
        host_us = self.host_us if kind.resource == PROCESSOR else 0.0
        return self._computes_us(kind, stage) + self.exchanges_us(kind, stage) + host_us

    def _computes_us(self, kind: Kind, stage: int) -> float:
        times = self._named(kind.time)
        if times is not None:
            return times[stage]
        return sum(self._computes_us(part, stage) for part in kind.does if part is not kind)

    @property
    def longest_send_us(self) -> float:
        """Maximum time of a message over any boundary."""
        return self.send_us + max(self.more_send_us, default=0.0)

    def message_us(self, stage: int, other: int) -> float:
        """Return the time of a message between stages on two devices."""
        if not self.more_send_us or abs(stage - other) != 1:
            return self.send_us
        return self.send_us + self.more_send_us[min(stage, other)]

    def per_microbatch_delta_us(self, kind: Kind, stage: int) -> Iterator[tuple[str, float]]:
        """Yield the times of a pass that scale with the microbatch, by name."""
        times = self._named(kind.time)
        if times is None:  # the sum of its parts
            for part in kind.does:
                yield from self.per_microbatch_delta_us(part, stage)
        elif any(kind.time == name for name, _ in self.by_microbatch):
            yield kind.time, times[stage]

    def more_us(self, kind: Kind, stage: int, microbatch: int) -> float:
        """Return the additional time of a pass of this microbatch over `time_us`."""
        shares = dict(self.by_microbatch)
        return sum(
            us * (shares[name][microbatch] - 1)
            for name, us in self.per_microbatch_delta_us(kind, stage)
        )

    def share_of(self, name: str, microbatch: int) -> float:
        """Return the factor of a microbatch for the amounts of this name."""
        return next((each[microbatch] for own, each in self.by_microbatch if own == name), 1.0)

    def placed(self, order: Sequence[int]) -> "Costs":
        """Reorder the microbatches: the k-th becomes the one with number `order[k]`."""
        shares = ((name, tuple(each[real] for real in order)) for name, each in self.by_microbatch)
        return replace(self, by_microbatch=tuple(shares))

    def exchanges_us(self, kind: Kind, stage: int) -> float:
        """Return the time that a pass of `kind` waits for collectives of its stage."""
        times = self._named(kind.exchange)
        if times is not None:
            return times[stage]
        return sum(self.exchanges_us(part, stage) for part in kind.does if part is not kind)

    def overlapped_us(self, forward: int, kind: Kind, backward: int) -> float:
        """Return the time of an F&B pair: F of one stage, and B or BW of another."""
        alone = self.time_us(Kind.F, forward) + self.time_us(kind, backward)
        exchanges = self.exchanges_us(Kind.F, forward) + self.exchanges_us(kind, backward)
        return max(alone - exchanges, exchanges)

    @property
    def whole_us(self) -> tuple[float, ...] | None:
        """Time of a BW on every stage; None if equal to B + W, so that fusing changes nothing."""
        both = self.whole_backward_us, self.whole_exchange_us
        if both == (None, None) and not self.host_us:
            return None
        return tuple(self.time_us(Kind.BW, stage) for stage in range(self.num_stages))

    def sliced(self, slices: int) -> "Costs":
        """Return the costs of one slice of a microbatch along its sequence.

        Time, memory and message time are divided by `slices`; the launch overhead is constant.
        Attention of later slices covers more keys; these costs use the mean.
        """
        if slices == 1:
            return self

        def share(values: Amounts) -> Amounts:
            return tuple(value / slices for value in values)

        more: dict[str, Any] = {
            "amounts": tuple(
                (name, values if name in (STATE, DUMMY) else share(values))
                for name, values in self.amounts
            ),
            "by_microbatch": tuple(
                (name, tuple(value for value in shares for _ in range(slices)))
                for name, shares in self.by_microbatch
            ),
            "more_send_us": share(self.more_send_us),
        }
        return replace(self, send_us=self.send_us / slices, **more)

    def with_copies(self, forwards: float) -> "Costs":
        """Make all activations of a stage offloadable; a copy one way costs `forwards` times F.

        F is that of an inner stage, because the embedding and output layer add time without
        activations.
        """
        held = self.held_after_forward_bytes
        each = median(us / more for us, more in zip(self.forward_us, held, strict=True) if more)
        times = tuple(max(forwards * each * more, LEAST * forwards * each) for more in held)
        return self.with_copies_of(times, held, times)

    def with_copies_of(
        self,
        out_us: tuple[float, ...],
        moved_bytes: tuple[float, ...],
        back_us: tuple[float, ...],
    ) -> "Costs":
        """Make these bytes of every stage offloadable, with copy times for each direction."""
        own = self.without_copies()
        names = COPY_OUT.time, RELEASE.frees, COPY_BACK.time
        copies: dict[str, Any] = dict(zip(names, (out_us, moved_bytes, back_us), strict=True))
        return own.having(**copies)

    @property
    def copies(self) -> bool:
        """Whether the costs have offloading."""
        return set(other_amounts(OFFLOAD)) <= {name for name, _ in self.others}

    @property
    def offloaded_bytes(self) -> Sequence[float]:
        """Offloadable bytes of a microbatch, by stage."""
        return self.held(RELEASE)[2]

    def without_copies(self) -> "Costs":
        """Return the costs without offloading."""
        there = {name: None for name in other_amounts(OFFLOAD) if name in self.lists()}
        return self.having(**there) if there else self

    def changes(self, kind: Kind) -> tuple[Sequence[float], Sequence[float]]:
        """Return, by stage, the change of memory at the start and at the end of such a pass."""
        takes, keeps, frees = self.held(kind)
        return takes, [more - less for more, less in zip(keeps, frees, strict=True)]

    def held(self, kind: Kind) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
        """Return, by stage, the memory allocated at the start, retained and freed at the end."""
        nothing = (0.0,) * self.num_stages
        takes, keeps, frees = (
            self._named(name) or nothing for name in (kind.takes, kind.keeps, kind.frees)
        )
        return takes, keeps, frees

    def works(self, kind: Kind) -> Amounts:
        """Return, by stage, the workspace of a pass."""
        known = self.lists().get(kind.works)
        if known is not None:
            return known
        parts = [self.works(part) for part in kind.does if part is not kind]
        return tuple(map(max, zip(*parts, strict=True))) if parts else (0.0,) * self.num_stages

    @property
    def has_static_memory(self) -> bool:
        """Whether the costs include all memory of a device, including state."""
        return STATE in self.lists()

    def fixed_bytes(self, placement: Sequence[int], num_devices: int) -> tuple[float, ...]:
        """Return the permanent memory of each device."""
        fixed = [self.device_bytes] * num_devices
        for device, state in zip(placement, self.lists().get(STATE, ()), strict=False):
            fixed[device] += state
        return tuple(fixed)

    def under_megatron(self) -> "Costs":
        """Return the costs under Megatron's schedules rather than those of this package.

        Megatron's full backward allocates a dummy gradient for a weight with a fused accumulation,
        because DDP's overlap waits for a gradient, and never frees it.
        """
        known = self.lists()
        if STATE not in known or DUMMY not in known:
            return self
        return self.having(**{STATE: tuple(map(add, known[STATE], known[DUMMY])), DUMMY: None})

    def without_state(self) -> "Costs":
        """Return the costs without permanent memory."""
        made = self.having(**{STATE: None}) if self.has_static_memory else self
        return replace(made, device_bytes=0.0) if made.device_bytes else made

    def of_activations(self) -> "Costs":
        """Return the costs with activation memory only."""
        there = {kind.works for kind in KINDS}.intersection(self.lists())
        return self.without_state().having(**dict.fromkeys(there))

    def _named(self, name: str) -> tuple[float, ...] | None:
        """Return the amounts of this name, one per stage; None if they follow from others.

        Raises:
            ScheduleError: a kind of pass requires the amounts, and these costs do not have them.
        """
        for known, amounts in self.amounts:
            if known == name:
                return amounts
        if not name or name in KNOWN_ALONE:
            return None
        raise ScheduleError(f"the costs have no {name}, which a pass of this schedule has")

    def busy_us(self, placement: Sequence[int], num_devices: int, num_microbatches: int) -> float:
        """Return the minimum work of the busiest device, with split or full backwards."""
        work = [0.0] * num_devices
        for stage, device in enumerate(placement):
            forward, *split = (self.time_us(kind, stage) for kind in PARTS)
            work[device] += forward + min(sum(split), self.time_us(Kind.BW, stage))
        return (max(work) + self.device_us()) * num_microbatches

    def device_us(self) -> float:
        """Return the minimum time of passes that a device has once per microbatch, not per stage.

        Only those that read a result of a stage.
        """
        return sum(
            min(values)
            for kind in KINDS
            for name, values in self.others
            if kind.of == DEVICE and kind.reads and kind.time == name
        )

    def of_no_stage(self) -> tuple[tuple[str, float], ...]:
        """Return the amounts of kinds without a stage, by name: the maximum over the stages."""
        names = other_amounts(kind for kind in KINDS if kind.of)
        return tuple((name, max(values)) for name, values in self.others if name in names)

    def with_source(self, text: str, *names: str) -> "Costs":
        """Return the costs with `text` as the source of these names, or of all without a source."""
        told = dict(self.sources)
        given = [*TIMES, "send_us", *HELD, *(n for n, _ in self.amounts if n in KNOWN_ALONE)]
        for name in names or [each for each in (*given, "host_us") if each not in told]:
            told[name] = text
        return replace(self, sources=tuple(told.items()))

    def sources_told(self) -> Iterator[str]:
        """Yield one line per source, with the names of its values."""
        by_text: dict[str, list[str]] = {}
        for name, text in self.sources:
            by_text.setdefault(text, []).append(name)
        for text, names in by_text.items():
            yield f"{', '.join(names)}: {text}"

    def lists(self) -> dict[str, tuple[float, ...]]:
        """Return all amounts by name."""
        return dict(self.amounts)

    def to_json(self) -> str:
        """Return the text of the costs file."""
        return text_of(self)

    @classmethod
    def from_json(cls, text: str) -> "Costs":
        """Parse a costs file.

        Raises:
            ScheduleError: not JSON, a missing or unknown key, or an invalid value.
        """
        return cls(**read_costs(text))

    @classmethod
    def load(cls, path: str | Path) -> "Costs":
        """Load the costs file at `path`; raises ScheduleError with its name."""
        text = read_text(path, "the costs file")
        try:
            return cls.from_json(text)
        except ScheduleError as error:
            raise ScheduleError(f"the costs file {path} is not valid: {error}") from None

    def _check(self) -> None:
        values_of = dict(self.amounts)
        lacking = [name for name in (*TIMES, *HELD) if name not in values_of]
        if lacking:
            raise ScheduleError(f"the costs have no {lacking[0]}")
        for name, values in values_of.items():
            if len(values) != len(self.forward_us) or not values:
                raise ScheduleError(
                    f"the costs have {len(values)} values of {name} and {len(self.forward_us)} of "
                    "forward_us; there must be one of each per stage"
                )
            for stage, value in enumerate(values):
                _check_value(name, f"{name} of stage {stage}", value, name in EXCHANGES)
        self._check_layers()
        self._check_microbatches()
        _check_value("send_us", "send_us", self.send_us, may_be_zero=True)
        if len(self.more_send_us) not in (0, self.num_stages - 1):
            raise ScheduleError(
                f"more_send_us has {len(self.more_send_us)} values; it needs one for each of the "
                f"{self.num_stages - 1} boundaries between stages"
            )
        for value in self.more_send_us:
            _check_value("more_send_us", "more_send_us", value, may_be_zero=True)
        _check_value("host_us", "host_us", self.host_us, may_be_zero=True)
        _check_value("device_bytes", "device_bytes", self.device_bytes)
        times = [time for name in values_of if name.endswith("_us") for time in values_of[name]]
        longest = max(*times, self.send_us, self.host_us, *self.more_send_us)
        shortest = min(filter(None, times))
        if longest > MAX_RATIO * shortest:
            raise ScheduleError(
                f"the times reach from {shortest} to {longest}; none may be more than "
                f"{MAX_RATIO:g} times another"
            )

    def _check_microbatches(self) -> None:
        counts = {len(shares) for _, shares in self.by_microbatch}
        if len(counts) > 1:
            raise ScheduleError(
                "by_microbatch has lists of different lengths; each must cover a whole step"
            )
        for name, shares in self.by_microbatch:
            if name not in dict(self.amounts) or not (name.endswith("_us") or name in HELD):
                raise ScheduleError(
                    f"by_microbatch has {name!r:.40}, which is no time of these costs, nor what F "
                    "and B leave"
                )
            for share in shares:
                _check_value("share_us", f"by_microbatch {name}", share)

    def _check_layers(self) -> None:
        if self.layers is None:
            return
        if len(self.layers) != len(self.forward_us):
            raise ScheduleError(
                f"the costs have {len(self.layers)} values of layers and {len(self.forward_us)} "
                "of forward_us; there must be one of each per stage"
            )
        if min(self.layers) < 0:
            raise ScheduleError(f"layers holds {min(self.layers)}; no stage has that many")


def _check_value(name: str, what: str, value: float, may_be_zero: bool = False) -> None:
    """Raise ScheduleError unless the value is in the supported range."""
    may_be_zero = may_be_zero or not name.endswith("_us")
    if not math.isfinite(value) or value < 0 or not (value or may_be_zero):
        wanted = "finite and not below 0" if may_be_zero else "a finite number above 0"
        raise ScheduleError(f"{what} is {value}; it must be {wanted}")
    if value > MOST or (value < LEAST and not may_be_zero):
        raise ScheduleError(f"{what} is {value}; it must be from {LEAST:g} to {MOST:g}")


def held_text(held: float) -> str:
    """Format memory with 12 digits: a limit read from the text is as good as `held`."""
    return f"{held:,.12g}"


def chunk_of(costs: Costs, num_devices: int) -> float:
    """Return the memory of a chunk: 1 / (2 * num_devices) of a microbatch's activations.

    In the unit of the costs' memory. If all stages are equal, 1F1B's peak is 2 * num_devices
    chunks.
    """
    return math.fsum(costs.held_after_forward_bytes) / (2 * num_devices)


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

    single = dict(costs.of_no_stage())
    amounts = (
        (name, (single[name],) * num_stages)
        if name in single
        else (name, tuple(_groups(values, size, max if name in WORKS else math.fsum)))
        for name, values in costs.amounts
    )
    return replace(
        costs,
        amounts=tuple(amounts),
        layers=None if costs.layers is None else tuple(map(int, _groups(costs.layers, size, sum))),
        more_send_us=costs.more_send_us[size - 1 :: size],
    )


def _groups(
    values: Sequence[float], size: int, of_all: Callable[[Sequence[float]], float]
) -> Iterator[float]:
    for first in range(0, len(values), size):
        yield of_all(values[first : first + size])
