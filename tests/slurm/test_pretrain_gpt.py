"""The batch script for the paper's models: its commands, its flags, and how it is preempted."""

import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("pydantic")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "slurm" / "pretrain_gpt.sbatch"
# Model, nodes of eight GPUs, layers: as in the paper.
MODELS = {"9_6b": (2, 30), "21b": (3, 46), "38_5b": (4, 62), "98_5b": (5, 78)}
ENDS = [
    pytest.param(name, marks=[pytest.mark.slow] * (name in ("21b", "38_5b"))) for name in MODELS
]
"""The smallest and the largest; the others nightly."""


def model(name: str) -> str:
    return str(ROOT / "configs" / "models" / f"gpt_{name}.yaml")


def environment(**over: str) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return plain | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)} | over


def dry_run(name: str, *flags: str, **over: str) -> list[list[str]]:
    """Return the commands of a dry run as lists of words."""
    process = subprocess.run(
        ["bash", str(SCRIPT), model(name), *flags],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(DRY_RUN="1", NODES=str(MODELS[name][0]), **over),
    )
    assert process.returncode == 0, process.stderr
    # $'...' is syntax of bash, not of shlex; here it always means a newline.
    text = re.sub(r"\$'(.*?)(?<!\\)'", lambda match: shlex.quote(match[1]), process.stdout)
    return [shlex.split(line) for line in text.splitlines() if not line.startswith("#")]


def test_bash_and_shellcheck_accept_the_script() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    checked = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True)
    assert checked.stdout == ""


@pytest.mark.parametrize("name", ENDS)
def test_dry_run_prints_every_command(name: str) -> None:
    nodes, layers = MODELS[name]
    folder, step, cancel, requeue = dry_run(name, "--seq-length", "2048")
    assert folder == ["mkdir", "-p", f"runs/gpt_{name}"]
    assert step[:3] == ["srun", "--nodes", str(nodes)]
    assert {"--nproc-per-node", "--master-addr", "scripts/pretrain_gpt.py"} <= set(step)
    values = dict(zip(step, step[1:], strict=False))
    assert values["--num-layers"] == str(layers)
    assert values["--pipeline-model-parallel-size"] == str(8 * nodes)
    assert values["--save"] == values["--load"] == f"runs/gpt_{name}/checkpoints"
    assert step[-2:] == ["--seq-length", "2048"]  # arguments of the user come last
    assert cancel == ["scancel", "--signal=USR1", "JOB.0"]
    assert requeue == ["scontrol", "requeue", "JOB"]


def test_user_data_replaces_mock_data() -> None:
    step = dry_run("9_6b", "--data-path", "x")[1]
    assert "--mock-data" not in step
    assert "NullTokenizer" not in step


@pytest.mark.parametrize("package", [None, "apex", "transformer_engine"])
def test_distributed_optimizer_requires_a_fused_adam(tmp_path: Path, package: str | None) -> None:
    if package is None and any(map(importlib.util.find_spec, ("apex", "transformer_engine"))):
        pytest.skip("apex or transformer_engine is installed")
    (tmp_path / f"{package}.py").touch()
    step = dry_run("9_6b", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")[1]
    assert ("--use-distributed-optimizer" in step) == (package is not None)


@pytest.mark.parametrize("name", ENDS)
def test_megatron_and_the_schedule_accept_the_flags(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("megatron.training")
    import megatron.training.arguments as arguments

    import megatron_vshape
    from megatron_vshape.mcore.setup import configure

    step = dry_run(name, "--transformer-impl", "local")[1]
    monkeypatch.setattr(sys, "argv", step[step.index("scripts/pretrain_gpt.py") :])
    megatron_vshape.register()
    try:
        args = arguments.parse_args()
    finally:
        megatron_vshape.unregister()
    pipeline = configure.pipeline_from_args(args)
    assert sum(pipeline.stage_map.layers) == MODELS[name][1]
    # Two layers less than stages: embedding and output layer are to weigh as one layer each.
    assert max(pipeline.stage_map.layers) == 1


FAKES = {
    # Starts the node's command where USR1 can reach it, as a job step.
    "srun": 'echo $$ > step.pid\nwhile [ "$1" != bash ]; do shift; done\n'
    'SLURM_NODEID=0 exec setsid "$@"',
    "scontrol": 'case "$1 $2" in\n"show hostnames") echo node1;;\n'
    '"show job") echo "JobId=42 JobState=STATE Reason=None";;\n*) echo "$@" >> scontrol.log\nesac',
    # USR1 to all processes of the step, torchrun and ranks among them.
    "scancel": 'echo "$@" >> scancel.log\npkill -USR1 -g "$(cat step.pid)"',
    # torchrun, which starts a rank in a separate session; its other calls are calls of Python.
    "python": (
        'if [ "$1" != -m ]; then exec REAL "$@"; fi\n'
        'echo "$@" > torchrun.log\nsetsid bash -c \''
        'trap "echo saved > saved; exit 0" TERM; touch started; while :; do sleep 0.1; done'
        "' &\nwait $!"
    ),
}


@pytest.mark.parametrize(
    ("number", "state"),
    [
        (signal.SIGUSR1, "RUNNING"),
        (signal.SIGTERM, "RUNNING"),
        (signal.SIGTERM, "COMPLETING"),
        (signal.SIGTERM, "CANCELLED"),
    ],
)
def test_preempted_job_saves_and_requeues(
    tmp_path: Path, number: signal.Signals, state: str
) -> None:
    """Cancelled, it saves and does not."""
    if shutil.which("pkill") is None or shutil.which("setsid") is None:
        pytest.skip("pkill and setsid are not installed")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in FAKES.items():
        text = text.replace("REAL", sys.executable).replace("STATE", state)
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    job = subprocess.Popen(
        ["bash", str(SCRIPT), model("9_6b")],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(
            PATH=f"{tools}{os.pathsep}{os.environ['PATH']}",
            PYTHON=str(tools / "python"),
            SLURM_JOB_ID="42",
            SLURM_NNODES="1",
            SLURM_JOB_NODELIST="node1",
            SLURM_SUBMIT_DIR=str(tmp_path),
        ),
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.05)
    job.send_signal(number)
    output, _ = job.communicate(timeout=60)
    assert (tmp_path / "saved").exists(), output
    assert (tmp_path / "scancel.log").read_text() == "--signal=USR1 42.0\n"
    queued = tmp_path / "scontrol.log"
    if state != "RUNNING":
        assert not queued.exists()
    else:
        assert queued.read_text() == "requeue 42\n"
    assert job.returncode == 0, output
    torchrun = (tmp_path / "torchrun.log").read_text()
    assert torchrun.startswith("-m torch.distributed.run --node-rank 0 --nnodes 1 ")
    assert "--master-addr node1" in torchrun
