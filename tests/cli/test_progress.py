"""Progress reports of long searches."""

import io
import time

import pytest

from megatron_vshape import Costs, plan
from megatron_vshape.cli import progress
from megatron_vshape.core import compiling
from megatron_vshape.view.numbers import fixed, time_text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> str:
    """Return the output of a search that reports one state and then continues silently."""
    monkeypatch.setattr(progress, "FIRST_S", 0.02)
    monkeypatch.setattr(progress, "TERMINAL_S", 0.02)
    monkeypatch.setattr(progress, "FILE_S", 0.02)
    monkeypatch.setattr("sys.stderr", stream)
    with progress.report_progress(fixed) as search_progress:
        search_progress.search(12_345, 678.5, 600.0)
        while stream.getvalue().count("running (") < 2:
            time.sleep(0.01)
        search_progress.print_line("limit 2")
    return stream.getvalue()


def test_a_terminal_has_one_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = shown(monkeypatch, Terminal())
    assert "\r\x1b[Krunning (0 s): 12,345 steps, best 678.5, lower bound 600" in text
    assert text.count("\n") == 1  # that of the line that stays
    assert text.endswith("\r\x1b[K")


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("NO_COLOR", "1")])
def test_a_terminal_without_escapes_has_lines(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    text = shown(monkeypatch, Terminal())
    assert "\x1b" not in text
    assert "running (0 s): 12,345 steps, best 678.5, lower bound 600\n" in text


def test_a_file_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, io.StringIO())
    assert "\x1b" not in text
    assert "running (0 s): 12,345 steps, best 678.5, lower bound 600\n" in text


def test_short_work_reports_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with progress.report_progress(fixed):
        pass
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [(14_568_000, "14,568,000 ms"), (9930, "9,930 ms"), (0.01234, "0.01234 ms"), (0, "0 ms")],
)
def test_a_time_has_one_form(value: float, text: str) -> None:
    assert time_text(1000 * value, in_us=True) == text


def test_planning_without_numba_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiling, "compiles", lambda: False)
    compiling.warn_if_slow.cache_clear()
    for _ in range(2):
        plan(Costs.uniform(2, 4), 2, 2, limit=4, steps=100)
    assert [record.message for record in caplog.records if "numba" in record.message] == [
        "numba is not installed, so planning is about 10 times slower: "
        "pip install 'megatron-vshape[search]'"
    ]
