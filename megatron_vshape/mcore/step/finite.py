"""Which pass made a value that is not finite, found out when Megatron runs a bad step again.

Megatron checks losses and gradients (--check-for-nan-in-loss-and-grad) and repeats the step in
which one was bad (--rerun-mode). Only then are the passes looked at, so a good step pays nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine
from torch import Tensor, nn

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.mcore.step.stage import MegatronStage
from megatron_vshape.runtime.program_runner import describe

logger = logging.getLogger(__name__)

_RERUNS = (
    RerunState.RERUNNING_IN_PLACE,
    RerunState.RERUNNING_FROM_CHECKPOINT,
    RerunState.RERUNNING_AGAIN_FROM_CHECKPOINT,
)


def repeats_a_bad_step() -> bool:
    """Return whether Megatron runs a step again because a value in it was bad."""
    machine = get_rerun_state_machine()
    return machine.get_mode() == RerunMode.VALIDATE_RESULTS and machine.state in _RERUNS


class InspectedStage:
    """Runs a stage's passes, and logs each whose result is not finite though all it reads is.

    `who` names this rank. Where the last W starts to reduce gradients (`reduces_in_w`), what
    they are after it may come from other ranks and is not looked at.
    """

    def __init__(self, stage: MegatronStage, number: int, who: str, reduces_in_w: bool) -> None:
        self._stage = stage
        self._number = number
        self._who = who
        self._left = stage.step.num_numbers if reduces_in_w else -1
        self._bad: set[int] = set()  # microbatches of which this stage has read or made bad values
        bad = _bad_parameters(stage.model, "data")
        if bad:
            first = next(iter(bad))
            text = "%s: %d parameters of stage %d are not finite before the step; %s holds %s"
            logger.error(text, who, len(bad), number, first, bad[first])
            self._bad.update(range(stage.step.num_numbers))

    def forward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run F."""
        self._read(microbatch, received)
        result = self._stage.forward(microbatch, received)
        work = Pass(Kind.F, self._number, microbatch)
        if result is None:
            self._judge(work, self._stage.loss(microbatch), "the loss")
        else:
            self._judge(work, result, "its output")
        return result

    def backward_inputs(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run B."""
        return self._backward(Kind.B, self._stage.backward_inputs, microbatch, received)

    def backward_weights(self, microbatch: int) -> None:
        """Run W."""
        with self._judged_weights(Pass(Kind.W, self._number, microbatch)):
            self._stage.backward_weights(microbatch)

    def backward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run B and W at once."""
        return self._backward(Kind.BW, self._stage.backward, microbatch, received)

    def forward_beside(
        self,
        microbatch: int,
        received: Tensor | None,
        other: InspectedStage,
        work: Pass,
        gradient: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run F, then `work`: of passes that run as one nobody could say which is at fault."""
        sent = self.forward(microbatch, received)
        return sent, getattr(other, work.kind.method)(work.microbatch, gradient)

    def _backward(
        self,
        kind: Kind,
        run: Callable[[int, Tensor | None], Tensor | None],
        microbatch: int,
        received: Tensor | None,
    ) -> Tensor | None:
        self._read(microbatch, received)
        work = Pass(kind, self._number, microbatch)
        with self._judged_weights(work):
            result = run(microbatch, received)
            self._judge(work, result, "the gradient of its input")
        return result

    def _read(self, microbatch: int, received: Tensor | None) -> None:
        if received is not None and _badness(received) is not None:
            self._bad.add(microbatch)

    def _judge(self, work: Pass, result: Tensor | None, what: str) -> None:
        badness = None if result is None else _badness(result)
        if badness is not None and work.microbatch not in self._bad:
            self._bad.add(work.microbatch)
            self._tell(work, f"{badness} in {what}")

    @contextmanager
    def _judged_weights(self, work: Pass) -> Iterator[None]:
        """Tell of gradients that the pass inside spoils; they stay bad, and are told once."""
        before = _bad_parameters(self._stage.model, "main_grad")
        yield
        self._left -= work.kind is not Kind.B
        if work.microbatch in self._bad or not self._left:
            return
        for name, badness in _bad_parameters(self._stage.model, "main_grad").items():
            if name not in before:
                self._bad.add(work.microbatch)
                self._tell(work, f"{badness} in the gradient of {name}")
                return

    def _tell(self, work: Pass, what: str) -> None:
        logger.error("%s: %s, made %s, and all it read was finite", self._who, describe(work), what)


def _badness(tensor: Tensor) -> str | None:
    """Return what of NaN and inf is in the tensor, None if it is finite."""
    if torch.isfinite(tensor).all():
        return None
    return "NaN" if torch.isnan(tensor).any() else "inf"


def _bad_parameters(model: nn.Module, attribute: str) -> dict[str, str]:
    """Return what is in the parameters, or in their gradients, by name where it is not finite."""
    found = {}
    for name, parameter in model.named_parameters():
        value = getattr(parameter, attribute, None)
        badness = None if value is None else _badness(value)
        if badness is not None:
            found[name.removeprefix("module.")] = badness
    return found
