"""The storages of a ledger by purpose: at one moment, over time, and the largest ones."""

from __future__ import annotations

from megatron_vshape.rehearsal.ledger import WORKSPACES, Record
from megatron_vshape.rehearsal.phases import JOIN, OPTIMIZER
from megatron_vshape.rehearsal.rank_report import PARTS, Holder

_MAX_HOLDERS = 12


def part_of(record: Record) -> str:
    """Return the purpose of a storage, a name of `PARTS`."""
    if record.what in PARTS:
        return record.what
    if record.what == WORKSPACES:
        return "rest"
    if record.phase == OPTIMIZER:
        return "optimizer"
    in_pass = record.phase.is_pass and record.phase.kind != JOIN
    return "activations" if in_pass else "rest"


def parts_of(records: list[Record], total: int) -> dict[str, int]:
    """Return the bytes of the records by purpose, which add up to the total."""
    parts = dict.fromkeys(PARTS, 0)
    for record in records:
        parts[part_of(record)] += record.size
    # Memory without a record.
    parts["rest"] += total - sum(parts.values())
    return parts


_CURVE_CATEGORIES = ("state", "F", "B", "logits", "rest")
"""Weights, gradients and optimizer; allocations of F; allocations of B, W and BW; as `PARTS`."""


def _curve_category(record: Record) -> str:
    part = part_of(record)
    if part == "activations":
        return "F" if record.phase.kind == "F" else "B"
    return part if part in _CURVE_CATEGORIES else "state"


def memory_over_time(
    records: list[Record], curve: list[tuple[float, int, int]]
) -> list[tuple[float, int, dict[str, int]]]:
    """Return (seconds, bytes, bytes by category) for every point of the curve."""
    changes = [(record.born, record.size, _curve_category(record)) for record in records]
    changes += [(record.died, -record.size, _curve_category(record)) for record in records]
    changes.sort()
    allocated, event = dict.fromkeys(_CURVE_CATEGORIES, 0), 0
    points: dict[int, dict[str, int]] = {}
    # By clock: the peak of an outer phase can be earlier than entries before it.
    for index in sorted(range(len(curve)), key=lambda index: curve[index][2]):
        # An event at clock c is visible from c + 1 on, as in `Ledger.held_at`.
        while event < len(changes) and changes[event][0] < curve[index][2]:
            allocated[changes[event][2]] += changes[event][1]
            event += 1
        beyond = curve[index][1] - sum(allocated.values())
        points[index] = allocated | {"rest": allocated["rest"] + beyond}
    return [(*curve[index][:2], points[index]) for index in range(len(curve))]


def largest_holders(records: list[Record]) -> list[Holder]:
    """Return the largest allocations by part and module, without weights and optimizer."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    for record in records:
        part = part_of(record)
        if part in ("activations", "logits", "rest"):
            entry = sums.setdefault((part, record.place, record.code), [0, 0])
            entry[0] += record.size
            entry[1] += 1
    largest = sorted(sums.items(), key=lambda item: -item[1][0])[:_MAX_HOLDERS]
    return [
        Holder(part, place, code, size, number) for (part, place, code), (size, number) in largest
    ]
