"""Kernels that accumulate a weight gradient: the choice of the kernel, and equal results."""

import logging
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from megatron_vshape.runtime import weight_jobs
from megatron_vshape.runtime.weight_jobs import (
    WeightGradKernel,
    accumulate_weight_grad,
    fused_kernel,
)

FLOAT, BFLOAT = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _forget() -> None:
    for cached in (fused_kernel, weight_jobs._apex, weight_jobs._te_gemm):
        cached.cache_clear()


def general_gemm(
    x: Tensor,
    dy: Tensor,
    out_dtype: torch.dtype,
    layout: str,
    out: Tensor,
    accumulate: bool,
    grad: bool,
) -> None:
    """Replace Transformer Engine's kernel for these arguments, and check the arguments."""
    assert (layout, accumulate, grad, out_dtype) == ("NT", True, True, out.dtype)
    out.add_(dy.t().to(out.dtype).matmul(x.to(out.dtype)))


def wgrad_gemm_accum_fp32(x: Tensor, dy: Tensor, out: Tensor) -> None:
    out.add_(dy.t().float().matmul(x.float()))


def with_module(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., None]) -> None:
    module = ModuleType(name)
    setattr(module, function.__name__, function)
    for parent in ("transformer_engine", "transformer_engine.pytorch"):
        if name.startswith(parent):
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, module)


TE = "transformer_engine.pytorch.cpp_extensions"
APEX = "fused_weight_gradient_mlp_cuda"


def test_kernels_are_chosen_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen_kernel() -> WeightGradKernel:
        fused_kernel.cache_clear()
        return fused_kernel("cuda", FLOAT, BFLOAT)

    assert chosen_kernel() is WeightGradKernel.ADDMM_WIDE
    monkeypatch.setattr(weight_jobs, "_addmm_has_out_dtype", lambda: False)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert chosen_kernel() is WeightGradKernel.MATMUL_ADD
    with_module(monkeypatch, TE, general_gemm)
    weight_jobs._te_gemm.cache_clear()
    assert chosen_kernel() is WeightGradKernel.TE_GEMM


@pytest.mark.parametrize("total", [FLOAT, BFLOAT])
def test_apex_is_used_wherever_megatron_uses_it(
    monkeypatch: pytest.MonkeyPatch, total: torch.dtype
) -> None:
    """A full backward is Megatron's, which supports no other kernel."""
    with_module(monkeypatch, APEX, wgrad_gemm_accum_fp32)
    weight_jobs._apex.cache_clear()
    for has_out_dtype in (False, True):
        fused_kernel.cache_clear()
        monkeypatch.setattr(
            weight_jobs, "_addmm_has_out_dtype", lambda has_dtype=has_out_dtype: has_dtype
        )
        assert fused_kernel("cuda", total, BFLOAT) is WeightGradKernel.APEX


@pytest.mark.parametrize(("version", "has"), [("2.9.1+cu130", False), ("2.10.0", True)])
def test_addmm_accumulates_in_wider_dtypes_since_torch_2_10(
    monkeypatch: pytest.MonkeyPatch, version: str, has: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    assert weight_jobs._addmm_has_out_dtype.__wrapped__() is has


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            fused_kernel("cpu", FLOAT, BFLOAT)
    assert [record.getMessage() for record in caplog.records] == [
        "weight gradients of torch.bfloat16 activations are added to torch.float32 sums by "
        "matmul_add"
    ]


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT])
def test_all_kernels_give_equal_gradients(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_module(monkeypatch, TE, general_gemm)
    with_module(monkeypatch, APEX, wgrad_gemm_accum_fp32)
    generator = torch.Generator().manual_seed(0)
    dy = torch.randn(6, 2, 3, generator=generator).to(dtype)
    x = torch.randn(6, 2, 5, generator=generator).to(dtype)
    kernels = set(WeightGradKernel) - {WeightGradKernel.ADDMM_WIDE}  # only a GPU has it
    if dtype is not FLOAT:
        kernels -= {WeightGradKernel.ADDMM}  # for equal dtypes
    expected = 1 + dy.flatten(0, 1).float().t().matmul(x.flatten(0, 1).float())
    for kernel in kernels:
        weight = torch.nn.Parameter(torch.zeros(3, 5, dtype=dtype))
        weight.main_grad = torch.ones(3, 5)  # type: ignore[attr-defined]
        accumulate_weight_grad(weight, dy, x, kernel)
        tolerance = 1e-6 if dtype is FLOAT or kernel is not WeightGradKernel.MATMUL_ADD else 1e-2
        torch.testing.assert_close(
            weight.main_grad, expected, rtol=tolerance, atol=tolerance, msg=str(kernel)
        )


def test_error_names_a_missing_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    weight = torch.nn.Parameter(torch.zeros(3, 5))
    weight.main_grad = torch.ones(3, 5)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="'te_gemm' needs Transformer Engine"):
        accumulate_weight_grad(weight, torch.ones(2, 3), torch.ones(2, 5), WeightGradKernel.TE_GEMM)
