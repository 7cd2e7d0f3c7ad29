"""Has the last candidate of a trial win after two rounds, whatever time the machine gives it."""

from typing import Any

from megatron_vshape.mcore.observe import contest, drift, trial

ROUNDS = 2


def start(rank: int, given: Any) -> None:
    """Judge so on every rank, and try three that fit; then have every window of steps drift."""

    def judged(self: trial.Trial) -> trial.Round:
        if self._rounds < ROUNDS:
            return trial.Round(tuple(self.left))
        return self._ended(self.left[-1])

    trial.Trial.judged = judged  # type: ignore[method-assign]
    contest.worth_trying = lambda predicted_s: list(range(min(3, len(predicted_s))))
    drift.WINDOW = 6
    drift.Drift._drifted = _once(drift.Drift._drifted)  # type: ignore[method-assign]


def _once(original: Any) -> Any:
    """Return a method that finds drift the first time, and asks the original from then on."""
    found: list[bool] = []

    def drifted(self: drift.Drift) -> bool:
        if not found:
            found.append(True)
            drift.logger.warning("measured anew")
            return True
        self._share = float("inf")
        return bool(original(self))

    return drifted
