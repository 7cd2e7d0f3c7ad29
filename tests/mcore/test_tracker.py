"""The file that names the last checkpoint is repaired if it was truncated."""

from pathlib import Path

import pytest

pytest.importorskip("megatron.training")

from megatron_vshape.mcore.hooks.checkpoints import newest_whole, read_metadata, repair_tracker
from megatron_vshape.mcore.hooks.session import Session

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with complete checkpoints of steps 2 and 10 and a truncated one of 12."""
    for name in ("iter_0000002", "iter_0000010"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (tmp_path / "iter_0000012").mkdir()
    (tmp_path / "iter_0000012" / "__0_0.distcp").touch()
    (tmp_path / "iter_0000012" / "metadata.json").write_text('{"shar')
    (tmp_path / "iter_x").touch()
    return tmp_path


@pytest.mark.parametrize("content", ["", "\n", "1x", "-", "½"])
def test_truncated_tracker_is_repaired_to_the_newest_complete_checkpoint(
    folder: Path, content: str
) -> None:
    (folder / TRACKER).write_text(content)
    repair_tracker(folder / TRACKER)
    assert (folder / TRACKER).read_text() == "10"
    assert not [file for file in folder.iterdir() if file.name.startswith(".")]


@pytest.mark.parametrize("text", ["2", "12\n", "release"])
def test_valid_tracker_is_unchanged(folder: Path, text: str) -> None:
    (folder / TRACKER).write_text(text)
    repair_tracker(folder / TRACKER)
    assert (folder / TRACKER).read_text() == text


def test_tracker_is_unchanged_without_a_complete_checkpoint(tmp_path: Path) -> None:
    repair_tracker(tmp_path / TRACKER)
    assert not (tmp_path / TRACKER).exists()
    (tmp_path / TRACKER).write_text("")
    (tmp_path / "iter_0000004").mkdir()
    repair_tracker(tmp_path / TRACKER)
    assert (tmp_path / TRACKER).read_text() == ""
    assert newest_whole(tmp_path) is None


def test_full_disk_logs_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    (folder / TRACKER).touch()
    monkeypatch.setattr(Path, "write_text", full)
    repair_tracker(folder / TRACKER)
    assert "names no checkpoint and cannot be written: [Errno 28] No space left" in caplog.text
    assert (folder / TRACKER).read_text() == ""


@pytest.mark.parametrize("is_named", [True, False])
def test_tracker_is_repaired_before_the_pipeline_is_configured(
    folder: Path, is_named: bool
) -> None:
    """--use-checkpoint-args reads the file before Megatron validates the arguments.

    Without a schedule the file is unchanged.
    """
    (folder / TRACKER).touch()
    session = Session()
    session.names_schedule = is_named

    def upstream(tracker_filename: str) -> str:
        return Path(tracker_filename).read_text()

    read = read_metadata(session, upstream)
    assert read(str(folder / TRACKER)) == ("10" if is_named else "")
