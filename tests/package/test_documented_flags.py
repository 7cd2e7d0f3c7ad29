"""Every flag in README.md and docs/ exists: in Megatron, in this package or in another program."""

import re
from argparse import ArgumentParser
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from megatron_vshape.cli.main import COMMANDS
from megatron_vshape.mcore.options import OPTIONS
from megatron_vshape.mcore.refusals import REFUSALS
from megatron_vshape.mcore.setup.features import features
from megatron_vshape.mcore.setup.judgements import judgements

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FLAG = re.compile(r"(?<![\w-])--(?![\w-]*\*)[a-z][\w-]*\w")  # not the pattern `--recompute-*`

OTHER_PROGRAMS = {
    "--adapters": "ms-swift",
    "--address": "ray",
    "--colocate": "slime",
    "--config": "torchtitan",
    "--dist_ckpt_optim_fully_reshardable": "ms-swift",
    "--distributed": "NeMo Automodel",
    "--max-tokens-per-gpu": "slime",
    "--module": "torchtitan",
    "--nodes": "sbatch",
    "--nproc-per-node": "torchrun",
    "--parallelism": "torchtitan",
    "--runtime-env-json": "ray",
    "--step_scheduler": "NeMo Automodel",
    "--training": "torchtitan",
    "--use-dynamic-batch-size": "slime",
}


def flags_of_commands() -> set[str]:
    """Return the options of the command line."""
    flags = {"--help", "--version"}
    for name in COMMANDS:
        parser = ArgumentParser()
        import_module(f"megatron_vshape.cli.{name}").add_arguments(parser)
        flags |= parser._option_string_actions.keys()
    return flags


def flags_of_scripts() -> set[str]:
    """Return the flags that programs of the repository define or pass on."""
    paths = (path for name in ("scripts", "benchmarks") for path in (ROOT / name).rglob("*"))
    files = [path for path in paths if path.suffix in (".py", ".sh")]
    return {flag for path in files for flag in FLAG.findall(path.read_text(encoding="utf-8"))}


def flags_of_megatron() -> set[str]:
    """Return the flags of Megatron's parser, and of arguments that other releases have."""
    arguments = pytest.importorskip("megatron.training.arguments")
    parser = arguments.add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    names = judgements().keys() - {action.dest for action in parser._actions}
    refusals = [refusal for part in REFUSALS.values() for refusal in part]
    refusals += [refusal for feature in features() for refusal in feature.refusals]
    return {
        *parser._option_string_actions,
        *(f"--{name.replace('_', '-')}" for name in names),
        *(flag for refusal in refusals for flag in FLAG.findall(refusal.option)),
    }


@cache
def existing_flags() -> set[str]:
    return {
        *flags_of_megatron(),
        *flags_of_commands(),
        *flags_of_scripts(),
        *(option.flag for option in OPTIONS.values()),
        *OTHER_PROGRAMS,
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_in_the_documentation_exist(page: Path) -> None:
    named = set(FLAG.findall(page.read_text(encoding="utf-8")))
    assert named - existing_flags() == set()
