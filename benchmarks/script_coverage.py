"""Count the training scripts of public repositories whose command `rehearse` reads.

    python benchmarks/script_coverage.py [--checkout OWNER/NAME=DIR ...] [--draw N] [--verbose]

Repositories without a checkout are cloned, without history. A script counts as a training script
if a line that is no comment starts a Python file with "train" in its name. It is read if bash
expands a command with the number of layers; the estimate itself is not run. Rejections that name
the reason (another kind of model, values that the user has to set) are counted separately.
"""

import argparse
import random
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from time import monotonic

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.command_reader import read_command
from megatron_vshape.rehearsal.start_rules import check_model

REPOSITORIES = (
    "THUDM/slime",
    "radixark/miles",
    "LumiOpen/Megatron-LM-lumi",
    "swiss-ai/Megatron-LM",
)
_TRAINS = re.compile(r"(?m)^[^#\n]*[\w/}]*train\w*\.py\b")
_NAMED = re.compile(
    r"trains a [\w-]+ model|without Megatron|has variables without a value|which is empty"
)


def clone(repository: str, folder: Path) -> Path:
    """Clone the present files of a GitHub repository."""
    target = folder / repository.replace("/", "+")
    url = f"https://github.com/{repository}"
    subprocess.run(
        ["git", "clone", "--quiet", "--depth", "1", "--filter=blob:limit=1m", url, str(target)],
        check=True,
    )
    return target


def training_scripts(folder: Path) -> list[Path]:
    """Find the shell scripts of a checkout that start a training."""
    files = [file for ending in ("sh", "sbatch", "slurm") for file in folder.rglob(f"*.{ending}")]
    return sorted(file for file in files if _TRAINS.search(file.read_text(errors="replace")))


def result_of(script: Path) -> str:
    """Return "" for a script that is read, else the reason."""
    try:
        check_model(read_command([str(script)]))
    except ScheduleError as error:
        return str(error)
    return ""


def main() -> None:
    """Print a line per repository, the sum, and the scripts that are not read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkout", action="append", default=[], metavar="OWNER/NAME=DIR")
    parser.add_argument("--draw", type=int, default=0, metavar="N", help="print N scripts read")
    parser.add_argument("--verbose", action="store_true", help="print all reasons")
    options = parser.parse_args()
    checkouts = dict(text.split("=", 1) for text in options.checkout)
    read: list[Path] = []
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for repository in REPOSITORIES:
            path = Path(checkouts.get(repository) or clone(repository, Path(folder)))
            counts: Counter[str] = Counter()
            start = monotonic()
            for script in training_scripts(path):
                reason = result_of(script)
                kind = "named" if _NAMED.search(reason) else "not read" if reason else "read"
                counts[kind] += 1
                read += [] if reason else [script]
                if kind == "not read" or (reason and options.verbose):
                    print(f"  {script.relative_to(path)}: {reason}")
            seconds = monotonic() - start
            print(f"{repository}: {_format(counts)} ({seconds / counts.total():.1f} s each)")
            total += counts
        print(f"sum: {_format(total)}")
        for script in random.Random(73).sample(read, min(options.draw, len(read))):
            print(script)


def _format(counts: Counter[str]) -> str:
    return (
        f"{counts['read']} of {counts.total()} read ({counts['read'] / counts.total():.0%}), "
        f"{counts['named']} rejected with the reason, {counts['not read']} not read"
    )


if __name__ == "__main__":
    main()
