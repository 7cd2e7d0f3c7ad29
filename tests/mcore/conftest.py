"""One farm for all tests of a session, and runs that several tests look at."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from mcore.farm import Ended, Farm

UNTIED = "--untie-embeddings-and-output-weights"


def _has_hybrid() -> bool:
    try:
        return find_spec("megatron.core.models.hybrid") is not None
    except ModuleNotFoundError:  # no Megatron at all
        return False


needs_hybrid = pytest.mark.skipif(
    not _has_hybrid(), reason="megatron-core has HybridModel from 0.18 on"
)


@pytest.fixture(scope="session")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    """Return the process that trains."""
    farm = Farm(tmp_path_factory.mktemp("farm"))
    yield farm
    farm.close()


@pytest.fixture(scope="session")
def train(farm: Farm) -> Callable[..., Ended]:
    """Return a function that trains on a number of ranks with these flags, once per session."""
    runs: dict[tuple[object, ...], Ended] = {}

    def run(
        ranks: int, *arguments: str, without: tuple[str, ...] = (), plugin: Path | None = None
    ) -> Ended:
        key = (ranks, arguments, without, plugin)
        if key not in runs:
            runs[key] = farm.run(ranks, *arguments, without=without, plugin=plugin)
        return runs[key].check()

    return run
