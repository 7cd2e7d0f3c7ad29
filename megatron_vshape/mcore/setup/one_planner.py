"""One rank plans, and all the others get what it has planned.

A search takes seconds to minutes of a processor, and compiles its own loops: a thousand processes
that each did so would also meet in one folder for compiled code, on a file system that all share.
Ranks still make sure, before a step runs, that they run the same (`step.same_plan`).
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

Planned = TypeVar("Planned")

PREFIX = "megatron-vshape"
"""Of this package's keys in the store by which the ranks of a job meet."""

LISTENING_S = 60.0
"""How long a rank that could not plan waits, before it ends, for the others to hear of it."""


class _Outcome(NamedTuple):
    value: Any
    fault: str | None = None  # why there is none


class OnePlanner:
    """Has rank 0 plan whatever all ranks ask for; they ask for the same, in the same order.

    Before Megatron has made its process groups they meet where it will have them meet (env://),
    later in the group of all ranks. One process alone plans by itself.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        """Take a name for the run's questions, alike on all ranks, and how long they wait.

        A store may outlive a run that is tried again: under one name it is asked for one thing.
        """
        self._name = name
        self._timeout = timedelta(seconds=timeout_s)
        self._asked = 0
        self._store: Store | None = None  # kept: the first rank's may be where all meet

    def __call__(self, plan: Callable[[], Planned]) -> Planned:
        """Return what `plan` returns on rank 0.

        Raises:
            ScheduleError: what `plan` raised there, in a sentence; or nothing has come from there.
        """
        if dist.is_initialized():
            return self._in_group(plan) if dist.get_world_size() > 1 else plan()
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
        """Return the rank of this process and of how many, by its environment."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        rank, size, *meeting = (os.environ.get(name, "") for name in names)
        known = all(meeting) and rank.isdecimal() and size.isdecimal()
        return (int(rank), int(size)) if known else (0, 1)

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
        store = self._meet()
        store.set(key, _packed(outcome))  # type: ignore[arg-type]  # bytes will do
        if error is None:
            value: Planned = outcome.value
            return value
        with suppress(RuntimeError):  # of the store: some have ended by themselves, or never came
            store.wait([_heard(key)], timedelta(seconds=LISTENING_S))
        raise error

    def _wait_for_plan(self, key: str, size: int) -> Any:
        try:
            store = self._meet()
            store.wait([key], self._timeout)
            outcome = _unpacked(store.get(key))
        except RuntimeError as error:  # of the store: time is up, or its process has ended
            raise ScheduleError(
                f"rank 0, which plans for all ranks, has sent no plan within "
                f"{self._timeout.total_seconds():g} s: see its log ({type(error).__name__})"
            ) from None
        if store.add(f"{key} count", 1) == size - 1:
            store.set(_heard(key), "")
        return _value(outcome)

    def _meet(self) -> Store:
        if self._store is None:
            store, _, _ = next(rendezvous("env://", timeout=self._timeout))
            self._store = PrefixStore(PREFIX, store)
        return self._store


def _attempt(plan: Callable[[], Any]) -> tuple[_Outcome, Exception | None]:
    """Return what there is to send, and what this rank is to raise once it has been sent."""
    try:
        return _Outcome(plan()), None
    except (ScheduleError, UnsupportedError) as error:  # about what the user has asked for
        return _Outcome(None, str(error)), error
    except Exception as error:
        line = str(error).partition("\n")[0]
        fault = f"rank 0, which plans for all ranks, failed at it: {type(error).__name__}: {line}"
        return _Outcome(None, fault), error


def _value(outcome: _Outcome) -> Any:
    """Return what has been planned on another rank; raises ScheduleError if nothing has."""
    if outcome.fault is not None:
        raise ScheduleError(outcome.fault)
    return outcome.value


def _packed(outcome: _Outcome) -> bytes:
    return zlib.compress(pickle.dumps(outcome))


def _unpacked(parcel: bytes) -> _Outcome:
    outcome: _Outcome = pickle.loads(zlib.decompress(parcel))  # by another rank of this very run
    return outcome


def _heard(key: str) -> str:
    return f"{key} heard by all"
