"""Schedules by name, each made from its block in the four steps of arXiv 2405.15362."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from inspect import signature
from itertools import chain, pairwise

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.compiling import compile_if_large, in_lists
from megatron_vshape.core.list_scheduler import (
    FILL_CALLEES,
    LATE,
    NONE,
    PassOrder,
    PassTypes,
    SchedulerState,
    fill_idle_slots,
    make_pass_types,
    new_scheduler_state,
    number_passes,
    ready_time,
)
from megatron_vshape.core.model.files import is_whole
from megatron_vshape.core.model.kinds import PARTS, Kind, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import Placement, v_shape
from megatron_vshape.core.model.schedule import Schedule, check_size
from megatron_vshape.core.paper import blocks
from megatron_vshape.core.paper.blocks import BuildingBlock, repeat, squeeze


def _make_schedule(
    block: BuildingBlock, num_microbatches: int, max_held: int | None = None
) -> Schedule:
    """Make the schedule of `block` in the paper's four steps.

    `num_microbatches` counts every slice. Without `max_held` (in stage activations), the reordering
    step is skipped.

    Raises:
        ScheduleError: the block's schedule is infeasible, or exceeds `max_held`.
    """
    schedule = squeeze(repeat(block, num_microbatches))
    if max_held is not None:
        schedule = reorder(schedule, max_held)
    if block.num_microbatches > 1 and block.slices == 1:
        schedule = _in_microbatch_order(schedule)
    verify(schedule)
    return schedule


def _in_microbatch_order(schedule: Schedule) -> Schedule:
    """Renumber the passes of each kind and stage in microbatch order, as gradients are added.

    This changes neither times nor memory. A block of several microbatches can order their W by
    their free slots instead.
    """
    rows = []
    for row in schedule.order:
        microbatches = defaultdict[tuple[Kind, int], list[int]](list)
        for work in row:
            microbatches[work.kind, work.stage].append(work.microbatch)
        ascending = {key: iter(sorted(numbers)) for key, numbers in microbatches.items()}
        rows.append(
            tuple(work._replace(microbatch=next(ascending[work.kind, work.stage])) for work in row)
        )
    return replace(schedule, order=tuple(rows))


_BLOCKS: dict[str, Callable[..., BuildingBlock]] = {
    "gpipe": blocks.gpipe,
    "1f1b": blocks.one_f_one_b,
    "eager-1f1b": blocks.eager_one_f_one_b,
    "interleaved-1f1b": blocks.interleaved,
    "grouped-interleaved-1f1b": blocks.grouped_interleaved,
    "zb-h1": blocks.zb_h1,
    "zb-h2": blocks.zb_h2,
    "1f1b-v": blocks.one_f_one_b_v,
    "v-two-thirds": blocks.two_thirds,
    "v-min": blocks.v_min,
    "v-half": blocks.v_half,
    "v-zb": blocks.v_zb,
    "dualpipev": blocks.dualpipev,
    "overlapped-interleaved-1f1b": blocks.overlapped_interleaved,
}
"""Keyword arguments: devices, microbatches and those of `OPTIONS` that the block depends on."""

JOINT_NAMES = ("dualpipev", "overlapped-interleaved-1f1b")
"""Schedules with overlapped forward-backward passes: they need costs or a trainer with support."""

EVERY_NAME = tuple(_BLOCKS)

NAMES = tuple(name for name in _BLOCKS if name not in JOINT_NAMES)

NOT_REORDERED = frozenset({"gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b"})
"""Schedules without the reordering step: without W, few passes can fill idle slots."""

OPTIONS: dict[str, frozenset[str]] = {
    "interleaved-1f1b": frozenset({"num_chunks"}),
    "grouped-interleaved-1f1b": frozenset({"num_chunks", "group_size"}),
    "overlapped-interleaved-1f1b": frozenset({"num_chunks"}),
}
"""Options in addition to devices and microbatches."""

MAX_STAGES_PER_DEVICE = 128
"""Maximum chunks per rank: the layers per rank of the deepest models."""


def canonical_name(text: str) -> str:
    """Return the name of a schedule written in another case or with underscores: V_Half is v-half.

    Other texts, such as paths, are returned unchanged.
    """
    name = text.lower().replace("_", "-")
    return name if name.partition(":")[0].removesuffix("+") in _BLOCKS else text


def no_such_schedule(name: str, names: Sequence[str], suffix: str = "") -> ScheduleError:
    """Return the error for an unknown name, with the nearest of `names`, all names and `suffix`."""
    close_matches = get_close_matches(name, names, n=1)
    hint = f"; did you mean {close_matches[0]}?" if close_matches else "."
    return ScheduleError(
        f"there is no schedule {name!r:.60}{hint} The names are {', '.join(names)}{suffix}"
    )


@lru_cache
def usual_chunks(name: str) -> int:
    """Return the default number of stages per device of the schedule `name`."""
    # The number of chunks is the same for any size that all blocks support, such as this one.
    sizes = {"num_devices": 2, "num_microbatches": 4, "num_chunks": 2, "group_size": 2}
    block = _block_of_sizes(name, sizes)
    return len(block.placement) // block.num_devices


def _block_of_sizes(name: str, sizes: Mapping[str, int]) -> BuildingBlock:
    """Make the building block of a schedule from the sizes that it depends on."""
    maker = _BLOCKS[name]
    return maker(**{option: sizes[option] for option in signature(maker).parameters})


def make_block(
    name: str,
    num_devices: int,
    num_microbatches: int,
    *,
    num_chunks: int | None = None,
    group_size: int | None = None,
    slices: int = 1,
) -> BuildingBlock:
    """Make the building block of a schedule.

    Args:
        name: name of the schedule.
        num_devices, num_microbatches: its size.
        num_chunks: stages per device (default: 2), if in `OPTIONS`.
        group_size: microbatches that pass a chunk before the next chunk (default: the number of
            devices), if in `OPTIONS`.
        slices: slices per microbatch; the block then treats slices as microbatches.

    Raises:
        ScheduleError: no schedule has this name or this option, or a count is impossible.
    """
    if name not in _BLOCKS:
        raise no_such_schedule(name, EVERY_NAME)
    if name in JOINT_NAMES and slices != 1:
        raise ScheduleError(
            f"{name} overlaps forward and backward, which does not support slices: leave slices "
            "out, or choose another"
        )
    options = {"num_chunks": num_chunks, "group_size": group_size}
    counts = {"num_devices": num_devices, "num_microbatches": num_microbatches, "slices": slices}
    _check_options(name, options)
    _check_counts(name, counts | options)
    # From here on, blocks count slices as microbatches.
    numbers = num_microbatches * slices
    sizes = {
        "num_devices": num_devices,
        "num_microbatches": numbers,
        "num_chunks": num_chunks or 2,
        # A larger group would leave slots for microbatches that do not exist.
        "group_size": min(group_size or num_devices, numbers),
    }
    check_size((num_chunks or usual_chunks(name)) * num_devices, numbers)
    return blocks.sliced(_block_of_sizes(name, sizes), slices)


def _check_options(name: str, options: Mapping[str, int | None]) -> None:
    for option, value in options.items():
        if value is not None and option not in OPTIONS.get(name, ()):
            supporting_names = " and ".join(
                schedule_name for schedule_name in OPTIONS if option in OPTIONS[schedule_name]
            )
            raise ScheduleError(f"{name} has no option {option}, an option of {supporting_names}")


def _check_counts(name: str, counts: Mapping[str, int | None]) -> None:
    for label, count in counts.items():
        if count is not None and (not is_whole(count) or count < 1):
            raise ScheduleError(
                f"{label} of {name} is {count!r:.40}; it must be a whole number of at least 1"
            )
    num_chunks = counts["num_chunks"]
    if num_chunks is not None and num_chunks > MAX_STAGES_PER_DEVICE:
        raise ScheduleError(
            f"num_chunks of {name} is {num_chunks}; "
            f"a device may hold up to {MAX_STAGES_PER_DEVICE} stages"
        )


@lru_cache
def placement_of(name: str, num_devices: int) -> Placement:
    """Return the device of every stage of a schedule, equal for any number of microbatches.

    Raises:
        ScheduleError: no schedule has this name, or the number of devices is impossible.
    """
    # The bidirectional blocks need two microbatches per device; all others exist for one.
    min_microbatches = 2 * num_devices if name in JOINT_NAMES else 1
    return make_block(name, num_devices, min_microbatches).placement


def make(
    name: str,
    num_devices: int,
    num_microbatches: int,
    *,
    num_chunks: int | None = None,
    group_size: int | None = None,
    slices: int = 1,
) -> Schedule:
    """Make the published schedule `name`; the options are those of `make_block`.

    >>> from megatron_vshape import make
    >>> schedule = make("v-half", num_devices=4, num_microbatches=8)
    >>> schedule.placement, [str(work) for work in schedule.order[0][:4]]
    ((0, 1, 2, 3, 3, 2, 1, 0), ['F0.0', 'F0.1', 'F0.2', 'F0.3'])

    Raises:
        ScheduleError: no schedule has this name or this option, or a count is impossible.
    """
    block = make_block(
        name,
        num_devices,
        num_microbatches,
        num_chunks=num_chunks,
        group_size=group_size,
        slices=slices,
    )
    if name == "1f1b-v":
        return _make_one_f_one_b_v(block, num_microbatches * slices)
    if name == "dualpipev":
        published = _dualpipev(num_devices, num_microbatches)
        verify(published)
        return published
    max_held = None if name in NOT_REORDERED else max(block.peaks())
    if name == "overlapped-interleaved-1f1b":
        paired = _overlapped(_make_schedule(block, num_microbatches))
        verify(paired)
        return paired
    return _make_schedule(block, num_microbatches * slices, max_held)


def _make_one_f_one_b_v(block: BuildingBlock, num_microbatches: int) -> Schedule:
    """Return 1F1B-V with its warm-up filled, the only idle time that fits its full backwards.

    The best number of forwards that may move ahead is about d, plus the slices of a microbatch
    minus 1. A short batch is enough to find it.
    """
    d, max_held = block.num_devices, max(block.peaks())
    # 3 d microbatches reach the steady phase; rounded up to complete microbatches of all slices.
    ahead = _ahead_of_one_f_one_b_v(block, min(num_microbatches, 3 * d + -3 * d % block.slices))
    plain = squeeze(repeat(block, num_microbatches))
    filled = fill_warm_up(plain, max_held, ahead)
    best = min(plain, filled, key=lambda schedule: simulate(schedule).makespan)
    verify(best)
    return best


@lru_cache
def _ahead_of_one_f_one_b_v(block: BuildingBlock, num_microbatches: int) -> int:
    """Choose how many forwards run ahead; cached, as all longer batches have the same number."""
    d, max_held = block.num_devices, max(block.peaks())
    short = squeeze(repeat(block, num_microbatches))
    return min(
        range(max(1, d - 1) + block.slices - 1, d + 2 + block.slices),
        key=lambda ahead: simulate(fill_warm_up(short, max_held, ahead)).makespan,
    )


def _dualpipev(num_devices: int, num_microbatches: int) -> Schedule:
    """Make the DualPipeV schedule (github.com/deepseek-ai/DualPipe, dualpipev.py, 3da1bbe).

    It requires at least 2 * num_devices microbatches. Its pairs are F with a full backward.
    """
    devices = range(num_devices)
    rows = [_DualPipeV(num_devices, num_microbatches, device) for device in devices]
    return Schedule(
        "dualpipev",
        num_devices,
        num_microbatches,
        v_shape(num_devices),
        tuple(tuple(device_row.row) for device_row in rows),
        overlapped=frozenset[Pass]().union(*(device_row.overlapped for device_row in rows)),
    )


class _DualPipeV:
    """Passes of one device, in the eight steps of the published code."""

    def __init__(self, num_devices: int, num_microbatches: int, device: int) -> None:
        self.stages = device, 2 * num_devices - 1 - device
        self.row: list[Pass] = []
        self.overlapped: set[Pass] = set()
        self._counts: Counter[tuple[Kind, int]] = Counter()
        self._deferred_weights: list[Pass] = []  # deferred W of split backwards
        ranks_after, ranks_up_to = num_devices - device - 1, device + 1
        # Steps 1 to 8, as numbered in the published code, are the eight loops below.
        for _ in range(2 * ranks_after):
            self._forward(0)
        for _ in range(ranks_up_to):
            self._forward(0)
            self._forward(1)
        for _ in range(ranks_after):
            self._backward(1, split=True)
            self._weight()
            self._forward(1)
        for turn in range(num_microbatches - 2 * num_devices + ranks_up_to):
            # The first pair on the last device is not overlapped: it would start later.
            self._forward_backward(0, 1, overlaps=bool(turn or ranks_after))
            self._forward_backward(1, 0)
        for _ in range(ranks_after):
            self._backward(1)
            self._forward_backward(1, 0)
        half = ranks_up_to // 2
        for turn in range(ranks_up_to):
            self._backward(1, split=turn > half or (turn == half and device % 2 == 1))
            self._backward(0, split=turn >= half)
        for _ in range(ranks_after):
            self._weight()
            self._backward(0, split=True)
        for _ in range(ranks_up_to):
            self._weight()

    def _next(self, kind: Kind, chunk: int) -> Pass:
        self._counts[kind, chunk] += 1
        return Pass(kind, self.stages[chunk], self._counts[kind, chunk] - 1)

    def _forward(self, chunk: int) -> None:
        self.row.append(self._next(Kind.F, chunk))

    def _backward(self, chunk: int, *, split: bool = False) -> None:
        work = self._next(Kind.B, chunk)
        self.row.append(work if split else work._replace(kind=Kind.BW))
        if split:
            self._deferred_weights.append(work._replace(kind=Kind.W))

    def _weight(self) -> None:
        self.row.append(self._deferred_weights.pop(0))

    def _forward_backward(self, forward: int, backward: int, overlaps: bool = True) -> None:
        self._forward(forward)
        if overlaps:
            self.overlapped.add(self.row[-1])
        self._backward(backward)


def _overlapped(schedule: Schedule) -> Schedule:
    """Convert an interleaved 1F1B to Megatron's with --overlap-moe-expert-parallel-comm.

    Every device has one more warm-up forward, so that an F never overlaps with the backward of its
    own microbatch.
    """
    rows, overlapped = [], set[Pass]()
    for row in schedule.order:
        forwards = [work for work in row if work.kind is Kind.F]
        backwards = [work for work in row if work.kind is not Kind.F]
        # This includes the first F of the steady phase: each backward then overlaps with the F
        # after the one that 1F1B runs before it, which is of a later microbatch.
        num_warm_up = next(index for index, work in enumerate(row) if work.kind is not Kind.F)
        merged = forwards[:num_warm_up]
        for index, work in enumerate(backwards):
            partners = forwards[num_warm_up + index : num_warm_up + index + 1]
            overlapped.update(partners)
            merged += [*partners, work]
        rows.append(tuple(merged))
    return replace(schedule, order=tuple(rows), overlapped=frozenset(overlapped))


_KINDS = (*PARTS, Kind.BW)
"""Kinds in the paper's schedules."""


def reorder(schedule: Schedule, max_held: int) -> Schedule:
    """Fill idle slots of warm-up and cool-down with later passes of each device (step 4).

    The devices run in simulated time. A device that would idle runs a later ready pass, if that
    delays no other pass. All simple passes take the same time, and no device exceeds `max_held`
    stage activations. A device with at most `max_held` forwards left (which fit in memory
    together) is in cool-down: passes that only free memory, such as W, then wait until no other
    pass can run. Without idle time, as in a steady phase that repeats cleanly, nothing moves.

    Raises:
        ScheduleError: a forward does not fit `max_held`, or a pass waits for one that never runs.
    """
    return _fill_schedule(schedule, max_held, max_held, NONE)


def fill_warm_up(schedule: Schedule, max_held: int, max_ahead: int) -> Schedule:
    """Fill idle slots until a device first frees an activation of its first stage.

    As in `reorder`, but forwards of the first stage move up only while fewer than `max_ahead` of
    them are allocated; more would use the memory that forwards of the last stage need.

    Raises:
        ScheduleError: a forward does not fit `max_held`, or a pass waits for one that never runs.
    """
    return _fill_schedule(schedule, max_held, NONE, max_ahead)


def _fill_schedule(schedule: Schedule, max_held: int, cool_down: int, max_ahead: int) -> Schedule:
    order = _order_of(schedule, max_held)
    size = len(order.type_of)
    state = new_scheduler_state(order, lambda count: [0] * count)
    compiled_fill, order, state, new_order = compile_if_large(
        size, fill_idle_slots, FILL_CALLEES, order, state, [0] * size
    )
    # Fewer passes than given: the rest is blocked by memory or a cycle of waits.
    if compiled_fill(order, state, new_order, cool_down, max_ahead) < size:
        _raise_blocked(schedule, order, state)
    passes, new_order = list(chain.from_iterable(schedule.order)), in_lists(new_order)
    rows = (new_order[begin:end] for begin, end in pairwise(order.begin))
    return replace(schedule, order=tuple(tuple(map(passes.__getitem__, row)) for row in rows))


def _order_of(schedule: Schedule, max_held: int) -> PassOrder:
    # All passes of the paper's schedules run on the processor: queue d is device d.
    passes = number_passes(schedule.order, _KINDS, schedule.num_stages, schedule.num_microbatches)
    return PassOrder(
        **passes._asdict(),
        types=_unit_pass_types(schedule.placement),
        limit=[max_held] * schedule.num_devices,
        num_microbatches=schedule.num_microbatches,
        reversed_numbers=list(range(schedule.num_microbatches)),  # passes keep their numbers
        is_strict=False,
    )


@lru_cache(maxsize=4)
def _unit_pass_types(placement: Placement) -> PassTypes:
    """Return unit costs: every simple pass takes 1; a stage's activation lives from F to W."""

    def amounts(kind: Kind, _stage: int) -> tuple[int, int, int]:
        allocates = bool(kind.allocated)
        return len(kind.does), allocates, allocates + bool(kind.retained) - bool(kind.freed)

    return make_pass_types(_KINDS, placement, amounts)


def _raise_blocked(schedule: Schedule, order: PassOrder, state: SchedulerState) -> None:
    """Raise ScheduleError for blocked passes: only memory blocks a pass with all its inputs."""
    heads = [
        (device, index)
        for device, index in enumerate(state.first)
        if index < order.begin[device + 1]
    ]
    ready_heads = [
        (device, index) for device, index in heads if ready_time(order, state, index, 0) < LATE
    ]
    if ready_heads:
        # The lowest microbatch, because the others wait for it.
        device, index = min(ready_heads, key=lambda head: order.microbatch[head[1]])
        work = schedule.order[device][index - order.begin[device]]
        raise ScheduleError(
            f"{work} does not fit on device {device}, which holds {state.memory[device]} "
            f"stage activations then and its limit is {order.limit[device]}"
        )
    simulate(schedule)  # raises: a pass waits for one that never runs
