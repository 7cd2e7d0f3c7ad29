"""The passes of a pipeline and the one statement of their data dependencies."""

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple


class ScheduleError(ValueError):
    """A schedule, or what it is asked to be made from, cannot stand; the text says why."""


class Kind(StrEnum):
    """What a pass computes: outputs (F), input gradients (B), weight gradients (W), or B and W."""

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"

    __hash__ = str.__hash__  # Enum's is written in Python, and schedules hash 10^6 passes


_TEXT = re.compile(r"(BW|F|B|W)([0-9]{1,9})\.([0-9]{1,9})", re.ASCII)


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
        if match is None:
            raise ScheduleError(
                f"{text!r:.80} is not a pass: expected F, B, W or BW, a stage, a dot and a "
                "microbatch, as in F3.12"
            )
        return cls(Kind(match[1]), int(match[2]), int(match[3]))

    def parts(self) -> tuple[Kind, ...]:
        """Return the simple kinds this pass does: B and W for a whole backward, else its own."""
        return (Kind.B, Kind.W) if self.kind is Kind.BW else (self.kind,)

    def needs(self, num_stages: int) -> Iterator["Pass"]:
        """Yield the passes whose results this one reads; nothing else states the dependencies.

        A need is always a simple pass (F, B or W); a whole backward satisfies the need for its B.
        """
        kind, stage, microbatch = self
        if kind is Kind.W:
            yield Pass(Kind.B, stage, microbatch)
        elif kind is Kind.F:
            if stage > 0:
                yield Pass(Kind.F, stage - 1, microbatch)
        else:
            yield Pass(Kind.F, stage, microbatch)
            if stage < num_stages - 1:
                yield Pass(Kind.B, stage + 1, microbatch)


PARTS = (Kind.F, Kind.B, Kind.W)
"""The simple kinds; a result is looked up by its place here, its stage and its microbatch."""

PARTS_OF = {kind: tuple(PARTS.index(Kind(part)) for part in kind.value) for kind in Kind}
"""The places in PARTS of what a pass of this kind does: two for a whole backward."""

PART_OF = {kind: parts[0] for kind, parts in PARTS_OF.items()}
"""The place in PARTS whose needs a pass of this kind has; a whole backward reads what B reads."""

NeedTable = tuple[tuple[tuple[tuple[int, int], ...], ...], ...]


def need_table(num_stages: int) -> NeedTable:
    """Return `table[part][stage]`: the (part, stage) pairs read; `part` counts along `PARTS`.

    Every microbatch has the same needs, so that loops over 10^5 passes look them up here
    instead of making `Pass.needs` anew.
    """
    return tuple(
        tuple(
            tuple(
                (PARTS.index(need.kind), need.stage)
                for need in Pass(kind, stage, 0).needs(num_stages)
            )
            for stage in range(num_stages)
        )
        for kind in PARTS
    )
