"""The rank farm, the fault injection, and a table of injected faults and their outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from mcore.conftest import farm, train
from mcore.farm import Ended, Farm

__all__ = ["farm", "train"]

Tally = Callable[..., None]
Inject = Callable[..., Ended]


@dataclass(slots=True)
class _Lines:
    """By kind of fault: the numbers injected and survived, and the measurements."""

    injected: Counter[str] = field(default_factory=Counter)
    survived: Counter[str] = field(default_factory=Counter)
    notes: dict[str, list[str]] = field(default_factory=dict)


LINES = pytest.StashKey[_Lines]()


def pytest_configure(config: pytest.Config) -> None:
    """Start the table."""
    config.stash[LINES] = _Lines()


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    """Return a function that counts `cases` faults of a kind; they survive if the test passes."""
    lines = request.config.stash[LINES]

    def count(kind: str, cases: int = 1, note: str = "") -> None:
        lines.injected[kind] += cases
        mine.append((kind, cases, note))

    mine: list[tuple[str, int, str]] = []
    request.node.stash[MINE] = mine
    return count


MINE = pytest.StashKey[list[tuple[str, int, str]]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Count the faults of the test as survived if it passed."""
    report = yield
    if call.when == "call" and report.passed:
        lines = item.config.stash[LINES]
        for kind, cases, note in item.stash.get(MINE, []):
            lines.survived[kind] += cases
            if note:
                lines.notes.setdefault(kind, []).append(note)
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the table: faults injected, survived, lost."""
    lines = config.stash[LINES]
    if not lines.injected:
        return
    width = max(len(kind) for kind in lines.injected)
    terminalreporter.section("faults")
    terminalreporter.write_line(f"{'fault':{width}}  injected  survived  lost")
    for kind, injected in sorted(lines.injected.items()):
        survived = lines.survived[kind]
        note = "  ".join(lines.notes.get(kind, []))
        terminalreporter.write_line(
            f"{kind:{width}}  {injected:8}  {survived:8}  {injected - survived:4}  {note}".rstrip()
        )


@pytest.fixture
def inject(farm: Farm, tmp_path: Path) -> Inject:
    """Return a function that trains on four ranks with faults in them."""

    def run(faults: list[dict[str, Any]], *arguments: str, timeout_s: float = 120.0) -> Ended:
        noted_faults = [fault | {"note": str(tmp_path / "struck")} for fault in faults]
        options = {"timeout_s": timeout_s, "plugin": "faults.injection", "argument": noted_faults}
        return farm.run(4, *arguments, **options)

    return run
