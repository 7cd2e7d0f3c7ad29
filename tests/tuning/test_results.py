"""Results file: no recorded result is lost, and other files are rejected."""

import errno
import fcntl
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tuning.samples import CLUSTER, SWEEP, load_sample

from megatron_vshape.tuning.configurations import Configuration, Layout, SweepError
from megatron_vshape.tuning.grid import expand_grid
from megatron_vshape.tuning.results import (
    Outcome,
    Result,
    Status,
    key_of,
    open_results,
    read_results,
)

WRITER = """
import sys
from pathlib import Path
from megatron_vshape.tuning.configurations import Configuration, Layout
from megatron_vshape.tuning.results import Outcome, Result, Status, open_results

it = Configuration("1f1b", 8, 8, 1, 1, 2, 1, 1, "none", Layout.EVEN)
with open_results(Path(sys.argv[1])) as results:
    for number in range(100_000):
        result = Result(it, Outcome(Status.OK, 1.0), None, None, 0.0, None)
        results.record(str(number), "test", result)
        print(number, flush=True)
"""

RESULT = Result(
    Configuration("1f1b", 8, 8, 1, 1, 2, 1, 1, "none", Layout.EVEN),
    Outcome(Status.OK, 1.0),
    *(None, None, 0.0, None),
)


def test_results_come_back_as_they_were(tmp_path: Path) -> None:
    loaded = load_sample(tmp_path)
    path = tmp_path / "results.db"
    expected, keys = [], []
    with open_results(path) as results:
        for config, status in zip(expand_grid(loaded).possible, Status, strict=False):
            outcome = Outcome(status, 1.5, 2e9, 0.25, "line one\nline two")
            expected.append(Result(config, outcome, 0.5, 1.25, 1e9, 0.125))
            keys.append(key_of(config, loaded))
            results.record(keys[-1], "test", expected[-1])
    with open_results(path) as results:
        assert results.read(keys) == expected
        assert results.read(keys[1:]) == expected[1:]
        assert results.finished_keys() == set(keys)


def test_a_failed_run_keeps_its_row_until_its_retry_has_ended(tmp_path: Path) -> None:
    config = expand_grid(load_sample(tmp_path)).possible[0]
    failed, ran = (
        Result(config, Outcome(status, log_tail=status), None, None, 1.0, None)
        for status in (Status.FAILED, Status.OK)
    )
    path = tmp_path / "results.db"
    with open_results(path) as results:
        for key in ("a", "b"):
            results.record(key, "test", failed)
        assert results.finished_keys() == {"a", "b"}
        assert results.finished_keys(retry_failed=True) == set()
        results.start("a", "1")
    with open_results(path) as results:  # the sweep was killed while the retry ran
        assert results.read({"a", "b"}) == [failed, failed]
        assert results.finished_keys() == {"b"}
        assert results.job_in_flight("a") == "1"
        results.record("a", "test", ran)
        assert results.read({"a", "b"}) == [failed, ran]
        assert results.finished_keys(retry_failed=True) == {"a"}


def test_recorded_results_survive_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    recorded = [int(writer.stdout.readline()) for _ in range(25)]
    writer.send_signal(signal.SIGKILL)
    recorded += [int(line) for line in writer.stdout.read().splitlines() if line]
    writer.wait()
    with open_results(path) as results:
        assert len(results.finished_keys()) in (len(recorded), len(recorded) + 1)
        assert {str(number) for number in recorded} <= results.finished_keys()


def test_reader_recovers_results_after_a_kill(tmp_path: Path) -> None:
    """The first reader after a kill rolls the unfinished write back and loses no result."""
    path, copy = tmp_path / "results.db", tmp_path / "copy.db"
    with open_results(path) as results:
        results.record("a", "test", RESULT)
        results._connection.execute("PRAGMA cache_size = 1")
        results._connection.execute("BEGIN IMMEDIATE")
        for number in range(50):
            results._connection.execute(
                "INSERT INTO in_flight VALUES (?, ?)", (str(number), "x" * 5000)
            )
        for end in ("", "-journal"):
            copy.with_name(copy.name + end).write_bytes(Path(f"{path}{end}").read_bytes())
        results._connection.rollback()
    assert copy.with_name("copy.db-journal").stat().st_size > 0
    with read_results(copy) as results:
        assert results.read({"a", "b"}) == [RESULT]
        assert results.num_in_flight({"1"}) == 0


def test_reading_does_not_create_or_lock_the_file(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    with pytest.raises(SweepError, match="there are no results yet"), read_results(path):
        pass
    assert not path.exists()
    with open_results(path) as writer:
        writer.record("a", "test", RESULT)
        with read_results(path) as reader:
            assert reader.finished_keys() == {"a"}
            writer.record("b", "test", RESULT)
            assert reader.finished_keys() == {"a", "b"}


def sql(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


DAMAGED = r"results\.db is not a results file, or a damaged one"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_text("These are my results. " * 50), DAMAGED),
        (
            lambda path: sql(path, "UPDATE results SET key = CAST(x'ff' AS TEXT)"),
            DAMAGED + r" \(Could not decode to UTF-8",
        ),
        (
            lambda path: path.write_bytes(
                path.read_bytes().replace(b"PRIMARY KEY", b"PRIMARY \xff\xff\xff")
            ),
            DAMAGED,
        ),
        (
            lambda path: sql(path, "DROP TABLE in_flight", "CREATE TABLE books (title TEXT)"),
            "a database, but not a results file of this version",
        ),
        (
            lambda path: (path.unlink(), path.mkdir()),
            "cannot be written: unable to open database file",
        ),
    ],
    ids=["text", "damaged text", "damaged schema", "another program's", "folder"],
)
def test_other_files_are_rejected_unchanged(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / "results.db"
    with open_results(path) as results:
        results.record("a", "test", RESULT)
    damage(path)
    content = path.read_bytes() if path.is_file() else b""
    with pytest.raises(SweepError, match=message), open_results(path) as results:
        results.finished_keys()
    assert (path.read_bytes() if path.is_file() else b"") == content


@pytest.mark.parametrize(
    ("pragma", "why"),
    [
        ("max_page_count = 1", "database or disk is full"),
        ("query_only = 1", "attempt to write a readonly database"),
    ],
)
def test_unwritable_disk_keeps_recorded_results(tmp_path: Path, pragma: str, why: str) -> None:
    path = tmp_path / "results.db"
    long = replace(RESULT, outcome=Outcome(Status.OK, log_tail="x" * 100_000))
    refused = pytest.raises(
        SweepError, match=rf"results\.db cannot be written: {why}; the results so far are kept"
    )
    with refused, open_results(path) as results:
        results.record("a", "test", RESULT)
        results._connection.execute(f"PRAGMA {pragma}")
        results.record("b", "test", long)
    with open_results(path) as results:
        assert results.read({"a", "b"}) == [RESULT]


def test_two_sweeps_do_not_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    refused = pytest.raises(SweepError, match="another sweep is writing")
    with open_results(path), refused, open_results(path):
        pass


def test_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    refused = pytest.raises(
        SweepError, match=r"results\.db cannot be locked against other sweeps: Function not impl"
    )
    with refused, open_results(tmp_path / "results.db"):
        pass


def test_no_write_ahead_log_which_network_file_systems_cannot_have(tmp_path: Path) -> None:
    """Results of an earlier version that are in a write-ahead log can still be read."""
    path = tmp_path / "results.db"
    with open_results(path) as results:
        results.record("a", "test", RESULT)
        results._connection.execute("PRAGMA journal_mode = WAL")
        results.record("b", "test", RESULT)
        copy = tmp_path / "copy.db"
        for end in ("", "-wal"):
            copy.with_name(copy.name + end).write_bytes(Path(f"{path}{end}").read_bytes())
    with open_results(copy) as results:
        assert results._connection.execute("PRAGMA journal_mode").fetchone() == ("truncate",)
        assert results.finished_keys() == {"a", "b"}
        results.record("c", "test", RESULT)
        assert not copy.with_name("copy.db-wal").exists()


def test_the_key_of_a_run_is_that_of_earlier_versions(tmp_path: Path) -> None:
    """A sweep of a command that an earlier version started is resumed: the key must not change."""
    (tmp_path / "flags.txt").write_text(
        "pretrain_gpt.py --num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
        "--micro-batch-size 1 --global-batch-size 8"
    )
    loaded = load_sample(tmp_path, sweep={"model": "flags.txt", "run": {"script": "trainer.py"}})
    assert key_of(expand_grid(loaded).possible[0], loaded) == "ff53d266eb0d4ea9"


@pytest.mark.parametrize(
    "over",
    [
        {"model": {"hidden_size": 512}},
        {"cluster": {"backend": "nccl"}},
        {"cluster": {"assumptions": {"context_gib": 2}}},
        {"cluster": {"device": {**CLUSTER["device"], "memory_gib": 16}}},
        {"sweep": {"post_validation": True}},
        {"sweep": {"run": {**SWEEP["run"], "arguments": ["--x"]}}},
    ],
    ids=["model", "backend", "assumption", "memory", "post-validation", "flag"],
)
def test_changed_settings_change_the_key_of_a_run(tmp_path: Path, over: dict[str, Any]) -> None:
    one = load_sample(tmp_path)
    config = expand_grid(one).possible[0]
    changed = load_sample(tmp_path, **over)
    assert key_of(config, one) == key_of(config, one)
    assert key_of(config, one) != key_of(config, changed)
