"""doctor: versions, warnings, hooks and options, and an exit status: 1 if a hook does not fit."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_vshape.cli import doctor

ROOT = Path(__file__).parents[2]
THREE_REPORTS = """
import contextlib, io, json, sys
from megatron_vshape.cli.main import main

def report(*options):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = main(["doctor", *options])
    print(json.dumps([status, out.getvalue()]), flush=True)

report("--verbose")
report()
import megatron.training.training as training
training.train = lambda everything: None
report()
"""
"""The verbose report, the short one, and that of a Megatron with another trainer.

In one process, because the import of Megatron takes most of its time.
"""


class Report(NamedTuple):
    """Exit status and output of doctor, and all that the process wrote to stderr."""

    status: int
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    pytest.importorskip("megatron.training")
    run = python("-c", THREE_REPORTS)
    assert run.returncode == 0, run.stderr
    return [Report(*json.loads(line), run.stderr) for line in run.stdout.splitlines()]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


def test_doctor_lists_missing_packages() -> None:
    run = python("-S", "-m", "megatron_vshape.cli.main", "doctor")
    assert run.returncode == 0, run.stderr
    lines = [line.split(maxsplit=1) for line in run.stdout.splitlines()]
    states = {line[0]: line[1] for line in lines if len(line) == 2}
    assert states["torch"] == "not installed"
    assert states["megatron-core"].startswith("not installed: required for training; pip install ")
    assert "not checked: megatron-core is not installed" in run.stdout
    assert "\nplanning: ready\ntraining: requires megatron-core\ndrawing: pip" in run.stdout
    assert re.search(r"\n  several GPUs +none\n", run.stdout)
    assert re.search(r"\n  one GPU, as one rank +offloading\n", run.stdout)


def test_verbose_doctor_lists_hooks_and_options(reports: list[Report]) -> None:
    core = pytest.importorskip("megatron.core")
    from megatron_vshape.mcore.hooks import registry
    from megatron_vshape.mcore.refusals import REFUSALS, By
    from megatron_vshape.mcore.setup.features import features
    from megatron_vshape.mcore.setup.judged_arguments import TOPICS
    from megatron_vshape.mcore.setup.judgements import words
    from megatron_vshape.mcore.setup.translate import TRANSLATIONS

    run = reports[0]
    assert run.status == 0, run.stdout + run.stderr
    assert run.stderr == ""
    text = " ".join(run.stdout.split())
    version = core.__version__.partition("+")[0]
    hooks = len(registry.HOOKS) + len(registry.PROBES)
    assert f"all {hooks} hooks found in megatron-core {version} " in text
    assert all(f" {record.target}" in text for record in (*registry.HOOKS, *registry.PROBES))
    assert all(record.reason in text for record in (*registry.HOOKS, *registry.PROBES))
    unlisted = By.LATE, By.RECORDING
    refusals = [refusal for by in By if by not in unlisted for refusal in REFUSALS[by]]
    refusals += [refusal for feature in features() for refusal in feature.refusals]
    assert all(refusal.option in text and refusal.why in text for refusal in refusals)
    assert all(translation.becomes in text for translation in TRANSLATIONS)
    names = [name.replace("_", "-") for translation in TRANSLATIONS for name in translation.names]
    assert all(f" --{name} " in text for name in names)
    judged = [word.name for topic in TOPICS for word in words(topic.names)]
    assert not {*judged} - {*text.replace(",", "").replace("*", "").split()}
    assert all(topic.reason in text for topic in TOPICS)
    assert "fp32, fp32 accumulation, on this cpu addmm" in text
    assert text.endswith("planning: ready training: ready drawing: ready")


def test_the_report_is_short_and_names_options(reports: list[Report]) -> None:
    core = pytest.importorskip("megatron.core")
    run = reports[1]
    assert run.status == 0, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) < 150
    version = core.__version__.partition("+")[0]
    assert any(re.fullmatch(rf"  all \d+ hooks found in megatron-core {version}", x) for x in lines)
    assert "  --use-megatron-fsdp" in lines
    assert "megatron.core.pipeline_parallel" not in run.stdout  # hooks only with --verbose


def test_doctor_warns_of_known_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for version, warned in (((2, 30, 7), True), ((2, 31, 2), False)):
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda version=version: version)
        assert (doctor.NCCL_WARNING in doctor._warnings()) == warned


@pytest.mark.slow
def test_doctor_accepts_another_megatron_checkout(tmp_path: Path) -> None:
    """One whose trainer is empty: looked at in place of the installed one."""
    pytest.importorskip("megatron.core")
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").write_text("__version__ = '0.99.1'\n")
    doctor = "from megatron_vshape.cli.main import main\nsys.exit(main(['doctor']))"
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{doctor}"
    run = python("-c", code)
    assert run.returncode == 1
    assert "does not fit: megatron-core" in run.stdout.splitlines()[-1]
    assert "cannot be imported: " in run.stdout.splitlines()[-1]


def test_a_moved_target_is_named_and_is_status_1(reports: list[Report]) -> None:
    run = reports[2]
    assert run.status == 1, run.stderr
    assert "moved  megatron.training.training.train(" in run.stdout
    last = run.stdout.splitlines()[-1]
    assert last.startswith("does not fit: megatron-core 0.")
    assert "megatron.training.training.train takes (everything) and this package needs" in last
