"""Cells of the CSV form of torch.distributed.pipelining, torchtitan and NeMo Automodel.

As in our CSV, a line is a rank, but a cell has the stage first: `2F0` is the forward of stage 2 and
microbatch 0 (torch 2.15, distributed/pipelining/schedules.py, `_Action`).
"""

import re
from collections.abc import Iterable, Sequence

from megatron_vshape.core.model.kinds import PAIR_SIGN, Kind, ScheduleError
from megatron_vshape.core.model.passes import Pass

TORCH_LETTERS = {Kind.F: "F", Kind.B: "I", Kind.W: "W", Kind.BW: "B"}
_KIND_OF_LETTER = {letter: kind for kind, letter in TORCH_LETTERS.items()}
_PAIR = "OVERLAP_F_B"
_PAIR_CELL = re.compile(rf"\(([^();]+);([^();]+)\){_PAIR}")
_CELL = re.compile(r"([0-9]{1,9})([FIWB])([0-9]{1,9})", re.ASCII)
_COMMUNICATION = re.compile(
    r"[0-9]+((WAIT_)?SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD)[0-9]*", re.ASCII
)
"""Messages, FSDP collectives and gradient reductions, which torch adds to a schedule."""


def step_to_cell(step: Sequence[Pass]) -> str:
    """Return the cell of a pass or of an overlapped F&B pair; all kinds are in `TORCH_LETTERS`."""
    cells = [f"{work.stage}{TORCH_LETTERS[work.kind]}{work.microbatch}" for work in step]
    return cells[0] if len(cells) == 1 else f"({';'.join(cells)}){_PAIR}"


def is_torch_csv(rows: Sequence[Sequence[str]]) -> bool:
    """Return whether the first cell that is not blank has torch's form."""
    cell = next((cell for row in rows for cell in row if cell), "")
    return cell.startswith("(") or cell[:1].isdigit()


def package_cells(row: Iterable[str]) -> list[str]:
    """Return a rank's cells in this package's form, without communication and idle cells.

    Raises:
        ScheduleError: a cell is neither a pass nor a communication of torch.
    """
    return [_cell_to_step(cell) for cell in row if cell and _COMMUNICATION.fullmatch(cell) is None]


def _cell_to_step(cell: str) -> str:
    pair = _PAIR_CELL.fullmatch(cell)
    if pair is not None:
        # Either pass may come first in torch's pairs; in ours, the forward does.
        passes = sorted(map(_cell_to_step, pair.groups()), key=lambda text: text[0] != Kind.F)
        return PAIR_SIGN.join(passes)
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ScheduleError(
            f"{cell!r:.80} is not a pass of torch.distributed.pipelining: expected a stage, one of "
            f"{', '.join(_KIND_OF_LETTER)}, and a microbatch, as in 3F12"
        )
    stage, letter, microbatch = match.groups()
    return f"{_KIND_OF_LETTER[letter]}{stage}.{microbatch}"
