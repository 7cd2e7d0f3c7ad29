"""Processes that have imported Megatron, for all rehearsals of a session."""

from collections.abc import Iterator

import pytest
from rehearsal.warm import Warm


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """Return what runs the command line, whose rehearsals import Megatron once."""
    warm = Warm(tmp_path_factory.mktemp("warm"))
    yield warm
    warm.close()
