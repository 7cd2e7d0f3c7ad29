"""Measurements of a run in a file for programs, one JSON object per line.

The launcher of a run sets the file's path in the environment. The rank that logs iterations writes
`{"step_s": ..., "bubble": ...}` for each logged iteration. The first rank writes
`{"allocated_bytes": [...]}` at the end, with one number per pipeline rank.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIABLE = "MEGATRON_VSHAPE_FIGURES"
"""Path of the file; if it is not set, nothing is written."""


def tell(**figures: object) -> None:
    """Append a record to the file, if its path is set."""
    path = os.environ.get(VARIABLE)
    if path:
        with Path(path).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(figures) + "\n")


def read(path: Path) -> list[Mapping[str, Any]]:
    """Read the records of a file; empty if it does not exist. An incomplete line is ignored."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]
