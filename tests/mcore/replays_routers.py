"""A plugin of the farm: expert choices are recorded in one step and replayed in the next.

Choices are shifted by one expert before the replay, so losses show whether they are replayed.
"""

from __future__ import annotations

import gc
from typing import Any

import other_trainer
import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from router_replay_utils import pp_gather, sorted_by_chunk
from torch import Tensor

from megatron_vshape.mcore.step.forward_backward import PipelineRunner

EXPERTS, COUNT = 4, 7
LENGTHS = [24, 5, 24, 7, 16, 3, 9]


def routers_of(model: Any) -> list[Any]:
    """Return the routers of a chunk with the numbers of their layers."""
    inner = other_trainer.unwrapped(model)
    replays = [
        (layer.layer_number, layer.mlp.router.router_replay) for layer in inner.decoder.layers
    ]
    return [pair for pair in replays if pair[1] is not None]


class Library:
    """A forward step that records, or replays choices that come with a batch, as verl's does."""

    def __init__(self) -> None:
        self.records: list[Tensor] = []
        self.replayed: list[tuple[int, int]] = []

    def forward_step(self, data: Any, model: Any) -> tuple[Any, Any]:
        """Run a microbatch of a chunk."""
        batch, routers = next(data), routers_of(model)
        tokens = batch["tokens"]
        if any(replay.router_replay_action is not None for _, replay in routers):
            replays = [
                replay.router_replay_action != RouterReplayAction.RECORD for _, replay in routers
            ]
            for number, replay in routers if all(replays) else ():
                replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
                replay.set_target_indices(batch["choices"][0, :, number - 1])
        positions = torch.arange(tokens.shape[1]).unsqueeze(0)
        output = model(tokens, positions, other_trainer.causal_mask(tokens.shape[1]))
        inner = other_trainer.unwrapped(model)
        if inner.post_process and mpu.is_pipeline_last_stage():
            labels = tokens.roll(-1, 1)
            output = {"losses": vocab_parallel_cross_entropy(output.clone(), labels)}
        for _, replay in routers:
            if replay.router_replay_action == RouterReplayAction.REPLAY_FORWARD:
                replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        if routers and routers[0][1].router_replay_action == RouterReplayAction.RECORD:
            indices = torch.stack([replay.get_recorded_indices() for _, replay in routers], dim=1)
            self.records.append(padded(indices.unsqueeze(0)))

        return output, lambda outputs: other_trainer.mean_loss(outputs["losses"])


def padded(indices: Tensor) -> Tensor:
    """Pad [1, s, layers, topk] to the longest sequence."""
    return torch.nn.functional.pad(
        indices, (0, 0, 0, 0, 0, other_trainer.LONGEST - indices.shape[1])
    )


def call(library: Library, model: list[Any], batches: list[Any], forward_only: bool) -> list[float]:
    """Run a step; return the losses where verl reads them."""
    data = [iter([{**batch} for batch in batches]) for _ in model]
    step = library.forward_step, data, model, len(batches)
    returned = other_trainer.run_step(*step, forward_only=forward_only)
    return other_trainer.by_rank(returned, []) or []


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Record, replay, and return choices, losses, and gradients."""
    library = Library()
    config, model = other_trainer.set_up("verl", options)
    batches = list(other_trainer.batches(0, COUNT, LENGTHS))
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    recorded = call(library, model, batches, forward_only=True)
    if len(model) > 1:
        local = sorted_by_chunk(library.records, COUNT, len(model))
    else:
        local = torch.cat(library.records)
    choices = pp_gather(local, config)
    RouterReplay.clear_global_indices()
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    for index, batch in enumerate(batches):
        moved = (choices[index : index + 1, : batch["tokens"].shape[1]] + 1) % EXPERTS
        batch["choices"] = moved
    for chunk in model:
        chunk.zero_grad_buffer()
    losses = call(library, model, batches, forward_only=False)
    return {
        "choices": choices,
        "recorded": recorded,
        "losses": losses,
        "gradients": other_trainer.gradients_of(model),
        "left": [
            len(replay.replay_backward_list) for chunk in model for _, replay in routers_of(chunk)
        ],
        "chunks": len(model),
        "order": reordered(),
    }


def reordered() -> bool:
    """Return whether the last step reordered its microbatches."""
    runners = [candidate for candidate in gc.get_objects() if isinstance(candidate, PipelineRunner)]
    return any(runner.calls.order is not None for runner in runners)


start = other_trainer.starts(train)
