"""The gallery and the theory table are made from the code, by one command."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from theory import analyse

import megatron_vshape
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.paper.catalogue import NAMES

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(megatron_vshape.__file__).parents[1])}


def run(script, *arguments):
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)


def test_theory_table_equals_the_paper():
    process = run("theory_table.py", "--devices", "4", "8")
    assert (process.returncode, process.stderr) == (0, "")
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in process.stdout.splitlines()
    ]
    assert cells[2:] == [
        ["1F1B", "M", "6 d", "6 d", "8 / 18", "16 / 42"],
        ["V-Min", "M/3", "4 d", "4 d", "4 / 11", "8 / 27"],
        ["V-Half", "M/2", "3 d", "3 d", "6 / 5", "10 / 17"],
        ["V-ZB", "M", "d", "0", "8 / 3", "16 / 7"],
    ]


def test_theory_table_of_earlier_methods():
    process = run("theory_table.py", "gems", "chimera", "bpipe", "--devices", "8")
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.splitlines()[2:] == [
        "| gems | 0 | grows with m | grows with m | 2 / 910 |",
        "| chimera | M/2 | 3 d | 3 d | 10 / 18 |",
        "| bpipe | M/2 | 6 d | 6 d | 10 / 42 |",
        "",
        "gems: two copies of the weights",
        "chimera: two copies of the weights; an even number of microbatches",
        "bpipe: activations travel between devices i and d - 1 - i",
    ]


def test_odd_number_of_devices_is_rejected():
    message = "chimera is analysed for an even number of devices and at least 1 microbatch, not for"
    with pytest.raises(ScheduleError, match=message):
        analyse("chimera", 5, 8)


@pytest.mark.slow
def test_gallery_shows_every_schedule(tmp_path):
    pytest.importorskip("matplotlib", reason="figures need the extra [draw]")
    folder = tmp_path / "gallery"
    process = run("gallery.py", folder, "--devices", "3", "--microbatches", "5")
    assert (process.returncode, process.stderr) == (0, "")
    page = (folder / "README.md").read_text()
    figures = re.findall(r"\]\(([^)]*)\)", page)
    assert figures == ["all.svg", *(f"{name}.svg" for name in NAMES)]
    assert all((folder / figure).stat().st_size > 5000 for figure in figures)
    assert "| V-Half | M/2 | 3 d |" in page
