"""The watch over a GPU's messages: ends a process in which nothing moves, and says for what."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_vshape.runtime.last_words import say_and_exit


def no_progress(timeout_s: float) -> str:
    """Return the end of the sentence about what has waited too long."""
    return f", and nothing has moved for {timeout_s:g} s"


def _say_and_exit(text: str) -> None:
    # The main thread stands in a CUDA call that never returns, so no exception can end it.
    say_and_exit(text, 1)


@dataclass(eq=False)
class Watch:
    """Ends the process when nothing has moved here for too long, and something should (NCCL).

    The host only orders streams and runs ahead, so it does not notice by itself. What it has
    ordered to wait is watched by events rather than by the receives' own handles, which would
    keep the received tensors alive; what it has only posted or sent, `under_way` tells.

    One thread asks the device. The driver answers no question while a call of another thread holds
    its lock, as loading a kernel does that waits for a device which never rests. So a second
    thread, which asks the device nothing, sees whether the first is still answered.
    """

    timeout_s: float
    under_way: Callable[[], list[str]]
    doing: Callable[[], str]  # what the host did last, without a question to the device
    stuck: Callable[[str], None] = _say_and_exit
    # Called first in the thread that asks: a new one is on device 0, and would make a context there
    # of some hundred MiB.
    name_device: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        """Begin to watch."""
        self._ahead: deque[tuple[torch.cuda.Event, Callable[[], str]]] = deque()
        self._added = 0
        self._is_closed = self._has_ended = self._is_quiet = False
        self._asks_since: float | None = None
        self._waiting: list[str] = []
        self._asks = threading.Lock()  # while the device is asked
        for run in (self._ask, self._guard):
            threading.Thread(target=run, daemon=True, name=f"watch{run.__name__}").start()

    def add(self, event: torch.cuda.Event, tell: Callable[[], str]) -> None:
        """Watch an event that follows a receive.

        `tell` formats which pass waits for which message; only the watch's thread calls it, and
        only while the event is pending.
        """
        self._ahead.append((event, tell))
        self._added += 1

    def forget(self) -> None:
        """Watch no event that has been added, since the device has reached them all.

        After this no thread asks it anything until the next is added, so that CUDA graphs can be
        captured: there a question of any thread is an error.
        """
        with self._asks:
            self._ahead.clear()

    def waits_for(self) -> str | None:
        """Return what the device waited for when it was asked last, if for anything."""
        return next(iter(self._waiting), None)

    def close(self, quietly: bool = False) -> None:
        """End the watching as soon as there is nothing to watch.

        Where that takes too long, it ends the process all the same; `quietly`, only the watching.
        """
        self._is_closed, self._is_quiet = True, quietly

    @property
    def _period_s(self) -> float:
        return min(1.0, self.timeout_s / 4)

    def _ask(self) -> None:
        self.name_device()
        before: tuple[int, list[str]] | None = None
        moved_s = time.monotonic()
        while not self._has_ended:
            time.sleep(self._period_s)
            self._asks_since = time.monotonic()
            waiting = self._find_waiting()
            self._asks_since = None
            self._waiting = waiting
            if self._is_closed and not waiting:
                break
            now = self._added, waiting  # two steps have the same texts, and not the same number
            if not waiting or now != before:
                before, moved_s = now, time.monotonic()
            elif time.monotonic() - moved_s > self.timeout_s:
                self._end(waiting[0] + no_progress(self.timeout_s))
        self._has_ended = True

    def _guard(self) -> None:
        while not self._has_ended:
            time.sleep(self._period_s)
            since = self._asks_since
            if since is not None and time.monotonic() - since > self.timeout_s:
                self._end(
                    f"{self.doing()}, and the GPU's driver has not answered for "
                    f"{self.timeout_s:g} s: a call that does not end holds its lock, such as the "
                    "loading of a kernel"
                )

    def _end(self, text: str) -> None:
        self._has_ended = True
        if not self._is_quiet:
            self.stuck(text)

    def _find_waiting(self) -> list[str]:
        """Return what the device has yet to reach, then what else has not ended."""
        with self._asks:
            while self._ahead and self._ahead[0][0].query():
                self._ahead.popleft()
            return [*(tell() for _, tell in self._ahead.copy()), *self.under_way()]
