"""Weight gradients that wait: B leaves jobs behind, W runs them.

A bucket is opened around B; every linear that runs its backward inside leaves a job there
instead of computing its weight gradient. W runs the bucket's jobs, in order. Where no bucket is
open (a whole backward) the linear computes its weight gradient at once.
"""

import functools
import importlib
import inspect
import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_vshape.runtime.labels import job_text, label

logger = logging.getLogger(__name__)

Job = Callable[[], None]
"""Computes and accumulates one weight gradient; references only the tensors that it needs."""


class _Waiting(NamedTuple):
    """A job in its bucket."""

    job: Job
    begin: Callable[[], None] | None  # starts what the job waits for; the second time does nothing
    weights: Sequence[Tensor]
    kept: list[Tensor]  # of a stream's memory, until the job's own stream is known
    stream: torch.cuda.Stream | None  # on which it was made, and its tensors with it


class _Open:
    """The bucket of the B that runs now.

    The one piece of module state here: a linear deep in the model has no other way to its
    bucket. It is a plain attribute and neither a ContextVar nor thread-local, because autograd
    runs the backward of CUDA tensors on a thread of its own, where those would read empty. One
    process runs one pass at a time, so one attribute is enough; `collect` refuses a second.
    """

    bucket: deque[_Waiting] | None = None
    beside: deque[_Waiting] | None = None  # of a W of which that B may run jobs,
    may_run: int = 0  # and so many of them


def is_open() -> bool:
    """Return whether a linear is to leave its weight gradient to a later W."""
    return _Open.bucket is not None


def defer(
    job: Job,
    begin: Callable[[], None] | None = None,
    *,
    weights: Sequence[Tensor] = (),
    kept: Sequence[Tensor] = (),
) -> None:
    """Leave a job in the open bucket; traces name it after the first of its `weights`.

    `begin` starts what the job waits for itself, a gather from other ranks, and does not wait. It
    is called before the job, and may be called once more. The `kept` tensors are those that the job
    reads: where it runs on another stream than it is left on, that one waits, and memory of theirs
    is not used anew before the job has read it, whatever stream it was allocated on.

    Raises:
        RuntimeError: no bucket is open; ask `is_open` first.
    """
    if _Open.bucket is None:
        raise RuntimeError("no B collects weight gradients for later; ask is_open() first")
    stream = _current_stream()
    tensors = [] if stream is None else list(kept)
    _Open.bucket.append(_Waiting(job, begin, weights, tensors, stream))


def run_beside() -> None:
    """Run a job of the W beside the B that runs now, if there is one and B has time for it.

    For whoever has started, inside B, what has to be waited for.
    """
    if _Open.beside is None or not _Open.may_run:
        return
    _Open.may_run -= 1
    with torch.no_grad():
        first = _Open.beside.popleft()
        _begin(first)
        _compute(first)
        # After the job, unlike in W: in front of it, with CUDA_DEVICE_MAX_CONNECTIONS=1, the job
        # too would wait for what it is to hide, since the gather has to.
        if _Open.may_run:
            _begin(_Open.beside[0])


class WeightJobs:
    """The buckets of jobs that wait for their W, by key: stage and microbatch."""

    def __init__(self) -> None:
        self._buckets: dict[Hashable, deque[_Waiting]] = {}

    @contextmanager
    def collect(
        self, key: Hashable, beside: Hashable | None = None, share: float = 1.0
    ) -> Iterator[None]:
        """Open the bucket of `key` around its B.

        Up to a `share` of the jobs of the key `beside` may run inside (see `run_beside`), in their
        order; `run` has the others left. If B fails, the bucket is dropped with it.

        Raises:
            RuntimeError: another bucket is open, or the key's jobs have not run yet; or there are
                none of the key `beside`.
        """
        if _Open.bucket is not None or key in self._buckets:
            why = "another B is running" if _Open.bucket is not None else "its W has not run yet"
            raise RuntimeError(f"the weight jobs of {key} cannot be collected: {why}")
        bucket: deque[_Waiting] = deque()
        _Open.bucket = bucket
        try:
            if beside is not None:
                self._open_beside(beside, share)
            yield
            self._buckets[key] = bucket
        finally:
            _Open.bucket = _Open.beside = None
            _Open.may_run = 0

    def _open_beside(self, key: Hashable, share: float) -> None:
        bucket = self._buckets.get(key)
        if bucket is None:
            raise RuntimeError(_no_jobs(key))
        _Open.beside, _Open.may_run = bucket, int(share * len(bucket))
        if _Open.may_run:
            with torch.no_grad():
                _begin(bucket[0])

    def run(self, key: Hashable) -> None:
        """Run the key's jobs in the order in which B left them, letting go of each in turn.

        What a job waits for is started before the job in front of it runs, which hides it. Not
        earlier: what is gathered takes memory.

        Raises:
            RuntimeError: B of the key has not run, or its W has run already.
        """
        bucket = self._buckets.pop(key, None)
        if bucket is None:
            raise RuntimeError(_no_jobs(key))
        # Gradients that require grad themselves (vocabulary-parallel cross entropy makes such)
        # would otherwise record a graph, or fail on the accumulation in place.
        with torch.no_grad():
            while bucket:
                first = bucket.popleft()
                _begin(first)
                # In front of the job, since with CUDA_DEVICE_MAX_CONNECTIONS=1 what is launched
                # after a GEMM may start after it.
                if bucket:
                    _begin(bucket[0])
                _compute(first)

    def clear(self) -> None:
        """Drop every job that waits; after a step that failed."""
        self._buckets.clear()


def _compute(waiting: _Waiting) -> None:
    with label(job_text, waiting.weights):
        waiting.job()


def _begin(waiting: _Waiting) -> None:
    _follow(waiting)
    if waiting.begin is not None:
        waiting.begin()


def _follow(waiting: _Waiting) -> None:
    """Have the stream that runs now wait for the one on which the job was left.

    Autograd runs a backward on the stream of its forward, so a layer that Megatron runs beside the
    others, a shared expert, leaves jobs on a stream of its own. What a job keeps may have been
    allocated on yet another, an exchange's, whichever the job was left on. Memory that torch's
    allocator has not handed out itself (an output that Megatron discards and computes again, a
    buffer of NCCL's) cannot be marked so; such is always of the stream that B and W run on.
    """
    running = _current_stream()
    if waiting.stream is not None and running is not None:
        if waiting.stream != running:
            running.wait_stream(waiting.stream)
        for tensor in waiting.kept:
            tensor.record_stream(running)
    waiting.kept.clear()  # the job lets go of them when it can


def _current_stream() -> torch.cuda.Stream | None:
    """Return the stream on which this thread launches, or None where nothing is on a GPU."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


def _no_jobs(key: Hashable) -> str:
    return f"no weight jobs of {key}: its B has not run, or its W already has"


class WeightGradKernel(StrEnum):
    """How a weight gradient, grad_output^T @ input, gets into the sum over the microbatches."""

    MATMUL_ADD = "matmul_add"
    """GEMM in the dtype of the inputs, then an addition: bitwise as Megatron without fusion."""

    ADDMM = "addmm"
    """One GEMM that adds in place; product and sum have the inputs' dtype."""

    ADDMM_WIDE = "addmm_wide"
    """One GEMM of 16-bit inputs that adds to fp32 in place: CUDA, torch 2.10 or later."""

    APEX = "apex"
    """NVIDIA apex's fused_weight_gradient_mlp_cuda, wherever it is installed."""

    TE_GEMM = "te_gemm"
    """Transformer Engine's general_gemm: as ADDMM_WIDE, for torch before 2.10 without apex."""


def weight_grad(grad_output: Tensor, input: Tensor) -> Tensor:
    """Return grad_output^T @ input, [out, in], in the dtype of the two."""
    return _two_dimensional(grad_output).t().matmul(_two_dimensional(input))


def accumulate_weight_grad(
    weight: Tensor,
    grad_output: Tensor,
    input: Tensor,
    kernel: WeightGradKernel = WeightGradKernel.MATMUL_ADD,
) -> None:
    """Add grad_output^T @ input to `weight.main_grad`, or to `weight.grad` if it has none.

    `grad_output` is [..., out], `input` [..., in], with equal leading dimensions, [s, b].
    """
    total: Tensor | None = getattr(weight, "main_grad", None)
    if total is None:
        total = weight.grad
    if total is None:
        weight.grad = weight_grad(grad_output, input).to(weight.dtype)
    else:
        add_product(total, grad_output, input, kernel)


def add_product(
    total: Tensor, grad_output: Tensor, input: Tensor, kernel: WeightGradKernel
) -> None:
    """Add grad_output^T @ input to `total`, whose shape is [out, in]."""
    _KERNELS[kernel](total, _two_dimensional(grad_output), _two_dimensional(input))


@functools.cache
def fused_kernel(device_type: str, total: torch.dtype, inputs: torch.dtype) -> WeightGradKernel:
    """Return the kernel for these dtypes on this device; for gradient_accumulation_fusion.

    Apex's where it is installed, since Megatron's whole backward calls that: so which backward runs
    changes no bit. Else the fastest there is, which a whole backward is then given, too. Its sums
    differ in the last bits from the unfused ones wherever a 16-bit product would have been rounded
    before the addition. The choice is made, and logged, once for all layers.
    """
    kernel = _kernel(device_type, total, inputs)
    logger.info(
        "weight gradients of %s activations are added to %s sums by %s", inputs, total, kernel
    )
    return kernel


def _kernel(device_type: str, total: torch.dtype, inputs: torch.dtype) -> WeightGradKernel:
    if device_type == "cuda" and _apex() is not None:
        return WeightGradKernel.APEX
    if total == inputs:
        return WeightGradKernel.ADDMM
    if device_type == "cuda" and total == torch.float32:
        if _addmm_has_out_dtype():
            return WeightGradKernel.ADDMM_WIDE
        if _te_gemm() is not None:
            return WeightGradKernel.TE_GEMM
    return WeightGradKernel.MATMUL_ADD


def _two_dimensional(tensor: Tensor) -> Tensor:
    # As Megatron's prepare_input_tensors_for_wgrad_compute: the GEMM sees the same strides.
    return tensor.contiguous().view(-1, tensor.shape[-1])


def _matmul_add(total: Tensor, dy: Tensor, x: Tensor) -> None:
    total.add_(weight_grad(dy, x))


def _addmm(total: Tensor, dy: Tensor, x: Tensor) -> None:
    total.addmm_(dy.t(), x)


def _addmm_wide(total: Tensor, dy: Tensor, x: Tensor) -> None:
    torch.addmm(total, dy.t(), x, out_dtype=torch.float32, out=total)


def _apex_accumulate(total: Tensor, dy: Tensor, x: Tensor) -> None:
    apex = _apex()
    if apex is None:
        raise RuntimeError("the weight gradient kernel 'apex' needs fused_weight_gradient_mlp_cuda")
    wide = total.dtype == torch.float32
    add = apex.wgrad_gemm_accum_fp32 if wide else apex.wgrad_gemm_accum_fp16
    add(x, dy, total)


def _te_accumulate(total: Tensor, dy: Tensor, x: Tensor) -> None:
    gemm = _te_gemm()
    if gemm is None:
        raise RuntimeError("the weight gradient kernel 'te_gemm' needs Transformer Engine")
    gemm(x, dy, out_dtype=total.dtype, layout="NT", out=total, accumulate=True, grad=True)


_KERNELS: dict[WeightGradKernel, Callable[[Tensor, Tensor, Tensor], None]] = {
    WeightGradKernel.MATMUL_ADD: _matmul_add,
    WeightGradKernel.ADDMM: _addmm,
    WeightGradKernel.ADDMM_WIDE: _addmm_wide,
    WeightGradKernel.APEX: _apex_accumulate,
    WeightGradKernel.TE_GEMM: _te_accumulate,
}


@functools.cache
def _addmm_has_out_dtype() -> bool:
    # From 2.8 on there is the overload, which at first refuses a sum wider than what it adds.
    if torch.__version__ < (2, 10):  # type: ignore[operator]
        return False
    return "dtype_out" in torch.ops.aten.addmm.overloads()


@functools.cache
def _apex() -> Any | None:
    try:
        return importlib.import_module("fused_weight_gradient_mlp_cuda")
    except ImportError:
        return None


@functools.cache
def _te_gemm() -> Callable[..., Any] | None:
    """Return general_gemm, called with TE's own workspace where it wants one: before TE 2.10."""
    try:
        extensions = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
        gemm: Callable[..., Any] = extensions.general_gemm
        if "workspace" not in inspect.signature(gemm).parameters:
            return gemm
        workspace = importlib.import_module("transformer_engine.pytorch.module.base").get_workspace
    except (ImportError, AttributeError):
        return None
    # Asked for when it is used: the memory is on the GPU, and TE shares it between its layers.
    return lambda x, dy, **options: gemm(x, dy, workspace=workspace(), **options)
