"""Reports of dry runs, written by hand."""

from dataclasses import replace
from typing import Any

from megatron_vshape.rehearsal.phases import Phase
from megatron_vshape.rehearsal.rank_report import (
    PARTS,
    ParallelSizes,
    PassReport,
    PeakMoment,
    RankReport,
)
from megatron_vshape.rehearsal.step_time import Scale
from megatron_vshape.rehearsal.work import Work

_EMPTY: dict[str, Any] = {
    "name": "",
    "rank": 0,
    "stage": 0,
    "peak_bytes": 0,
    "graph_bytes": None,
    "communicators": 0,
    "reserved_bytes": 0,
    "held_bytes": 0,
    "held_parts": dict.fromkeys(PARTS, 0),
    "replaced_bytes": 0,
    "parts": dict.fromkeys(PARTS, 0),
    "when": PeakMoment(Phase("F", 0, 0), ""),
    "holders": [],
    "time": {"step_s": 1.0},
    "microbatches": 1,
    "traced_microbatches": 1,
    "parameters": 0,
    "chunk_parameters": [0],
    "chunk_layers": [0],
    "chunk_dummy_bytes": [0],
    "message_bytes": 0,
    "shards_optimizer": False,
    "scale": Scale(1, 1, 1, 1),
    "sizes": ParallelSizes(1, 1, 1, 1, 1),
    "first_peak_bytes": 0,
    "curve": [],
    "kinds": [],
    "held_between_passes_bytes": 0,
    "megatron": "",
    "transformer_engine": "",
    "work": Work(),
    "seconds": 0.0,
    "host_bytes": 0,
}


def report_of(**fields: Any) -> RankReport:
    """Return an empty report with these fields of all its parts."""
    return RankReport.of(_EMPTY | fields)


def pass_of(kind: str, **fields: Any) -> PassReport:
    """Return a pass of chunk 0 without work, with these fields."""
    return replace(PassReport(kind, 0, 1, 1, 1, 0.0, 0.0, Work()), **fields)
