"""Multi-token prediction: layers after those of the last stage that embed the tokens again.

Each layer predicts one more token. It merges the output of the layer before with the embedding of
the next token, and computes logits with the model's output layer. These layers are on the stage of
the loss.

Megatron gives this stage a copy of the embedding, and synchronizes it between the first and the
last rank of the pipeline. This package keeps that copy if these two ranks have the first and the
last stage. If one rank has both, the chunks share the embedding.

Except for the metrics, nothing here imports Megatron: `doctor` reads recipes without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.mcore.hook import Replaced
from megatron_vshape.mcore.layout import hybrid
from megatron_vshape.mcore.refusals import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_vshape.mcore.layout.stage_map import StageMap

OPTION = "mtp_num_layers"


def num_predicting(model: Any) -> int:
    """Return the number of multi-token prediction layers of a model.

    `model` can be Megatron's arguments, before or after validation, or a config. The layer pattern
    of a hybrid model has one part per such layer and takes precedence.
    """
    pattern = getattr(model, "hybrid_layer_pattern", None) or ""
    return hybrid.num_predicting(pattern) or getattr(model, OPTION, None) or 0


def check_ends(stage_map: StageMap) -> None:
    """Raise ScheduleError if the last stage can neither share the embedding nor copy it."""
    ends, last = stage_map.end_ranks, stage_map.num_ranks - 1
    if stage_map.predicting and not stage_map.ends_meet and ends != (0, last):
        raise ScheduleError(
            f"the first stage is on rank {ends[0]} and the last on rank {ends[1]}, and Megatron "
            f"gives multi-token prediction its embedding only between ranks 0 and {last}: number "
            f"the devices of the schedule differently, or remove {OPTION}"
        )


def check_model(stage_map: StageMap, config: Any) -> None:
    """Raise UnsupportedError if a model has another number of these layers than the stages."""
    wants = getattr(config, OPTION, None) or 0
    if wants != stage_map.predicting:
        raise UnsupportedError(
            f"the model is built with {OPTION} {wants} and the stages were made for "
            f"{stage_map.predicting}: set it where the options or the config are made"
        )


def share_embedding(first: Any, last: Any) -> None:
    """Make the chunk `last` use the embedding of `first`, both on this rank.

    The module has one owner. `last` references it without registering it, so that data parallelism,
    the optimizer and checkpoints see it once. Call this before the chunks are wrapped.
    """
    del last.embedding
    vars(last)["embedding"] = first.embedding
    # The gradient comes from two passes, and the reduction must wait for both.
    first.embedding.word_embeddings.weight.zero_out_wgrad = True
    save_no_copy(last)


def save_no_copy(last: Any) -> None:
    """Save the chunk `last` as a chunk without a copy of the embedding."""
    save = last.sharded_state_dict

    def sharded_state_dict(*args: Any, **options: Any) -> Any:
        with Replaced() as replaced:
            replaced.put(last, "mtp_process", False)
            return save(*args, **options)

    last.sharded_state_dict = sharded_state_dict


COUNTED = ("values", "loss_values", "correct_values", "total_values")
"""Attributes that Megatron's tracker accumulates per logged iteration; `values` up to 0.18."""


def take_metrics() -> dict[str, Tensor]:
    """Return the metrics accumulated since the last call, and reset them."""
    tracker = _tracker()
    metrics = {name: tracker[name].clone() for name in COUNTED if name in tracker}
    for name in metrics:
        tracker[name].zero_()
    return metrics


def add_metrics(metrics: dict[str, Tensor]) -> None:
    """Add the metrics of another rank of this pipeline; Megatron averages over replicas."""
    if not metrics:
        return
    from megatron.core import parallel_state

    tracker = _tracker()
    for name, values in metrics.items():
        tracker[name] = tracker[name] + values if name in tracker else values
    tracker["reduce_group"] = None
    tracker["avg_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)


def _tracker() -> dict[str, Any]:
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker: dict[str, Any] = MTPLossLoggingHelper.tracker
    return tracker
