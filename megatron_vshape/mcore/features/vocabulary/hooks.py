"""The hook of vocabulary parallelism: the number of ranks that share the rows of the logits."""

from __future__ import annotations

import functools
import sys
from typing import Any

from megatron_vshape.mcore.hook import Function, Hook, Session


def tensor_parallel_world_size(session: Session, original: Function) -> Function:
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
        tensor_parallel_world_size,
        everywhere=True,
    ),
)
