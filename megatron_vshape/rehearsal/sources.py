"""Find the programs of a dry run: Megatron, Transformer Engine's Python, the script."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from megatron_vshape.core.model.kinds import ScheduleError

VERSION = "2.20.2"
SHA256 = "7dcfad943a1a55b2612db9a0e43697fe98c70f4c42ec391ba3a0f872f6ce2094"
"""Version and hash of the Transformer Engine wheel that `fetch` downloads."""

OWN = ("pretrain_gpt.py", "pretrain_hybrid.py", "pretrain_mamba.py")
"""Scripts of Megatron-LM that this package's own, the first, can replace."""

VARIABLE = "TRANSFORMER_ENGINE_PYTHON"
FETCH = "megatron-vshape rehearse --fetch-te"


def cache() -> Path:
    """Return the directory of a downloaded Transformer Engine."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "megatron_vshape", f"transformer_engine-{VERSION}")


def fetch() -> Path:
    """Download Transformer Engine's Python with pip, verify its hash, unpack it; return the path.

    Raises:
        ScheduleError: The download failed, or the hash differs.
    """
    target = cache()
    if (target / "transformer_engine").is_dir():
        return target
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "requirements.txt")
        wanted.write_text(f"transformer-engine=={VERSION} --hash=sha256:{SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--require-hashes", "--only-binary=:all:", "-r", str(wanted), "-d", folder]
        run = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if run.returncode or not wheels:
            lines = [line for line in run.stderr.splitlines() if "ERROR" in line]
            raise ScheduleError(
                f"transformer-engine {VERSION} could not be fetched by pip download: "
                f"{(lines or ['no reason given'])[0].removeprefix('ERROR: ')}. With a checkout or "
                "an unpacked wheel of it at hand, give that: --te DIRECTORY"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=target.parent) as fresh,
            zipfile.ZipFile(wheels[0]) as wheel,
        ):
            wheel.extractall(Path(fresh, "te"))
            Path(fresh, "te").rename(target)
    return target


def find_te(given: Path | None) -> Path:
    """Return the directory of Transformer Engine's Python.

    Raises:
        ScheduleError: There is none.
    """
    named = os.environ.get(VARIABLE, "").split(os.pathsep)[0]
    spec = importlib.util.find_spec("transformer_engine")
    installed = spec.origin if spec is not None else None
    candidates = [given, Path(named) if named else None]
    candidates += [Path(installed).parents[1] if installed else None, cache()]
    for each in candidates:
        if each is not None and (each / "transformer_engine" / "pytorch").is_dir():
            return each
        if each is not None and each is given:
            raise ScheduleError(f"--te {given} has no folder transformer_engine/pytorch")
    raise ScheduleError(
        "Transformer Engine's own Python runs in a rehearsal, and there is none here: "
        f"`{FETCH}` fetches it ({VERSION}, 1.2 MB), or name a checkout of it: --te DIRECTORY"
    )


def find_script(script: str, megatron: Path | None) -> Path:
    """Return the path of the training script: as given, from Megatron-LM, or this package's own.

    Raises:
        ScheduleError: The script does not exist.
    """
    given = Path(script)
    if megatron is not None and (megatron / given.name).is_file() and not given.is_file():
        return (megatron / given.name).resolve()
    if given.is_file():
        return given.resolve()
    package = Path(__file__).parents[1]
    for folder in (package / "examples" / "scripts", package.parent / "scripts"):
        if given.name in OWN and (folder / OWN[0]).is_file():
            return folder / OWN[0]
    raise ScheduleError(
        f"there is no {script} here: give its path, or a checkout of Megatron-LM that has it "
        "(--megatron DIRECTORY)"
    )


def find_megatron(given: Path | None, script: str) -> Path | None:
    """Return the checkout to import Megatron from, or None for the installed megatron-core.

    Raises:
        ScheduleError: There is neither.
    """
    if given is not None:
        if not (given / "megatron" / "core").is_dir():
            raise ScheduleError(
                f"--megatron {given} is no checkout of Megatron-LM: no megatron/core"
            )
        return given.resolve()
    beside = Path(script).resolve().parent
    if Path(script).is_file() and (beside / "megatron" / "core").is_dir():
        return beside
    try:
        found = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ScheduleError(
            "Megatron is not installed: pip install 'megatron-vshape[megatron]', or name a "
            "checkout of Megatron-LM: --megatron DIRECTORY"
        )
    return None
