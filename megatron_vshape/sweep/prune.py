"""Select the predicted combinations that are worth a run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_vshape.sweep.files import Pruning
from megatron_vshape.sweep.grid import Dropped
from megatron_vshape.sweep.predict import Prediction


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
        groups.setdefault(each.combination.workload, []).append(each)
    for group in groups.values():
        fitting = sorted((each for each in group if each.fits), key=_step_s)
        dropped += [
            Dropped(each.combination, f"predicted {each.verdict}", each.reason)
            for each in group
            if not each.fits
        ]
        for place, each in enumerate(fitting):
            reason = _beaten(each, place, fitting, pruning)
            if not reason:
                run.append(each)
            else:
                kind = f"predicted too far behind the best (margin {pruning.margin:.0%})"
                dropped.append(Dropped(each.combination, kind, reason))
    return Pruned(tuple(run), tuple(dropped))


def _beaten(
    each: Prediction, place: int, fitting: Sequence[Prediction], pruning: Pruning
) -> str | None:
    """Return the reason why the prediction at `place` among those that fit is not worth a run."""
    it = each.combination
    if it.arguments or all(other.combination.schedule != it.schedule for other in fitting[:place]):
        return None
    slower = _step_s(each) / _step_s(fitting[0]) - 1
    if slower > pruning.margin:
        best = fitting[0].combination
        return f"predicted {100 * slower:.0f} % slower than {best}"
    if pruning.at_most is not None and place >= pruning.at_most:
        return f"predicted only the {place + 1}th best; at most {pruning.at_most} run"
    return None


def _step_s(prediction: Prediction) -> float:
    return prediction.step_s or 0.0
