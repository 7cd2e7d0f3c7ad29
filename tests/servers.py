"""Processes that import torch and Megatron once for all workers of pytest-xdist.

`connect` starts such a process, or finds the one that another worker has started. The process calls
`serve`, which forks a handler for every connection and ends after the last one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

_PORT, _LOCK, _LISTENER = "SERVER_PORT_FILE", "SERVER_LOCK_FILE", "SERVER_LISTENER"


def connect(
    folder: Path, name: str, command: Sequence[str], environment: dict[str, str]
) -> IO[str]:
    """Return a connection to the server `name` of this folder, one request and answer per line.

    If there is none, start Python with `command`. Its output goes to `NAME.log` in the folder.
    """
    port_file, lock_file = folder / f"{name}.port", folder / f"{name}.lock"
    with _locked(lock_file):
        try:
            connection = socket.create_connection(("127.0.0.1", int(port_file.read_text())))
        except (FileNotFoundError, ConnectionRefusedError):
            # Listening before the server has imported anything: connections wait for it.
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
                names = {_PORT: port_file, _LOCK: lock_file, _LISTENER: listener.fileno()}
                with (folder / f"{name}.log").open("a") as log:
                    subprocess.Popen(
                        [sys.executable, *command],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        pass_fds=[listener.fileno()],
                        env=environment | {key: str(value) for key, value in names.items()},
                    )
            port_file.write_text(str(port))
            connection = socket.create_connection(("127.0.0.1", port))
    with connection:
        return connection.makefile("rw")


def serve(handle: Callable[[IO[str]], None]) -> None:
    """Fork a process that handles each connection; return after the end of the last one."""
    with socket.socket(fileno=int(os.environ[_LISTENER])) as listener:
        handlers: set[int] = set()
        while True:
            waits_s = 1.0 if handlers else 60.0
            if not select.select([listener], [], [], waits_s)[0]:
                handlers -= _ended(handlers)
                if not handlers and _closed(listener):
                    return
                continue
            connection, _ = listener.accept()
            handler = os.fork()
            if not handler:
                listener.close()
                with connection, connection.makefile("rw") as requests:
                    handle(requests)
                os._exit(0)
            connection.close()
            handlers.add(handler)


def _ended(handlers: set[int]) -> set[int]:
    """Return the handlers that have ended."""
    return {handler for handler in handlers if os.waitpid(handler, os.WNOHANG)[0]}


def _closed(listener: socket.socket) -> bool:
    """Remove the server's address if no connection waits for it; return whether none does."""
    with _locked(Path(os.environ[_LOCK])):
        waits = bool(select.select([listener], [], [], 0)[0])
        if not waits:
            Path(os.environ[_PORT]).unlink(missing_ok=True)
            listener.close()
    return not waits


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
