"""Accounting of torch's caching allocator: every storage from allocation to release."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_vshape.rehearsal.scratch import scratch_sizes
from megatron_vshape.rehearsal.work import Work

UNIT = 512
"""Rounding of torch's allocator, in bytes."""

LARGE = 1 << 20
"""Minimum size in bytes for which the allocating code is recorded."""

GEMMS = tuple(getattr(torch.ops.aten, name).default for name in ("mm", "bmm", "addmm", "baddbmm"))
_NO_KERNEL = (
    torch.ops.aten.empty.memory_format,
    *(
        getattr(torch.ops.aten, name).default
        for name in ("empty_like", "new_empty", "new_empty_strided", "empty_strided", "detach")
    ),
)

WORKSPACES = "workspaces"
OUTPUT_LAYER = "output_layer"
"""Module name, in all of Megatron's models, whose GEMM produces logits."""

NEVER = sys.maxsize


@dataclass(slots=True)
class Record:
    """A storage on the GPU: size in bytes, lifetime and purpose."""

    size: int
    born: int  # in events of the ledger
    died: int
    phase: str
    place: str  # the allocating module
    shape: tuple[int, ...]
    what: str = ""  # weights, gradients, optimizer, logits; otherwise an activation
    code: str = ""
    graphed: bool = False  # in the memory pool of CUDA graphs


class PassRecord(NamedTuple):
    """A pass that ran: start and end in seconds of this rank's work, and bytes around it."""

    phase: str
    start: float
    end: float
    did: Work
    before_bytes: int
    most_bytes: int
    after_bytes: int


class Ledger(TorchDispatchMode):
    """Tracks storages that operations return until they are freed; the clock counts events."""

    def __init__(self, cublas_workspace_bytes: int, multiprocessors: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = self.peak_at = self.clock = 0
        self.records: list[Record] = []
        self.curve: list[tuple[float, int, int]] = []
        """(seconds of this rank's work, bytes, clock) at start, peak and end of each pass."""
        self.passes: list[PassRecord] = []
        self.seconds: Callable[[Work], float] = lambda work: 0.0
        self.work = Work()
        self.phase = self.place = ""
        self.operations = 0
        self.graphed = False  # whether allocations now go to the pool of CUDA graphs
        self.pool = self.pool_peak = self.other_peak = 0
        self._has_logits = False
        self._live: dict[int, tuple[Any, Record | None]] = {}
        self._inside = self._device = self._local = self._local_at = 0
        self._handles: set[bool] = set()
        self._beside: tuple[int, ...] = ()
        self._workspace, self._multiprocessors = cublas_workspace_bytes, multiprocessors

    # ---- storages ----

    def add(self, tensor: Tensor, on_host: bool) -> None:
        """Add the tensor's storage, which must be new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = 0 if on_host or self._device == _OUTSIDE else rounded(storage.nbytes())
        record = self._record(size, tuple(tensor.shape)) if size else None
        self._live[key] = (
            weakref.ref(storage, functools.partial(self._free, key)),
            None if on_host else record or _EMPTY,
        )
        self._change(size)

    def _record(self, size: int, shape: tuple[int, ...]) -> Record:
        record = Record(size, self.clock, NEVER, self.phase, self.place, shape)
        record.graphed = self.graphed
        self.pool += size * record.graphed
        if size >= LARGE:
            record.code = _code()
        self.records.append(record)
        return record

    def _free(self, key: int, _: object = None) -> None:
        _, record = self._live.pop(key, (None, None))
        if record is not None and record is not _EMPTY:
            self._end(record)

    def _end(self, record: Record) -> None:
        record.died = self.clock
        self.pool -= record.size * record.graphed
        self._change(-record.size)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Update a storage after its size has changed."""
        reference, record = self._live.get(storage._cdata, (None, None))
        if record is None:
            return
        self._end(record)
        size = rounded(storage.nbytes())
        fresh = self._record(size, record.shape) if size else _EMPTY
        fresh.what = record.what
        self._live[storage._cdata] = reference, fresh
        self._change(size)

    def is_on_host(self, tensor: Tensor) -> bool:
        """Return whether the tensor is in host memory."""
        if not isinstance(tensor, FakeTensor):
            return False
        found = self._live.get(tensor.untyped_storage()._cdata)
        return found is not None and found[1] is None

    def name(self, tensor: Tensor, what: str) -> None:
        """Set the purpose of a storage."""
        found = self._live.get(tensor.untyped_storage()._cdata)
        if found is not None and found[1] is not None and found[1] is not _EMPTY:
            found[1].what = what

    def pass_by(self, *sizes: int) -> None:
        """Count temporary memory of a kernel, allocated in addition to all of its results."""
        if self._inside:
            self._beside += sizes
        if self._inside or not sizes:
            return
        record = self._record(sum(map(rounded, sizes)), ())
        self._change(record.size)
        self._end(record)

    def stay(self, size: int, what: str) -> None:
        """Count permanent memory that no Python tensor owns."""
        self._record(size, ()).what = what
        self._change(size)

    def _change(self, size: int) -> None:
        self.now += size
        self.clock += 1
        if not self._inside:
            self.mark()

    def mark(self) -> None:
        """Update the peak from the current memory."""
        self.pool_peak = max(self.pool_peak, self.pool)
        self.other_peak = max(self.other_peak, self.now - self.pool)
        if self.now > self._local:
            self._local, self._local_at = self.now, self.clock
        if self.now > self.peak:
            self.peak, self.peak_at, self.peak_phase = self.now, self.clock, self.phase
            self.peak_place = self.place

    peak_phase = peak_place = ""

    def held_at(self, clock: int) -> list[Record]:
        """Return the storages that were allocated at this clock."""
        return [each for each in self.records if each.born < clock <= each.died]

    # ---- where things are made ----

    @contextlib.contextmanager
    def kernel(self) -> Iterator[None]:
        """Ignore tensors that are allocated and freed in this context: one fused kernel."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self.mark()
                sizes, self._beside = self._beside, ()
                self.pass_by(*sizes)

    @contextlib.contextmanager
    def on_host(self, on_host: bool = True) -> Iterator[None]:
        """Count factory results in this context as host memory, or as GPU memory."""
        with self._on(_HOST if on_host else _GPU):
            yield

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Count factory results in this context as GPU memory outside torch's allocator."""
        with self._on(_OUTSIDE):
            yield

    @contextlib.contextmanager
    def _on(self, device: int) -> Iterator[None]:
        before, self._device = self._device, device
        try:
            yield
        finally:
            self._device = before

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Set the phase of allocations in this context, and record the memory at both ends."""
        before, self.phase = self.phase, phase
        outer = self._local, self._local_at
        self._local, self._local_at = self.now, self.clock
        begun, earlier, before_bytes = self.seconds(self.work), self.work.copy(), self.now
        self.curve.append((begun, self.now, self.clock))
        try:
            yield
        finally:
            ended = self.seconds(self.work)
            largest = (begun + ended) / 2, self._local, self._local_at
            self.curve += [largest, (ended, self.now, self.clock)]
            did, held = self.work.less(earlier), (before_bytes, self._local, self.now)
            self.passes.append(PassRecord(phase, begun, ended, did, *held))
            self.phase = before
            self._local, self._local_at = max(outer, (self._local, self._local_at))

    def begin_step(self) -> None:
        """Reset work and passes for a new step."""
        self.work = Work()
        self.curve.clear()
        self.passes.clear()

    # ---- work ----

    def product(self, number_format: str, rows: int, inner: int, columns: int, at: int = 1) -> None:
        """Count a GEMM, or a kernel with `at` GEMMs of this size."""
        key = (number_format, rows, inner, columns, at)
        self.work.products[key] = self.work.products.get(key, 0) + 1
        self.work.kernels += 1

    def attention(self, flops: float, number_format: str) -> None:
        """Count the FLOPs of attention."""
        known = self.work.attention_flops
        known[number_format] = known.get(number_format, 0.0) + flops
        self.work.kernels += 1

    def cublas(self) -> None:
        """Count torch's cuBLAS workspaces: one for forward, one for the autograd thread."""
        backward = torch._C._current_graph_task_id() != -1
        if backward not in self._handles:
            self._handles.add(backward)
            self.stay(self._workspace, WORKSPACES)

    def moved(self, *values: Any) -> None:
        """Count a memory-bound kernel with the bytes that it reads and writes."""
        size = sum(each.numel() * each.element_size() for each in tensors_in(values))
        if self.phase == "optimizer":
            self.work.optimizer_bytes += size
        else:
            self.work.bytes_moved += size
        self.work.kernels += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wrapped = next(filter(_is_quantized, types), None)
        if wrapped is not None:  # its inner operations must be counted, too
            with self:
                return wrapped.__torch_dispatch__(func, types, args, kwargs or {})
        try:
            out = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return 0  # torch itself reads a value: as in values.py
        self.operations += 1
        made = [each for each in tensors_in((out,)) if not self._knows(each)]
        on_host = False
        if made:
            on_host = self._lands_on_host(args, kwargs)
            for each in made:
                self.add(each, on_host)
            self._tell_logits(func in GEMMS, made, args)
        if self._inside or on_host:
            return out
        self.pass_by(*scratch_sizes(func, args, out, self._multiprocessors))
        if func in GEMMS:
            self._gemm(args)
        elif (made or func._schema.is_mutable) and func not in _NO_KERNEL:
            self.moved(args, out)
        return out

    def _knows(self, tensor: Tensor) -> bool:
        if not isinstance(tensor, FakeTensor):  # a quantized tensor; its parts are counted
            return True
        return tensor.untyped_storage()._cdata in self._live

    def _lands_on_host(self, args: Any, kwargs: Any) -> bool:
        if self._device:
            return self._device == _HOST
        given = list(tensors_in((*args, *(kwargs or {}).values())))
        return bool(given) and all(map(self.is_on_host, given))

    def _tell_logits(self, product: bool, made: list[Tensor], args: Any) -> None:
        """Mark logits: the result of the output layer's GEMM, and later tensors of its size."""
        at_output = self.place.endswith(OUTPUT_LAYER) or self.phase.startswith("S ")
        if not (product and at_output or self._has_logits):
            return
        sizes = {each.numel() for each in tensors_in(args) if self._is_logits(each)}
        for each in made:
            if (at_output and not sizes) if product else each.numel() in sizes:
                self.name(each, "logits")
                self._has_logits = True

    def _is_logits(self, tensor: Tensor) -> bool:
        if not self._has_logits or not isinstance(tensor, FakeTensor):
            return False
        found = self._live.get(tensor.untyped_storage()._cdata)
        return found is not None and found[1] is not None and found[1].what == "logits"

    def _gemm(self, args: Any) -> None:
        self.cublas()
        *_, left, right = (each for each in args if isinstance(each, Tensor))
        batch = left.shape[0] if left.dim() == 3 else 1
        rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
        if left.dim() == 3:
            self.attention(2.0 * batch * rows * inner * columns, str(left.dtype)[6:])
        else:
            self.product(str(left.dtype).removeprefix("torch."), rows, inner, columns)


_HOST, _GPU, _OUTSIDE = 1, 2, 3
_EMPTY = Record(0, 0, 0, "", "", ())


def _is_quantized(kind: type) -> bool:
    return kind.__module__.startswith("transformer_engine")


def rounded(size: int) -> int:
    """Return the size of the allocator's block for a request."""
    return (size + UNIT - 1) // UNIT * UNIT


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists."""
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from tensors_in(each)


_OURS = ("/megatron_vshape/", "/torch/")


def _code() -> str:
    """Return the line of Megatron or Transformer Engine that allocates: `file:line function`."""
    frame = sys._getframe(3)
    while frame is not None:
        name = frame.f_code.co_filename
        if any(each in name for each in ("megatron", "transformer_engine/")) and not any(
            each in name for each in _OURS
        ):
            short = name.split("/megatron/")[-1].split("transformer_engine/")[-1]
            return f"{short}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def fused(ledger: Ledger, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` as one kernel, as torch.compile does.

    The compiler makes writes to arguments functional: into a new buffer, which is copied back.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = [(each, each._version) for each in args if isinstance(each, Tensor)]
        with ledger.kernel():
            out = function(*args, **kwargs)
        copied = sum(
            each.numel() * each.element_size()
            for each, version in before
            if each._version != version
        )
        if copied:
            ledger.pass_by(copied)
        ledger.moved(args, (out,))
        return out

    return run
