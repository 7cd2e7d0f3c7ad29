"""Multi-token prediction: layers after the last stage's others, which look tokens up once more.

Each predicts one token further: it merges what the layer before has made with the embedding of the
next token, and makes logits by the model's own output layer. They stand where the loss is.

Megatron gives their stage a copy of the embedding, filled and summed up between the pipeline's
first and last rank. So it stays where these two hold the ends; where one rank holds both, the
chunks share the embedding itself.

Nothing here needs Megatron, but for the metrics: `doctor` reads recipes where it is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.mcore.layout import hybrid
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.replaced import Replaced

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_vshape.mcore.layout.stage_map import StageMap

OPTION = "mtp_num_layers"


def num_predicting(model: Any) -> int:
    """Return how many of these layers a model has.

    `model` are Megatron's arguments, before or after they are validated, or a config. A hybrid
    model's pattern of layers says it with a part for each, and wins.
    """
    pattern = getattr(model, "hybrid_layer_pattern", None) or ""
    return hybrid.num_predicting(pattern) or getattr(model, OPTION, None) or 0


def check_ends(stage_map: StageMap) -> None:
    """Raise ScheduleError where the last stage can neither share the embedding nor have a copy."""
    ends, last = stage_map.end_ranks, stage_map.num_ranks - 1
    if stage_map.predicting and not stage_map.ends_meet and ends != (0, last):
        raise ScheduleError(
            f"the first stage is on rank {ends[0]} and the last on rank {ends[1]}, and Megatron "
            f"gives multi-token prediction its embedding only between ranks 0 and {last}: number "
            f"the devices of the schedule differently, or remove {OPTION}"
        )


def check_model(stage_map: StageMap, config: Any) -> None:
    """Raise UnsupportedError if a model is built with more or fewer such layers than were known."""
    wants = getattr(config, OPTION, None) or 0
    if wants != stage_map.predicting:
        raise UnsupportedError(
            f"the model is built with {OPTION} {wants} and the stages were made for "
            f"{stage_map.predicting}: set it where the options or the config are made"
        )


def share_embedding(first: Any, last: Any) -> None:
    """Have the chunk `last` look tokens up in the embedding of `first`, both on this rank.

    One module with one owner: `last` reaches it and does not list it, so that data parallelism,
    the optimizer and checkpoints see it once. Call it before the chunks are wrapped.
    """
    del last.embedding
    vars(last)["embedding"] = first.embedding
    # Its gradient comes from two passes: the reduction has to wait for both.
    first.embedding.word_embeddings.weight.zero_out_wgrad = True
    save_no_copy(last)


def save_no_copy(last: Any) -> None:
    """Have the chunk `last` saved as one whose embedding is no copy of the first stage's."""
    save = last.sharded_state_dict

    def sharded_state_dict(*args: Any, **options: Any) -> Any:
        with Replaced() as replaced:
            replaced.put(last, "mtp_process", False)
            return save(*args, **options)

    last.sharded_state_dict = sharded_state_dict


COUNTED = ("values", "loss_values", "correct_values", "total_values")
"""Attributes that Megatron's tracker accumulates per logged iteration; `values` up to 0.18."""


def take_metrics() -> dict[str, Tensor]:
    """Return what has been counted for the log since the last call, and count anew."""
    tracker = _tracker()
    taken = {name: tracker[name].clone() for name in COUNTED if name in tracker}
    for name in taken:
        tracker[name].zero_()
    return taken


def add_metrics(taken: dict[str, Tensor]) -> None:
    """Count what another rank of this pipeline has counted; Megatron averages over replicas."""
    if not taken:
        return
    from megatron.core import parallel_state

    tracker = _tracker()
    for name, values in taken.items():
        tracker[name] = tracker[name] + values if name in tracker else values
    tracker["reduce_group"] = None
    tracker["avg_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)


def _tracker() -> dict[str, Any]:
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker: dict[str, Any] = MTPLossLoggingHelper.tracker
    return tracker
