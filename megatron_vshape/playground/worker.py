"""The process that makes schedules: requests come on stdin, frames go to stdout.

Apart from the server, so that a long plan never holds the page up and can be ended by ending it.
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
"""Of a request on stdin, before its bytes."""

HEAD = struct.Struct("<cI")
"""Header of a frame: its type and the number of bytes."""

MOST_MEMORY = 6 * 2**30
"""Bytes of address space; a hostile file ends the request, not the machine."""

_QUIET = 0.1
"""Seconds between two progress frames of the same work without a point: a reader sees no more."""


class Frame(StrEnum):
    """What a frame holds."""

    PROGRESS = "P"  # JSON: what is known so far
    RESULT = "R"  # the answer, as picture.py has it
    ERROR = "E"  # JSON: the field to blame and a sentence


def frame(kind: Frame, body: bytes) -> bytes:
    """Return one frame."""
    return HEAD.pack(kind.encode(), len(body)) + body


def error_frame(field: str, text: str) -> bytes:
    """Return the frame that says what is wrong with which field."""
    return frame(Frame.ERROR, json.dumps({"field": field, "text": text}).encode())


def main() -> None:
    """Answer requests until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a stray print is no frame
    while head := sys.stdin.buffer.read(LENGTH.size):
        request = pickle.loads(sys.stdin.buffer.read(LENGTH.unpack(head)[0]))
        _write(answers, answer(request, answers))


def answer(request: Request, progress: BinaryIO) -> bytes:
    """Return the last frame of the answer; frames of progress are written on the way."""
    last, doing = 0.0, object()

    def report(known: dict[str, object]) -> None:
        nonlocal last, doing
        now = time.monotonic()
        if "point" in known or known["doing"] != doing or now - last > _QUIET:
            last, doing = now, known["doing"]
            _write(progress, frame(Frame.PROGRESS, json.dumps(known).encode()))

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
