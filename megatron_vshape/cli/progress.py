"""Progress reports on stderr for commands that run long."""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

FIRST_S = 2.0
"""Seconds before the first progress report on a terminal."""

TERMINAL_S, FILE_S = 0.5, 30.0
"""Seconds between reports: a terminal has one changing line, a file gets a line each."""

Search = Callable[[int, float, float], None]
"""Progress callback of the planner: steps so far, best value, lower bound."""

_CLEAR = "\r\x1b[K"


class Progress:
    """Reports the progress of a search at fixed intervals, even while the search is silent."""

    def __init__(self, time_text: Callable[[float], str], stream: TextIO) -> None:
        self._time_text = time_text
        self._stream = stream
        self._text = ""
        self._start_s = time.monotonic()
        self._writing = threading.Lock()

    def search(self, steps: int, best: float, bound: float) -> None:
        """Store the state of the search for the next report; a planner callback."""
        text = f"{steps:,} steps, best {self._time_text(best)}"
        self.update(f"{text}, lower bound {self._time_text(bound)}")

    def update(self, text: str) -> None:
        """Store a text for the next report."""
        self._text = f": {text}"

    def print_line(self, text: str) -> None:
        """Print a permanent line."""
        with self._writing:
            print(f"{self._clear}{text}", file=self._stream, flush=True)

    def report_until(self, ended: threading.Event) -> None:
        """Print reports until the event is set."""
        wait, every = (FIRST_S, TERMINAL_S) if self._clear else (FILE_S, FILE_S)
        while not ended.wait(wait):
            wait = every
            text = f"running ({time.monotonic() - self._start_s:.0f} s){self._text}"
            with self._writing:
                if self._clear:
                    shown = text[: shutil.get_terminal_size().columns - 1]
                    print(f"{_CLEAR}{shown}", end="", file=self._stream, flush=True)
                else:
                    print(text, file=self._stream, flush=True)

    def end(self) -> None:
        """Clear the changing line."""
        with self._writing:
            print(self._clear, end="", file=self._stream, flush=True)

    @property
    def _clear(self) -> str:
        has_escapes = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        return _CLEAR if has_escapes and not os.environ.get("NO_COLOR") else ""


@contextmanager
def report_progress(time_text: Callable[[float], str]) -> Iterator[Progress]:
    """Report progress on stderr in this context, if it lasts long enough.

    A thread prints the reports, because much of the work (creating orders, compiling the inner
    loops) has no callback.
    """
    progress, ended = Progress(time_text, sys.stderr), threading.Event()
    reporter = threading.Thread(target=progress.report_until, args=(ended,), daemon=True)
    reporter.start()
    try:
        yield progress
    finally:
        ended.set()
        reporter.join()
        progress.end()
