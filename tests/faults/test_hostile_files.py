"""Files that are broken or meant to break: one clear sentence or a correct plan, nothing else."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import submitit  # noqa: F401  it configures logging, and would close a redirected stream
import yaml
from faults.conftest import Tally
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tuning.counts import Fake
from tuning.samples import CLUSTER, MODEL, SWEEP, load_sample

import megatron_vshape
from megatron_vshape.cli.main import main
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.paper.catalogue import NAMES, make
from megatron_vshape.tuning.configurations import SweepError
from megatron_vshape.tuning.files import load_model
from megatron_vshape.tuning.grid import expand_grid
from megatron_vshape.tuning.results import Outcome, Result, Status, open_results

SECONDS, ASLEEP, GIB = 20, 10, 2**30  # limits for one file; the machine may be busy
ALARMS = (signal.SIGPROF, signal.SIGALRM)
FEW, MANY = 50, 2500  # cases of each of the four kinds of file
RUN = ("--devices", "2", "--microbatches", "4")


@pytest.fixture(autouse=True)
def _bounded() -> Iterator[None]:
    """Limit the process to one more GiB of memory, and one command to SECONDS."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + GIB, limits[1]))
    handlers = {number: signal.signal(number, _too_long) for number in ALARMS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    resource.setrlimit(resource.RLIMIT_AS, limits)


def _too_long(number: int, frame: object) -> None:
    raise TooLongError(f"it took more than {SECONDS} s, or slept {ASLEEP} times as long")


@contextlib.contextmanager
def timed() -> Iterator[None]:
    """Raise TooLongError inside after SECONDS of work, or much longer of anything."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(ASLEEP * SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)


class TooLongError(Exception):
    """A file made a command hang."""


def command(*arguments: object) -> str:
    """Run the command line in this process and return its output; an error must be one sentence."""
    out, err = io.StringIO(), io.StringIO()
    with timed(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    said = err.getvalue()
    assert code in (0, 2)
    assert (code == 2) == bool(said), said
    assert len(said) < 4000, said[:200]
    if said:
        assert said.startswith("megatron-vshape: ")
        assert "Traceback" not in said
    else:
        assert not re.search(r"\b(nan|inf)\b", out.getvalue()), out.getvalue()
    return said


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from([10**9, 10**18, 10**400, 2**63, -(2**63), 0.0, -0.0, 1e-320, 1e300, 1e308]),
    st.sampled_from([float("nan"), float("inf"), -float("inf")]),
    st.text(max_size=8),
    st.sampled_from(["F0.0", "W9.9", "BW1.0", "a" * 100_000, "[/b]", "\x1b[2J", "../../x", "0x10"]),
    st.sampled_from(["/dev/zero", "/", "..", "\0", "file.yaml", "costs.json", "model.yaml"]),
    st.lists(st.integers(-1, 3), max_size=4),
    st.just(50_000).map(lambda length: [0] * length),  # a new one, as it may be changed
    st.integers(1, 60).map(lambda depth: _nested(depth)),
    st.dictionaries(st.text(max_size=3), st.integers(0, 1), max_size=2),
)


def _nested(depth: int) -> Any:
    """Return lists in lists: two of two of two ..., or deep ones."""
    value: Any = 1
    for _ in range(depth if depth < 9 else 3 * depth):
        value = [value, value] if depth < 9 else [value]
    return value


@st.composite
def changed(draw: st.DrawFn, good: Any) -> Any:
    """Draw the value with junk at one to three places of it."""
    value = json.loads(json.dumps(good))
    for _ in range(draw(st.integers(1, 3))):
        container, is_inside = value, True
        while is_inside:
            keys = list(container) if isinstance(container, dict) else list(range(len(container)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            is_inside = isinstance(container[key], dict | list) and draw(st.booleans())
            if is_inside:
                container = container[key]
            elif draw(st.integers(0, 5)) == 0 and isinstance(container, dict):
                container[str(draw(JUNK))[:50]] = container.pop(key)
            else:
                container[key] = draw(JUNK)
    return value


@st.composite
def damaged(draw: st.DrawFn, text: str) -> bytes:
    """Draw the text cut, with bytes changed, repeated, or with something put into it."""
    data = bytearray(text.encode())
    for _ in range(draw(st.integers(1, 3))):
        offset = draw(st.integers(0, max(0, len(data) - 1)))
        change = draw(st.integers(0, 5))
        if change == 0:
            del data[offset:]
        elif change == 1:
            data[offset : offset + 1] = draw(st.binary(max_size=4))
        elif change == 2:
            data[offset:offset] = draw(st.sampled_from(PIECES))
        elif change == 3:
            del data[offset : offset + draw(st.integers(1, 40))]
        elif change == 4:
            data += data[offset:][:40_000] * draw(st.sampled_from([1, 3, 1000]))
        else:
            data[offset:offset] = data[offset // 2 : offset]
        del data[40_000_000:]
    return bytes(data)


PIECES = [
    *(b"[" * 3000, b"{" * 3000, b'{"a":' * 2000, b"- " * 3000, b"9" * 5000, b"0x" + b"f" * 9000),
    *(b"1e999", b"NaN", b"-Infinity", b".nan", b"-.inf", b"\xff\xfe", b"\0", b"\xef\xbb\xbf"),
    *(b"&a [*a]", b"*b", b"<<: *a", b"!!python/object/apply:os.system [x]", b"2001-99-99"),
    *(b"!!binary x", b"1:2:3", b"%YAML 9.9\n---\n", b"\n--- \n", b"? [a]\n: b\n", b"\t", b"="),
    *(b"!!int a", b"!!float b", b"!!timestamp x", b"!!omap [a]", b"!!set {a}", b"!!pairs [a]"),
    *(b"F0.0,", b'"F0.999999999",', b"'", b'"', b"|\n", b"# ", b"\n", b","),
]


def drawn_file(good: Any, dump: Callable[[Any], str]) -> st.SearchStrategy[bytes]:
    """Return files that come from the good value by junk in it, or from its text by damage."""
    text = dump(good)
    junk = changed(good).map(lambda value: dump(value).encode("utf-8", "replace"))
    return st.one_of(junk, damaged(text), st.binary(max_size=200), st.text().map(str.encode))


SCHEDULES = [make(name, 2, 3) for name in NAMES]
COSTS = Costs.uniform(2, 4)


@pytest.fixture(autouse=True)
def nothing_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_vshape.tuning.predictor.Counts", Fake)


SWEEP_FILES = {"sweep": SWEEP, "model": MODEL, "cluster": CLUSTER}


in_both_numbers = pytest.mark.parametrize(
    "number", [FEW, pytest.param(MANY, marks=pytest.mark.slow)]
)


def for_all(number: int, drawn: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    """Call `check` with a number of drawn values; the first failure is raised unchanged."""

    @settings(
        max_examples=number,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate),  # shrinking slow inputs would take an hour
    )
    @given(drawn)
    def run(value: Any) -> None:
        check(value)

    run()


@in_both_numbers
def test_schedule_files(number: int, tmp_path: Path, tally: Tally) -> None:
    tally("hostile schedule files", number)

    def check(name: str, data: bytes) -> None:
        path = tmp_path / name
        path.write_bytes(data)
        command("schedule", path)

    json_files = [drawn_file(json.loads(schedule.to_json()), json.dumps) for schedule in SCHEDULES]
    csv_files = [damaged(schedule.to_csv()) for schedule in SCHEDULES]
    for_all(4 * number // 5, st.one_of(json_files), lambda data: check("schedule.json", data))
    for_all(number // 5, st.one_of(csv_files), lambda data: check("schedule.csv", data))


@in_both_numbers
def test_costs_files(number: int, tmp_path: Path, tally: Tally) -> None:
    tally("hostile costs files", number)
    path = tmp_path / "costs.json"

    def check(case: tuple[bytes, bool]) -> None:
        data, planned = case
        path.write_bytes(data)
        if planned:
            command("plan", *RUN, "--costs", path, "--seconds", "0.02")
        else:
            command("schedule", "v-half", *RUN, "--costs", path)

    files = drawn_file(json.loads(COSTS.to_json()), json.dumps)
    for_all(number, st.tuples(files, st.booleans()), check)


def write_good(folder: Path) -> None:
    for name, value in SWEEP_FILES.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(value))


@in_both_numbers
def test_sweep_files(number: int, tmp_path: Path, tally: Tally) -> None:
    tally("hostile sweep, model and cluster files", number)
    (tmp_path / "costs.json").write_text(COSTS.to_json())

    def check(case: tuple[str, bytes]) -> None:
        name, data = case
        write_good(tmp_path)
        (tmp_path / f"{name}.yaml").write_bytes(data)
        command("sweep", tmp_path / "sweep.yaml", "--predict-only")

    def dump(value: Any) -> str:
        return yaml.safe_dump(value)

    drawn = [
        st.tuples(st.just(name), drawn_file(value, dump)) for name, value in SWEEP_FILES.items()
    ]
    for_all(number, st.one_of(drawn), check)


@in_both_numbers
def test_models_of_presets(number: int, tmp_path: Path, tally: Tally) -> None:
    tally("hostile config.json of every model type", number)
    path = tmp_path / "config.json"

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with contextlib.suppress(ScheduleError), timed():
            load_model(path)

    folder = Path(__file__).parents[2] / "configs" / "models"
    models = [yaml.safe_load(file.read_text()) for file in sorted(folder.glob("*.yaml"))]
    for_all(number, st.one_of([drawn_file(model, json.dumps) for model in models]), check)


PATHS = ["/dev/zero", "/dev/full", "/", "pipe", "loop", "gone", "x" * 300, "/proc/self/mem"]


@pytest.mark.parametrize("path", PATHS)
def test_invalid_paths_are_rejected(path: str, tmp_path: Path, tally: Tally) -> None:
    tally("paths that are no files", 3)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    target = tmp_path / path
    write_good(tmp_path)
    for said in (
        command("schedule", "v-half", *RUN, "--costs", target),
        command("plan", *RUN, "--costs", target),
        command("sweep", target),
    ):
        assert "is not a regular file" in said or "cannot be read" in said


def test_yaml_that_expands_is_rejected(tmp_path: Path, tally: Tally) -> None:
    tally("YAML of aliases of aliases")
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    (tmp_path / "sweep.yaml").write_text("\n".join(lines))
    said = command("sweep", tmp_path / "sweep.yaml")
    assert "has the alias *a0, and aliases are not read: write the value out" in said


def test_sweep_name_cannot_leave_its_folder(tmp_path: Path, tally: Tally) -> None:
    tally("a name that is a path")
    write_good(tmp_path)
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(SWEEP | {"name": "../../x"}))
    assert "name is '../../x'" in command("sweep", tmp_path / "sweep.yaml")


HOSTILE_DATABASES = {
    "an endless view": (
        "DROP TABLE results; CREATE VIEW results AS WITH RECURSIVE n(key) AS "
        "(SELECT 1 UNION ALL SELECT key + 1 FROM n) SELECT key FROM n"
    ),
    "a trigger": "CREATE TRIGGER t AFTER INSERT ON results BEGIN DELETE FROM in_flight; END",
    "another table": "CREATE TABLE more (x)",
    "a combination that is none": "UPDATE results SET combination = '{\"schedule\": 3}'",
    "a combination nested deep": "UPDATE results SET combination = printf('%.99999c', '[')",
    "a status that is none": "UPDATE results SET status = 'fine'",
    "a time that is text": "UPDATE results SET step_s = 'soon'",
    "a log of bytes": "UPDATE results SET log_tail = zeroblob(1000)",
    "a log of a hundred MiB": "UPDATE results SET log_tail = printf('%.100000000c', 'x')",
}


@pytest.mark.parametrize("what", HOSTILE_DATABASES)
def test_results_files(what: str, tmp_path: Path, tally: Tally) -> None:
    tally("hostile results files")
    config = expand_grid(load_sample(tmp_path)).possible[0]
    path = tmp_path / "results.db"
    with open_results(path) as results:
        results.record("a", "test", Result(config, Outcome(Status.OK, 1.0), None, None, 1.0, None))
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(HOSTILE_DATABASES[what])
        connection.commit()
    with timed(), pytest.raises(SweepError, match="move"):
        _read(path)


def _read(path: Path) -> None:
    with open_results(path) as results:
        results.finished_keys()
        results.read({"a"})


def test_file_contents_are_never_unpickled_or_executed() -> None:
    """Workers of one server and ranks of one job exchange pickles; torch.load is Megatron's."""
    unsafe = re.compile(r"pickle\.load|torch\.load|marshal|shelve|yaml\.(unsafe|full)|\beval\(")
    package = Path(megatron_vshape.__file__).parent
    names = {path.name for path in package.rglob("*.py") if unsafe.search(path.read_text())}
    assert names <= {"worker.py", "losses.py", "one_planner.py"}
