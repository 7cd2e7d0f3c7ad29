"""One rank plans for all, before there are process groups and after; all hear of it if it fails."""

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from runtime.ranks import run_ranks

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.setup import one_planner, plans
from megatron_vshape.mcore.setup.choice import ScheduleChoice
from megatron_vshape.mcore.setup.one_planner import RankZeroPlanner
from megatron_vshape.mcore.setup.plans import Planner

NOTHING = "rank 0, which plans for all ranks, has sent no plan within 0.1 s: see its log"


class Simulated(RankZeroPlanner):
    """One of many ranks that are threads here, and meet in a store of this process."""

    def __init__(self, rank: int, size: int, store: Any, timeout_s: float = 300.0) -> None:
        super().__init__("a run", timeout_s)
        self._here = rank, size
        self._store = store

    def _place(self) -> tuple[int, int]:
        return self._here


def on_ranks(count: int, run: Callable[[int], Any]) -> list[Any]:
    """Return what `run` of every rank returns, each in a thread of its own."""
    results: list[Any] = [None] * count

    def keep(rank: int) -> None:
        results[rank] = run(rank)

    threads = [threading.Thread(target=keep, args=(rank,)) for rank in range(count)]
    for thread in reversed(threads):  # the one that plans comes last
        thread.start()
    for thread in threads:
        thread.join()
    return results


RANKS = 128
"""Of a job in threads: each proves, lowers and prints the plan for itself, one after the other."""


def test_a_job_of_many_ranks_plans_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first step, and the larger one that a ramp-up brings."""
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

    planned = on_ranks(RANKS, run)
    assert len(planning_threads) == 2
    assert len(set(planning_threads)) == 1
    assert len(set(planned)) == 1
    assert None not in planned


def sentences(plan: Callable[[], Any], timeout_s: float = 300.0) -> list[str]:
    """Return what three ranks say of a plan that fails."""
    store = dist.HashStore()

    def run(rank: int) -> str:
        try:
            Simulated(rank, 3, store, timeout_s)(plan)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return on_ranks(3, run)


@pytest.mark.parametrize("kind", [ScheduleError, UnsupportedError])
def test_what_cannot_be_planned_all_ranks_say(kind: type[Exception]) -> None:
    def plan() -> None:
        raise kind("nothing fits 1 GiB")

    planner_error, *other_errors = sentences(plan)
    assert planner_error == f"{kind.__name__}: nothing fits 1 GiB"
    assert other_errors == ["ScheduleError: nothing fits 1 GiB"] * 2


def test_a_fault_of_the_planner_all_ranks_hear_of() -> None:
    def plan() -> None:
        raise ValueError("no such pass\nand more")

    planner_error, *other_errors = sentences(plan)
    assert planner_error.startswith("ValueError: no such pass")
    said = "rank 0, which plans for all ranks, failed at it: ValueError: no such pass"
    assert other_errors == [f"ScheduleError: {said}"] * 2


def test_a_plan_that_never_comes_is_waited_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_planner, "_packed", lambda outcome: os.abort())
    store = dist.HashStore()
    with pytest.raises(ScheduleError, match=NOTHING):
        Simulated(1, 2, store, timeout_s=0.1)(lambda: 1)


def test_the_first_rank_does_not_wait_for_ever_to_be_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_planner, "LISTENING_S", 0.1)
    with pytest.raises(ZeroDivisionError):
        Simulated(0, 2, dist.HashStore())(lambda: 1 // 0)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def meet(rank: int, port: int, fails: bool) -> list[str]:
    """Plan before there is a process group and in it; return what came, and who has planned."""
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    once, said = RankZeroPlanner("a run", 100.0), []

    def ask(text: str) -> None:
        def plan() -> str:
            said.append("plans")
            if fails:
                raise ScheduleError(f"no {text}")
            return text

        try:
            said.append(once(plan))
        except ScheduleError as error:
            said.append(str(error))

    ask("layers")
    ask("order")
    # Where Megatron has the ranks meet, they have met.
    dist.init_process_group("gloo")
    ask("ramp-up")
    dist.barrier()
    return said


@pytest.mark.parametrize("fails", [False, True], ids=["planned", "failed"])
def test_ranks_meet_where_megatron_has_them_meet(fails: bool) -> None:
    planner_log, *other_logs = run_ranks(3, meet, free_port(), fails, timeout_s=120)
    heard = [f"{'no ' if fails else ''}{text}" for text in ("layers", "order", "ramp-up")]
    assert planner_log == [event for text in heard for event in ("plans", text)]
    assert other_logs == [heard] * 2
