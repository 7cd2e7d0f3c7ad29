"""Accounting of a dry run: its memory and its work.

Memory is every storage of torch's caching allocator, from allocation to release. Work is the GEMMs,
kernels and bytes of every pass.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_vshape.rehearsal.known_operations import (
    Key,
    Operation,
    key_of,
    operation_of,
    scratch_sizes,
)
from megatron_vshape.rehearsal.phases import OPTIMIZER, START, Phase
from megatron_vshape.rehearsal.work import Work

UNIT = 512
"""Rounding of torch's allocator, in bytes."""

LARGE = 1 << 20
"""Minimum size in bytes for which the allocating code is recorded."""

_GEMMS = tuple(getattr(torch.ops.aten, name).default for name in ("mm", "bmm", "addmm", "baddbmm"))
_NO_KERNEL = (
    torch.ops.aten.empty.memory_format,
    *(
        getattr(torch.ops.aten, name).default
        for name in ("empty_like", "new_empty", "new_empty_strided", "empty_strided", "detach")
    ),
)

WORKSPACES = "workspaces"
_OUTPUT_LAYER = "output_layer"
"""Module name, in all of Megatron's models, whose GEMM produces logits."""

NEVER = sys.maxsize


@dataclass(slots=True)
class Record:
    """A storage on the GPU: size in bytes, lifetime and purpose."""

    size: int
    born: int  # in events of the ledger
    died: int
    phase: Phase
    place: str  # the allocating module
    shape: tuple[int, ...]
    what: str = ""  # weights, gradients, optimizer, logits; otherwise an activation
    code: str = ""
    graphed: bool = False  # in the memory pool of CUDA graphs
    fused: bool = False  # within a fused kernel only, so never allocated


class PassRecord(NamedTuple):
    """A pass that ran: start and end in seconds of this rank's work, and bytes around it."""

    phase: Phase
    start: float
    end: float
    did: Work
    before_bytes: int
    most_bytes: int
    after_bytes: int
    clock: int  # at the start
    work_before: Work  # of the step before the pass


class Ledger(TorchDispatchMode):
    """Tracks storages that operations return until they are freed; the clock counts events.

    It counts the work of the operations in `work`; `exchanges` adds the collectives.
    """

    def __init__(self, cublas_workspace_bytes: int, multiprocessors: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocated_bytes = self.peak_bytes = self.peak_at = self.clock = 0
        self.records: list[Record] = []
        self.emptied: list[int] = []  # clock of each call that empties torch's cache
        self.step_start = 0  # clock
        self.curve: list[tuple[float, int, int]] = []
        """(seconds of this rank's work, bytes, clock) at start, peak and end of each pass."""
        self.passes: list[PassRecord] = []
        self.estimate_seconds: Callable[[Work], float] = lambda work: 0.0
        self.work = Work()
        self.phase, self.place = START, ""
        self.graphed = False  # whether allocations now go to the pool of CUDA graphs
        self.pool = self.pool_peak = self.other_peak = 0
        self._has_logits = False
        self._known: dict[Key, Operation] = {}
        self._copies: dict[int, list[Record]] = {}
        # None: in host memory; _EMPTY: on the GPU without memory of torch's allocator.
        self._live: dict[int, tuple[Any, Record | None]] = {}
        self._inside = self._device = self._phase_peak_bytes = self._phase_peak_at = 0
        self._handles: set[bool] = set()
        self._temporary_sizes: tuple[int, ...] = ()
        self._kernel_start = 0  # number of records at the start of the current fused kernel
        self._workspace, self._multiprocessors = cublas_workspace_bytes, multiprocessors

    # ---- storages ----

    def add(self, tensor: Tensor, on_host: bool) -> None:
        """Add the tensor's storage, which must be new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        elsewhere = on_host or self._device == _OUTSIDE or tensor.is_meta
        size = 0 if elsewhere else rounded(storage.nbytes())
        record = self._record(size, tuple(tensor.shape)) if size else None
        self._live[key] = (
            # The allocator frees at the same moment: when the last reference to the storage is
            # gone.
            weakref.ref(storage, functools.partial(self._free, key)),
            None if on_host else record or _EMPTY,
        )
        self._change(size)

    def _record(self, size: int, shape: tuple[int, ...]) -> Record:
        # Born before its event, which `_change` counts: alive if born < clock <= died.
        record = Record(size, self.clock, NEVER, self.phase, self.place, shape)
        record.graphed = self.graphed
        self.pool += size * record.graphed
        if size >= LARGE:
            record.code = _allocating_line()
        self.records.append(record)
        return record

    def _free(self, key: int, _: object = None) -> None:
        _, record = self._live.pop(key, (None, None))
        if record is not None and record is not _EMPTY:
            self._end_record(record)

    def repeat(self, record: Record, times: int) -> None:
        """Add copies of a live storage, which are freed together with it."""
        for _ in range(times):
            copy = self._record(record.size, record.shape)
            copy.phase, copy.place, copy.code = record.phase, record.place, record.code
            copy.what = record.what
            self._copies.setdefault(id(record), []).append(copy)
            self._change(copy.size)

    def _end_record(self, record: Record) -> None:
        for copy in self._copies.pop(id(record), ()):
            self._end_record(copy)
        record.died = self.clock
        self.pool -= record.size * record.graphed
        self._change(-record.size)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Update a storage after its size has changed."""
        reference, record = self._live.get(storage._cdata, (None, None))
        if record is None:
            return
        self._end_record(record)
        size = rounded(storage.nbytes())
        # Another record, because the allocator frees the old block and allocates a new one.
        fresh = self._record(size, record.shape) if size else _EMPTY
        fresh.what = record.what
        self._live[storage._cdata] = reference, fresh
        self._change(size)

    def is_on_host(self, tensor: Tensor) -> bool:
        """Return whether the tensor is in host memory."""
        if not isinstance(tensor, FakeTensor):
            return False
        entry = self._live.get(tensor.untyped_storage()._cdata)
        return entry is not None and entry[1] is None

    def name(self, tensor: Tensor, what: str) -> None:
        """Set the purpose of a storage."""
        entry = self._live.get(tensor.untyped_storage()._cdata)
        if entry is not None and entry[1] is not None and entry[1] is not _EMPTY:
            entry[1].what = what

    def add_temporary(self, *sizes: int) -> None:
        """Count temporary memory of a kernel, allocated in addition to all of its results."""
        # Inside a fused kernel they count at its end, together with its results.
        if self._inside:
            self._temporary_sizes += sizes
        if self._inside or not sizes:
            return
        # Allocated and freed at once: they affect the peak and the replay of the allocator.
        records = [self._record(rounded(size), ()) for size in sizes]
        self._change(sum(record.size for record in records))
        for record in records:
            self._end_record(record)

    def add_permanent(self, size: int, what: str) -> None:
        """Count permanent memory that no Python tensor owns."""
        self._record(size, ()).what = what
        self._change(size)

    def _change(self, size: int) -> None:
        self.allocated_bytes += size
        self.clock += 1
        # Most tensors inside a fused kernel never exist, so only its end sets a peak.
        if not self._inside:
            self.mark()

    def mark(self) -> None:
        """Update the peak from the current memory."""
        self.pool_peak = max(self.pool_peak, self.pool)
        self.other_peak = max(self.other_peak, self.allocated_bytes - self.pool)
        if self.allocated_bytes > self._phase_peak_bytes:
            self._phase_peak_bytes, self._phase_peak_at = self.allocated_bytes, self.clock
        if self.allocated_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_at = self.allocated_bytes, self.clock
            self.peak_phase, self.peak_place = self.phase, self.place

    peak_phase, peak_place = START, ""

    def held_at(self, clock: int) -> list[Record]:
        """Return the storages that were allocated at this clock."""
        return [record for record in self.records if record.born < clock <= record.died]

    # ---- device and phase of allocations ----

    def kernel(self) -> contextlib.AbstractContextManager[None]:
        """Ignore tensors that are allocated and freed in this context: one fused kernel."""
        return _Kernel(self)

    def _end_kernel(self) -> None:
        self._inside -= 1
        if not self._inside:
            for record in self.records[self._kernel_start :]:
                # Registers or shared memory in the real kernel; its results outlive it.
                record.fused = record.died < NEVER
            self.mark()
            sizes, self._temporary_sizes = self._temporary_sizes, ()
            self.add_temporary(*sizes)

    def on_host(self, on_host: bool = True) -> contextlib.AbstractContextManager[None]:
        """Count factory results in this context as host memory, or as GPU memory."""
        return _OnDevice(self, _HOST if on_host else _GPU)

    def outside(self) -> contextlib.AbstractContextManager[None]:
        """Count factory results in this context as GPU memory outside torch's allocator."""
        return _OnDevice(self, _OUTSIDE)

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Set the phase of allocations in this context, and record the memory at both ends."""
        outer_phase, self.phase = self.phase, phase
        outer = self._phase_peak_bytes, self._phase_peak_at
        # The phase's peak starts from the current memory.
        self._phase_peak_bytes, self._phase_peak_at = self.allocated_bytes, self.clock
        start_seconds, earlier = self.estimate_seconds(self.work), self.work.copy()
        before_bytes, clock = self.allocated_bytes, self.clock
        self.curve.append((start_seconds, self.allocated_bytes, self.clock))
        try:
            yield
        finally:
            end_seconds = self.estimate_seconds(self.work)
            largest = (start_seconds + end_seconds) / 2, self._phase_peak_bytes, self._phase_peak_at
            self.curve += [largest, (end_seconds, self.allocated_bytes, self.clock)]
            did = self.work.minus(earlier)
            memory = before_bytes, self._phase_peak_bytes, self.allocated_bytes
            self.passes.append(
                PassRecord(phase, start_seconds, end_seconds, did, *memory, clock, earlier)
            )
            self.phase = outer_phase
            # Phases are nested: the peak of the outer one includes this one's.
            self._phase_peak_bytes, self._phase_peak_at = max(
                outer, (self._phase_peak_bytes, self._phase_peak_at)
            )

    def begin_step(self) -> None:
        """Reset work and passes for a new step."""
        self.work, self.step_start = Work(), self.clock
        self.curve.clear()
        self.passes.clear()

    # ---- work ----

    def count_gemm(
        self, number_format: str, rows: int, inner: int, columns: int, gemms: int = 1
    ) -> None:
        """Count a GEMM, or a kernel with `gemms` GEMMs of this size."""
        key = (number_format, rows, inner, columns, gemms)
        self.work.products[key] = self.work.products.get(key, 0) + 1
        self.work.captured_gemms += self.graphed
        self._count_kernel()

    def count_attention(self, flops: float, number_format: str) -> None:
        """Count the FLOPs of attention."""
        flops_by_format = self.work.attention_flops
        flops_by_format[number_format] = flops_by_format.get(number_format, 0.0) + flops
        self._count_kernel()

    def add_cublas_workspace(self) -> None:
        """Count torch's cuBLAS workspaces: one for forward, one for the autograd thread."""
        # On a GPU, autograd runs in another thread, with a cuBLAS handle and workspace per thread.
        backward = torch._C._current_graph_task_id() != -1
        if backward not in self._handles:
            self._handles.add(backward)
            self.add_permanent(self._workspace, WORKSPACES)

    def moved(self, *values: Any) -> None:
        """Count a memory-bound kernel with the bytes that it reads and writes."""
        self._count_traffic(_bytes_of(values))

    def _count_traffic(self, size: int) -> None:
        if self.phase is OPTIMIZER:
            self.work.optimizer_bytes += size
        else:
            self.work.bytes_moved += size
        self._count_kernel()

    def _count_kernel(self) -> None:
        self.work.kernels += 1
        self.work.captured += self.graphed

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from wrapping the function below: nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # most calls: autograd reads it
            return _META if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        wrapped = next(
            (
                tensor_type
                for tensor_type in types
                if tensor_type not in _FAKE
                and tensor_type.__module__.startswith("transformer_engine")
            ),
            None,
        )
        if wrapped is not None:  # its inner operations must be counted, too
            # Modes are off inside their dispatch function.
            with self:
                return wrapped.__torch_dispatch__(func, types, args, kwargs or {})
        key = key_of(func, args, kwargs)
        # Without a key, an argument such as `out` or a constant matters: torch infers each call.
        operation = self._known.get(key) if key is not None else None
        if operation is None:
            return self._infer(func, args, kwargs, key)
        out, new_tensors = operation.make(func, args)
        on_host = bool(new_tensors) and self._add_all(func, new_tensors, args, kwargs)
        if not (self._inside or on_host):
            self._count_operation(
                func, args, operation.scratch, operation.moved_bytes, bool(new_tensors)
            )
        return out

    def _infer(self, func: Any, args: Any, kwargs: Any, key: Key | None) -> Any:
        """Have torch infer the results of an operation, count it, and remember its results."""
        try:
            out = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return 0  # torch itself reads a value: as `device` answers
        scratch = scratch_sizes(func, args, out, self._multiprocessors)
        moved = _bytes_of((args, out))
        if key is not None:
            operation = operation_of(func, args, out, moved, scratch)
            if operation is not None:
                self._known[key] = operation
        new_tensors: list[Tensor] = [
            tensor
            for tensor in tensors_in((out,))
            # Of a quantized tensor, which is no FakeTensor, the parts are counted.
            if isinstance(tensor, FakeTensor) and tensor.untyped_storage()._cdata not in self._live
        ]
        on_host = bool(new_tensors) and self._add_all(func, new_tensors, args, kwargs)
        if not (self._inside or on_host):
            self._count_operation(func, args, scratch, moved, bool(new_tensors))
        return out

    def _add_all(self, func: Any, new_tensors: list[Tensor], args: Any, kwargs: Any) -> bool:
        """Add the new storages of an operation, and return whether they are in host memory."""
        on_host = self._returns_host_tensors(args, kwargs)
        for tensor in new_tensors:
            self.add(tensor, on_host)
        self._mark_logits(func in _GEMMS, new_tensors, args)
        return on_host

    def _count_operation(
        self, func: Any, args: Any, scratch: tuple[int, ...], moved_bytes: int, makes: bool
    ) -> None:
        """Count the kernel of an operation."""
        self.add_temporary(*scratch)
        if func in _GEMMS:
            self._gemm(args)
        # Neither new storage nor a write: a view, which launches no kernel.
        elif (makes or func._schema.is_mutable) and func not in _NO_KERNEL:
            self._count_traffic(moved_bytes)

    def _returns_host_tensors(self, args: Any, kwargs: Any) -> bool:
        if self._device:
            return self._device == _HOST
        # As in torch, an operation on host tensors alone has its results on the host.
        tensors = list(tensors_in((*args, *(kwargs or {}).values())))
        return bool(tensors) and all(map(self.is_on_host, tensors))

    def _mark_logits(self, is_gemm: bool, new_tensors: list[Tensor], args: Any) -> None:
        """Mark logits: the result of the output layer's GEMM, and later tensors of its size."""
        at_output = self.place.endswith(_OUTPUT_LAYER) or self.phase.kind == "S"
        if not (is_gemm and at_output or self._has_logits):
            return
        # A GEMM with logits as input is the output layer's backward: its results are no logits.
        sizes = {tensor.numel() for tensor in tensors_in(args) if self._is_logits(tensor)}
        for tensor in new_tensors:
            if (at_output and not sizes) if is_gemm else tensor.numel() in sizes:
                self.name(tensor, "logits")
                self._has_logits = True

    def _is_logits(self, tensor: Tensor) -> bool:
        if not self._has_logits or not isinstance(tensor, FakeTensor):
            return False
        entry = self._live.get(tensor.untyped_storage()._cdata)
        return entry is not None and entry[1] is not None and entry[1].what == "logits"

    def _gemm(self, args: Any) -> None:
        self.add_cublas_workspace()
        # `addmm` and `baddbmm` have a bias first.
        *_, lhs, rhs = (argument for argument in args if isinstance(argument, Tensor))
        batch = lhs.shape[0] if lhs.dim() == 3 else 1
        rows, inner, columns = lhs.shape[-2], lhs.shape[-1], rhs.shape[-1]
        if lhs.dim() == 3:
            # In Megatron's models, batched GEMMs are those of unfused attention.
            self.count_attention(2.0 * batch * rows * inner * columns, str(lhs.dtype)[6:])
        else:
            self.count_gemm(str(lhs.dtype).removeprefix("torch."), rows, inner, columns)


_HOST, _GPU, _OUTSIDE = 1, 2, 3
_DEVICE, _META = torch.ops.prim.device.default, torch.device("meta")
_FAKE = (FakeTensor, Tensor)
_EMPTY = Record(0, 0, 0, START, "", ())


class _Kernel(contextlib.AbstractContextManager[None]):
    """The context of `Ledger.kernel`; a generator would cost more than many a kernel."""

    __slots__ = ("_ledger",)

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __enter__(self) -> None:
        if not self._ledger._inside:
            self._ledger._kernel_start = len(self._ledger.records)
        self._ledger._inside += 1

    def __exit__(self, *exception: object) -> None:
        self._ledger._end_kernel()


class _OnDevice(contextlib.AbstractContextManager[None]):
    """The context of `Ledger.on_host` and `Ledger.outside`."""

    __slots__ = ("_before", "_device", "_ledger")

    def __init__(self, ledger: Ledger, device: int) -> None:
        self._ledger, self._device = ledger, device

    def __enter__(self) -> None:
        self._before, self._ledger._device = self._ledger._device, self._device

    def __exit__(self, *exception: object) -> None:
        self._ledger._device = self._before


def rounded(size: int) -> int:
    """Return the size of the allocator's block for a request."""
    return (size + UNIT - 1) // UNIT * UNIT


def _bytes_of(values: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(values))


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


_OURS = ("/megatron_vshape/", "/torch/")


def _allocating_line() -> str:
    """Return the line of Megatron or Transformer Engine that allocates: `file:line function`."""
    # Past this function, `_record` and `add`.
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        short = _library_file(frame.f_code.co_filename)
        if short:
            return f"{short}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


@functools.cache
def _library_file(name: str) -> str:
    """Return the path of a file within Megatron or Transformer Engine, or an empty string."""
    if any(part in name for part in _OURS):
        return ""
    if not any(part in name for part in ("megatron", "transformer_engine/")):
        return ""
    return name.split("/megatron/")[-1].split("transformer_engine/")[-1]


def fused(ledger: Ledger, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` as one kernel, as torch.compile does.

    The compiler makes writes to arguments functional: into a new buffer, which is copied back.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        versions = [(tensor, tensor._version) for tensor in args if isinstance(tensor, Tensor)]
        with ledger.kernel():
            out = function(*args, **kwargs)
        copied = sum(
            tensor.numel() * tensor.element_size()
            for tensor, version in versions
            if tensor._version != version
        )
        if copied:
            ledger.add_temporary(copied)
        ledger.moved(args, (out,))
        return out

    return run
