"""scripts/bench_gpu.py: on a GPU with its limits, and on a CPU with tiny sizes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "bench_gpu.py"
ON_CPU = ("--device", "cpu", "--tiny")
NOT_INSTALLED = (
    "import runpy, sys\n"
    "sys.meta_path[:] = [finder for finder in sys.meta_path if '__editable__' not in str(finder)]\n"
    "runpy.run_path(sys.argv[1], run_name='imported')\n"
)


def run_script(*arguments: str, expected: int | None = 0) -> str:
    """Run the script, check its exit code, and return its output."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert expected is None or run.returncode == expected, run.stdout + run.stderr[-4000:]
    return run.stdout


def test_runs_from_an_uninstalled_checkout(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", NOT_INSTALLED, str(SCRIPT)]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=120)


class TestOnCpu:
    """Every command runs; the figures of a CPU are meaningless."""

    def test_split(self) -> None:
        text = run_script("split", *ON_CPU, "--hidden", "32", "--repeats", "2", expected=None)
        head = "| hidden | F us | B us | W us | whole us | (B + W) / whole | host us | caught up |"
        assert head in text
        cells = text.split("\n| 32 | ")[1].split(" | ")
        host_us = float(cells[5])
        assert host_us > float(cells[0])  # on a CPU, the passes run on the host
        assert "device: cpu" in text

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_numerics(self, dtype: str) -> None:
        assert "largest relative error" in run_script("numerics", *ON_CPU, "--dtype", dtype)

    @pytest.mark.slow
    def test_copies(self) -> None:
        text = run_script("copies", *ON_CPU, "--repeats", "2")
        rates = re.findall(r"^\| ([^|]*) \| ([0-9.]+) \| ([0-9.]+) \|$", text, re.MULTILINE)
        assert len(rates) == 3
        assert all(re.search(rf"^\| {kind} \| ", text, re.MULTILINE) for kind in "FBW")


@pytest.mark.gpu
class TestOnGpu:
    """The limits for a GPU."""

    def test_numerics(self) -> None:
        run_script("numerics")

    def test_numerics_of_transformer_engine(self) -> None:
        pytest.importorskip("transformer_engine")
        run_script("numerics", "--te")

    def test_splitting_costs_two_percent_at_most(self) -> None:
        run_script("split", "--hidden", "4096")
