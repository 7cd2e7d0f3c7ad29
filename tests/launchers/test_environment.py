"""Whatever starts a rank, its environment is complete before torch is imported, which reads it.

The torch of these tests tells the environment that it finds, and ends the rank.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from megatron_vshape.environment import missing

ROOT = Path(__file__).parents[2]
TORCH = """
import json, os, sys

if sys.argv[0] != "-m":  # else Python only looks for torch.distributed.run in it
    print("ENVIRONMENT", json.dumps(dict(os.environ)), flush=True)
    sys.exit()
"""
TORCHRUN = """
import os, sys

script = next(at for at, each in enumerate(sys.argv) if at and each.endswith(".py"))
os.execv(sys.executable, [sys.executable, *sys.argv[script:]])
"""
SRUN = 'while [ "$1" != bash ]; do shift; done\nSLURM_NODEID=0 exec "$@"'
# What is installed is never touched: a train.sh that wants to install ends there.
PYTHON = '#!/bin/sh\n[ "$2" = pip ] && { test "$3" = --version; exit; }\nexec REAL "$@"'
SEGMENTS = "expandable_segments:True"
COMPLETE = {
    "PYTORCH_CUDA_ALLOC_CONF": SEGMENTS,
    "PYTORCH_ALLOC_CONF": SEGMENTS,
    "NCCL_GRAPH_REGISTER": "0",
    "CUDA_MODULE_LOADING": "EAGER",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
OF_THE_USER = {
    "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
    "CUDA_MODULE_LOADING": "LAZY",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}

Start = Callable[[Path, Mapping[str, str]], str]
"""Starts a rank with this environment and returns what it prints."""


def run(command: list[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    return done.stdout + done.stderr


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def script(folder: Path, environment: Mapping[str, str]) -> str:
    """scripts/pretrain_gpt.py, as any torchrun starts it."""
    return run([sys.executable, str(ROOT / "scripts" / "pretrain_gpt.py")], environment)


def launcher(folder: Path, environment: Mapping[str, str]) -> str:
    """A script of somebody else's."""
    theirs = write(folder / "theirs.py", "import torch")
    return run([sys.executable, "-m", "megatron_vshape.mcore.launch", str(theirs)], environment)


def registering(folder: Path, environment: Mapping[str, str]) -> str:
    """A script that registers by itself."""
    return run([sys.executable, "-c", "import megatron_vshape as m; m.register()"], environment)


def train(folder: Path, environment: Mapping[str, str]) -> str:
    """scripts/train.sh, in a checkout whose Python environment is made already."""
    files = ("pyproject.toml", "constraints.txt")
    for each in ("scripts", *files):
        (folder / each).symlink_to(ROOT / each)
    made = "".join((ROOT / each).read_text() for each in files)
    write(folder / ".venv" / ".installed-with-megatron-exact-search-draw", made)
    write(folder / ".venv/bin/python", PYTHON.replace("REAL", sys.executable))
    data = folder / "data"
    write(folder / "data.bin", "")
    write(folder / "data.idx", "")
    started = ["bash", str(folder / "scripts" / "train.sh"), "--data-path", str(data)]
    return run([*started, "--verbose"], environment)


def slurm(folder: Path, environment: Mapping[str, str]) -> str:
    """The batch script, whose srun starts one node's command here."""
    pytest.importorskip("pydantic")
    write(folder / "bin" / "srun", f"#!/bin/bash\n{SRUN}")
    write(folder / "bin" / "scontrol", "#!/bin/bash\necho here")
    ours = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{environment['PATH']}",
        "PYTHON": sys.executable,
        "RUN_DIR": str(folder),
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "here",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    batch = ROOT / "scripts" / "slurm" / "pretrain_gpt.sbatch"
    model = ROOT / "configs" / "models" / "gpt_9_6b.yaml"
    return run(["bash", str(batch), str(model)], {**environment, **ours})


def sweep(folder: Path, environment: Mapping[str, str]) -> str:
    """A sweep, whose script may be somebody else's that imports torch first."""
    pytest.importorskip("submitit")
    theirs = write(folder / "theirs.py", "import torch")
    cluster = "Cluster.model_construct(nodes=1, devices_per_node=1, backend='gloo')"
    job = f"Job([{str(theirs)!r}], Path({str(folder)!r}), Run(timeout_minutes=1), {cluster})"
    code = f"from pathlib import Path\nfrom megatron_vshape.sweep.worker import *\nrun_job({job})"
    said = run([sys.executable, "-c", code], environment)
    return said + (folder / "node0.log").read_text()


@pytest.fixture
def clean(tmp_path: Path) -> dict[str, str]:
    """Return an environment without any of the variables, with the torch that tells."""
    write(tmp_path / "fake/torch/__init__.py", TORCH)
    write(tmp_path / "fake/torch/distributed/__init__.py", "")
    write(tmp_path / "fake/torch/distributed/run.py", TORCHRUN)
    ours = COMPLETE.keys()
    kept = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith("SLURM")}
    return {**kept, "PYTHONPATH": f"{tmp_path / 'fake'}{os.pathsep}{ROOT}"}


def told(said: str) -> dict[str, str]:
    """Return what of a rank's environment matters here."""
    lines = [line for line in said.splitlines() if line.startswith("ENVIRONMENT")]
    assert len(lines) == 1, said
    found = json.loads(lines[0].partition(" ")[2])
    return {name: value for name, value in found.items() if name in COMPLETE}


@pytest.mark.parametrize("start", [script, launcher, registering, train, slurm, sweep])
class TestEveryLauncher:
    def test_completes_it(self, start: Start, tmp_path: Path, clean: dict[str, str]) -> None:
        assert told(start(tmp_path, clean)) == COMPLETE

    def test_leaves_the_users(self, start: Start, tmp_path: Path, clean: dict[str, str]) -> None:
        assert told(start(tmp_path, clean | OF_THE_USER)) == OF_THE_USER


@pytest.mark.parametrize("spelling", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["backend:cudaMallocAsync", ""])
def test_one_spelling_of_the_allocators_variable_speaks_for_both(spelling: str, value: str) -> None:
    assert missing({spelling: value}).keys() == {
        "CUDA_MODULE_LOADING",
        "CUDA_DEVICE_MAX_CONNECTIONS",
    }
