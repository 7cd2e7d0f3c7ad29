"""Time limit and Ctrl-C of a search: both return the best plan found so far."""

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
"""Seconds for a stopped search to end, so that the result appears within a second."""

_Result = TypeVar("_Result")


class Budget:
    """Time limit of a command, and the best plan found within it."""

    def __init__(self, seconds: float | None) -> None:
        """Start the time limit, in seconds; None for no limit."""
        self.seconds = seconds
        self._ends = math.inf if seconds is None else time.monotonic() + seconds
        self._interrupted = threading.Event()
        self._found: list[Callable[[], Planned]] = []

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C has been pressed."""
        return self._interrupted.is_set()

    def stopped(self) -> bool:
        """Return whether Ctrl-C has been pressed or the time limit has passed."""
        return self.interrupted or time.monotonic() >= self._ends

    def found(self, planned: Callable[[], Planned]) -> None:
        """Register a function that returns the best plan of a search so far."""
        self._found.append(planned)

    def best(self) -> Planned | None:
        """Return the best plan so far, or None."""
        plans = []
        for each in list(self._found):
            with suppress(ScheduleError):  # the search has no order yet
                plans.append(each())
        return min(plans, key=_rank, default=None)

    def watching(self, progress: Search) -> Search:
        """Wrap a progress callback so that it also ends the search, like Ctrl-C."""

        def told(steps: int, best: float, bound: float) -> None:
            progress(steps, best, bound)
            if self.stopped():
                raise KeyboardInterrupt

        return told

    def run(
        self, work: Callable[[], _Result], tell: Callable[[Planned | None], None]
    ) -> _Result | None:
        """Return the result of `work`, or None if it was stopped and did not end in time.

        `work` runs in a separate thread, so Ctrl-C is handled at once, not only between two steps
        of the search: `tell` is called with the best plan so far. A second Ctrl-C is raised.
        """
        done, results, errors = threading.Event(), list[_Result](), list[BaseException]()

        def search() -> None:
            try:
                results.append(work())
            except BaseException as error:  # raised again in the main thread
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
    """Delay Ctrl-C to the end of this context."""
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
