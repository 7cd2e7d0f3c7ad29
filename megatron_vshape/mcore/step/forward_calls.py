"""The order of the trainer's calls in a step, for libraries that record choices of experts.

Their order of records is that of the calls of their forward step (router replay).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from megatron_vshape.mcore.step_state import StepState, unwrapped


@dataclass(slots=True)
class ForwardCalls:
    """The calls of the trainer's forward step in a step, in the order in which they return.

    Each is (microbatch, chunk), as in Megatron's schedule table.
    """

    order: Sequence[int] | None  # of microbatches; None: as they come
    ended: list[tuple[int, int]] = field(default_factory=list)

    def counting(
        self,
        function: Callable[..., Any],
        chunks: Sequence[nn.Module],
        state: StepState,
        has_loss: bool,
    ) -> Callable[..., Any]:
        """Wrap the trainer's function so that its calls are counted."""
        # Megatron's layer plans call the function with the model without its wrappers.
        chunk_of = {id(unwrapped(each)): chunk for chunk, each in enumerate(chunks)}
        numbers = Counter[int]()

        @functools.wraps(function)
        def call(iterator: Any, model: Any, *args: Any, **options: Any) -> Any:
            made = function(iterator, model, *args, **options)
            if has_loss or not state.has_logits:  # else a call for another rank's chunk
                chunk = chunk_of[id(unwrapped(model))]
                place = numbers[chunk]
                numbers[chunk] += 1
                self.ended.append((place if self.order is None else self.order[place], chunk))
            return made

        return call
