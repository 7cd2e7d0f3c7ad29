"""The entry point finds commands and turns errors into sentences."""

import pytest

from megatron_vshape import __version__
from megatron_vshape.cli.main import COMMANDS, main


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {name}" in shown for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["shedule"], "argument COMMAND: invalid choice: 'shedule' (choose from "),
        (["--bogus"], "the following arguments are required: COMMAND"),
    ],
)
def test_what_is_no_command(capsys, arguments, text):
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"megatron-vshape: {text}")
