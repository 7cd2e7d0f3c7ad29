"""Interfaces between the program runner and the model stages."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from megatron_vshape.core.model.passes import Pass


class Handler(NamedTuple):
    """Runs all passes of a kind that the model stages do not implement.

    - run: runs the pass, in a separate thread if its resource is not the processor.
    - join: called before a pass with collectives; returns when the inputs of the pass are ready.
    - prepare: called in the program's thread at the position of the pass.
    """

    run: Callable[[Pass], None]
    join: Callable[[Pass], None] | None = None
    prepare: Callable[[Pass], None] | None = None


class Stage(Protocol):
    """One stage of the model on this rank.

    The runner calls the passes in program order. The stage saves the state that a later pass of the
    same microbatch needs, and frees it right after that pass. For a pass of another kind without a
    `Handler`, the runner calls the method named by the kind, with the microbatch only.

    A stage may implement `forward_overlapped(microbatch, received, other, work, gradient)` for
    overlapped F&B: it runs F overlapped with `work`, a B or BW of the stage `other` with the output
    gradient `gradient`, and returns both results. Without that method the two passes run one after
    the other.
    """

    def forward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run F and return the detached output; None from the last stage, which stores its loss.

        `received` is the input, [s, b, h]; None for the first stage, which reads the data.
        """

    def backward_inputs(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run B and return the gradient of the input; None from the first stage.

        `received` is the gradient of the output, [s, b, h]; None for the last stage.
        """

    def backward_weights(self, microbatch: int) -> None:
        """Run W: add this microbatch's weight gradients."""

    def backward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run a full backward (B and W) and return the input's gradient, as `backward_inputs`."""
