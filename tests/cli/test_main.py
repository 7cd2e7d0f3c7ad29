"""The entry point finds commands and turns errors into sentences."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from megatron_vshape import __version__, make
from megatron_vshape.cli.main import COMMANDS, main


def test_the_package_runs_as_the_command():
    command = [sys.executable, "-m", "megatron_vshape", "--version"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == f"{__version__}\n"


def test_help_lists_every_command(capsys):
    shown = help_of(capsys, "--help")
    assert all(f"\n    {name}" in shown for name in COMMANDS)


def help_of(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert stop.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_terminal(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    lines = help_of(capsys, command, "--help").splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("usage:"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["shedule"], "there is no command 'shedule'; did you mean schedule?"),
        (["schedule", "v-half", "--pp", "4"], "unrecognized arguments: --pp 4; see megatron-"),
        (
            ["schedule", "v-half", "--device", "4"],
            "unrecognized arguments: --device 4; did you mean --devices?",
        ),
        (
            ["examples", "DIR"],
            "unrecognized arguments: DIR; see megatron-vshape examples --help",
        ),
        (["advise"], "the training command is missing: add it after --, as in -- pretrain_gpt.py"),
    ],
)
def test_invalid_command_is_rejected(capsys, arguments, text):
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"megatron-vshape: {text}")


def in_shell(command, **variables):
    """Run a command of the shell, in which $RUN is the command line."""
    run = f"{sys.executable} -m megatron_vshape.cli.main"
    environment = os.environ | {"RUN": run} | variables
    return subprocess.run(command, shell=True, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams(closed):
    completed = in_shell(f"$RUN schedule v-half --devices 2 --microbatches 2 {closed}")
    assert (completed.returncode, completed.stderr) == (0, "")


def test_unencodable_schedule_name_is_escaped(tmp_path):
    schedule = replace(make("v-half", 2, 2), name="größe")
    (tmp_path / "a.json").write_text(schedule.to_json(), encoding="utf-8")
    ascii_alone = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    completed = in_shell(f"$RUN schedule {tmp_path / 'a.json'}", **ascii_alone)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert "gr\\xf6\\xdfe" in completed.stdout


def test_deleted_current_directory_is_reported():
    completed = in_shell("cd $(mktemp -d) && rmdir $PWD && $RUN doctor")
    assert (completed.returncode, completed.stdout) == (2, "")
    assert completed.stderr == (
        "megatron-vshape: the current directory has been deleted: change to another one\n"
    )


@pytest.mark.parametrize("option", ["--devices", "--cost"])
def test_a_number_of_any_length_is_a_short_sentence(capsys, option):
    assert main(["schedule", "1f1b", option, "9" * 5000]) == 2
    assert len(capsys.readouterr().err) < 300
