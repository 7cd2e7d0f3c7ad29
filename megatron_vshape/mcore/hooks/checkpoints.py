"""Repair of the file that names the latest checkpoint, if a write was interrupted."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path

logger = logging.getLogger(__name__)

_FOLDER = re.compile(r"iter_([0-9]{7,})")


def repair_tracker(tracker: Path) -> None:
    """Write the newest complete checkpoint to a tracker file without a valid entry.

    Megatron empties the file before it writes the number. If the disk is full or the process is
    killed in between, the file stays empty. The next run would then end without training, with exit
    status 0. If the folder has no checkpoint that is known to be complete, the file stays
    unchanged.
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
    # Ranks in separate containers may have equal process ids, so the name includes the rank.
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
    """Return the latest iteration with a complete checkpoint, or None.

    `--ckpt-format torch_dist` writes metadata.json last, so a valid metadata.json means complete.
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
