"""Plan on one rank and send the result to all others.

A search uses seconds to minutes of CPU time and compiles its own loops. If a thousand processes did
so, they would also write to one folder of compiled code on a shared file system. Before a step,
ranks still check that they run the same plan (`plans.Agreement`).
"""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.runtime.hosts import has_peers

Planned = TypeVar("Planned")

PREFIX = "megatron-vshape"
"""Prefix of this package's keys in the rendezvous store of a job."""

LISTENING_S = 60.0
"""Seconds that a rank waits, after planning failed, until the others have received the error."""


class _Outcome(NamedTuple):
    value: Any
    fault: str | None = None  # error message, if there is no value


class RankZeroPlanner:
    """Runs plans on rank 0 for all ranks; all ranks call it for the same plans in the same order.

    Before Megatron has created its process groups, ranks exchange the plan through the env://
    store. Afterwards they use the group of all ranks. A single process plans for itself.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        """Set the name of this run's keys, equal on all ranks, and the timeout in seconds.

        A store may outlive a run that is restarted, so one name must always mean the same plan.
        """
        self._name = name
        self._timeout = timedelta(seconds=timeout_s)
        self._asked = 0
        self._store: Store | None = None  # kept open: rank 0 may be the server of the store

    def __call__(self, plan: Callable[[], Planned]) -> Planned:
        """Return the result of `plan` on rank 0.

        Raises:
            ScheduleError: `plan` raised on rank 0 (with its message), or rank 0 has not responded.
        """
        if dist.is_initialized():
            is_alone = dist.get_world_size() == 1 or not has_peers()
            return plan() if is_alone else self._in_group(plan)
        rank, size = self._place()
        if size == 1:
            return plan()
        self._asked += 1
        key = f"{self._name} {self._asked}"
        if rank == 0:
            return self._plan_for_all(plan, key)
        planned: Planned = self._wait_for_plan(key, size)
        return planned

    def _place(self) -> tuple[int, int]:
        """Return the rank of this process and the world size from the environment."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        rank, size, *meeting = (os.environ.get(name, "") for name in names)
        is_complete = all(meeting) and rank.isdecimal() and size.isdecimal()
        return (int(rank), int(size)) if is_complete else (0, 1)

    def _in_group(self, plan: Callable[[], Planned]) -> Planned:
        outcome: list[Any] = [None]
        error: Exception | None = None
        if dist.get_rank() == 0:
            outcome[0], error = _attempt(plan)
        dist.broadcast_object_list(outcome, src=0)
        if error is not None:
            raise error
        planned: Planned = _value(outcome[0])
        return planned

    def _plan_for_all(self, plan: Callable[[], Planned], key: str) -> Planned:
        outcome, error = _attempt(plan)
        store = self._open_store()
        store.set(key, _packed(outcome))  # type: ignore[arg-type]  # bytes will do
        if error is None:
            value: Planned = outcome.value
            return value
        # The store may be served by this process: keep it until all ranks have read the error.
        with suppress(RuntimeError):  # of the store: some ranks have exited or never started
            store.wait([_heard(key)], timedelta(seconds=LISTENING_S))
        raise error

    def _wait_for_plan(self, key: str, size: int) -> Any:
        try:
            store = self._open_store()
            store.wait([key], self._timeout)
            # Written by rank 0 of this run, so unpickling it is safe.
            outcome: _Outcome = pickle.loads(zlib.decompress(store.get(key)))
        except RuntimeError as error:  # of the store: timeout, or its process has exited
            raise ScheduleError(
                f"rank 0, which plans for all ranks, has sent no plan within "
                f"{self._timeout.total_seconds():g} s: see its log ({type(error).__name__})"
            ) from None
        # The last reader releases rank 0, which waits before it raises.
        if store.add(f"{key} count", 1) == size - 1:
            store.set(_heard(key), "")
        return _value(outcome)

    def _open_store(self) -> Store:
        if self._store is None:
            store, _, _ = next(rendezvous("env://", timeout=self._timeout))
            self._store = PrefixStore(PREFIX, store)
        return self._store


def _attempt(plan: Callable[[], Any]) -> tuple[_Outcome, Exception | None]:
    """Run `plan`; return the outcome to send, and the error to raise after sending it."""
    try:
        return _Outcome(plan()), None
    except (ScheduleError, UnsupportedError) as error:  # errors in the user's options
        return _Outcome(None, str(error)), error
    except Exception as error:
        line = str(error).partition("\n")[0]
        fault = f"rank 0, which plans for all ranks, failed at it: {type(error).__name__}: {line}"
        return _Outcome(None, fault), error


def _value(outcome: _Outcome) -> Any:
    """Return the value planned on another rank; raises ScheduleError if planning failed."""
    if outcome.fault is not None:
        raise ScheduleError(outcome.fault)
    return outcome.value


def _packed(outcome: _Outcome) -> bytes:
    return zlib.compress(pickle.dumps(outcome))


def _heard(key: str) -> str:
    return f"{key} heard by all"
