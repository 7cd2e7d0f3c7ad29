"""The passes of a pipeline and the one statement of their data dependencies."""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from graphlib import CycleError, TopologicalSorter
from operator import or_
from typing import NamedTuple

from megatron_vshape.core.model.kinds import (
    BESIDE,
    FIRST,
    KINDS,
    LAST,
    PARTS,
    Kind,
    ScheduleError,
    find_kind,
    simple_kinds,
)

_TEXT = re.compile(r"([A-Z]+)([0-9]{1,9})\.([0-9]{1,9})", re.ASCII)


class Pass(NamedTuple):
    """One pass of one microbatch through one stage; written `B3.12`."""

    kind: Kind
    stage: int  # in model order, whatever device holds it
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Pass":
        """Return the pass that `text` names.

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
        """Return the simple kinds this pass does: B and W for a whole backward, else its own."""
        return self.kind.does

    def needs(self, num_stages: int) -> Iterator["Pass"]:
        """Yield the passes whose results this one reads; only the table of kinds says which.

        A need is always a simple pass; a whole backward satisfies the need for its B. What a pass
        waits for only where it is there, `NeedTable` adds.
        """
        for read in self.kind.reads:
            for stage in read.stages(self.stage, num_stages):
                yield Pass(find_kind(read.kind), stage, self.microbatch)


def turned(number: int, slices: int) -> int:
    """Return which one of all slices comes in the place of this, where a microbatch's descend."""
    return number + slices - 1 - 2 * (number % slices)


def parse_step(text: str) -> tuple[Pass, ...]:
    """Return the pass that `text` names, or both of a joint pass, such as `F0.3&B7.1`.

    Raises:
        ScheduleError: it names none, or what stands beside each other is no F and a B or BW.
    """
    if not isinstance(text, str) or BESIDE not in text:
        return (Pass.parse(text),)
    step = tuple(map(Pass.parse, text.split(BESIDE)))
    if not can_join(step):
        raise ScheduleError(
            f"{text!r:.80} is not an overlapped pass: expected an F with a B or BW of another "
            "microbatch, "
            "as in F0.3&B7.1"
        )
    return step


def can_join(step: Sequence[Pass]) -> bool:
    """Return whether these can run as one: an F, then a B or BW of another microbatch.

    Passes of one microbatch wait for each other: every B is behind all F.
    """
    if len(step) != 2:
        return False
    forward, backward = step
    kinds = forward.kind is Kind.F and backward.kind in (Kind.B, Kind.BW)
    return kinds and forward.microbatch != backward.microbatch


class NeedTable:
    """What the passes of some kinds read, by number, for loops over 10^5 passes.

    `parts` are the simple kinds, and a part is a place there: `needs[kind][stage]` are the
    (part, stage) pairs that a pass reads, of its own microbatch. Of the parts `at_will` not every
    microbatch has a pass, and where it has none, nobody waits for it.
    """

    def __init__(self, num_stages: int, kinds: Iterable[Kind] = PARTS) -> None:
        """Take all kinds that a schedule has; those of PARTS are always among them."""
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
        only = {FIRST: 0, LAST: num_stages - 1}
        where_there = [
            (at, stage)
            for at in self.at_will
            if not set(self.parts[at].before).isdisjoint(kind.does)
            and stage == only.get(self.parts[at].of, stage)
        ]
        return (*always, *where_there)

    def in_turn(self) -> list[tuple[int, int]]:
        """Return every (part, stage), each behind all that its passes read.

        Raises:
            ScheduleError: passes of one microbatch wait for each other in a circle.
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
        """Return `needs` without those that another need of the same pass waits for itself.

        Whoever waits for the rest waits for all, whichever passes a microbatch does without.
        """
        own, behind = dict[tuple[int, int], int](), dict[tuple[int, int], int]()  # sets, as bits

        def waited_for(needs: tuple[tuple[int, int], ...]) -> int:
            """Return what these passes wait for, if they are there in any case."""
            return reduce(or_, (behind[need] for need in needs if need[0] not in self.at_will), 0)

        for number, (at, stage) in enumerate(self.in_turn()):
            needs = self.needs[self.parts[at]][stage]
            own[at, stage] = 1 << number
            certain = (own[need] for need in needs if need[0] not in self.at_will)
            behind[at, stage] = reduce(or_, certain, waited_for(needs))

        def direct(needs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
            return tuple(need for need in needs if not own[need] & waited_for(needs))

        return {kind: list(map(direct, by_stage)) for kind, by_stage in self.needs.items()}

    def needs_of(self, work: Pass) -> Iterator[Pass]:
        """Yield the passes that this one reads, or would wait for if they are there."""
        for part, stage in self.needs[work.kind][work.stage]:
            yield Pass(self.parts[part], stage, work.microbatch)
