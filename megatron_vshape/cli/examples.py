"""megatron-vshape examples: the configurations and scripts that the documents name, written here.

An installed package has them inside; in a checkout they lie where the documents look for them.
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
    """Write the files, name each, and return 0; a file that has been changed stays as it is."""
    if not FOLDER.is_dir():
        raise ScheduleError(
            f"the examples of a checkout are in {FOLDER.parents[1]}: configs/ and scripts/; "
            "start the documents' commands there"
        )
    files = [each for each in sorted(FOLDER.rglob("*")) if each.is_file()]
    for source in files:
        if source.parent.name == "__pycache__":  # pip compiles what it installs
            continue
        target = options.into / source.relative_to(FOLDER)
        print(f"{target}: {_write(source, target)}")
    return 0


def _write(source: Path, target: Path) -> str:
    """Copy a file unless there is another, and return what was done."""
    try:
        if target.exists():
            same = target.read_bytes() == source.read_bytes()
            return "there already" if same else "left as it is here; it differs from the package's"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    except OSError as error:
        raise ScheduleError(f"{target} cannot be written: {error.strerror or error}") from error
    return "written"
