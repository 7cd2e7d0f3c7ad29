"""The file that names the last checkpoint, made good where it was cut off while being written."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path

logger = logging.getLogger(__name__)

_FOLDER = re.compile(r"iter_([0-9]{7,})")


def repair_tracker(tracker: Path) -> None:
    """Name the newest whole checkpoint in a tracker that names none.

    Megatron empties the file before it writes the number. A full disk or a kill between the two
    leaves it empty, and the next run would end without training, with exit status 0. Where no
    checkpoint beside it is known to be whole, nothing is changed.
    """
    try:
        text = tracker.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return
    if text.isascii() and text.isdigit() or text == "release":
        return
    iteration = newest_whole(tracker.parent)
    if iteration is None:
        return
    # Ranks in containers may have one process id, so their rank tells their files apart.
    beside = tracker.with_name(f".{tracker.name}.{os.environ.get('RANK', '0')}.{os.getpid()}")
    try:
        beside.write_text(str(iteration), encoding="utf-8")
        beside.replace(tracker)
    except OSError as error:
        logger.warning("%s names no checkpoint and cannot be written: %s", tracker, error)
        return
    logger.warning(
        "%s contained %r, as after a full disk or a kill; it names iteration %d now, the newest "
        "complete checkpoint there",
        tracker,
        text[:40],
        iteration,
    )


def newest_whole(folder: Path) -> int | None:
    """Return the last iteration whose checkpoint was written to its end; None if there is none.

    What `--ckpt-format torch_dist` writes last of a checkpoint is its metadata.json.
    """
    found = [
        int(match[1])
        for each in folder.iterdir()
        if (match := _FOLDER.fullmatch(each.name)) and _is_whole(each)
    ]
    return max(found, default=None)


def _is_whole(checkpoint: Path) -> bool:
    try:
        return isinstance(json.loads((checkpoint / "metadata.json").read_bytes()), dict)
    except (OSError, ValueError):
        return False
