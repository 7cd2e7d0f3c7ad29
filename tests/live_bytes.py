"""Every byte that tensors really hold, counted without an allocator's help, for tests.

Unlike a count of what autograd saves, this one sees received messages, results on their way,
losses and whatever else has been forgotten somewhere. It watches every operation of torch, which
costs time: a real run measures its memory otherwise.
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
    """Counts the storages that are made while it is active, each until it is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation and note the storages of its results."""
        # What an operation is given was either made here before, or is not this count's business.
        given = {_key(each) for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)}
        result = func(*args, **(kwargs or {}))
        for each in tree_iter(result):
            if isinstance(each, Tensor) and _key(each) not in given:
                storage = each.untyped_storage()
                # The weak reference keeps the key from being used again.
                self._made[storage._cdata] = StorageWeakRef(storage)
        return result

    def count(self) -> int:
        """Return the bytes that all storages made and not yet freed have now."""
        dead = [key for key, reference in self._made.items() if reference.expired()]
        for key in dead:
            del self._made[key]
        return sum(map(size_now, self._made.values()))


class LivePeak(LiveBytes):
    """Counts as `torch.cuda` does, so that what reads an allocator can run on a CPU.

    What an operation allocates and frees inside itself stays unseen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._peak_bytes = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation and count while its inputs are still there."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._peak_bytes = max(self._peak_bytes, self.count())
        return result

    def memory_allocated(self) -> int:
        """Return the bytes in use."""
        return self.count()

    def max_memory_allocated(self) -> int:
        """Return the most in use since the peak was reset."""
        return self._peak_bytes

    def reset_peak_memory_stats(self) -> None:
        """Let the peak be what is in use now."""
        self._peak_bytes = self.count()


class LiveAfterPasses:
    """An observer of the program runner: what is held when each pass has ended."""

    def __init__(self, live: LiveBytes) -> None:
        self._live = live
        self.found: list[tuple[Pass, int]] = []

    def begins(self, work: Pass) -> None:
        """Do nothing."""

    def ends(self, work: Pass) -> None:
        """Count, unless a copy has ended, in a thread of its own: it changes nothing."""
        if work.kind.resource == PROCESSOR:
            self.found.append((work, self._live.count()))

    @property
    def peak_bytes(self) -> int:
        """Return the most that was held after a pass."""
        return max((held for _, held in self.found), default=0)


def held_by_package() -> list[str]:
    """List tensors to which objects of the package refer, apart from those of modules."""
    gc.collect()
    modules = [each for name, each in sys.modules.items() if name.startswith(PACKAGE)]
    left = [value for module in modules for value in vars(module).values()]
    left += [each for each in gc.get_objects() if _is_own(each)]
    seen: set[int] = set()
    found = []
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, nn.Module | nn.Parameter):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            if each.untyped_storage().nbytes():
                found.append(f"{list(each.shape)} of {each.dtype}")
        elif isinstance(each, FunctionType):
            left += each.__closure__ or ()
        elif isinstance(each, _CONTAINERS) or _is_own(each):
            left += gc.get_referents(each)
    return found


PACKAGE = "megatron_vshape"
_CONTAINERS = (dict, list, tuple, set, deque, partial, MethodType, CellType)


def _is_own(each: Any) -> bool:
    return str(type(each).__module__).startswith(PACKAGE)


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
