"""Megatron's local linears under tensor and sequence parallelism, split, on two gloo ranks."""

import functools
import importlib
import inspect
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mcore.farm import Farm
from mcore.ranks import run_ranks
from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig
from torch import nn

from megatron_vshape.mcore.split import linear_layers
from megatron_vshape.mcore.split.linear_layers import make_split_linear, mark_gathered
from megatron_vshape.mcore.step_state import StepState
from megatron_vshape.runtime import weight_jobs

SIZE, TOKENS = 4, 6  # of the full sequence


def record_calls(module: Any, product: str) -> list[str]:
    """Record later gathers and calls of the module's `product` on this rank, and return the list.

    A gather completes when it starts, so overwriting its result at once is detected.
    """
    calls: list[str] = []
    gather, compute = dist.all_gather_into_tensor, getattr(module, product)

    def noted_gather(*args: Any, async_op: bool = False, **options: Any) -> Any:
        calls.append("gather")
        work = gather(*args, async_op=True, **options)
        work.wait()
        return work if async_op else None

    def noted_product(*args: Any, **options: Any) -> Any:
        calls.append("product")
        return compute(*args, **options)

    dist.all_gather_into_tensor = noted_gather
    setattr(module, product, noted_product)
    return calls


def record_all_reduces(calls: list[str]) -> None:
    """Record the all-reduces that this rank starts in its backwards, and their waits."""

    def noted(start: Any) -> Any:
        def started(*args: Any, async_op: bool = False, **options: Any) -> Any:
            calls.append("sum")
            work = start(*args, async_op=True, **options)
            return SimpleNamespace(wait=lambda: (calls.append("wait"), work.wait()))

        return started

    dist.all_reduce = noted(dist.all_reduce)
    layers.dist_reduce_scatter_func = noted(layers.dist_reduce_scatter_func)


def trailing_arguments(function: Any, **changed: Any) -> tuple[Any, ...]:
    """Return the arguments after input and weight of Function in this Megatron version."""
    arguments = {
        "bias": None,
        "gradient_accumulation_fusion": False,
        "allreduce_dgrad": False,
        "sequence_parallel": False,
        "grad_output_buffer": None,
        "wgrad_deferral_limit": 0,
        "tp_group": None,
        "gtp_remat_size": 1,  # from 0.19 on
        "output_dtype": None,  # from 0.20 on
    } | changed
    names = list(inspect.signature(function.forward).parameters)
    return tuple(arguments[name] for name in names[names.index("weight") + 1 :])


def two_layers(
    rank: int, sequence_parallel: bool, split: bool, overlaps_jobs: bool = False
) -> tuple[list[list[float]], int, list[str]]:
    """Return gradients, retained elements and recorded calls of two column-parallel layers.

    Both gather into the same global buffer in F, so a job that retained the buffer would read the
    other layer's input. With `beside`, the second B runs the jobs of the first.
    """
    parallel_state._set_global_memory_buffer()
    upstream = layers.LinearWithGradAccumulationAndAsyncCommunication
    state = StepState(has_own_schedule=True)
    retained: list[torch.Tensor] = []
    state.tracker = SimpleNamespace(add=retained.append)  # type: ignore[assignment]
    function: Any = make_split_linear(state, layers, upstream)
    generator = torch.Generator().manual_seed(rank)
    weights = [nn.Parameter(torch.randn(SIZE, SIZE, generator=generator)) for _ in range(2)]
    rows = TOKENS // 2 if sequence_parallel else TOKENS
    results, outputs, inputs = [], [], []
    for microbatch in range(2):
        shared = torch.Generator().manual_seed(10 + microbatch + rank * sequence_parallel)
        x = torch.randn(rows, 1, SIZE, generator=shared).requires_grad_()
        options = trailing_arguments(
            upstream,
            allreduce_dgrad=not sequence_parallel,
            sequence_parallel=sequence_parallel,
            tp_group=dist.group.WORLD,
        )
        first = function.apply(x, weights[0], *options)
        part = first.chunk(2)[rank] if sequence_parallel else first
        outputs.append(function.apply(part.contiguous(), weights[1], *options))
        inputs.append(x)
    calls = record_calls(linear_layers, "accumulate_weight_grad")
    record_all_reduces(calls)
    for microbatch, output in enumerate(outputs):
        if split:
            with state.jobs.collect(microbatch, 0 if overlaps_jobs and microbatch else None):
                output.square().sum().backward()
        else:
            output.square().sum().backward()
    for microbatch in (1, 0) if split else ():
        state.jobs.run(microbatch)
    results = [tensor.grad.flatten().tolist() for tensor in (*weights, *inputs)]
    return results, sum(tensor.numel() for tensor in retained), calls


@functools.cache
def run_two_layers(farm: Farm, *args: bool) -> Any:
    """Run `two_layers` on two ranks, which import Megatron separately."""
    return run_ranks(farm, 2, two_layers, *args)


@pytest.mark.parametrize("sequence_parallel", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_split_gradients_equal_megatron(farm: Farm, sequence_parallel: bool) -> None:
    full_results = run_two_layers(farm, sequence_parallel, False)
    split_results = run_two_layers(farm, sequence_parallel, True)
    for (full_gradients, full_retained, _), (split_gradients, retained_elements, calls) in zip(
        full_results, split_results, strict=True
    ):
        assert full_retained == 0
        for expected, gradient in zip(full_gradients, split_gradients, strict=True):
            assert gradient == pytest.approx(expected, rel=1e-5, abs=1e-5)
        # Jobs retain local inputs and full output gradients, but not the gathered buffer.
        input_rows = TOKENS // 2 if sequence_parallel else TOKENS
        assert retained_elements == 2 * 2 * SIZE * (input_rows + TOKENS)
        # The second gather of a W overlaps with the first product and must not overwrite its input.
        gathers = ["gather", "gather"] if sequence_parallel else []
        backwards = ["sum", "wait"] * 4
        assert calls == [*backwards, *[*gathers, "product", "product"] * 2]


@pytest.mark.parametrize("sequence_parallel", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_all_reduce_overlaps_with_deferred_wgrad(farm: Farm, sequence_parallel: bool) -> None:
    separate_results = run_two_layers(farm, sequence_parallel, True)
    overlapped_results = run_two_layers(farm, sequence_parallel, True, True)
    for (expected, _, _), (gradients, _, calls) in zip(
        separate_results, overlapped_results, strict=True
    ):
        assert gradients == expected  # bitwise
        gather = ["gather"] if sequence_parallel else []
        first = ["sum", "wait", "sum", "wait"]
        # The gather of the second job must not overwrite the input of the first job's product.
        second = [*gather, "sum", "product", *gather, "wait", "sum", "product", "wait"]
        assert calls == [*first, *second, *gather * 2, "product", "product"]


def row_parallel_layer(rank: int, split: bool) -> tuple[list[list[float]], list[int]]:
    """Return the gradients and the retained elements of a layer with a scattered output."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    state = StepState(has_own_schedule=True)
    retained: list[torch.Tensor] = []
    state.tracker = SimpleNamespace(add=retained.append)  # type: ignore[assignment]
    name = "LinearWithGradAccumulationAndAsyncCommunication"
    setattr(layers, name, make_split_linear(state, layers, getattr(layers, name)))
    config = TransformerConfig(
        num_layers=1,
        hidden_size=SIZE,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    layer = layers.RowParallelLinear(
        2 * SIZE,
        3,
        config=config,
        init_method=nn.init.ones_,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=False,
        tp_group=dist.group.WORLD,
    )
    mark_gathered(layer)
    x = torch.randn(TOKENS, 1, SIZE, generator=torch.Generator().manual_seed(rank))
    x.requires_grad_()
    loss = layer(x)[0].square().sum()
    if split:
        with state.jobs.collect(0):
            loss.backward()
        state.jobs.run(0)
    else:
        loss.backward()
    return [layer.weight.grad.flatten().tolist(), x.grad.flatten().tolist()], [
        tensor.numel() for tensor in retained
    ]


def test_scattered_output_retains_only_the_local_part(farm: Farm) -> None:
    full_results = run_ranks(farm, 2, row_parallel_layer, False)
    split_results = run_ranks(farm, 2, row_parallel_layer, True)
    for (full_gradients, _), (split_gradients, retained_elements) in zip(
        full_results, split_results, strict=True
    ):
        for expected, gradient in zip(full_gradients, split_gradients, strict=True):
            assert gradient == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert retained_elements == [
            TOKENS * SIZE,
            TOKENS // 2 * 3,
        ]  # local input and gradient


def product_with_dtype(input: Any, weight: Any, bias: None, output_dtype: Any) -> Any:
    """Return a product with an output dtype, like Transformer Engine's."""
    return input.matmul(weight.t()).to(output_dtype)


class WiderOutput(torch.autograd.Function):
    """Megatron's Function from 0.20 on, for a layer without parallelism."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(
        ctx: Any,
        input: Any,
        weight: Any,
        bias: None,
        gradient_accumulation_fusion: bool,
        output_dtype: Any,
    ) -> Any:
        ctx.save_for_backward(input, weight)
        ctx.use_bias = ctx.allreduce_dgrad = ctx.sequence_parallel = False
        ctx.gradient_accumulation_fusion, ctx.tp_group = gradient_accumulation_fusion, None
        ctx.input_dtype = input.dtype
        return product_with_dtype(input, weight, bias, output_dtype)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad_output: Any) -> Any:
        input, weight = ctx.saved_tensors
        grad_output = grad_output.to(ctx.input_dtype)
        return grad_output.matmul(weight), grad_output.t().matmul(input), None, None, None


@pytest.mark.parametrize("is_megatrons", [False, True])
def test_output_with_another_dtype(is_megatrons: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    state = StepState(has_own_schedule=True)
    upstream: Any = WiderOutput
    if is_megatrons:
        upstream = layers.LinearWithGradAccumulationAndAsyncCommunication
        if not hasattr(layers, "_linear_forward"):
            pytest.skip("Megatron's outputs have the dtype of its inputs before 0.20")
        monkeypatch.setattr(layers, "_linear_forward", product_with_dtype)
    function: Any = make_split_linear(state, layers, upstream)
    options = trailing_arguments(upstream, output_dtype=torch.float32)
    results = []
    for split in (False, True):
        generator = torch.Generator().manual_seed(0)
        input = torch.randn(6, SIZE, generator=generator).bfloat16().requires_grad_()
        weight = nn.Parameter(torch.randn(3, SIZE, generator=generator).bfloat16())
        output = function.apply(input, weight, *options)
        assert output.dtype == torch.float32
        with state.jobs.collect(0) if split else nullcontext():
            output.square().sum().backward()
        if split:
            assert weight.grad is None
            state.jobs.run(0)
        results.append((input.grad, weight.grad))
    for full_gradient, split_gradient in zip(*results, strict=True):
        assert torch.equal(full_gradient, split_gradient)


def gradients_under_autocast(rank: int, dtype: torch.dtype, split: bool) -> list[list[float]]:
    """Return the gradients of an fp32 layer whose forward ran under CPU autocast."""
    megatron_function = layers.LinearWithGradAccumulationAndAsyncCommunication
    layers.custom_bwd = functools.partial(torch.amp.custom_bwd, device_type="cpu")

    class Upstream(megatron_function):  # type: ignore[misc, valid-type]
        forward = staticmethod(
            torch.amp.custom_fwd(inspect.unwrap(megatron_function.forward), device_type="cpu")
        )
        backward = staticmethod(layers.custom_bwd(inspect.unwrap(megatron_function.backward)))

    state = StepState(has_own_schedule=True)
    function: Any = make_split_linear(state, layers, Upstream)
    weight = nn.Parameter(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1)))
    x = torch.randn(TOKENS, 1, SIZE, generator=torch.Generator().manual_seed(2)).to(dtype)
    bias = nn.Parameter(torch.ones(SIZE))
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = function.apply(x, weight, *trailing_arguments(Upstream, bias=bias))
    with state.jobs.collect(0) if split else nullcontext():
        output.square().sum().backward()
    if split:
        state.jobs.run(0)
    return [tensor.grad.flatten().tolist() for tensor in (x, weight, bias)]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
def test_wgrad_uses_autocast_of_the_forward(farm: Farm, dtype: torch.dtype) -> None:
    full_gradients, split_gradients = (
        run_ranks(farm, 1, gradients_under_autocast, dtype, is_split) for is_split in (False, True)
    )
    assert split_gradients == full_gradients


def record_kernels(rank: int) -> tuple[list[str], list[list[float]]]:
    """Return the kernels that full and split backwards call with apex on a GPU."""
    called: list[str] = []

    def accumulate(input: torch.Tensor, grad_output: torch.Tensor, total: torch.Tensor) -> None:
        called.append("apex")
        total.add_(grad_output.t().float().matmul(input.float()))

    apex: Any = ModuleType("fused_weight_gradient_mlp_cuda")
    apex.wgrad_gemm_accum_fp32 = apex.wgrad_gemm_accum_fp16 = accumulate
    sys.modules[apex.__name__] = apex
    importlib.reload(layers)  # it looks for apex when it is imported
    assert layers._grad_accum_fusion_available
    weight_jobs._addmm_has_out_dtype = lambda: True  # as from torch 2.10 on
    kernel_of = linear_layers.fused_kernel
    linear_layers.fused_kernel = lambda device, *dtypes: kernel_of("cuda", *dtypes)
    add_wide = weight_jobs.WeightGradKernel.ADDMM_WIDE
    weight_jobs._KERNELS[add_wide] = lambda *unused: called.append("torch")
    state = StepState(has_own_schedule=True)
    upstream = layers.LinearWithGradAccumulationAndAsyncCommunication
    function: Any = make_split_linear(state, layers, upstream)
    sums = []
    for split in (False, True):
        weight: Any = nn.Parameter(torch.ones(SIZE, SIZE, dtype=torch.bfloat16))
        weight.main_grad = torch.zeros(SIZE, SIZE)
        x = torch.ones(TOKENS, 1, SIZE, dtype=torch.bfloat16).requires_grad_()
        output = function.apply(
            x, weight, *trailing_arguments(upstream, gradient_accumulation_fusion=True)
        )
        with state.jobs.collect(0) if split else nullcontext():
            output.sum().backward()
        if split:
            state.jobs.run(0)
        sums.append(weight.main_grad.flatten().tolist())
    return called, sums


def test_split_and_full_backward_use_the_same_kernels(farm: Farm) -> None:
    ((called, (full_kernels, split_kernels)),) = run_ranks(farm, 1, record_kernels)
    assert called == ["apex", "apex"]
    assert split_kernels == full_kernels


WHOLE = {
    (True, True): (False, True, TOKENS * SIZE * SIZE),
    (False, True): (True, True, TOKENS * SIZE * SIZE),
    (True, False): (True, False, 0.0),  # DDP adds the gradient
}
"""By (runs in a pass, is fused): the expected result of `full_backward_in_a_pass`."""


def full_backward_in_a_pass(rank: int) -> dict[tuple[bool, bool], tuple[bool, bool, float]]:
    """Return whether full backwards leave a gradient, DDP's mark, and the main_grad sum."""

    def accumulate(input: torch.Tensor, grad_output: torch.Tensor, total: torch.Tensor) -> None:
        total.add_(grad_output.t().matmul(input))

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    upstream = layers.LinearWithGradAccumulationAndAsyncCommunication
    results = {}
    for runs, fused in WHOLE:
        state = StepState(has_own_schedule=True, running_chunk=0 if runs else None)
        weight: Any = nn.Parameter(torch.ones(SIZE, SIZE))
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(SIZE, SIZE), False
        arguments = {
            "gradient_accumulation_fusion": fused,
            "tp_group": dist.group.WORLD,
        }
        x = torch.ones(TOKENS, 1, SIZE, requires_grad=True)
        function: Any = make_split_linear(state, layers, upstream)
        function.apply(x, weight, *trailing_arguments(upstream, **arguments)).sum().backward()
        flags = weight.grad is not None, weight.grad_added_to_main_grad
        results[runs, fused] = (*flags, weight.main_grad.sum().item())
    return results


def test_full_backward_in_a_pass_leaves_no_dummy_gradient(farm: Farm) -> None:
    """Transformer Engine would cache a dummy of the output layer's size; main_grad is equal."""
    assert run_ranks(farm, 1, full_backward_in_a_pass) == [WHOLE]
