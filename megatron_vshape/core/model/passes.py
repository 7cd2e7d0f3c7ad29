"""Passes of a pipeline and their text form; their dependencies are in `kinds`."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_vshape.core.model.kinds import (
    KINDS,
    PAIR_SIGN,
    Kind,
    NeedTable,
    ScheduleError,
    find_kind,
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
        """Yield the passes whose results this pass reads, without optional ones.

        A need is always a simple pass; a full backward satisfies the need for its B.
        """
        for kind, stage in self.kind.needs(self.stage, num_stages):
            yield Pass(kind, stage, self.microbatch)

    def needs_in(self, table: NeedTable) -> Iterator["Pass"]:
        """Yield the passes whose results this pass reads, with optional ones that may not exist."""
        for part, stage in table.needs[self.kind][self.stage]:
            yield Pass(table.parts[part], stage, self.microbatch)


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
