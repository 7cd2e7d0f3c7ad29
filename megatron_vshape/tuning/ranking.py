"""Rank the predictions of `sweep`, prune those not worth a run, and compare with measurements."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_vshape.tuning.files import Pruning
from megatron_vshape.tuning.grid import Dropped
from megatron_vshape.tuning.predictor import Prediction, step_seconds


def kendall_tau(
    first: Sequence[float], second: Sequence[float], groups: Sequence[object] | None = None
) -> float | None:
    """Compute Kendall's tau-b of two rankings: 1 same order, -1 reverse order, 0 unrelated.

    With `groups` (one per value), only values of the same group are compared. None if undefined:
    fewer than two values, or all values of one side are equal.
    """
    agree = ties_first = ties_second = pairs = 0
    entries = zip(first, second, groups or [None] * len(first), strict=True)
    for (a, b, group), (c, d, other_group) in itertools.combinations(entries, 2):
        if group != other_group:
            continue
        pairs += 1
        ties_first += a == c
        ties_second += b == d
        agree += ((a > c) - (a < c)) * ((b > d) - (b < d))
    scale = math.sqrt((pairs - ties_first) * (pairs - ties_second))
    return agree / scale if scale else None


@dataclass(frozen=True, slots=True)
class Pruned:
    """Combinations to run, best predicted first, and the others."""

    run: tuple[Prediction, ...]
    dropped: tuple[Dropped, ...]


def prune_predictions(predictions: Iterable[Prediction], pruning: Pruning) -> Pruned:
    """Return the predictions that fit and are within the margin of the best, by workload.

    The best prediction of every schedule always runs, so that schedules can be compared. So do runs
    with additional arguments, because the user requested them explicitly.
    """
    run: list[Prediction] = []
    dropped: list[Dropped] = []
    groups: dict[tuple[int, int], list[Prediction]] = {}
    for prediction in predictions:
        groups.setdefault(prediction.configuration.workload, []).append(prediction)
    for group in groups.values():
        fitting = sorted((prediction for prediction in group if prediction.fits), key=step_seconds)
        dropped += [
            Dropped(prediction.configuration, f"predicted {prediction.verdict}", prediction.reason)
            for prediction in group
            if not prediction.fits
        ]
        for position, prediction in enumerate(fitting):
            reason = _pruning_reason(prediction, position, fitting, pruning)
            if not reason:
                run.append(prediction)
            else:
                kind = f"predicted too far behind the best (margin {pruning.margin:.0%})"
                dropped.append(Dropped(prediction.configuration, kind, reason))
    return Pruned(tuple(run), tuple(dropped))


def _pruning_reason(
    prediction: Prediction, position: int, fitting: Sequence[Prediction], pruning: Pruning
) -> str | None:
    """Return the reason why the prediction at `position` of those that fit is not worth a run."""
    config = prediction.configuration
    faster_schedules = {faster.configuration.schedule for faster in fitting[:position]}
    if config.arguments or config.schedule not in faster_schedules:
        return None
    slower = step_seconds(prediction) / step_seconds(fitting[0]) - 1
    if slower > pruning.margin:
        best = fitting[0].configuration
        return f"predicted {100 * slower:.0f} % slower than {best}"
    if pruning.at_most is not None and position >= pruning.at_most:
        return f"predicted only the {position + 1}th best; at most {pruning.at_most} run"
    return None
