"""Count the training scripts of public repositories whose command `rehearse` reads.

    python benchmarks/script_coverage.py [--checkout OWNER/NAME=DIR ...] [--only OWNER/NAME ...]
        [--draw N] [--verbose]

Repositories without a checkout are cloned, without history. A script counts as a training script
if a line that is no comment starts a Python file with "train" in its name; those of frameworks, if
they have the text in `REPOSITORIES`. It is read if bash or the reader of the framework's files
returns a command with the number of layers; the estimate itself is not run. If a framework's script
names a model, the sizes must be in a preset, or in the cache of Hugging Face: nothing is
downloaded. Rejections that name the reason (another kind of model, training without Megatron, an
unknown model, values that the user has to set) are counted separately.
"""

import argparse
import io
import logging
import os
import random
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import chdir, redirect_stdout
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from megatron_vshape.cli.dry_run import command_with_model
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.start_rules import check_model
from megatron_vshape.tuning.configurations import SweepError


class Scripts(NamedTuple):
    """The training scripts of a repository: files with this text and one of these endings."""

    text: re.Pattern[str]
    endings: Sequence[str]


YAML = Scripts(re.compile("megatron"), ["yaml"])
MEGATRON = Scripts(re.compile(r"(?m)^[^#\n]*[\w/}]*train\w*\.py\b"), ("sh", "sbatch", "slurm"))
REPOSITORIES = {
    "THUDM/slime": MEGATRON,
    "radixark/miles": MEGATRON,
    "LumiOpen/Megatron-LM-lumi": MEGATRON,
    "swiss-ai/Megatron-LM": MEGATRON,
    "modelscope/ms-swift": Scripts(re.compile("megatron (sft|pt|rlhf)"), ["sh"]),
    "volcengine/verl": Scripts(re.compile("megatron"), ["sh"]),
    "NVIDIA-NeMo/RL": Scripts(re.compile("megatron_cfg"), ["yaml"]),
    "alibaba/ROLL": Scripts(re.compile("megatron_train"), ["yaml"]),
    "AMD-AGI/Primus": Scripts(re.compile("framework: megatron"), ["yaml"]),
    "Ascend/MindSpeed-LLM": MEGATRON,
    "Ascend/MindSpeed-RL": Scripts(re.compile("megatron_training:"), ["yaml"]),
    "RLinf/RLinf": YAML,
    "inclusionAI/AReaL": YAML,
    "NVIDIA-NeMo/Nemotron": YAML,
    "AI-Hypercomputer/gpu-recipes": Scripts(re.compile("scripts/performance/"), ["sh"]),
    "flagos-ai/FlagScale": Scripts(re.compile("backend: megatron"), ["yaml"]),
    "deepspeedai/Megatron-DeepSpeed": MEGATRON,
    "bigscience-workshop/bigscience": MEGATRON,
}
_REASONS = {
    "another kind of model": (
        r"trains? (a [\w-]+|no language) model|only language models|only LoRA is estimated"
    ),
    "without Megatron": "without Megatron|[oO]nly Megatron is estimated",
    "unknown model": r"is no preset|and no preset|so the model of .* is unknown",
    "unsupported format": "is a file of|similar overrides|only Megatron-Bridge can read",
    "unsupported setting": "cannot be estimated|builds other layers",
    "values to set": r"variables without a value|which is empty|positive number\. If a variable",
}
"""Reasons by texts of their messages."""


def clone(repository: str, folder: Path) -> Path:
    """Clone the present files of a GitHub repository."""
    target = folder / repository.replace("/", "+")
    url = f"https://github.com/{repository}"
    subprocess.run(
        ["git", "clone", "--quiet", "--depth", "1", "--filter=blob:limit=1m", url, str(target)],
        check=True,
    )
    return target


def training_scripts(folder: Path, scripts: Scripts) -> list[Path]:
    """Find the scripts or configurations of a checkout that start a training."""
    files = [file for ending in scripts.endings for file in folder.rglob(f"*.{ending}")]
    return sorted(file for file in files if scripts.text.search(file.read_text(errors="replace")))


def result_of(script: Path) -> str:
    """Return "" for a script that is read, else the reason."""
    try:
        with redirect_stdout(io.StringIO()):  # flags of the model
            check_model(command_with_model(argparse.Namespace(model=None, command=[str(script)])))
    except (ScheduleError, SweepError) as error:
        return str(error)
    return ""


def kind_of(reason: str) -> str:
    """Return the kind of a result: read, one of the named reasons, or not read."""
    kinds = (kind for kind, text in _REASONS.items() if re.search(text, reason))
    return next(kinds, "not read") if reason else "read"


def main() -> None:
    """Print a line per repository, the sum, and the scripts that are not read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkout", action="append", default=[], metavar="OWNER/NAME=DIR")
    parser.add_argument("--only", nargs="+", choices=REPOSITORIES, metavar="OWNER/NAME")
    parser.add_argument("--draw", type=int, default=0, metavar="N", help="print N scripts read")
    parser.add_argument("--verbose", action="store_true", help="print all reasons")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable(logging.WARNING)  # settings without effect on memory and time
    checkouts = dict(text.split("=", 1) for text in options.checkout)
    read: list[Path] = []
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for repository in options.only or REPOSITORIES:
            path = Path(checkouts.get(repository) or clone(repository, Path(folder))).resolve()
            counts: Counter[str] = Counter()
            start = monotonic()
            for script in training_scripts(path, REPOSITORIES[repository]):
                with chdir(path):  # where scripts of ms-swift find their YAML files
                    reason = result_of(script)
                kind = kind_of(reason)
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
    reasons = ", ".join(f"{counts[kind]} {kind}" for kind in _REASONS if counts[kind])
    return (
        f"{counts['read']} of {counts.total()} read ({counts['read'] / counts.total():.0%}), "
        f"{sum(counts[kind] for kind in _REASONS)} rejected with the reason"
        f"{f' ({reasons})' if reasons else ''}, {counts['not read']} not read"
    )


if __name__ == "__main__":
    main()
