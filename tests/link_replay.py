"""A replay of schedule files with copies to the host, written apart from the package it judges.

A device's processor runs F, B, W and the markers L and R in the order of its row; L and R take no
time. D (to the host) runs on the device's link out, H (back) on its link in, each in the order of
the row. D needs its F, L its D, R its L, H its R; F needs the F
of the stage before, B its F, the B of the stage after and, where there is one, its H; W needs its
B. What comes from another device arrives `send` later. A stage holds `held` of a microbatch from
the start of F on, `kept` instead from the end of B on, and nothing after W; L frees `moved` of it
and R takes it again.
"""

import json
import re
from collections import Counter
from typing import NamedTuple

PASS = re.compile(r"^(F|B|W|D|L|R|H)(\d+)\.(\d+)$")

Work = tuple[str, int, int]


class Prices(NamedTuple):
    """What a stage takes, by kind of pass, and holds; all stages alike, or one each."""

    time: dict[str, float]  # of F, B, W, D and H
    held: float
    kept: float
    moved: float


class Found(NamedTuple):
    """What a schedule file costs."""

    makespan: float
    peak: tuple[float, ...]
    copied: int  # chunks


def replay(text: str, stages: list[Prices], send: float) -> Found:
    """Return what the schedule in this file costs; AssertionError if it is incomplete or stuck."""
    data = json.loads(text)
    placement, count = data["placement"], data["num_microbatches"]
    rows = [[_parse(each) for each in row] for row in data["order"]]
    _check_complete(rows, placement, count)
    lanes: dict[tuple[int, str], list[Work]] = {}
    for device, row in enumerate(rows):
        for work in row:
            link = {"D": "out", "H": "in"}.get(work[0], "processor")
            lanes.setdefault((device, link), []).append(work)
    copied = {work[1:] for row in rows for work in row if work[0] == "D"}
    ends: dict[Work, float] = {}
    clock = dict.fromkeys(lanes, 0.0)
    at = dict.fromkeys(lanes, 0)
    going = True
    while going:
        going = False
        for lane, passes in lanes.items():
            while at[lane] < len(passes):
                start = _start(passes[at[lane]], ends, placement, send, copied)
                if start is None:
                    break
                kind, stage, _ = work = passes[at[lane]]
                clock[lane] = max(clock[lane], start) + stages[stage].time.get(kind, 0.0)
                ends[work] = clock[lane]
                at[lane] += 1
                going = True
    stuck = [passes[at[lane]] for lane, passes in lanes.items() if at[lane] < len(passes)]
    assert not stuck, f"deadlock at {stuck}"
    makespan = max(clock.values())  # the first F starts at 0
    return Found(makespan, tuple(_peak(row, stages) for row in rows), len(copied))


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
            there = {kind for kind in "FBWDLRH" if counts[kind, stage, microbatch]}
            assert there in (set("FBW"), set("FBWDLRH")), (stage, microbatch, there)
    assert all(stage < len(placement) and mb < microbatches for _, stage, mb in counts)


def _start(
    work: Work,
    ends: dict[Work, float],
    placement: list[int],
    send: float,
    copied: set[tuple[int, int]],
) -> float | None:
    """Return from when on what a pass needs is there; None while something has not run."""
    kind, stage, microbatch = work
    own = {"F": "", "B": "F", "W": "B", "D": "F", "L": "D", "R": "L", "H": "R"}[kind]
    needs = [(each, stage) for each in own]
    if kind == "F" and stage > 0:
        needs.append(("F", stage - 1))
    if kind == "B" and stage + 1 < len(placement):
        needs.append(("B", stage + 1))
    if kind == "B" and (stage, microbatch) in copied:
        needs.append(("H", stage))
    start = 0.0
    for need, other in needs:
        end = ends.get((need, other, microbatch))
        if end is None:
            return None
        start = max(start, end + (send if placement[other] != placement[stage] else 0.0))
    return start


def _peak(row: list[Work], stages: list[Prices]) -> float:
    held = peak = 0.0
    for kind, stage, _ in row:
        prices = stages[stage]
        held += {"F": prices.held, "R": prices.moved}.get(kind, 0.0)
        peak = max(peak, held)
        held += {"B": prices.kept - prices.held, "W": -prices.kept, "L": -prices.moved}.get(
            kind, 0.0
        )
        peak = max(peak, held)
    return peak
