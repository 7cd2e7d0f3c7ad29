"""Defer the weight gradients of Transformer Engine's linear layers from B to W.

In backward, a TE layer checks its `wgrad_store`. If the store delays weight gradients, the layer
passes it a list of tensors and a GEMM function. `use_job_stores` replaces the store of every layer
of a built model. TE's store is one queue per layer, so it cannot separate two microbatches.

A TE layer waits for its tensor-parallel all-reduce inside TE's backward. Unlike in Megatron's local
layers, the weight gradient of an earlier B cannot overlap with it.

This module does not import TE. It identifies layers by attributes and stores by methods.
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
from megatron_vshape.runtime.weight_jobs import GatheringJob, is_open, is_plain

logger = logging.getLogger(__name__)

Gemm = Callable[..., tuple[Any, ...]]
"""The GEMM function that TE passes to the store: tensors -> (weight gradient, bias gradient,
...)."""

TELayer = Any
"""A TE linear layer. Any, because torch types each unknown attribute as Tensor or Module."""

_PROTOCOL = {"delay_wgrad_compute": (), "put": ("tensor_list", "func"), "pop": ()}
"""Store methods that TE's layers call, with their parameters."""


_GATHER_IN_B = ("ub_bulk_dgrad", "ub_overlap_ag_dgrad", "ub_overlap_ag")
"""TE layer attributes that make B gather the input or the output gradient into a userbuffer."""

_NEEDS_GATHER = ("backward_input_needs_gather", "ln_out_needs_gather")
"""Attributes TE's backward reads: if true, B gathers the input, which only the weight gradient
uses."""

_KINDS, _MLP_PARTS = ("weight", "bias"), ("fc1", "fc2")
"""TE's parameter names: the two kinds, and the prefixes of the two linears of an MLP."""

BY_DESIGN = "as it should"
"""Prefix of the reason if a weight gradient stays in B by design."""


class StoreError(RuntimeError):
    """This Transformer Engine does not match the adapter; the message has the difference."""


def use_job_stores(
    state: StepState, chunks: Iterable[nn.Module], graphed: Set[nn.Module] = frozenset()
) -> int:
    """Replace the store of every TE linear layer in `chunks`; return the number of layers.

    The weight gradients of layers in `graphed` stay in B. A store in these layers would make TE,
    which captures its own CUDA graphs, also capture a W.

    Raises:
        StoreError: The methods of TE's store differ from the expected ones.
    """
    installed = 0
    warn_once = cache(_warn_of_gathered)
    layer: TELayer
    for chunk in chunks:
        for kind in {type(module) for module in chunk.modules()}:
            # Per class, as all its layers share one forward.
            _accumulate_always(kind)  # unsplit layers need it as well
        for layer in chunk.modules():
            if is_splittable(layer) and layer not in graphed:
                check_protocol(layer.wgrad_store)
                # TE's backward asks the store of its layer, so no TE function has to be replaced.
                layer.wgrad_store = JobStore(state, layer, warn_once)
                _gather_in_w_alone(type(layer))
                installed += 1
            # Experts create their fused operations in the first F, so their stores cannot be set
            # here.
            if hasattr(layer, "_make_fused_ops"):
                _split_operations(layer)
    return installed


def _split_operations(experts: TELayer) -> None:
    """Give the fused operations of experts the stores of their layers.

    Experts create these operations in the first F. TE's operations for experts have stores since
    2.16. They compute bias gradients in B.
    """
    make = experts._make_fused_ops

    def make_with_stores() -> Any:
        operations = make()
        with_store = filter(is_te_layer, operations.children())
        for operation, layer in zip(
            with_store, (experts.linear_fc1, experts.linear_fc2), strict=False
        ):
            if isinstance(layer.wgrad_store, JobStore):
                operation.wgrad_store = replace(layer.wgrad_store, biases_in_b=True)
        # With zero copy, the dispatcher reuses the gradient buffer before the deferred job reads
        # it.
        if getattr(experts.config, "moe_ncclep_zero_copy", False) and not _quantizes(experts):
            operations.register_forward_hook(_copy_gradient)
        return operations

    experts._make_fused_ops = make_with_stores


def _copy_gradient(experts: nn.Module, inputs: Any, output: Tensor) -> None:
    """Make a B that defers jobs read a copy of the output gradient of the experts.

    Megatron's dispatcher uses one buffer for this gradient in all layers and microbatches, and the
    experts' own backward writes to this buffer next. Quantized layers do not need the copy: they
    have quantized the gradient for W by then.
    """
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient.clone() if is_open() else gradient)


def _gather_in_w_alone(layer: type[nn.Module]) -> None:
    """Disable the input all-gather in B for layers whose W gathers the input.

    Otherwise B would all-gather an input that it does not use: the job keeps only the shard of this
    rank. Every TE backward first calls `grad_output_preprocess` of TE's base class, so this
    function wraps that method. If a TE version has no such switch, its B still gathers.
    """
    for base in layer.__mro__:
        original = vars(base).get("grad_output_preprocess")
        if not isinstance(original, staticmethod) or hasattr(original.__func__, "__wrapped__"):
            continue  # already wrapped, or an unknown version of the method

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
    """Clear the flags in TE's saved context that make a backward gather its input.

    With quantization or userbuffers, the gathered input is created together with data that B needs,
    so the flags stay.
    """
    if any(getattr(saved, name, True) for name in ("fp8", "debug", "ub_bulk_dgrad")):
        return
    for name in _NEEDS_GATHER:
        if getattr(saved, name, False):
            setattr(saved, name, False)


class _UntilReturn:
    """A flag that is true while its forward runs and false afterwards."""

    def __init__(self) -> None:
        self.runs = True

    def __bool__(self) -> bool:
        return self.runs


_FIRST = "is_first_microbatch"


def _accumulate_always(layer: type[nn.Module]) -> None:
    """Prevent the backward of a TE class from overwriting main_grad.

    With `is_first_microbatch` TE casts the weights to FP8 in this forward, and keeps the flag for
    this pass's backward, which then overwrites main_grad instead of adding to it. That is right
    only if the backward is the layer's first of the step. It is not if a stage runs several
    backwards per microbatch, which run from last to first, if weight gradients are computed in W,
    or if a layer runs twice per microbatch. Megatron zeroes main_grad, so adding is always right.
    So the forward gets the flag, and the backward reads it as false.
    """
    for base in layer.__mro__:
        original = vars(base).get("forward")
        if not inspect.isfunction(original) or hasattr(original, "ends_first_microbatch"):
            continue  # inherits its forward, or is already wrapped
        names = list(inspect.signature(original).parameters)
        if _FIRST in names:
            base.forward = _ending(original, names.index(_FIRST))  # type: ignore[attr-defined]


def _ending(original: Callable[..., Any], position: int) -> Callable[..., Any]:
    """Wrap a TE forward whose parameter `position` is the first-microbatch flag."""

    @wraps(original)
    def forward(*args: Any, **options: Any) -> Any:
        flag = _UntilReturn()
        if options.get(_FIRST):
            options[_FIRST] = flag
        elif args[position:] and args[position]:
            args = (*args[:position], flag, *args[position + 1 :])
        try:
            return original(*args, **options)
        finally:
            # The backward runs later and must read the flag as false.
            flag.runs = False

    forward.ends_first_microbatch = True  # type: ignore[attr-defined]
    return forward


def is_te_layer(layer: nn.Module) -> bool:
    """Return whether the layer computes its weight gradient through a TE store."""
    return getattr(layer, "wgrad_store", None) is not None


def is_splittable(layer: nn.Module) -> bool:
    """Return whether the layer is a TE layer with known parameters."""
    return is_te_layer(layer) and why_unsplit(layer) is None


def why_unsplit(layer: nn.Module) -> str | None:
    """Return the reason why the weight gradient of a TE layer must stay in B, or None."""
    names = [name for names in _names(layer) for name in names]
    missing = [name for name in names if getattr(layer, name, None) is None]
    if missing and _is_grouped(layer):  # TE registers weight0, ... as None then
        return "its experts' weights or biases are one grouped tensor"
    if missing or not names:
        return "its parameters are not those of any TE layer this package knows"
    if getattr(layer, "ub_bulk_wgrad", False):
        return "its userbuffers overlap communication with it: remove tp_comm_bulk_wgrad"
    if _quantizes(layer) and any(getattr(layer, name, False) for name in _GATHER_IN_B):
        return f"{BY_DESIGN}: userbuffers overwrite its quantized gathered input"
    return None


def _quantizes(layer: nn.Module) -> bool:
    config = getattr(layer, "config", None)
    return bool(getattr(config, "fp8", None) or getattr(config, "fp4", None))


def check_protocol(store: Any) -> None:
    """Raise StoreError unless `store` has the methods that TE layers call (TE 2.3 and later)."""
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
        actual_parameters = tuple(inspect.signature(method).parameters)
        if actual_parameters != parameters:
            raise StoreError(
                f"Transformer Engine's {type(store).__name__}.{name} takes "
                f"({', '.join(actual_parameters)}) instead of ({', '.join(parameters)}): "
                "use another version, or --transformer-impl local"
            )


def _warn_of_gathered() -> None:
    """Warn that a layer retains the gathered sequence instead of the shard of this rank."""
    logger.warning(
        "weight gradients of quantized layers keep the gathered sequence until W: with FP8 and "
        "sequence parallelism a split backward stores more than predicted"
    )


@dataclass(eq=False)
class JobStore:
    """Replacement of a TE layer's WeightGradStore; TE calls every method.

    The open bucket of jobs decides in B which microbatch a job belongs to, so recomputed layers
    work too. In a full backward no bucket is open, and TE computes the weight gradient itself.
    """

    state: StepState
    layer: TELayer
    warn_of_gathered: Callable[[], None]
    biases_in_b: bool = False
    context: ClassVar[None] = None
    """TE's queue. TE layers check that it exists before they pop from it."""
    names: tuple[list[str], list[str]] = field(init=False)  # of the layer's weights and biases

    def __post_init__(self) -> None:
        """Cache the parameter names, to avoid a lookup in every pass."""
        self.names = _names(self.layer)

    def delay_wgrad_compute(self) -> bool:
        """Return whether TE passes the weight gradient to the store.

        True in F, because TE then retains the store for B. While TE captures CUDA graphs no bucket
        is open; True makes TE capture a separate W.
        """
        if self.state.capture is not None:
            return bool(self.state.capture.splits(self.layer))
        # -1 outside of any backward. A forward that recomputation repeats counts as backward.
        return is_open() or (
            self.state.has_own_schedule and torch._C._current_graph_task_id() == -1
        )

    def put(self, tensor_list: list[Any], func: Gemm) -> None:
        """Defer a job to W. The job retains the tensors that TE passes until it has run."""
        layer = self.layer
        # Only W reads these tensors from now on, and W needs only the column-wise data.
        # TE calls this in B in place of the wgrad GEMM, with its inputs.
        _drop_rowwise(tensor_list[:2])
        weights, biases = _parameters(layer, self.names, func)
        biases = () if self.biases_in_b else biases
        sources: Sequence[dist.ProcessGroup | None]
        if _is_grouped(layer):
            tensors, sources = [tensor_list[0], tensor_list[1]], (None, None)
            # The token dispatcher, not the layer, gathers the input of experts: W has nothing to
            # gather.
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
        """Raise StoreError: TE's backward_dw cannot select a microbatch."""
        raise StoreError(
            "backward_dw() of a Transformer Engine layer was called, but weight gradients run "
            "in the schedule's W passes. Remove --delay-wgrad-compute"
        )

    def enable_delay_wgrad_compute(self) -> None:
        """Do nothing: the schedule decides.

        `WeightJobs.collect` rejects a bucket whose W has not run.
        """

    disable_delay_wgrad_compute = assert_empty = enable_delay_wgrad_compute


def _drop_rowwise(value: Any) -> None:
    """Free the row-wise data of quantized tensors; a weight gradient reads the column-wise data.

    TE quantizes the output gradient in both directions because the dgrad GEMM of B reads rows. That
    GEMM has run by now. A torch.Tensor is left unchanged because it can have other readers. TE's
    bare storages belong to this one backward.
    """
    if isinstance(value, list | tuple):
        for part in value:
            _drop_rowwise(part)
    elif isinstance(value, torch.Tensor):
        return
    elif hasattr(value, "update_usage"):
        value.update_usage(rowwise_usage=False, columnwise_usage=True)
    elif getattr(value, "columnwise_data", None) is not None:  # a grouped tensor, as TE in F
        value.rowwise_data = value.scale_inv = None


def _run(
    func: Gemm,
    weights: Sequence[nn.Parameter],
    biases: Sequence[nn.Parameter],
    *tensors: Any,
) -> None:
    """Compute the weight gradient of a layer in W and accumulate it.

    `weights` are the weights to which `func` does not add the gradient itself.
    """
    weight_grad, bias_grad, *_ = func(*tensors)
    if weights:
        _add_parts(weights, weight_grad)
    if biases and bias_grad is not None and bias_grad.numel():
        _add_parts(biases, bias_grad)


def _take_targets(layer: TELayer, targets: list[Any]) -> list[Tensor] | torch.dtype:
    """Return the outputs of a grouped layer's GEMM: its main_grads, or the dtype of buffers for W.

    Without fused accumulation, `targets` is memory that TE has just allocated and returns from
    backward, filled or not. The function sets its entries to None, so that autograd gets no
    gradient, and W allocates the memory again.
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
    """Compute the weight gradients of a grouped layer in W and accumulate them."""
    outputs = targets
    if isinstance(outputs, torch.dtype):
        first = weights[0]
        outputs = list(first.new_empty(len(weights), *first.shape, dtype=outputs).unbind())
    result = func(inputs, grad_outputs, outputs)
    if biases:
        for bias, grad in zip(biases, result[1], strict=False):
            if grad is not None and grad.numel():
                add_gradient(bias, grad)
    # With fused accumulation, the GEMM has already added to main_grad.
    if outputs is not targets:
        for weight, grad in zip(weights, outputs, strict=True):
            add_gradient(weight, grad)


def _add_parts(parameters: Sequence[nn.Parameter], grad: Tensor) -> None:
    """Split a gradient along rows and add one part to each parameter."""
    parts = grad.split([parameter.shape[0] for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        add_gradient(parameter, part)


def add_gradient(parameter: nn.Parameter, grad: Tensor) -> None:
    """Add to main_grad if the parameter has one (as DDP does), else to grad (as autograd does)."""
    # Frozen, as the base weights of LoRA: TE computes these gradients all the same.
    if not parameter.requires_grad:
        return
    # A bias gradient of a GEMM into main_grad is fp32; autograd rounds it to the bias's dtype.
    grad = grad.to(parameter.dtype)
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        main_grad.add_(grad)
    elif parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad.add_(grad)


def _parameters(
    layer: TELayer, names: tuple[list[str], list[str]], func: Gemm
) -> tuple[tuple[nn.Parameter, ...], tuple[nn.Parameter, ...]]:
    """Return the weights and the biases whose gradients `func` computes."""
    weights, biases = names
    if _is_mlp(layer):
        index = _MLP_PARTS.index(_mlp_part(func))
        weights, biases = weights[index : index + 1], biases[index : index + 1]
    return _get(layer, weights), _get(layer, biases)


def _names(layer: TELayer) -> tuple[list[str], list[str]]:
    """Return the names of a layer's weights and used biases; empty for an unknown layer."""
    weights: Iterable[str] = getattr(layer, "weight_names", None) or ()
    biases: Iterable[str] = getattr(layer, "bias_names", None) or ()
    if _is_grouped(layer):
        numbers = range(layer.num_gemms)
        weights, biases = ([f"{kind}{number}" for number in numbers] for kind in _KINDS)
    elif _is_mlp(layer):
        weights, biases = ([f"{part}_{kind}" for part in _MLP_PARTS] for kind in _KINDS)
    return list(weights), list(biases) if getattr(layer, "use_bias", False) else []


def _get(layer: nn.Module, names: Iterable[str]) -> tuple[nn.Parameter, ...]:
    # Looked up in every B: a conversion to bf16 or FP8 may replace the parameters.
    return tuple(getattr(layer, name) for name in names)


def _is_grouped(layer: nn.Module) -> bool:
    return hasattr(layer, "num_gemms")


def _is_mlp(layer: nn.Module) -> bool:
    return hasattr(layer, "fc1_weight")


def _mlp_part(func: Gemm) -> str:
    """Return the prefix ("fc1" or "fc2") of the MLP linear that `func` belongs to."""
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
    """Replace a tensor that TE has gathered for the GEMM by the shard of this rank.

    Returns the group from which W gathers each tensor again, or None. With sequence parallelism a
    gathered tensor is larger by the group size. The shard is copied, so that the gathered tensor
    can be freed and a userbuffer that contains it can be reused. If B did not gather the input, the
    tensor is already the shard.
    """
    sources: list[dist.ProcessGroup | None] = [None] * len(tensors)
    gathered = _gathered(layer, func)
    if gathered is None:
        return sources
    # A quantized tensor stays gathered: only plain tensors are sharded here.
    if not is_plain(tensors[gathered]):
        warn_of_gathered()
        return sources
    group, tensor = layer.tp_group, tensors[gathered]
    # An input that B has not gathered has fewer rows than the output gradient.
    is_part = gathered == 0 and _rows(tensor) < _rows(tensors[1])
    part = tensor if is_part else tensor.chunk(group.size())[group.rank()].clone()
    tensors[gathered] = part.contiguous()
    sources[gathered] = group
    return sources


def _rows(tensor: Tensor) -> int:
    return math.prod(tensor.shape[:-1])


def _gathered(layer: TELayer, func: Gemm) -> int | None:
    """Return the index of the sequence-gathered tensor (0: input, 1: output gradient), or None."""
    if not getattr(layer, "sequence_parallel", False) or layer.tp_size == 1:
        return None
    if _is_mlp(layer):
        return 0 if _mlp_part(func) == "fc1" else 1
    # Column-parallel layers gather the input for this GEMM, row-parallel layers the output
    # gradient.
    return {"column": 0, "row": 1}.get(layer.parallel_mode)
