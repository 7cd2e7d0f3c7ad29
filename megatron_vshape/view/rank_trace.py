"""Chrome trace of an estimated step: passes, and a memory counter per rank."""

import json
from collections.abc import Mapping, Sequence
from typing import TextIO

Point = tuple[float, float, Mapping[str, float]]
"""Memory curve of a rank: (seconds, bytes, bytes by owner)."""


def write_memory_trace(
    curves: Mapping[str, Sequence[Point]],
    passes: Mapping[str, Sequence[tuple[str, float, float]]],
    stream: TextIO,
) -> None:
    """Write every rank's passes (name, start and end in seconds), and its memory by owner."""
    written: list[dict[str, object]] = []
    for process, (name, curve) in enumerate(curves.items()):
        written.append(
            {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
        )
        for label, start, end in passes.get(name, ()):
            at = {"pid": process, "tid": 0, "ts": start * 1e6, "dur": (end - start) * 1e6}
            written.append({"ph": "X", "name": label, **at})
        for seconds, _, held in curve:
            at = {"pid": process, "ts": seconds * 1e6}
            written.append({"ph": "C", "name": "held", **at, "args": held})
    json.dump({"displayTimeUnit": "ms", "traceEvents": written}, stream)
