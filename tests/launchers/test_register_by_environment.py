"""MEGATRON_VSHAPE registers a schedule in a program that does not import this package."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_vshape.mcore.options import options_in

PROGRAM = """
import sys
print("begun:", "megatron_vshape.from_environment" in sys.modules, "megatron" in sys.modules)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron_vshape.mcore.hooks import registry
print("hooked:", hasattr(get_forward_backward_func, "__wrapped__"))
"""
START_UP = Path(__file__).parents[2] / "megatron_vshape.pth"


def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the program as if the package's start-up file were installed."""
    folder.joinpath("sitecustomize.py").write_text(START_UP.read_text())
    path = os.pathsep.join([str(folder), str(START_UP.parent)])
    environment = os.environ | {"MEGATRON_VSHAPE": text, "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="Megatron is not installed")
def test_schedule_is_registered_when_megatron_is_imported(tmp_path: Path) -> None:
    ended = run("schedule=v-half", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-2:] == ["begun: True False", "hooked: True"]


@pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="Megatron is not installed")
def test_invalid_variable_ends_the_program_with_an_error(tmp_path: Path) -> None:
    ended = run("v-half", tmp_path)
    assert ended.returncode != 0
    assert "MEGATRON_VSHAPE='v-half': 'v-half' is no name=value, as in schedule=v-half" in (
        ended.stderr
    )


def test_options_have_the_types_of_register() -> None:
    text = "schedule=auto, layer_split=1,2,2,1,timeout_seconds=90,profile_steps=4:6"
    text += ",host_memory_limit_gib=100,vocab_parallel=False"
    assert options_in(text) == {
        "schedule": "auto",
        "layer_split": "1,2,2,1",
        "timeout_seconds": 90.0,
        "profile_steps": (4, 6),
        "host_memory_limit_gib": 100.0,
        "vocab_parallel": False,
    }


@pytest.mark.parametrize(
    "text", ["timeout_seconds=soon", "profile_steps=4", "memory_limit_gib=", "vocab_parallel=yes"]
)
def test_invalid_values_raise_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=f"MEGATRON_VSHAPE='{text}': "):
        options_in(text)
