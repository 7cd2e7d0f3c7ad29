"""Report the state of a process that is ended by a signal, even if its main thread is blocked."""

import faulthandler
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

logger = logging.getLogger(__name__)

ENDED_BY_SIGTERM = 128 + signal.SIGTERM  # exit status that a shell reports for SIGTERM

_END = 0  # not the number of a signal


def say_and_exit(text: str, code: int) -> None:
    """Log `text` and end the process at once, whatever its other threads do."""
    logger.critical("%s", text)
    logging.shutdown()
    for child in multiprocessing.active_children():  # Megatron's writers of checkpoints
        child.kill()
    os._exit(code)


@contextmanager
def last_words(tell: Callable[[], str]) -> Iterator[None]:
    """Log the text of `tell` when SIGTERM ends the process inside this context.

    A launcher ends all ranks as soon as one has died, before the other ranks notice it. A rank
    waits inside torch, where no Python signal handler runs, so a thread reads the signal from a
    pipe. Nothing changes outside the main thread, or if SIGTERM has a handler already (Megatron's
    --exit-signal-handler).

    This also enables faulthandler: a process that crashes (SIGSEGV, SIGABRT) prints the stack of
    each thread.
    """
    if not faulthandler.is_enabled():
        with suppress(OSError, AttributeError):  # stderr is not a file, as in a notebook
            faulthandler.enable()
    if not _is_free():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    handler = _Handler()
    handler.install(writer)
    thread = threading.Thread(target=_listen, args=(reader, tell), daemon=True)
    thread.start()
    try:
        yield
    finally:
        handler.remove()
        os.write(writer, bytes([_END]))  # children may have the pipe open: closing is not enough
        thread.join()
        os.close(writer)
        os.close(reader)


class _Handler:
    """SIGTERM handler of this process, not of its children.

    A forked child, such as a checkpoint writer, would report its own signals to the parent.
    """

    def __init__(self) -> None:
        self._masks: list[set[int | signal.Signals]] = []

    def __call__(self, number: int, frame: object) -> None:
        """Do nothing: Python has already written the signal number into the wakeup pipe."""

    def install(self, writer: int) -> None:
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self)
        # A signal between the fork and the child's reset of the handler must wait for the reset.
        os.register_at_fork(
            before=self._block, after_in_parent=self._unblock, after_in_child=self._leave
        )

    def remove(self) -> None:
        if self._is_in_use():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)

    def _is_in_use(self) -> bool:
        return signal.getsignal(signal.SIGTERM) is self

    def _block(self) -> None:
        if self._is_in_use():
            self._masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}))

    def _unblock(self) -> None:
        if self._masks:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.pop())

    def _leave(self) -> None:
        self.remove()
        self._unblock()


def _is_free() -> bool:
    """Check that this is the main thread and that SIGTERM and the wakeup pipe are unused."""
    if threading.current_thread() is not threading.main_thread():
        return False
    other = signal.set_wakeup_fd(-1)
    if other != -1:
        signal.set_wakeup_fd(other)
        return False
    return signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def _listen(reader: int, tell: Callable[[], str]) -> None:
    while (number := os.read(reader, 1)[0]) != _END:
        if number == signal.SIGTERM:
            say_and_exit(f"{tell()}, when SIGTERM ended it", ENDED_BY_SIGTERM)
