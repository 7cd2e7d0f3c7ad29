"""Costs of the passes of every stage: time and memory."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median

from megatron_vshape.core.model import files
from megatron_vshape.core.model.amounts import STATE_BYTES, Amount, Measure
from megatron_vshape.core.model.kinds import (
    BASIC_AMOUNTS,
    DEVICE,
    HELD,
    KINDS,
    MOVING,
    OPTIONAL_AMOUNTS,
    PARTS,
    PROCESSOR,
    REQUIRED_AMOUNTS,
    TIMES,
    VOCABULARY_AMOUNTS,
    Kind,
    ScheduleError,
    amounts_of,
    find_amount,
    other_amounts,
)
from megatron_vshape.core.model.placement import message_us
from megatron_vshape.core.model.stage_costs import StageCosts

MIN_AMOUNT, MAX_AMOUNT = 1e-6, 1e15
"""Bounds of times and memory, far inside the range of floats."""

_MAX_RATIO = 1e9
"""Maximum ratio of the longest to the shortest time, so that sums do not lose the shortest."""

Amounts = tuple[float, ...]
"""One value per stage."""

ByMicrobatch = tuple[tuple[Amount, Amounts], ...]
"""Factors of amounts, one for each microbatch of a step."""


@dataclass(frozen=True)
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

    stages: tuple[StageCosts, ...]  # all with the same amounts
    send_us: float
    layers: tuple[int, ...] | None = None  # number of layers at the measurement, if known
    _: KW_ONLY
    host_us: float = 0.0  # launch overhead of a pass of the processor
    sources: tuple[tuple[str, str], ...] = ()  # "measured ..." or "assumed ...", by name
    # Variable-length microbatches: factors of times, or of the memory after F or B. Overlapped
    # passes have no such factors.
    by_microbatch: ByMicrobatch = ()
    more_send_us: Amounts = ()  # added to send_us, per boundary behind each stage
    device_bytes: float = 0.0  # of every device: workspaces, message buffers
    slices: int = 1  # of a microbatch, if these are the costs of a slice; not in files

    def __post_init__(self) -> None:
        """Check all values.

        Raises:
            ScheduleError: an amount is invalid, not given for every stage, or unknown to all kinds.
        """
        if not self.stages:
            raise ScheduleError("the costs have no stages")
        amounts = self.stages[0].amounts.keys()
        unknown = [amount.name for amount in amounts - amounts_of(KINDS)]
        if unknown:
            raise ScheduleError(f"no kind of pass has {min(unknown)!r:.40}")
        if any(stage.amounts.keys() != amounts for stage in self.stages):
            raise ScheduleError("the costs have other amounts for some stages than for others")
        self._check()

    @classmethod
    def of(
        cls,
        forward_us: Sequence[float],
        backward_us: Sequence[float],
        weight_us: Sequence[float],
        send_us: float,
        held_after_forward_bytes: Sequence[float],
        held_after_backward_bytes: Sequence[float],
        layers: tuple[int, ...] | None = None,
        *,
        host_us: float = 0.0,
        sources: tuple[tuple[str, str], ...] = (),
        by_microbatch: Sequence[tuple[str, Amounts]] = (),
        more_send_us: Amounts = (),
        device_bytes: float = 0.0,
        **optional: Sequence[float],
    ) -> "Costs":
        """Make costs from lists with a value per stage; names are those of costs files.

        Raises:
            ScheduleError: a list is empty or has another length, or a value is invalid.
        """
        times = forward_us, backward_us, weight_us
        required = (*times, held_after_forward_bytes, held_after_backward_bytes)
        lists = dict(zip(REQUIRED_AMOUNTS, required, strict=True))
        lists |= {find_amount(name): optional[name] for name in sorted(optional)}
        ordered = {amount.name: lists[amount] for amount in amounts_of(KINDS) if amount in lists}
        for name, values in (ordered | ({} if layers is None else {"layers": layers})).items():
            if len(values) != len(forward_us) or not values:
                raise ScheduleError(
                    f"the costs have {len(values)} values of {name} and {len(forward_us)} of "
                    "forward_us; there must be one of each per stage"
                )
        # `__post_init__` rejects factors of unknown names.
        amounts = {amount.name: amount for amount in lists}
        scaled = (amounts.get(name, Amount(name, Measure.STATE)) for name, _ in by_microbatch)
        return cls(
            _stages_of_lists(lists),
            send_us,
            layers,
            host_us=host_us,
            sources=sources,
            by_microbatch=tuple(zip(scaled, (sizes for _, sizes in by_microbatch), strict=True)),
            more_send_us=more_send_us,
            device_bytes=device_bytes,
        )

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
        # In the paper, memory is the activations only.
        extra_amounts = [a for a in other_amounts(kinds) if a.measure is not Measure.WORKSPACE]
        times = (forward * scale, backward * scale, weight * scale)
        values = (*times, *(scale for _ in (*HELD, *extra_amounts)))
        stage = StageCosts(dict(zip((*REQUIRED_AMOUNTS, *extra_amounts), values, strict=True)))
        return cls((stage,) * num_stages, send, host_us=host)

    def having(
        self, changes: Mapping[Amount, Sequence[float]] | None = None, /, **lists: Sequence[float]
    ) -> "Costs":
        """Replace or add amounts, given as one value per stage; keywords are names in files."""
        amounts = dict(changes or {}) | {find_amount(name): lists[name] for name in sorted(lists)}
        pairs = zip(self.stages, _stages_of_lists(amounts), strict=True) if amounts else ()
        stages = tuple(stage.changed(changed.amounts) for stage, changed in pairs)
        return replace(self, stages=stages) if amounts else self

    def without(self, amounts: Iterable[Amount]) -> "Costs":
        """Return the costs without these amounts."""
        removed = frozenset(amounts) & self.by_stage.keys()
        if not removed:
            return self
        return replace(self, stages=tuple(stage.without(removed) for stage in self.stages))

    @cached_property
    def by_stage(self) -> dict[Amount, Amounts]:
        """Amounts of every stage, in the order of costs files."""
        present = self.stages[0].amounts
        return {
            amount: tuple(stage.amounts[amount] for stage in self.stages)
            for amount in amounts_of(KINDS)
            if amount in present
        }

    def lists(self) -> dict[str, Amounts]:
        """Return all amounts per stage, by their names in costs files and in their order."""
        return {amount.name: values for amount, values in self.by_stage.items()}

    def required(self, amount: Amount) -> Amounts:
        """Return the amount of every stage; raises ScheduleError if the costs do not have it."""
        return tuple(stage.required(amount) for stage in self.stages)

    @property
    def extra_amounts(self) -> dict[Amount, Amounts]:
        """Amounts of kinds of passes other than F, B, W and BW, per stage."""
        return {a: values for a, values in self.by_stage.items() if a not in BASIC_AMOUNTS}

    @property
    def forward_us(self) -> Amounts:
        """Time of F per stage."""
        return self.by_stage[Kind.F.time]

    @property
    def backward_us(self) -> Amounts:
        """Time of B per stage."""
        return self.by_stage[Kind.B.time]

    @property
    def weight_us(self) -> Amounts:
        """Time of W per stage."""
        return self.by_stage[Kind.W.time]

    @property
    def held_after_forward_bytes(self) -> Amounts:
        """Activation memory per stage and microbatch from the start of F."""
        return self.by_stage[Kind.F.allocated]

    @property
    def held_after_backward_bytes(self) -> Amounts:
        """Activation memory per stage and microbatch from the end of B."""
        return self.by_stage[Kind.B.retained]

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    def time_us(self, kind: Kind, stage: int) -> float:
        """Return the total time of a pass of `kind` on `stage`."""
        costs, host_us = self.stages[stage], self.host_us if kind.resource == PROCESSOR else 0.0
        return costs.compute_us(kind) + costs.collective_us(kind) + host_us

    @property
    def longest_send_us(self) -> float:
        """Maximum time of a message over any boundary."""
        return self.send_us + max(self.more_send_us, default=0.0)

    def message_us(self, stage: int, other_stage: int) -> float:
        """Return the time of a message between stages on two devices."""
        return message_us(self.send_us, self.more_send_us, stage, other_stage)

    def overlapped_us(self, forward: int, kind: Kind, backward: int) -> float:
        """Return the time of an F&B pair: F of one stage, and B or BW of another.

        It is that of the passes without their collectives, but at least that of the collectives.
        """
        alone = self.time_us(Kind.F, forward) + self.time_us(kind, backward)
        collectives = self.stages[forward].collective_us(Kind.F)
        exchanges = collectives + self.stages[backward].collective_us(kind)
        return max(alone - exchanges, exchanges)

    @property
    def full_us(self) -> tuple[float, ...] | None:
        """Time of a BW on every stage; None if equal to B + W, so that fusing changes nothing."""
        # With launch overhead, a BW differs from B + W: it is one launch instead of two.
        is_known = not self.by_stage.keys().isdisjoint((Kind.BW.time, Kind.BW.collective))
        if not (is_known or self.host_us):
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

        def slice_of(amount: Amount, value: float) -> float:
            # Weights and their gradients do not shrink with the sequence.
            return value if amount.measure is Measure.STATE else value / slices

        return replace(
            self,
            stages=tuple(stage.converted(slice_of) for stage in self.stages),
            slices=slices,
            send_us=self.send_us / slices,
            more_send_us=tuple(extra_us / slices for extra_us in self.more_send_us),
            by_microbatch=tuple(
                # Slice j of microbatch i has the number i * slices + j.
                (amount, tuple(factor for factor in factors for _ in range(slices)))
                for amount, factors in self.by_microbatch
            ),
        )

    @property
    def copies(self) -> bool:
        """Whether the costs have all kinds of passes that move memory off a device."""
        return self.by_stage.keys() >= set(other_amounts(MOVING))

    @property
    def shards_output_layer(self) -> bool:
        """Whether the costs have the passes that all ranks run for embedding and output layer."""
        return self.by_stage.keys() >= VOCABULARY_AMOUNTS

    def changes(self, kind: Kind) -> tuple[Sequence[float], Sequence[float]]:
        """Return, by stage, the change of memory at the start and at the end of such a pass."""
        allocated, retained, freed = self.held(kind)
        return allocated, [
            increase - decrease for increase, decrease in zip(retained, freed, strict=True)
        ]

    def held(self, kind: Kind) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
        """Return, by stage, the memory allocated at the start, retained and freed at the end."""
        by_stage = (stage.memory(kind) for stage in self.stages)
        allocated, retained, freed = zip(*by_stage, strict=True)
        return allocated, retained, freed

    def workspace(self, kind: Kind) -> Amounts:
        """Return, by stage, the workspace of a pass."""
        return tuple(stage.workspace(kind) for stage in self.stages)

    def fixed_bytes(self, placement: Sequence[int], num_devices: int) -> tuple[float, ...]:
        """Return the permanent memory of each device."""
        fixed = [self.device_bytes] * num_devices
        for device, stage in zip(placement, self.stages, strict=False):
            fixed[device] += stage[STATE_BYTES]
        return tuple(fixed)

    def without_state(self) -> "Costs":
        """Return the costs without permanent memory."""
        return replace(self.without([STATE_BYTES]), device_bytes=0.0)

    def of_activations(self) -> "Costs":
        """Return the costs with activation memory only."""
        workspaces = (a for a in self.by_stage if a.measure is Measure.WORKSPACE)
        return self.without_state().without(workspaces)

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
        times = [kind.time for kind in KINDS if kind.of == DEVICE and kind.reads]
        return sum(min(self.by_stage[time]) for time in times if time in self.by_stage)

    def with_source(self, text: str, *amounts: Amount) -> "Costs":
        """Return the costs with `text` as the source of these amounts, or of all without one."""
        sources = dict(self.sources)
        optional = [str(amount) for amount in OPTIONAL_AMOUNTS if amount in self.by_stage]
        all_names = (*map(str, TIMES), "send_us", *map(str, HELD), *optional, "host_us")
        names = map(str, amounts) if amounts else (n for n in all_names if n not in sources)
        return replace(self, sources=tuple((sources | dict.fromkeys(names, text)).items()))

    def to_json(self) -> str:
        """Return the text of the costs file."""
        return files.text_of(
            self.lists(),
            send_us=self.send_us,
            layers=self.layers,
            host_us=self.host_us,
            device_bytes=self.device_bytes,
            sources=dict(self.sources),
            by_microbatch={amount.name: factors for amount, factors in self.by_microbatch},
            more_send_us=self.more_send_us,
        )

    @classmethod
    def from_json(cls, text: str) -> "Costs":
        """Parse a costs file.

        Raises:
            ScheduleError: not JSON, a missing or unknown key, or an invalid value.
        """
        return cls.of(**files.read_costs(text))

    @classmethod
    def load(cls, path: str | Path) -> "Costs":
        """Load the costs file at `path`; raises ScheduleError with its name."""
        text = files.read_text(path, "the costs file")
        try:
            return cls.from_json(text)
        except ScheduleError as error:
            raise files.fault_in_file(error, "the costs file", path) from None

    def _check(self) -> None:
        if min(self.layers or (0,)) < 0:
            raise ScheduleError(f"layers holds {min(self.layers or ())}; it must be at least 0")
        for amount, values in self.by_stage.items():
            name, may_be_zero = amount.name, not amount.is_nonzero
            for stage, value in enumerate(values):
                _check_value(f"{name} of stage {stage}", value, may_be_zero)
        self._check_microbatches()
        if len(self.more_send_us) not in (0, self.num_stages - 1):
            raise ScheduleError(
                f"more_send_us has {len(self.more_send_us)} values; it needs one for each of the "
                f"{self.num_stages - 1} boundaries between stages"
            )
        single = (("send_us", self.send_us), ("host_us", self.host_us))
        for name, value in (*single, *(("more_send_us", us) for us in self.more_send_us)):
            _check_value(name, value)
        _check_value("device_bytes", self.device_bytes)
        times = [us for amount, values in self.by_stage.items() if amount.is_time for us in values]
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
        for amount, factors in self.by_microbatch:
            if amount not in self.by_stage or not (amount.is_time or amount in HELD):
                raise ScheduleError(
                    f"by_microbatch has {amount.name!r:.40}, which is no time of these costs, nor "
                    "the memory after F or B"
                )
            for factor in factors:
                _check_value(f"by_microbatch {amount}", factor, may_be_zero=False)


def _stages_of_lists(lists: Mapping[Amount, Sequence[float]]) -> tuple[StageCosts, ...]:
    by_stage = zip(*lists.values(), strict=True)
    return tuple(StageCosts(dict(zip(lists, values, strict=True))) for values in by_stage)


def _check_value(label: str, value: float, may_be_zero: bool = True) -> None:
    """Raise ScheduleError unless the value is in the supported range."""
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


def scaled_times_us(costs: Costs, kind: Kind, stage: int) -> Iterator[tuple[Amount, float]]:
    """Yield the times of a pass that scale with the microbatch, by amount."""
    times = costs.by_stage.get(kind.time)
    if times is None:  # the sum of its parts
        for part in kind.does:
            if part is not kind:
                yield from scaled_times_us(costs, part, stage)
    elif kind.time in dict(costs.by_microbatch):
        yield kind.time, times[stage]


def extra_us_of_microbatch(costs: Costs, kind: Kind, stage: int, microbatch: int) -> float:
    """Return the additional time of a pass of this microbatch over `Costs.time_us`."""
    factors = dict(costs.by_microbatch)
    times = scaled_times_us(costs, kind, stage)
    return sum(us * (factors[amount][microbatch] - 1) for amount, us in times)


def microbatch_factor(costs: Costs, amount: Amount, microbatch: int) -> float:
    """Return the factor of a microbatch for this amount."""
    factors = dict(costs.by_microbatch).get(amount)
    return 1.0 if factors is None else factors[microbatch]


def reordered(costs: Costs, order: Sequence[int]) -> Costs:
    """Reorder the microbatches: the k-th becomes the one with number `order[k]`."""
    reordered_factors = (
        (amount, tuple(factors[microbatch] for microbatch in order))
        for amount, factors in costs.by_microbatch
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
    values = out_us, moved_bytes, back_us
    return costs.having(dict(zip(other_amounts(MOVING), values, strict=True)))


def without_copies(costs: Costs) -> Costs:
    """Return the costs without kinds of passes that move memory off a device."""
    return costs.without(other_amounts(MOVING))
