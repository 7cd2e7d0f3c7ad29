"""What the program runner asks of a stage of the model, whatever trains it."""

from typing import Protocol

from torch import Tensor


class Stage(Protocol):
    """One stage of the model on this rank.

    The runner calls the passes in the program's order; what a pass must keep for a later one of
    the same microbatch, the stage keeps itself, and drops as soon as that has run. A schedule with
    passes of other kinds calls the methods that their rows name, with the microbatch alone; before
    one that all devices join, `join` with the pass, which returns when what that reads is there.
    What runs beside the processor runs in another thread; where the program has it, the runner
    calls `prepare` with the pass, if the stage has that. A stage may have a method
    `forward_beside(microbatch, received, other, work, gradient)`, which runs F beside `work`, a B
    or BW of the stage `other` that receives `gradient`, and returns both results; else the two of a
    joint pass run one after the other.
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
