"""State shared by the slices of a microbatch: one call of the trainer's function, and one loss.

The trainer's function runs once per microbatch and stage, in the F of the first slice. It gets a
recording proxy of the model, and the other slices call the model with their part of the recorded
arguments. On the last stage, the trainer's loss function runs once, on the losses of all slices,
after the F of the last slice. So masks, averages and token counts are those of the microbatch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.mcore.hook import Function, Hook, Session, replaces
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.step.stage import (
    ForwardStep,
    StepContext,
    StepFeature,
    StepHook,
    loss_maker,
)
from megatron_vshape.mcore.step_state import TokenRange, unwrapped

_SEQUENCE_ARGUMENTS = ("input_ids", "position_ids", "labels", "loss_mask")
"""Batch entries of shape [b, s] or [..., s], which are sliced with the sequence."""

_MASK = "attention_mask"

_LABELS, _LOSS_MASK = "labels", "loss_mask"
"""Labels and loss mask of multi-token prediction: all tokens count without a mask."""


class _RecordedCall(NamedTuple):
    """The arguments of the model's call for a microbatch, and the returned loss function."""

    arguments: inspect.BoundArguments
    loss_function: Any


@dataclass(eq=False)
class Slices(StepHook):
    """State of a step's slices on this rank; `compute_loss` computes a loss from losses, [b, s]."""

    count: int  # slices per microbatch
    length: int  # sequence length of a microbatch
    compute_loss: Callable[[Tensor, Any], Tensor | None] = field(init=False)
    _calls: dict[tuple[int, int], _RecordedCall] = field(default_factory=dict)
    _loss_functions: dict[int, Any] = field(default_factory=dict)  # latest, by stage
    _losses: dict[int, list[Tensor]] = field(default_factory=dict)
    _gradients: dict[int, Tensor] = field(default_factory=dict)

    makes_loss = True

    def forward(self, stage: int, is_last: bool, number: int, step: ForwardStep) -> ForwardStep:
        """Return the replacement of the trainer's function in F."""
        part = TokenRange.of_pass(number, self.count, self.length)
        if part.begin:
            return partial(self._run_later_slice, stage, part)
        return partial(self._run_first_slice, step, stage, part)

    def _run_first_slice(
        self, step: ForwardStep, stage: int, part: TokenRange, iterator: Any, model: nn.Module
    ) -> Any:
        recorder = _CallRecorder(model, part)
        output, loss_function = step(iterator, recorder)
        # Later slices call the model directly, so they would miss any work around the model's call.
        if recorder.arguments is None or output is not recorder.output:
            raise UnsupportedError(
                "--pipeline-slices does not support this script: its forward step must call the "
                "model once and return its result. Change it, or remove --pipeline-slices"
            )
        self._calls[stage, part.microbatch] = _RecordedCall(recorder.arguments, loss_function)
        return output, self._loss_function(stage, part)

    def _run_later_slice(
        self, stage: int, part: TokenRange, iterator: Any, model: nn.Module
    ) -> Any:
        arguments = self._calls[stage, part.microbatch].arguments
        return _call(model, arguments, part), self._loss_function(stage, part)

    def _loss_function(self, stage: int, part: TokenRange) -> Any:
        """Return the loss function of the running F; the last slice drops the recorded call."""
        call = self._calls[stage, part.microbatch]
        if part.end == part.total:
            del self._calls[stage, part.microbatch]
            self._loss_functions[stage] = call.loss_function
        return call.loss_function

    def output(self, is_last: bool, number: int, output: Tensor) -> Tensor:
        """Copy the last stage's output, because Megatron does not free the memory of a view."""
        return output.clone() if is_last else output

    def ends_forward(self, stage: int, is_last: bool, number: int, output: Tensor) -> None:
        """Store the losses, [b, s], of a last-stage F; after the last slice, compute the loss."""
        if not is_last:
            return
        losses = output.detach()  # an alias, as Megatron frees the memory of the output
        part = TokenRange.of_pass(number, self.count, self.length)
        if losses.shape[1:] != (part.end - part.begin,):
            raise UnsupportedError(
                f"the last stage returned {tuple(losses.shape)} of a slice of "
                f"{part.end - part.begin} tokens, and slices need its losses: give the model labels"
            )
        slice_losses = self._losses.setdefault(part.microbatch, [])
        slice_losses.append(losses)
        if part.end < part.total:
            return
        # The trainer's function masks, averages and counts tokens, so it must see the full
        # microbatch.
        full_losses = torch.cat(self._losses.pop(part.microbatch), dim=1)
        # One gradient for the B of all slices; the first slice's B, which runs last, drops it.
        gradient = self.compute_loss(full_losses, self._loss_functions[stage])
        assert gradient is not None
        self._gradients[part.microbatch] = gradient

    def before_backward(self, work: Pass, is_last: bool, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient of a slice's losses for its B."""
        if not is_last or work.kind is Kind.W:
            return gradient
        part = TokenRange.of_pass(work.microbatch, self.count, self.length)
        # The B of the first slice runs last.
        get_gradient = self._gradients.pop if part.begin == 0 else self._gradients.__getitem__
        return get_gradient(part.microbatch)[:, part.begin : part.end].contiguous()


class Slicing(StepFeature):
    """Runs microbatches in slices."""

    def begin(self, context: StepContext) -> StepHook | None:
        """Return the shared state of a step's slices."""
        if context.passes_per_microbatch > 1:
            slices = Slices(context.passes_per_microbatch, context.call.seq_length)
            slices.compute_loss = loss_maker(context)
            return slices
        return None


class _CallRecorder:
    """Proxy of the model during the trainer's function, which records the call."""

    def __init__(self, model: nn.Module, part: TokenRange) -> None:
        self._model, self._part = model, part
        self.arguments: inspect.BoundArguments | None = None
        self.output: Any = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        signature = inspect.signature(unwrapped(self._model).forward)
        self.arguments = signature.bind(*args, **options)
        self.output = _call(self._model, self.arguments, self._part)
        return self.output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _call(model: nn.Module, arguments: inspect.BoundArguments, part: TokenRange) -> Any:
    """Call the model for one slice."""
    full_arguments = dict(arguments.arguments)
    cut_tensor = _slice_tensor
    if looks_ahead(model):
        cut_tensor = _SliceTokens.cut
        # Without a mask, Megatron counts the tokens of the call. With one, `_SliceTokens.sum`
        # counts those of the microbatch.
        if full_arguments.get(_LOSS_MASK) is None and full_arguments.get(_LABELS) is not None:
            full_arguments[_LOSS_MASK] = torch.ones_like(full_arguments[_LABELS])
    slice_arguments = {
        name: _slice_argument(name, value, part, cut_tensor)
        for name, value in full_arguments.items()
    }
    bound = inspect.BoundArguments(arguments.signature, slice_arguments)
    return model(*bound.args, **bound.kwargs)


def looks_ahead(model: nn.Module) -> bool:
    """Return whether a chunk has layers of multi-token prediction."""
    return bool(getattr(unwrapped(model), "mtp_process", False))


def _slice_tensor(full_tensor: Tensor, part: TokenRange) -> Tensor:
    return full_tensor[..., part.begin : part.end].contiguous()


def _slice_argument(
    name: str, value: Any, part: TokenRange, cut_tensor: Callable[[Tensor, TokenRange], Tensor]
) -> Any:
    """Return the part of an argument that belongs to a slice."""
    if value is None or isinstance(value, bool) or value in ({}, ()):
        return value
    shape = value.shape if isinstance(value, Tensor) else ()
    if name in _SEQUENCE_ARGUMENTS and shape[-1:] == (part.total,):
        return cut_tensor(value, part)
    if name == _MASK and shape[-2:] == (part.total, part.total):
        return value[..., part.begin : part.end, : part.end]
    raise UnsupportedError(
        f"--pipeline-slices cannot slice {name}, {tuple(shape) or type(value).__name__}"
        f", with which the model was called for {part.total} tokens. Remove --pipeline-slices"
    )


class _SliceTokens(Tensor):
    """Tokens, labels or mask of a slice, [b, s], with a reference to the microbatch's, [b, s].

    A clone keeps the reference, and `sum` is over the microbatch. All other operations return a
    plain tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    full_tensor: Tensor
    part: TokenRange

    @staticmethod
    def cut(full_tensor: Tensor, part: TokenRange) -> _SliceTokens:
        """Return the part of the slice `part`."""
        tokens = full_tensor[..., part.begin : part.end].contiguous().as_subclass(_SliceTokens)
        tokens.full_tensor, tokens.part = full_tensor, part
        return tokens

    def clone(self, *_: Any, **__: Any) -> _SliceTokens:
        """Return a copy that references a copy of the full tensor."""
        return _SliceTokens.cut(self.full_tensor.clone(), self.part)

    def sum(self, *args: Any, **options: Any) -> Tensor:
        """Return the sum over the microbatch."""
        return self.full_tensor.sum(*args, **options)


@replaces
def roll_tensor(
    session: Session, original: Function, tensor: Any, *args: Any, **options: Any
) -> Any:
    """Roll the tokens of the full microbatch, so that a slice sees the tokens behind its end.

    The second result of Megatron's function counts the tokens of the microbatch.
    """
    if not isinstance(tensor, _SliceTokens):
        return original(tensor, *args, **options)
    rolled, *counted = original(tensor.full_tensor, *args, **options)
    # Multi-token prediction rolls once per depth, so the result must reference the microbatch
    # again.
    return _SliceTokens.cut(rolled, tensor.part), *counted


HOOKS = (
    Hook(
        "megatron.core.transformer.multi_token_prediction",
        "roll_tensor",
        ("tensor", "shifts", "dims"),
        "tokens behind the end of a slice are those of the next",
        roll_tensor,
        only_with_pipeline=True,
    ),
)
