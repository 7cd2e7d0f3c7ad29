"""Loss checks that run after the passes of their step.

A training script makes Megatron validate the loss of every microbatch where it is computed. To test
a device value for NaN, the host must wait for the device. So it would wait in every F of the last
stage and launch no work meanwhile. In the V placement this is on rank 0, which has no idle time.

Megatron acts on the result of a check only after the step, so checking later has no disadvantage.
The calls are stored with their values, and run in order once the values are on the host. One copy
for all values starts after the last pass. A training step finalizes its gradients before it waits
for the copy, so the GPU stays busy. With --rerun-mode disabled, a bad loss raises an exception at
that point; it still names the pass that computed the loss.
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
    check: Callable[[Tensor], None]  # Megatron's check with all arguments but the result
    result: Tensor
    instruction: Instruction | None  # the running instruction at the call


class _Fetched(NamedTuple):
    checks: list[_Kept]
    values: Tensor  # on the host, valid after `arrived`
    arrived: torch.cuda.Event | None  # None: already valid


class LateChecks:
    """Checks recorded since the step started or since the last `make`."""

    def __init__(self, place: Place) -> None:
        """Set the position of the program, which a failing check reports."""
        self._place = place
        self._kept: list[_Kept] = []
        self._fetched: list[_Fetched] = []

    def add(self, check: Callable[[Tensor], None], result: Tensor) -> None:
        """Store a check with a copy of the result, because Megatron then divides it in place."""
        self._kept.append(_Kept(check, result.detach().clone(), self._place.instruction))

    def fetch(self) -> None:
        """Start to copy the stored results to the host, without waiting."""
        kept, self._kept = self._kept, []
        for _, alike in groupby(kept, key=lambda each: (each.result.device, each.result.dtype)):
            checks = list(alike)
            results = torch.stack([each.result for each in checks])
            # From a GPU, torch copies into pinned memory, so the copy is asynchronous.
            values = results.to("cpu", non_blocking=True)
            arrived = None
            if results.is_cuda:
                arrived = torch.cuda.Event()
                arrived.record()
            self._fetched.append(_Fetched(checks, values, arrived))

    def make(self) -> None:
        """Run the stored checks, each with the program position of its recording.

        Raises the exceptions of the checks.
        """
        self.fetch()
        fetched, self._fetched = self._fetched, []
        now = self._place.instruction
        for checks, values, arrived in fetched:
            if arrived is not None:
                arrived.synchronize()
            for each, value in zip(checks, values, strict=True):
                # A failing check reports the pass in which the loss was computed.
                self._place.instruction = each.instruction
                each.check(value)
        self._place.instruction = now


class LateFaults:
    """Faults whose conditions stay on the device until the passes of a step have run.

    Reading a condition makes the host wait for all queued device work, so it is read once.
    """

    def __init__(self) -> None:
        self._found: dict[str, Tensor] = {}  # by message, whether it applies

    def add(self, condition: Tensor | bool, message: str) -> None:
        """Record a fault that applies if `condition` is true.

        Raises:
            UnsupportedError: The condition is known on the host, and true.
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
        Whether they differ: True for different shapes, else a tensor on the device of `known`.
    """
    if found.shape != known.shape:
        return True
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[known.itemsize]
    return (found.detach().to(known).view(bits) != known.detach().view(bits)).any()


@contextmanager
def checked_late(state: StepState, place: Place) -> Iterator[LateChecks]:
    """Defer the loss checks of this context; yields the object that runs them.

    If a pass fails, no check runs.
    """
    checks = LateChecks(place)
    state.late_checks = checks
    try:
        yield checks
    finally:
        state.late_checks = None
    checks.fetch()


def can_wait(machine: Any, result: Any, rejection_func: Any, comparison_func: Any) -> bool:
    """Return whether a check has the same result later, on a host copy of the value.

    True for the functions of Megatron's scripts, which depend only on the value. `machine` is
    Megatron's RerunStateMachine.
    """
    function = getattr(rejection_func, "func", rejection_func)  # unwrap a partial
    known = function in (torch.isnan, torch.isinf, machine.is_unexpectedly_large)
    return known and comparison_func is None and isinstance(result, Tensor) and not result.dim()
