"""The launcher runs a script of Megatron's as it is."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import helper_beside_the_script
from megatron.training import arguments, pretrain

if __name__ == "__main__":
    args = arguments.parse_args()
    print(__file__ == sys.argv[0], args.pipeline_schedule, pretrain.__module__)

    def annotated(x: int): ...
    assert annotated.__annotations__ == {"x": int}
"""


SPAWNING = """
import multiprocessing
import sys

names = {name for name in globals() if not name.startswith("__")}

class Batch:
    size = 3

def double(batch):
    return 2 * batch.size

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(sorted(names), __spec__, pool.apply(double, (Batch(),)))
"""


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_vshape.mcore.launch", *arguments]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


def test_runs_a_script_with_the_flags(tmp_path: Path) -> None:
    (tmp_path / "helper_beside_the_script.py").touch()
    script = tmp_path / "pretrain.py"
    script.write_text(SCRIPT)
    run = launch(str(script), "--pipeline-schedule", "v-min")
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "True v-min megatron.training.training"


def test_script_is_the_main_module_and_spawned_processes_find_its_classes(
    tmp_path: Path,
) -> None:
    script = tmp_path / "spawning.py"
    script.write_text(SPAWNING)
    run = launch(str(script))
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "['multiprocessing', 'sys'] None 6"


def test_invalid_commands_are_reported(tmp_path: Path) -> None:
    run = launch()
    assert run.returncode == 1
    assert run.stderr.startswith("usage: ")
    run = launch(str(tmp_path / "gone.py"))
    assert run.returncode == 1
    assert "gone.py cannot be read" in run.stderr
