"""A replay of schedule files with offload, written independently of the package.

A device's processor runs F, B, W and the markers L and R in the order of its row; L and R have no
duration. D (to the host) runs on the device's outgoing link, H (back) on its incoming link, both in
the order of the row. D reads its F, L its D, R its L, H its R; F reads the F of the stage before, B
its F, the B of the stage after and its H (if it has one); W reads its B. Results of other devices
arrive `send` later. A stage retains `forward_bytes` of a microbatch from the start of F,
`backward_bytes` from the end of B, and nothing after W; L frees `offloaded_bytes` of it, and R
allocates them again.
"""

import json
import re
from collections import Counter
from typing import NamedTuple

PASS = re.compile(r"^(F|B|W|D|L|R|H)(\d+)\.(\d+)$")

Work = tuple[str, int, int]


class StageCosts(NamedTuple):
    """Times of a stage by kind of pass, and its memory."""

    time: dict[str, float]  # of F, B, W, D and H
    forward_bytes: float
    backward_bytes: float
    offloaded_bytes: float


class Figures(NamedTuple):
    """Time and memory of a schedule file."""

    makespan: float
    peak: tuple[float, ...]
    num_offloaded: int  # chunks


def replay(text: str, stages: list[StageCosts], send: float) -> Figures:
    """Return the figures of a schedule file; AssertionError if it is incomplete or deadlocks."""
    data = json.loads(text)
    placement, count = data["placement"], data["num_microbatches"]
    rows = [[_parse(pass_text) for pass_text in row] for row in data["order"]]
    _check_complete(rows, placement, count)
    queues: dict[tuple[int, str], list[Work]] = {}
    for device, row in enumerate(rows):
        for work in row:
            link = {"D": "out", "H": "in"}.get(work[0], "processor")
            queues.setdefault((device, link), []).append(work)
    offloaded = {work[1:] for row in rows for work in row if work[0] == "D"}
    ends: dict[Work, float] = {}
    clock = dict.fromkeys(queues, 0.0)
    positions = dict.fromkeys(queues, 0)
    has_progressed = True
    while has_progressed:
        has_progressed = False
        for queue, passes in queues.items():
            while positions[queue] < len(passes):
                start = _start(passes[positions[queue]], ends, placement, send, offloaded)
                if start is None:
                    break
                kind, stage, _ = work = passes[positions[queue]]
                clock[queue] = max(clock[queue], start) + stages[stage].time.get(kind, 0.0)
                ends[work] = clock[queue]
                positions[queue] += 1
                has_progressed = True
    stuck = [
        passes[positions[queue]]
        for queue, passes in queues.items()
        if positions[queue] < len(passes)
    ]
    assert not stuck, f"deadlock at {stuck}"
    makespan = max(clock.values())  # the first F starts at 0
    return Figures(makespan, tuple(_peak(row, stages) for row in rows), len(offloaded))


def _parse(text: str) -> Work:
    match = PASS.match(text)
    assert match, f"not a pass: {text!r}"
    return match[1], int(match[2]), int(match[3])


def _check_complete(rows: list[list[Work]], placement: list[int], microbatches: int) -> None:
    counts = Counter(work for row in rows for work in row)
    assert max(counts.values()) == 1, "a pass runs twice"
    for device, row in enumerate(rows):
        assert all(placement[stage] == device for _, stage, _ in row), "a pass on a wrong device"
    for stage in range(len(placement)):
        for microbatch in range(microbatches):
            kinds = {kind for kind in "FBWDLRH" if counts[kind, stage, microbatch]}
            assert kinds in (set("FBW"), set("FBWDLRH")), (stage, microbatch, kinds)
    assert all(stage < len(placement) and mb < microbatches for _, stage, mb in counts)


def _start(
    work: Work,
    ends: dict[Work, float],
    placement: list[int],
    send: float,
    offloaded: set[tuple[int, int]],
) -> float | None:
    """Return the time at which the inputs of a pass are available; None if one has not run."""
    kind, stage, microbatch = work
    own_dependency = {"F": "", "B": "F", "W": "B", "D": "F", "L": "D", "R": "L", "H": "R"}[kind]
    dependencies = [(kind_read, stage) for kind_read in own_dependency]
    if kind == "F" and stage > 0:
        dependencies.append(("F", stage - 1))
    if kind == "B" and stage + 1 < len(placement):
        dependencies.append(("B", stage + 1))
    if kind == "B" and (stage, microbatch) in offloaded:
        dependencies.append(("H", stage))
    start = 0.0
    for kind_read, stage_read in dependencies:
        end = ends.get((kind_read, stage_read, microbatch))
        if end is None:
            return None
        start = max(start, end + (send if placement[stage_read] != placement[stage] else 0.0))
    return start


def _peak(row: list[Work], stages: list[StageCosts]) -> float:
    allocated = peak = 0.0
    for kind, stage, _ in row:
        costs = stages[stage]
        allocated += {"F": costs.forward_bytes, "R": costs.offloaded_bytes}.get(kind, 0.0)
        peak = max(peak, allocated)
        allocated += {
            "B": costs.backward_bytes - costs.forward_bytes,
            "W": -costs.backward_bytes,
            "L": -costs.offloaded_bytes,
        }.get(kind, 0.0)
        peak = max(peak, allocated)
    return peak
