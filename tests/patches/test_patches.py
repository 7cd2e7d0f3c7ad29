"""The patches for Megatron-LM checkouts: contents, application, and training."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = ROOT / "patches"
HOW_TO_GET_ONE = (
    "MEGATRON_LM_PATH names no checkout; get one with git clone --depth 1 --branch core_v0.19.0 "
    "https://github.com/NVIDIA/Megatron-LM.git (also: core_v0.18.2, core_v0.17.1)"
)


class Row(NamedTuple):
    """A line of the README's table."""

    patch: str
    tag: str
    commit: str
    file: str
    released: str
    patched: str


def rows() -> list[Row]:
    lines = (PATCHES / "README.md").read_text().splitlines()
    cells = ([cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines)
    return [Row(*line) for line in cells if line[0].startswith("megatron-lm-")]


def apply(*arguments: str, patches: Path = PATCHES) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(patches / "apply.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_table_lists_every_patch_with_commit_and_checksums() -> None:
    assert {row.patch for row in rows()} == {path.name for path in PATCHES.glob("*.patch")}
    for row in rows():
        assert row.patch == f"megatron-lm-{row.tag.removeprefix('core_v')}.patch"
        assert re.fullmatch("[0-9a-f]{40}", row.commit)
        for checksum in (row.released, row.patched):
            assert re.fullmatch("[0-9a-f]{64}", checksum)
        assert row.released != row.patched


def test_manual_command_works_from_the_repository(tmp_path: Path) -> None:
    scripts = [tmp_path / f"pretrain_{model}.py" for model in ("gpt", "hybrid")]
    for script in scripts:
        script.write_text("pass\n" * 400)
    match = re.search(r"^`(git .*)`\.$", (PATCHES / "README.md").read_text(), re.MULTILINE)
    command = match[1].replace("PATH/Megatron-LM", str(tmp_path))
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    subprocess.run(["bash", "-ec", command], cwd=ROOT, env=environment, check=True)
    assert all("megatron_vshape" in script.read_text() for script in scripts)


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.tag} {row.file}")
def test_patch_adds_a_few_lines_without_context(row: Row) -> None:
    _, *files = (PATCHES / row.patch).read_text().split("diff --git ")
    (file_diff,) = (part for part in files if part.startswith(f"a/{row.file} "))
    lines = f"diff --git {file_diff}".splitlines()
    assert lines[:3] == [
        f"diff --git a/{row.file} b/{row.file}",
        f"--- a/{row.file}",
        f"+++ b/{row.file}",
    ]
    hunk = re.fullmatch(r"@@ -(\d+),0 \+(\d+),(\d+) @@", lines[3])
    old_start, new_start, count = map(int, hunk.groups())
    assert new_start == old_start + 1
    assert count == len(lines) - 4 <= 5
    assert all(line.startswith("+") for line in lines[4:])
    added = "\n".join(line[1:] for line in lines[4:])
    compile(added, row.patch, "exec")
    assert "megatron_vshape.register()" in added


@pytest.fixture
def made_up(tmp_path: Path) -> tuple[Path, Path]:
    """Return a folder of patches whose table has a made-up file, and a checkout with that file."""
    patches, checkout = tmp_path / "patches", tmp_path / "outer" / "checkout"
    shutil.copytree(PATCHES, patches)
    checkout.mkdir(parents=True)
    row = rows()[0]
    released = "".join(f"# line {number}\n" for number in range(1, 40))
    (checkout / row.file).write_text(released)
    hunk = (patches / row.patch).read_text().splitlines(keepends=True)[3:]
    position = int(re.findall(r"\d+", hunk[0])[0])
    lines = released.splitlines(keepends=True)
    patched = "".join([*lines[:position], *(line[1:] for line in hunk[1:]), *lines[position:]])
    readme = (patches / "README.md").read_text()
    for old, text in ((row.released, released), (row.patched, patched)):
        readme = readme.replace(old, hashlib.sha256(text.encode()).hexdigest())
    (patches / "README.md").write_text(readme)
    # `git apply` would silently skip a checkout without .git inside a repository.
    subprocess.run(["git", "init", "-q", str(checkout.parent)], check=True)
    return patches, checkout


def test_apply_is_idempotent_and_reversible(made_up: tuple[Path, Path]) -> None:
    patches, checkout = made_up
    file = checkout / rows()[0].file
    released = file.read_text()
    said = [apply(str(checkout), patches=patches) for _ in range(2)]
    assert [process.returncode for process in said] == [0, 0], said
    assert "is patched now (megatron-lm-0.17.1.patch)" in said[0].stdout
    assert "is as wanted already" in said[1].stdout
    added = set(file.read_text().splitlines()) - set(released.splitlines())
    assert "megatron_vshape.register()" in added
    said = [apply("--reverse", str(checkout), patches=patches) for _ in range(2)]
    assert [process.returncode for process in said] == [0, 0], said
    assert "is released now" in said[0].stdout
    assert "is as wanted already" in said[1].stdout
    assert file.read_text() == released


def test_modified_file_is_unchanged_with_a_one_line_error(
    made_up: tuple[Path, Path],
) -> None:
    patches, checkout = made_up
    file = checkout / rows()[0].file
    file.write_text(file.read_text() + "# mine\n")
    original_text = file.read_text()
    for arguments in ((str(checkout),), ("--reverse", str(checkout))):
        said = apply(*arguments, patches=patches)
        assert said.returncode == 1
        assert said.stderr.count("\n") == 1
        scripts = "pretrain_gpt.py,pretrain_hybrid.py"
        assert f"{scripts} in {checkout} differ from every release" in said.stderr
    assert file.read_text() == original_text


@pytest.mark.parametrize(
    ("arguments", "text"), [((), "usage: "), (("/nowhere/at/all",), "is not a directory")]
)
def test_path_without_a_checkout_is_rejected(arguments: tuple[str, ...], text: str) -> None:
    said = apply(*arguments)
    assert said.returncode == 1
    assert text in said.stderr


@pytest.fixture
def checkout() -> Path:
    path = Path(os.environ.get("MEGATRON_LM_PATH", ""))
    if "MEGATRON_LM_PATH" not in os.environ or not (path / "pretrain_gpt.py").is_file():
        pytest.skip(HOW_TO_GET_ONE)
    return path


def train(*script: str) -> list[str]:
    """Train two steps on two ranks of the CPU, and return loss and grad norm as printed."""
    farm = pytest.importorskip("mcore.farm")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [*script, *farm.MODEL, "--train-iters", "2", "--pipeline-model-parallel-size", "2"]
    command += ["--no-bias-gelu-fusion", "--no-bias-dropout-fusion"]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "1",
    }
    run = subprocess.run(
        [*command, "--pipeline-schedule", "v-half"],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-3000:]
    assert "pipeline schedule v-half, 2 ranks, 8 microbatches" in run.stdout
    values: list[str] = re.findall(r"(?:lm loss|grad norm): ([0-9.E+-]+)", run.stdout)
    return values


def test_checkout_trains_patched_and_through_the_launcher(checkout: Path, tmp_path: Path) -> None:
    copy = tmp_path / "Megatron-LM"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git", "tests", "docs"))
    script = copy / "pretrain_gpt.py"
    released = script.read_bytes()
    launched = train("-m", "megatron_vshape.mcore.launch", str(script))
    assert len(launched) == 4
    assert script.read_bytes() == released
    if hashlib.sha256(released).hexdigest() not in {row.released for row in rows()}:
        assert apply(str(copy)).returncode == 1  # of another release, such as main
        return
    assert apply(str(copy)).returncode == 0
    assert train(str(script)) == launched
    assert apply("--reverse", str(copy)).returncode == 0
    assert script.read_bytes() == released
