"""Count the bytes of all tensors without an allocator, for tests.

Unlike a count of the tensors that autograd saves, it includes received messages, results to be
sent, losses and forgotten tensors. It observes every operation of torch, which costs time.
"""

import gc
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megatron_vshape.core.model.kinds import PROCESSOR
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.runtime.activation_tracker import size_now


class LiveBytes(TorchDispatchMode):
    """Counts the storages that are created while it is active, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation and record the storages of its results."""
        # The storages of inputs are recorded already, or were created before this was active.
        inputs = {_key(value) for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)}
        result = func(*args, **(kwargs or {}))
        for output in tree_iter(result):
            if isinstance(output, Tensor) and _key(output) not in inputs:
                storage = output.untyped_storage()
                # The weak reference keeps the key from being used again.
                self._storages[storage._cdata] = StorageWeakRef(storage)
        return result

    def count(self) -> int:
        """Return the bytes of all storages that are not freed."""
        dead = [key for key, reference in self._storages.items() if reference.expired()]
        for key in dead:
            del self._storages[key]
        return sum(map(size_now, self._storages.values()))


class LivePeak(LiveBytes):
    """Counts as `torch.cuda` does, for code that queries an allocator, on a CPU.

    Memory that an operation allocates and frees inside is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._peak_bytes = 0

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operation and count while its inputs exist."""
        result = super().__torch_dispatch__(*args, **kwargs)
        self._peak_bytes = max(self._peak_bytes, self.count())
        return result

    def memory_allocated(self) -> int:
        """Return the bytes in use."""
        return self.count()

    def max_memory_allocated(self) -> int:
        """Return the peak since the last reset."""
        return self._peak_bytes

    def reset_peak_memory_stats(self) -> None:
        """Reset the peak to the bytes in use."""
        self._peak_bytes = self.count()


class LiveAfterPasses:
    """An observer of the program runner: the bytes after each pass."""

    def __init__(self, live: LiveBytes) -> None:
        self._live = live
        self.bytes_after: list[tuple[Pass, int]] = []

    def begins(self, work: Pass) -> None:
        """Do nothing."""

    def ends(self, work: Pass) -> None:
        """Count; a copy, which ends in another thread, changes nothing."""
        if work.kind.resource == PROCESSOR:
            self.bytes_after.append((work, self._live.count()))

    @property
    def peak_bytes(self) -> int:
        """Return the largest number of bytes after a pass."""
        return max((num_bytes for _, num_bytes in self.bytes_after), default=0)


def held_by_package() -> list[str]:
    """List tensors to which objects of the package refer, except those of modules."""
    gc.collect()
    modules = [module for name, module in sys.modules.items() if name.startswith(PACKAGE)]
    referents = [value for module in modules for value in vars(module).values()]
    referents += [value for value in gc.get_objects() if _is_of_package(value)]
    seen: set[int] = set()
    tensors = []
    while referents:
        value = referents.pop()
        if id(value) in seen or isinstance(value, nn.Module | nn.Parameter):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if value.untyped_storage().nbytes():
                tensors.append(f"{list(value.shape)} of {value.dtype}")
        elif isinstance(value, FunctionType):
            referents += value.__closure__ or ()
        elif isinstance(value, _CONTAINERS) or _is_of_package(value):
            referents += gc.get_referents(value)
    return tensors


PACKAGE = "megatron_vshape"
_CONTAINERS = (dict, list, tuple, set, deque, partial, MethodType, CellType)


def _is_of_package(value: Any) -> bool:
    return str(type(value).__module__).startswith(PACKAGE)


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
