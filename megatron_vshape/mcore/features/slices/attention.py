"""Attention of a sequence slice to its own and all earlier keys and values of the microbatch.

The slices of a microbatch share one buffer of keys and one of values per layer. The F of a slice
writes its own part and attends to everything up to there. B runs from the last slice to the first;
gradients for earlier slices accumulate in a second buffer until the B of those slices. So no
gradient crosses a pass, and the schedule does not see the buffers. The B of the first slice frees
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from megatron_vshape.mcore.hook import Replaced
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.step_state import StepState, TokenRange, unwrapped

FUSED = "TEDotProductAttention"
"""Class name of TE's attention, which supports masks aligned at the bottom right."""


class KeysValues:
    """Keys and values, [s, b, heads, size] each, of one layer and microbatch, and their gradients.

    Gradients accumulate in at least 32 bits, as in one kernel.
    """

    def __init__(self, slice_tensors: Sequence[Tensor], length: int) -> None:
        self.full_tensors = [
            tensor.new_empty(length, *tensor.shape[1:]) for tensor in slice_tensors
        ]
        self.gradients: list[Tensor] = []  # sums of all slices but the last; set in the first B

    @property
    def sizes_bytes(self) -> tuple[int, int]:
        """Return the bytes of keys and values, and of their gradients over all slices."""
        buffer_bytes = sum(buffer.nbytes for buffer in self.full_tensors)
        return buffer_bytes, sum(
            buffer.numel() * _wide_dtype(buffer).itemsize for buffer in self.full_tensors
        )

    def put(self, part: TokenRange, slice_tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Write the keys and values of a slice; return all up to the end of the slice.

        Writes go through `.data` and are invisible to autograd, since they do not change the ranges
        that earlier slices have saved.
        """
        for buffer, slice_tensor in zip(self.full_tensors, slice_tensors, strict=True):
            buffer.data[part.begin : part.end] = slice_tensor
        return tuple(buffer.data[: part.end] for buffer in self.full_tensors)

    def add(self, part: TokenRange, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Add the gradients up to the end of a slice; return the complete gradients of the slice.

        The sums of all slices but the last are in one buffer, to which each B adds in place.
        """
        if not self.gradients:  # B of the last slice, which runs first
            slice_gradients = [gradient[part.begin :] for gradient in gradients]
            earlier_gradients = [gradient[: part.begin] for gradient in gradients]
            self.gradients = [
                gradient.to(_wide_dtype(gradient), copy=True) for gradient in earlier_gradients
            ]
        else:
            for total, gradient in zip(self.gradients, gradients, strict=True):
                total[: part.end].add_(gradient)
            slice_gradients = [total[part.begin : part.end] for total in self.gradients]
        pairs = zip(slice_gradients, gradients, strict=True)
        return tuple(
            slice_gradient.to(gradient.dtype, copy=True) for slice_gradient, gradient in pairs
        )


def _wide_dtype(like: Tensor) -> torch.dtype:
    """Return the dtype, at least 32 bits, for gradient accumulation."""
    return torch.promote_types(like.dtype, torch.float32)


class _KeysUpToEnd(torch.autograd.Function):
    """Map the keys and values of a slice to all keys and values up to its end."""

    @staticmethod
    def forward(
        ctx: Any, state: StepState, buffers: dict[int, KeysValues], *slice_tensors: Tensor
    ) -> tuple[Tensor, ...]:
        part = state.running_tokens
        ctx.state, ctx.buffers = state, buffers
        if part.microbatch not in buffers:
            buffers[part.microbatch] = KeysValues(slice_tensors, part.total)
            # All microbatches have buffers of the same size.
            if state.tracker is not None and part.microbatch == 0:
                state.tracker.shares(state.running_chunk or 0, buffers[0].sizes_bytes)
        return buffers[part.microbatch].put(part, slice_tensors)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Any, ...]:
        state: StepState = ctx.state  # type: ignore[attr-defined]
        buffers: dict[int, KeysValues] = ctx.buffers  # type: ignore[attr-defined]
        part = state.running_tokens
        buffer = buffers[part.microbatch]
        slice_gradients = buffer.add(part, gradients)
        if state.tracker is not None:
            for gradient in buffer.gradients:
                state.tracker.add(gradient)
        if part.begin == 0:
            del buffers[part.microbatch]
        return None, None, *slice_gradients


def attend_to_earlier_slices(state: StepState, chunks: Sequence[nn.Module]) -> None:
    """Make attention use earlier slices, and rotary tables start at the offset of the slice.

    Modules and their names stay unchanged. Calls outside a slice run as before.

    Raises:
        UnsupportedError: Slices do not support the attention of a layer.
    """
    for chunk in chunks:
        for module in unwrapped(chunk).modules():
            if isinstance(module, RotaryEmbedding):
                _offset_rotary(state, module)
            core = getattr(module, "core_attention", None)
            if core is not None:
                _check_attention(module, core)
                buffers: dict[int, KeysValues] = {}
                state.drop_values.append(buffers.clear)
                state.shared_by_passes.append(partial(_tensors_of, buffers))
                core.forward = _slice_attention(state, core, buffers)
            elif type(module).__name__ in ("MambaMixer", "GatedDeltaNet"):
                raise UnsupportedError(
                    f"--pipeline-slices does not work with {type(module).__name__} layers: "
                    "their state is not passed from slice to slice. Remove --pipeline-slices"
                )


def _tensors_of(buffers: dict[int, KeysValues]) -> list[Tensor]:
    return [tensor for buffer in buffers.values() for tensor in buffer.full_tensors]


def _check_attention(attention: nn.Module, core: nn.Module) -> None:
    """Raise UnsupportedError unless the attention of a layer is plain causal attention."""
    is_supported = (
        getattr(core, "takes_slices", False)
        or isinstance(core, DotProductAttention)
        or FUSED in (base.__name__ for base in type(core).__mro__)
    )
    is_plain_causal = type(attention) in (SelfAttention, MLASelfAttention) and is_supported
    mask = getattr(attention, "attn_mask_type", None)
    if not is_plain_causal or mask not in (AttnMaskType.causal, AttnMaskType.causal_bottom_right):
        raise UnsupportedError(
            f"--pipeline-slices does not work with {type(attention).__name__} by "
            f"{type(core).__name__} with the mask {getattr(mask, 'name', mask)}: it requires "
            f"causal SelfAttention or MLASelfAttention by DotProductAttention or {FUSED}. Remove "
            "--pipeline-slices"
        )


def _slice_attention(
    state: StepState, core: Any, buffers: dict[int, KeysValues]
) -> Callable[..., Any]:
    """Return the replacement of a core attention's forward."""
    inner, is_local = core.forward, isinstance(core, DotProductAttention)

    def forward(
        query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Any:
        part = state.tokens
        if part is None:
            return inner(query, key, value, attention_mask, **options)
        keys, values = _KeysUpToEnd.apply(state, buffers, key, value)
        if part.begin == 0:
            return inner(query, keys, values, attention_mask, **options)
        # A later slice has more keys than queries, so the causal mask must be aligned at the bottom
        # right.
        if not is_local:
            options["attn_mask_type"] = AttnMaskType.causal_bottom_right
            return inner(query, keys, values, None, **options)
        mask = attention_mask
        if mask is None:  # [1, 1, q, k], true for keys that queries of the slice must not see
            shape = part.end - part.begin, part.end
            ones = torch.ones(shape, dtype=torch.bool, device=query.device)
            mask = ones.triu(1 + part.begin)[None, None]
        with Replaced() as replaced:  # the fused softmax kernel supports square masks only
            replaced.put(core.scale_mask_softmax, "scaled_masked_softmax_fusion", False)
            return inner(query, keys, values, mask, **options)

    return forward


def _offset_rotary(state: StepState, rotary: Any) -> None:
    """Make a rotary embedding return the rows of the slice from the table of the full sequence."""
    get_length, make_table = rotary.get_rotary_seq_len, rotary.forward

    def get_rotary_seq_len(*args: Any, **options: Any) -> Any:
        return get_length(*args, **options) if state.tokens is None else state.tokens.total

    def forward(*args: Any, **options: Any) -> Any:
        table, part = make_table(*args, **options), state.tokens
        if part is None:
            return table
        if isinstance(table, tuple):  # the table and the scale of attention
            return table[0][part.begin : part.end], *table[1:]
        return table[part.begin : part.end]

    def rows(make_tables: Callable[..., Any], *args: Any, **options: Any) -> Any:
        tables, part = make_tables(*args, **options), state.tokens
        return tables if part is None else tuple(table[part.begin : part.end] for table in tables)

    rotary.get_rotary_seq_len, rotary.forward = get_rotary_seq_len, forward
    if hasattr(rotary, "get_cached_cos_sin"):  # read by the fused kernel of latent attention
        rotary.get_cached_cos_sin = partial(rows, rotary.get_cached_cos_sin)
