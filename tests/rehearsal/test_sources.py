"""The Python of Megatron and Transformer Engine is found, or downloaded after a prompt."""

import argparse
import hashlib
import io
import sys
import zipfile
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from megatron_vshape.cli import dry_run
from megatron_vshape.cli.main import main
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal import ranks, sources
from megatron_vshape.rehearsal.command import Command
from megatron_vshape.rehearsal.sources import MEGATRON, TE, MissingSourceError, PythonSource

GPT = Command("pretrain_gpt.py", ())
LOCAL = Command("pretrain_gpt.py", ("--transformer-impl", "local"))
ANY, LINUX = "py3-none-any", "cp312-cp312-manylinux_2_28_x86_64"


@pytest.fixture(autouse=True)
def nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set an empty cache, no installed library, and a folder of wheels as pip's only index."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(sources.VARIABLE, raising=False)
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))


def wheel_of(source: PythonSource, tag: str, folder: Path) -> PythonSource:
    """Write a wheel with the name of a source, and return the source with its hash."""
    project = source.project.replace("-", "_")
    path = folder / f"{project}-{source.version}-{tag}.whl"
    about = f"{project}-{source.version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{source.folder}/__init__.py", "")
        metadata = f"Metadata-Version: 2.1\nName: {source.project}\nVersion: {source.version}\n"
        wheel.writestr(f"{about}/METADATA", metadata)
        wheel.writestr(f"{about}/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
        wheel.writestr(f"{about}/RECORD", "")
    return replace(source, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def cached_folders() -> list[Path]:
    return list(sources.cache().iterdir()) if sources.cache().is_dir() else []


@pytest.mark.parametrize(("source", "tag"), [(MEGATRON, LINUX), (TE, ANY)])
def test_a_wheel_with_another_hash_is_rejected_and_nothing_is_left(
    tmp_path: Path, source: PythonSource, tag: str
) -> None:
    wheel_of(source, tag, tmp_path / "wheels")
    with pytest.raises(ScheduleError, match="(?i)hash.*" + source.flag + " DIR"):
        sources.fetch(source)
    assert cached_folders() == []


@pytest.mark.parametrize(("source", "tag"), [(MEGATRON, LINUX), (TE, ANY)])
def test_a_wheel_with_the_pinned_hash_is_unpacked_once_and_found(
    tmp_path: Path, source: PythonSource, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = wheel_of(source, tag, tmp_path / "wheels")
    monkeypatch.setattr(sources, "MEGATRON" if source is MEGATRON else "TE", pinned)
    target = sources.fetch(pinned)
    assert cached_folders() == [target]
    find = (
        sources.find_te
        if source is TE
        else lambda directory: sources.find_megatron(directory, "x.py")
    )
    assert find(None) == target
    for wheel in (tmp_path / "wheels").iterdir():
        wheel.unlink()
    assert sources.fetch(pinned) == target  # no second download


def test_the_downloaded_megatron_can_be_imported_and_is_no_installed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A framework's settings need Megatron's parser, which `pip install .[estimate]` lacks."""
    with pytest.raises(MissingSourceError), sources.importable_megatron():
        pass
    core = MEGATRON.directory / MEGATRON.folder / "__init__.py"
    core.parent.mkdir(parents=True)
    core.write_text("")
    path = list(sys.path)
    with sources.importable_megatron():
        assert sys.path == [str(MEGATRON.directory), *path]
    assert sys.path == path
    imported = ModuleSpec("megatron.core", None, origin=str(core))
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: imported)
    assert sources.find_megatron(None, "x.py") == MEGATRON.directory
    installed = ModuleSpec("megatron.core", None, origin="/usr/lib/megatron/core/__init__.py")
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: installed)
    assert sources.find_megatron(None, "x.py") is None


def test_an_old_megatron_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "fork" / "pretrain_gpt.py"
    (script.parent / "megatron" / "core").mkdir(parents=True)
    script.write_text("from megatron import get_args")
    version = script.parent / "megatron" / "core" / "package_info.py"
    for text in ("", "MAJOR = 0\nMINOR = 16\n", "MAJOR = 1\nMINOR = 0\n"):
        version.write_text(text)
        assert sources.find_megatron(None, str(script)) == script.parent
    MEGATRON.directory.joinpath(MEGATRON.folder).mkdir(parents=True)
    version.write_text("MAJOR = 0\nMINOR = 9\nPATCH = 0\n")
    assert sources.find_megatron(None, str(script)) == MEGATRON.directory
    version.unlink()
    (script.parent / "megatron" / "__init__.py").touch()
    monkeypatch.syspath_prepend(script.parent)
    assert sources.find_megatron(None, str(script)) == MEGATRON.directory
    assert str(script.parent) not in sys.path  # it would hide Megatron-Core
    monkeypatch.chdir(script.parent)
    monkeypatch.syspath_prepend("")
    sources.hide_old_megatron()
    assert "" not in sys.path
    assert sources.find_script(str(script), MEGATRON.directory) != script
    assert "is of a Megatron-Core before 0.16" in caplog.text


def test_a_command_whose_settings_need_megatron_downloads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetched: list[PythonSource] = []

    def read_command(words: list[str]) -> Command:
        if not fetched:
            raise MissingSourceError(MEGATRON)
        return Command("pretrain_gpt.py", tuple(words))

    monkeypatch.setattr(dry_run, "read_command", read_command)
    monkeypatch.setattr(dry_run, "fetch", fetched.append)
    options = argparse.Namespace(model=None, command=["--bf16"], fetch=True)
    assert dry_run.command_with_model(options).flags == ("--bf16",)
    assert fetched == [MEGATRON]


def test_missing_sources_depend_on_the_command() -> None:
    assert ranks.missing_sources(GPT, None, None) == [MEGATRON, TE]
    assert ranks.missing_sources(LOCAL, None, None) == [MEGATRON]


SWEEP = Path(__file__).parents[2] / "configs" / "sweeps" / "grid_38b_h200.yaml"


@pytest.mark.parametrize(
    "words",
    [["rehearse"], ["advise", "--gpus", "8xH100"], ["sweep", str(SWEEP), "--predict-only"]],
    ids=["rehearse", "advise", "sweep"],
)
def test_without_a_terminal_one_error_names_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr("megatron_vshape.cli.files.is_installed", lambda module: True)
    sizes = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
    sizes += " --max-position-embeddings 64 --micro-batch-size 1"
    assert main([*words, "--", "pretrain_gpt.py", *sizes.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "`megatron-vshape rehearse --fetch`" in error
    assert "megatron-core 0.19.2 (2.4 MB) and transformer-engine 2.20.2 (1.2 MB)" in error
    assert cached_folders() == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "flag", "downloads"),
    [("y\n", False, 2), ("\n", False, 0), ("n\n", False, 0), ("", True, 2)],
)
def test_a_terminal_is_prompted_once(
    monkeypatch: pytest.MonkeyPatch, answer: str, flag: bool, downloads: int
) -> None:
    fetched: list[PythonSource] = []
    monkeypatch.setattr(dry_run, "fetch", lambda source: fetched.append(source) or Path("x"))
    shown = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", shown)
    options = argparse.Namespace(megatron=None, te=None, fetch=flag)
    if downloads:
        dry_run.fetch_missing(options, GPT)
    else:
        with pytest.raises(ScheduleError, match="rehearse --fetch"):
            dry_run.fetch_missing(options, GPT)
    assert len(fetched) == downloads
    assert shown.getvalue().count("[y/N]") == (not flag)


def test_the_pins_are_those_of_the_constraints() -> None:
    path = Path(__file__).parents[2] / "constraints.txt"
    assert f"{MEGATRON.project}=={MEGATRON.version}" in path.read_text().splitlines()


@pytest.mark.parametrize(
    ("module", "fix"), [("einops", "[estimate]"), ("megatron.training", ""), ("", "")]
)
def test_a_missing_library_names_the_extra(module: str, fix: str) -> None:
    error = f"ModuleNotFoundError: No module named '{module}'" if module else "OSError: full"
    assert (fix in ranks._install_hint(error)) if fix else ranks._install_hint(error) == ""
