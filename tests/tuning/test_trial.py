"""Trials with a trainer that only prints, and with Megatron's on CPU ranks."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import trials_table
from tuning.counts import Fake
from tuning.samples import FAKE, ROOT

from megatron_vshape import Schedule, ScheduleError
from megatron_vshape.cli.main import main
from megatron_vshape.tuning import training_run
from megatron_vshape.tuning.trial import Launch, Variant, with_schedule

SCRIPT = str(FAKE / "pretrain_gpt.py")
MODEL = """--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --vocab-size 1023 --tokenizer-type NullTokenizer
    --micro-batch-size 1 --global-batch-size 8 --pipeline-model-parallel-size 2
    --train-iters 1000 --eval-interval 10""".split()
WRITING = """--save ckpt --save-interval 5 --async-save --tensorboard-dir tb --wandb-project p
    --wandb-exp-name n --exit-duration-in-mins 3 --log-throughput --eval-iters 7 --profile
    --rampup-batch-size 2 2 8""".split()
DATA = ("--data-path", "secret_text_document")


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder; leave out the versions, the start-up checks and the dry runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatron_vshape.cli.advice_options.Counts", Fake)
    monkeypatch.setattr("megatron_vshape.cli.advice_options.dry_run_config", lambda *_: None)
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    monkeypatch.setattr("megatron_vshape.cli.trial._versions", lambda: {"torch": "2"})
    monkeypatch.setattr("megatron_vshape.tuning.row_command.StartChecks.start", lambda *_: None)


def trial(*options: str, flags: tuple[str, ...] = ()) -> tuple[int, dict[str, Any]]:
    """Run a trial, and return its exit status and the rows of trial.json."""
    status = main(["trial", *options, "--", sys.executable, SCRIPT, *MODEL, *flags])
    return status, json.loads(Path("trial/trial.json").read_text())


def starts() -> list[list[str]]:
    return [json.loads(line) for line in Path("starts").read_text().splitlines()]


def schedules_of(commands: list[list[str]]) -> list[str]:
    flag = "--pipeline-schedule"
    return [words[words.index(flag) + 1] if flag in words else "" for words in commands]


def test_variants_alternate_and_failed_ones_are_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_run, "STOPPING_S", 0.5)
    names = "v-half,v-min,zb-h1,zb-h2,v-zb"
    options = ("--schedules", names, "--steps", "8", "--timeout", "0.03")
    status, content = trial(*options, flags=(*WRITING, *DATA))
    assert status == 0
    first = ["", "v-half", "v-min", "zb-h1", "zb-h2", "v-zb"]
    assert schedules_of(starts()) == [*first, "v-zb", "v-half", ""]  # failed runs are not repeated
    rows = {row["name"]: row for row in content["rows"]}
    assert [row["status"] for row in rows.values()] == ["ok", "ok", "OOM", "failed", "failed", "ok"]
    assert rows["v-half"]["speedups"] == [1.25, 1.25]
    assert rows["v-zb"]["step_s"] == [0.04, 0.04, 0.04]  # without the slow first steps
    assert rows["today"]["peak_bytes"] == [2**30, 2**31]
    assert rows["today"]["tokens_per_s_per_gpu"] == 64 * 8 / 0.1 / 4
    assert rows["v-half"]["loss_difference"] == 0
    assert rows["v-zb"]["loss_difference"] == pytest.approx(0.01, rel=1e-4)
    assert rows["zb-h2"]["reason"] == "ended after 3 steps, 2 s without another"
    assert rows["v-zb"]["changes"] == ["--pipeline-schedule v-zb"]
    assert content["gpus"] == 4
    shown = capsys.readouterr().out
    line = "v-zb v-zb, TP 1 PP 2 0.040 (0.040-0.040) 3,200 2.50 (2.50, 2.50) 1% apart 1.0 2.0"
    assert line in " ".join(shown.split())
    assert "v-min: OOM: torch.OutOfMemoryError: CUDA out of memory" in shown
    assert "zb-h1: failed: FileNotFoundError: no secret_text_document" in shown
    assert "the runs start from other weights" in shown
    public = Path("trial/trial.md").read_text()
    assert rows["zb-h1"]["reason"] == "FileNotFoundError: no ... and ... on ..."
    assert re.findall(r"secret|/home|10\.0|" + re.escape(socket.gethostname()), public) == []
    assert json.loads(re.findall(r"```json\n(.*?)```", public, re.DOTALL)[0]) == content
    lines = trials_table.table(Path("trial")).splitlines()
    model, today = "8 layers of 64, 64 tokens", "1f1b, TP 1 PP 2"
    assert lines[2] == f"|{model}|4 x CPU|{today}|v-half, TP 1 PP 2|1.25|2.0 (2.0)|"
    assert lines[3] == f"|{model}|4 x CPU|{today}|v-min, TP 1 PP 2|OOM||"


def test_a_run_saves_evaluates_and_logs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Data, seed and learning rate are those of all steps; a checkpoint provides the weights."""
    trial("--schedules", "v-half+", "--steps", "8", flags=(*WRITING, *DATA, "--load", "weights"))
    today, planned, *_ = starts()
    added = "--exit-interval 8 --log-memory-interval 8 --log-interval 1 --eval-iters 0"
    added += " --eval-interval 1000000"
    assert today == [*MODEL[:-2], *DATA, "--load", "weights", "--finetune", *added.split()]
    assert "--pipeline-profile-iterations 2:5" in " ".join(planned)
    assert "--exit-interval 38" in " ".join(planned)  # it plans before it is measured
    trial(
        *("--schedules", "v-half", "--steps", "8"),
        flags=("--pipeline-schedule", "v-zb", "--pipeline-vocab-parallel"),
    )
    assert "v-half, vocabulary parallelism, TP 1 PP 2" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_trial_prints_its_rows_and_leaves_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    code = (
        "import sys, megatron_vshape.tuning.training_run as runs, megatron_vshape.cli.trial as t; "
        "from megatron_vshape.cli.main import main; runs.STOPPING_S = 0.5; t._versions = dict; "
        # Ignored if a shell has started the tests in the background.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "trial", "--schedules", "zb-h2", "--steps", "8", "--"]
    process = subprocess.Popen(
        [*command, sys.executable, SCRIPT, *MODEL],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    deadline = time.monotonic() + 60
    child = tmp_path / "child"
    while not child.exists() or not child.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    shown, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "today   1f1b, TP 1 PP 2  0.100 (0.100-0.100)" in shown
    assert "zb-h2: failed: interrupted" in shown
    stat = Path(f"/proc/{child.read_text()}/stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_best_stock_and_best_of_this_package_run_by_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron_vshape.cli.advice_options.fetch_missing", lambda *_: None)
    monkeypatch.setattr("megatron_vshape.tuning.fsdp.best", lambda *_: None)
    options = ("--gpus", "4xH100", "--steps", "8", "--keep", "tp,pp,cp,microbatch")
    status, content = trial(*options)
    assert status == 0
    today, stock, best = content["rows"]
    assert stock["name"] == "best stock"
    assert stock["changes"]
    assert not any("--pipeline-schedule" in change for change in stock["changes"])
    assert best["name"] == "best of this package"
    assert today["predicted_step_s"] > stock["predicted_step_s"] > best["predicted_step_s"] > 0
    assert len(best["predicted_peak_bytes"]) == 2
    assert "predicted GiB" in capsys.readouterr().out
    if best["schedule"] == "planned schedule":
        assert "--pipeline-schedule plan.json" in best["changes"]
        assert Schedule.from_json(Path("trial/plan.json").read_text()).num_devices == 2
        assert schedules_of(starts())[2] == str(Path("trial/plan.json").resolve())


def test_named_schedules_are_predicted_for_known_gpus() -> None:
    _, content = trial("--gpus", "4xH100", "--schedules", "v-half,auto", "--steps", "8")
    today, v_half, auto = (row["predicted_step_s"] for row in content["rows"])
    assert today > v_half > 0
    assert auto is None  # planned during the run
    # Runs do not need predictions.
    _, content = trial("--gpus", "6xH100", "--schedules", "v-half", "--steps", "8")
    assert [row["predicted_step_s"] for row in content["rows"]] == [None, None]


def test_a_slurm_job_runs_the_trial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launcher = ["srun", "-N", "2", "--ntasks-per-node=1", "torchrun", "--nnodes=2"]
    words = [*launcher, "--nproc-per-node", "8", SCRIPT, *MODEL, "--data-path", "a b"]
    options = ["--schedules", "v-half", "--sbatch", "job.sh", "--steps", "9"]
    assert main(["trial", *options, "--", *words]) == 0
    lines = Path("job.sh").read_text().splitlines()
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8", "#SBATCH --ntasks-per-node=1"} < set(
        lines
    )
    command = ["exec", "megatron-vshape", "trial", "--schedules", "v-half", "--steps", "9", "--"]
    assert shlex.split(lines[-1]) == [*command, *words]
    assert not Path("trial").exists()


def test_srun_of_an_allocation_starts_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sizes and the GPUs of this node are those of the predictions."""
    gpus = {"CUDA": "13.2, 2 x NVIDIA H100 80GB HBM3"}
    monkeypatch.setattr("megatron_vshape.cli.trial._versions", lambda: gpus)
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    options = ["--nodes=2", "--ntasks-per-node=2"]
    check = f'test "$1 $2 $SLURM_KILL_BAD_EXIT" = "{" ".join(options)} 1" || exit 7'
    srun.write_text(f'#!/bin/sh\n{check}\nshift 2\nexec "$@"')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{srun.parent}{os.pathsep}{os.environ['PATH']}")
    words = ["srun", *options, "--output", "log", sys.executable, SCRIPT, *MODEL]
    assert main(["trial", "--schedules", "v-half", "--steps", "8", "--", *words]) == 0
    assert schedules_of(starts()) == ["", "v-half", "v-half", ""]
    assert not Path("log").exists()
    rows = json.loads(Path("trial/trial.json").read_text())["rows"]
    assert all(row["predicted_step_s"] > 0 for row in rows)


def test_the_launcher_keeps_its_options_but_those_of_output(tmp_path: Path) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.touch()
    words = (
        f"A_B=1 srun -o log -e log -N 2 torchrun --nnodes=2 -r 3 --tee=3 --log_dir logs {script}"
    )
    launch = Launch.of([*words.split(), *MODEL])
    assert " ".join(launch.launcher) == "srun -N 2 torchrun --nnodes=2"
    assert launch.environment == {"A_B": "1", "SLURM_KILL_BAD_EXIT": "1"}
    assert launch.words(launch.command) == [*launch.launcher, str(script), *MODEL]
    # A script that does not register this package is started by its adapter.
    package = launch.words(with_schedule(launch.command, "v-half"))
    adapter = ["-m", "megatron_vshape.mcore.launch"]
    assert package[: len(launch.launcher) + 3] == [*launch.launcher, *adapter, str(script)]
    script.write_text("import megatron_vshape")
    assert adapter[1] not in launch.words(with_schedule(launch.command, "v-half"))


def test_1f1b_is_the_schedule_of_stock_megatron() -> None:
    flags = (*MODEL, "--pipeline-schedule", "v-half", "--pipeline-vocab-parallel")
    command = Launch.of([sys.executable, SCRIPT, *flags]).command
    assert list(with_schedule(command, "1f1b").flags) == MODEL
    assert with_schedule(command, "v-zb").has("--pipeline-vocab-parallel")
    plan = Variant("plan", with_schedule(command, "/home/me/plan.json"))
    assert plan.schedule == "planned schedule"


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("train.sh", "give the whole command"),
        (f"A=1 {SCRIPT}", "give the whole command"),
        (f"torchrun --nnodes 2 {SCRIPT} --num-layers 2", "Start it with srun"),
    ],
)
def test_commands_that_cannot_be_started_are_rejected(words: str, fix: str) -> None:
    with pytest.raises(ScheduleError, match=fix):
        Launch.of(words.split())


@pytest.mark.parametrize(
    ("options", "program", "fix"),
    [
        (["--steps", "5"], sys.executable, "set 6 or more"),
        ([], sys.executable, "or --schedules v-half,v-zb"),
        (["--schedules", "v-half"], "no_such_program", "no_such_program cannot be started"),
        (
            ["--schedules", "v-half"],
            sys.executable,
            "MEGATRON_VSHAPE sets a schedule for all runs: unset it",
        ),
    ],
)
def test_errors_have_a_fix(
    options: list[str],
    program: str,
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "MEGATRON_VSHAPE" in fix:  # it would be the schedule of stock Megatron, too
        monkeypatch.setenv("MEGATRON_VSHAPE", "schedule=v-half")
    assert main(["trial", *options, "--", program, SCRIPT, *MODEL]) == 2
    assert fix in capsys.readouterr().err


CPU_MODEL = """--transformer-impl local --distributed-backend gloo --mock-data --num-workers 0
    --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 64
    --num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --position-embedding-type rope --no-rope-fusion
    --attention-dropout 0 --hidden-dropout 0 --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-persist-layer-norm --no-bias-gelu-fusion
    --no-bias-dropout-fusion --untie-embeddings-and-output-weights --clip-grad 0
    --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --min-lr 1e-3
    --ckpt-format torch_dist --pipeline-model-parallel-size 4""".split()
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]


@pytest.mark.slow
def test_schedules_train_from_one_checkpoint_with_equal_losses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("megatron.training")
    script = str(ROOT / "scripts" / "pretrain_gpt.py")
    saving = "--train-iters 1 --save weights --save-interval 1 --eval-iters 0".split()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [*TORCHRUN, script, *CPU_MODEL, *saving, "--eval-interval", "10"]
    subprocess.run(command, check=True, env=environment)
    files = {path: path.stat().st_mtime_ns for path in Path("weights").rglob("*")}
    for name, value in (("OMP_NUM_THREADS", "1"), ("CUDA_VISIBLE_DEVICES", "")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    data = "--load weights --save weights --tensorboard-dir logs --train-iters 1000 --eval-iters 1"
    command = [*TORCHRUN, script, *CPU_MODEL, *data.split()]
    assert main(["trial", "--schedules", "v-half,v-zb", "--steps", "8", "--", *command]) == 0
    rows = json.loads(Path("trial/trial.json").read_text())["rows"]
    assert [row["schedule"] for row in rows] == ["1f1b", "v-half", "v-zb"]
    assert all(row["tokens_per_s_per_gpu"] > 0 and len(row["speedups"]) == 2 for row in rows)
    assert [row["loss_difference"] for row in rows] == [0, 0, 0]
    assert {path: path.stat().st_mtime_ns for path in Path("weights").rglob("*")} == files
    assert not Path("logs").exists()
