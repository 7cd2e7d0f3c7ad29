"""Checks of losses that wait until the passes of their step have been run.

A script has Megatron validate the loss of every microbatch where it computes it. Whether a number
on a device is NaN the host can tell only by waiting for it, so it would wait in every F of the last
stage and order no work meanwhile; in a V that is on rank 0, whose row has no gap to lose.

Megatron acts on what a check finds after the step, so nothing is lost by asking then: the calls are
kept with the numbers that they are about, and made in their order when the numbers have come to
the host. The copy, one for all, starts after the last pass; a training step finishes its gradients
before it waits for that, so that the GPU has work meanwhile. With --rerun-mode disabled a bad loss
is an exception, which comes after that, and still tells the pass that the loss was computed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_vshape.core.program.instructions import Instruction
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.step_state import StepState
from megatron_vshape.runtime.program_runner import Place


class _Kept(NamedTuple):
    check: Callable[[Tensor], None]  # Megatron's, of everything but the result
    result: Tensor
    instruction: Instruction | None  # that ran when the check was asked for


class _Fetched(NamedTuple):
    checks: list[_Kept]
    values: Tensor  # on the host, once they have arrived
    arrived: torch.cuda.Event | None  # None: they are there


class LateChecks:
    """The checks asked for since the step began, or since the last were made."""

    def __init__(self, place: Place) -> None:
        """Take where the program stands, which a check that raises must tell."""
        self._place = place
        self._kept: list[_Kept] = []
        self._fetched: list[_Fetched] = []

    def add(self, check: Callable[[Tensor], None], result: Tensor) -> None:
        """Keep a check, with the result as it is now: Megatron goes on to divide it in place."""
        self._kept.append(_Kept(check, result.detach().clone(), self._place.instruction))

    def fetch(self) -> None:
        """Start to copy the results kept to the host; does not wait."""
        kept, self._kept = self._kept, []
        for _, alike in groupby(kept, key=lambda each: (each.result.device, each.result.dtype)):
            checks = list(alike)
            results = torch.stack([each.result for each in checks])
            # To memory that torch pins for it, where they come from a GPU.
            values = results.to("cpu", non_blocking=True)
            arrived = None
            if results.is_cuda:
                arrived = torch.cuda.Event()
                arrived.record()
            self._fetched.append(_Fetched(checks, values, arrived))

    def make(self) -> None:
        """Make the checks kept, as if the program stood where each was asked for.

        Raises what the checks raise.
        """
        self.fetch()
        fetched, self._fetched = self._fetched, []
        now = self._place.instruction
        for checks, values, arrived in fetched:
            if arrived is not None:
                arrived.synchronize()
            for each, value in zip(checks, values, strict=True):
                self._place.instruction = each.instruction
                each.check(value)
        self._place.instruction = now


class LateFaults:
    """Faults whose conditions are on the device until the passes of a step have run.

    Reading a condition makes the host wait for all the device has queued, so it is read once.
    """

    def __init__(self) -> None:
        self._found: dict[str, Tensor] = {}  # by message, whether it applies

    def add(self, condition: Tensor | bool, message: str) -> None:
        """Record a fault that applies if `condition` holds.

        Raises:
            UnsupportedError: the condition is known on the host, and holds.
        """
        if isinstance(condition, bool):
            if condition:
                raise UnsupportedError(message)
            return
        before = self._found.get(message)
        self._found[message] = condition if before is None else before | condition

    def check(self) -> None:
        """Raise UnsupportedError for the first fault that applies; waits for the device once."""
        found, self._found = self._found, {}
        if not found:
            return
        for message, applies in zip(found, torch.stack([*found.values()]).tolist(), strict=True):
            if applies:
                raise UnsupportedError(message)


def unlike(found: Tensor, known: Tensor) -> Tensor | bool:
    """Compare the bits of two tensors on the device, where NaN equals NaN.

    Returns:
        Whether they differ: True for other shapes, else a tensor on the device of `known`.
    """
    if found.shape != known.shape:
        return True
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[known.itemsize]
    return (found.detach().to(known).view(bits) != known.detach().view(bits)).any()


@contextmanager
def checked_late(state: StepState, place: Place) -> Iterator[LateChecks]:
    """Have the checks asked for inside wait; yield what makes them, once the passes have run.

    Where a pass inside has failed, none is made.
    """
    checks = LateChecks(place)
    state.late_checks = checks
    try:
        yield checks
    finally:
        state.late_checks = None
    checks.fetch()


def can_wait(machine: Any, result: Any, rejection_func: Any, comparison_func: Any) -> bool:
    """Return whether a check finds the same later, in a copy of the result on the host.

    It does with the functions of Megatron's own scripts, which look at the number and nothing else.
    `machine` is Megatron's RerunStateMachine.
    """
    function = getattr(rejection_func, "func", rejection_func)  # of a partial
    known = function in (torch.isnan, torch.isinf, machine.is_unexpectedly_large)
    return known and comparison_func is None and isinstance(result, Tensor) and not result.dim()
