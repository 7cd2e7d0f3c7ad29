"""The core imports fast and without the libraries of other layers."""

import subprocess
import sys

MODULES = (
    "paper.blocks "
    "paper.catalogue check.verify check.simulate model.schedule model.costs "
    "program.lowering program.early_start plan"
)
CODE = """
import sys, time
begin = time.process_time()
for name in sys.argv[1:]:
    __import__(f"megatron_vshape.core.{name}")
seconds = time.process_time() - begin
heavy = {"torch", "megatron", "numpy", "numba", "matplotlib"} & set(sys.modules)
print(seconds, *sorted(heavy))
"""


def test_core_imports_fast_and_without_torch() -> None:
    """The minimum CPU time of several runs, because the machine may be busy."""
    runs = []
    for _ in range(5):
        command = [sys.executable, "-c", CODE, *MODULES.split()]
        seconds, *heavy = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.split()
        assert heavy == []
        runs.append(float(seconds))
    assert min(runs) < 0.3
