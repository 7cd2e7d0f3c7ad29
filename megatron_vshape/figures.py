"""What a run measures, in a file for programs to read: a line of JSON each.

Whoever starts a run names the file in its environment; the ranks that tell people tell it too. The
rank that logs iterations writes `{"step_s": ..., "bubble": ...}` for each that it logs, the first
rank `{"allocated_bytes": [...]}` at the end, one number per pipeline rank.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIABLE = "MEGATRON_VSHAPE_FIGURES"
"""Names the file; where it is not set, nothing is written."""


def tell(**figures: object) -> None:
    """Add a record to the file, if there is to be one."""
    path = os.environ.get(VARIABLE)
    if path:
        with Path(path).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(figures) + "\n")


def read(path: Path) -> list[Mapping[str, Any]]:
    """Return the records of a file; none where it was not written, and no line that was cut off."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]
