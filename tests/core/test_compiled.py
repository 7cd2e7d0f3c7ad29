"""Compiled loops create, simulate and draw large schedules with bitwise equal results."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_vshape import Costs, Schedule, ScheduleError, Timeline, make, simulate
from megatron_vshape.core import compiling
from megatron_vshape.core.list_scheduler import number_passes
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.paper.catalogue import EVERY_NAME

SIZES = [(1, 4), (2, 5), (3, 7), (4, 8), (5, 20), (8, 33), (16, 40)]


def schedules_and_timelines(name: str) -> list[tuple[Schedule, Timeline]]:
    """Return the schedule of this name with its timeline, for every supported size."""
    results = []
    for devices, microbatches in SIZES:
        try:
            schedule = make(name, devices, microbatches)
        except ScheduleError:  # these sizes are not supported
            continue
        sizes = devices, schedule.num_stages
        costs = Costs.uniform(*sizes, forward=1.03, backward=1.15, weight=0.85, send=0.07)
        results.append((schedule, simulate(schedule, costs)))
    return results


@pytest.mark.parametrize("name", EVERY_NAME)
def test_compiled_loops_produce_identical_schedules(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreted = schedules_and_timelines(name)
    monkeypatch.setattr(compiling, "COMPILED_FROM", 0)
    assert interpreted
    assert schedules_and_timelines(name) == interpreted
    assert type(schedules_and_timelines(name)[0][1].starts[0][0]) is float


# Recorded with the loops before compilation, which sorted all passes.
RECORDED_DIGESTS = {
    "gpipe": "727096a646ba6273",
    "1f1b": "fedc353f22b5d42a",
    "eager-1f1b": "cd2dd5007a62cc00",
    "interleaved-1f1b": "eb910b0cdce4b678",
    "grouped-interleaved-1f1b": "1dd55297142c50ba",
    "zb-h1": "d4ebebf5f953c0fd",
    "zb-h2": "0c3868bac8d3ecaf",
    "1f1b-v": "39d4c74024abf8b2",
    "v-two-thirds": "c2a42212a3e9e847",
    "v-min": "d17bc39144836c47",
    "v-half": "8b62d2c666e4caae",
    "v-zb": "2e0b0dcdd012803f",
    "dualpipev": "8927bf9aa44a9795",
    "overlapped-interleaved-1f1b": "922d31584a839af9",
}


@pytest.mark.parametrize("name", EVERY_NAME)
def test_schedules_match_recorded_digests(name: str) -> None:
    text = make(name, 12, 60).to_json()
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == RECORDED_DIGESTS[name]


@pytest.mark.parametrize("compiled_from", [0, compiling.COMPILED_FROM])
def test_pass_without_a_stage_is_rejected_before_compiled_loops(
    compiled_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "COMPILED_FROM", compiled_from)
    for wrong in (Pass(Kind.F, 7, 0), Pass(Kind.F, 0, 5), Pass(Kind.F, -1, 0)):
        with pytest.raises(IndexError):
            number_passes([(wrong,)], [Kind.F], 1, 1)


def test_cached_code_of_renamed_types_is_recompiled(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(
        "import kept\n"
        "from megatron_vshape.core.compiling import compiled\n"
        "@compiled\n"
        "def twice(pair):\n"
        "    return 2 * pair.left\n"
        "print(twice(kept.TYPE(21, 0)))\n"
    )
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    for name in ("Before", "After"):
        fields = "left: int\n    right: int\n"
        (tmp_path / "kept.py").write_text(
            f"from typing import NamedTuple\nclass {name}(NamedTuple):\n    {fields}TYPE = {name}\n"
        )
        command = [sys.executable, str(tmp_path / "twice.py")]
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert process.stdout == "42\n", process.stderr
