"""Costs of the passes of every stage: time and memory."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, Self

from megatron_vshape.core.model.files import fault_in_file, read_costs, read_text, text_of
from megatron_vshape.core.model.kinds import (
    DEVICE,
    DUMMY,
    EXCHANGES,
    HELD,
    KINDS,
    KNOWN_ALONE,
    MOVING,
    PARTS,
    PROCESSOR,
    STATE,
    TIMES,
    VOCABULARY_AMOUNTS,
    Kind,
    ScheduleError,
    other_amounts,
)
from megatron_vshape.core.model.placement import message_us

MIN_AMOUNT, MAX_AMOUNT = 1e-6, 1e15
"""Bounds of times and memory, far inside the range of floats."""

_MAX_RATIO = 1e9
"""Maximum ratio of the longest to the shortest time, so that sums do not lose the shortest."""

Amounts = tuple[float, ...]
"""One value per stage."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Times and activation memory of every stage, in model order.

    Times are in microseconds or any other common unit; memory is in bytes or chunks. A stage has
    `held_after_forward_bytes` of activation memory per microbatch from the start of F,
    `held_after_backward_bytes` from the end of B, and none from the end of W. With `state_bytes`,
    workspaces and `device_bytes`, the memory of a device is complete.

    Time of a pass: its computation, the collectives with other ranks of its stage (tensor and
    expert parallel) that it waits for, and the launch overhead `host_us`. A P2P message between
    stages on different devices takes `send_us`, plus `more_send_us` of the boundary.

    >>> from megatron_vshape import Costs
    >>> costs = Costs.uniform(num_devices=2, num_stages=4, forward=1, backward=1.2, weight=0.8)
    >>> costs.backward_us, costs.held_after_forward_bytes
    ((1.2, 1.2, 1.2, 1.2), (1.0, 1.0, 1.0, 1.0))
    """

    forward_us: Amounts
    backward_us: Amounts
    weight_us: Amounts
    send_us: float
    held_after_forward_bytes: Amounts
    held_after_backward_bytes: Amounts
    layers: tuple[int, ...] | None = None  # number of layers at the measurement, if known
    _: KW_ONLY
    whole_backward_us: Amounts | None = None  # of a BW; None: B + W
    forward_exchange_us: Amounts | None = None  # collectives of F; None: 0
    backward_exchange_us: Amounts | None = None
    whole_exchange_us: Amounts | None = None  # None: as B; a BW hides collectives behind W
    state_bytes: Amounts | None = None  # between steps: weights, gradients, optimizer state
    forward_work_bytes: Amounts | None = None  # workspace of F; None: 0
    backward_work_bytes: Amounts | None = None
    weight_work_bytes: Amounts | None = None
    whole_work_bytes: Amounts | None = None  # None: the maximum of B and W
    dummy_bytes: Amounts | None = None  # see `under_megatron`
    others: tuple[tuple[str, Amounts], ...] = ()  # amounts of other kinds of passes, by name
    host_us: float = 0.0  # launch overhead of a pass of the processor
    sources: tuple[tuple[str, str], ...] = ()  # "measured ..." or "assumed ...", by name
    # Variable-length microbatches: a factor for each microbatch of a step, by the name of a time or
    # of the memory after F or B. Overlapped passes have no such factors.
    by_microbatch: tuple[tuple[str, Amounts], ...] = ()
    more_send_us: Amounts = ()  # added to send_us, per boundary behind each stage
    device_bytes: float = 0.0  # of every device: workspaces, message buffers
    slices: int = 1  # of a microbatch, if these are the costs of a slice; not in files

    def __post_init__(self) -> None:
        """Sort `others` in the table's order, so that equal costs compare equal.

        Raises:
            ScheduleError: an amount is invalid, not given for every stage, or unknown to all kinds.
        """
        names = other_amounts(KINDS)
        unknown = [name for name, _ in self.others if name not in names]
        if unknown:
            raise ScheduleError(f"no kind of pass has {min(unknown)!r:.40}")
        sorted_amounts = sorted(self.others, key=lambda amount: names.index(amount[0]))
        object.__setattr__(self, "others", tuple(sorted_amounts))
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

        def per_stage(value: float) -> Amounts:
            return (value * scale,) * num_stages

        # In the paper, memory is the activations only.
        workspace_names = {kind.works for kind in kinds}  # workspace is 0 for these
        return cls(
            forward_us=per_stage(forward),
            backward_us=per_stage(backward),
            weight_us=per_stage(weight),
            send_us=send,
            held_after_forward_bytes=per_stage(1.0),
            held_after_backward_bytes=per_stage(1.0),
            host_us=host,
            others=tuple(
                (n, per_stage(1.0)) for n in other_amounts(kinds) if n not in workspace_names
            ),
        )

    def having(self, **changes: Any) -> Self:
        """Replace fields, or amounts of other kinds by name; None removes an amount."""
        names = {field.name for field in fields(self)}.intersection(changes)
        amounts = dict(self.others) | {k: v for k, v in changes.items() if k not in names}
        # `replace` runs `__post_init__`, which sorts and checks the new amounts.
        field_changes = {name: changes[name] for name in names}
        remaining_amounts = tuple(
            (name, values) for name, values in amounts.items() if values is not None
        )
        return replace(self, others=remaining_amounts, **field_changes)

    def lists(self) -> dict[str, Amounts]:
        """Return all amounts per stage, by name."""
        pairs = ((name, getattr(self, name)) for name in _STAGE_FIELDS)
        return {name: values for name, values in pairs if values is not None} | dict(self.others)

    def amounts(self, name: str) -> Amounts | None:
        """Return the amounts of this name; None if they follow from others.

        Raises:
            ScheduleError: a kind of pass requires the amounts, and these costs do not have them.
        """
        if not name:
            return None
        if name in _STAGE_FIELDS:
            values: Amounts | None = getattr(self, name)
            return values
        for extra_name, amounts in self.others:
            if extra_name == name:
                return amounts
        raise ScheduleError(f"the costs have no {name}, which a pass of this schedule has")

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.forward_us)

    def time_us(self, kind: Kind, stage: int) -> float:
        """Return the total time of a pass of `kind` on `stage`."""
        host_us = self.host_us if kind.resource == PROCESSOR else 0.0
        return self._computes_us(kind, stage) + self.exchanges_us(kind, stage) + host_us

    def _computes_us(self, kind: Kind, stage: int) -> float:
        times = self.amounts(kind.time)
        if times is not None:
            return times[stage]
        # Zero for a simple kind without a time, a marker such as L: its only part is itself.
        return sum(self._computes_us(part, stage) for part in kind.does if part is not kind)

    @property
    def longest_send_us(self) -> float:
        """Maximum time of a message over any boundary."""
        return self.send_us + max(self.more_send_us, default=0.0)

    def message_us(self, stage: int, other_stage: int) -> float:
        """Return the time of a message between stages on two devices."""
        return message_us(self.send_us, self.more_send_us, stage, other_stage)

    def exchanges_us(self, kind: Kind, stage: int) -> float:
        """Return the time that a pass of `kind` waits for collectives of its stage."""
        times = self.amounts(kind.exchange)
        if times is not None:
            return times[stage]
        return sum(self.exchanges_us(part, stage) for part in kind.does if part is not kind)

    def overlapped_us(self, forward: int, kind: Kind, backward: int) -> float:
        """Return the time of an F&B pair: F of one stage, and B or BW of another.

        It is that of the passes without their collectives, but at least that of the collectives.
        """
        alone = self.time_us(Kind.F, forward) + self.time_us(kind, backward)
        exchanges = self.exchanges_us(Kind.F, forward) + self.exchanges_us(kind, backward)
        return max(alone - exchanges, exchanges)

    @property
    def whole_us(self) -> tuple[float, ...] | None:
        """Time of a BW on every stage; None if equal to B + W, so that fusing changes nothing."""
        # With launch overhead, a BW differs from B + W: it is one launch instead of two.
        full_backward_amounts = self.whole_backward_us, self.whole_exchange_us
        if full_backward_amounts == (None, None) and not self.host_us:
            return None
        return tuple(self.time_us(Kind.BW, stage) for stage in range(self.num_stages))

    def sliced(self, slices: int) -> "Costs":
        """Return the costs of one slice of a microbatch along its sequence.

        Time, memory and message time are divided by `slices`; the launch overhead is constant.
        Attention of later slices covers more keys; these costs use the mean. Costs of a slice are
        returned unchanged.
        """
        if slices == 1 or self.slices > 1:
            return self
        amounts = {
            # Weights and their gradients do not shrink with the sequence.
            name: values if name in (STATE, DUMMY) else tuple(amount / slices for amount in values)
            for name, values in self.lists().items()
        }
        return self.having(
            **amounts,
            slices=slices,
            send_us=self.send_us / slices,
            more_send_us=tuple(extra_us / slices for extra_us in self.more_send_us),
            by_microbatch=tuple(
                # Slice j of microbatch i has the number i * slices + j.
                (name, tuple(factor for factor in factors for _ in range(slices)))
                for name, factors in self.by_microbatch
            ),
        )

    @property
    def copies(self) -> bool:
        """Whether the costs have all kinds of passes that move memory off a device."""
        return dict(self.others).keys() >= set(other_amounts(MOVING))

    @property
    def shards_output_layer(self) -> bool:
        """Whether the costs have the passes that all ranks run for embedding and output layer."""
        return dict(self.others).keys() >= VOCABULARY_AMOUNTS

    def changes(self, kind: Kind) -> tuple[Sequence[float], Sequence[float]]:
        """Return, by stage, the change of memory at the start and at the end of such a pass."""
        allocated, retained, freed = self.held(kind)
        return allocated, [
            increase - decrease for increase, decrease in zip(retained, freed, strict=True)
        ]

    def held(self, kind: Kind) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
        """Return, by stage, the memory allocated at the start, retained and freed at the end."""
        nothing = (0.0,) * self.num_stages
        allocated, retained, freed = (
            self.amounts(name) or nothing for name in (kind.takes, kind.keeps, kind.frees)
        )
        return allocated, retained, freed

    def works(self, kind: Kind) -> Amounts:
        """Return, by stage, the workspace of a pass."""
        # Not `amounts`: workspace is optional even for kinds that require other amounts.
        if (workspace := self.lists().get(kind.works)) is not None:
            return workspace
        workspaces = [self.works(part) for part in kind.does if part is not kind]
        return (
            tuple(map(max, zip(*workspaces, strict=True)))
            if workspaces
            else (0.0,) * self.num_stages
        )

    def fixed_bytes(self, placement: Sequence[int], num_devices: int) -> tuple[float, ...]:
        """Return the permanent memory of each device."""
        fixed = [self.device_bytes] * num_devices
        # Not strict, because unknown state is an empty tuple.
        for device, state in zip(placement, self.state_bytes or (), strict=False):
            fixed[device] += state
        return tuple(fixed)

    def without_state(self) -> "Costs":
        """Return the costs without permanent memory."""
        return replace(self, state_bytes=None, device_bytes=0.0)

    def of_activations(self) -> "Costs":
        """Return the costs with activation memory only."""
        workspace_names = {kind.works for kind in KINDS}.intersection(self.lists())
        return self.without_state().having(**dict.fromkeys(workspace_names))

    def busy_us(self, placement: Sequence[int], num_devices: int, num_microbatches: int) -> float:
        """Return the minimum work of the busiest device, with split or full backwards."""
        work = [0.0] * num_devices
        for stage, device in enumerate(placement):
            # A schedule may use either backward, so the bound uses the shorter one.
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

    def with_source(self, text: str, *names: str) -> "Costs":
        """Return the costs with `text` as the source of these names, or of all without a source."""
        sources = dict(self.sources)
        optional = [name for name in KNOWN_ALONE if getattr(self, name) is not None]
        all_names = (*TIMES, "send_us", *HELD, *optional, "host_us")
        new_sources = dict.fromkeys(
            names or [name for name in all_names if name not in sources], text
        )
        return replace(self, sources=tuple((sources | new_sources).items()))

    def to_json(self) -> str:
        """Return the text of the costs file."""
        names = (field.name for field in fields(self) if field.name != "slices")
        return text_of({name: getattr(self, name) for name in names})

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
            raise fault_in_file(error, "the costs file", path) from None

    def _check(self) -> None:
        amounts = self.lists()
        layers: dict[str, Amounts] = {} if self.layers is None else {"layers": self.layers}
        for name, values in (amounts | layers).items():
            if len(values) != len(self.forward_us) or not values:
                raise ScheduleError(
                    f"the costs have {len(values)} values of {name} and {len(self.forward_us)} of "
                    "forward_us; there must be one of each per stage"
                )
        if min(self.layers or (0,)) < 0:
            raise ScheduleError(f"layers holds {min(self.layers or ())}; it must be at least 0")
        for name, values in amounts.items():
            for stage, value in enumerate(values):
                _check_value(name, f"{name} of stage {stage}", value, name in EXCHANGES)
        self._check_microbatches()
        if len(self.more_send_us) not in (0, self.num_stages - 1):
            raise ScheduleError(
                f"more_send_us has {len(self.more_send_us)} values; it needs one for each of the "
                f"{self.num_stages - 1} boundaries between stages"
            )
        single = (("send_us", self.send_us), ("host_us", self.host_us))
        for name, value in (*single, *(("more_send_us", us) for us in self.more_send_us)):
            _check_value(name, name, value, may_be_zero=True)
        _check_value("device_bytes", "device_bytes", self.device_bytes)
        times = [time for name in amounts if name.endswith("_us") for time in amounts[name]]
        # Sums of times are float64 with 16 digits: _MAX_RATIO leaves 7 for the shortest time.
        longest = max(*times, self.send_us, self.host_us, *self.more_send_us)
        shortest = min(filter(None, times))
        if longest > _MAX_RATIO * shortest:
            raise ScheduleError(
                f"the times reach from {shortest} to {longest}; none may be more than "
                f"{_MAX_RATIO:g} times another"
            )

    def _check_microbatches(self) -> None:
        if len({len(factors) for _, factors in self.by_microbatch}) > 1:
            raise ScheduleError(
                "by_microbatch has lists of different lengths; each must cover a whole step"
            )
        for name, factors in self.by_microbatch:
            if name not in self.lists() or not (name.endswith("_us") or name in HELD):
                raise ScheduleError(
                    f"by_microbatch has {name!r:.40}, which is no time of these costs, nor the "
                    "memory after F or B"
                )
            for factor in factors:
                _check_value("share_us", f"by_microbatch {name}", factor)


_STAGE_FIELDS = dict.fromkeys((*TIMES, *HELD, *KNOWN_ALONE))
"""Names of the fields with one value per stage, in the order of costs files."""


def _check_value(name: str, label: str, value: float, may_be_zero: bool = False) -> None:
    """Raise ScheduleError unless the value is in the supported range."""
    may_be_zero = may_be_zero or not name.endswith("_us")
    if not math.isfinite(value) or value < 0 or not (value or may_be_zero):
        requirement = "finite and not below 0" if may_be_zero else "a finite number above 0"
        raise ScheduleError(f"{label} is {value}; it must be {requirement}")
    if value > MAX_AMOUNT or (value < MIN_AMOUNT and not may_be_zero):
        raise ScheduleError(f"{label} is {value}; it must be from {MIN_AMOUNT:g} to {MAX_AMOUNT:g}")


def format_memory(memory: float) -> str:
    """Format memory with 12 digits: a limit read from the text is as good as `memory`."""
    return f"{memory:,.12g}"


def chunk_of(costs: Costs, num_devices: int) -> float:
    """Return the memory of a chunk: 1 / (2 * num_devices) of a microbatch's activations.

    If all stages are equal, 1F1B's peak is 2 * num_devices chunks.
    """
    return math.fsum(costs.held_after_forward_bytes) / (2 * num_devices)


def scaled_times_us(costs: Costs, kind: Kind, stage: int) -> Iterator[tuple[str, float]]:
    """Yield the times of a pass that scale with the microbatch, by name."""
    times = costs.amounts(kind.time)
    if times is None:  # the sum of its parts
        for part in kind.does:
            yield from scaled_times_us(costs, part, stage)
    elif any(kind.time == name for name, _ in costs.by_microbatch):
        yield kind.time, times[stage]


def extra_us_of_microbatch(costs: Costs, kind: Kind, stage: int, microbatch: int) -> float:
    """Return the additional time of a pass of this microbatch over `Costs.time_us`."""
    factors = dict(costs.by_microbatch)
    times = scaled_times_us(costs, kind, stage)
    return sum(us * (factors[name][microbatch] - 1) for name, us in times)


def microbatch_factor(costs: Costs, name: str, microbatch: int) -> float:
    """Return the factor of a microbatch for the amounts of this name."""
    return next(
        (
            factors[microbatch]
            for factor_name, factors in costs.by_microbatch
            if factor_name == name
        ),
        1.0,
    )


def reordered(costs: Costs, order: Sequence[int]) -> Costs:
    """Reorder the microbatches: the k-th becomes the one with number `order[k]`."""
    reordered_factors = (
        (name, tuple(factors[microbatch] for microbatch in order))
        for name, factors in costs.by_microbatch
    )
    return replace(costs, by_microbatch=tuple(reordered_factors))


def with_copies(costs: Costs, forwards: float) -> Costs:
    """Make all activations of a stage movable; a copy one way costs `forwards` times F.

    F is that of an inner stage, because the embedding and output layer add time without
    activations.
    """
    activation_bytes = costs.held_after_forward_bytes
    # Time of F per unit of activation memory; the median ignores embedding and output layer.
    us_per_byte = median(
        us / stage_bytes
        for us, stage_bytes in zip(costs.forward_us, activation_bytes, strict=True)
        if stage_bytes
    )
    # A stage without activations still needs a time above 0.
    times = tuple(
        max(forwards * us_per_byte * stage_bytes, MIN_AMOUNT * forwards * us_per_byte)
        for stage_bytes in activation_bytes
    )
    return with_copies_of(costs, times, activation_bytes, times)


def with_copies_of(costs: Costs, out_us: Amounts, moved_bytes: Amounts, back_us: Amounts) -> Costs:
    """Make these bytes of every stage movable, with copy times for each direction."""
    amounts = zip(other_amounts(MOVING), (out_us, moved_bytes, back_us), strict=True)
    return costs.having(**dict(amounts))


def without_copies(costs: Costs) -> Costs:
    """Return the costs without kinds of passes that move memory off a device."""
    return costs.having(**dict.fromkeys(other_amounts(MOVING)))
