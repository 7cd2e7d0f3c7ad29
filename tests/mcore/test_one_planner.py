"""Rank 0 plans for all ranks, before and after process groups exist; failures reach all ranks."""

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from mcore.farm import Farm
from mcore.ranks import run_ranks

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.setup import one_planner, plans
from megatron_vshape.mcore.setup.one_planner import RankZeroPlanner
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.setup.run_config import ScheduleChoice

NOTHING = "rank 0, which plans for all ranks, has sent no plan within 0.1 s: see its log"


class Simulated(RankZeroPlanner):
    """A rank simulated by a thread, with a store in this process."""

    def __init__(self, rank: int, size: int, store: Any, timeout_s: float = 300.0) -> None:
        super().__init__("a run", timeout_s)
        self._here = rank, size
        self._store = store

    def _place(self) -> tuple[int, int]:
        return self._here


def run_on_ranks(count: int, run: Callable[[int], Any]) -> list[Any]:
    """Call `run` for every rank in a separate thread and return the results."""
    results: list[Any] = [None] * count

    def keep(rank: int) -> None:
        results[rank] = run(rank)

    threads = [threading.Thread(target=keep, args=(rank,)) for rank in range(count)]
    for thread in reversed(threads):  # the planning rank starts last
        thread.start()
    for thread in threads:
        thread.join()
    return results


RANKS = 128
"""Number of ranks simulated by threads; they verify, lower and print the plan one by one."""


def test_one_process_plans_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of the first step and of a larger step after a batch size ramp-up."""
    planning_threads: list[str] = []
    ask = plans.plan_request

    def counted(question: Any) -> Any:
        planning_threads.append(threading.current_thread().name)
        return ask(question)

    monkeypatch.setattr(plans, "plan_request", counted)
    store = dist.HashStore()
    choice = ScheduleChoice(2, "auto", costs=Costs.uniform(2, 4))

    def run(rank: int) -> tuple[str, ...]:
        planner = Planner(choice, Simulated(rank, RANKS, store))
        return tuple(planner.plan_step(number).program.text() for number in (2, 3))

    planned = run_on_ranks(RANKS, run)
    assert len(planning_threads) == 2
    assert len(set(planning_threads)) == 1
    assert len(set(planned)) == 1
    assert None not in planned


def planning_errors(plan: Callable[[], Any], timeout_s: float = 300.0) -> list[str]:
    """Return the errors of three ranks if planning fails."""
    store = dist.HashStore()

    def run(rank: int) -> str:
        try:
            Simulated(rank, 3, store, timeout_s)(plan)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return run_on_ranks(3, run)


@pytest.mark.parametrize("kind", [ScheduleError, UnsupportedError])
def test_all_ranks_report_a_rejected_plan(kind: type[Exception]) -> None:
    def plan() -> None:
        raise kind("nothing fits 1 GiB")

    planner_error, *other_errors = planning_errors(plan)
    assert planner_error == f"{kind.__name__}: nothing fits 1 GiB"
    assert other_errors == ["ScheduleError: nothing fits 1 GiB"] * 2


def test_all_ranks_report_a_planner_failure() -> None:
    def plan() -> None:
        raise ValueError("no such pass\nand more")

    planner_error, *other_errors = planning_errors(plan)
    assert planner_error.startswith("ValueError: no such pass")
    message = "rank 0, which plans for all ranks, failed at it: ValueError: no such pass"
    assert other_errors == [f"ScheduleError: {message}"] * 2


def test_waiting_for_a_plan_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_planner, "_packed", lambda outcome: os.abort())
    store = dist.HashStore()
    with pytest.raises(ScheduleError, match=NOTHING):
        Simulated(1, 2, store, timeout_s=0.1)(lambda: 1)


def test_rank_zero_stops_waiting_for_acknowledgements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_planner, "LISTENING_S", 0.1)
    with pytest.raises(ZeroDivisionError):
        Simulated(0, 2, dist.HashStore())(lambda: 1 // 0)


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def plan_around_init(rank: int, port: int, fails: bool) -> list[str]:
    """Plan before and after `init_process_group`; return the plans and the planning ranks."""
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    planner, reports = RankZeroPlanner("a run", 100.0), []

    def ask(text: str) -> None:
        def plan() -> str:
            reports.append("plans")
            if fails:
                raise ScheduleError(f"no {text}")
            return text

        try:
            reports.append(planner(plan))
        except ScheduleError as error:
            reports.append(str(error))

    ask("layers")
    ask("order")
    # Megatron's rendezvous is complete.
    dist.init_process_group("gloo")
    ask("ramp-up")
    dist.barrier()
    return reports


@pytest.mark.parametrize("fails", [False, True], ids=["planned", "failed"])
def test_ranks_use_the_rendezvous_of_megatron(farm: Farm, fails: bool) -> None:
    planner_log, *other_logs = run_ranks(
        farm, 3, plan_around_init, find_free_port(), fails, timeout_s=120
    )
    heard = [f"{'no ' if fails else ''}{text}" for text in ("layers", "order", "ramp-up")]
    assert planner_log == [event for text in heard for event in ("plans", text)]
    assert other_logs == [heard] * 2
