"""benchmarks/slices.md has the table that benchmarks/slices_table.py prints."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_table_of_slices_equals_its_page():
    command = [sys.executable, str(HERE / "slices_table.py"), "v-zb", "--slices", "4", "8"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    page = (HERE / "slices.md").read_text().replace("**", "")
    rows = [line.split() for line in process.stdout.splitlines() if line.startswith("V-ZB")]
    assert [row[:3] for row in rows] == [["V-ZB", "4", "0.344"], ["V-ZB", "8", "0.234"]]
    for name, slices, peak, *times in rows:
        even, real = " ".join(times[:5]), " ".join(times[5:])
        assert f"| {name} | {slices} | {peak} | {even} | {real} |" in page
