"""A plugin of the farm's ranks: keeps every bit that steps leave, and spoils some of them."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

import megatron.training.training as training
import recorder
import torch
from megatron.core import parallel_state
from torch import nn


class Steps:
    """The exact values of a rank; `settings` has the steps, from 0, that get an infinite gradient
    (`infected`), the number of steps before the rank sends itself SIGTERM (`stopped`), and whether
    each step gets another forward step function (`renews_forward_step`).
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._given = settings
        self.kept: dict[str, Any] = {"steps": [], "parameters": [], "optimizer": {}}
        recorder.more_records["exact"] = self.kept

    def keep_step(
        self, original: Callable[..., Any], forward_step: Any, *args: Any, **options: Any
    ) -> Any:
        if self._given["renews_forward_step"]:
            forward_step = functools.partial(forward_step)
        result = original(forward_step, *args, **options)
        model, optimizer = args[1:3]
        loss, skipped, norm = result[0], result[1], result[5]
        self.kept["steps"].append(
            {
                "loss": {key: float(value) for key, value in loss.items()},
                "norm": None if norm is None else float(norm),
                "group norms": {
                    name: float(value)
                    for name, value in getattr(optimizer, "grad_norms_by_group", {}).items()
                },
                "skipped": skipped,
                "loss scale": float(optimizer.get_loss_scale()),
                "learning rates": [group["lr"] for group in optimizer.param_groups],
            }
        )
        self.kept["parameters"] = [
            parameter.data for chunk in model for parameter in chunk.parameters()
        ]
        self.kept["optimizer"] = state_of(optimizer)
        if len(self.kept["steps"]) == self._given["stopped"]:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    def infect(
        self, original: Callable[..., Any], model: list[nn.Module], *args: Any, **options: Any
    ) -> Any:
        result = original(model, *args, **options)
        step, ranks = len(self.kept["steps"]), parallel_state.get_pipeline_model_parallel_group()
        if step in self._given["infected"] and ranks.rank() == step % ranks.size():
            next(iter(model[0].parameters())).main_grad.fill_(torch.inf)
        return result


def start(rank: int, settings: dict[str, Any]) -> None:
    """Wrap the trainer in this process."""
    steps = Steps(settings)
    recorder.wrap(training, "train_step", steps.keep_step)
    recorder.wrap(training, "finalize_model_grads", steps.infect)


def state_of(optimizer: Any) -> dict[str, Any]:
    """Return everything of an optimizer that a step changes, in a fixed order."""
    state: dict[str, Any] = {}
    for part, optimizer_part in enumerate(optimizer.chained_optimizers):
        if getattr(optimizer_part, "grad_scaler", None) is not None:
            state[f"{part}.scaler"] = dict(vars(optimizer_part.grad_scaler))
        inner = optimizer_part.optimizer
        for number, group in enumerate(inner.param_groups):
            state[f"{part}.{number}"] = {key: group[key] for key in group if key != "params"}
            for index, parameter in enumerate(group["params"]):
                name = f"{part}.{number}.{index}"
                state[f"{name}.parameter"] = parameter.detach().clone()
                for key, value in inner.state[parameter].items():
                    state[f"{name}.{key}"] = value
    return state
