"""Runs of the command line in this process."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from megatron_vshape.cli.main import main

Output = Callable[..., str]


@pytest.fixture
def output_of(capsys: pytest.CaptureFixture[str]) -> Output:
    """Return a function that runs a command, which must succeed, and returns its output."""
    return lambda *arguments: _captured(capsys, arguments, 0).out


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str]) -> Output:
    """Return a function that runs a command, which must be rejected, and returns its error."""
    return lambda *arguments: _captured(capsys, arguments, 2).err


def _captured(capsys: pytest.CaptureFixture[str], arguments: Sequence[str], status: int) -> Any:
    assert main(arguments) == status
    return capsys.readouterr()
