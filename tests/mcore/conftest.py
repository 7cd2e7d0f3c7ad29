"""Farms for all tests of a session, and runs that several tests look at."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from mcore.farm import Ended, Farm, Train
from skips import TE_MISSING


def _has_hybrid() -> bool:
    try:
        return find_spec("megatron.core.models.hybrid") is not None
    except ModuleNotFoundError:  # no Megatron at all
        return False


needs_hybrid = pytest.mark.skipif(
    not _has_hybrid(), reason="megatron-core has HybridModel from 0.18 on"
)


def te_directories() -> list[str]:
    """Return the directories of Transformer Engine's Python, one for each version."""
    configured = os.environ.get("TRANSFORMER_ENGINE_PYTHON", "")
    if configured:
        return configured.split(os.pathsep)
    if torch.cuda.is_available():
        return []  # tests/gpu runs the real thing
    spec = find_spec("transformer_engine")
    return [] if spec is None or spec.origin is None else [str(Path(spec.origin).parents[1])]


@pytest.fixture(scope="session")
def farm(tmp_path_factory: pytest.TempPathFactory, common: Path) -> Iterator[Farm]:
    """Return the process that trains."""
    farm = Farm(tmp_path_factory.mktemp("farm"), common=common)
    yield farm
    farm.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests that use `te_farm` once for each version of Transformer Engine."""
    if "te_farm" in metafunc.fixturenames:
        versions = [
            pytest.param(directory, id=f"te{index or ''}")
            for index, directory in enumerate(te_directories())
        ]
        missing = pytest.param("", id="te", marks=pytest.mark.skip(reason=TE_MISSING))
        metafunc.parametrize("te_farm", versions or [missing], indirect=True, scope="session")


@pytest.fixture(scope="session")
def te_farm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, common: Path
) -> Iterator[Farm]:
    """Return the process that trains with Transformer Engine's Python, one for each version."""
    farm = Farm(tmp_path_factory.mktemp("te"), request.param, common)
    yield farm
    farm.close()


@pytest.fixture(scope="session")
def train(farm: Farm) -> Train:
    """Return a function that trains on a number of ranks with these flags, once per session."""
    runs: dict[tuple[object, ...], Ended] = {}

    def run(ranks: int, *arguments: str, without: tuple[str, ...] = (), plugin: str = "") -> Ended:
        key = (ranks, arguments, without, plugin)
        if key not in runs:
            runs[key] = farm.run(ranks, *arguments, without=without, plugin=plugin)
        return runs[key].check()

    return run
