"""CPU mode: train an unmodified Megatron-Core on CPU tensors over gloo, on machines without a GPU.

Megatron requests "cuda" by name in about two hundred places. `install` redirects these requests to
the CPU: tensors are allocated on the CPU, the device's random generator is that of the CPU, and
streams and `synchronize` do nothing. All results are computed, none is faked.

Three values are placeholders, because a CPU has no such values: the allocator's statistics are
zero, the compute capability is (0, 0), and `torch.compile` returns its argument (to avoid minutes
of C++ builds).

Not supported: Transformer Engine, fp8, CUDA graphs, memory pools, and features that require NCCL.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.nvtx
import torch.cuda.random
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from megatron_vshape.mcore.hook import Replaced

# A TorchFunctionMode would be one hook instead of these thirty. But torch disables it while
# backward() runs, so it would miss a device="cuda" inside a custom autograd.Function.
FACTORIES = (
    "arange as_tensor asarray empty empty_like empty_strided eye full full_like linspace logspace "
    "ones ones_like rand rand_like randint randint_like randn randn_like randperm scalar_tensor "
    "tensor tril_indices triu_indices zeros zeros_like"
).split()
TENSOR_FACTORIES = "new_empty new_full new_ones new_tensor new_zeros".split()
_LEGACY_TYPES = "BFloat16Tensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor".split()
_NOTHING_TO_DO = (
    "empty_cache ipc_collect reset_peak_memory_stats set_device set_stream synchronize"
).split()
_BYTE_COUNTS = "max_memory_allocated max_memory_reserved memory_allocated memory_reserved".split()


_Replacement = tuple[Any, str, Any]
"""Owner, attribute name, and the replacement while the mode is on."""

# The mode changes the process-wide torch module, so the record of originals is process-wide too.
replaced = Replaced()


def install() -> bool:
    """Enable the CPU mode and return True; if torch finds a GPU, do nothing and return False.

    Call this before Megatron is imported, because Megatron copies some of torch's functions on
    import.

    Raises:
        RuntimeError: Megatron has been imported already.
    """
    if replaced:
        return True
    if torch.cuda.is_available():
        return False
    _refuse_if_megatron_came_first()
    for replacement in _replacements():
        replaced.put(*replacement)
    return True


def _refuse_if_megatron_came_first() -> None:
    random = sys.modules.get("megatron.core.tensor_parallel.random")
    # After an earlier install, Megatron has copied the replacements, which still work.
    if random is not None and random._lazy_call is not _call_now:
        raise RuntimeError(
            "the CPU mode was asked for after megatron.core had been imported, and would only half "
            "work: call megatron_vshape.mcore.cpu.install() before the first import of megatron"
        )


def _replacements() -> Iterator[_Replacement]:
    yield from _identity()
    yield from _synchronisation()
    yield from _statistics()
    yield from _random_generator()
    yield from _tensors()
    yield torch, "compile", _eager
    # torch compares operations by identity in batch_isend_irecv, so both names must be the same
    # function.
    isend = _isend_of_an_alias(c10d.isend)
    yield c10d, "isend", isend
    yield dist, "isend", isend
    all_to_all = _all_to_all_of_lists(c10d.all_to_all_single)
    yield c10d, "all_to_all_single", all_to_all
    yield dist, "all_to_all_single", all_to_all
    gloo = dist.ProcessGroupGloo
    yield gloo, "__init__", _with_one_worker(gloo, gloo.__init__)


def _identity() -> Iterator[_Replacement]:
    cuda = torch.cuda
    yield cuda, "is_available", _available_to_megatron(cuda.is_available)
    # Megatron builds its process groups only if there are devices, and requires one per local
    # rank.
    yield cuda, "device_count", lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    yield cuda, "current_device", lambda: 0
    yield cuda, "get_device_name", lambda device=None: "cpu"
    yield cuda, "get_device_capability", lambda device=None: (0, 0)
    yield cuda, "get_device_properties", lambda device=None: _properties()
    for name in _LEGACY_TYPES:  # Megatron only tests `isinstance` with them
        yield cuda, name, getattr(torch, name)


def _synchronisation() -> Iterator[_Replacement]:
    cuda = torch.cuda
    for name in _NOTHING_TO_DO:
        yield cuda, name, _no_op()
    yield cuda, "Stream", _Stream
    yield cuda, "Event", _Event
    yield cuda, "stream", lambda stream: contextlib.nullcontext()
    yield cuda, "current_stream", lambda device=None: _Stream()
    yield cuda, "default_stream", lambda device=None: _Stream()
    yield cuda, "is_current_stream_capturing", lambda: False
    yield cuda.nvtx, "range_push", _no_op()
    yield cuda.nvtx, "range_pop", _no_op()


def _statistics() -> Iterator[_Replacement]:
    for name in _BYTE_COUNTS:
        yield torch.cuda, name, lambda device=None: 0
    yield torch.cuda, "memory_stats", lambda device=None: defaultdict(int)
    yield torch.cuda, "mem_get_info", lambda device=None: _free_and_total_bytes()


def _random_generator() -> Iterator[_Replacement]:
    cuda, generator = torch.cuda, torch.default_generator

    def get_state(device: object = "cuda") -> torch.Tensor:
        return generator.get_state()

    def set_state(state: torch.Tensor, device: object = "cuda") -> None:
        generator.set_state(state)

    for module in (cuda, cuda.random):
        yield module, "get_rng_state", get_state
        yield module, "set_rng_state", set_state
    yield cuda, "default_generators", (generator,)
    yield cuda, "manual_seed", lambda seed: generator.manual_seed(int(seed))
    # torch.manual_seed calls this function after it has seeded the CPU's generator itself.
    yield cuda, "manual_seed_all", _no_op()
    yield cuda, "_lazy_init", _no_op()
    # torch queues these calls until CUDA is initialized, which never happens here.
    yield cuda, "_lazy_call", _call_now


def _tensors() -> Iterator[_Replacement]:
    for name in FACTORIES:
        yield torch, name, _made_on_cpu(getattr(torch, name))
    for name in TENSOR_FACTORIES:
        yield torch.Tensor, name, _made_on_cpu(getattr(torch.Tensor, name))
    yield torch.Tensor, "to", _moved_to_cpu(torch.Tensor.to)
    yield torch.Tensor, "type", _typed_as_on_gpu(torch.Tensor.type)
    yield torch.Tensor, "cuda", lambda self, *args, **kwargs: self
    # A copy, as on a GPU: the storage that it was made from may be freed.
    yield torch.Tensor, "pin_memory", lambda self, device=None: self.clone()
    yield torch.Tensor, "record_stream", _no_op()


def _no_op() -> Callable[..., None]:
    """Return a function that does nothing, for operations without meaning on a synchronous device.

    Each call returns a new function, because torch's compiler rejects one function under two names.
    """
    return lambda *args, **kwargs: None


def _call_now(callback: Callable[[], None], **kwargs: object) -> None:
    callback()


def _eager(model: Callable[..., Any] | None = None, **options: object) -> Any:
    """Return `model` unchanged; with options only, return a decorator that does so."""
    return _eager if model is None else model


def called_from(*packages: str) -> bool:
    """Return whether the code two frames up belongs to one of these packages.

    torch itself must get the real answer.
    """
    module = str(sys._getframe(2).f_globals.get("__name__", ""))
    return module.partition(".")[0] in packages


def _available_to_megatron(is_available: Callable[[], bool]) -> Callable[[], bool]:
    # torch's optimizers call this as well, and after True they would query a driver that does not
    # exist.
    @functools.wraps(is_available)
    def answer() -> bool:
        return called_from("megatron") or is_available()

    return answer


def is_gpu(device: object) -> bool:
    """Return whether `device` is a GPU in any of torch's notations, including a plain number."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _made_on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)  # pinning requires a GPU
        return factory(*args, **kwargs)

    return make


def _moved_to_cpu(to: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(to)
    def move(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and is_gpu(args[0]):
            args = ("cpu", *args[1:])
        if is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return to(self, *args, **kwargs)

    return move


def _typed_as_on_gpu(type_of: Callable[..., Any]) -> Callable[..., Any]:
    # Megatron's optimizers compare type names such as 'torch.cuda.FloatTensor', and reject all
    # others.
    @functools.wraps(type_of)
    def answer(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = type_of(self, *args, **kwargs)
        if isinstance(result, str) and called_from("megatron"):
            return "torch.cuda." + result.removeprefix("torch.").removeprefix("cuda.")
        return result

    return answer


def _isend_of_an_alias(isend: Callable[..., Any]) -> Callable[..., Any]:
    # Megatron frees an output's storage right after an asynchronous send. NCCL's stream order
    # keeps the memory valid. gloo references only the tensor, whose storage Megatron has replaced
    # by then, and would send other data.
    @functools.wraps(isend)
    def send(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return isend(tensor.detach(), *args, **kwargs)

    return send


def _all_to_all_of_lists(all_to_all_single: Callable[..., Any]) -> Callable[..., Any]:
    # Expert parallelism converts token counts on the GPU to numbers, but leaves a CPU tensor as it
    # is. torch accepts only numbers.
    @functools.wraps(all_to_all_single)
    def exchange(output: torch.Tensor, input: torch.Tensor, *splits: Any, **options: Any) -> Any:
        list_options = {key: _as_list(value) for key, value in options.items()}
        return all_to_all_single(output, input, *map(_as_list, splits), **list_options)

    return exchange


def _with_one_worker(gloo: Any, create: Callable[..., None]) -> Callable[..., None]:
    # The worker threads of a group, two by default, write the name of their last operation to one
    # string without a lock (ProcessGroupGloo::runLoop, torch 2.15). A name of more than 15
    # characters, such as that of Megatron's coalesced gathers, is on the heap, and is freed twice
    # if two operations end together. One worker runs operations in order, as NCCL does.
    @functools.wraps(create)
    def init(self: Any, store: Any, rank: int, size: int, *args: Any, **settings: Any) -> None:
        if args or "options" in settings:
            create(self, store, rank, size, *args, **settings)
            return
        options = gloo._Options()
        options._threads = 1
        options._devices = _gloo_devices(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME", ""))
        for name, value in settings.items():
            setattr(options, "_timeout" if name == "timeout" else name, value)
        create(self, store, rank, size, options)

    return init


@functools.cache
def _gloo_devices(process: int, names: str) -> list[Any]:
    """Create torch's default gloo devices: the interfaces of GLOO_SOCKET_IFNAME, or the host's.

    They are shared by all groups of a process: each device has a thread that wakes up a hundred
    times per second, and a rank of Megatron has thirty groups.
    """
    gloo = dist.ProcessGroupGloo
    if names:
        return [gloo.create_device(interface=name) for name in names.split(",")]
    return [gloo.create_default_device()]


def _as_list(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _free_and_total_bytes() -> tuple[int, int]:
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page_bytes, os.sysconf("SC_PHYS_PAGES") * page_bytes


def _properties() -> SimpleNamespace:
    """Return the device properties that Megatron reads, for this CPU."""
    memory, cores = _free_and_total_bytes()[1], os.cpu_count() or 1
    version = {"name": "cpu", "major": 0, "minor": 0}
    return SimpleNamespace(**version, total_memory=memory, multi_processor_count=cores)


class _Stream:
    """A stream whose work is always complete."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Accept the arguments of torch.cuda.Stream."""

    wait_stream = wait_event = synchronize = _no_op()

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class _Event:
    """An event that completes when it is recorded."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._recorded_s = 0.0

    wait = synchronize = _no_op()

    def record(self, stream: object = None) -> None:
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        """Return the milliseconds from this event to `end`."""
        return (end._recorded_s - self._recorded_s) * 1e3

    def query(self) -> bool:
        return True
