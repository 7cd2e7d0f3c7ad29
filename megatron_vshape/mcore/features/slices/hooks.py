"""The hook of slices: multi-token prediction reads tokens behind the end of a slice."""

from __future__ import annotations

from typing import Any

from megatron_vshape.mcore.features.slices.tokens import TokensOfSlice
from megatron_vshape.mcore.hook import Function, Hook, Session, replaces


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
