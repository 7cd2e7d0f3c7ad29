"""Estimate several parallel configurations at once, with results cached in the user's folder."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal import sources
from megatron_vshape.rehearsal.flags import Command, environment_of
from megatron_vshape.rehearsal.rank_report import FailedRank, RankReport
from megatron_vshape.rehearsal.ranks import DryRunConfig, rehearse_all
from megatron_vshape.rehearsal.shapes import PIPELINE, counted_ranks, counting, least_of

_OURS = "core/**/*.py", "mcore/**/*.py", "rehearsal/*.py", "runtime/*.py"
_THEIRS = "megatron/core/**/*.py", "megatron/training/**/*.py", "transformer_engine/pytorch/**/*.py"

Ranks = Sequence[RankReport]


def count_all(
    asked: DryRunConfig, commands: Iterable[Command], tell: Callable[[int, int], None]
) -> list[Ranks | str]:
    """Return, per command, the results of the ranks of its smallest form, or an error message.

    The callback receives the numbers of finished and of all estimates. It is not called if all
    results are cached.

    Raises:
        ScheduleError: Nothing can be estimated here.
    """
    stamp, keys = _stamp(asked), []
    found: dict[str, Ranks | str] = {}
    wanted: dict[str, Command] = {}
    for command in commands:
        try:
            key = _key(command, asked, stamp)
        except ScheduleError as error:
            key = str(error)
            found[key] = key
        keys.append(key)
        known = _cached(key) if key not in found else None
        if known is not None:
            found[key] = known
        elif key not in found:
            wanted[key] = command
    if wanted:
        found |= _counted(asked, wanted, tell)
    return [found[key] for key in keys]


def _counted(
    asked: DryRunConfig, wanted: Mapping[str, Command], tell: Callable[[int, int], None]
) -> dict[str, Ranks | str]:
    least = {key: least_of(command) for key, command in wanted.items()}
    ranks: dict[str, list[RankReport]] = {key: [] for key in wanted}
    made: dict[str, Ranks | str] = {}
    with counting(PIPELINE) as put:
        jobs = [
            asked.job(put(few, sizes), sizes, stage, key)
            for key, (few, sizes) in least.items()
            for stage in counted_ranks(few)
        ]
        for done, each in enumerate(rehearse_all(asked.programs, jobs), start=1):
            tell(done, len(jobs))
            if isinstance(each, FailedRank):
                made.setdefault(each.name, each.error)
            else:
                ranks[each.name].append(each.without_timeline())
    for key in wanted.keys() - made.keys():
        made[key] = own = sorted(ranks[key], key=lambda each: each.stage)
        _keep(key, own)
    return made


def _key(command: Command, asked: DryRunConfig, stamp: str) -> str:
    """Return the cache key, a hash of everything that affects the result."""
    few, sizes = least_of(command)
    what = (
        stamp,
        asked.flags(few),
        sizes.world,
        asked.gpu.capability,
        asked.gpu.multiprocessors,
        asked.imbalance,
        environment_of(command),
        str(asked.script),
    )
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _stamp(asked: DryRunConfig) -> str:
    """Return a hash of the programs: this package, Megatron and Transformer Engine."""
    folders = [Path(__file__).parents[1], asked.programs.megatron, asked.programs.te]
    if asked.programs.megatron is None:
        spec = importlib.util.find_spec("megatron.core")
        folders.append(Path(spec.origin).parents[2] if spec and spec.origin else None)
    told = hashlib.sha256(sys.version.encode())
    for folder, patterns in zip(folders, (_OURS, *[_THEIRS] * 3), strict=False):
        for pattern in patterns if folder is not None else ():
            for path in sorted(folder.glob(pattern)) if folder is not None else ():
                stat = path.stat()
                told.update(f"{path} {stat.st_size} {stat.st_mtime_ns}".encode())
    return told.hexdigest()


def _folder() -> Path:
    return sources.cache() / "counted"


def _cached(key: str) -> Ranks | None:
    try:
        plain = json.loads((_folder() / f"{key}.json").read_text())
    except (OSError, ValueError):
        return None
    return [RankReport.from_json(each) for each in plain]


def _keep(key: str, ranks: Ranks) -> None:
    """Write a result atomically; errors are ignored because the cache is optional."""
    with contextlib.suppress(OSError):
        _folder().mkdir(parents=True, exist_ok=True)
        draft = _folder() / f"{key}.{os.getpid()}"
        draft.write_text(json.dumps([each.to_json() for each in ranks]))
        draft.replace(_folder() / f"{key}.json")
