"""scripts/bench_gpu.py: on a GPU with its limits, and with tiny sizes on a CPU so that it works."""

import json
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.schedule import load_schedule

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "bench_gpu.py"
ON_CPU = ("--device", "cpu", "--tiny")
NOT_INSTALLED = (
    "import runpy, sys\n"
    "sys.meta_path[:] = [each for each in sys.meta_path if '__editable__' not in str(each)]\n"
    "runpy.run_path(sys.argv[1], run_name='imported')\n"
)


def bench(*arguments: str, expected: int | None = 0) -> str:
    """Return what the script prints, having checked how it ends."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert expected is None or run.returncode == expected, run.stdout + run.stderr[-4000:]
    return run.stdout


def test_a_checkout_need_not_be_installed(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", NOT_INSTALLED, str(SCRIPT)]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=120)


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """Return what the script defines."""
    return runpy.run_path(str(SCRIPT), run_name="imported")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_infinitely_wrong(
    script: dict[str, Any], bad: float
) -> None:
    error, right = script["_error"], torch.ones(4)
    assert error(right, right) == 0
    assert error(torch.tensor([1, 1, 1, 1.5]), right) == 0.25
    found = right.clone()
    found[2] = bad
    assert error(found, right) == math.inf
    assert error(right, found) == math.inf


def test_the_papers_models_drop_out_hidden_states(script: dict[str, Any]) -> None:
    model = script["load_model"](ROOT / "configs/models/gpt_21b.yaml", 4096, "cuda", False)
    assert (model.dropout, model.dtype, model.sequence_length) == (0.1, "bfloat16", 4096)
    assert [script["layers_of"](model, stage, 15) for stage in (0, 1, 15)] == [2, 3, 2]


def test_a_gpu_is_busy_before_it_is_timed(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[Any] = []

    class Event:
        def record(self) -> None:
            did.append("record")

        def query(self) -> bool:
            return len(did) > 3  # the second time the GPU is through before Python is

    monkeypatch.setattr("torch.cuda.synchronize", lambda: did.append("wait"))
    monkeypatch.setattr("torch.cuda._sleep", lambda cycles: did.append(cycles / 2e9), raising=False)
    monkeypatch.setattr("torch.cuda.Event", Event)
    filler = script["Filler"](least_us=3000.0)
    for _ in range(2):
        filler.start()
        filler.check()
    assert did == ["wait", 3e-3, "record"] * 2
    assert filler.caught_up == 1


class TestEmulateAll:
    """Which ranks are emulated, by processes that only fail."""

    @pytest.fixture
    def asked(self, script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
        """Return what the processes are asked, each of which fails."""
        asked = []

        class Failing:
            def __init__(self, device: str) -> None: ...

            def emulate(self, order: str) -> None:
                asked.append(json.loads(order))
                raise script["RankError"]("out of memory")

            def close(self) -> None: ...

        monkeypatch.setitem(script["emulate_all"].__globals__, "Fresh", Failing)
        return asked

    def emulate(self, script: dict[str, Any], *schedules: str) -> int:
        arguments = ["emulate", *ON_CPU, "--devices", "4", "--schedules", *schedules]
        status: int = script["run_emulate"](script["parse"](arguments))
        return status

    def test_nothing_more_once_the_first_has_failed(
        self, script: dict[str, Any], asked: list[list[Any]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.emulate(script, "v-half", "v-min") == 1
        assert [order[1:] for order in asked] == [["v-half", 4, 0, 24]]
        assert "v-half, rank 0: out of memory" in capsys.readouterr().err

    def test_an_adaptive_plan_needs_a_measured_v(
        self, script: dict[str, Any], asked: list[list[Any]]
    ) -> None:
        with pytest.raises(SystemExit, match="v-half\\+ is planned with measured costs"):
            self.emulate(script, "v-half+")
        assert asked == []


class TestOnCpu:
    """That every command runs; the figures of a CPU mean nothing."""

    def test_split(self) -> None:
        text = bench("split", *ON_CPU, "--hidden", "32", "--repeats", "2", expected=None)
        head = "| hidden | F us | B us | W us | whole us | (B + W) / whole | host us | caught up |"
        assert head in text
        cells = text.split("\n| 32 | ")[1].split(" | ")
        host_us = float(cells[5])
        assert host_us > float(cells[0])  # a CPU's passes take the host's time
        assert "device: cpu" in text

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_numerics(self, dtype: str) -> None:
        assert "largest relative error" in bench("numerics", *ON_CPU, "--dtype", dtype)

    def test_copies(self) -> None:
        text = bench("copies", *ON_CPU, "--repeats", "2")
        rates = re.findall(r"^\| ([^|]*) \| ([0-9.]+) \| ([0-9.]+) \|$", text, re.MULTILINE)
        assert len(rates) == 5
        assert all(re.search(rf"^\| {kind} \| ", text, re.MULTILINE) for kind in "FBW")

    @pytest.mark.slow
    def test_emulate_what_waits_in_host_memory(self) -> None:
        sizes = ("--devices", "4", "--microbatches", "8", "--schedules", "v-half", "v-half@host")
        text = bench("emulate", *ON_CPU, *sizes)
        rows = [line.split(" | ") for line in text.splitlines() if "% |" in line]
        assert len(rows) == 6
        for _, _, peak, predicted, *_ in rows:
            assert float(peak) == pytest.approx(float(predicted), rel=0.05)
        for plain, waiting in zip(rows[:3], rows[3:], strict=True):
            assert float(waiting[2]) < float(plain[2])
            assert "GB/s" in waiting[-1]

    @pytest.mark.slow
    def test_emulate(self, tmp_path: Path) -> None:
        sizes = ("--devices", "4", "--microbatches", "8")
        schedules = ("--schedules", "v-half", "v-half+", "1f1b")
        text = bench("emulate", *ON_CPU, *sizes, *schedules, "--write", str(tmp_path))
        rows = [line.split(" | ") for line in text.splitlines() if "% |" in line]
        assert len(rows) == 9
        for _, _, peak, predicted, _, after_pass, held, *_ in rows:
            assert float(peak) == pytest.approx(float(predicted), rel=0.05)
            assert float(after_pass) == pytest.approx(float(held), rel=0.1)
        file = tmp_path / "tiny-p4.json"
        assert Costs.load(file).layers == (1, 2, 2, 2, 2, 2, 2, 1)
        assert load_schedule(tmp_path / "tiny-p4.v-half-plus.csv").num_microbatches == 8
        about = json.loads(file.with_suffix(".about.json").read_text())
        assert about["device"] == "cpu"
        assert {"date", "versions", "command", "model", "allocator"} <= about.keys()
        assert "NCCL's buffers" in about["not seen"]
        assert f"not seen: {about['not seen']}" in text


@pytest.mark.gpu
class TestOnGpu:
    """The limits of issue 5."""

    def test_numerics(self) -> None:
        bench("numerics")

    def test_numerics_of_transformer_engine(self) -> None:
        pytest.importorskip("transformer_engine")
        bench("numerics", "--te")

    def test_splitting_costs_two_percent_at_most(self) -> None:
        bench("split", "--hidden", "4096")

    def test_memory_is_as_predicted(self) -> None:
        bench("emulate", "--devices", "8", "--microbatches", "16")
