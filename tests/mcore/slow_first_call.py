"""A plugin of the farm: the first call of each layer sleeps, as if it compiled its kernels."""

from __future__ import annotations

import time
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_vshape.mcore.step.forward_backward import PipelineRunner


def start(rank: int, given: float) -> None:
    """Sleep `given` seconds in each layer's first call, and print the seconds of each step."""
    forward, run_step, called = TransformerLayer.forward, PipelineRunner._train, set[int]()

    def forward_slowly(layer: TransformerLayer, *args: Any, **options: Any) -> Any:
        if layer.layer_number not in called:
            called.add(layer.layer_number)
            time.sleep(given)
        return forward(layer, *args, **options)

    def run_timed(runner: PipelineRunner, context: Any) -> Any:
        started = time.monotonic()
        result = run_step(runner, context)
        print(f"step needed {time.monotonic() - started:.3f} s", flush=True)
        return result

    TransformerLayer.forward = forward_slowly  # type: ignore[method-assign]
    PipelineRunner._train = run_timed  # type: ignore[method-assign]
