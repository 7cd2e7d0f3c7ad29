"""Measurements of a run in a machine-readable file, one JSON object per line.

The program that starts a run sets the file name in the environment. The rank that logs iterations
writes `{"step_s": ..., "bubble": ...}` for each logged one. Rank 0 writes `{"allocated_bytes":
[...]}` at the end, with one number per pipeline rank.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIABLE = "MEGATRON_VSHAPE_FIGURES"
"""Environment variable with the file name; without it, nothing is written."""


def write_figures(**figures: object) -> None:
    """Append a record to the file, if there is one."""
    path = os.environ.get(VARIABLE)
    if path:
        with Path(path).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(figures) + "\n")


def read(path: Path) -> list[Mapping[str, Any]]:
    """Return the complete records of a file; none if the file does not exist."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]
