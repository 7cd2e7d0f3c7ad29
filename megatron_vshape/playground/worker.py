"""Worker process of the playground: reads requests from stdin, writes frames to stdout.

Separate from the server, so that a long plan does not block the web UI and can be killed.
"""

import json
import logging
import os
import pickle
import resource
import struct
import sys
import time
from enum import StrEnum
from typing import BinaryIO

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.playground.answer import make_answer
from megatron_vshape.playground.request import FieldError, Request

logger = logging.getLogger(__name__)

LENGTH = struct.Struct("<I")
"""Length of a request on stdin, before its bytes."""

HEAD = struct.Struct("<cI")
"""Header of a frame: its type and the number of bytes."""

_MAX_MEMORY = 6 * 2**30
"""Bytes of address space; a hostile file ends its request, not the machine."""

_QUIET = 0.1
"""Minimum seconds between two progress frames of the same phase."""


class Frame(StrEnum):
    """Type of a frame's content."""

    PROGRESS = "P"  # JSON: progress
    RESULT = "R"  # the answer, encoded by picture.py
    ERROR = "E"  # JSON: the field and the error


def frame(kind: Frame, body: bytes) -> bytes:
    """Encode one frame."""
    return HEAD.pack(kind.encode(), len(body)) + body


def error_frame(field: str, text: str) -> bytes:
    """Encode an error of a field."""
    return frame(Frame.ERROR, json.dumps({"field": field, "text": text}).encode())


def main() -> None:
    """Answer requests until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # redirects stray prints away from the frames
    while head := sys.stdin.buffer.read(LENGTH.size):
        request = pickle.loads(sys.stdin.buffer.read(LENGTH.unpack(head)[0]))
        _write(answers, answer(request, answers))


def answer(request: Request, progress: BinaryIO) -> bytes:
    """Return the last frame of the answer, after writing progress frames."""
    last_write, phase = 0.0, object()

    def report(state: dict[str, object]) -> None:
        nonlocal last_write, phase
        now = time.monotonic()
        if state["doing"] != phase or now - last_write > _QUIET:
            last_write, phase = now, state["doing"]
            _write(progress, frame(Frame.PROGRESS, json.dumps(state).encode()))

    try:
        return frame(Frame.RESULT, make_answer(request, report))
    except FieldError as error:
        return error_frame(error.field, str(error))
    except ScheduleError as error:
        return error_frame("schedule", str(error))
    except (MemoryError, RecursionError):
        return error_frame("request", "this is too large for the playground's memory")
    except Exception:
        logger.exception("a request failed")
        return error_frame("request", "this failed for a reason that the server's log has")


def _write(stream: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[stream.write(view) :]


if __name__ == "__main__":
    main()
