"""Replacements of Transformer Engine's compiled functions that return correct shapes and formats.

Based on the calls in its Python from version 2.13 to main. If the position of an argument differs
between versions, it is found by its properties, for example attention's tensors by their rank.
"""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron_vshape.rehearsal.device import Current
from megatron_vshape.rehearsal.ledger import tensors_in

_GATED = "glu geglu qgeglu reglu sreglu swiglu situglu".split()
_PLAIN = "gelu qgelu relu srelu silu".split()
_SOFTMAXES = "softmax masked_softmax upper_triang_masked_softmax aligned_causal_masked_softmax"
_IN_PLACE = """
    multi_tensor_scale multi_tensor_scale_tensor multi_tensor_adam multi_tensor_adam_capturable
    multi_tensor_adam_param_remainder multi_tensor_adam_fp8 multi_tensor_adam_capturable_master
    multi_tensor_sgd multi_tensor_compute_scale_and_scale_inv fused_multi_row_padding
    fused_multi_row_unpadding fused_topk_with_score_function_bwd fused_score_for_moe_aux_loss_bwd
    fused_amax_and_scale_update_after_reduction swizzle_scales_for_gemm_ compute_amax
    multi_tensor_swizzle_scales_for_gemm_unchecked_ thd_second_half_lse_correction
    thd_out_correction thd_grad_correction bulk_overlap_ag_with_external_gemm
    fp8_block_scaling_partial_cast fp8_block_scaling_compute_partial_amax
    mxfp8_scaling_partial_cast mxfp8_scaling_compute_partial_amax nvfp4_compute_global_scale
    nvfp4_multi_tensor_fused_scale nvfp4_multi_tensor_compute_partial_amax
    nvfp4_multi_tensor_2d_partial_cast nvfp4_2d_multi_tensor_transpose group_requantize_inplace
""".split()


def functions() -> dict[str, Callable[..., Any]]:
    """Return the replacements by function name."""
    replacements: dict[str, Callable[..., Any]] = {
        "generic_gemm": generic_gemm,
        "te_general_grouped_gemm": grouped_gemm,
        "layernorm_fwd": _layernorm_fwd,
        "rmsnorm_fwd": _rmsnorm_fwd,
        "layernorm_bwd": lambda dz, x, mu, rsigma, gamma, *_: (
            _like(x, dtype=dz.dtype),
            _like(gamma),
            _like(gamma),
        ),
        "rmsnorm_bwd": lambda dz, x, rsigma, gamma, *_: (_like(x, dtype=dz.dtype), _like(gamma)),
        "rmsnorm_bwd_add": lambda dz, x, add, rsigma, gamma, *_: (_like(x), _like(gamma)),
        "fused_attn_fwd": fused_attn_fwd,
        "fused_attn_bwd": fused_attn_bwd,
        "multi_tensor_l2norm": _l2norm,
        "multi_tensor_unscale_l2norm": _l2norm,
        "fused_rope_forward": lambda x, *_: torch.empty(x.shape, dtype=x.dtype),
        "fused_rope_backward": lambda x, *_: torch.empty(x.shape, dtype=x.dtype),
        "fused_topk_with_score_function_fwd": lambda logits, *_: (
            _like(logits),
            _like(logits, dtype=torch.bool),
            _like(logits, dtype=torch.float32),
        ),
        "fused_score_for_moe_aux_loss_fwd": lambda logits, *_, **__: (
            _like(logits, dtype=torch.float32),
            _like(logits, dtype=torch.bool),
            _like(logits, dtype=torch.float32),
        ),
        "fused_moe_aux_loss_fwd": lambda probs, *_, **__: (
            torch.empty((), dtype=probs.dtype, device="cuda"),
            _empty(1),
        ),
        "fused_moe_aux_loss_bwd": _aux_loss_bwd,
        # TE's mask has one bit per value.
        "dropout_fwd": lambda x, p, *_: (_like(x), torch.empty(x.numel() // 8, dtype=torch.uint8)),
        "dropout_bwd": lambda dy, *_: _like(dy),
        "thd_read_half_tensor": lambda x, *_: _like(x, x.shape[0] // 2, *x.shape[1:]),
        "thd_read_second_half_lse": lambda lse, *_: torch.empty(
            (*lse.shape[:-1], lse.shape[-1] // 2), dtype=lse.dtype
        ),
        "splits_to_offsets": lambda splits, *_: _empty(splits.shape[0] + 1, dtype=torch.int64),
        "swap_first_dims": lambda x, out=None: _like(x) if out is None else out,
    }
    replacements |= {name: _activation(gated=True) for name in _GATED}
    replacements |= {name: _activation(gated=False) for name in _PLAIN}
    replacements |= {"d" + name: _d_activation for name in (*_GATED, *_PLAIN)}
    replacements |= {"clamped_swiglu": _activation(gated=True), "clamped_dswiglu": _d_activation}
    for name in ("swiglu", "situglu", "clamped_swiglu"):  # since 2.20
        replacements["scaled_" + name] = lambda x, scales, *_: _like(
            x, *x.shape[:-1], x.shape[-1] // 2
        )
    replacements["scaled_srelu"] = lambda x, scales, *_: _like(x)
    for name in ("dswiglu", "dsituglu", "clamped_dswiglu", "dsrelu"):
        replacements["scaled_" + name] = lambda grad, x, scales, *_: (_like(x), _like(scales))
    replacements |= {"dbias_d" + name: _dbias for name in _PLAIN}
    for kind in _SOFTMAXES.split():
        replacements[f"scaled_{kind}_forward"] = lambda x, *_: _like(x)
        replacements[f"scaled_{kind}_backward"] = lambda grad, *_: grad
    replacements |= {name: lambda *_, **__: None for name in _IN_PLACE}
    replacements |= _quantizers()
    return {name: _kernel(name, function) for name, function in replacements.items()} | answers()


def answers() -> dict[str, Callable[..., Any]]:
    """Return functions that report how the library was built."""
    return {
        "get_num_cublas_streams": lambda: 4,
        "get_cudnn_version": lambda: 91800,
        "get_cublasLt_version": lambda: 130000,
        "get_stochastic_rounding": lambda *_: False,
        "nvfp4_2d": lambda *_: False,
        "ubuf_built_with_mpi": lambda: False,
        "device_supports_multicast": lambda *_: True,
        "get_stream_priority_range": lambda *_: (0, 0),
        "CommOverlapHelper": lambda *_: None,
        "CommOverlap": _Userbuffer,
        "CommOverlapP2P": _Userbuffer,
        "get_grouped_gemm_setup_workspace_size": lambda *_: 1 << 20,
    }


class _Userbuffer:
    """A buffer shared by GEMMs and communication, allocated by the driver instead of torch."""

    def __init__(
        self,
        shape: list[int],
        dtype: torch.dtype,
        helper: Any,
        ranks: int,
        *unused: Any,
        **options: Any,
    ) -> None:
        self._shape, self._dtype, self._ranks = tuple(shape), dtype, ranks

    def get_buffer(self, local_chunk: bool = False, shape: Any = None) -> Tensor:
        """Return a view of the buffer, or of this rank's part."""
        if shape is None:
            rows = self._shape[0] // (self._ranks if local_chunk else 1)
            shape = (rows, *self._shape[1:])
        outside = nullcontext() if Current.ledger is None else Current.ledger.outside()
        with outside:
            return torch.empty(tuple(shape), dtype=self._dtype, device="cuda")

    def copy_into_buffer(self, *unused: Any, **options: Any) -> None:
        """Do nothing."""

    def is_fp8_ubuf(self) -> bool:
        """Return whether the elements are bytes."""
        return self._dtype.itemsize == 1

    def is_atomic_gemm(self) -> bool:
        """Return False."""
        return False

    is_p2p_overlap = is_cublasmp = with_cublasmp = is_atomic_gemm

    def get_communication_stream(self) -> tuple[Any, Any]:
        """Return two streams."""
        return torch.cuda.Stream(), torch.cuda.Stream()

    def set_buffer_params(self, *unused: Any) -> None:
        """Do nothing."""


def _kernel(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function as one kernel on the GPU, and count it."""
    counts_itself = "gemm" in name or "attn" in name
    # multi_tensor functions get (chunk size, overflow flag, lists, ...).
    lists_at = 2 if "multi_tensor" in name else None

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        ledger = Current.ledger
        if ledger is None:
            return function(*args, **kwargs)
        with ledger.kernel(), ledger.on_host(False):
            out = function(*args, **kwargs)
        if not counts_itself:
            # Counted a second time, because these kernels both read and write their lists.
            lists = args[lists_at] if lists_at is not None and len(args) > lists_at else ()
            ledger.moved(args, (out,), lists if isinstance(lists, list | tuple) else ())
        return out

    return run


def _like(x: Any, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape or tuple(x.shape), dtype=dtype or x.dtype, device="cuda")


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


# ---- products ----


def generic_gemm(
    a: Any,
    transpose_a: bool,
    b: Any,
    transpose_b: bool,
    out: Any,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    *unused: Any,
    **options: Any,
) -> tuple[Any, ...]:
    """Return the product of column-major matrices, as in cuBLAS, and the bias gradient."""
    rows, inner, columns = _product_sizes(a, transpose_a, b, transpose_b)
    _count_gemm(a, rows, inner, columns)
    if out is None:
        # A transposed B is the weight gradient, [out, in]; other results keep B's leading
        # dimensions.
        shape = (rows,) if transpose_b else tuple(_shape(b)[:-1])
        out = _quantize(_empty(*shape, columns, dtype=_out_dtype(out_dtype, b)), quantizer)
    bias_grad = None
    if bias is not None and grad:
        bias_grad = _empty(_shape(b)[-1], dtype=getattr(out, "dtype", bias.dtype))
    before_gelu = _like(out) if gelu and not grad else None
    gathered = options.get("extra_output")
    return out, bias_grad, before_gelu, gathered


def grouped_gemm(
    a: list[Any],
    transpose_a: bool,
    b: list[Any],
    transpose_b: bool,
    out: Any,
    out_dtype: Any,
    splits: Any,
    bias: Any,
    *unused: Any,
) -> Any:
    """Count one GEMM per group; the caller has allocated the outputs."""
    sizes = Counter(
        _product_sizes(group_a, transpose_a, group_b, transpose_b)
        for group_a, group_b in zip(a, b, strict=False)
    )
    for (rows, inner, columns), number in sizes.items():
        _count_gemm(a[0], rows, inner, columns, number)
    return bias


def _shape(x: Any) -> tuple[int, ...]:
    shape: Any = x.size() if not isinstance(x, Tensor) and hasattr(x, "size") else x.shape
    return tuple(shape)


def _product_sizes(a: Any, transpose_a: bool, b: Any, transpose_b: bool) -> tuple[int, int, int]:
    # cuBLAS computes column-major A B, which is B A for torch's row-major tensors.
    left_shape, right_shape = _flat(_shape(b)), _flat(_shape(a))
    rows, inner = (left_shape[1], left_shape[0]) if transpose_b else left_shape
    return rows, inner, right_shape[0] if transpose_a else right_shape[1]


def _flat(shape: tuple[int, ...]) -> tuple[int, int]:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, shape[-1]


def _count_gemm(operand: Any, *sizes: int) -> None:
    if Current.ledger is not None:
        Current.ledger.count_gemm(_format_of(operand), *sizes)


def _out_dtype(dtype: Any, operand: Any) -> torch.dtype:
    out_dtype = _torch_dtype(dtype)
    if out_dtype is not None:
        return out_dtype
    operand_dtype: torch.dtype = operand.dtype if isinstance(operand, Tensor) else torch.bfloat16
    return operand_dtype


# ---- norms and activations ----


def _layernorm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Any, quantizer: Any, *unused: Any
) -> tuple[Any, Tensor, Tensor]:
    rows = _flat(tuple(x.shape))[0]
    normed = out if out is not None else _norm_out(x, quantizer, unused)
    return normed, _empty(rows), _empty(rows)


def _rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Any, quantizer: Any, *unused: Any
) -> tuple[Any, None, Tensor]:
    normed = out if out is not None else _norm_out(x, quantizer, unused)
    return normed, None, _empty(_flat(tuple(x.shape))[0])


def _norm_out(x: Tensor, quantizer: Any, args: tuple[Any, ...]) -> Any:
    out_dtype = _torch_dtype(args[0]) if args else None
    return _quantize(_like(x, dtype=out_dtype or x.dtype), quantizer)


def _activation(gated: bool) -> Callable[..., Any]:
    def run(x: Tensor, quantizer: Any = None, *unused: Any, **options: Any) -> Any:
        width = x.shape[-1] // 2 if gated else x.shape[-1]
        return _quantize(_like(x, *x.shape[:-1], width), quantizer)

    return run


def _d_activation(
    grad: Tensor, x: Tensor, quantizer: Any = None, *unused: Any, **options: Any
) -> Any:
    return _quantize(_like(x), quantizer)


def _dbias(grad: Tensor, x: Tensor, quantizer: Any = None, *unused: Any) -> tuple[Tensor, Any]:
    return _like(x, x.shape[-1]), _quantize(_like(x), quantizer)


def _l2norm(
    chunk: int, flag: Any, lists: list[list[Tensor]], *args: Any
) -> tuple[Tensor, Tensor | None]:
    per_tensor = bool(args) and args[-1] is True
    return _empty(1), _empty(len(lists[0])) if per_tensor else None


# ---- attention ----


def fused_attn_fwd(queries: int, keys: int, is_training: bool, *args: Any) -> list[Tensor]:
    """Return the output, the softmax statistics in fp32 and the RNG state.

    With `return_max_logit`, as for --qk-clip, statistics are two tensors: TE 2.9 to 2.13 returns
    maximum and sum, later versions the statistics and the maximum.
    """
    q, k, v = _attention_tensors(args)[:3]
    batch, heads = _batch_size(args, q), q.shape[-2]
    keys_per_query = _keys_seen(args, keys)
    # Two GEMMs: scores over the width of a query, output over that of a value.
    _count_attention(
        q, 2.0 * batch * heads * queries * keys_per_query * (q.shape[-1] + v.shape[-1])
    )
    dtype = q.dtype if q.dtype.is_floating_point else torch.bfloat16
    out = _empty(*q.shape[:-1], v.shape[-1], dtype=dtype)
    statistics = [_empty(batch, heads, queries, 1) for _ in range(1 + _returns_max_logit(args))]
    return [out, *statistics, _empty(2, dtype=torch.int64), *_offsets_of(args, heads)]


def _returns_max_logit(args: tuple[Any, ...]) -> bool:
    """Return the flag that follows the number of random values per thread, from TE 2.9 on."""
    integers = (position for position, argument in enumerate(args, 1) if type(argument) is int)
    next_position = max(integers, default=len(args))
    return any(args[next_position : next_position + 1])


def fused_attn_bwd(queries: int, keys: int, *args: Any) -> list[Any]:
    """Return three gradients, and count cuDNN's temporary workspace.

    As observed on an H200 with cuDNN 9.19: dq in fp32 and one sum per row. If heads share keys and
    values, also their gradients per head.
    """
    q, k, v = _attention_tensors(args)[:3]
    batch, heads = _batch_size(args, q), q.shape[-2]
    keys_per_query, offset = _keys_seen(args, keys), _offsets_of(args, heads)
    if Current.ledger is not None and q.element_size() == 2:
        each_head = heads // k.shape[-2] * (k.numel() + v.numel()) * k.element_size()
        shared = each_head if k.shape[-2] < heads else 0
        Current.ledger.add_temporary(4 * q.numel() + 4 * batch * heads * queries + shared)
    # Five GEMMs to the forward's two: the scores again, dV, dP, dQ and dK.
    _count_attention(
        q, 5.0 * batch * heads * queries * keys_per_query * (q.shape[-1] + v.shape[-1])
    )
    return [_like(q), _like(k), _like(v), None, _like(offset[0]) if offset else None]


def _keys_seen(args: tuple[Any, ...], keys: int) -> float:
    """Return the number of keys per query: half of them (causal), or those of its window."""
    for argument in args:
        # The window (left, right); a negative left is unlimited.
        if isinstance(argument, list | tuple) and len(argument) == 2 and type(argument[0]) is int:
            return min(keys / 2, argument[0] + 1) if argument[0] >= 0 else keys / 2
    return keys / 2


def _offsets_of(args: tuple[Any, ...], heads: int) -> list[Tensor]:
    """Return the learned softmax offset, if there is one."""
    return [tensor for tensor in tensors_in(args) if tuple(tensor.shape) == (1, heads, 1, 1)]


def _attention_tensors(args: tuple[Any, ...]) -> list[Any]:
    return [argument for argument in args if isinstance(argument, Tensor) and argument.dim() >= 3]


def _batch_size(args: tuple[Any, ...], q: Tensor) -> int:
    for argument in args:
        # Cumulative sequence lengths, one more than sequences; without them q is [s, b, h, d].
        if isinstance(argument, Tensor) and argument.dim() == 1 and argument.dtype == torch.int32:
            return int(argument.shape[0]) - 1
    return int(q.shape[1])


def _count_attention(operand: Any, flops: float) -> None:
    if Current.ledger is not None:
        Current.ledger.count_attention(flops, _format_of(operand))


# ---- experts ----


def _aux_loss_bwd(
    Const_buf: Tensor,
    tokens_per_expert: Tensor,
    num_rows: int,
    num_cols: int,
    grad_aux_loss: Tensor,
    **unused: Any,
) -> Tensor:
    return _empty(num_rows, num_cols, dtype=grad_aux_loss.dtype)


# ---- quantized tensors ----


_FORMATS = {
    "kFloat32": torch.float32,
    "kFloat16": torch.float16,
    "kBFloat16": torch.bfloat16,
    "kInt32": torch.int32,
    "kByte": torch.uint8,
}


def _quantizers() -> dict[str, Callable[..., Any]]:
    return {
        "quantize": _quantize,
        "dequantize": _dequantize,
        "create_empty_quantized_tensor": lambda quantizer, shape, dtype, device, pin: (
            _make_quantized(quantizer, shape, dtype)
        ),
        "split_quantize": _split_quantize,
        "bgrad_quantize": lambda grad, quantizer, *_: (
            torch.empty(grad.shape[-1], dtype=grad.dtype, device="cuda"),
            _quantize(grad, quantizer),
        ),
        "fp8_transpose": _fp8_transpose,
    }


def fix_random_signs() -> None:
    """Fix the signs of NVFP4's random transform, which TE reads from a tensor."""
    module: Any = importlib.import_module("transformer_engine.pytorch.tensor.nvfp4_tensor")
    module.get_sign_from_vector = lambda vector: 1


def _torch_dtype(dtype: Any) -> torch.dtype | None:
    """Return torch's dtype for a Transformer Engine format; None for 8- and 4-bit formats."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    name = getattr(dtype, "name", None)
    if name is None:
        import transformer_engine_torch as tex

        name = tex.DType(int(dtype)).name
    return _FORMATS.get(name)


def _format_of(operand: Any) -> str:
    """Name the compute format of a GEMM with this operand."""
    kind = type(operand).__name__
    if kind.startswith("NVFP4"):
        return "nvfp4"
    if kind.startswith("MXFP8"):
        return "mxfp8"
    if kind.startswith("Float8"):
        return "fp8"
    dtype = getattr(operand, "dtype", torch.bfloat16)
    return str(dtype).removeprefix("torch.")


def _quantize(x: Tensor, quantizer: Any, out: Any = None, noop: Any = None) -> Any:
    """Return the result of quantization: `out` if given, else a new tensor."""
    if quantizer is None:
        return x
    return _make_quantized(quantizer, x.shape, x.dtype) if out is None else out


def _split_quantize(
    x: Tensor, splits: Any, quantizers: Iterable[Any], *unused: Any, **options: Any
) -> list[Any]:
    """Return a quantized tensor for each part."""
    return [
        _quantize(part, quantizer)
        for part, quantizer in zip(x.split([int(n) for n in splits]), quantizers, strict=True)
    ]


def _dequantize(x: Any, dtype: Any) -> Tensor:
    """Return a tensor in full precision."""
    shape = x.shape if isinstance(x, Tensor) else x.size()
    return torch.empty(tuple(shape), dtype=_torch_dtype(dtype), device="cuda")


def _fp8_transpose(data: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    """Return the transposed bytes."""
    if out is not None and out.numel() == data.numel():
        return out
    rows = data.numel() // data.shape[-1]
    shape = (data.shape[-1], *data.shape[:-1]) if data.dim() > 1 else (rows,)
    return torch.empty(shape, dtype=torch.uint8, device="cuda")


def _make_quantized(quantizer: Any, shape: Iterable[int], dtype: torch.dtype) -> Any:
    """Create an empty tensor of the quantizer's type.

    The quantizer describes its parts, except with delayed scaling; its parts are defined here.
    """
    shape = tuple(shape)
    if dtype.itemsize < 2:
        dtype = torch.bfloat16
    if hasattr(quantizer, "scale") and hasattr(quantizer, "amax"):
        return _make_delayed_scaling(quantizer, shape, dtype)
    if not hasattr(quantizer, "inner_tensor_specs"):  # before 2.19: its own make_empty allocates
        return quantizer.make_empty(shape, dtype=dtype, device="cuda")
    parts = quantizer.alloc_tensors(shape, device="cuda")
    described = quantizer.create_metadata(shape, dtype=dtype)
    return described["cls"].__tensor_unflatten__(parts, described, shape, None)


def _make_delayed_scaling(quantizer: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    from transformer_engine.pytorch.tensor import float8_tensor as module

    non_tn = torch.cuda.get_device_capability()[0] >= 10
    parts: dict[str, Any] = {"data": None, "data_transpose": None}
    if quantizer.rowwise_usage or non_tn:
        parts["data"] = torch.empty(shape, dtype=torch.uint8, device="cuda")
    if quantizer.columnwise_usage and not non_tn:
        transposed_shape = (shape[-1], *shape[:-1])
        parts["data_transpose"] = torch.empty(transposed_shape, dtype=torch.uint8, device="cuda")
    parts["fp8_scale_inv"] = torch.empty(1, dtype=torch.float32, device="cuda")
    options = {"fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    if quantizer.internal:
        return module.Float8TensorStorage(**parts, **options, fake_dtype=dtype)
    return module.Float8Tensor(shape=shape, dtype=dtype, **parts, **options)
