"""Rank the predictions of `sweep`, prune those not worth a run, and compare with measurements."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_vshape.tuning.files import Pruning
from megatron_vshape.tuning.grid import Dropped
from megatron_vshape.tuning.predictor import Prediction, step


def kendall_tau(
    one: Sequence[float], other: Sequence[float], groups: Sequence[object] | None = None
) -> float | None:
    """Compute Kendall's tau-b of two rankings: 1 same order, -1 reverse order, 0 unrelated.

    With `groups` (one per value), only values of the same group are compared. None if undefined:
    fewer than two values, or all values of one side are equal.
    """
    agree = ties_one = ties_other = pairs = 0
    among = zip(one, other, groups or [None] * len(one), strict=True)
    for (a, b, group), (c, d, its) in itertools.combinations(among, 2):
        if group != its:
            continue
        pairs += 1
        ties_one += a == c
        ties_other += b == d
        agree += ((a > c) - (a < c)) * ((b > d) - (b < d))
    scale = math.sqrt((pairs - ties_one) * (pairs - ties_other))
    return agree / scale if scale else None


@dataclass(frozen=True, slots=True)
class Pruned:
    """Combinations to run, best predicted first, and the others."""

    run: tuple[Prediction, ...]
    dropped: tuple[Dropped, ...]


def prune(predictions: Iterable[Prediction], pruning: Pruning) -> Pruned:
    """Return the predictions that fit and are within the margin of the best, by workload.

    The best prediction of every schedule always runs, so that schedules can be compared. So do runs
    with additional arguments, because the user requested them explicitly.
    """
    run: list[Prediction] = []
    dropped: list[Dropped] = []
    groups: dict[tuple[int, int], list[Prediction]] = {}
    for each in predictions:
        groups.setdefault(each.configuration.workload, []).append(each)
    for group in groups.values():
        fitting = sorted((each for each in group if each.fits), key=step)
        dropped += [
            Dropped(each.configuration, f"predicted {each.verdict}", each.reason)
            for each in group
            if not each.fits
        ]
        for place, each in enumerate(fitting):
            reason = _beaten(each, place, fitting, pruning)
            if not reason:
                run.append(each)
            else:
                kind = f"predicted too far behind the best (margin {pruning.margin:.0%})"
                dropped.append(Dropped(each.configuration, kind, reason))
    return Pruned(tuple(run), tuple(dropped))


def _beaten(
    each: Prediction, place: int, fitting: Sequence[Prediction], pruning: Pruning
) -> str | None:
    """Return the reason why the prediction at `place` among those that fit is not worth a run."""
    it = each.configuration
    better = {other.configuration.schedule for other in fitting[:place]}
    if it.arguments or it.schedule not in better:
        return None
    slower = step(each) / step(fitting[0]) - 1
    if slower > pruning.margin:
        best = fitting[0].configuration
        return f"predicted {100 * slower:.0f} % slower than {best}"
    if pruning.at_most is not None and place >= pruning.at_most:
        return f"predicted only the {place + 1}th best; at most {pruning.at_most} run"
    return None
