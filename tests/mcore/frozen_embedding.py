"""A plugin of the farm: the embedding is frozen, as where adapters are trained."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel


def start(rank: int, given: Any) -> None:
    """Freeze it in every model that is built."""
    build = GPTModel.__init__

    def frozen(model: GPTModel, *args: Any, **options: Any) -> None:
        build(model, *args, **options)
        if model.pre_process:
            model.embedding.requires_grad_(False)

    GPTModel.__init__ = frozen
