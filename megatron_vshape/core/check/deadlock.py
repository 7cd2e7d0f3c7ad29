"""Explanation of a deadlock: the cycle of waits, in words."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from megatron_vshape.core.model.passes import NeedTable, Pass
from megatron_vshape.core.model.schedule import Lane

LISTED = 12
"""Maximum waits of a cycle in an error: its first ones and its last one."""


def explain_deadlock(
    lanes: Sequence[Lane], table: NeedTable, stuck: Mapping[int, int], beside: Mapping[Pass, Pass]
) -> str:
    """Format the error for a schedule with stuck resource queues; `stuck` maps queues to indices.

    Each line is one wait: the two passes, and whether the first reads the result of the second or
    runs after it on the same device. `beside` has the F&B pairs, by their F.
    """
    return _Stuck(lanes, table, stuck, beside).explain()


class _Stuck:
    """State of a deadlocked schedule."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        table: NeedTable,
        stuck: Mapping[int, int],
        beside: Mapping[Pass, Pass],
    ) -> None:
        self.lanes = lanes
        self.table = table
        self.stuck = stuck
        self.beside = beside
        self.home = {
            Pass(kind, work.stage, work.microbatch): (at, place)
            for at, lane in enumerate(lanes)
            for place, work in enumerate(lane.passes)
            for kind in work.parts()
        }

    def explain(self) -> str:
        absent = self._find_absent()
        if absent:
            return "the schedule cannot end: " + absent
        cycle = self._find_cycle()
        lines = [
            self._tell(work, other)
            for work, other in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
        ]
        if len(lines) > LISTED:
            lines[LISTED - 1 : -1] = [f"... and {len(lines) - LISTED} more waits, until"]
        head = "the schedule deadlocks; each pass below waits for the next:\n"
        return head + "\n".join("    " + line for line in lines)

    def _current(self, at: int) -> Pass:
        return self.lanes[at].passes[self.stuck[at]]

    def _lane_of(self, work: Pass) -> Lane:
        return self.lanes[self.home[work._replace(kind=work.parts()[0])][0]]

    def _find_absent(self) -> str | None:
        """Format a wait for a pass that no device runs; None if the schedule is complete."""
        for at in self.stuck:
            work = self._current(at)
            for need in self._needs_of(work):
                if need not in self.home and need.kind.everywhere:
                    device = self.lanes[at].device
                    return f"{work} on device {device} waits for {need}, which no device runs"
        return None

    def _find_cycle(self) -> list[Pass]:
        """Return a cycle of passes; each waits for the next, and the last for the first."""
        work = self._current(min(self.stuck))
        seen: dict[Pass, int] = {}
        while work not in seen:
            seen[work] = len(seen)
            at, place = self.home[work._replace(kind=work.parts()[0])]
            # The first pass of a stuck queue waits for a result that comes later.
            work = self._current(at) if place > self.stuck[at] else next(self._missing(work))
        return list(seen)[seen[work] :]

    def _missing(self, work: Pass) -> Iterator[Pass]:
        """Yield the passes that have not run among the inputs of `work` or of its F&B partner."""
        for need in self._needs_of(work):
            at, place = self.home.get(need, (-1, -1))
            if at in self.stuck and place >= self.stuck[at]:
                yield self.lanes[at].passes[place]

    def _needs_of(self, work: Pass) -> Iterator[Pass]:
        both = (work, self.beside[work]) if work in self.beside else (work,)
        return chain.from_iterable(map(self.table.needs_of, both))

    def _tell(self, work: Pass, other: Pass) -> str:
        def is_it(need: Pass) -> bool:
            return need.kind in other.parts() and need[1:] == other[1:]

        device = self._lane_of(work).device
        if any(map(is_it, self.table.needs_of(work))):
            reason = "reads its result"
        elif any(map(is_it, self._needs_of(work))):
            reason = f"{self.beside[work]}, which runs with it, reads its result"
        elif self.beside.get(other) == work:
            reason = "runs with it"
        else:
            reason = f"device {device} runs it first"
        return f"{work} on device {device} waits for {other}: {reason}"
