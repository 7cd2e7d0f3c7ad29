"""Injects a fault into a rank of the farm: in one pass of one step, or while it saves.

A fault is a dict: what, rank, step (counted from 1 in this process), pass (`B5.3`), and the
parameters of the kind of fault. The forked rank wraps names of this package or of Megatron; the
package itself contains no code for faults.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_vshape.core.model.kinds import VOCABULARY, find_kind
from megatron_vshape.mcore.features.vocabulary.step import SharedVocabulary
from megatron_vshape.mcore.step.stage import MegatronStage


class InjectedError(Exception):
    """The error of an injected fault."""


def start(rank: int, faults: list[dict[str, Any]]) -> None:
    """Arm this rank's faults."""
    mine = [fault for fault in faults if fault["rank"] == rank]
    for fault in mine:
        if "pass" in fault:
            _wrap_pass(fault)
        else:
            OUTSIDE[fault["what"]](fault)


def _wrap_pass(fault: dict[str, Any]) -> None:
    kind, _, number = _split(fault["pass"])
    name = find_kind(kind).method
    owner: Any = SharedVocabulary if kind in VOCABULARY else MegatronStage
    original = getattr(owner, name)
    steps: list[Any] = []

    @functools.wraps(original)
    def run(stage: Any, microbatch: int, *args: Any) -> Any:
        step = stage.context if owner is SharedVocabulary else stage.step
        if step.forward_only:
            return original(stage, microbatch, *args)
        if not steps or steps[-1] is not step:
            steps.append(step)
        times = fault.get("times", 1)
        in_time = fault["step"] <= len(steps) < fault["step"] + times
        stage_index = (
            number[0] if owner is SharedVocabulary else stage.stage
        )  # a rank has one such pass
        if not in_time or (stage_index, microbatch) != number:
            return original(stage, microbatch, *args)
        return IN_PASS[fault["what"]](fault, functools.partial(original, stage, microbatch), *args)

    setattr(owner, name, run)


def _split(text: str) -> tuple[str, str, tuple[int, int]]:
    kind = text.rstrip("0123456789.")
    stage, microbatch = map(int, text[len(kind) :].split("."))
    return kind, text, (stage, microbatch)


def _note(fault: dict[str, Any]) -> None:
    """Report to the test when the fault occurred, on the clock of time.monotonic."""
    Path(fault["note"]).write_text(f"{time.monotonic()}")


def _kill(fault: dict[str, Any], run: Callable[..., Any], *args: Any) -> Any:
    run(*args)  # so that it is the pass's result that never leaves
    _note(fault)
    os.kill(os.getpid(), signal.SIGKILL)


def _stall(fault: dict[str, Any], run: Callable[..., Any], *args: Any) -> Any:
    time.sleep(fault["seconds"])
    return run(*args)


def _raise_in_the_loss(fault: dict[str, Any], run: Callable[..., Any], *args: Any) -> Any:
    stage = run.args[0]  # of the partial made in `_wrap_pass`
    original = stage.step.forward_step

    def forward_step(*arguments: Any) -> Any:
        output, _ = original(*arguments)
        return output, functools.partial(_raise, fault, _raise)

    stage.step.forward_step = forward_step
    return run(*args)


def _raise(fault: dict[str, Any], run: Callable[..., Any], *args: Any) -> Any:
    _note(fault)
    raise InjectedError("the fault of this test")


def _spoil_result(fault: dict[str, Any], run: Callable[..., Any], *args: Any) -> Any:
    result = run(*args)
    result.view(-1)[0] = float(fault["value"])
    return result


IN_PASS: dict[str, Callable[..., Any]] = {
    "kill": _kill,
    "stall": _stall,
    "raise": _raise,
    "raise in the loss": _raise_in_the_loss,
    "spoil": _spoil_result,
}


def _at_file(fault: dict[str, Any]) -> None:
    """Inject the fault when a file is opened for writing whose path contains fault["file"]."""
    original = io.open
    pid = os.getpid()
    opened_paths: list[str] = []

    @functools.wraps(original)
    def opened(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if not {"w", "x", "a"} & set(mode) or fault["file"] not in str(path):
            return original(path, mode, *args, **options)
        opened_paths.append(str(path))
        if len(opened_paths) <= fault.get("skip", 0):
            return original(path, mode, *args, **options)
        original(path, mode, *args, **options).close()  # the previous content is gone by then
        Path(fault["note"]).touch()
        if fault["what"] == "full disk":
            return original("/dev/full", mode, *args, **options)
        os.kill(pid, signal.SIGKILL)  # the rank, and the writer it may have forked
        os.kill(os.getpid(), signal.SIGKILL)

    builtins.open = io.open = opened


OUTSIDE: dict[str, Callable[[dict[str, Any]], None]] = {
    "full disk": _at_file,
    "killed writer": _at_file,
}
