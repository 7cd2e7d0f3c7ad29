"""Transformer Engine's linear layers with the weight gradient put off from B to W.

A TE layer asks its `wgrad_store` whether the weight gradient is to wait, and if so hands over a
list of tensors and a function of them. `install` puts a store of ours in every layer of a built
model. TE's own store is one queue per layer, which cannot tell two microbatches apart.

In B a layer waits, inside TE's own backward, for a sum over tensor-parallel ranks. No weight
gradient can hide that here, as one of an earlier B can in Megatron's local layers.

TE itself is not imported: a layer is known by its attributes, its store by its methods.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache, partial, wraps
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_vshape.mcore.step_state import StepState
from megatron_vshape.runtime.gathering_job import GatheringJob
from megatron_vshape.runtime.weight_jobs import is_open

logger = logging.getLogger(__name__)

Gemm = Callable[..., tuple[Any, ...]]
"""What TE hands over: takes the tensors and returns (weight gradient, bias gradient, ...)."""

TELayer = Any
"""One of TE's linear layers; torch would take each attribute of it for a Tensor or a Module."""

_PROTOCOL = {"delay_wgrad_compute": (), "put": ("tensor_list", "func"), "pop": ()}
"""The methods of a store that TE's layers call, and their parameters."""


_GATHER_IN_B = ("ub_bulk_dgrad", "ub_overlap_ag_dgrad", "ub_overlap_ag")
"""Switches of TE's layers: B gathers the input, or the output's gradient, into a userbuffer."""

_NEEDS_GATHER = ("backward_input_needs_gather", "ln_out_needs_gather")
"""What TE's backward reads: that B is to gather the input, which only the weight gradient uses."""

_KINDS, _MLP_PARTS = ("weight", "bias"), ("fc1", "fc2")
"""How TE names the parameters of a layer, and the two linears of an MLP."""

AS_IT_SHOULD = "as it should"
"""How the reason begins where a weight gradient is in B by intention."""


class StoreError(RuntimeError):
    """This Transformer Engine is not one the adapter was written for; the text says where."""


def install(
    state: StepState, chunks: Iterable[nn.Module], whole: Set[nn.Module] = frozenset()
) -> int:
    """Give every TE linear layer in `chunks` a store whose jobs wait for W; return how many.

    Not those in `whole`, whose weight gradients stay in B. A store would tell TE, which captures
    its CUDA graphs itself, to capture a W as well.

    Raises:
        StoreError: TE's store has other methods than those it is used by.
    """
    installed = 0
    warn_once = cache(_warn_of_gathered)
    layer: TELayer
    for chunk in chunks:
        for kind in {type(each) for each in chunk.modules()}:
            _accumulate_always(kind)  # layers that stay whole need it as well
        for layer in chunk.modules():
            if is_splittable(layer) and layer not in whole:
                check_protocol(layer.wgrad_store)
                layer.wgrad_store = JobStore(state, layer, warn_once)
                _gather_in_w_alone(type(layer))
                installed += 1
            if hasattr(layer, "_make_fused_ops"):
                _split_operations(layer)
    return installed


def _split_operations(experts: TELayer) -> None:
    """Have fused operations, which experts make of their layers in the first F, use their stores.

    TE's operations for experts have stores since 2.16, and compute the bias gradients in B.
    """
    make = experts._make_fused_ops

    def made() -> Any:
        operations = make()
        with_store = filter(is_te_layer, operations.children())
        for each, layer in zip(with_store, (experts.linear_fc1, experts.linear_fc2), strict=False):
            if isinstance(layer.wgrad_store, JobStore):
                each.wgrad_store = replace(layer.wgrad_store, biases_in_b=True)
        if getattr(experts.config, "moe_ncclep_zero_copy", False) and not _quantizes(experts):
            operations.register_forward_hook(_copy_gradient)
        return operations

    experts._make_fused_ops = made


def _copy_gradient(experts: nn.Module, inputs: Any, output: Tensor) -> None:
    """Have a B that leaves jobs read a copy of the gradient of what experts return.

    Megatron's dispatcher brings that in one buffer for all layers and microbatches, to which the
    experts' own backward writes next; what quantizes the gradient for W has copied it by that.
    """
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient.clone() if is_open() else gradient)


def _gather_in_w_alone(layer: type[nn.Module]) -> None:
    """Have the backward of TE's layers not gather the input where their W does.

    That is all-gathers in B for nothing: the job keeps this rank's part. Every backward first calls
    a method of TE's base class, which here tells it so. One that has no such switch gathers.
    """
    for base in layer.__mro__:
        original = vars(base).get("grad_output_preprocess")
        if not isinstance(original, staticmethod) or hasattr(original.__func__, "__wrapped__"):
            continue  # ours already, or not what is known

        @wraps(original.__func__)
        def preprocess(
            saved: Any, *args: Any, upstream: Any = original.__func__, **options: Any
        ) -> Any:
            store = getattr(saved, "wgrad_store", None)
            if isinstance(store, JobStore) and store.delay_wgrad_compute():
                _forget_gather(saved)
            return upstream(saved, *args, **options)

        base.grad_output_preprocess = staticmethod(preprocess)  # type: ignore[attr-defined]


def _forget_gather(saved: Any) -> None:
    """Tell a backward, by what TE has saved for it, not to gather its input.

    A quantized one, and one that a userbuffer gathers, are made together with what B needs.
    """
    if any(getattr(saved, name, True) for name in ("fp8", "debug", "ub_bulk_dgrad")):
        return
    for name in _NEEDS_GATHER:
        if getattr(saved, name, False):
            setattr(saved, name, False)


class _UntilReturn:
    """A flag that is true while the forward it is given to runs, and false from then on."""

    def __init__(self) -> None:
        self.runs = True

    def __bool__(self) -> bool:
        return self.runs


_FIRST = "is_first_microbatch"


def _accumulate_always(layer: type[nn.Module]) -> None:
    """Prevent the backward of a TE class from overwriting main_grad.

    With `is_first_microbatch` TE casts the weights to FP8 in this forward, and keeps the flag for
    this pass's backward, which then overwrites main_grad instead of adding to it. That is right
    only if the backward is the layer's first of the step. It is not with sequence slices (they run
    backward from last to first), with weight gradients in W, or if a layer runs twice per
    microbatch. Megatron zeroes main_grad, so adding is always right. So the forward gets the flag,
    and the backward reads it as false.
    """
    for base in layer.__mro__:
        original = vars(base).get("forward")
        if not inspect.isfunction(original) or hasattr(original, "ends_first_microbatch"):
            continue  # no forward of its own, or wrapped already
        names = list(inspect.signature(original).parameters)
        if _FIRST in names:
            base.forward = _ending(original, names.index(_FIRST))  # type: ignore[attr-defined]


def _ending(original: Callable[..., Any], at: int) -> Callable[..., Any]:
    """Wrap a TE forward whose parameter number `at` tells whether the microbatch is the first."""

    @wraps(original)
    def forward(*args: Any, **options: Any) -> Any:
        flag = _UntilReturn()
        if options.get(_FIRST):
            options[_FIRST] = flag
        elif args[at:] and args[at]:
            args = (*args[:at], flag, *args[at + 1 :])
        try:
            return original(*args, **options)
        finally:
            flag.runs = False

    forward.ends_first_microbatch = True  # type: ignore[attr-defined]
    return forward


def is_te_layer(layer: nn.Module) -> bool:
    """Return whether the layer computes its weight gradient as TE's do, through a store."""
    return getattr(layer, "wgrad_store", None) is not None


def is_splittable(layer: nn.Module) -> bool:
    """Return whether it is a TE layer whose parameters the adapter knows."""
    return is_te_layer(layer) and why_whole(layer) is None


def why_whole(layer: nn.Module) -> str | None:
    """Return why a TE layer's weight gradient has to stay in B, or None where it has not."""
    names = [name for names in _names(layer) for name in names]
    missing = [name for name in names if getattr(layer, name, None) is None]
    if missing and _is_grouped(layer):  # TE registers weight0, ... as None then
        return "its experts' weights or biases are one grouped tensor"
    if missing or not names:
        return "its parameters are not those of any TE layer this package knows"
    if getattr(layer, "ub_bulk_wgrad", False):
        return "its userbuffers overlap communication with it: remove tp_comm_bulk_wgrad"
    if _quantizes(layer) and any(getattr(layer, name, False) for name in _GATHER_IN_B):
        return f"{AS_IT_SHOULD}: userbuffers overwrite its quantized gathered input"
    return None


def _quantizes(layer: nn.Module) -> bool:
    config = getattr(layer, "config", None)
    return bool(getattr(config, "fp8", None) or getattr(config, "fp4", None))


def check_protocol(store: Any) -> None:
    """Raise StoreError unless `store` has the methods TE's layers of 2.3 and later call."""
    if isinstance(store, JobStore):
        return
    for name, parameters in _PROTOCOL.items():
        method = getattr(store, name, None)
        if method is None:
            raise StoreError(
                f"Transformer Engine's {type(store).__name__} has no {name}(): this version puts "
                "weight gradients off in a way this package does not know; use another version, "
                "or --transformer-impl local"
            )
        found = tuple(inspect.signature(method).parameters)
        if found != parameters:
            raise StoreError(
                f"Transformer Engine's {type(store).__name__}.{name} takes ({', '.join(found)}) "
                f"instead of ({', '.join(parameters)}): use another version, or "
                "--transformer-impl local"
            )


def _warn_of_gathered() -> None:
    """Tell that a layer keeps more than its rank's part of the sequence."""
    logger.warning(
        "weight gradients of quantized layers keep the gathered sequence until W: with FP8 and "
        "sequence parallelism a split backward stores more than predicted"
    )


@dataclass(eq=False)
class JobStore:
    """Takes the place of a TE layer's WeightGradStore; every method is one that TE calls.

    Which microbatch a job belongs to is decided in B, by the bucket that is open then, so that
    recomputed layers work too. In a whole backward no bucket is open and TE computes the weight
    gradient itself.
    """

    state: StepState
    layer: TELayer
    warn_of_gathered: Callable[[], None]
    biases_in_b: bool = False
    context: ClassVar[None] = None
    """TE's queue; its layers look whether there is one before they would pop from it."""
    names: tuple[list[str], list[str]] = field(init=False)  # of the layer's weights and biases

    def __post_init__(self) -> None:
        """Look the names up once, and not in every pass."""
        self.names = _names(self.layer)

    def delay_wgrad_compute(self) -> bool:
        """Return whether TE is to hand the weight gradient over.

        In F the answer is yes, since TE then keeps the store for B. While TE captures CUDA graphs,
        no bucket is open: yes makes TE capture a W.
        """
        if self.state.capture is not None:
            return bool(self.state.capture.splits(self.layer))
        return is_open() or (self.state.splits_backward and not _runs_backward())

    def put(self, tensor_list: list[Any], func: Gemm) -> None:
        """Leave a job for W, which keeps the tensors that TE hands over until it has run."""
        layer = self.layer
        _drop_rowwise(tensor_list[:2])
        weights, biases = _parameters(layer, self.names, func)
        biases = () if self.biases_in_b else biases
        sources: Sequence[dist.ProcessGroup | None]
        if _is_grouped(layer):
            tensors, sources = [tensor_list[0], tensor_list[1]], (None, None)
            targets = _take_targets(layer, tensor_list[2])
            compute = partial(_run_grouped, targets, func, weights, biases)
        else:
            tensors = list(tensor_list)
            sources = _keep_shards(layer, tensors, func, self.warn_of_gathered)
            sums = () if layer.fuse_wgrad_accumulation else weights
            compute = partial(_run, func, sums, biases)
        job = GatheringJob(compute, tensors, sources)
        if self.state.capture is None:
            self.state.defer(job, [*weights, *biases])
        else:
            self.state.capture.put(layer, job, [*weights, *biases])

    def pop(self) -> None:
        """Refuse: TE's own backward_dw does not know which microbatch it is for."""
        raise StoreError(
            "backward_dw() of a Transformer Engine layer was called, but weight gradients run "
            "in the schedule's W passes. Remove --delay-wgrad-compute"
        )

    def enable_delay_wgrad_compute(self) -> None:
        """Do nothing: the schedule decides, and the buckets of jobs are checked where they run."""

    disable_delay_wgrad_compute = assert_empty = enable_delay_wgrad_compute


def _drop_rowwise(value: Any) -> None:
    """Free the row-wise data of quantized tensors; a weight gradient reads the column-wise data.

    TE quantizes the output's gradient both ways, since B's product reads it by rows, and has
    computed that product by now. A torch.Tensor stays as it is: it can have other readers, while
    TE's bare storages are made in, or saved for, this one backward.
    """
    if isinstance(value, list | tuple):
        for each in value:
            _drop_rowwise(each)
    elif isinstance(value, torch.Tensor):
        return
    elif hasattr(value, "update_usage"):
        value.update_usage(rowwise_usage=False, columnwise_usage=True)
    elif getattr(value, "columnwise_data", None) is not None:  # a group, as TE does it in F
        value.rowwise_data = value.scale_inv = None


def _run(
    func: Gemm,
    weights: Sequence[nn.Parameter],
    biases: Sequence[nn.Parameter],
    *tensors: Any,
) -> None:
    """Compute a layer's weight gradient and add it; what the job that B leaves for W does.

    `weights` are those `func` does not add to itself.
    """
    weight_grad, bias_grad, *_ = func(*tensors)
    if weights:
        _add_parts(weights, weight_grad)
    if biases and bias_grad is not None and bias_grad.numel():
        _add_parts(biases, bias_grad)


def _take_targets(layer: TELayer, targets: list[Any]) -> list[Tensor] | torch.dtype:
    """Return where a grouped layer's weight gradients go: main_grads, or memory of this dtype.

    Unfused, `targets` is memory that TE has just allocated and returns from backward, filled or
    not. It is taken out of the list, so that autograd gets no gradient, and allocated anew in W.
    """
    if layer.fuse_wgrad_accumulation:
        return list(targets)
    dtype: torch.dtype = targets[0].dtype
    targets[:] = [None] * len(targets)
    return dtype


def _run_grouped(
    targets: list[Tensor] | torch.dtype,
    func: Gemm,
    weights: Sequence[nn.Parameter],
    biases: Sequence[nn.Parameter],
    inputs: Any,
    grad_outputs: Any,
) -> None:
    """Compute a grouped layer's weight gradients and add them, as `_run` does a plain one's."""
    outputs = targets
    if isinstance(outputs, torch.dtype):
        first = weights[0]
        outputs = list(first.new_empty(len(weights), *first.shape, dtype=outputs).unbind())
    result = func(inputs, grad_outputs, outputs)
    if biases:
        _add_biases(biases, result[1])
    if outputs is not targets:
        for weight, grad in zip(weights, outputs, strict=True):
            add_gradient(weight, grad)


def _add_biases(biases: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> None:
    for bias, grad in zip(
        biases, grads, strict=False
    ):  # without biases there is a list all the same
        if grad is not None and grad.numel():
            add_gradient(bias, grad)


def _add_parts(parameters: Sequence[nn.Parameter], grad: Tensor) -> None:
    """Add a gradient of all the parameters, one below the other, to each."""
    parts = grad.split([each.shape[0] for each in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        add_gradient(parameter, part)


def add_gradient(parameter: nn.Parameter, grad: Tensor) -> None:
    """Add to main_grad where the parameter has one, else to grad, as DDP and autograd do."""
    if not parameter.requires_grad:
        return
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        main_grad.add_(grad)
    elif parameter.grad is None:
        parameter.grad = grad.to(parameter.dtype)
    else:
        parameter.grad.add_(grad)


def _parameters(
    layer: TELayer, names: tuple[list[str], list[str]], func: Gemm
) -> tuple[tuple[nn.Parameter, ...], tuple[nn.Parameter, ...]]:
    """Return the weights, and the biases, that `func` computes the gradients of."""
    weights, biases = names
    if _is_mlp(layer):
        at = _MLP_PARTS.index(_mlp_part(func))
        weights, biases = weights[at : at + 1], biases[at : at + 1]
    return _get(layer, weights), _get(layer, biases)


def _names(layer: TELayer) -> tuple[list[str], list[str]]:
    """Return the names of a TE layer's weights and of the biases it uses; none if it is unknown."""
    weights: Iterable[str] = getattr(layer, "weight_names", None) or ()
    biases: Iterable[str] = getattr(layer, "bias_names", None) or ()
    if _is_grouped(layer):
        numbers = range(layer.num_gemms)
        weights, biases = ([f"{kind}{number}" for number in numbers] for kind in _KINDS)
    elif _is_mlp(layer):
        weights, biases = ([f"{part}_{kind}" for part in _MLP_PARTS] for kind in _KINDS)
    return list(weights), list(biases) if getattr(layer, "use_bias", False) else []


def _get(layer: nn.Module, names: Iterable[str]) -> tuple[nn.Parameter, ...]:
    # Looked up in every B: what turns a model to bf16 or FP8 may put other parameters in.
    return tuple(getattr(layer, name) for name in names)


def _is_grouped(layer: nn.Module) -> bool:
    return hasattr(layer, "num_gemms")


def _is_mlp(layer: nn.Module) -> bool:
    return hasattr(layer, "fc1_weight")


def _mlp_part(func: Gemm) -> str:
    """Return which of an MLP's two linears `func` is of."""
    part = getattr(func, "__name__", "").partition("_")[0]
    if part not in _MLP_PARTS:
        raise StoreError(
            f"a LayerNormMLP of Transformer Engine handed over {func!r}, which is neither its "
            "fc1_wgrad_gemm nor its fc2_wgrad_gemm: use another version, or --transformer-impl "
            "local"
        )
    return part


def _keep_shards(
    layer: TELayer, tensors: list[Any], func: Gemm, warn_of_gathered: Callable[[], None]
) -> list[dist.ProcessGroup | None]:
    """Put this rank's part in the place of a tensor that TE has gathered for the GEMM.

    Returns the group to gather each tensor from again in W. With sequence parallelism a gathered
    tensor is as large as the group is; its part is copied, so that the rest can go now, and that a
    userbuffer which it lies in can be used again. An input that B has not gathered is that part.
    """
    sources: list[dist.ProcessGroup | None] = [None] * len(tensors)
    gathered = _gathered(layer, func)
    if gathered is None:
        return sources
    if type(tensors[gathered]) is not Tensor:
        warn_of_gathered()
        return sources
    group, found = layer.tp_group, tensors[gathered]
    is_part = gathered == 0 and _rows(found) < _rows(tensors[1])
    part = found if is_part else found.chunk(group.size())[group.rank()].clone()
    tensors[gathered] = part.contiguous()
    sources[gathered] = group
    return sources


def _rows(tensor: Tensor) -> int:
    return math.prod(tensor.shape[:-1])


def _gathered(layer: TELayer, func: Gemm) -> int | None:
    """Return which of (input, output gradient) TE has gathered over the sequence, if any."""
    if not getattr(layer, "sequence_parallel", False) or layer.tp_size == 1:
        return None
    if _is_mlp(layer):
        return 0 if _mlp_part(func) == "fc1" else 1
    return {"column": 0, "row": 1}.get(layer.parallel_mode)


def _runs_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
