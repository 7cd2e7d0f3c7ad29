"""A slice's tokens that know those of their microbatch, for layers that look further than it.

Multi-token prediction looks up, at every place, the tokens behind it (`roll_tensor`): at the end of
a slice they are the next one's. It divides its losses by how many tokens of the microbatch count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_vshape.mcore.step_state import Slice


class TokensOfSlice(Tensor):
    """Tokens, labels or a mask, [b, s] of a slice, of a whole that is [b, s] of the microbatch.

    A copy knows its whole too, and the sum is the whole's; anything else that is made of them is a
    plain tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    whole: Tensor
    part: Slice

    @staticmethod
    def cut(whole: Tensor, part: Slice) -> TokensOfSlice:
        """Return a slice's part."""
        own = whole[..., part.begin : part.end].contiguous().as_subclass(TokensOfSlice)
        own.whole, own.part = whole, part
        return own

    def clone(self, *_: Any, **__: Any) -> TokensOfSlice:
        """Return a copy."""
        return TokensOfSlice.cut(self.whole.clone(), self.part)

    def sum(self, *args: Any, **options: Any) -> Tensor:
        """Return the sum over the microbatch."""
        return self.whole.sum(*args, **options)
