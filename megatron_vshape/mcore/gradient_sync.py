"""When data-parallel gradients are reduced during a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from megatron_vshape.mcore.session import Pipeline


class GradientSync:
    """Starts the reduction of a chunk's gradients when its last weight pass has run.

    DDP would start a bucket when autograd has come through its parameters for the last time,
    which with deferred weight gradients is too early; so the whole step runs under `no_sync` and
    the chunks' reductions start here. All data-parallel ranks run the same program, so they
    start them in the same order.
    """

    def __init__(
        self,
        config: Any,
        model: Sequence[nn.Module],
        pipeline: Pipeline,
        num_microbatches: int,
        force_all_reduce: bool | None,
    ) -> None:
        self._config = config
        self._model = model
        self._overlaps = pipeline.overlaps_grad_reduce and not force_all_reduce
        self._left = [num_microbatches] * len(model)
        # A tied weight belongs to the first chunk and gets gradients from the last one too.
        shares = pipeline.ties_embeddings and pipeline.stage_map.ends_meet
        self._waits_for_all = {0} if shares and len(model) > 1 else set()
        self._started: set[int] = set()

    @contextlib.contextmanager
    def session(self, forward_only: bool) -> Iterator[None]:
        """Run a step inside: gather parameters where asked for, hold DDP's own reductions back."""
        param_sync = self._config.param_sync_func
        if param_sync is not None and not forward_only:
            for chunk, sync in zip(self._model, self._per_chunk(param_sync), strict=True):
                sync(chunk.parameters())
        with contextlib.ExitStack() as stack:
            no_sync = self._config.no_sync_func
            if no_sync is not None:
                for enter in self._per_chunk(no_sync) if isinstance(no_sync, list) else [no_sync]:
                    stack.enter_context(enter())
            yield

    def weights_done(self, chunk: int) -> None:
        """Note that a chunk has one microbatch's weight gradients more."""
        self._left[chunk] -= 1
        if not self._overlaps or self._left[chunk]:
            return
        ready = [chunk] if chunk not in self._waits_for_all else []
        if not any(self._left):
            ready += [each for each in self._waits_for_all if each not in self._started]
        for each in ready:
            self._start(each)

    def _start(self, chunk: int) -> None:
        self._started.add(chunk)
        grad_sync = self._config.grad_sync_func
        if grad_sync is not None:
            self._per_chunk(grad_sync)[chunk](self._model[chunk].parameters())
        else:
            self._model[chunk].start_grad_sync()

    def _per_chunk(self, function: Any) -> list[Any]:
        return function if isinstance(function, list) else [function] * len(self._model)
