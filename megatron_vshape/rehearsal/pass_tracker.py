"""The passes of a step as phases of the ledger, and the names of modules that allocate."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from megatron_vshape.rehearsal.adjustments import wrap
from megatron_vshape.rehearsal.ledger import Ledger, tensors_in
from megatron_vshape.rehearsal.phases import Phase


class PassTracker:
    """Sets the ledger's phase in the passes of Megatron, and the running module."""

    def __init__(self, ledger: Ledger, before_forward: Callable[[int], None]) -> None:
        self._ledger, self._before_forward = ledger, before_forward
        self._chunks: dict[int, int] = {}
        self._num_passes: dict[tuple[str, int], int] = {}  # by kind and chunk
        self._num_backwards = 0
        self._forward_by_output: dict[int, Phase] = {}
        self._parts: dict[str, Phase] = {}  # phases of the running overlapped passes, by kind
        self._names: dict[int, str] = {}

    def register_modules(self, chunks: list[Any]) -> None:
        """Register the names of the modules of these chunks."""
        for index, chunk in enumerate(chunks):
            self._chunks[id(chunk)] = index
            for name, module in chunk.named_modules():
                parts = [part for part in name.split(".") if part != "module"]
                self._names[id(module)] = ".".join(
                    "*" if part.isdigit() else part for part in parts
                )
        hooks = torch.nn.modules.module
        hooks.register_module_forward_pre_hook(self._enter)
        hooks.register_module_forward_hook(self._leave, always_call=True)
        self._stack: list[str] = []

    def _enter(self, module: Any, args: Any) -> None:
        self._stack.append(self._ledger.place)
        self._ledger.place = self._names.get(id(module), self._ledger.place)

    def _leave(self, module: Any, args: Any, out: Any) -> None:
        if self._stack:
            self._ledger.place = self._stack.pop()

    def begin_step(self) -> None:
        """Count microbatches from zero again."""
        self._num_passes.clear()
        self._num_backwards = 0
        self._forward_by_output.clear()

    def _next(self, kind: str, model: Any) -> Phase:
        """Return the phase of the next pass of this kind through a chunk."""
        chunk = self._chunks.get(id(model), 0)
        microbatch = self._num_passes.get((kind, chunk), 0)
        self._num_passes[kind, chunk] = microbatch + 1
        return Phase(kind, chunk, microbatch)

    def mark_megatrons_passes(self, schedules: Any) -> None:
        """Wrap the passes of Megatron's schedules so that they set the phase."""
        wrap(schedules, "forward_step", self._forward)
        wrap(schedules, "backward_step", self._backward)
        # --overlap-moe-expert-parallel-comm calls neither: parts of F and B of two microbatches
        # alternate, so the phase changes with each part.
        from megatron.core.pipeline_parallel import combined_1f1b, utils

        wrap(combined_1f1b, "combined_forward_backward_step", self._overlapped)
        wrap(utils.ScheduleNode, "forward", functools.partial(self._part, "F"))
        wrap(utils.ScheduleNode, "backward", functools.partial(self._part, "B"))

    def _overlapped(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        models = inspect.signature(call).bind(*args, **kwargs).arguments
        for kind, name in (("F", "f_model"), ("B", "b_model")):
            if models[name] is not None:
                self._parts[kind] = self._next(kind, models[name])
        return call(*args, **kwargs)

    def _part(self, kind: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outer_phase = self._ledger.phase
        self._ledger.phase = self._parts.get(kind, outer_phase)
        try:
            return call(*args, **kwargs)
        finally:
            self._ledger.phase = outer_phase

    def _forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model = kwargs.get("model", args[2] if len(args) > 2 else None)
        phase = self._next("F", model)
        self._before_forward(phase.microbatch)
        with self._ledger.during(phase):
            output = call(*args, **kwargs)
        for tensor in tensors_in((output,)):
            # The backward gets this output tensor, which identifies its chunk and microbatch: the
            # order of interleaved backwards would not. Megatron keeps the tensor until then.
            self._forward_by_output[id(tensor)] = phase
        return output

    def _backward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = kwargs.get("output_tensor", args[1] if len(args) > 1 else None)
        # A list, because a generator would keep a tensor that the backward frees.
        forwards = [self._forward_by_output.get(id(tensor)) for tensor in tensors_in((output,))]
        forward = next(filter(None, forwards), Phase("F", 0, self._num_backwards))
        self._num_backwards += 1
        with self._ledger.during(forward._replace(kind="B")):
            return call(*args, **kwargs)
