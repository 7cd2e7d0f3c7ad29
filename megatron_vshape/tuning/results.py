"""Results file: SQLite, one transaction per result, so that a killed sweep loses no result."""

import fcntl
import hashlib
import json
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vshape.tuning.configurations import GIVEN, Configuration, SweepError
from megatron_vshape.tuning.files import Also, Loaded, Workload
from megatron_vshape.tuning.grid import configuration_of
from megatron_vshape.tuning.training_run import Status

_APPLICATION = 0x56534850  # "VSHP": identifies results files
FORMAT = 1
_BUSY_S = 60.0
"""Seconds for which a writing sweep waits for a reading one, and vice versa."""

_MAX_VALUE_BYTES = 2**24
"""Maximum bytes of one value in the file; the tail of a log has a few thousand."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Measurements of one run; None for values that it did not reach."""

    status: Status
    step_s: float | None = None
    peak_bytes: float | None = None
    bubble: float | None = None
    log_tail: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the results file: a configuration, its prediction and its measurements."""

    configuration: Configuration
    outcome: Outcome
    mfu: float | None
    predicted_step_s: float | None
    predicted_peak_bytes: float
    predicted_bubble: float | None


_TABLES = (
    "CREATE TABLE in_flight (key TEXT PRIMARY KEY, job TEXT NOT NULL)",
    """CREATE TABLE results (
    key TEXT PRIMARY KEY,
    sweep TEXT NOT NULL,
    combination TEXT NOT NULL,
    status TEXT NOT NULL,
    step_s REAL,
    mfu REAL,
    peak_bytes REAL,
    bubble REAL,
    predicted_step_s REAL,
    predicted_peak_bytes REAL,
    predicted_bubble REAL,
    log_tail TEXT NOT NULL,
    finished TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
)""",
)
"""Statements that create the tables, sorted; SQLite stores their text."""


def key_of(configuration: Configuration, loaded: Loaded) -> str:
    """Return the identity of a run: a different command or plan is a different run."""
    run = loaded.sweep.run
    # Keys of existing runs must not change: older files lack some fields, others were removed.
    cluster_settings = loaded.cluster.model_dump(mode="json").items()
    cluster_values = {name: value for name, value in cluster_settings if value is not None}
    combination = configuration.swept
    if combination["expert_parallel"] == 1:
        del combination["expert_parallel"]
    if combination["format"] == GIVEN:
        del combination["format"]
    identity = {
        "combination": combination,
        "model": loaded.subject.identity,
        "cluster": cluster_values | {"shared_processors": None},
        "costs": None,  # earlier versions planned for measured costs
        "post_validation": loaded.sweep.post_validation,
        "steps": [run.warmup_steps, run.measured_steps, run.statistic],
        "script": [run.script, run.arguments, run.environment, run.threads],
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


class Results:
    """An open results file; see `open_results`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def finished_keys(self, retry_failed: bool = False) -> set[str]:
        """Return the keys of finished runs; with `retry_failed`, without failed ones.

        A failed run keeps its row until its retry ends. While the retry is in flight, it is not
        finished.
        """
        rows = self._connection.execute(
            "SELECT key, status FROM results WHERE key NOT IN (SELECT key FROM in_flight)"
        )
        return {key for key, status in rows if not (retry_failed and status == Status.FAILED)}

    def record(self, key: str, sweep: str, result: Result) -> None:
        """Add a result; it is on disk when this returns."""
        outcome = result.outcome
        values = (
            key,
            sweep,
            json.dumps(result.configuration.swept),
            outcome.status.value,
            outcome.step_s,
            result.mfu,
            outcome.peak_bytes,
            outcome.bubble,
            result.predicted_step_s,
            result.predicted_peak_bytes,
            result.predicted_bubble,
            outcome.log_tail,
        )
        marks = ", ".join("?" * len(values))
        with self._connection:
            self._connection.execute(
                f"INSERT OR REPLACE INTO results VALUES ({marks}, CURRENT_TIMESTAMP)", values
            )
            self._connection.execute("DELETE FROM in_flight WHERE key = ?", (key,))

    def start(self, key: str, job: str) -> None:
        """Record that a run is in flight as `job`."""
        with self._connection:
            self._connection.execute("INSERT OR REPLACE INTO in_flight VALUES (?, ?)", (key, job))

    def job_in_flight(self, key: str) -> str | None:
        """Return the job that an earlier sweep left in flight for this run."""
        row = self._connection.execute("SELECT job FROM in_flight WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def num_in_flight(self, keys: Collection[str]) -> int:
        """Return how many of these runs are in flight, or were at the end of their sweep."""
        return sum(key in keys for (key,) in self._connection.execute("SELECT key FROM in_flight"))

    def read(self, keys: Collection[str]) -> list[Result]:
        """Return the results of these runs in the order of their arrival.

        Selected by key, not by the sweep's name: `finished_keys` uses only keys, and results that
        are not run again are shown too.
        """
        rows = self._connection.execute("SELECT * FROM results ORDER BY rowid")
        try:
            return [_result(row) for key, _, *row, _ in rows if key in keys]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            why = " ".join(str(error).split())  # pydantic's message has several lines
            raise SweepError(
                f"a result cannot be read ({why:.200}): move the results file away, or name "
                "another with --results"
            ) from None


class _Stored(Also, Workload):
    """A configuration in the results file, which may be damaged."""


def _result(row: Sequence[Any]) -> Result:
    """Parse a row; raises ValueError, TypeError or KeyError for an invalid row."""
    text, status, step_s, mfu, peak_bytes, bubble, *predicted, log_tail = row
    predicted_s, predicted_bytes, predicted_bubble = predicted
    for value in (step_s, peak_bytes, bubble, mfu, predicted_s, predicted_bubble):
        if value is not None and not isinstance(value, float):
            raise ValueError(f"{value!r:.40} is not a number")
    if not isinstance(predicted_bytes, float) or not isinstance(log_tail, str):
        raise ValueError("its predicted memory or its log is missing")
    outcome = Outcome(Status(status), step_s, peak_bytes, bubble, log_tail)
    stored = _Stored.model_validate_json(text)
    config = configuration_of(stored, stored)
    return Result(config, outcome, mfu, predicted_s, predicted_bytes, predicted_bubble)


@contextmanager
def open_results(path: Path) -> Iterator[Results]:
    """Open the results file exclusively, and create it if missing.

    Raises:
        SweepError: it is not a results file, is damaged, cannot be written, or another sweep is
            writing it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SweepError(
                f"another sweep is writing {path}; wait for it, or name another file with --results"
            ) from None
        except OSError as error:
            raise SweepError(
                f"{path} cannot be locked against other sweeps: {error.strerror}; name a file on "
                "another file system with --results"
            ) from None
        with _connect(path, writing=True) as connection:
            _prepare(connection, path)
            yield Results(connection)


@contextmanager
def read_results(path: Path) -> Iterator[Results]:
    """Open the results file for reading, even while a sweep is writing it.

    Raises:
        SweepError: it does not exist, is not a results file, is damaged, or cannot be read.
    """
    if not path.is_file():
        raise SweepError(f"{path}: there are no results yet; --results names another file")
    with _connect(path, writing=False) as connection:
        _check(connection, path)
        yield Results(connection)


@contextmanager
def _connect(path: Path, writing: bool) -> Iterator[sqlite3.Connection]:
    # A reader needs write access too: it may be the first to roll back a killed commit.
    uri = f"{path.absolute().as_uri()}?mode={'rwc' if writing else 'rw'}"
    try:
        with closing(sqlite3.connect(uri, timeout=_BUSY_S, uri=True)) as connection:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
            yield connection
    # SQLite's message about a damaged schema quotes text that may not be UTF-8.
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        raise SweepError(_format_fault(error, path, "written" if writing else "read")) from None


def _format_fault(error: Exception, path: Path, operation: str) -> str:
    """Format the fault of the file or of its disk, with a fix."""
    # Operational errors concern the disk, except for SQL errors from a damaged schema, and for text
    # that is not UTF-8 (which has no code).
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    if isinstance(error, sqlite3.OperationalError) and code != sqlite3.SQLITE_ERROR:
        return (
            f"{path} cannot be {operation}: {error}; the results so far are kept: make it writable "
            "and sweep again, or name another with --results"
        )
    return (
        f"{path} is not a results file, or a damaged one ({error}): move it away, or name another "
        "with --results"
    )


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Create missing tables, and make each commit wait for the disk."""
    is_new = not _schema(connection)
    # A write-ahead log would require shared memory among all nodes of a cluster. Truncated journals
    # are as safe against kills at any moment, and FULL waits for the disk at every commit.
    connection.execute("PRAGMA journal_mode = TRUNCATE")
    connection.execute("PRAGMA synchronous = FULL")
    if is_new:
        pragmas = f"PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {FORMAT};"
        connection.executescript(f"BEGIN; {pragmas} {'; '.join(_TABLES)}; COMMIT;")
    _check(connection, path)


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """Raise SweepError if the database is not a results file."""
    schema = _schema(connection)
    if not schema:
        raise SweepError(f"{path}: there are no results yet; --results names another file")
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if (application, version, schema) != (_APPLICATION, FORMAT, _TABLES):
        raise SweepError(
            f"{path} is a database, but not a results file of this version: move it away, or name "
            "another with --results"
        )


def _schema(connection: sqlite3.Connection) -> tuple[str, ...]:
    """Return the SQL of all tables, views and triggers; foreign ones could run any code."""
    rows = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name")
    return tuple(sql for (sql,) in rows)
