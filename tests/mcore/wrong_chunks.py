"""A plugin of the farm: builds each chunk with the layer spec, or as the model, of chunk 0."""

from __future__ import annotations

from typing import Any

from megatron.training.models import gpt


def start(rank: int, name: str) -> None:
    """Replace the vp_stage in calls of `name` by the trainer's builder of GPT models."""
    original = getattr(gpt, name)

    def build(*args: Any, **options: Any) -> Any:
        return original(*args, **options | {"vp_stage": 0})

    setattr(gpt, name, build)
