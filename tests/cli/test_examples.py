"""The examples are written as they are in the package, and nobody's changes are lost."""

import pytest

from megatron_vshape.cli import examples
from megatron_vshape.cli.main import main


@pytest.fixture
def packed(tmp_path, monkeypatch):
    """Return the folder of a package that has two examples."""
    folder = tmp_path / "package" / "examples"
    for name, text in (("configs/models/a.yaml", "layers: 8\n"), ("scripts/run.py", "pass\n")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "scripts/__pycache__").mkdir()
    (folder / "scripts/__pycache__/run.pyc").touch()
    monkeypatch.setattr(examples, "FOLDER", folder)
    return folder


def test_files_are_written_once_and_changes_stay(packed, tmp_path, capsys):
    into = tmp_path / "mine"
    assert main(["examples", "--into", str(into)]) == 0
    assert (into / "configs/models/a.yaml").read_text() == "layers: 8\n"
    assert not (into / "scripts/__pycache__").exists()
    (into / "scripts/run.py").write_text("my own\n")
    capsys.readouterr()
    assert main(["examples", "--into", str(into)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{into}/configs/models/a.yaml: there already",
        f"{into}/scripts/run.py: left as it is here; it differs from the package's",
    ]
    assert (into / "scripts/run.py").read_text() == "my own\n"


def test_a_folder_that_cannot_be_made(packed, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["examples", "--into", str(tmp_path / "file")]) == 2
    assert "cannot be written: Not a directory" in capsys.readouterr().err


def test_examples_command_is_rejected_in_a_checkout(capsys):
    assert main(["examples"]) == 2
    assert "the examples of a checkout are in " in capsys.readouterr().err
