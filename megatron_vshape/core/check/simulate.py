"""Discrete-event simulator: the timeline of a schedule from costs, or why it deadlocks."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain
from operator import add

from megatron_vshape.core.model.costs import Costs, extra_us_of_microbatch, microbatch_factor
from megatron_vshape.core.model.kinds import HELD, KINDS, Kind, NeedTable, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import ResourceQueue, Schedule, Timeline

HOST_BLOCKS = 16
"""Minimum number of blocks of a pool of host memory, to limit the unused part of the last block."""

Rows = tuple[tuple[float, ...], ...]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Simulate a step: each pass starts once its device is free and its inputs are there.

    * A resource of a device runs its passes in order, one at a time.
    * An overlapped forward-backward (F&B) pair starts when the inputs of both passes are ready;
      both passes end at the same time.
    * A result for another device arrives one message time after its pass has ended. Sending
      occupies no device.
    * Without `costs`, a pass of one of 2 * num_devices stages takes one unit, a pass of one of
      num_devices stages two, and messages take none.
    * A slice has its share of the cost of a microbatch.

    >>> from megatron_vshape import Costs, make, simulate
    >>> timeline = simulate(make("1f1b", 4, 8), Costs.uniform(4, 4, backward=1.2, weight=0.8))
    >>> timeline.makespan, f"{timeline.bubble:.0%}"
    (66.0, '27%')

    Raises:
        ScheduleError: the costs are for another number of stages, or the order deadlocks.
    """
    if costs is None:
        return _with_unit_costs(schedule)
    return _Simulation(schedule, costs_of(schedule, costs)).run()


@lru_cache(maxsize=1)
def _with_unit_costs(schedule: Schedule) -> Timeline:
    # The last one is kept: whoever has a schedule verified simulates it right afterwards.
    return _Simulation(schedule, costs_of(schedule)).run()


def costs_of(schedule: Schedule, costs: Costs | None = None) -> Costs:
    """Scale costs of whole microbatches to the slices of a schedule; without costs, unit costs.

    Raises:
        ScheduleError: the costs are for another number of stages.
    """
    if costs is None:
        return unit_costs(schedule).sliced(schedule.slices)
    if costs.num_stages != schedule.num_stages:
        raise ScheduleError(
            f"the costs are for {costs.num_stages} stages, the schedule has {schedule.num_stages}"
        )
    # `by_microbatch` of whole microbatches has a factor per microbatch, not per slice.
    num_microbatches = schedule.unsliced_microbatches * costs.slices
    for amount, factors in costs.by_microbatch:
        if len(factors) != num_microbatches:
            raise ScheduleError(
                f"the costs have {amount} of {len(factors)} microbatches, the schedule has "
                f"{num_microbatches}"
            )
    return costs.sliced(schedule.slices)


def unit_costs(schedule: Schedule) -> Costs:
    """Return costs of one unit per pass of one of 2 * num_devices stages, as in the paper.

    Time and memory of other pass types are one unit, too.
    """
    return Costs.uniform(schedule.num_devices, schedule.num_stages, kinds=schedule.kinds)


class _Simulation:
    """Run each resource queue until it must wait, and resume it when its input is ready."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        stages, microbatches = schedule.num_stages, schedule.num_microbatches
        self.schedule = schedule
        self.costs = costs
        self.queues = schedule.queues()
        # In table order, so that an error names the first missing kind.
        kinds = [kind for kind in KINDS if kind in schedule.kinds]
        self.table = NeedTable(stages, kinds)
        self.parts_of = self.table.parts_of
        self.overlapped = schedule.overlapped
        self.overlapped_us = cache(costs.overlapped_us)
        self.time_us = {kind: [costs.time_us(kind, s) for s in range(stages)] for kind in kinds}
        self.end: list[list[list[float | None]]] = [
            [[None] * microbatches for _ in range(stages)] for _ in self.table.parts
        ]
        self._complete_omitted_passes()
        self.inputs = {
            kind: [self._inputs(stage, needs) for stage, needs in enumerate(self.table.needs[kind])]
            for kind in kinds
        }
        # Of a pass: its duration, its inputs, and the end times that it sets.
        self.rules = {
            kind: [
                (us, self.inputs[kind][stage], [(part, self.end[part][stage]) for part in parts])
                for stage, us in enumerate(self.time_us[kind])
            ]
            for kind, parts in ((kind, self.parts_of[kind]) for kind in kinds)
        }
        self.starts: list[list[float]] = [[] for _ in self.queues]
        self.ends: list[list[float]] = [[] for _ in self.queues]
        self.waiting_queues: dict[tuple[int, int, int], list[int]] = {}

    def _complete_omitted_passes(self) -> None:
        """Set the end of omitted optional passes to 0, so that no pass waits for them."""
        optional_ends = {
            self.table.parts[part]: self.end[part] for part in self.table.optional_parts
        }
        for ends in optional_ends.values():
            for row in ends:
                row[:] = [0.0] * len(row)
        for kind, stage, microbatch in (
            w for row in self.schedule.order for w in row if optional_ends
        ):
            if kind in optional_ends:
                optional_ends[kind][stage][microbatch] = None

    def _inputs(
        self, stage: int, needs: Iterable[tuple[int, int]]
    ) -> list[tuple[int, int, list[float | None], float]]:
        """Return the inputs of a pass of this stage: part, stage, end times, and message time."""
        placement, message_us = self.schedule.placement, self.costs.message_us
        return [
            (
                part,
                need_stage,
                self.end[part][need_stage],
                message_us(stage, need_stage) if is_remote else 0.0,
            )
            for part, need_stage in needs
            for is_remote in [placement[need_stage] != placement[stage]]
        ]

    def run(self) -> Timeline:
        starts, ends = self._run_lanes()
        costs = self.costs
        return Timeline(
            self.schedule, starts, ends, costs.send_us, costs.full_us, costs.more_send_us
        )

    def _run_lanes(self) -> tuple[Rows, Rows]:
        """Run all queues to the end; raises ScheduleError with the cycle of waits if deadlocked."""
        ready = list(range(len(self.queues)))
        while ready:
            # The order of `ready` does not change any time, because each queue has a fixed pass
            # order.
            self._advance(ready.pop(), ready)
        stuck = {
            index: len(self.ends[index])
            for index, queue in enumerate(self.queues)
            if len(self.ends[index]) < len(queue.passes)
        }
        if stuck:
            pairs = self.schedule.overlapped_pairs()
            raise ScheduleError(_Stuck(self.queues, self.table, stuck, pairs).explain())
        starts, ends = (_by_device(self.schedule, self.queues, x) for x in (self.starts, self.ends))
        return starts, ends

    def _advance(self, queue_index: int, ready: list[int]) -> None:
        """Run passes of a queue up to the first pass without its inputs."""
        if not (self.overlapped or self.costs.by_microbatch):
            self._advance_plain(queue_index, ready)
            return
        passes = self.queues[queue_index].passes
        starts = self.starts[queue_index]
        ends = self.ends[queue_index]
        clock = ends[-1] if ends else 0.0
        while len(ends) < len(passes):
            work = passes[len(ends)]
            start = self._start(queue_index, work, clock)
            length_us = self.time_us[work.kind][work.stage]
            # An F&B pair waits for the inputs of both passes, and has its own measured cost.
            partner = passes[len(ends) + 1] if work in self.overlapped else None
            if partner is not None and start is not None:
                # If only the partner must wait, the queue resumes at this F, and its start is
                # computed again.
                start = self._start(queue_index, partner, start)
                length_us = self.overlapped_us(work.stage, partner.kind, partner.stage)
            elif self.costs.by_microbatch:
                length_us += extra_us_of_microbatch(self.costs, *work)
            if start is None:
                return
            clock = start + length_us
            for step_pass in (work,) if partner is None else (work, partner):
                starts.append(start)
                ends.append(clock)
                self._finish(step_pass, clock, ready)

    def _advance_plain(self, queue_index: int, ready: list[int]) -> None:
        """Run `_advance` for single passes whose costs do not depend on the microbatch."""
        # A step has 10^5 passes, so each needs no call and few lookups, which halves the time.
        starts = self.starts[queue_index]
        ends = self.ends[queue_index]
        rules = self.rules
        waiting_queues = self.waiting_queues
        # A queue that had to wait starts again here, so an advanced clock need not be saved.
        clock = ends[-1] if ends else 0.0
        passes = self.queues[queue_index].passes
        for index in range(len(ends), len(passes)):
            kind, stage, microbatch = passes[index]
            length_us, inputs, outputs = rules[kind][stage]
            for part, need_stage, part_ends, send_us in inputs:
                input_end = part_ends[microbatch]
                if input_end is None:
                    waiting_queues.setdefault((part, need_stage, microbatch), []).append(
                        queue_index
                    )
                    return
                if input_end + send_us > clock:
                    clock = input_end + send_us
            starts.append(clock)
            clock += length_us
            ends.append(clock)
            for part, part_ends in outputs:
                part_ends[microbatch] = clock
                if waiting_queues:
                    ready += waiting_queues.pop((part, stage, microbatch), ())

    def _start(self, queue_index: int, work: Pass, start: float) -> float | None:
        """Return the start time of a pass, at least `start`; None if an input has not ended yet."""
        for part, need_stage, ends, send_us in self.inputs[work.kind][work.stage]:
            input_end = ends[work.microbatch]
            if input_end is None:
                # Register the queue, so that `_finish` of the input resumes it.
                self.waiting_queues.setdefault((part, need_stage, work.microbatch), []).append(
                    queue_index
                )
                return None
            if input_end + send_us > start:
                start = input_end + send_us
        return start

    def _finish(self, work: Pass, clock: float, ready: list[int]) -> None:
        for part in self.parts_of[work.kind]:
            self.end[part][work.stage][work.microbatch] = clock
            if self.waiting_queues:
                ready.extend(self.waiting_queues.pop((part, work.stage, work.microbatch), ()))


def _by_device(
    schedule: Schedule, queues: Sequence[ResourceQueue], times: Iterable[Sequence[float]]
) -> Rows:
    """Merge the times of all queues into the pass order of the devices."""
    if len(queues) == len(schedule.order):  # processor queues only
        return tuple(map(tuple, times))
    rows = [[0.0] * len(passes) for passes in schedule.order]
    for queue, queue_times in zip(queues, times, strict=True):
        for position, time in zip(queue.positions, queue_times, strict=True):
            rows[queue.device][position] = time
    return tuple(map(tuple, rows))


def held_curve(schedule: Schedule, costs: Costs, device: int) -> list[float]:
    """Return the memory of a device during each of its passes, in the unit of the costs.

    This includes activations, the workspace of the running pass, and the state of the device's
    stages (if the costs have these). In an F&B pair, the second pass has the workspace of both.
    """
    return next(_curves(schedule, costs_of(schedule, costs), [device]))


def _curves(schedule: Schedule, costs: Costs, devices: Iterable[int]) -> Iterator[list[float]]:
    fixed = costs.fixed_bytes(schedule.placement, schedule.num_devices)
    amounts = {
        kind: list(zip(costs.workspace(kind), *costs.changes(kind), strict=True))
        for kind in schedule.kinds
    }
    memory_varies = any(amount in HELD for amount, _ in costs.by_microbatch)
    for device in devices:
        memory, partner_workspace, overlapped = fixed[device], 0.0, schedule.overlapped
        curve = list[float]()
        for work in schedule.order[device]:
            workspace, at_start, at_end = amounts[work.kind][work.stage]
            if memory_varies:
                at_start, at_end = _changes_of(work, costs)
            # The curve has memory during the pass: allocated at its start, not yet freed at its
            # end.
            memory += at_start
            # The first pass of an F&B pair is still running, so its workspace counts for the second
            # too.
            curve.append(memory + workspace + partner_workspace)
            memory += at_end
            partner_workspace = workspace if overlapped and work in overlapped else 0.0
        yield curve


def _changes_of(work: Pass, costs: Costs) -> tuple[float, float]:
    """Return the memory allocated at the start, and retained minus freed at the end of a pass."""
    kind, memory = work.kind, costs.stages[work.stage].memory(work.kind)
    amounts = kind.allocated, kind.retained, kind.freed
    allocated, retained, freed = (
        value * microbatch_factor(costs, amount, work.microbatch)
        for value, amount in zip(memory, amounts, strict=True)
    )
    return allocated, retained - freed


def peak_held(schedule: Schedule, costs: Costs | None = None) -> tuple[float, ...]:
    """Compute the peak memory of each device, in chunks or in the unit of the costs.

    A chunk is 1 / (2 * num_devices) of the model's activation memory of one microbatch. If the
    costs have state and workspace, the peak includes them.

    >>> from megatron_vshape import make, peak_held
    >>> peak_held(make("1f1b", 4, 8)), peak_held(make("v-half", 4, 8))
    ((8.0, 6.0, 4.0, 2.0), (6.0, 6.0, 6.0, 6.0))
    """
    costs, devices = costs_of(schedule, costs), range(schedule.num_devices)
    return tuple(max(curve, default=0.0) for curve in _curves(schedule, costs, devices))


def peak_shared(
    schedule: Schedule, costs: Costs, shared: Mapping[int, tuple[float, float]]
) -> tuple[float, ...]:
    """Return `peak_held` with the memory that slices of a microbatch share, by stage.

    The shared keys and values are part of `costs`, split over the slices. But all of them stay
    allocated from F of the first slice to its B. The gradients that later slices owe to earlier
    slices exist from B of the last slice to B of the first.
    """
    return tuple(
        max(map(add, held_curve(schedule, costs, device), _shared_curve(row, schedule, shared)))
        for device, row in enumerate(schedule.order)
    )


def _shared_curve(
    row: Sequence[Pass], schedule: Schedule, shared: Mapping[int, tuple[float, float]]
) -> Iterator[float]:
    """Yield the shared memory beyond the running slices' own parts, during each pass."""
    extra_bytes, slices = dict[tuple[int, int], float](), schedule.slices
    for work in row:
        microbatch, slice_number = divmod(work.microbatch, slices)
        shared_bytes, gradient_bytes = shared.get(work.stage, (0.0, 0.0))
        if work.kind is Kind.F:
            # F of the first slice allocates keys and values of all; the costs count parts 0 to
            # `slice_number`.
            extra_bytes[work.stage, microbatch] = (
                shared_bytes * (slices - 1 - slice_number) / slices
            )
        yield sum(extra_bytes.values())
        if Kind.B in work.kind.does:
            # B runs from the last slice to the first: the costs still count parts 0 to
            # `slice_number` - 1, but B of slice 0 needs the complete buffers and frees them.
            keys_and_values = (
                shared_bytes * (slices - slice_number) / slices if slice_number else 0.0
            )
            gradients = gradient_bytes * (slices - 1) / slices if slice_number else 0.0
            extra_bytes[work.stage, microbatch] = keys_and_values + gradients


def peak_moved(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Return the peak memory that passes have moved off each device, in the costs' unit.

    A microbatch counts from the position of its copy in the device's pass order until its backward.
    So slower copies never increase the peak, as for device memory.
    """
    costs = costs_of(schedule, costs)
    moved = {k: costs.required(k.offloaded) for k in schedule.kinds if k.offloaded}
    return tuple(_peak_moved(passes, moved) for passes in schedule.order)


def usable_host_bytes(num_bytes: float) -> float:
    """Return the usable part of this host memory: the last block may be partly empty."""
    return num_bytes / (1 + 1 / HOST_BLOCKS)


def _peak_moved(passes: Sequence[Pass], moved: Mapping[Kind, Sequence[float]]) -> float:
    moved_bytes, peak = dict[tuple[int, int], float](), 0.0
    for work in passes:
        if work.kind in moved:
            moved_bytes[work[1:]] = moved[work.kind][work.stage]
            peak = max(peak, sum(moved_bytes.values()))
        # The copy back ends before this B, which reads it: only then the block is free.
        elif Kind.B in work.kind.does:
            moved_bytes.pop(work[1:], None)
    return peak


def times_in(timelines: Iterable[Timeline]) -> dict[tuple[Kind, int], list[float]]:
    """Return the durations of passes by kind and stage, without overlapped passes."""
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        pairs = {work for pair in timeline.schedule.overlapped_pairs().items() for work in pair}
        for device in range(timeline.schedule.num_devices):
            for work, start, end in timeline.slots(device):
                if work not in pairs:
                    times[work.kind, work.stage].append(end - start)
    return times


LISTED = 12
"""Maximum waits of a cycle in an error: its first ones and its last one."""


class _Stuck:
    """A schedule with stuck resource queues; `stuck` maps queues to indices.

    `partners` maps the F of each F&B pair to its B.
    """

    def __init__(
        self,
        queues: Sequence[ResourceQueue],
        table: NeedTable,
        stuck: Mapping[int, int],
        partners: Mapping[Pass, Pass],
    ) -> None:
        self.queues = queues
        self.table = table
        self.stuck = stuck
        self.partners = partners
        self.locations = {
            Pass(kind, work.stage, work.microbatch): (queue_index, position)
            for queue_index, queue in enumerate(queues)
            for position, work in enumerate(queue.passes)
            for kind in work.parts()
        }

    def explain(self) -> str:
        """Format the error. Each line is one wait: the two passes, and the reason.

        The first pass reads the result of the second, or runs after it on the same device.
        """
        absent = self._find_absent()
        if absent:
            return "the schedule cannot end: " + absent
        cycle = self._find_cycle()
        lines = [
            self._format_wait(work, next_pass)
            for work, next_pass in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
        ]
        if len(lines) > LISTED:
            lines[LISTED - 1 : -1] = [f"... and {len(lines) - LISTED} more waits, until"]
        head = "the schedule deadlocks; each pass below waits for the next:\n"
        return head + "\n".join("    " + line for line in lines)

    def _current(self, queue_index: int) -> Pass:
        return self.queues[queue_index].passes[self.stuck[queue_index]]

    def _find_absent(self) -> str | None:
        """Format a wait for a pass that no device runs; None if the schedule is complete."""
        for queue_index in self.stuck:
            work = self._current(queue_index)
            for dependency in self._needs_of(work):
                if dependency not in self.locations and dependency.kind.everywhere:
                    device = self.queues[queue_index].device
                    return f"{work} on device {device} waits for {dependency}, which no device runs"
        return None

    def _find_cycle(self) -> list[Pass]:
        """Return a cycle of passes; each waits for the next, and the last for the first."""
        work = self._current(min(self.stuck))
        visited: dict[Pass, int] = {}
        while work not in visited:
            visited[work] = len(visited)
            queue_index, position = self.locations[work._replace(kind=work.parts()[0])]
            # The first pass of a stuck queue waits for a result that comes later.
            work = (
                self._current(queue_index)
                if position > self.stuck[queue_index]
                else next(self._missing(work))
            )
        return list(visited)[visited[work] :]

    def _missing(self, work: Pass) -> Iterator[Pass]:
        """Yield the passes that have not run among the inputs of `work` or of its F&B partner."""
        for dependency in self._needs_of(work):
            queue_index, position = self.locations.get(dependency, (-1, -1))
            if queue_index in self.stuck and position >= self.stuck[queue_index]:
                yield self.queues[queue_index].passes[position]

    def _needs_of(self, work: Pass) -> Iterator[Pass]:
        step = (work, self.partners[work]) if work in self.partners else (work,)
        return chain.from_iterable(step_pass.needs_in(self.table) for step_pass in step)

    def _format_wait(self, work: Pass, next_pass: Pass) -> str:
        def is_next(dependency: Pass) -> bool:
            return dependency.kind in next_pass.parts() and dependency[1:] == next_pass[1:]

        queue_index, _ = self.locations[work._replace(kind=work.parts()[0])]
        device = self.queues[queue_index].device
        if any(map(is_next, work.needs_in(self.table))):
            reason = "reads its result"
        elif any(map(is_next, self._needs_of(work))):
            reason = f"{self.partners[work]}, which runs with it, reads its result"
        elif self.partners.get(next_pass) == work:
            reason = "runs with it"
        else:
            reason = f"device {device} runs it first"
        return f"{work} on device {device} waits for {next_pass}: {reason}"
