"""benchmarks/bench_nccl.py: what hangs and what does not, as far as a CPU can tell."""

import math
import subprocess
import sys
import time
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


class FakeWork:
    """A receive over gloo, which may be waited for once."""

    def __init__(self) -> None:
        self.waited = 0

    def wait(self, *timeout: object) -> None:
        self.waited += 1


def test_a_cpu_in_a_devices_stead_waits_for_all_that_is_posted(script: ModuleType) -> None:
    works = [FakeWork() for _ in range(3)]
    coming = iter(works)
    device = script.HostDevice(lambda *args, **options: next(coming))
    received = [device.irecv(None, src=0) for _ in works]
    received[1].wait()
    assert [work.waited for work in works] == [0, 1, 0]
    device.synchronize()
    for each in received:
        each.wait()
    assert [work.waited for work in works] == [1, 1, 1]


def test_a_cpu_in_a_devices_stead_does_not_wait_for_ever(script: ModuleType) -> None:
    class Never(FakeWork):
        def wait(self, *timeout: object) -> None:
            raise RuntimeError("timed out")

    device = script.HostDevice(lambda: Never())
    device.irecv()
    with pytest.raises(SystemExit, match=script.STANDS):
        device.synchronize()


class TestStood:
    """Only ranks that wait for the device hang; all else is a failure."""

    def test_time_is_up(self, script: ModuleType) -> None:
        assert script.stood([script.WAITS] * 2, ["not in time"] * 2)
        assert not script.stood([script.WAITS, "imports"], ["not in time"] * 2)

    def test_a_rank_has_missed_a_message(self, script: ModuleType) -> None:
        said = [f"{script.WAITS}\nF2.0 from rank 1, and {script.STANDS} 40 s", script.WAITS]
        assert script.stood(said, ["status 1", "not before another failed"])
        assert not script.stood([script.WAITS] * 2, ["status 1", "not before another failed"])


def test_a_run_is_held_against_the_model(script: ModuleType) -> None:
    losses, trial = [4.8, 4.5], script.Trial
    assert script.verdict(trial.AS_IS, losses, losses, False) == "[4.8, 4.5], equal"
    assert script.verdict(trial.EARLY, [], losses, True) == "hung, as the model says"
    text = script.verdict(trial.EARLY, losses, losses, True)
    assert text == "[4.8, 4.5], equal, which is not what the model says"
    assert "different, as the model says" in script.verdict(trial.WAITING, [1.0], losses, False)


def test_losses_may_differ_by_rounding(script: ModuleType) -> None:
    are_close = script.are_close
    assert are_close([4.8, 4.5], [4.8002, 4.5])
    assert not are_close([4.8, 4.5], [4.81, 4.5])
    assert not are_close([4.8, math.nan], [4.8, math.nan])
    assert not are_close([4.8], [4.8, 4.5])
    assert not are_close([], [])


def test_ranks_end_together(script: ModuleType) -> None:
    codes = ("import time; time.sleep(60)", "raise SystemExit(3)")
    processes = [subprocess.Popen([sys.executable, "-c", code]) for code in codes]
    try:
        found = script.wait_for(processes, time.monotonic() + 60)
        assert found == ["not before another failed", "status 3"]
        assert script.wait_for(processes[:1], time.monotonic() + 0.5) == ["not in time"]
    finally:
        for process in processes:
            script.end(process)


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
