"""Transformer Engine's Python without a GPU, and tests of the adapter with its layers.

A few torch functions replace its compiled extension: GEMMs, a norm, gelu. The code that calls them,
saves tensors and returns gradients is TE's. `start` is a plugin of a farm with Transformer Engine,
for one rank or for two that share a sequence; it prints one JSON line per case.
"""

import functools
import importlib
import inspect
import itertools
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

import megatron_vshape

ROOT = Path(__file__).parents[2]

CALLS: list[str] = []
"""The GEMMs so far, and the all-gathers if `note_gathers` has been called."""


def generic_gemm(
    a: Tensor,
    transpose_a: bool,
    b: Tensor,
    transpose_b: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    workspace: Any,
    workspace_bytes: int,
    accumulate: bool,
    *unused: Any,
    **options: Any,
) -> tuple[Any, ...]:
    """Return the product of column-major matrices, as cuBLAS has it, and the bias gradient."""
    CALLS.append("product")
    left, right = b.reshape(-1, b.shape[-1]), a.reshape(-1, a.shape[-1])
    left = left.t() if transpose_b else left
    right = right.t() if transpose_a else right
    product, bias_grad = left.matmul(right), None
    if bias is not None and grad:
        dtype = None if out is None else out.dtype  # as cuBLAS has it
        bias_grad = b.reshape(-1, b.shape[-1]).sum(dim=0, dtype=dtype)
    elif bias is not None:
        product = product + bias
    if not transpose_b:
        product = product.reshape(*b.shape[:-1], product.shape[-1])
    if out is not None:
        product = out.add_(product) if accumulate else out.copy_(product.view(out.shape))
    return product, bias_grad, None, None


def grouped_gemm(
    a: list[Tensor],
    transpose_a: bool,
    b: list[Tensor],
    transpose_b: bool,
    out: list[Tensor],
    out_dtype: Any,
    splits: Any,
    bias: list[Tensor],
    bias_dtype: Any,
    single_output: bool,
    gelu_in: Any,
    grad: bool,
    workspace: Any,
    workspace_bytes: int,
    accumulate: bool,
    *unused: Any,
) -> list[Tensor]:
    """Run one product per group."""
    outputs = list(out[0].split([int(size) for size in splits])) if single_output else out
    for group, output in enumerate(outputs):
        added = bias[group] if bias[group].numel() else None
        _, bias_grad, *_ = generic_gemm(
            *(a[group], transpose_a, b[group], transpose_b, output, None, None, added, None),
            *(False, None, grad, None, 0, accumulate),
        )
        if grad and added is not None:
            bias[group].copy_(bias_grad)
    return bias


def layernorm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, *unused: Any
) -> tuple[Tensor, Tensor, Tensor]:
    mean, variance = x.mean(-1), x.var(-1, unbiased=False)
    return (
        nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps),
        mean,
        (variance + eps).rsqrt(),
    )


def layernorm_bwd(
    grad: Tensor, x: Tensor, mean: Tensor, rsigma: Tensor, weight: Tensor, *unused: Any
) -> tuple[Tensor, Tensor, Tensor]:
    normal = (x - mean[:, None]) * rsigma[:, None]
    scaled = grad * weight
    inner = scaled - scaled.mean(-1, keepdim=True)
    dx = (inner - normal * (scaled * normal).mean(-1, keepdim=True)) * rsigma[:, None]
    return dx, (grad * normal).sum(0), grad.sum(0)


def rmsnorm_fwd(x: Tensor, weight: Tensor, eps: float, *unused: Any) -> tuple[Tensor, None, Tensor]:
    normed = nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    return normed, None, (x.float().square().mean(-1) + eps).rsqrt()


def rmsnorm_bwd(
    grad: Tensor, x: Tensor, rsigma: Tensor, weight: Tensor, *unused: Any
) -> tuple[Tensor, Tensor]:
    normal = x.float() * rsigma[:, None]
    scaled = grad.float() * weight.float()
    inner = scaled - normal * (scaled * normal).mean(-1, keepdim=True)
    dx = inner * rsigma[:, None]
    return dx.to(x.dtype), (grad.float() * normal).sum(0).to(weight.dtype)


def gelu(x: Tensor, quantizer: Any = None, *unused: Any) -> Tensor:
    return nn.functional.gelu(x, approximate="tanh")


def dgelu(grad: Tensor, x: Tensor, quantizer: Any = None, *unused: Any) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(gelu(leaf), leaf, grad)[0]


def swiglu(x: Tensor, quantizer: Any = None, *unused: Any) -> Tensor:
    gate, linear = x.chunk(2, -1)
    return nn.functional.silu(gate) * linear


def dswiglu(grad: Tensor, x: Tensor, quantizer: Any = None, *unused: Any) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(swiglu(leaf), leaf, grad)[0]


def scaled_swiglu(x: Tensor, scales: Tensor, quantizer: Any, interleaved: int) -> Tensor:
    assert not interleaved
    return swiglu(x) * scales.reshape(-1, 1)


def scaled_dswiglu(
    grad: Tensor, x: Tensor, scales: Tensor, quantizer: Any, interleaved: int, wants_scales: bool
) -> tuple[Tensor, Tensor | None]:
    scaled = dswiglu(grad * scales.reshape(-1, 1), x)
    of_scales = (grad * swiglu(x)).sum(-1).reshape(scales.shape) if wants_scales else None
    return scaled, of_scales


def grouped_dbias(
    dy: Tensor,
    offsets: Tensor,
    dbias: Tensor,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    dscales: Tensor | None = None,
) -> None:
    """Emulate a Triton kernel: add every group's sum of rows to its bias gradient."""
    bounds = offsets.tolist()
    for group, (begin, end) in enumerate(itertools.pairwise(bounds)):
        rows = dy[begin:end]
        dbias[group] += (rows if scales is None else rows * scales[begin:end, None]).sum(0)
        if bias is not None and dscales is not None:
            dscales[begin:end] += (rows * bias[group]).sum(-1)


def accumulate(x: Tensor, dy: Tensor, main_grad: Tensor) -> None:
    """Emulate Apex's kernel for Megatron's local linear layers, such as the output layer."""
    x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    main_grad.add_(dy.t().matmul(x))


def multi_tensor_l2norm(
    chunk: int, overflowed: Tensor, lists: list[list[Tensor]], per_tensor: bool, *unused: Any
) -> tuple[Tensor, None]:
    return torch.stack([tensor.float().norm() for tensor in lists[0]]).norm()[None], None


def multi_tensor_scale(
    chunk: int, overflowed: Tensor, lists: list[list[Tensor]], scale: float | Tensor
) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_adam(
    chunk: int,
    overflowed: Tensor | None,
    lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    corrects_bias: int,
    weight_decay: float,
) -> None:
    """Run a step of AdamW."""
    assert decoupled
    assert corrects_bias
    for grad, parameter, mean, square in zip(*lists, strict=True):
        grad = grad.float()
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (square / (1 - beta2**step)).sqrt() + eps
        update = mean / (1 - beta1**step) / root + weight_decay * parameter
        parameter.sub_(lr * update)


FUNCTIONS = (
    generic_gemm,
    layernorm_fwd,
    layernorm_bwd,
    rmsnorm_fwd,
    rmsnorm_bwd,
    gelu,
    dgelu,
    swiglu,
    dswiglu,
    scaled_swiglu,
    scaled_dswiglu,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_adam,
)


def _available_to_te(is_available: Callable[[], bool]) -> Callable[[], bool]:
    def answer() -> bool:
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        # torch's optimizers call it too, and would query a driver.
        return caller.partition(".")[0] in ("transformer_engine", "megatron") or is_available()

    return answer


def import_te(directory: str) -> Any:
    """Import Transformer Engine from `directory` and return its PyTorch package.

    The directory contains an unpacked `transformer_engine` wheel of pure Python.
    """
    for kernels in ("FLASH_ATTN", "MASKED_SOFTMAX_FUSION"):
        os.environ[f"NVTE_{kernels}"] = "0"
    sys.path[:0] = [directory, str(ROOT)]
    from megatron_vshape.mcore import cpu
    from megatron_vshape.rehearsal import te_extension

    cpu.install()
    torch.cuda.is_available = _available_to_te(torch.cuda.is_available)
    torch.Tensor.is_cuda = property(lambda tensor: True)
    torch.cuda.get_device_capability = lambda *unused: (9, 0)
    functions: dict[str, Any] = {function.__name__: function for function in FUNCTIONS}
    functions |= {
        "te_general_grouped_gemm": grouped_gemm,
        "multi_tensor_scale_tensor": multi_tensor_scale,
        "get_num_cublas_streams": lambda: 1,
        "get_cudnn_version": lambda: 91800,
        "get_stochastic_rounding": lambda *unused: False,
        "nvfp4_2d": lambda *unused: False,
    }
    apex: Any = types.ModuleType("fused_weight_gradient_mlp_cuda")
    apex.wgrad_gemm_accum_fp32 = apex.wgrad_gemm_accum_fp16 = accumulate
    sys.modules[apex.__name__] = apex
    te = te_extension.load(Path(directory), functions)
    kernels = "transformer_engine.pytorch.triton.grouped_dbias_dscales"
    if kernels in sys.modules:
        sys.modules[kernels]._launch_grouped_dbias = grouped_dbias
    return te


SIZE, HIDDEN, TOKENS = 8, 16, 6
SPLITS = [2, 0, 4]
WHOLE = "F0 F1 BW0 F2 BW1 BW2"
ORDERS = (
    WHOLE,
    "F0 F1 B0 F2 B1 W0 B2 W1 W2",
    "F0 F1 F2 B0 B1 B2 W2 W0 W1",
    "F0 F1 B0 BW1 F2 W0 B2 W2",
    "F0 F1 F2 BW2 BW1 BW0",  # slices
    "F0 F1 F2 B2 BW1 W2 BW0",
)
FULL_ORDERS = tuple(order for order in ORDERS if "W" not in order.replace("BW", ""))


def layers(te: Any) -> Iterator[tuple[str, Callable[..., nn.Module]]]:
    """Yield builders of each of TE's layers."""
    options = {"device": "cpu", "params_dtype": torch.float32}
    yield "Linear", functools.partial(te.Linear, SIZE, SIZE, **options)
    parts = {"query": SIZE // 2, "key": SIZE // 2}
    yield "two parts", functools.partial(te.Linear, SIZE, SIZE, parameters_split=parts, **options)
    yield "LayerNormLinear", functools.partial(te.LayerNormLinear, SIZE, SIZE, **options)
    yield "LayerNormMLP", functools.partial(te.LayerNormMLP, SIZE, HIDDEN, **options)
    grouped = functools.partial(te.GroupedLinear, len(SPLITS), SIZE, **options)
    yield "GroupedLinear", functools.partial(grouped, SIZE)
    operation = getattr(te.ops, "GroupedLinear", None)
    if operation is not None and "delay_wgrad_compute" in inspect.signature(operation).parameters:
        yield "fused experts", functools.partial(fused_experts, grouped)


def fused_experts(grouped: Callable[..., nn.Module], **options: Any) -> nn.Module:
    """Return experts as Megatron computes them with fused operations, which it makes itself."""
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    class Experts(nn.Module):
        _make_fused_ops = TEGroupedMLP._make_fused_ops
        _make_fused_impl_pre_forward_hook = TEGroupedMLP._make_fused_impl_pre_forward_hook
        _ensure_main_grad_for_fused_impl = TEGroupedMLP._ensure_main_grad_for_fused_impl
        _ensure_main_grad = staticmethod(TEGroupedMLP._ensure_main_grad)

        def __init__(self) -> None:
            super().__init__()
            self.linear_fc1, self.linear_fc2 = (
                grouped(2 * SIZE, **options),
                grouped(SIZE, **options),
            )
            for layer in (self.linear_fc1, self.linear_fc2):
                layer.delay_wgrad_compute = False  # as Megatron's local layers set it
            self.config = types.SimpleNamespace(
                activation_func=nn.functional.silu,
                gated_linear_unit=True,
                moe_mlp_glu_interleave_size=None,
            )
            self._operations: tuple[nn.Module, ...] = ()

        def forward(self, x: Tensor, splits: list[int], **unused: Any) -> Tensor:
            if not self._operations:
                self._operations = (self._make_fused_ops(),)
            counts, scales = torch.tensor(splits, dtype=torch.int), torch.ones(x.shape[0])
            fc2_inputs = (counts, scales) if self.linear_fc2.use_bias else (counts,)
            return self._operations[0](x, counts, scales, *fc2_inputs)

    return Experts()


class FakeDdp:
    """Adds .grad to main_grad in hooks, like Megatron's DDP."""

    def __init__(self, layer: nn.Module) -> None:
        self._keep = []
        for parameter in layer.parameters():
            parameter.main_grad = torch.zeros(parameter.shape)  # type: ignore[attr-defined]
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(functools.partial(self._hook, parameter))
            self._keep.append(node)

    def _hook(self, parameter: Any, *unused: Any) -> None:
        if parameter.grad is not None and not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None


def products(layer: nn.Module) -> int:
    """Return how many products a W of the layer has."""
    return 2 if hasattr(layer, "linear_fc1") or hasattr(layer, "fc1_weight") else 1


def run(layer: nn.Module, order: str, state: Any, first: bool) -> list[Tensor]:
    """Run the passes; return the gradients of the inputs and the parameters."""
    keep = FakeDdp(layer)
    inputs, outputs = {}, {}
    for text in order.split():
        kind, microbatch = text[:-1], text[-1]
        if kind == "F":
            generator = torch.Generator().manual_seed(int(microbatch))
            x = torch.randn(TOKENS, SIZE, generator=generator).requires_grad_()
            is_first = (microbatch == "0") if first else None
            split_arguments = (
                [SPLITS] if hasattr(layer, "num_gemms") or hasattr(layer, "linear_fc1") else []
            )
            y = layer(x, *split_arguments, is_first_microbatch=is_first)
            if isinstance(y, tuple):
                bias = y[1]
                if isinstance(bias, list):
                    parts = zip(y[0].split(SPLITS), bias, strict=True)
                    y = torch.cat([part + bias for part, bias in parts])
                else:
                    y = y[0] + bias
            inputs[microbatch], outputs[microbatch] = x, y
        elif kind == "B":
            with state.jobs.collect(microbatch):
                outputs.pop(microbatch).square().sum().backward()
            assert len(state.jobs._buckets[microbatch]) == products(layer)
        elif kind == "W":
            state.jobs.run(microbatch)
        else:
            outputs.pop(microbatch).square().sum().backward()
    del keep
    sums = [getattr(parameter, "main_grad", parameter.grad) for parameter in layer.parameters()]
    return [*(x.grad for x in inputs.values()), *sums]


def check(
    build: Callable[..., nn.Module], bias: str, fused: bool, first: bool, splits: bool = True
) -> list[str]:
    """Return the differences from full backwards, by pass order; all are full without `splits`."""
    from megatron_vshape.mcore.split import te_layers
    from megatron_vshape.mcore.step_state import StepState

    expected, wrong = None, []
    for order in (None, *(ORDERS if splits else FULL_ORDERS)):
        torch.manual_seed(0)
        layer = build(
            bias=bool(bias), return_bias=bias == "returned", fuse_wgrad_accumulation=fused
        )
        with torch.no_grad():
            for parameter in layer.parameters():
                generator = torch.Generator().manual_seed(parameter.numel())
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        state = StepState(has_own_schedule=True)
        stores = (2 if hasattr(layer, "linear_fc1") else 1) * splits
        graphed = frozenset() if splits else {*layer.modules()}
        if order is not None and te_layers.use_job_stores(state, [layer], graphed) != stores:
            return ["the adapter was not installed"]
        results = run(layer, order or WHOLE, state, first)
        if expected is None:
            expected = results
        for result, expected_result in zip(results, expected, strict=True):
            if not torch.allclose(result, expected_result, rtol=1e-5, atol=1e-4):
                wrong.append(f"{order}: {(result - expected_result).abs().max().item():.3g}")
    return wrong


def note_gathers() -> None:
    gather = dist.all_gather_into_tensor

    def noted(*args: Any, **options: Any) -> Any:
        CALLS.append("gather")
        return gather(*args, **options)

    dist.all_gather_into_tensor = noted


def sequence(te: Any, rank: int) -> None:
    """Print the all-gathers by pass and the differences, for a layer of two GEMMs on two ranks."""
    from megatron_vshape.mcore.split import te_layers
    from megatron_vshape.mcore.step_state import StepState

    dist.init_process_group("gloo")
    note_gathers()
    options = {"tp_group": dist.group.WORLD, "sequence_parallel": True, "bias": False}
    options |= {"device": "cpu", "params_dtype": torch.float32, "tp_size": 2}
    cases = []
    for name, first in (("LayerNormLinear", te.LayerNormLinear), ("Linear", te.Linear)):
        for is_full in (True, False):
            torch.manual_seed(1 + rank)
            fc1 = first(SIZE, HIDDEN, parallel_mode="column", **options)
            fc2 = te.Linear(HIDDEN, SIZE, parallel_mode="row", **options)
            state, gathers = StepState(has_own_schedule=True), {}
            te_layers.use_job_stores(state, [fc1, fc2])
            x = torch.randn(TOKENS, 1, SIZE).requires_grad_()
            for kind in ("F", "BW") if is_full else ("F", "B", "W"):
                CALLS.clear()
                if kind == "F":
                    y = fc2(torch.nn.functional.gelu(fc1(x))).square().sum()
                elif kind == "W":
                    state.jobs.run(0)
                else:
                    with state.jobs.collect(0) if kind == "B" else nullcontext():
                        y.backward()
                gathers[kind] = CALLS.count("gather")
            sums = [
                x.grad,
                *(parameter.grad for parameter in (*fc1.parameters(), *fc2.parameters())),
            ]
            cases.append((gathers, sums))
            weight_calls = CALLS.copy()
        (plain, expected), (split, sums) = cases[-2:]
        pairs = enumerate(zip(sums, expected, strict=True))
        differs = [number for number, pair in pairs if not torch.equal(*pair)]
        result = {"case": name, "gathers": plain | split, "wrong": differs, "W": weight_calls}
        print(json.dumps(result), flush=True)


def start(rank: int, shares_sequence: bool) -> NoReturn:
    """Run every case and end the process."""
    megatron_vshape.unregister()
    te: Any = importlib.import_module("transformer_engine.pytorch")
    if shares_sequence:
        sequence(te, rank)
    else:
        run_cases(te)
    sys.stdout.flush()
    os._exit(0)


def run_cases(te: Any) -> None:
    """Print the result of every case, and the version."""
    cases = [*itertools.product(("", "bias", "returned"), (False, True), (False, True))]
    for name, build in layers(te):
        for settings in (*cases, ("", True, True, False)):
            if name == "two parts" and settings[1]:
                continue  # not in TE: such a weight has no main_grad
            try:
                wrong = check(build, *settings)
            except Exception as error:
                wrong = [f"{type(error).__name__}: {error}"]
            print(json.dumps({"case": [name, *settings], "wrong": wrong}))
    print(json.dumps({"version": version("transformer_engine")}))
