"""Markers (declared in pyproject.toml), and an empty home directory for every test."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from rehearsal.warm import Warm

pytest_plugins = ["skips"]

# As in scripts/lib.sh: packages may come uncompiled, and a process that compiles Megatron's imports
# for itself needs 16 seconds instead of 6.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A busy machine makes any example slow, and the deadline of 200 ms would fail a correct one.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

with contextlib.suppress(ImportError):
    # Imported after Megatron, whose dependencies log by absl, it has absl close what stands for
    # stderr, which is pytest's.
    import submitit  # noqa: F401


TE_VARIABLE = "TRANSFORMER_ENGINE_PYTHON"
DOWNLOADS = Path(__file__).parents[1] / ".cache" / "megatron_vshape"
"""Downloads of scripts/test.sh."""


def pytest_configure(config: pytest.Config) -> None:
    """Replace the home and cache directories by empty ones, for processes of the tests as well.

    A test that passes only because of an earlier download of the user then fails. Transformer
    Engine's Python is that of scripts/test.sh, unless its variable is set.
    """
    if hasattr(config, "workerinput"):
        return  # pytest-xdist's workers inherit the environment
    home = Path.home()
    pip_cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache", "pip")
    os.environ.setdefault("PIP_CACHE_DIR", str(pip_cache))
    if (home / ".pyenv").is_dir():
        os.environ.setdefault("PYENV_ROOT", str(home / ".pyenv"))
    directory = tempfile.TemporaryDirectory(prefix="home-", ignore_cleanup_errors=True)
    config.add_cleanup(directory.cleanup)
    os.environ["HOME"] = directory.name
    os.environ["XDG_CACHE_HOME"] = str(Path(directory.name, ".cache"))
    os.environ["HF_HUB_OFFLINE"] = "1"
    downloads = sorted(DOWNLOADS.glob("transformer_engine-*"))
    if downloads:
        os.environ.setdefault(TE_VARIABLE, str(downloads[-1]))


OF_OTHER_THINGS = {"cli", "playground", "rehearsal", "tuning"}
"""Folders of tests that are not of how good a plan is."""


@pytest.fixture(scope="session")
def common(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of the session that all workers of pytest-xdist share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory, common: Path) -> Iterator[Warm]:
    """Return a runner of the command line whose dry runs import Megatron once."""
    warm = Warm(tmp_path_factory.mktemp("warm"), common)
    yield warm
    warm.close()


@pytest.fixture(autouse=True)
def small_budget(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan with a tenth of the default budget or less in the tests of those folders.

    A server that a browser asks is a process of its own, which plans as ever.
    """
    in_browser = request.node.get_closest_marker("browser")
    if request.path.parent.name in OF_OTHER_THINGS and not in_browser:
        default = "megatron_vshape.core.planner.search.default_steps"
        monkeypatch.setattr(default, lambda _problem: 10_000)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where torch sees no GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return  # the core's tests must run without torch
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))
