"""Runs of the command line in this process."""

from collections.abc import Callable

import pytest

from megatron_vshape.cli.main import main

Output = Callable[..., str]


@pytest.fixture
def output_of(capsys: pytest.CaptureFixture[str]) -> Output:
    """Return a function that runs a command, which must succeed, and returns its output."""

    def run(*arguments: str) -> str:
        assert main(arguments) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str]) -> Output:
    """Return a function that runs a command, which must be rejected, and returns its error."""

    def run(*arguments: str) -> str:
        assert main(arguments) == 2
        return capsys.readouterr().err

    return run
