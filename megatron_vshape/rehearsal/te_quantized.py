"""Quantized tensors of Transformer Engine, created from its description of their parts."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

_FORMATS = {
    "kFloat32": torch.float32,
    "kFloat16": torch.float16,
    "kBFloat16": torch.bfloat16,
    "kInt32": torch.int32,
    "kByte": torch.uint8,
}


def functions() -> dict[str, Callable[..., Any]]:
    """Return the replacements by name."""
    return {
        "quantize": quantize,
        "dequantize": dequantize,
        "create_empty_quantized_tensor": lambda quantizer, shape, dtype, device, pin: make(
            quantizer, shape, dtype
        ),
        "split_quantize": split_quantize,
        "bgrad_quantize": lambda grad, quantizer, *_: (
            torch.empty(grad.shape[-1], dtype=grad.dtype, device="cuda"),
            quantize(grad, quantizer),
        ),
        "fp8_transpose": fp8_transpose,
    }


def settle() -> None:
    """Fix values that are read from tensors: signs of a random transform."""
    with suppress(ImportError):  # before 2.8 there is no such format
        module: Any = importlib.import_module("transformer_engine.pytorch.tensor.nvfp4_tensor")
        module.get_sign_from_vector = lambda vector: 1


def torch_dtype(given: Any) -> torch.dtype | None:
    """Return torch's dtype for a Transformer Engine format; None for 8- and 4-bit formats."""
    if given is None or isinstance(given, torch.dtype):
        return given
    name = getattr(given, "name", None)
    if name is None:
        import transformer_engine_torch as tex

        name = tex.DType(int(given)).name
    return _FORMATS.get(name)


def format_of(operand: Any) -> str:
    """Return the compute format of a GEMM with this operand."""
    kind = type(operand).__name__
    if kind.startswith("NVFP4"):
        return "nvfp4"
    if kind.startswith("MXFP8"):
        return "mxfp8"
    if kind.startswith("Float8"):
        return "fp8"
    dtype = getattr(operand, "dtype", torch.bfloat16)
    return str(dtype).removeprefix("torch.")


def quantize(x: Tensor, quantizer: Any, out: Any = None, noop: Any = None) -> Any:
    """Return the result of quantization: `out` if given, else a new tensor."""
    if quantizer is None:
        return x
    return make(quantizer, x.shape, x.dtype) if out is None else out


def split_quantize(
    x: Tensor, splits: Any, quantizers: Iterable[Any], *unused: Any, **options: Any
) -> list[Any]:
    """Return a quantized tensor for each part."""
    return [
        quantize(part, quantizer)
        for part, quantizer in zip(x.split([int(n) for n in splits]), quantizers, strict=True)
    ]


def dequantize(x: Any, dtype: Any) -> Tensor:
    """Return a tensor in full precision."""
    shape = x.shape if isinstance(x, Tensor) else x.size()
    return torch.empty(tuple(shape), dtype=torch_dtype(dtype), device="cuda")


def fp8_transpose(data: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    """Return the transposed bytes."""
    if out is not None and out.numel() == data.numel():
        return out
    rows = data.numel() // data.shape[-1]
    shape = (data.shape[-1], *data.shape[:-1]) if data.dim() > 1 else (rows,)
    return torch.empty(shape, dtype=torch.uint8, device="cuda")


def make(quantizer: Any, shape: Iterable[int], dtype: torch.dtype) -> Any:
    """Return an empty tensor of the quantizer's type.

    The quantizer describes its parts, except with delayed scaling; its parts are defined here.
    """
    shape = tuple(shape)
    if dtype.itemsize < 2:
        dtype = torch.bfloat16
    if hasattr(quantizer, "scale") and hasattr(quantizer, "amax"):
        return _delayed(quantizer, shape, dtype)
    if not hasattr(quantizer, "inner_tensor_specs"):  # before 2.19: its own make_empty allocates
        return quantizer.make_empty(shape, dtype=dtype, device="cuda")
    parts = quantizer.alloc_tensors(shape, device="cuda")
    described = quantizer.create_metadata(shape, dtype=dtype)
    return described["cls"].__tensor_unflatten__(parts, described, shape, None)


def _delayed(quantizer: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    from transformer_engine.pytorch.tensor import float8_tensor as module

    non_tn = torch.cuda.get_device_capability()[0] >= 10
    parts: dict[str, Any] = {"data": None, "data_transpose": None}
    if quantizer.rowwise_usage or non_tn:
        parts["data"] = torch.empty(shape, dtype=torch.uint8, device="cuda")
    if quantizer.columnwise_usage and not non_tn:
        turned = (shape[-1], *shape[:-1])
        parts["data_transpose"] = torch.empty(turned, dtype=torch.uint8, device="cuda")
    parts["fp8_scale_inv"] = torch.empty(1, dtype=torch.float32, device="cuda")
    options = {"fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    if quantizer.internal:
        return module.Float8TensorStorage(**parts, **options, fake_dtype=dtype)
    return module.Float8Tensor(shape=shape, dtype=dtype, **parts, **options)
