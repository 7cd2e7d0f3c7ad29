"""A rank killed in a pass: the others report their waits, and a restart loses no saved step."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from faults.conftest import Inject, Tally
from faults.kill_matrix import passes_of_step, run_until_killed
from mcore.farm import MODEL, SCRIPT, Ended, Farm, Train
from mcore.parity import assert_same_tensors
from runtime.ranks import RanksFailed, run_ranks

from megatron_vshape.core.model.kinds import PARTS, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.program.instructions import Run
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.setup.run_config import ScheduleChoice

V_HALF = ("--pipeline-schedule", "v-half", "--pipeline-timeout", "60")
FIVE = (*V_HALF, "--train-iters", "5")
EVERY_TWO = ("--save-interval", "2")
TOLD = re.compile(
    r"rank (\d) \(device \1\): "
    r"(?:(BW|F|B|W)\d\.\d (?:waits for \2\d\.\d from|waits for a receive of) rank \d \(device \d\)"
    r"|after (?:F|B|W|BW)\d\.\d)"
)


def passes(device: int, kind: Kind) -> list[Pass]:
    """Return the passes of a kind on a device, in order; a W fused with B is in BW."""
    program = Planner(ScheduleChoice(4, "v-half")).plan_step(8).program
    runs = [
        instruction.work
        for instruction in program.instructions[device]
        if isinstance(instruction, Run)
    ]
    return [work for work in runs if work.kind is kind]


def kill(work: Pass, device: int) -> dict[str, Any]:
    return {"what": "kill", "rank": device, "step": 4, "pass": str(work)}


def assert_others_told(
    run: Ended, killed: int, folder: Path, where: str = "in iteration 4"
) -> float:
    """Check how the others ended, and return the seconds until the last of them had."""
    assert run.codes == [-9 if rank == killed else 1 for rank in range(4)]
    for rank, text in enumerate(run.output):
        if rank != killed:
            assert {number for number, _ in TOLD.findall(text)} == {str(rank)}, text[-2000:]
            assert where in text
    seconds = max(run.ended_s) - float((folder / "struck").read_text())
    assert seconds < 30
    return seconds


def assert_same_end(run: Ended, complete_run: Ended, num_steps: int = 5) -> None:
    """Check that the last steps of two runs, and their parameters, are equal bit by bit."""
    for key in ("losses", "grad_norms"):
        assert run.record[key] == complete_run.record[key][-num_steps:]
    assert_same_tensors(run.merged("parameters"), complete_run.merged("parameters"))


def assert_continues(farm: Farm, complete_run: Ended, folder: Path, num_lost: int = 3) -> None:
    """Check that a restart from `folder` repeats the lost steps of the complete run bitwise."""
    resumed_run = farm.run(4, *FIVE, "--load", str(folder)).check()
    assert_same_end(resumed_run, complete_run, num_lost)


def test_killed_rank_ends_the_run_and_a_restart_continues_bitwise(
    farm: Farm, train: Train, inject: Inject, tally: Tally, tmp_path: Path
) -> None:
    tally("SIGKILL in a pass, then a restart")
    saved = tmp_path / "saved"
    run = inject([kill(passes(1, Kind.B)[3], 1)], *FIVE, *EVERY_TWO, "--save", str(saved))
    assert_others_told(run, 1, tmp_path)
    assert_continues(farm, train(4, *FIVE), saved)


KILLED = [
    (kind, device, position)
    for kind in (*PARTS, Kind.BW)
    for device, position in ((0, "first"), (1, "middle"), (3, "last"))
    if passes(device, kind)  # some devices run no BW
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "device", "position"), KILLED)
def test_kill_in_each_kind_of_pass_ends_the_run(
    farm: Farm,
    train: Train,
    inject: Inject,
    tally: Tally,
    tmp_path: Path,
    kind: Kind,
    device: int,
    position: str,
) -> None:
    passes_of_kind = passes(device, kind)
    work = passes_of_kind[{"first": 0, "middle": len(passes_of_kind) // 2, "last": -1}[position]]
    saved = tmp_path / "saved"
    run = inject([kill(work, device)], *FIVE, *EVERY_TWO, "--save", str(saved))
    seconds = assert_others_told(run, device, tmp_path)
    tally(f"SIGKILL in {kind} of Megatron's model", note=f"{seconds:.2f} s")
    if position == "middle":
        tally(f"restart after SIGKILL in {kind}")
        assert_continues(farm, train(4, *FIVE), saved)


AHEAD = (
    *(*FIVE, "--optimizer-post-validation", "--rerun-mode", "disabled", "--clip-grad", "100"),
    "--no-check-for-nan-in-loss-and-grad",
)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "number"), [(0, 0), (2, 1), (1, -1)])
def test_kill_in_a_forward_before_its_step_ends_the_run(
    farm: Farm, inject: Inject, tally: Tally, tmp_path: Path, device: int, number: int
) -> None:
    """With post-validation the first forwards of step 4 run in step 3; the last do not."""
    tally("SIGKILL in a step begun before the last was validated")
    work = passes(device, Kind.F)[number]
    saved = tmp_path / "saved"
    run = inject([kill(work, device)], *AHEAD, *EVERY_TWO, "--save", str(saved))
    assert_others_told(run, device, tmp_path, where="")
    complete_run = farm.run(4, *AHEAD).check()
    assert "post-validation: 2 steps made" in complete_run.output[0]
    assert_same_end(farm.run(4, *AHEAD, "--load", str(saved)).check(), complete_run, 3)


@pytest.mark.slow
def test_kill_in_every_pass_of_a_step_ends_the_run(tally: Tally, tmp_path: Path) -> None:
    """A small model of plain torch, so that every pass of all four devices has its turn."""
    seconds = []
    for number, (device, work) in enumerate(passes_of_step()):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(RanksFailed, match=f"^rank {device}: it died with exit code -9$"):
            run_ranks(4, run_until_killed, folder, device, work, timeout_s=120)
        seconds.append(time.monotonic() - float((folder / "struck").read_text()))
        for rank in {0, 1, 2, 3} - {device}:
            text = (folder / f"said{rank}").read_text()
            assert {reporter for reporter, _ in TOLD.findall(text)} == {str(rank)}, (work, text)
    assert len(seconds) >= 4 * 2 * 4 * 2  # F and BW at least, of four devices with two stages
    note = f"others ended after {max(seconds):.2f} s at most, {median(seconds):.2f} s mostly"
    tally("SIGKILL in every pass of a step", len(seconds), note)


@pytest.mark.slow
def test_kill_under_torchrun_ends_the_run(tally: Tally, tmp_path: Path) -> None:
    """The agent ends the others with SIGTERM, usually before they detect it; all still report."""
    tally("SIGKILL under torchrun")
    fault = kill(passes(0, Kind.F)[5], 0) | {"note": str(tmp_path / "struck")}
    faults_file = tmp_path / "faults.json"
    faults_file.write_text(json.dumps([fault]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "4", "--redirects", "3", "--log-dir", str(tmp_path / "logs")]
    command += [str(Path(__file__).with_name("injected_script.py")), str(faults_file), *MODEL]
    command += ["--pipeline-model-parallel-size", "4", *FIVE]
    command += [*EVERY_TWO, "--save", str(tmp_path / "saved")]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": str(SCRIPT.parents[1]),
    }
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    seconds = time.monotonic() - float((tmp_path / "struck").read_text())
    assert run.returncode == 1
    assert seconds < 60
    logs = dict.fromkeys("0123", "")
    for path in sorted((tmp_path / "logs").rglob("std*.log")):
        logs[path.parent.name] += path.read_text()
    for rank in "123":
        assert {reporter for reporter, _ in TOLD.findall(logs[rank])} == {rank}, logs[rank][-2000:]
    by_signal = sum("when SIGTERM ended it" in text for text in logs.values())
    tally("SIGKILL under torchrun", 0, f"{seconds:.1f} s, {by_signal} ended by the agent")


SHARED = ("--pipeline-vocab-parallel", "--pipeline-timeout", "10")


@pytest.mark.parametrize(
    "what",
    [
        "kill I",
        *(pytest.param(f"kill {kind}", marks=pytest.mark.slow) for kind in "STJ"),
        "raise S",
        pytest.param("stall S", marks=pytest.mark.slow),
    ],
)
def test_vocabulary_parallel_ranks_do_not_wait_for_a_killed_rank(
    inject: Inject, tally: Tally, tmp_path: Path, what: str
) -> None:
    fault, kind = what.split()
    struck = {"what": fault, "rank": 1, "step": 2, "pass": f"{kind}1.3", "seconds": 60}
    began_s = time.monotonic()
    run = inject([struck], *FIVE, *SHARED)
    note = ""
    if fault != "stall":
        seconds = max(run.ended_s) - float((tmp_path / "struck").read_text())
        assert seconds < 20
        note = f"{seconds:.2f} s"
    assert max(run.ended_s) - began_s < 90
    tally(f"{what} of a shared vocabulary", note=note)
    expected = -9 if fault == "kill" else 1
    other_codes = [code for rank, code in enumerate(run.codes) if rank != 1]
    assert other_codes == [1] * 3
    assert run.codes[1] == expected or fault == "stall"  # that one may still sleep
    texts = [text for rank, text in enumerate(run.output) if rank != 1 or fault == "raise"]
    assert all("in iteration 2" in text for text in texts)
    if fault == "stall":
        assert any("and nothing has moved for 10 s" in text for text in texts)
