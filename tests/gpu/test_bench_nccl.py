"""benchmarks/bench_nccl.py: programs with and without deadlocks, as far as a CPU can show."""

import subprocess
import sys
from pathlib import Path

import bench_nccl
import pytest

from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.instructions import Await, Receive, Run, Send
from megatron_vshape.core.program.kernels import deadlocks_under_device_sync
from megatron_vshape.core.program.lowering import lower

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run_script(*arguments: str, expected: int | None = 0) -> str:
    """Run the script, check its exit code, and return its output."""
    command = [sys.executable, str(BENCHMARKS / "bench_nccl.py"), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert expected is None or run.returncode == expected, run.stdout + run.stderr[-4000:]
    return run.stdout


def test_trained_program_hangs_with_early_receives() -> None:
    flags = dict(zip(bench_nccl.TRAINED, bench_nccl.TRAINED[1:], strict=False))
    microbatches = int(flags["--global-batch-size"]) // int(flags["--micro-batch-size"])
    safe_program = lower(make(flags["--pipeline-schedule"], 2, microbatches), kernels=True)
    early_program = bench_nccl.reposted(safe_program, 1)
    assert not deadlocks_under_device_sync(safe_program)
    assert deadlocks_under_device_sync(early_program)
    for safe_row, early_row in zip(
        safe_program.instructions, early_program.instructions, strict=True
    ):
        assert [
            instruction for instruction in safe_row if isinstance(instruction, Run | Send | Await)
        ] == [
            instruction for instruction in early_row if isinstance(instruction, Run | Send | Await)
        ]
        assert {instruction for instruction in safe_row if isinstance(instruction, Receive)} == {
            instruction for instruction in early_row if isinstance(instruction, Receive)
        }


@pytest.mark.slow
def test_ranks_on_a_cpu() -> None:
    lines = run_script("--device", "cpu", expected=None).splitlines()
    outcomes = dict(line.split(": ", 1) for line in lines)
    assert outcomes["as-is"] == f"{outcomes['gloo']}, equal"
    assert outcomes["waiting"].endswith(", as the model says")
    assert outcomes["waiting-early"] == "hung, as the model says"


@pytest.mark.gpu
def test_ranks_on_one_gpu() -> None:
    run_script("--ranks", "2")
