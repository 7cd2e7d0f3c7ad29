"""Phases of a dry run: the passes of its steps, and the parts of the program around them."""

from __future__ import annotations

from typing import NamedTuple


class Phase(NamedTuple):
    """A pass of a microbatch through a chunk, or a part of the program outside of all passes."""

    kind: str  # of the pass, or the name of the part
    chunk: int = -1
    microbatch: int = -1

    @property
    def is_pass(self) -> bool:
        """Whether a pass of a microbatch runs."""
        return self.microbatch >= 0

    def __str__(self) -> str:
        """Return the text of reports: `F 0 7` for F of chunk 0 and microbatch 7, or the name."""
        return f"{self.kind} {self.chunk} {self.microbatch}" if self.is_pass else self.kind

    @classmethod
    def parse(cls, text: str) -> Phase:
        """Parse the text of a report."""
        kind, *numbers = text.split(" ")
        return cls(kind, *map(int, numbers))


JOIN = "join"
"""Kind of the end of a collective that a pass has started."""

START = Phase("")
MODEL = Phase("model")
OPTIMIZER = Phase("optimizer")  # its construction, and its part of a step
STEP = Phase("step")  # outside of passes and the optimizer
