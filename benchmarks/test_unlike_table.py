"""benchmarks/unlike_table.py draws lengths from its documented distributions."""

import importlib
import json
import random
from pathlib import Path
from statistics import median, quantiles
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the script as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("unlike_table")


def test_parts_of_a_conversation_are_merged_in_a_truncated_file(
    table: ModuleType, tmp_path: Path
) -> None:
    def piece(name: str, size: int) -> dict[str, object]:
        return {"id": name, "conversations": [{"from": "human", "value": "x" * size}]}

    pieces = [piece("a_0", 300), piece("a_1", 100), piece("b_0", 40), piece("c_0", 0)]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([*pieces, piece("d_0", 4000)])[:-100])
    percentiles = table.percentiles(file)
    assert percentiles[0] == 10
    assert percentiles[-1] == 100


@pytest.mark.parametrize(
    ("name", "middle", "shortest", "longest"),
    [("sharegpt", 1083, 18, 8192), ("rl", 500, 0, 1e6), ("mock", 2237, 1024, 8192)],
)
def test_lengths_follow_their_distribution(
    table: ModuleType, name: str, middle: float, shortest: float, longest: float
) -> None:
    rng = random.Random(0)
    drawn = [table.NAMED[name](rng) for _ in range(20_000)]
    assert median(drawn) == pytest.approx(middle, rel=0.05)
    assert shortest <= min(drawn)
    assert max(drawn) <= longest
    if name == "rl":
        assert quantiles(drawn, n=100)[98] == pytest.approx(5000, rel=0.1)
