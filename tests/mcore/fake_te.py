"""Linear layers that provide their weight gradients exactly as Transformer Engine's do.

The layers compute with torch. The interface between backward and the store is TE's, in its order
and with its names: closures over `wgrad_gemm_kwargs`, a `functools.partial` for grouped layers,
main_grad as the GEMM's output, None or a dummy as the gradient.
"""

import functools
import queue
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class WeightGradStore:
    """TE's store, which the adapter reads."""

    def __init__(self, delay_wgrad_compute: bool = False) -> None:
        self.context = queue.Queue() if delay_wgrad_compute else None
        self.enabled = delay_wgrad_compute

    def delay_wgrad_compute(self) -> bool:
        return self.enabled

    def put(self, tensor_list: list[Any], func: Callable[..., Any]) -> None:
        self.context.put([tensor_list, func])

    def pop(self) -> Any:
        tensor_list, func = self.context.get()
        return func(*tensor_list), tensor_list


def general_gemm(
    x: Tensor,
    dy: Tensor,
    out_dtype: torch.dtype,
    accumulate: bool,
    out: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor | None, None]:
    """Return dy^T x, in `out` where that is given, and the bias gradient, in the same dtype."""
    product = dy.t().matmul(x).to(out_dtype)
    if out is not None:
        product = out.add_(product) if accumulate else out.copy_(product)
    return product, None if bias is None else dy.sum(dim=0, dtype=product.dtype), None


def general_grouped_gemm(
    xs: Sequence[Tensor],
    dys: Sequence[Tensor],
    outs: Sequence[Tensor],
    accumulate: bool,
    use_bias: bool,
) -> tuple[Sequence[Tensor], list[Tensor | None], None]:
    """Put every group's dy^T x into `outs`."""
    for x, dy, out in zip(xs, dys, outs, strict=True):
        general_gemm(x, dy, out.dtype, accumulate, out, None)
    dtype = outs[0].dtype
    return outs, [dy.sum(dim=0, dtype=dtype) if use_bias else None for dy in dys], None


def _returned_gradient(layer: "TeLayer", weight: nn.Parameter, grad: Tensor | None) -> Any:
    """Return the result of TE's backward for a weight, for Megatron's DDP."""
    if not layer.fuse_wgrad_accumulation:
        return grad
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)


class TeLayer(nn.Module):
    """The common part of TE's layers."""

    def __init__(
        self, bias: bool, fused: bool, return_bias: bool, dtype: torch.dtype, group: Any
    ) -> None:
        super().__init__()
        self.wgrad_store: Any = WeightGradStore()
        self.fuse_wgrad_accumulation = fused
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias
        self.is_first_microbatch = True
        self.dtype = dtype
        self.tp_group = group
        self.tp_size = 1 if group is None else group.size()
        self.sequence_parallel = self.tp_size > 1

    def add(self, name: str, *shape: int) -> None:
        generator = torch.Generator().manual_seed(len(name) + sum(shape))
        value = torch.randn(*shape, generator=generator).to(self.dtype)
        self.register_parameter(name, nn.Parameter(value))

    def now_first(self) -> bool:
        """Return the arguments of Megatron's subclass for TE's forward."""
        first, self.is_first_microbatch = self.is_first_microbatch, False
        return first


class Linear(TeLayer):
    """te.Linear; `parallel_mode` "column" or "row" with sequence parallelism over `group`.

    In B it gathers into the `userbuffer`, where there is one, as with `--tp-comm-overlap`.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = True,
        fused: bool = False,
        return_bias: bool = False,
        dtype: torch.dtype = torch.float32,
        parallel_mode: str | None = None,
        group: Any = None,
        parts: int = 1,
        userbuffer: Tensor | None = None,
    ) -> None:
        super().__init__(bias, fused, return_bias, dtype, group)
        self.parallel_mode = parallel_mode
        self.userbuffer = userbuffer
        self.weight_names = [f"weight_{part}" for part in range(parts)]
        self.bias_names = [f"bias_{part}" for part in range(parts)]
        for weight, bias_name in zip(self.weight_names, self.bias_names, strict=True):
            self.add(weight, outputs // parts, inputs)
            if bias:
                self.add(bias_name, outputs // parts)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        weights = [getattr(self, name) for name in self.weight_names]
        biases = [getattr(self, name) for name in self.bias_names] if self.use_bias else []
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        bias = None
        if biases:
            bias = biases[0] if len(biases) == 1 else torch.cat(biases)
        used = bias if self.apply_bias else None
        store = self.wgrad_store if self.wgrad_store.delay_wgrad_compute() else None
        y = _Linear.apply(weight, x, used, self, store, is_first_microbatch, weights[0])
        return (y, bias) if self.return_bias else y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, x, bias, layer, store, is_first, parameter):
        ctx.save_for_backward(x, weight, bias)
        ctx.layer, ctx.store, ctx.is_first, ctx.parameter = layer, store, is_first, parameter
        gathers = layer.sequence_parallel and layer.parallel_mode == "column"
        total = _gather(x, layer.tp_group) if gathers else x
        y = nn.functional.linear(total, weight, bias)
        scatters = layer.sequence_parallel and layer.parallel_mode == "row"
        return _reduce_scatter(y, layer.tp_group) if scatters else y

    @staticmethod
    def backward(ctx, grad_output):
        x, weight, bias = ctx.saved_tensors
        layer, fused = ctx.layer, ctx.layer.fuse_wgrad_accumulation
        column = layer.sequence_parallel and layer.parallel_mode == "column"
        row = layer.sequence_parallel and layer.parallel_mode == "row"
        inputmat_total = _gather(x, layer.tp_group, layer.userbuffer) if column else x
        inputmat_total = inputmat_total.reshape(-1, x.shape[-1])
        if row:
            grad_output = _gather(grad_output, layer.tp_group, layer.userbuffer)
        grad_output = grad_output.reshape(-1, grad_output.shape[-1])
        dgrad = grad_output.matmul(weight)
        if column:
            dgrad = _reduce_scatter(dgrad, layer.tp_group)
        main_grad = getattr(ctx.parameter, "main_grad", None)
        wgrad_gemm_kwargs = {
            "out_dtype": main_grad.dtype if fused else weight.dtype,
            "accumulate": fused and not ctx.is_first,
            "out": main_grad if fused else None,
            "bias": bias,
        }

        def wgrad_gemm(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor | None]:
            dw, db, *_ = general_gemm(x, dy, **wgrad_gemm_kwargs)
            return dw, db

        wgrad = grad_bias = None
        if ctx.store is not None and ctx.store.delay_wgrad_compute():
            ctx.store.put([inputmat_total, grad_output], wgrad_gemm)
        else:
            wgrad, grad_bias = wgrad_gemm(inputmat_total, grad_output)
        wgrad = _returned_gradient(layer, ctx.parameter, wgrad)
        return wgrad, dgrad.view(x.shape), grad_bias, None, None, None, None


class LayerNormMLP(TeLayer):
    """te.LayerNormMLP without its norm: fc1, gelu, fc2 in one Function and one store."""

    def __init__(
        self,
        size: int,
        hidden: int,
        bias: bool = True,
        fused: bool = False,
        return_bias: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(bias, fused, return_bias, dtype, None)
        self.add("fc1_weight", hidden, size)
        self.add("fc2_weight", size, hidden)
        for name, length in (("fc1_bias", hidden), ("fc2_bias", size)):
            if bias:
                self.add(name, length)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        fc2_bias = self.fc2_bias if self.apply_bias else None
        fc1_bias = self.fc1_bias if self.use_bias else None
        weights = self.fc1_weight, fc1_bias, self.fc2_weight, fc2_bias
        y = _Mlp.apply(x, *weights, self, is_first_microbatch)
        return (y, self.fc2_bias) if self.return_bias else y


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, layer, is_first):
        fc1_out = nn.functional.linear(x, fc1_weight, fc1_bias)
        ctx.save_for_backward(x, fc1_out, fc1_weight, fc1_bias, fc2_weight, fc2_bias)
        ctx.layer, ctx.wgrad_store, ctx.is_first = layer, layer.wgrad_store, is_first
        return nn.functional.linear(nn.functional.gelu(fc1_out), fc2_weight, fc2_bias)

    @staticmethod
    def backward(ctx, grad_output):
        x, fc1_out, fc1_weight, fc1_bias, fc2_weight, fc2_bias = ctx.saved_tensors
        layer, store = ctx.layer, ctx.wgrad_store
        # TE uses the parameters themselves, which under a checkpoint are not the saved tensors.
        fc1, fc2 = layer.fc1_weight, layer.fc2_weight
        dy = grad_output.reshape(-1, grad_output.shape[-1])
        ln_out_total = x.reshape(-1, x.shape[-1])
        with torch.enable_grad():
            leaf = fc1_out.detach().reshape(-1, fc1_out.shape[-1]).requires_grad_()
            act_out = nn.functional.gelu(leaf)
        fc2_dgrad = dy.matmul(fc2_weight)
        act_saved = act_out.detach()
        fc2_kwargs, fc1_kwargs = (
            {
                "out_dtype": weight.main_grad.dtype if layer.fuse_wgrad_accumulation else x.dtype,
                "accumulate": layer.fuse_wgrad_accumulation and not ctx.is_first,
                "out": weight.main_grad if layer.fuse_wgrad_accumulation else None,
                "bias": bias,
            }
            for weight, bias in ((fc2, fc2_bias), (fc1, fc1_bias))
        )
        fc2_wgrad_gemm_kwargs, fc1_wgrad_gemm_kwargs = fc2_kwargs, fc1_kwargs

        def fc2_wgrad_gemm(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor | None]:
            dw, db, *_ = general_gemm(x, dy, **fc2_wgrad_gemm_kwargs)
            return dw, db

        def fc1_wgrad_gemm(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor | None]:
            dw, db, *_ = general_gemm(x, dy, **fc1_wgrad_gemm_kwargs)
            return dw, db

        fc2_wgrad = fc2_bias_grad = fc1_wgrad = fc1_bias_grad = None
        if store is not None and store.delay_wgrad_compute():
            store.put([act_saved, dy], fc2_wgrad_gemm)
        else:
            fc2_wgrad, fc2_bias_grad = fc2_wgrad_gemm(act_saved, dy)
        (dact,) = torch.autograd.grad(act_out, leaf, fc2_dgrad)
        if store is not None and store.delay_wgrad_compute():
            store.put([ln_out_total, dact], fc1_wgrad_gemm)
        else:
            fc1_wgrad, fc1_bias_grad = fc1_wgrad_gemm(ln_out_total, dact)
        dx = dact.matmul(fc1_weight).view(x.shape)
        fc1_wgrad = _returned_gradient(layer, fc1, fc1_wgrad)
        fc2_wgrad = _returned_gradient(layer, fc2, fc2_wgrad)
        return dx, fc1_wgrad, fc1_bias_grad, fc2_wgrad, fc2_bias_grad, None, None


class GroupedLinear(TeLayer):
    """te.GroupedLinear: one weight per expert; `packed` is how newer versions hand over."""

    def __init__(
        self,
        num_gemms: int,
        inputs: int,
        outputs: int,
        bias: bool = False,
        fused: bool = False,
        return_bias: bool = False,
        dtype: torch.dtype = torch.float32,
        packed: bool = False,
    ) -> None:
        super().__init__(bias, fused, return_bias, dtype, None)
        self.num_gemms = num_gemms
        self.packed = packed
        for number in range(num_gemms):
            self.add(f"weight{number}", outputs, inputs)
            if bias:
                self.add(f"bias{number}", outputs)

    def forward(self, x: Tensor, splits: list[int], is_first_microbatch: bool | None = None) -> Any:
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)] if self.use_bias else []
        used = biases if self.apply_bias else [None] * self.num_gemms
        store, first = self.wgrad_store, is_first_microbatch
        y = _Grouped.apply(x, splits, self, store, first, *weights, *used)
        return (y, biases) if self.return_bias else y


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, splits, layer, store, is_first, *parameters):
        weights, biases = parameters[: layer.num_gemms], parameters[layer.num_gemms :]
        ctx.save_for_backward(x, *weights)
        ctx.splits, ctx.layer, ctx.wgrad_store, ctx.is_first = splits, layer, store, is_first
        ctx.weights, ctx.use_bias = weights, biases[0] is not None
        parts = x.split(splits)
        return torch.cat(
            [
                nn.functional.linear(*operands)
                for operands in zip(parts, weights, biases, strict=True)
            ]
        )

    @staticmethod
    def backward(ctx, grad_output):
        x, *weights = ctx.saved_tensors
        layer = ctx.layer
        inputmats, dys = list(x.split(ctx.splits)), list(grad_output.split(ctx.splits))
        dgrad = torch.cat([dy.matmul(weight) for dy, weight in zip(dys, weights, strict=True)])
        origin_weights = ctx.weights
        main_grads = [getattr(weight, "main_grad", None) for weight in origin_weights]
        accumulate = layer.fuse_wgrad_accumulation and not ctx.is_first
        if layer.fuse_wgrad_accumulation:
            wgrad_list = main_grads
        else:
            # Memory with anything in it, as empty memory has.
            packed = torch.full((layer.num_gemms, *weights[0].shape), torch.nan, dtype=x.dtype)
            wgrad_list = [packed[i] for i in range(layer.num_gemms)]
        grad_biases = [None] * layer.num_gemms
        use_bias = ctx.use_bias
        if layer.packed:
            if use_bias:
                grad_biases = [dy.sum(dim=0) for dy in dys]

            def grouped_gemm_wgrad(xs: Any, dys: Any, outs: Any) -> Any:
                general_grouped_gemm(xs, dys, outs, accumulate=accumulate, use_bias=False)
                return None, [None] * layer.num_gemms, None
        else:
            grouped_gemm_wgrad = functools.partial(
                general_grouped_gemm, accumulate=accumulate, use_bias=use_bias
            )
        if ctx.wgrad_store is not None and ctx.wgrad_store.delay_wgrad_compute():
            ctx.wgrad_store.put([inputmats, dys, wgrad_list], grouped_gemm_wgrad)
        else:
            _, from_gemm, _ = grouped_gemm_wgrad(inputmats, dys, wgrad_list)
            grad_biases = [
                a if a is not None else b for a, b in zip(grad_biases, from_gemm, strict=True)
            ]
        returned = [
            _returned_gradient(layer, weight, grad)
            for weight, _, grad in zip(origin_weights, main_grads, wgrad_list, strict=True)
        ]
        return dgrad, None, None, None, None, *returned, *grad_biases


def _gather(tensor: Tensor, group: Any, userbuffer: Tensor | None = None) -> Tensor:
    """Return the full tensor; in a userbuffer a view that the next all-gather overwrites."""
    gathered = tensor.new_empty(tensor.shape[0] * group.size(), *tensor.shape[1:])
    if userbuffer is not None:
        gathered = userbuffer[: gathered.numel()].view(gathered.shape)
    dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=group)
    return gathered


def _reduce_scatter(tensor: Tensor, group: Any) -> Tensor:
    part = tensor.new_empty(tensor.shape[0] // group.size(), *tensor.shape[1:])
    dist.reduce_scatter_tensor(part, tensor.contiguous(), group=group)
    return part
