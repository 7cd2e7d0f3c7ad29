"""Deferred weight gradients: B stores jobs, W runs them.

A bucket is open during B. Every linear layer whose backward runs meanwhile stores a job instead of
computing its weight gradient. W runs the jobs of the bucket in order. Without an open bucket (a
full backward), the layer computes its weight gradient at once.

With sequence parallelism, a job saves a shard and all-gathers the rest when it runs
(`GatheringJob`). Passes and jobs have labels in traces of torch's profiler and Nsight Systems: a
label is a `record_function`, which torch emits as an NVTX range under Megatron's `--profile`.
"""

import functools
import importlib
import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._autograd import _profiler_enabled
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.profiler import record_function

logger = logging.getLogger(__name__)

Job = Callable[[], None]
"""Compute and accumulate one weight gradient; references only the tensors that it needs."""


class _Waiting(NamedTuple):
    """A job in its bucket."""

    job: Job
    begin: Callable[[], None] | None  # starts the job's all-gather; a second call does nothing
    weights: Sequence[Tensor]
    tensors: list[Tensor]  # tensors to record on the job's stream, once known
    # On which the job was stored; its tensors may come from others.
    stream: torch.cuda.Stream | None


class _Open:
    """The bucket of the running B.

    This is module state because a linear layer has no other access to its bucket. It is neither a
    ContextVar nor thread-local: autograd runs the backward of CUDA tensors in a separate thread,
    where those would be empty. One process runs one pass at a time, so one attribute is enough;
    `collect` rejects a second bucket.
    """

    bucket: deque[_Waiting] | None = None
    beside: deque[_Waiting] | None = None  # bucket of a W whose jobs may overlap with this B
    may_run: int = 0  # maximum number of these jobs


def is_open() -> bool:
    """Return whether a linear layer must defer its weight gradient to W."""
    return _Open.bucket is not None


def defer(
    job: Job,
    begin: Callable[[], None] | None = None,
    *,
    weights: Sequence[Tensor] = (),
    tensors: Sequence[Tensor] = (),
) -> None:
    """Store a job in the open bucket.

    Args:
        job: computes one weight gradient.
        begin: starts the job's all-gather without waiting. It is called before the job, and may be
            called twice.
        weights: the weights of the job; traces use the name of the first.
        tensors: those that the job reads. If the job runs on another stream, that stream waits
            for this one. The tensors' memory is not reused before the job has read it, whichever
            stream allocated it.

    Raises:
        RuntimeError: no bucket is open; check `is_open` first.
    """
    if _Open.bucket is None:
        raise RuntimeError("no B collects weight gradients for later; ask is_open() first")
    stream = _current_stream()
    recorded = [] if stream is None else list(tensors)
    _Open.bucket.append(_Waiting(job, begin, weights, recorded, stream))


def run_beside() -> None:
    """Run one job of the overlapped W within the running B, if any is left for this B.

    Call this inside B after the start of a communication that the job can hide.
    """
    if _Open.beside is None or not _Open.may_run:
        return
    _Open.may_run -= 1
    with torch.no_grad():
        # In order, so that sums of tied or repeated weights do not depend on the overlap.
        first = _Open.beside.popleft()
        _begin(first)
        _compute(first)
        # After the job, not before it as in W: the gather queues behind the communication in
        # progress. With CUDA_DEVICE_MAX_CONNECTIONS=1, a job launched after the gather would queue
        # as well, instead of hiding the communication.
        if _Open.may_run:
            _begin(_Open.beside[0])


class WeightJobs:
    """Buckets of deferred jobs, by key: stage and microbatch."""

    def __init__(self) -> None:
        self._buckets: dict[Hashable, deque[_Waiting]] = {}

    @contextmanager
    def collect(
        self, key: Hashable, beside: Hashable | None = None, share: float = 1.0
    ) -> Iterator[None]:
        """Open the bucket of `key` for its B.

        Up to a `share` of the jobs of the key `beside` may run inside, in order (see `run_beside`);
        `run` runs the rest. If B fails, its bucket is dropped.

        Raises:
            RuntimeError: another bucket is open, the jobs of `key` have not run yet, or `beside`
                has no jobs.
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
            # Only after a complete B: a failed one leaves no jobs for a later W.
            self._buckets[key] = bucket
        finally:
            _Open.bucket = _Open.beside = None
            _Open.may_run = 0

    def _open_beside(self, key: Hashable, share: float) -> None:
        bucket = self._buckets.get(key)
        if bucket is None:
            raise RuntimeError(_no_jobs(key))
        # Rounded down: one job more would delay the reader of this B.
        _Open.beside, _Open.may_run = bucket, int(share * len(bucket))
        if _Open.may_run:
            with torch.no_grad():
                _begin(bucket[0])

    def run(self, key: Hashable) -> None:
        """Run the jobs of the key in the order in which B stored them, and free each after it ran.

        The all-gather of a job starts before the previous job runs, which hides it. It does not
        start earlier, because the gathered tensor requires memory.

        Raises:
            RuntimeError: B of the key has not run, or its W has run already.
        """
        bucket = self._buckets.pop(key, None)
        if bucket is None:
            raise RuntimeError(_no_jobs(key))
        # Gradients that require grad would otherwise record a graph, or fail at the in-place
        # accumulation.
        with torch.no_grad():
            while bucket:
                first = bucket.popleft()
                _begin(first)
                # Before the job: with CUDA_DEVICE_MAX_CONNECTIONS=1, a kernel launched after a GEMM
                # may start only after it.
                if bucket:
                    _begin(bucket[0])
                _compute(first)

    def clear(self) -> None:
        """Drop all jobs, after a failed step."""
        self._buckets.clear()


def _compute(waiting_job: _Waiting) -> None:
    with label(job_text, waiting_job.weights):
        waiting_job.job()


def _begin(waiting_job: _Waiting) -> None:
    """Start the all-gather of a job, after the stream on which the job was stored.

    Autograd runs a backward on the stream of its forward. So a layer that Megatron overlaps with
    others (shared experts) stores jobs on a separate stream. A job's tensors may come from a third
    stream, such as that of an all-to-all. Memory that torch's allocator has not allocated directly
    (an output that Megatron discards and recomputes, a buffer of NCCL) cannot be recorded on a
    stream; such memory always belongs to the stream of B and W.
    """
    running = _current_stream()
    if waiting_job.stream is not None and running is not None:
        if waiting_job.stream != running:
            running.wait_stream(waiting_job.stream)
        for tensor in waiting_job.tensors:
            tensor.record_stream(running)
    waiting_job.tensors.clear()  # the job frees them
    if waiting_job.begin is not None:
        waiting_job.begin()


def _current_stream() -> torch.cuda.Stream | None:
    """Return the stream on which this thread launches; None without a GPU."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


def _no_jobs(key: Hashable) -> str:
    return f"no weight jobs of {key}: its B has not run, or its W already has"


class WeightGradKernel(StrEnum):
    """Implementation of the accumulation of a weight gradient, grad_output^T @ input."""

    MATMUL_ADD = "matmul_add"
    """GEMM in the inputs' dtype, then an addition: bitwise equal to Megatron without fusion."""

    ADDMM = "addmm"
    """One GEMM that accumulates in place; the GEMM and the sum have the inputs' dtype."""

    ADDMM_WIDE = "addmm_wide"
    """One GEMM of 16-bit inputs that accumulates to fp32 in place: CUDA, torch 2.10 or later."""

    APEX = "apex"
    """NVIDIA apex's fused_weight_gradient_mlp_cuda, if installed."""

    TE_GEMM = "te_gemm"
    """Transformer Engine's general_gemm: as ADDMM_WIDE, for torch before 2.10 without apex."""


def weight_grad(grad_output: Tensor, input: Tensor) -> Tensor:
    """Return grad_output^T @ input, [out, in], in the inputs' dtype."""
    return _two_dimensional(grad_output).t().matmul(_two_dimensional(input))


def accumulate_weight_grad(
    weight: Tensor,
    grad_output: Tensor,
    input: Tensor,
    kernel: WeightGradKernel = WeightGradKernel.MATMUL_ADD,
) -> None:
    """Add grad_output^T @ input to `weight.main_grad`, or to `weight.grad` if it has none.

    `grad_output` is [..., out] and `input` is [..., in], with equal leading dimensions, [s, b].
    """
    # Megatron's DDP accumulates in `main_grad`; without it, gradients are in `grad`.
    total: Tensor | None = getattr(weight, "main_grad", None)
    if total is None:
        total = weight.grad
    if total is None:
        weight.grad = weight_grad(grad_output, input).to(weight.dtype)
    else:
        _KERNELS[kernel](total, _two_dimensional(grad_output), _two_dimensional(input))


@functools.cache
def fused_kernel(device_type: str, total: torch.dtype, inputs: torch.dtype) -> WeightGradKernel:
    """Choose the kernel for gradient_accumulation_fusion with these dtypes on this device.

    If apex is installed, it is used, because Megatron's full backward uses it: so split and full
    backward are bitwise equal. Otherwise the fastest kernel is used, for full backwards too. Fused
    sums differ in the last bits from unfused sums if a 16-bit result would be rounded before the
    addition. The choice is made and logged once for all layers.
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
    # As in Megatron's prepare_input_tensors_for_wgrad_compute, for a GEMM with the same strides.
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
    # The overload exists since 2.8, but at first it rejected a sum wider than the inputs.
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
    try:
        extensions = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
        gemm: Callable[..., Any] = extensions.general_gemm
    except (ImportError, AttributeError):
        return None
    return gemm


def is_plain(tensor: Any) -> bool:
    """Return whether the data of a tensor is in its storage; a fake tensor has none to miss."""
    return type(tensor) in (Tensor, FakeTensor)


def plain_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the plain tensors of tensors, quantized tensors and nested lists of both.

    For a quantized tensor this includes its scales, which most `get_data_tensors` omit.
    """
    if isinstance(value, list | tuple):
        for part in value:
            yield from plain_tensors(part)
    elif hasattr(value, "get_data_tensors"):
        data = value.get_data_tensors()
        # The attributes include the data again, so duplicates are removed by identity.
        parts = [*(data if isinstance(data, list | tuple) else [data]), *vars(value).values()]
        yield from plain_tensors(list({id(part): part for part in parts}.values()))
    elif isinstance(value, Tensor):
        yield value


@dataclass(eq=False)
class GatheringJob:
    """All-gather some tensors over their groups, then compute with all of them.

    The all-gather may start while the previous job computes (see `WeightJobs.run`). So two gathered
    tensors are alive at a time, each in separate memory: in one shared buffer, as Megatron uses,
    the second would overwrite the first while its GEMM still reads.
    """

    compute: Callable[..., None]
    tensors: list[Any]  # arguments; a tensor to gather is this rank's shard along dimension 0
    groups: Sequence[dist.ProcessGroup | None]  # of each tensor; None: not gathered
    _has_begun: bool = False
    _under_way: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    def begin(self) -> None:
        """Start the all-gathers once, without waiting; collective over the groups."""
        if self._has_begun:
            return
        self._has_begun = True
        for index, group in enumerate(self.groups):
            if group is not None:
                part = self.tensors[index]
                gathered = part.new_empty(part.shape[0] * group.size(), *part.shape[1:])
                work = dist.all_gather_into_tensor(gathered, part, group=group, async_op=True)
                if work is None:
                    raise RuntimeError("a weight job gathers over a group that this rank is not in")
                self._under_way.append((work, part))  # alive until the all-gather ends
                self.tensors[index] = gathered

    def __call__(self) -> None:
        """Wait for the all-gathers and compute."""
        self.begin()
        for work, _ in self._under_way:
            work.wait()
        self._under_way = []
        self.compute(*self.tensors)


_NOTHING = nullcontext()
_NAME = "vshape_name"


def label(text_of: Callable[..., str], *args: object) -> AbstractContextManager[object]:
    """Return a context that the profiler records under the name `text_of(*args)`.

    The name is formatted only while a profiler records: `record_function` costs microseconds even
    without a profiler, this check well under one.
    """
    if _profiler_enabled():
        return record_function(text_of(*args))
    return _NOTHING


def name_weights(model: nn.Module) -> None:
    """Store the names of a model's weights for `job_text`."""
    for name, parameter in model.named_parameters():
        setattr(parameter, _NAME, name.removesuffix(".weight"))


def job_text(weights: Sequence[Tensor]) -> str:
    """Return the label of a weight-gradient job: the name of its first weight, or the shape."""
    names = (getattr(weight, _NAME, "x".join(map(str, weight.shape))) for weight in weights)
    return f"job {next(names, '')}".rstrip()
