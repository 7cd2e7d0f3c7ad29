"""A test run may skip few tests, and only for hardware or an optional library."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from skips import MOST_SKIPS, describe_excess

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("reasons", "problem"),
    [
        (["could not import 'torch': No module named 'torch'", "torch sees no GPU"], ""),
        (["it takes long"], "names no hardware or optional library: it takes long"),
        (["matplotlib is not installed"] * (MOST_SKIPS + 1), f"at most {MOST_SKIPS} may be"),
    ],
)
def test_excess_is_described(reasons: list[str], problem: str) -> None:
    problems = describe_excess(reasons)
    assert len(problems) == bool(problem)
    assert all(problem in text for text in problems)


@pytest.mark.parametrize(
    ("reason", "exit_code"), [("matplotlib is not installed", 0), ("it takes long", 1)]
)
@pytest.mark.parametrize("workers", ["0", "1"])
def test_run_fails_for_an_unknown_reason(
    tmp_path: Path, reason: str, exit_code: int, workers: str
) -> None:
    test_file = tmp_path / "test_skipped.py"
    test_file.write_text(f"import pytest\ndef test_it(): pytest.skip({reason!r})\n")
    command = [sys.executable, "-m", "pytest", "-p", "skips", "-n", workers, str(test_file)]
    command += ["-c", "/dev/null", "--rootdir", str(tmp_path)]
    run = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=300)
    assert run.returncode == exit_code, run.stdout + run.stderr
    assert f"1 skipped: {reason}" in run.stdout


def test_home_directory_is_temporary() -> None:
    home = Path.home()
    assert home.parent == Path(tempfile.gettempdir())
    assert home.name.startswith("home-")
    assert Path(os.environ["XDG_CACHE_HOME"]) == home / ".cache"
