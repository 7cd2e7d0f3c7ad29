"""The released package: sdist and wheel in separate environments."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy
import pytest

from megatron_vshape import __version__

ROOT = Path(__file__).parents[2]
NAME = f"megatron_vshape-{__version__}"
USER_ENVIRONMENT = {
    key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "MEGATRON_"))
}
BUILD = "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])"
TRAINING = """
--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 32 --num-attention-heads 2
--seq-length 16 --max-position-embeddings 16 --position-embedding-type rope --micro-batch-size 1
--global-batch-size 4 --mock-data --tokenizer-type NullTokenizer --vocab-size 64 --train-iters 4
--lr 1e-3 --eval-iters 0 --eval-interval 100 --log-interval 1 --transformer-impl local
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm
--no-rope-fusion --distributed-backend gloo
""".split()


def run_command(
    command: list[str | Path], folder: Path, **variables: str
) -> subprocess.CompletedProcess:
    return subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=USER_ENVIRONMENT | variables,
        capture_output=True,
        text=True,
        timeout=600,
    )


def run_checked(command: list[str | Path], folder: Path, **variables: str) -> str:
    """Return the output of a command that must succeed."""
    process = run_command(command, folder, **variables)
    assert process.returncode == 0, f"{process.args}\n{process.stdout}\n{process.stderr}"
    return process.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a source archive of the files that git would release."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("the sources are not git's: nothing tells which files belong to them")
    folder = tmp_path_factory.mktemp("sdist")
    files = run_checked(["git", "ls-files", "-z", "-co", "--exclude-standard"], ROOT).split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    run_checked([sys.executable, "-c", BUILD, folder], folder / "source")
    return folder / f"{NAME}.tar.gz"


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """Build the wheel from the source archive alone."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run_checked([*pip, "--wheel-dir", sdist.parent, sdist], sdist.parent)
    return sdist.parent / f"{NAME}-py3-none-any.whl"


def python_3_11() -> str:
    """Return a Python 3.11 that runs; a shim of pyenv may not."""
    for candidate in filter(None, map(shutil.which, ("python3.11", "/usr/bin/python3.11"))):
        code = "import sys, venv, ensurepip; print(sys.version_info[:2])"
        if run_command([candidate, "-c", code], ROOT).stdout == "(3, 11)\n":
            return candidate
    pytest.skip("there is no Python 3.11 with its venv module, the oldest that the planner takes")


@pytest.fixture(scope="module")
def with_numpy(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of a Python 3.11 with only the wheel and numpy."""
    programs = tmp_path_factory.mktemp("numpy-alone") / "bin"
    run_checked([python_3_11(), "-m", "venv", programs.parent], ROOT)
    run_checked([programs / "python", "-m", "pip", "install", "--quiet", wheel], ROOT)
    return programs


@pytest.fixture(scope="module")
def examples(with_numpy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that `examples` writes."""
    folder = tmp_path_factory.mktemp("examples")
    run_checked([with_numpy / "megatron-vshape", "examples"], folder)
    return folder


def test_source_archive_includes_test_files(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.removeprefix(f"{NAME}/") for name in archive.getnames()}
    required = "LICENSE CHANGELOG.md CITATION.cff constraints.txt scripts/test.sh tests/conftest.py"
    assert set(required.split()) <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith(".venv")]


def test_written_examples_equal_the_repository(examples: Path) -> None:
    written = [path for path in examples.rglob("*") if path.is_file()]
    assert (examples / "configs/sweeps/laptop.yaml") in written
    for path in written:
        assert path.read_bytes() == (ROOT / path.relative_to(examples)).read_bytes()


class TestNumpyAlone:
    SIZES = ("--devices", "2", "--microbatches", "4")

    def test_schedule(self, with_numpy: Path, examples: Path) -> None:
        output = run_checked(
            [with_numpy / "megatron-vshape", "schedule", "v-half", *self.SIZES], examples
        )
        assert "span bubble" in output

    def test_plan(self, with_numpy: Path, examples: Path) -> None:
        command = [with_numpy / "megatron-vshape", "plan", *self.SIZES, "--cost", "1,1,1,0"]
        output = run_checked([*command, "--chunks", "2", "--export", "plan.json"], examples)
        assert "lower bound" in output
        assert (examples / "plan.json").is_file()

    @pytest.mark.parametrize(
        ("command", "extra"),
        [
            ("playground", "playground"),
            ("sweep configs/sweeps/laptop.yaml --predict-only", "sweep"),
            ("schedule v-half --devices 2 --microbatches 4 --figure a.svg", "draw"),
            ("rehearse -- pretrain_gpt.py", "estimate"),
            ("advise --gpus 8xH100 -- pretrain_gpt.py", "estimate"),
        ],
    )
    def test_error_names_the_missing_extra(
        self, with_numpy: Path, examples: Path, command: str, extra: str
    ) -> None:
        process = run_command([with_numpy / "megatron-vshape", *command.split()], examples)
        assert (process.returncode, process.stdout) == (2, "")
        assert f"pip install 'megatron-vshape[{extra}]'\n" in process.stderr
        assert process.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def with_megatron(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of an environment with the wheel and the packages of this one.

    It excludes the checkout, which only a start-up file of this environment adds to the path.
    """
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip("Megatron's trainer is not installed")
    programs = tmp_path_factory.mktemp("with-megatron") / "bin"
    run_checked([sys.executable, "-m", "venv", "--without-pip", programs.parent], ROOT)
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "install", "--quiet"]
    run_checked([*pip, "--no-deps", wheel], ROOT)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run_checked([programs / "python", "-c", code], ROOT).strip())
    (packages / "base.pth").write_text(str(Path(numpy.__file__).parents[1]))
    return programs


def test_wheel_trains_with_megatron(with_megatron: Path, tmp_path: Path) -> None:
    run_checked([with_megatron / "megatron-vshape", "examples"], tmp_path)
    torchrun = [with_megatron / "python", "-m", "torch.distributed.run", "--standalone"]
    output = run_checked(
        [*torchrun, "--nproc-per-node", "2", "scripts/pretrain_gpt.py", *TRAINING]
        + ["--pipeline-schedule", "v-half"],
        tmp_path,
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
    )
    assert "pipeline schedule v-half, 2 ranks, 4 microbatches" in output
    assert "iteration        4/       4" in output
    assert "tokens/s" in output


def test_start_up_file_of_wheel_is_read(with_megatron: Path, tmp_path: Path) -> None:
    code = "import sys; print('megatron_vshape.from_environment' in sys.modules)"
    command = [with_megatron / "python", "-c", code]
    assert run_checked(command, tmp_path, MEGATRON_VSHAPE="schedule=v-half") == "True\n"
    assert run_checked(command, tmp_path) == "False\n"
