"""One farm for all tests of a session, and runs that several tests look at."""

from collections.abc import Callable, Iterator

import pytest
from mcore.farm import Ended, Farm

UNTIED = "--untie-embeddings-and-output-weights"


@pytest.fixture(scope="session")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    """Return the process that trains."""
    farm = Farm(tmp_path_factory.mktemp("farm"))
    yield farm
    farm.close()


@pytest.fixture(scope="session")
def train(farm: Farm) -> Callable[..., Ended]:
    """Return a function that trains on so many ranks with these flags, once for the session."""
    done: dict[tuple[object, ...], Ended] = {}

    def run(ranks: int, *arguments: str, without: tuple[str, ...] = ()) -> Ended:
        key = (ranks, arguments, without)
        if key not in done:
            done[key] = farm.run(ranks, *arguments, without=without)
        return done[key].check()

    return run
