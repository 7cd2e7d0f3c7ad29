"""Cache of reports of dry runs in the user's folder, by a hash of programs and flags."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_vshape.rehearsal import sources
from megatron_vshape.rehearsal.command import Command, Sizes
from megatron_vshape.rehearsal.dry_run_flags import environment_of
from megatron_vshape.rehearsal.rank_report import RankReport
from megatron_vshape.rehearsal.ranks import DryRunConfig

_PACKAGE_FILES = "core/**/*.py", "mcore/**/*.py", "rehearsal/*.py", "runtime/*.py"
_MEGATRON_FILES = (
    "megatron/core/**/*.py",
    "megatron/training/**/*.py",
    "transformer_engine/pytorch/**/*.py",
)


def key_of(command: Command, sizes: Sizes, config: DryRunConfig, stamp: str) -> str:
    """Return the key of a dry run, a hash of everything that affects the result."""
    key_parts = (
        stamp,
        config.flags(command),
        sizes.world,
        config.gpu.capability,
        config.gpu.multiprocessors,
        config.imbalance,
        config.lora and asdict(config.lora),
        config.reference,
        environment_of(command),
        str(config.script),
    )
    return hashlib.sha256(json.dumps(key_parts, sort_keys=True).encode()).hexdigest()


def hash_of_programs(config: DryRunConfig) -> str:
    """Return a hash of the programs: this package, Megatron and Transformer Engine."""
    folders = [Path(__file__).parents[1], config.programs.megatron, config.programs.te]
    if config.programs.megatron is None:
        spec = importlib.util.find_spec("megatron.core")
        folders.append(Path(spec.origin).parents[2] if spec and spec.origin else None)
    digest = hashlib.sha256(sys.version.encode())
    for folder, patterns in zip(folders, (_PACKAGE_FILES, *[_MEGATRON_FILES] * 3), strict=False):
        for pattern in patterns if folder is not None else ():
            for path in sorted(folder.glob(pattern)) if folder is not None else ():
                stat = path.stat()
                digest.update(f"{path} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()


def _folder() -> Path:
    return sources.cache() / "counted"


def read(key: str) -> list[RankReport] | None:
    """Read the reports of a key; None if there are none."""
    try:
        plain = json.loads((_folder() / f"{key}.json").read_text())
    except (OSError, ValueError):
        return None
    return [RankReport.from_json(report) for report in plain]


def write(key: str, ranks: Sequence[RankReport]) -> None:
    """Write reports atomically; errors are ignored because the cache is optional."""
    with contextlib.suppress(OSError):
        _folder().mkdir(parents=True, exist_ok=True)
        draft = _folder() / f"{key}.{os.getpid()}"
        draft.write_text(json.dumps([report.to_json() for report in ranks]))
        draft.replace(_folder() / f"{key}.json")
