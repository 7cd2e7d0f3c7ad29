"""Tokens of a slice with access to the full microbatch, for layers that look beyond the slice.

Multi-token prediction reads the following tokens at every position (`roll_tensor`). At the end of a
slice, these are the tokens of the next slice. It also divides its losses by the number of loss
tokens in the microbatch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_vshape.mcore.hook import Function, Hook, Session, replaces
from megatron_vshape.mcore.step_state import TokenRange


class TokensOfSlice(Tensor):
    """Tokens, labels or mask of a slice, [b, s], with a reference to the microbatch's, [b, s].

    A clone keeps the reference, and `sum` is over the microbatch. All other operations return a
    plain tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    whole: Tensor
    part: TokenRange

    @staticmethod
    def cut(whole: Tensor, part: TokenRange) -> TokensOfSlice:
        """Return the part of the slice `part`."""
        own = whole[..., part.begin : part.end].contiguous().as_subclass(TokensOfSlice)
        own.whole, own.part = whole, part
        return own

    def clone(self, *_: Any, **__: Any) -> TokensOfSlice:
        """Return a copy that references a copy of the full tensor."""
        return TokensOfSlice.cut(self.whole.clone(), self.part)

    def sum(self, *args: Any, **options: Any) -> Tensor:
        """Return the sum over the microbatch."""
        return self.whole.sum(*args, **options)


@replaces
def roll_tensor(
    session: Session, original: Function, tensor: Any, *args: Any, **options: Any
) -> Any:
    """Roll the tokens of the full microbatch, so that a slice sees the tokens behind its end.

    The second result of Megatron's function counts the tokens of the microbatch.
    """
    if not isinstance(tensor, TokensOfSlice):
        return original(tensor, *args, **options)
    rolled, *counted = original(tensor.whole, *args, **options)
    # Multi-token prediction rolls once per depth, so the result must reference the microbatch
    # again.
    return TokensOfSlice.cut(rolled, tensor.part), *counted


HOOKS = (
    Hook(
        "megatron.core.transformer.multi_token_prediction",
        "roll_tensor",
        ("tensor", "shifts", "dims"),
        "tokens behind the end of a slice are those of the next",
        roll_tensor,
        chosen=True,
    ),
)
