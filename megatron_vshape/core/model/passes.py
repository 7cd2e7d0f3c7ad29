"""Passes of a pipeline, and their data dependencies."""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from graphlib import CycleError, TopologicalSorter
from operator import or_
from typing import NamedTuple

from megatron_vshape.core.model.kinds import (
    FIRST,
    KINDS,
    LAST,
    PAIR_SIGN,
    PARTS,
    Kind,
    ScheduleError,
    find_kind,
    simple_kinds,
)

_TEXT = re.compile(r"([A-Z]+)([0-9]{1,9})\.([0-9]{1,9})", re.ASCII)


class Pass(NamedTuple):
    """One pass of one microbatch through one stage; the text form is `B3.12`."""

    kind: Kind
    stage: int  # in model order, independent of its device
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Pass":
        """Parse a pass.

        Raises:
            ScheduleError: `text` is not KIND STAGE.MICROBATCH.
        """
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None or match[1] not in KINDS:
            *first, last = KINDS
            raise ScheduleError(
                f"{text!r:.80} is not a pass: expected {', '.join(first)} or {last}, a stage, a "
                "dot and a microbatch, as in F3.12"
            )
        return cls(find_kind(match[1]), int(match[2]), int(match[3]))

    def parts(self) -> tuple[Kind, ...]:
        """Return the simple kinds of this pass: B and W for a full backward, otherwise its kind."""
        return self.kind.does

    def needs(self, num_stages: int) -> Iterator["Pass"]:
        """Yield the passes whose results this pass reads, as defined by the table of kinds.

        A need is always a simple pass; a full backward satisfies the need for its B. `NeedTable`
        adds dependencies on optional passes.
        """
        for read in self.kind.reads:
            for stage in read.stages(self.stage, num_stages):
                yield Pass(find_kind(read.kind), stage, self.microbatch)


def parse_step(text: str) -> tuple[Pass, ...]:
    """Parse a pass, or an overlapped forward-backward (F&B) pair such as `F0.3&B7.1`.

    Raises:
        ScheduleError: `text` is not a pass, or not a pair of F and B or BW.
    """
    if not isinstance(text, str) or PAIR_SIGN not in text:
        return (Pass.parse(text),)
    step = tuple(map(Pass.parse, text.split(PAIR_SIGN)))
    if not can_overlap(step):
        raise ScheduleError(
            f"{text!r:.80} is not an overlapped pass: expected an F with a B or BW of another "
            "microbatch, "
            "as in F0.3&B7.1"
        )
    return step


def can_overlap(step: Sequence[Pass]) -> bool:
    """Return whether the passes can form an F&B pair: an F, then a B or BW of another microbatch.

    Passes of one microbatch depend on each other: every B comes after all F.
    """
    if len(step) != 2:
        return False
    forward, backward = step
    kinds = forward.kind is Kind.F and backward.kind in (Kind.B, Kind.BW)
    return kinds and forward.microbatch != backward.microbatch


class NeedTable:
    """Dependencies of passes by number, for loops over 10^5 passes.

    `parts` has the simple kinds, and a part is an index of it. `needs[kind][stage]` has the (part,
    stage) pairs that a pass reads, of the same microbatch. Parts in `at_will` are optional: a
    microbatch without such a pass does not wait for it.
    """

    def __init__(self, num_stages: int, kinds: Iterable[Kind] = PARTS) -> None:
        """Build the table for all kinds of a schedule; it always includes PARTS."""
        self.parts = simple_kinds((*PARTS, *kinds))
        self.parts_of = {
            kind: tuple(map(self.parts.index, kind.does))
            for kind in KINDS
            if set(kind.does).issubset(self.parts)
        }
        self.at_will = [at for at, part in enumerate(self.parts) if not part.everywhere]
        self.needs = {
            kind: [self._needs(kind, stage, num_stages) for stage in range(num_stages)]
            for kind in self.parts_of
        }

    def _needs(self, kind: Kind, stage: int, num_stages: int) -> tuple[tuple[int, int], ...]:
        always = [
            (self.parts.index(need.kind), need.stage)
            for need in Pass(kind, stage, 0).needs(num_stages)
        ]
        # Optional passes, such as a reload, precede the kinds in their `before`.
        only = {FIRST: 0, LAST: num_stages - 1}
        # `only` restricts kinds with a single stage: C precedes B on the last stage alone.
        where_there = [
            (at, stage)
            for at in self.at_will
            if not set(self.parts[at].before).isdisjoint(kind.does)
            and stage == only.get(self.parts[at].of, stage)
        ]
        return (*always, *where_there)

    def in_turn(self) -> list[tuple[int, int]]:
        """Return every (part, stage) in topological order.

        Raises:
            ScheduleError: passes of one microbatch depend on each other in a cycle.
        """
        reads = {
            (at, stage): needs
            for at, part in enumerate(self.parts)
            for stage, needs in enumerate(self.needs[part])
        }
        try:
            return list(TopologicalSorter(reads).static_order())
        except CycleError as error:
            circle = ", ".join(f"{self.parts[at]}{stage}" for at, stage in error.args[1])
            raise ScheduleError(f"passes wait for each other in a circle: {circle}") from None

    def direct_needs(self) -> dict[Kind, list[tuple[tuple[int, int], ...]]]:
        """Return `needs` without those that another need of the same pass implies.

        Waiting for the rest implies waiting for all, whichever optional passes a microbatch omits.
        """
        # `own` has one bit per part and stage, `behind` the union of all that it waits for.
        own, behind = dict[tuple[int, int], int](), dict[tuple[int, int], int]()  # sets, as bits

        def waited_for(needs: tuple[tuple[int, int], ...]) -> int:
            """Return the parts that these passes imply, optional parts excluded."""
            return reduce(or_, (behind[need] for need in needs if need[0] not in self.at_will), 0)

        for number, (at, stage) in enumerate(self.in_turn()):
            needs = self.needs[self.parts[at]][stage]
            own[at, stage] = 1 << number
            # A wait through an optional pass is not certain: the microbatch may omit that pass.
            certain = (own[need] for need in needs if need[0] not in self.at_will)
            behind[at, stage] = reduce(or_, certain, waited_for(needs))

        def direct(needs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
            return tuple(need for need in needs if not own[need] & waited_for(needs))

        return {kind: list(map(direct, by_stage)) for kind, by_stage in self.needs.items()}

    def needs_of(self, work: Pass) -> Iterator[Pass]:
        """Yield the passes that this pass reads, including optional ones that may not exist."""
        for part, stage in self.needs[work.kind][work.stage]:
            yield Pass(self.parts[part], stage, work.microbatch)
