"""A plan ends at its time limit, and with Ctrl-C."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_vshape.cli.main import main
from megatron_vshape.core.budget import GRACE_S, SEARCH, Budget
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.request import PlanRequest, PlanResult

LONG = ["plan", "--devices", "8", "--microbatches", "64", "--cost", "1,1.15,.85,.05"]
LONG += ["--memory-limit", "10"]


@pytest.fixture(autouse=True)
def _usual_interrupts() -> Iterator[None]:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup has it ignored
    yield
    signal.signal(signal.SIGINT, handler)
    for thread in threading.enumerate():
        if thread.name == SEARCH:
            thread.join(30)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Send Ctrl-C some seconds after the first progress report of a search.

    Timers that have not fired at the end of the test are cancelled.
    """
    started_timers: list[threading.Timer] = []

    def come(*seconds: float) -> None:
        progress, timers = Budget.progress, [threading.Timer(delay, interrupt) for delay in seconds]
        started_timers.extend(timers)

        def and_interrupt(self: Budget, steps: int, best: float, bound: float) -> None:
            while timers:
                timers.pop().start()
            progress(self, steps, best, bound)

        monkeypatch.setattr(Budget, "progress", and_interrupt)

    yield come
    for timer in started_timers:
        timer.cancel()


def small() -> PlanResult:
    return plan_request(PlanRequest("auto", 2, 4, steps=1000))


def test_work_within_the_time_limit_returns_its_result() -> None:
    assert Budget(None).run(lambda: 3, pytest.fail) == 3
    assert Budget(60).run(lambda: 3, pytest.fail) == 3


def test_an_error_of_the_work_is_raised() -> None:
    def fail() -> None:
        raise LookupError("missing")

    with pytest.raises(LookupError, match="missing"):
        Budget(None).run(fail, pytest.fail)


def test_time_limit_returns_the_best_result() -> None:
    budget, ended, plan = Budget(0.2), threading.Event(), small()
    budget.register_result(lambda: plan)
    start = time.monotonic()
    assert budget.run(lambda: ended.wait(30), pytest.fail) is None
    assert time.monotonic() - start < 0.2 + GRACE_S + 2
    assert budget.stopped()
    assert not budget.interrupted
    assert budget.best() is plan
    ended.set()


def test_ctrl_c_reports_the_best_and_a_second_one_exits() -> None:
    budget, ended, plan = Budget(None), threading.Event(), small()
    budget.register_result(lambda: plan)
    best_plans: list[Any] = []
    threading.Timer(0.2, interrupt).start()
    threading.Timer(0.4, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        budget.run(lambda: ended.wait(30), best_plans.append)
    assert best_plans == [plan]
    ended.set()


def test_seconds_limit_the_whole_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--devices", "2", "--microbatches", "4"])  # compiles, or finds it compiled
    start = time.monotonic()
    assert main([*LONG, "--seconds", "2"]) == 0
    assert time.monotonic() - start < 2 + GRACE_S + 4
    assert "peak memory     10 chunks, limit 10 chunks" in capsys.readouterr().out


def test_ctrl_c_in_a_plan(
    capsys: pytest.CaptureFixture[str], interrupted: Callable[..., None]
) -> None:
    interrupted(0.3)
    assert main(LONG) == 0
    out, err = capsys.readouterr()
    assert "interrupted; the best so far: " in err
    assert "peak memory     10 chunks, limit 10 chunks" in out
    assert "comparison table skipped" in out or "further rows skipped" in out


def test_a_second_ctrl_c_in_a_plan(
    capsys: pytest.CaptureFixture[str], interrupted: Callable[..., None]
) -> None:
    interrupted(0.3, 0.34)
    assert main(LONG) == 130
    assert "interrupted; the best so far: " in capsys.readouterr().err


def test_a_limit_that_no_known_schedule_fits_and_no_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*LONG[:-1], "5", "--seconds", "0.01"]) in (0, 2)
    out, err = capsys.readouterr()
    assert "--seconds 0.01" in err or "limit 5 chunks" in out
