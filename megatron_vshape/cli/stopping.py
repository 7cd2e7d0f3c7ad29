"""A search that ends by Ctrl-C, or when its time is over, with the best that it has found."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from megatron_vshape.cli.progress import SEARCH, Search
from megatron_vshape.core.ask import Planned
from megatron_vshape.core.model.kinds import ScheduleError

GRACE_S = 0.6
"""Seconds that a stopped search may need to end: the result is due within a second."""

_Result = TypeVar("_Result")


class Budget:
    """The time of a command, and the best that has been found in it."""

    def __init__(self, seconds: float | None) -> None:
        """Begin to count the seconds; with None there is no end to them."""
        self.seconds = seconds
        self._ends = math.inf if seconds is None else time.monotonic() + seconds
        self._interrupted = threading.Event()
        self._found: list[Callable[[], Planned]] = []

    @property
    def interrupted(self) -> bool:
        """Return whether Ctrl-C has come."""
        return self._interrupted.is_set()

    def stopped(self) -> bool:
        """Return whether Ctrl-C has come, or the time is over."""
        return self.interrupted or time.monotonic() >= self._ends

    def found(self, planned: Callable[[], Planned]) -> None:
        """Take what returns a plan that fits: the best of a search so far."""
        self._found.append(planned)

    def best(self) -> Planned | None:
        """Return the best that has been found, None where nothing has."""
        plans = []
        for each in list(self._found):
            with suppress(ScheduleError):  # a search that has no order yet
                plans.append(each())
        return min(plans, key=_rank, default=None)

    def watching(self, progress: Search) -> Search:
        """Return a search's `progress` that also ends the search, as Ctrl-C does."""

        def told(steps: int, best: float, bound: float) -> None:
            progress(steps, best, bound)
            if self.stopped():
                raise KeyboardInterrupt

        return told

    def run(
        self, work: Callable[[], _Result], tell: Callable[[Planned | None], None]
    ) -> _Result | None:
        """Return what `work` returns, or None where it was stopped and went on all the same.

        It runs in a thread of its own, for Ctrl-C must not wait until it is between two steps: what
        had been found when it came is told at once. A second Ctrl-C is raised.
        """
        done, results, errors = threading.Event(), list[_Result](), list[BaseException]()

        def search() -> None:
            try:
                results.append(work())
            except BaseException as error:  # is raised again, where it is waited for
                errors.append(error)
            done.set()

        threading.Thread(target=search, name=SEARCH, daemon=True).start()
        try:
            while not (done.is_set() or self.stopped()):
                done.wait(min(1.0, self._ends - time.monotonic()))
        except KeyboardInterrupt:
            self._interrupted.set()
            with _told_first():
                tell(self.best())
        done.wait(GRACE_S)
        if errors and not isinstance(errors[0], KeyboardInterrupt):
            raise errors[0]
        return results[0] if results else None


@contextmanager
def _told_first() -> Iterator[None]:
    """Let Ctrl-C wait for what is within."""
    again: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: again.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if again:
        raise KeyboardInterrupt


def _rank(planned: Planned) -> tuple[float, float]:
    return planned.plan.value, max(planned.plan.peak)
