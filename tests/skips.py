"""Plugin of pytest: a run fails if it skips too many tests, or one for an unknown reason."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

TE_MISSING = "Transformer Engine's Python is not installed: `bash scripts/test.sh` downloads it"

MOST_SKIPS = 25

REASONS = (
    *("GPU", "NCCL", "Linux", "/dev/"),  # hardware and operating system
    *("installed", "could not import", "extra", "numba", "torch", "Chromium"),  # optional libraries
    *("Megatron", "Python", "git"),  # a release or a checkout that the machine does not have
)
"""Words of the permitted reasons."""


@pytest.fixture
def te_python() -> Path:
    """Return the directory of Transformer Engine's Python for a dry run."""
    from megatron_vshape.core.model.kinds import ScheduleError
    from megatron_vshape.rehearsal.sources import find_te

    try:
        return find_te(None)
    except ScheduleError:
        pytest.skip(TE_MISSING)


def describe_excess(reasons: Iterable[str]) -> list[str]:
    """Describe the skips that a run may not have; empty if there are none."""
    counts = Counter(reasons)
    problems = [
        f"{count} skipped for a reason that names no hardware or optional library: {reason}"
        for reason, count in counts.items()
        if not any(permitted in reason for permitted in REASONS)
    ]
    if counts.total() > MOST_SKIPS:
        problems.append(f"{counts.total()} tests skipped, at most {MOST_SKIPS} may be")
    return problems


def _reasons(config: pytest.Config) -> list[str]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter is not None else []
    return [report.longrepr[2].removeprefix("Skipped: ") for report in reports]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run for its skips; workers of pytest-xdist report to the process that prints."""
    if not hasattr(session.config, "workerinput") and describe_excess(_reasons(session.config)):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print each reason with its count, then the skips that fail the run."""
    reasons = _reasons(config)
    for reason, count in Counter(reasons).most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")
    for problem in describe_excess(reasons):
        terminalreporter.write_line(f"ERROR: {problem}", red=True)
