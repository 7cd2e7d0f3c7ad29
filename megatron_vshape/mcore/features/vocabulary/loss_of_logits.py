"""A trainer's own loss of logits with vocabulary parallelism.

Libraries for reinforcement learning call the model without labels, and compute log-probabilities
and entropy from its logits: in the function that calls the model or in the loss function that it
returns. Their code supports the rows of a tensor-parallel rank and reduces over Megatron's
tensor-parallel group. So in the F of the last stage, their function is stopped before it
uses logits. In the LOGITS pass, every rank calls it again. Its call of the model then returns the
logits of this rank's rows, and the ranks of pipeline and tensor parallelism together replace the
tensor-parallel group. All ranks compute the same loss, and each has the gradient of its own logits.
The rank of the last stage reports the loss.

From the call of the model on, the group is also in the attributes of the model and in the number of
tensor-parallel ranks (`RanksOfRows`), by which some libraries check whether logits are sharded.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import cross_entropy
from torch import Tensor, nn

from megatron_vshape.mcore.hook import Function, Hook, Replaced, Session
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.step.losses import LateFaults, unlike
from megatron_vshape.mcore.step_state import StepState, unwrapped

_FIX = "remove --pipeline-vocab-parallel"


class _LogitsRequested(BaseException):
    """Stops a trainer's function that called the model without labels, before it gets logits."""


class _LocalLogits(torch.autograd.Function):
    """Logits [b, s, rows] of a hidden state [s, b, h]; `keep` gets their gradient [s, b, rows]."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, hidden: Tensor, weight: Tensor, keep: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.keep = keep
        # Not a view: the trainer may divide the logits by a temperature in place.
        return hidden.transpose(0, 1).contiguous() @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.keep(gradients[0].transpose(0, 1).contiguous())
        return None, None, None, None


@dataclass(slots=True)
class RanksOfRows:
    """The number of tensor-parallel ranks while the trainer's function runs in the LOGITS pass.

    Code that reads the number before the call of the model pads sequences to a multiple of it, and
    may pad labels after the call. It always gets the number of F. Other code has logits, and
    assumes the full vocabulary if the number is 1. After the call it gets the number
    of ranks that have rows.
    """

    of_stage: int
    of_rows: int | None = None  # set by the call of the model
    _pads: set[CodeType] = field(default_factory=set)

    def number_for(self, code: CodeType) -> int:
        """Return the number for the caller with this code object."""
        if self.of_rows is None:
            self._pads.add(code)
        return self.of_stage if self.of_rows is None or code in self._pads else self.of_rows


def called_up_to_logits(
    forward_step_func: Callable[..., Any],
    iterator: Any,
    model: nn.Module,
    has_labels: Callable[[], bool],
) -> tuple[Any, Tensor | None]:
    """Call the trainer's function in the F of the last stage.

    Returns:
        Its result and None. If it calls the model without labels, after which `has_labels` would
            be true, it is stopped there: None and the output of the model.
    """
    inner = unwrapped(model)
    run, outputs = inner.forward, list[Tensor]()

    def stop_at_logits(*args: Any, **options: Any) -> Any:
        output = run(*args, **options)
        if not has_labels():
            outputs.append(output)
            raise _LogitsRequested
        return output

    with Replaced() as replaced:
        replaced.put(inner, "forward", stop_at_logits)
        try:
            return forward_step_func(iterator, model), None
        except _LogitsRequested:
            return None, outputs[0]


@dataclass(frozen=True, slots=True)
class LossOfLogits:
    """Computes the trainer's loss of logits for one step on this rank."""

    state: StepState
    model: nn.Module  # the last chunk, wrapped
    iterator: Any  # second reader of its data
    forward_step_func: Callable[..., Any]
    shards: Any  # this rank's shard of the rows: `features.vocabulary.model.Shards`
    compute_loss: Callable[..., Any]  # result of `stage.loss_maker`
    faults: LateFaults  # faults of the step

    def compute_gradient(self, hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor | None:
        """Compute the loss of a microbatch; return the gradient of this rank's logits [s, b, rows].

        None if the loss does not depend on the logits.

        Args:
            hidden: Output of the last stage, [s, b, h].
            weight: This rank's rows of the output layer.
            tokens: The microbatch's tokens, [b, s], as read by the first stage.

        Raises:
            UnsupportedError: This rank has no data or different data, or its model gathers logits.
        """
        self._check_data()
        inner = unwrapped(self.model)
        gradients: list[Tensor] = []
        signature = inspect.signature(type(inner).forward)
        # `hidden` and `weight` are detached, so the logits need another input that requires grad.
        anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())

        ranks = RanksOfRows(parallel_state.get_tensor_model_parallel_world_size())

        # Code that checks for the first or last stage must find both on this rank.
        state = self.state.setting(has_logits=True, tensor_ranks=ranks)
        with Replaced() as replaced, state:

            def call(*args: Any, **options: Any) -> Tensor:
                input_tokens = signature.bind(inner, *args, **options).arguments.get("input_ids")
                self._check_tokens(input_tokens, tokens)
                self._set_tensor_parallel_group(replaced)
                ranks.of_rows = self.shards.size()
                logits: Tensor = _LocalLogits.apply(anchor, hidden, weight, gradients.append)
                return logits

            for name, value in ("forward", call), ("pre_process", True), ("post_process", True):
                replaced.put(inner, name, value)
            output, function = self.forward_step_func(self.iterator, self.model)
            self.compute_loss(output, function, is_leaf=False)
        return gradients[0] if gradients else None

    def _check_data(self) -> None:
        if self.iterator is None:
            raise UnsupportedError(
                f"rank {dist.get_rank()} has no data iterator, and with a shared vocabulary every "
                f"rank makes the loss of its rows of the logits: give it the data, or {_FIX}"
            )
        if not getattr(unwrapped(self.model), "parallel_output", True):
            raise UnsupportedError(
                "the model gathers the logits of all rows (parallel_output=False), and with a "
                f"shared vocabulary every rank has its own: have it not gather, or {_FIX}"
            )

    def _check_tokens(self, input_tokens: Tensor | None, tokens: Tensor) -> None:
        self.faults.add(
            True if input_tokens is None else unlike(input_tokens, tokens),
            f"rank {dist.get_rank()} has read another microbatch than the first stage, and "
            "with a shared vocabulary every rank makes the loss of its rows of the logits: "
            f"give all ranks of a pipeline the same microbatches, or {_FIX}",
        )

    def _set_tensor_parallel_group(self, replaced: Replaced) -> None:
        """Set the ranks that share the vocabulary as Megatron's tensor-parallel group."""
        group = parallel_state.get_model_parallel_group()
        if (group.rank(), group.size()) != (self.shards.rank(), self.shards.size()):
            raise UnsupportedError(
                f"this rank has part {self.shards.rank()} of {self.shards.size()} of the "
                f"vocabulary, and is number {group.rank()} of {group.size()} in Megatron's group "
                f"of pipeline and tensor parallelism: {_FIX}"
            )
        for name, value in (
            ("_TENSOR_MODEL_PARALLEL_GROUP", group),
            ("_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS", dist.get_process_group_ranks(group)),
            ("_MPU_TENSOR_MODEL_PARALLEL_RANK", None),
            ("_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE", None),
        ):
            replaced.put(parallel_state, name, value)
        inner = unwrapped(self.model)
        groups = copy.copy(inner.pg_collection)
        groups.tp = group
        loss = "compute_language_model_loss"  # replaces this package's, which is for F
        for name, value in (
            ("tp_group", group),
            ("pg_collection", groups),
            (loss, partial(getattr(type(inner), loss), inner)),
        ):
            replaced.put(inner, name, value)
        # Patch the class, because libraries import the function by name, and it calls the class.
        entropy = cross_entropy._VocabParallelCrossEntropy
        replaced.put(entropy, "forward", staticmethod(_unsmoothed(entropy.forward)))


def _unsmoothed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make Megatron's cross entropy of sharded logits reject label smoothing.

    It averages log-probabilities over the rows of a rank instead of the full vocabulary.
    """

    def checked(
        ctx: Any, logits: Tensor, target: Tensor, label_smoothing: float = 0.0, *args: Any
    ) -> Tensor:
        if label_smoothing > 0:
            raise UnsupportedError(
                f"--pipeline-vocab-parallel does not support label_smoothing {label_smoothing} in "
                "Megatron's vocab_parallel_cross_entropy: it averages log-probabilities over the "
                "rows of a rank, which has only a part of the vocabulary. Set label_smoothing to "
                "0, or remove --pipeline-vocab-parallel"
            )
        return forward(ctx, logits, target, label_smoothing, *args)

    return checked


def _tensor_parallel_world_size(session: Session, original: Function) -> Function:
    """Return the number of vocabulary-parallel ranks during a trainer's loss of logits."""

    @functools.wraps(original)
    def size() -> Any:
        # Code that pads sequences needs the original number. `number_for` identifies such code
        # by its code object.
        ranks = session.step.tensor_ranks
        return original() if ranks is None else ranks.number_for(sys._getframe(1).f_code)

    return size


HOOKS = (
    Hook(
        "megatron.core.parallel_state",
        "get_tensor_model_parallel_world_size",
        (),
        "counts the ranks that share the vocabulary while a trainer makes its own loss of logits",
        _tensor_parallel_world_size,
        everywhere=True,
    ),
)
