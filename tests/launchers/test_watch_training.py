"""The output of train.sh during a run, and the content of its log."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "watch_training.py"
ITERATION = (
    " [2026-11-22 21:29:45.0] iteration       20/     200 | consumed samples:   320 | elapsed time "
    "per iteration (ms): 500.0 | learning rate: 1.0E-03 | global batch size:    16 | lm loss: "
    "7.501382E+00 | loss scale: 1.0 | bubble: 14.8 % | predicted bubble: 5.0 % |"
)
PLAN = """\
pipeline schedule v-half, 2 ranks, 2 microbatches: estimated bubble 5.0 %, peak 6 chunks
2 ranks share 1 CPU cores: passes wait for a core
passes (upper case: even chunks; one row per rank):
FF fbw
 Ffb
"""
FIGURES = """\
v-half: 362 tokens/s; peak activation memory per rank in MiB: measured [9.79], predicted [9.71]
v-half                              predicted    measured   ratio
activations of rank 0, MiB               9.79        9.71   0.992
activation memory as predicted; timing is not comparable: 2 ranks share 1 CPU cores"""
RUN = f"""\
INFO:megatron.core: something of no interest
  seq_length ...................................... 128
{PLAN}compute_activation_memory_without_sp
Theoretical memory footprints: weight and optimizer=11.27 MB, activation=6.23 MB, total=17.50 MB
{ITERATION}
{FIGURES}
 validation loss at iteration 40 on test set | lm loss value: 3.662343E+00 | lm loss PPL: 3.8E+01 |
"""
SHOWN = f"""\
{PLAN}step  20/200  loss  7.501      4,096 tokens/s   10 %, 90 s left
{FIGURES}
validation loss 3.662 at iteration 40 on test set
"""


def watch(folder: Path, text: str, status: int = 0, *options: str) -> subprocess.CompletedProcess:
    (folder / "said.txt").write_text(text)
    code = f"print(open('said.txt').read(), end=''); raise SystemExit({status})"
    command = [sys.executable, str(SCRIPT), *options, "--log", "runs/log.txt"]
    return subprocess.run(
        [*command, sys.executable, "-c", code], cwd=folder, capture_output=True, text=True
    )


def test_output_is_a_short_summary(tmp_path: Path) -> None:
    ran = watch(tmp_path, RUN)
    versions, _, shown = ran.stdout.partition("\n")
    assert versions.startswith("python 3.")
    assert shown == SHOWN
    assert (ran.returncode, ran.stderr) == (0, "")
    assert (tmp_path / "runs/log.txt").read_text() == RUN


def test_verbose_prints_the_complete_log(tmp_path: Path) -> None:
    assert watch(tmp_path, RUN, 0, "--verbose").stdout.partition("\n")[2] == RUN


def test_failed_run_prints_the_last_lines_of_its_log(tmp_path: Path) -> None:
    ran = watch(tmp_path, "".join(f"line {number}\n" for number in range(100)), 3)
    assert ran.returncode == 3
    assert ran.stderr.splitlines() == [
        "the run failed; the last lines of runs/log.txt:",
        *(f"line {number}" for number in range(75, 100)),
    ]


def test_rejected_run_prints_the_reason(tmp_path: Path) -> None:
    ran = watch(tmp_path, "[rank0]: megatron-vshape: nothing fits\nTraceback ...\n", 1)
    assert ran.returncode == 1
    assert ran.stdout.splitlines()[1:] == ["megatron-vshape: nothing fits"]
    assert ran.stderr == ""
