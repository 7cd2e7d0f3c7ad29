"""The form of an answer on its way: frames of a letter, a length and so many bytes."""

import json
import struct
from enum import StrEnum

HEAD = struct.Struct("<cI")


class Frame(StrEnum):
    """What a frame holds."""

    PROGRESS = "P"  # JSON: what is known so far
    RESULT = "R"  # the answer, as payload.py has it
    ERROR = "E"  # JSON: the field to blame and a sentence


def frame(kind: Frame, body: bytes) -> bytes:
    """Return one frame."""
    return HEAD.pack(kind.encode(), len(body)) + body


def error_frame(field: str, text: str) -> bytes:
    """Return the frame that says what is wrong with which field."""
    return frame(Frame.ERROR, json.dumps({"field": field, "text": text}).encode())
