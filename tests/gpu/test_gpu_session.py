"""scripts/gpu_session.sh: its commands fit the time limit, and failed commands are named."""

import os
import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_session.sh"
COMMANDS = [
    "graph-weights",
    "graph-ranks",
    "splitting",
    "graphs",
    "trainer",
    "allocator",
    "nccl",
    "warmup",
    "encoder",
    "offload",
    "sizes",
]
# A probe succeeds with the setting WORKS; a measurement prints its setting.
PYTHON = """#!/bin/bash
setting=${PYTORCH_CUDA_ALLOC_CONF-unset},${PYTORCH_ALLOC_CONF-unset}
if [ "$1" = - ]; then
    echo "$setting" >> "$PROBED"
    [ "$setting" = "$WORKS" ]
else
    echo "$setting measures $*"
    [ "$1" != "$FAILS" ]
fi
"""


def run_session(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    spellings = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    base_environment = {name: value for name, value in os.environ.items() if name not in spellings}
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=base_environment | environment
    )


@pytest.fixture
def fake(tmp_path: Path) -> dict[str, str]:
    """Return an environment whose interpreter is PYTHON."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    probed = tmp_path / "probed"
    probed.touch()
    return {"PYTHON": str(python), "PROBED": str(probed), "WORKS": "unset,unset", "FAILS": ""}


def test_every_command_ends_within_nine_minutes() -> None:
    source = SCRIPT.read_text()
    kill_s, probe_s = (int(re.search(rf"{text}(\d+)", source)[1]) for text in ("after=", "out "))
    listing = re.split(r"^(\S+): .*\n", run_session("--list").stdout, flags=re.MULTILINE)[1:]
    assert listing[::2] == COMMANDS
    for parts in listing[1::2]:
        limits = [int(limit) for limit in re.findall(r"at most (\d+) s: python \w+/", parts)]
        assert limits
        assert sum(limits) + len(limits) * kill_s + 2 * probe_s <= 540


def test_command_writes_two_files(tmp_path: Path, fake: dict[str, str]) -> None:
    folder = tmp_path / "found"
    run = run_session(str(folder), "splitting", **fake)
    assert run.returncode == 0, run.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["splitting.log", "splitting.md"]
    measured = re.findall(r"measures scripts/(.*)", (folder / "splitting.md").read_text())
    assert measured == ["bench_gpu.py numerics", "bench_gpu.py split --hidden 4096"]


def test_failed_command_is_named(tmp_path: Path, fake: dict[str, str]) -> None:
    fake["FAILS"] = "benchmarks/bench_nccl.py"
    run = run_session(str(tmp_path), "nccl", "sizes", **fake)
    assert run.returncode == 1
    assert "gpu_session.sh: failed: nccl, bench_nccl.py --ranks: status 1;" in run.stderr
    assert "measures scripts/bench_gpu.py split" in run.stdout  # the others are run
