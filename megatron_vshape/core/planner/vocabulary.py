"""Vocabulary parallelism: insert its passes into an order of F, B and W, and their costs.

The embedding and the output layer are sharded over all devices. S (`LOGITS`) computes forward and
input gradient of the output layer, T (`HEAD_WEIGHT`) its weight gradient.

A collective pass runs on each device as soon as its input is available, in the same order on all
devices: the order in which inputs become available. A device that has not reached such a pass runs
an earlier pass, which depends on no later result of another device. So no such order deadlocks,
even if every collective pass waits for all devices. T is not collective: it fills idle time. It
follows the S of the next microbatch, whose collective also provides the gradient of its loss.

The last stage has a lag between F and B: a message, the longest pass of a device, S and two
collectives. V-Half with an even number of devices, and V-Min, have room for it. V-ZB needs one more
chunk, 1F1B two (a microbatch).
"""

import itertools
import math
from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import add

from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.amounts import STATE_BYTES, Amount
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import (
    HEAD_WEIGHT,
    LOGITS,
    LOOKED_UP,
    LOOKUP,
    LOOKUP_WEIGHT,
    LOSS,
    PROCESSOR,
    VOCABULARY,
    VOCABULARY_AMOUNTS,
    Kind,
    NeedTable,
    ScheduleError,
    other_amounts,
)
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.pieces import MIN_LAYERS, Pieces, without_ends
from megatron_vshape.core.model.placement import stages_of
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.model.stage_costs import StageCosts

PENDING_LOGITS = (1, 3)
"""Microbatches whose logits may wait on a device for a T without idle time; all are tried."""

DELAY_FRACTIONS = (0.0, 0.5, 1.0)
"""Fractions of a pass run early by which it may delay the pass that is due; all are tried.

In chunk passes at d = 8, m = 32, an output layer of 2.46 layers: V-ZB with one more chunk needs
216.5, 214.0 and 215.9, 1F1B with two 305, 293 and 301; V-Half with its published memory 223.8 each.
"""

_EXTRA_WAITS = (0.0, 1.0, 1.5)
"""Extra wait of the last stage's B that is assumed while an order is made, in that stage's F.

The F of the next microbatch then comes first, and collective passes fill the wait. This helps if a
device has one stage, and is tried only then: at d = 8, m = 32, an output layer of 2.46 layers, 1F1B
needs 293, 256 and 256, of 0.62 layers 285, 244 and 251; ZB-H1 221, 243 and 236, and 239, 226, 228.
"""

ADDITIONAL_MICROBATCHES = {"1f1b": 1, "zb-h1": 1, "v-zb": 1}
"""Additional microbatches of a stage that a device may keep in memory, by schedule."""

_MAX_LOOKAHEAD = 24
"""Number of the next passes of a device that may run early."""

ALL_REDUCE_TIME = 0.1
"""Default time of an all-reduce over all devices, in F of a chunk."""

_ROUNDING = 1e-9

_LOOKUP_DISTANCE = 2
"""Microbatches between the embedding lookup and the first stage's F."""


def shared_pieces(
    pieces: Pieces,
    num_devices: int,
    all_reduce_us: float,
    logits_bytes: float = 0.0,
    num_predicting: int = 0,
) -> Pieces:
    """Return the pieces of a model with vocabulary parallelism.

    S computes forward and input gradient of the output layer, T the weight gradient, each device
    for its shard. With multi-token prediction, the output layer of each such layer is sharded too
    and its tokens are looked up again; the layer itself belongs to the last stage.

    Args:
        pieces: costs of a layer, the embedding and the output layer.
        num_devices: pipeline ranks.
        all_reduce_us: time of an all-reduce of one hidden state over all devices.
        logits_bytes: memory of a device per microbatch from S to T.
        num_predicting: number of multi-token prediction layers.
    """
    first, last = pieces.first.times(1 + num_predicting), pieces.last.times(1 + num_predicting)
    all_reduces_us = all_reduce_us * (1 + num_predicting)
    amounts = _amounts(
        first, last, num_devices, all_reduces_us, logits_bytes, pieces.layer[Kind.F.time]
    )
    state_bytes = (pieces.first[STATE_BYTES] + pieces.last[STATE_BYTES]) / num_devices
    return replace(
        without_ends(pieces),
        of_device=pieces.of_device.changed(amounts),
        device_bytes=pieces.device_bytes + state_bytes,
    )


def estimate_logits_bytes(pieces: Pieces, num_devices: int) -> float:
    """Estimate the memory of a device per microbatch from S to T.

    It is the device's shard of the output layer's activations for W, and a hidden state, about 1/17
    of a layer's activations.
    """
    return pieces.last[Kind.B.retained] / num_devices + pieces.layer[Kind.F.allocated] / 17


def _amounts(
    first: StageCosts,
    last: StageCosts,
    num_devices: int,
    all_reduce_us: float,
    logits_bytes: float,
    stage_us: float,
) -> dict[Amount, float]:
    """Return times and memory of a device's vocabulary passes; times have a minimum."""
    times_us = {
        LOOKUP.time: first[Kind.F.time] / num_devices,
        LOOKED_UP.time: all_reduce_us,
        LOGITS.time: (last[Kind.F.time] + last[Kind.B.time]) / num_devices,
        LOSS.time: all_reduce_us,
        HEAD_WEIGHT.time: last[Kind.W.time] / num_devices,
        LOOKUP_WEIGHT.time: (first[Kind.B.time] + first[Kind.W.time]) / num_devices,
    }
    min_us = MIN_LAYERS * stage_us / num_devices
    workspaces = {
        LOGITS.workspace: max(last[Kind.F.workspace], last[Kind.B.workspace]),
        HEAD_WEIGHT.workspace: last[Kind.W.workspace],
    }
    return (
        {amount: max(min_us, value) for amount, value in times_us.items()}
        | {LOGITS.allocated: logits_bytes}
        | {amount: value / num_devices for amount, value in workspaces.items() if value}
    )


def without_shared(costs: Costs) -> Costs:
    """Return the costs without vocabulary passes, for making orders of F, B and W."""
    return costs.without(other_amounts(VOCABULARY))


def in_proportion(costs: Costs, like: Costs) -> Costs:
    """Add the vocabulary costs of `like` in proportion, unless the costs contain them.

    Times scale with the total time of forwards, bytes with the total activation memory.
    """
    if costs.shards_output_layer:
        return costs
    time_ratio = sum(costs.forward_us) / sum(like.forward_us)
    memory_ratio = sum(costs.held_after_forward_bytes) / sum(like.held_after_forward_bytes)
    vocabulary_amounts = {
        amount: [
            (memory_ratio if amount == LOGITS.allocated else time_ratio) * value
            for value in like.required(amount)
        ]
        for amount in VOCABULARY_AMOUNTS & like.by_stage.keys()
        if amount not in costs.by_stage
    }
    return costs.having(vocabulary_amounts)


def uniform_shared(num_devices: int, num_stages: int) -> Costs:
    """Return the costs of `Costs.uniform` with vocabulary passes."""
    return Costs.uniform(num_devices, num_stages, kinds=VOCABULARY)


def additional_memory(name: str, costs: Costs) -> float:
    """Return the additional memory per device for this schedule with vocabulary parallelism."""
    return ADDITIONAL_MICROBATCHES.get(name, 0) * max(costs.held_after_forward_bytes)


def most_logits_bytes(costs: Costs, max_pending: int = max(PENDING_LOGITS)) -> float:
    """Return the peak memory for logits on a device, with the workspace of vocabulary passes.

    At most `max_pending` microbatches wait for a T.
    """
    workspace = max(max(costs.workspace(kind)) for kind in VOCABULARY)
    return (max_pending + 1) * max(costs.by_stage.get(LOGITS.allocated) or (0.0,)) + workspace


def with_vocabulary_passes(schedule: Schedule, costs: Costs) -> Schedule:
    """Return the schedule, with vocabulary parallelism if the costs contain it."""
    if is_shared(schedule) or not costs.shards_output_layer:
        return schedule
    return share_vocabulary(schedule, costs, additional_memory(schedule.name, costs))


def is_shared(schedule: Schedule) -> bool:
    """Return whether the schedule has vocabulary parallelism."""
    return not schedule.kinds.isdisjoint(VOCABULARY)


def share_forwards(wave: Schedule) -> Schedule:
    """Add the forward passes of vocabulary parallelism to a schedule for evaluation.

    `wave` is from `lowering.forward_wave`. All devices run `LOOKUP` directly before the first
    stage's F, and `LOGITS` directly after the last stage's, so the order is the same on all of
    them.
    """
    last_stage, devices = wave.num_stages - 1, wave.num_devices
    chunks = wave.num_stages // devices
    homes = [stages[0] for stages in stages_of(wave.placement, devices)]

    def sort_key(work: Pass) -> tuple[float, int]:
        first_step = chunks * work.microbatch
        if work.kind in (LOOKUP, LOOKED_UP):
            return first_step - 0.5, VOCABULARY.index(work.kind)
        if work.kind in (LOGITS, LOSS):
            return first_step + last_stage + 0.5, VOCABULARY.index(work.kind)
        return first_step + work.stage, work.stage

    rows = []
    for device, row in enumerate(wave.order):
        passes = list(row)
        for microbatch in range(wave.num_microbatches):
            passes += [Pass(kind, homes[device], microbatch) for kind in (LOOKUP, LOGITS)]
            if wave.placement[0] == device:
                passes.append(Pass(LOOKED_UP, 0, microbatch))
            if wave.placement[last_stage] == device:
                passes.append(Pass(LOSS, last_stage, microbatch))
        rows.append(tuple(sorted(passes, key=sort_key)))
    return replace(wave, order=tuple(rows))


def share_vocabulary(
    schedule: Schedule,
    costs: Costs,
    additional: float = 0.0,
    pending_counts: Iterable[int] = PENDING_LOGITS,
) -> Schedule:
    """Return the schedule with the passes of vocabulary parallelism inserted.

    A device that would wait runs a later F or W instead, if its memory without logits stays within
    `additional` of its peak in the schedule. Several variants are tried: the fastest is returned,
    and of equally fast ones that with the smallest peak.

    >>> from megatron_vshape import make, simulate
    >>> from megatron_vshape.core.model.pieces import NOTHING, Pieces
    >>> from megatron_vshape.core.model.stage_costs import StageCosts
    >>> output_layer = StageCosts.of(2, 2, 2)
    >>> pieces = Pieces(StageCosts.of(1, 1, 1), NOTHING, output_layer, send_us=0.0)
    >>> schedule, layers = make("v-half", 4, 12), (1,) * 8
    >>> simulate(schedule, pieces.costs(layers)).makespan
    146.0
    >>> costs = shared_pieces(pieces, 4, all_reduce_us=0.1).costs(layers)
    >>> round(simulate(share_vocabulary(schedule, costs), costs).makespan, 1)
    93.8

    Args:
        schedule: a complete schedule without vocabulary parallelism.
        costs: costs with vocabulary passes, as of `shared_pieces`.
        more: additional memory per device, in the costs' unit.
        pending_counts: numbers of microbatches whose logits may wait for a T without idle time; all
            are tried.

    Raises:
        ScheduleError: the schedule has such passes already, is not complete, or deadlocks.
    """
    if any(kind.of for kind in schedule.kinds):
        raise ScheduleError(f"{schedule.name} has passes of a shared vocabulary already")
    verify(schedule)
    alone = costs.without_state()
    limits = [peak + additional for peak in peak_held(schedule, alone)]
    # A longer wait helps only with one stage per device.
    extra_waits = _EXTRA_WAITS if schedule.num_stages == schedule.num_devices else _EXTRA_WAITS[:1]
    candidates = [
        _PassInserter(
            schedule, alone, limits, max_pending, delay_fraction, extra_wait
        ).insert_passes()
        for max_pending, delay_fraction, extra_wait in itertools.product(
            pending_counts, DELAY_FRACTIONS, extra_waits
        )
    ]
    return min(
        candidates,
        key=lambda candidate: (
            simulate(candidate, costs).makespan,
            max(peak_held(candidate, costs)),
        ),
    )


@dataclass(frozen=True, slots=True, order=True)
class _CollectivePass:
    """A collective pass, and when and where its input is available."""

    available_us: float
    microbatch: int
    kind: Kind
    device: int


@dataclass(frozen=True, slots=True)
class _Action:
    """The next step of a device."""

    start_us: float
    step: tuple[Pass, ...]


class _PassInserter:
    """Simulates the schedule, and inserts the vocabulary passes on each device."""

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        limits: list[float],
        max_pending: int,
        delay_fraction: float,
        extra_wait: float = 0.0,
    ) -> None:
        self.schedule, self.costs, self.limits = schedule, costs, limits
        self.max_pending, self.delay_fraction = max_pending, delay_fraction
        stages = range(schedule.num_stages)
        self.times_us = {
            kind: [costs.time_us(kind, stage) for stage in stages]
            for kind in (*schedule.kinds, *VOCABULARY)
        }
        # Assumed only here; the result is simulated without it.
        self.extra_wait_us = {LOSS: extra_wait * self.times_us[Kind.F][-1]}
        self.memory_changes = {kind: costs.changes(kind) for kind in schedule.kinds}
        self.peaks = {  # memory that a pass adds while it runs
            kind: tuple(map(add, allocated, costs.workspace(kind)))
            for kind, (allocated, _) in self.memory_changes.items()
        }
        self.memory = [0.0] * schedule.num_devices
        devices = schedule.num_devices
        self.first_stages = [stages[0] for stages in stages_of(schedule.placement, devices)]
        self.end_devices = schedule.placement[0], schedule.placement[-1]
        self.last = schedule.num_stages - 1
        self.table = NeedTable(schedule.num_stages, (*schedule.kinds, *VOCABULARY))
        self.remaining = [list(schedule.steps(device)) for device in range(devices)]
        self.link_clocks_us: dict[tuple[int, str], float] = {}  # by (device, resource): busy until
        self.collective_index = [0] * devices  # [device] -> index in `collectives`
        self.num_logits = [0] * devices  # [device] -> S that have run
        self.num_weights = [0] * devices  # [device] -> T that have run
        self.clock_us = [0.0] * devices
        self.rows: list[list[Pass]] = [[] for _ in range(devices)]
        self.done_us = self._initial_ends()
        placement = schedule.placement
        self.inputs = {  # inputs of a pass: ends by microbatch, and P2P lag
            (kind, stage): [
                (
                    self.done_us[self.table.parts[part], source],
                    costs.message_us(source, stage) if placement[source] != placement[stage] else 0,
                )
                for part, source in needs[stage]
            ]
            for kind, needs in self.table.needs.items()
            for stage in stages
        }
        self.parts: dict[tuple[Kind, int], list[float]] = {}  # arrivals of a collective's parts
        self.collectives_us = [0.0] * devices  # [device] busy with collectives until
        self.collectives = [
            _CollectivePass(0.0, microbatch, LOOKUP, self.end_devices[0])
            for microbatch in range(min(_LOOKUP_DISTANCE, schedule.num_microbatches))
        ]
        self.all_devices = frozenset(range(devices))
        self.readers = self._readers_of_passes()
        self.changed_devices = set(self.all_devices)  # devices whose next step may have changed

    def insert_passes(self) -> Schedule:
        num_steps = sum(map(len, self.remaining))
        # LOOKUP, LOGITS, HEAD_WEIGHT and LOOKUP_WEIGHT of every device and microbatch.
        # LOOKED_UP and LOSS are no steps of a device: `_end_collective` adds them with the last
        # part.
        num_steps += 4 * self.schedule.num_devices * self.schedule.num_microbatches
        starts_us, actions = [0.0] * len(self.rows), dict[int, _Action]()
        for _ in range(num_steps):
            # Only these devices can have another next step than before.
            for device in self.changed_devices:
                actions[device] = self._next_action(device)
                starts_us[device] = actions[device].start_us
            device = starts_us.index(min(starts_us))
            self.changed_devices = {device}
            self._run_action(actions[device], device)
        return replace(self.schedule, order=tuple(map(tuple, self.rows)))

    def _initial_ends(self) -> dict[tuple[Kind, int], list[float]]:
        """Return the ends of passes by microbatch: infinity, or 0 for passes that do not exist."""
        present = {work for row in self.schedule.order for work in row if not work.kind.everywhere}
        microbatches = range(
            1 + max(work.microbatch for row in self.schedule.order for work in row)
        )
        return {
            (part, stage): [
                math.inf
                if part.everywhere or part.of or Pass(part, stage, microbatch) in present
                else 0.0
                for microbatch in microbatches
            ]
            for part in self.table.parts
            for stage in range(self.schedule.num_stages)
        }

    def _readers_of_passes(self) -> dict[tuple[Kind, int], set[int]]:
        """Return the devices that read the result of a kind of pass on a stage."""
        readers_of: dict[tuple[Kind, int], set[int]] = {}
        for needs in self.table.needs.values():
            for stage, reads in enumerate(needs):
                for part, source in reads:
                    readers = readers_of.setdefault((self.table.parts[part], source), set())
                    readers.add(self.schedule.placement[stage])
        readers_of[LOSS, self.last] = set(self.all_devices)  # the T of every device, too
        return readers_of

    def _set_end(self, kind: Kind, stage: int, microbatch: int, end: float) -> None:
        self.done_us[kind, stage][microbatch] = end
        self.changed_devices |= self.readers.get((kind, stage), set())

    def _next_action(self, device: int) -> _Action:
        """Return the device's next step, by the inputs known so far."""
        now, options = self.clock_us[device], []
        # Collective passes run in the same order on all devices, so only the next one is an option.
        if self.collective_index[device] < len(self.collectives):
            collective = self.collectives[self.collective_index[device]]
            start = max(now, self._arrival_us(collective.available_us, collective.device, device))
            options.append(
                _Action(
                    start,
                    (Pass(collective.kind, self.first_stages[device], collective.microbatch),),
                )
            )
        # A placeholder that never runs, for a device with no scheduled pass left.
        scheduled = _Action(math.inf, (Pass(HEAD_WEIGHT, self.first_stages[device], -1),))
        if self.remaining[device]:
            scheduled = self._action_of(self.remaining[device][0], device)
        filler = self._next_filler(device, now)
        if filler is not None:
            # With too many logits in memory, T runs even if it delays the scheduled pass.
            is_required = self.num_logits[device] - self.num_weights[device] > self.max_pending
            filler_us = self.times_us[HEAD_WEIGHT][self.first_stages[device]]
            if filler.start_us + (0.0 if is_required else filler_us) <= scheduled.start_us:
                options.append(filler)
        if scheduled.start_us > now:
            options += self._early_actions(scheduled, device)
        # The earliest start; on ties a collective pass, then T, then a later pass.
        return min((*options, scheduled), key=lambda action: action.start_us)

    def _action_of(self, step: tuple[Pass, ...], device: int) -> _Action:
        """Return the scheduled step; a pass on another resource does not delay compute passes."""
        ready_us = max(map(self._ready_us, step))
        # Launched now; `_run_action` computes when its link runs it.
        if step[0].kind.resource != PROCESSOR and ready_us < math.inf:
            return _Action(self.clock_us[device], step)
        return _Action(max(self.clock_us[device], ready_us), step)

    def _early_actions(self, scheduled: _Action, device: int) -> Iterator[_Action]:
        """Yield a later W and a later F that hardly delay the scheduled pass."""
        seen_kinds = set()
        for step in self.remaining[device][:_MAX_LOOKAHEAD]:
            kind, stage, _ = step[0]
            if kind in seen_kinds or kind not in (Kind.F, Kind.W) or len(step) > 1:
                continue
            seen_kinds.add(kind)
            action, peak = self._action_of(step, device), self.peaks[kind][stage]
            if peak and self.memory[device] + peak > self.limits[device] * (1 + _ROUNDING):
                continue
            # A pass run early may delay the scheduled one by `delay_fraction` of its time.
            min_duration_us = (1 - self.delay_fraction) * self.times_us[kind][stage]
            if (
                action.start_us < math.inf
                and action.start_us + min_duration_us <= scheduled.start_us
            ):
                yield action

    def _next_filler(self, device: int, now: float) -> _Action | None:
        """Return the next T, if the S of the next microbatch has run."""
        microbatch = self.num_weights[device]
        ready = min(self.num_logits[device], microbatch + 2)
        # T needs the S of the next microbatch, unless its own is the last.
        if ready < min(microbatch + 2, self.schedule.num_microbatches) or ready == microbatch:
            return None
        loss_end_us = self.done_us[LOSS, self.last][microbatch]
        if loss_end_us == math.inf:
            return None
        start = max(now, self._arrival_us(loss_end_us, self.end_devices[1], device))
        return _Action(start, (Pass(HEAD_WEIGHT, self.first_stages[device], microbatch),))

    def _arrival_us(self, available_us: float, source: int, device: int) -> float:
        return available_us + (self.costs.send_us if source != device else 0.0)

    def _ready_us(self, work: Pass) -> float:
        """Return when all inputs of the pass are available; infinity if that is unknown."""
        kind, stage, microbatch = work
        ready_us = 0.0
        for done_us, lag_us in self.inputs[kind, stage]:
            ready_us = max(ready_us, done_us[microbatch] + lag_us)
        return ready_us

    def _run_action(self, action: _Action, device: int) -> None:
        step, first = action.step, action.step[0]
        end = action.start_us + self._duration_us(step)
        # Compute passes occupy the device, copies only their link.
        if first.kind.resource == PROCESSOR:
            self.clock_us[device] = end
        else:
            link = device, first.kind.resource
            start = max(self._ready_us(first), self.link_clocks_us.get(link, 0.0))
            self.link_clocks_us[link] = end = start + self._duration_us(step)
        for work in step:
            self.rows[device].append(work)
            for part in work.parts():
                self._set_end(part, work.stage, work.microbatch, end)
            self._finish_pass(work, end, device)
        if not first.kind.of:
            self.remaining[device].remove(step)

    def _duration_us(self, step: tuple[Pass, ...]) -> float:
        kind, stage, _ = step[0]
        if len(step) == 1:
            return self.times_us[kind][stage]
        return self.costs.overlapped_us(stage, step[1].kind, step[1].stage)

    def _finish_pass(self, work: Pass, end: float, device: int) -> None:
        kind, stage, microbatch = work
        if kind.is_collective:
            self.collective_index[device] += 1
        if kind is LOGITS:
            self.num_logits[device] += 1
            self._end_collective(LOSS, self.last, microbatch, end, device)
        elif kind is LOOKUP:
            self._end_collective(LOOKED_UP, 0, microbatch, end, device)
        elif kind is HEAD_WEIGHT:
            self.num_weights[device] += 1
        else:
            self._queue_collectives(work, end, device)
        if not kind.of:
            self.memory[device] += sum(change[stage] for change in self.memory_changes[kind])

    def _queue_collectives(self, work: Pass, end: float, device: int) -> None:
        """Queue the collective passes that read this pass's result, or that a later pass needs."""
        if work.kind is Kind.F and work.stage == 0:
            lookup_microbatch = work.microbatch + _LOOKUP_DISTANCE
            if lookup_microbatch < self.schedule.num_microbatches:
                self._insert_collective(_CollectivePass(end, lookup_microbatch, LOOKUP, device))
        if work.kind is Kind.F and work.stage == self.last:
            self._insert_collective(_CollectivePass(end, work.microbatch, LOGITS, device))
        if Kind.B in work.parts() and work.stage == 0:
            self._insert_collective(_CollectivePass(end, work.microbatch, LOOKUP_WEIGHT, device))

    def _insert_collective(self, collective: _CollectivePass) -> None:
        # Behind all items that any device has run: their inputs were there before this step's
        # start, and this item is made at its end.
        insort(self.collectives, collective)
        self.changed_devices |= self.all_devices

    def _end_collective(
        self, kind: Kind, stage: int, microbatch: int, end: float, device: int
    ) -> None:
        """Finish a collective at its reader once the parts of all devices have arrived."""
        home = self.schedule.placement[stage]
        arrivals = self.parts.setdefault((kind, microbatch), [])
        arrivals.append(self._arrival_us(end, device, home))
        # The result of the collective is a pass of its reader only.
        # Right after its part, because `verify` requires the sum behind it in the row.
        if device == home:
            self.rows[home].append(Pass(kind, stage, microbatch))
        if len(arrivals) == self.schedule.num_devices:
            start = max(*arrivals, self.collectives_us[home])
            end_us = start + self.times_us[kind][stage]
            self.collectives_us[home] = end_us
            self._set_end(kind, stage, microbatch, end_us + self.extra_wait_us.get(kind, 0.0))
