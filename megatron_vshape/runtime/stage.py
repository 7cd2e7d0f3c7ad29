"""What the program runner asks of a stage of the model, and of what else a program runs."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from megatron_vshape.core.model.passes import Pass


class Handler(NamedTuple):
    """Runs the passes of a kind that a model's stages know nothing of.

    What runs beside the processor runs in another thread; `prepare` is called where the program
    has the pass. Before a pass that all devices join `join` returns when what it reads is there.
    """

    run: Callable[[Pass], None]
    join: Callable[[Pass], None] | None = None
    prepare: Callable[[Pass], None] | None = None


class Stage(Protocol):
    """One stage of the model on this rank.

    The runner calls the passes in the program's order; what a pass must keep for a later one of
    the same microbatch, the stage keeps itself, and drops as soon as that has run. A pass of
    another kind that has no `Handler` calls the method that its row names, with the microbatch
    alone. A stage may have a method `forward_beside(microbatch, received, other, work, gradient)`,
    which runs F beside `work`, a B or BW of the stage `other` that receives `gradient`, and returns
    both results; else the two of a joint pass run one after the other.
    """

    def forward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run F and return the output, detached; None from the last stage, which keeps its loss.

        `received` is the input, [s, b, h]; None for the first stage, which reads the data.
        """

    def backward_inputs(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run B and return the gradient of the input; None from the first stage.

        `received` is the gradient of the output, [s, b, h]; None for the last stage.
        """

    def backward_weights(self, microbatch: int) -> None:
        """Run W: add this microbatch's weight gradients."""

    def backward(self, microbatch: int, received: Tensor | None) -> Tensor | None:
        """Run B and W at once and return the gradient of the input, as `backward_inputs` does."""
