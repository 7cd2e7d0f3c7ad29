"""An independent replay of schedules with joint passes: the rules alone, sweep by sweep."""

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.schedule import Schedule

Key = tuple[str, int, int]
"""Kind, stage and microbatch."""


def peak_of(schedule: Schedule, costs: Costs) -> float:
    """Return the most that a device holds: from the start of F to the end of W or BW."""
    held, peak = costs.held_after_forward_bytes, 0.0
    for row in schedule.order:
        now = 0.0
        for kind, stage, _ in row:
            now += held[stage] if kind == "F" else 0.0
            peak = max(peak, now)
            now -= held[stage] if "W" in kind else 0.0
    return peak


def replay(schedule: Schedule, costs: Costs) -> list[list[tuple[float, float]]]:
    """Return the start and the end of every device's passes; stops where nothing can go on."""
    rows = [[(str(w.kind), w.stage, w.microbatch) for w in row] for row in schedule.order]
    overlapped = {(str(w.kind), w.stage, w.microbatch) for w in schedule.overlapped}
    done: dict[Key, float] = {}
    times: list[list[tuple[float, float]]] = [[] for _ in rows]
    moved = True
    while moved:
        moved = False
        for own, row in zip(times, rows, strict=True):
            if len(own) == len(row):
                continue
            step = row[len(own) : len(own) + (2 if row[len(own)] in overlapped else 1)]
            ready = [_ready(each, schedule.placement, costs, done) for each in step]
            if None in ready:
                continue
            start = max([own[-1][1] if own else 0.0, *(each or 0.0 for each in ready)])
            end = start + _length(step, costs)
            own += [(start, end)] * len(step)
            done.update({(part, *key[1:]): end for key in step for part in key[0]})
            moved = True
    return times


def _ready(
    key: Key, placement: tuple[int, ...], costs: Costs, done: dict[Key, float]
) -> float | None:
    kind, stage, microbatch = key
    needs = []
    if kind == "F" and stage:
        needs.append(("F", stage - 1, microbatch))
    if kind[0] == "B":
        needs.append(("F", stage, microbatch))
        needs += [("B", stage + 1, microbatch)] if stage + 1 < len(placement) else []
    if kind == "W":
        needs.append(("B", stage, microbatch))
    if any(need not in done for need in needs):
        return None
    hop = [costs.send_us if placement[n[1]] != placement[stage] else 0.0 for n in needs]
    return max([0.0, *(done[n] + h for n, h in zip(needs, hop, strict=True))])


def _length(step: list[Key], costs: Costs) -> float:
    compute = {"F": costs.forward_us, "B": costs.backward_us, "W": costs.weight_us}
    waits = {"F": costs.forward_exchange_us, "B": costs.backward_exchange_us}
    parts = [(part, stage) for kind, stage, _ in step for part in kind]
    exchanges = sum((waits.get(part) or compute)[s] for part, s in parts if waits.get(part))
    took = sum(compute[part][s] for part, s in parts) + exchanges + costs.host_us * len(step)
    if len(step) == 1:
        return took
    return max(took - exchanges, exchanges)
