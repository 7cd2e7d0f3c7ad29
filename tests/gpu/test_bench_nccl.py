"""benchmarks/bench_nccl.py: what hangs and what does not, as far as a CPU can tell."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.instructions import Await, Receive, Run, Send
from megatron_vshape.core.program.kernels import deadlocks_under_device_sync
from megatron_vshape.core.program.lowering import lower

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """Return the script as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        import bench_nccl

        yield bench_nccl


def bench(*arguments: str, expected: int | None = 0) -> str:
    """Return what the script prints, having checked how it ends."""
    command = [sys.executable, str(BENCHMARKS / "bench_nccl.py"), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert expected is None or run.returncode == expected, run.stdout + run.stderr[-4000:]
    return run.stdout


def test_what_is_trained_hangs_with_receives_posted_early(script: ModuleType) -> None:
    flags = dict(zip(script.TRAINED, script.TRAINED[1:], strict=False))
    microbatches = int(flags["--global-batch-size"]) // int(flags["--micro-batch-size"])
    safe = lower(make(flags["--pipeline-schedule"], 2, microbatches), kernels=True)
    early = script.reposted(safe, 1)
    assert not deadlocks_under_device_sync(safe)
    assert deadlocks_under_device_sync(early)
    for old, new in zip(safe.instructions, early.instructions, strict=True):
        assert [each for each in old if isinstance(each, Run | Send | Await)] == [
            each for each in new if isinstance(each, Run | Send | Await)
        ]
        assert {each for each in old if isinstance(each, Receive)} == {
            each for each in new if isinstance(each, Receive)
        }


@pytest.mark.slow
def test_ranks_on_a_cpu() -> None:
    lines = bench("--device", "cpu", expected=None).splitlines()
    found = dict(line.split(": ", 1) for line in lines)
    assert found["as-is"] == f"{found['gloo']}, equal"
    assert found["waiting"].endswith(", as the model says")
    assert found["waiting-early"] == "hung, as the model says"


@pytest.mark.gpu
def test_ranks_on_one_gpu() -> None:
    bench("--ranks", "2")
