"""Published schedules with overlapped forward-backward (F&B), to hide the all-to-alls of MoE."""

from collections import Counter
from dataclasses import replace

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import v_shape
from megatron_vshape.core.model.schedule import Schedule


def dualpipev(num_devices: int, num_microbatches: int) -> Schedule:
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
        tuple(tuple(each.row) for each in rows),
        overlapped=frozenset[Pass]().union(*(each.overlapped for each in rows)),
    )


class _DualPipeV:
    """Passes of one device, in the eight steps of the published code."""

    def __init__(self, num_devices: int, num_microbatches: int, device: int) -> None:
        self.stages = device, 2 * num_devices - 1 - device
        self.row: list[Pass] = []
        self.overlapped: set[Pass] = set()
        self._begun: Counter[tuple[Kind, int]] = Counter()
        self._late: list[Pass] = []  # deferred W of split backwards
        after, own = num_devices - device - 1, device + 1
        # Steps 1 to 8, as numbered in the published code, are the eight loops below.
        for _ in range(2 * after):
            self._forward(0)
        for _ in range(own):
            self._forward(0)
            self._forward(1)
        for _ in range(after):
            self._backward(1, split=True)
            self._weight()
            self._forward(1)
        for turn in range(num_microbatches - 2 * num_devices + own):
            # The first pair on the last device is not overlapped: it would start later.
            self._both(0, 1, joins=bool(turn or after))
            self._both(1, 0)
        for _ in range(after):
            self._backward(1)
            self._both(1, 0)
        half = own // 2
        for turn in range(own):
            self._backward(1, split=turn > half or (turn == half and device % 2 == 1))
            self._backward(0, split=turn >= half)
        for _ in range(after):
            self._weight()
            self._backward(0, split=True)
        for _ in range(own):
            self._weight()

    def _next(self, kind: Kind, chunk: int) -> Pass:
        self._begun[kind, chunk] += 1
        return Pass(kind, self.stages[chunk], self._begun[kind, chunk] - 1)

    def _forward(self, chunk: int) -> None:
        self.row.append(self._next(Kind.F, chunk))

    def _backward(self, chunk: int, *, split: bool = False) -> None:
        work = self._next(Kind.B, chunk)
        self.row.append(work if split else work._replace(kind=Kind.BW))
        if split:
            self._late.append(work._replace(kind=Kind.W))

    def _weight(self) -> None:
        self.row.append(self._late.pop(0))

    def _both(self, forward: int, backward: int, joins: bool = True) -> None:
        self._forward(forward)
        if joins:
            self.overlapped.add(self.row[-1])
        self._backward(backward)


def overlapped(schedule: Schedule) -> Schedule:
    """Convert an interleaved 1F1B to Megatron's with --overlap-moe-expert-parallel-comm.

    Every device has one more warm-up forward, so that an F never overlaps with the backward of its
    own microbatch.
    """
    rows, overlapped = [], set[Pass]()
    for row in schedule.order:
        forwards = [work for work in row if work.kind is Kind.F]
        backwards = [work for work in row if work.kind is not Kind.F]
        ahead = next(at for at, work in enumerate(row) if work.kind is not Kind.F)
        made = forwards[:ahead]
        for at, work in enumerate(backwards):
            beside = forwards[ahead + at : ahead + at + 1]
            overlapped.update(beside)
            made += [*beside, work]
        rows.append(tuple(made))
    return replace(schedule, order=tuple(rows), overlapped=frozenset(overlapped))
