"""megatron-vshape examples: copy the configurations and scripts of the documentation.

An installed package contains them; a checkout has them in the directories that the docs name.
"""

import argparse
import shutil
from pathlib import Path

from megatron_vshape.core.model.kinds import ScheduleError

FOLDER = Path(__file__).parents[1] / "examples"
"""Folder that setup.py adds to a wheel; a checkout does not have it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--into",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="Target directory (default: the current directory)",
    )


def run(options: argparse.Namespace) -> int:
    """Copy the files, print each name, and return 0; a modified file is not replaced."""
    if not FOLDER.is_dir():
        raise ScheduleError(
            f"the examples of a checkout are in {FOLDER.parents[1]}: configs/ and scripts/; "
            "start the documents' commands there"
        )
    files = [path for path in sorted(FOLDER.rglob("*")) if path.is_file()]
    for source in files:
        if source.parent.name == "__pycache__":  # pip compiles what it installs
            continue
        target = options.into / source.relative_to(FOLDER)
        print(f"{target}: {_write(source, target)}")
    return 0


def _write(source: Path, target: Path) -> str:
    """Copy a file unless a different one exists, and return the action."""
    try:
        if target.exists():
            is_same = target.read_bytes() == source.read_bytes()
            return (
                "there already" if is_same else "left as it is here; it differs from the package's"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    except OSError as error:
        raise ScheduleError(f"{target} cannot be written: {error.strerror or error}") from error
    return "written"
