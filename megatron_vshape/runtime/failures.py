"""How a run that cannot go on names its cause: watchdog, last words at SIGTERM, first failure.

A rank that dies closes its connections, and its peers would report only these. So a failing rank
writes the cause to the rendezvous store before its process ends.
"""

import atexit
import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

EXIT_S = 2.0
"""Seconds for which the end of the interpreter waits for a thread of this package."""


def no_progress(timeout_s: float) -> str:
    """Format the end of a timeout message."""
    return f", and nothing has moved for {timeout_s:g} s"


def _say_and_exit(text: str) -> None:
    # The main thread is in a CUDA call that never returns, so no exception can end it.
    say_and_exit(text, 1)


@dataclass(eq=False)
class Watch:
    """End the process if the GPU's messages make no progress for `timeout_s` (NCCL).

    The host only orders streams and runs ahead, so it does not notice a hang. Ordered waits are
    watched by events rather than by the handles of the receives, which would keep the received
    tensors alive. `under_way` lists the messages that are only posted or sent.

    One thread queries the GPU. The driver does not answer while a call of another thread has its
    lock; loading a kernel does that, and waits for the whole device. So a second thread, without
    any queries, checks that the first still gets answers. Both end before the interpreter does, if
    nobody has closed the watchdog: frameworks have no end of training, and scripts can fail.
    """

    timeout_s: float
    under_way: Callable[[], list[str]]
    doing: Callable[[], str]  # the last action of the host, without a query to the GPU
    stuck: Callable[[str], None] = _say_and_exit
    # Called first in the thread that queries: a new thread uses GPU 0, and would create a context
    # of some hundred MiB there.
    name_device: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        """Start the two threads, which end at `close` or at the exit of the interpreter."""
        self._ahead: deque[tuple[torch.cuda.Event, Callable[[], str]]] = deque()
        self._added = 0
        self._is_closed = self._is_quiet = False
        self._ended = threading.Event()
        self._asks_since: float | None = None
        self._waiting: list[str] = []
        self._asks = threading.Lock()  # locked while the GPU is queried
        self._threads = [
            threading.Thread(target=run, daemon=True, name=f"watch{run.__name__}")
            for run in (self._ask, self._guard)
        ]
        # The interpreter ends daemon threads as soon as they need the GIL. Inside a query, that is
        # in a C++ destructor, and the process would abort (SIGABRT).
        atexit.register(self._end_threads)
        for thread in self._threads:
            thread.start()

    def add(self, event: torch.cuda.Event, describe: Callable[[], str]) -> None:
        """Watch an event that follows a receive.

        `describe` formats the waiting pass and its message. Only the watchdog's thread calls it,
        and only while the event is pending.
        """
        self._ahead.append((event, describe))
        self._added += 1

    def clear(self) -> None:
        """Remove all events; the GPU must have reached them.

        No thread queries the GPU after this call until the next event is added. CUDA graph capture
        requires that: any query from another thread during capture is an error.
        """
        with self._asks:
            self._ahead.clear()

    def waits_for(self) -> str | None:
        """Format the oldest pending wait of the GPU at the last query; None if there is none."""
        return next(iter(self._waiting), None)

    def close(self, quietly: bool = False) -> None:
        """End the watchdog as soon as nothing is pending.

        If that exceeds the timeout, it ends the process; with `quietly`, only the watchdog.
        """
        self._is_closed, self._is_quiet = True, quietly

    def _end_threads(self) -> None:
        """End the threads, and wait until they have left Python; called at exit."""
        self._ended.set()
        for thread in self._threads:
            thread.join(EXIT_S)

    @property
    def _period_s(self) -> float:
        return min(1.0, self.timeout_s / 4)

    def _ask(self) -> None:
        self.name_device()
        last_state: tuple[int, list[str]] | None = None
        moved_s = time.monotonic()
        while not self._ended.wait(self._period_s):
            # `_guard` reads this: a query that the driver never answers has a start and no end.
            self._asks_since = time.monotonic()
            waiting_texts = self._find_waiting()
            self._asks_since = None
            self._waiting = waiting_texts
            if self._is_closed and not waiting_texts:
                break
            # Two steps have the same texts, but different numbers.
            state = self._added, waiting_texts
            # The clock restarts whenever the list of pending messages changes.
            if not waiting_texts or state != last_state:
                last_state, moved_s = state, time.monotonic()
            elif time.monotonic() - moved_s > self.timeout_s:
                self._end(waiting_texts[0] + no_progress(self.timeout_s))
        self._ended.set()
        atexit.unregister(self._end_threads)

    def _guard(self) -> None:
        while not self._ended.wait(self._period_s):
            # Set while the first thread is in a query; a query that never returns is reported here.
            since = self._asks_since
            if since is not None and time.monotonic() - since > self.timeout_s:
                self._end(
                    f"{self.doing()}, and the GPU's driver has not answered for "
                    f"{self.timeout_s:g} s: a call that does not end holds its lock, such as the "
                    "loading of a kernel"
                )

    def _end(self, text: str) -> None:
        self._ended.set()
        if not self._is_quiet:
            self.stuck(text)

    def _find_waiting(self) -> list[str]:
        """Return the pending waits of the GPU, then the other incomplete messages."""
        with self._asks:
            # Events are recorded on one stream and complete in order.
            while self._ahead and self._ahead[0][0].query():
                self._ahead.popleft()
            return [*(describe() for _, describe in self._ahead.copy()), *self.under_way()]


class WaitingThreads:
    """Daemon threads that wait for gloo, and that end before the interpreter does.

    The interpreter ends a daemon thread as soon as it needs the GIL. After a wait for gloo, that is
    in a C++ destructor, and the process would abort (SIGABRT). So at exit the threads stop, and the
    connections that they still wait for are closed: the peers of a failed run may never answer.
    """

    def __init__(
        self, stop: Callable[[], None], pending: Callable[[], Iterable[dist.ProcessGroup]]
    ) -> None:
        """Set the function that ends idle threads, and the groups that busy ones wait for."""
        self._stop, self._pending = stop, pending
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def start(self, run: Callable[..., None], *args: Any, name: str) -> None:
        """Start a thread."""
        thread = threading.Thread(target=self._run, args=(run, *args), name=name, daemon=True)
        with self._lock:
            if not self._threads:
                atexit.register(self._end)
            self._threads.append(thread)
        thread.start()

    def _run(self, run: Callable[..., None], *args: Any) -> None:
        run(*args)
        with self._lock:
            self._threads.remove(threading.current_thread())
            if not self._threads:
                atexit.unregister(self._end)

    def _end(self) -> None:
        threads = self._threads.copy()
        self._stop()
        for group in self._pending():
            close_connections(group)
        for thread in threads:
            thread.join(PATIENCE_S + EXIT_S)  # it may still look for the cause of a failure


def close_connections(group: dist.ProcessGroup) -> None:
    """Close the connections of a gloo group; its pending transfers fail."""
    # gloo has no function for it, but closes all connections of a group after a timeout.
    peer = (group.rank() + 1) % group.size()
    with suppress(RuntimeError):
        group.recv([torch.empty(1)], peer, _CLOSING_TAG).wait(timedelta(milliseconds=1))


_CLOSING_TAG = 2**30  # no message of this package has it

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
def last_words(describe: Callable[[], str]) -> Iterator[None]:
    """Log the text of `describe` when SIGTERM ends the process inside this context.

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
    thread = threading.Thread(target=_listen, args=(reader, describe), daemon=True)
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
        # Python's C handler writes the signal's number here at once; the Python handler would run
        # only after torch returns to the interpreter.
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
    other_fd = signal.set_wakeup_fd(-1)
    if other_fd != -1:
        signal.set_wakeup_fd(other_fd)
        return False
    return signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def _listen(reader: int, describe: Callable[[], str]) -> None:
    while (number := os.read(reader, 1)[0]) != _END:
        if number == signal.SIGTERM:
            say_and_exit(f"{describe()}, when SIGTERM ended it", ENDED_BY_SIGTERM)


CAUSE_KEY = "megatron_vshape/first cause"
"""Key of the first failure in the rendezvous store of the job."""

PATIENCE_S = 2.0
"""Seconds for which a rank with a failed connection waits for the cause."""


def publish_cause(error: BaseException) -> None:
    """Log why this rank fails, and publish it unless another rank has failed before."""
    if getattr(error, "_is_published", False):
        return
    # The exception may pass several of these handlers on its way up.
    error._is_published = True  # type: ignore[attr-defined]
    cause = f"rank {dist.get_rank()}: {type(error).__name__}: {error!s:.300}"
    logger.critical("%s", cause)
    with suppress(Exception):  # the store may be gone with the rank that had it
        # An empty expected value sets the key only if it does not exist: the first failure wins.
        _store().compare_set(CAUSE_KEY, "", cause)


def cause_of_others() -> str:
    """Format another rank's first failure, to append to an error message; empty if unknown.

    Waits up to `PATIENCE_S`: a connection closes before the process at its other end has published
    the cause.
    """
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        with suppress(Exception):
            if _store().check([CAUSE_KEY]):
                cause = _store().get(CAUSE_KEY).decode()
                return "" if cause.startswith(f"rank {dist.get_rank()}:") else f"; before, {cause}"
        time.sleep(0.1)
    return ""


def forget_cause() -> None:
    """Delete the published failure, before this process tries again."""
    with suppress(Exception):
        _store().delete_key(CAUSE_KEY)


@contextmanager
def publishing_cause(follows: type[Exception]) -> Iterator[None]:
    """Report an exception raised inside, unless its type `follows` from another rank's failure."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, follows):
            publish_cause(error)
        raise


def publish_cause_at_exit(follows: type[Exception]) -> None:
    """Report exceptions that end this process before its usual traceback. Installed once."""
    former_hook = sys.excepthook
    if getattr(former_hook, "publishes_cause", False):
        return

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Errors of type `follows` are consequences; reporting them would hide the cause.
        if (
            isinstance(error, Exception)
            and not isinstance(error, follows)
            and dist.is_initialized()
        ):
            publish_cause(error)
        former_hook(kind, error, trace)

    say.publishes_cause = True  # type: ignore[attr-defined]
    sys.excepthook = say


def _store() -> Any:
    return distributed_c10d._get_default_store()
