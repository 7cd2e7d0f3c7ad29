"""Snapshot of the state that passes change, and its restoration in place."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.step.rewind import RandomState

_LIBRARIES = ("megatron.core", "transformer_engine")
"""Packages whose objects are followed, from the layers of a model on."""

_PROCESS_STATE = (
    *("megatron.core.transformer", "megatron.core.models", "megatron.core.parallel_state"),
    *("megatron.core.rerun_state_machine", "transformer_engine.pytorch"),
)
"""Packages with state of the process: logs of auxiliary losses, loss scales, FP8 scales."""

_FP8_TENSORS = ("scale", "scale_inv", "amax", "amax_history")
"""Tensors of Transformer Engine's compiled classes, which have no `__dict__`."""


class Snapshot:
    """State of a rank's chunks and of its process, without parameters and gradients.

    The attributes of the layers are followed, so that buffers of routers, FP8 scales, weight caches
    and counters need no list here. Gradients are zero before a step, and are zeroed, not copied.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        """Copy the state; raises UnsupportedError if gradients are not zero."""
        self._restorers: list[Callable[[], object]] = []
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is used again
        parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self._gradients = _zero_gradients(parameters)
        tensors = (*parameters, *self._gradients)
        self._not_copied = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        for parameter in parameters:
            # Shallow: main gradients and the optimizer's copy of the weights are not changed.
            self._restorers.append(partial(_refill, vars(parameter), dict(vars(parameter))))
            self._restorers.append(partial(setattr, parameter, "grad", parameter.grad))
        self._copy(*chunks)
        for owner, name, value in _process_state():
            self._restorers.append(partial(_set_if_changed, owner, name, value))
            self._copy(value)
        self._restorers += [
            RandomState.now().restore,
            partial(random.setstate, random.getstate()),
            partial(np.random.set_state, np.random.get_state()),
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all state; objects and the memory of their tensors stay the same."""
        if self._gradients:
            torch._foreach_zero_(self._gradients)
        for restore in self._restorers:
            restore()

    def _copy(self, *values: Any) -> None:
        """Copy values and everything that they contain."""
        pending = list(values)
        while pending:
            value = pending.pop()
            if id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if isinstance(value, Tensor):
                if value.numel() and value.untyped_storage().data_ptr() not in self._not_copied:
                    copy = value.detach().clone()
                    self._restorers.append(partial(value.detach().copy_, copy))
            elif isinstance(value, dict):
                self._restorers.append(partial(_refill, value, dict(value)))
                pending += value.values()
            elif isinstance(value, list | deque | set):
                self._restorers.append(partial(_refill, value, list(value)))
                pending += value
            elif isinstance(value, tuple):
                pending += value
            elif _is_followed(value):
                pending += (getattr(value, name, None) for name in ("__dict__", *_FP8_TENSORS))


def _zero_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients; raises UnsupportedError if one is not zero."""
    names = ("grad", "main_grad")
    values = [getattr(parameter, name, None) for parameter in parameters for name in names]
    gradients = [gradient for gradient in values if gradient is not None]
    # One wait for the device for all gradients.
    if gradients and bool(torch.stack([gradient.any() for gradient in gradients]).any()):
        raise UnsupportedError(
            "--pipeline-warmup requires zero gradients before the first step, because it does not "
            "copy them: zero the gradients before the step, or remove --pipeline-warmup"
        )
    return gradients


def _is_followed(value: Any) -> bool:
    is_library_object = type(value).__module__.startswith(_LIBRARIES)
    return isinstance(value, nn.Module) or (is_library_object and not isinstance(value, type))


def _process_state() -> Iterator[tuple[Any, str, Any]]:
    """Yield owner, name and value of the data of modules and of their classes."""
    types = (type(None), bool, int, float, str, Tensor, dict, list, set, deque)
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(_PROCESS_STATE):
            classes = (value for value in vars(module).values() if isinstance(value, type))
            for owner in (module, *(kind for kind in classes if kind.__module__ == module_name)):
                for name, value in list(vars(owner).items()):
                    is_data = isinstance(value, types) or _is_followed(value)
                    if is_data and not name.startswith("__"):
                        yield owner, name, value


def _set_if_changed(owner: Any, name: str, value: Any) -> None:
    if vars(owner).get(name) is not value:
        setattr(owner, name, value)


def _refill(target: Any, items: Any) -> None:
    target.clear()
    (target.extend if isinstance(target, list | deque) else target.update)(items)
