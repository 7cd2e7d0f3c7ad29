"""A fixture with processes that import Megatron once per test session."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from rehearsal.warm import Warm


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory, common: Path) -> Iterator[Warm]:
    """Return a runner of the command line whose dry runs import Megatron once."""
    warm = Warm(tmp_path_factory.mktemp("warm"), common)
    yield warm
    warm.close()
