"""The reference model of preference training (DPO, KTO, GRPO) in a dry run.

Each rank has a frozen copy of its stages. In DPO and KTO the copy runs forward before each forward
of the trained model, on the same tokens; with adapters it is the trained model without them, so
that it needs no further weights (ms-swift's rlhf_mixin.py, MindSpeed-LLM's dpo_model.py).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from megatron_vshape.rehearsal.adjustments import wrap
from megatron_vshape.rehearsal.rank_job import Reference


def add_to_built_chunks(kind: Reference, is_adapted: bool) -> None:
    """Build a reference for every model chunk that Megatron builds, and run it if its kind does.

    Args:
        kind: whether its forward is part of the step.
        is_adapted: whether the frozen weights of adapters are those of the reference.
    """
    from megatron.training import training

    def around(builder: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(builder)  # Megatron inspects its parameters
        def build_chunk(*args: Any, **kwargs: Any) -> Any:
            chunk = builder(*args, **kwargs)
            reference = chunk if is_adapted else _frozen(builder(*args, **kwargs), chunk.config)
            if kind is Reference.FORWARD:
                chunk.register_forward_pre_hook(_Forward(reference), with_kwargs=True)
            elif not is_adapted:
                chunk.idle_reference = (reference,)  # in a tuple, so that it is no submodule
            return chunk

        return build_chunk

    def build(call: Callable[..., Any], builder: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        return call(around(builder), *args, **kw)

    wrap(training, "get_model", build)
    with suppress(ImportError):  # since 0.18, for models that are built from a configuration
        models = importlib.import_module("megatron.training.models.dist_utils")
        wrap(models, "build_virtual_pipeline_stages", build)


def _frozen(reference: Any, config: Any) -> Any:
    """Return a model on the GPU without gradients, in the weights' format of the trained one."""
    return reference.requires_grad_(False).to(torch.cuda.current_device(), config.params_dtype)


class _Forward:
    """Runs a reference before the forward of a chunk, which has received its input tensor."""

    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def __call__(self, chunk: Any, args: Any, kwargs: Any) -> None:
        received = getattr(chunk.decoder, "input_tensor", None)
        if self._reference is not chunk and received is not None:
            self._reference.set_input_tensor(received)
        with torch.no_grad():
            self._reference.forward(*args, **kwargs)
