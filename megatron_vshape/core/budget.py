"""Time limit and Ctrl-C of a search: both end it with the best result found so far."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from megatron_vshape.core.model.kinds import ScheduleError

if TYPE_CHECKING:  # the command line imports this module at start
    from megatron_vshape.core.request import PlanResult

GRACE_S = 0.6
"""Seconds for a stopped search to end, so that the result appears within a second."""

SEARCH = "megatron-vshape search"
"""The name of the thread that searches."""

Report = Callable[[int, float, float], None]
"""Progress callback of the planner: steps so far, best value, lower bound."""

_Result = TypeVar("_Result")


class Budget:
    """Time limit of a search, its progress reports, and the best result found within it."""

    def __init__(self, seconds: float | None = None, report: Report | None = None) -> None:
        """Start the time limit, in seconds; None for no limit."""
        self.seconds = seconds
        self._report = report
        self._deadline = math.inf if seconds is None else time.monotonic() + seconds
        self._interrupted = threading.Event()
        self._results_so_far: list[Callable[[], PlanResult]] = []

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C has been pressed."""
        return self._interrupted.is_set()

    def interrupt(self) -> None:
        """Stop the search, as Ctrl-C does."""
        self._interrupted.set()

    def stopped(self) -> bool:
        """Return whether Ctrl-C has been pressed or the time limit has passed."""
        return self.interrupted or time.monotonic() >= self._deadline

    def register_result(self, result: Callable[[], PlanResult]) -> None:
        """Register a function that returns the best result of a search so far."""
        self._results_so_far.append(result)

    def best(self) -> PlanResult | None:
        """Return the best result so far, or None."""
        results = []
        for result in list(self._results_so_far):
            with suppress(ScheduleError):  # the search has no order yet
                results.append(result())
        return min(
            results, key=lambda result: (result.plan.value, max(result.plan.peak)), default=None
        )

    def progress(self, steps: int, best: float, bound: float) -> None:
        """Report the progress of a search, and end it if the budget is used up.

        Raises:
            KeyboardInterrupt: the search ends with its best order, as after Ctrl-C.
        """
        if self._report is not None:
            self._report(steps, best, bound)
        if self.stopped():
            raise KeyboardInterrupt

    def run(
        self,
        work: Callable[[], _Result],
        on_interrupt: Callable[[PlanResult | None], None],
        grace_s: float = GRACE_S,
    ) -> _Result | None:
        """Run `work` in a thread and return its result; None if stopped without end in `grace_s`.

        Because of the thread, Ctrl-C is handled at once, not only between two steps of the search:
        `on_interrupt` is called with the best result so far. A second Ctrl-C is raised.
        """
        finished, results, errors = threading.Event(), list[_Result](), list[BaseException]()

        def search() -> None:
            try:
                results.append(work())
            except BaseException as error:  # raised again in the main thread
                errors.append(error)
            finished.set()

        threading.Thread(target=search, name=SEARCH, daemon=True).start()
        try:
            while not (finished.is_set() or self.stopped()):
                finished.wait(min(1.0, self._deadline - time.monotonic()))
        except KeyboardInterrupt:
            self.interrupt()
            with _deferred_interrupt():
                on_interrupt(self.best())
        finished.wait(grace_s)
        if errors and not isinstance(errors[0], KeyboardInterrupt):
            raise errors[0]
        return results[0] if results else None


@contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Delay Ctrl-C to the end of this context."""
    signals: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if signals:
        raise KeyboardInterrupt
