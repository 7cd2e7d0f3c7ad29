"""A vocabulary that all pipeline ranks share: each has rows of the embedding and the output layer.

Megatron's own two modules are built on every rank as if tensor parallelism went over the ranks of
the pipeline too, pipeline before tensor. So shapes, attributes and what checkpoints know of the
rows are right, and say the same as any other cut of the same two tensors. Their forward is never
called: it stands where the model asks, and hands over what the passes have made
(`step.vocabulary`).
"""

from __future__ import annotations

import logging
import math
import os
from argparse import Namespace
from typing import Any, NamedTuple

from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_vshape.mcore.layout import multi_token
from megatron_vshape.mcore.layout.stage_map import StageMap
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.step_state import StepState

logger = logging.getLogger(__name__)

FLAG = "--pipeline-vocab-parallel"


class Shards(NamedTuple):
    """Stands for the process group that shares the vocabulary; nothing goes over it."""

    number: int
    of: int

    def rank(self) -> int:
        """Return which part of the rows is this rank's."""
        return self.number

    def size(self) -> int:
        """Return in how many parts the rows are."""
        return self.of


class _OwnRows(MegatronModule):  # type: ignore[misc]
    """The embedding of a rank without the first stage: its rows, by the name that they have."""

    def __init__(self, config: Any, rows: Any) -> None:
        super().__init__(config=config)
        self.word_embeddings = rows


def _allow_another_size(head: Any) -> None:
    """Have another vocabulary's size be loaded into an output layer, as into Megatron's last."""
    describe = head.sharded_state_dict

    def sharded_state_dict(*args: Any, **options: Any) -> Any:
        state = describe(*args, **options)
        for each in state.values():
            each.allow_shape_mismatch = True
        return state

    head.sharded_state_dict = sharded_state_dict


def pad(args: Namespace, num_ranks: int) -> None:
    """Have Megatron pad the vocabulary so that it divides among all ranks that share it.

    A padded row is trained like any other, so nothing is changed where it divides already.
    """
    multiple = args.make_vocab_size_divisible_by
    parts = num_ranks * args.tensor_model_parallel_size
    known = getattr(args, "padded_vocab_size", None) or args.vocab_size
    as_it_is = multiple * args.tensor_model_parallel_size
    if known is not None and (math.ceil(known / as_it_is) * as_it_is) % parts == 0:
        return
    args.make_vocab_size_divisible_by = math.lcm(multiple, num_ranks)
    if args.make_vocab_size_divisible_by != multiple and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "%s pads the vocabulary to a multiple of %d, not of %d: it is shared by %d pipeline x "
            "%d tensor ranks",
            FLAG,
            args.make_vocab_size_divisible_by * args.tensor_model_parallel_size,
            as_it_is,
            num_ranks,
            args.tensor_model_parallel_size,
        )


def share(
    state: StepState, first: Any, model: Any, stage_map: StageMap, rank: int, chunk: int
) -> None:
    """Give a chunk its rank's rows: the first those of the embedding, the last the head's.

    `first` is the rank's first chunk. Call it when the chunk is built, and before it is wrapped.

    Raises:
        UnsupportedError: the vocabulary does not divide among the ranks.
    """
    tensor = parallel_state.get_tensor_model_parallel_rank()
    per_rank = parallel_state.get_tensor_model_parallel_world_size()
    parts = stage_map.num_ranks * per_rank
    if model.vocab_size % parts:
        raise UnsupportedError(
            f"{FLAG} deals {model.vocab_size} rows of the vocabulary to {stage_map.num_ranks} "
            f"pipeline x {per_rank} tensor ranks, which does not come out even: make it a multiple "
            f"of {parts}, such as {math.ceil(model.vocab_size / parts) * parts}"
        )
    shards = Shards(rank * per_rank + tensor, parts)
    if chunk == 0:
        _share_embedding(state, model, shards)
    if chunk == stage_map.num_chunks - 1:
        _share_head(state, model, shards)
        if model.post_process and stage_map.predicting:
            _look_up_again(state, first, model)


def check_head(head: Any) -> None:
    """Raise UnsupportedError unless an output layer is this rank's rows, as `share` made it.

    A critic's library puts a layer of one output there when the model has been built.
    """
    if not isinstance(getattr(head, "tp_group", None), Shards):
        raise UnsupportedError(
            f"{FLAG} shares an output layer of the vocabulary, and this model's last stage has "
            f"{type(head).__name__} instead, as a critic has: leave it out for this model"
        )


def _share_embedding(state: StepState, model: Any, shards: Shards) -> None:
    rows = tensor_parallel.VocabParallelEmbedding(
        model.vocab_size,
        model.config.hidden_size,
        init_method=model.config.embedding_init_method,
        config=model.config,
        tp_group=shards,
    )
    rows.weight.is_embedding_or_output_parameter = True
    if getattr(model, "embedding", None) is None:
        model.embedding = _OwnRows(model.config, rows)
    else:
        _look_up_in(state, model.embedding, rows)


def _look_up_in(state: StepState, embedding: Any, rows: Any) -> None:
    """Have Megatron's embedding, which adds all the rest, look tokens up in shared rows."""
    rows.reduce_scatter_embeddings = embedding.reduce_scatter_embeddings
    rows.forward = lambda tokens: state.shared_vocabulary.embedded()
    embedding.word_embeddings = rows


def _look_up_again(state: StepState, first: Any, last: Any) -> None:
    """Have multi-token prediction look tokens up in the rows of its rank's first chunk."""
    if first is last:
        multi_token.save_no_copy(last)
        return
    if not first.pre_process:
        _look_up_in(state, last.embedding, first.embedding.word_embeddings)
        first.embedding = last.embedding
    multi_token.share_embedding(first, last)


def _share_head(state: StepState, model: Any, shards: Shards) -> None:
    ties = model.share_embeddings_and_output_weights
    head = tensor_parallel.ColumnParallelLinear(  # itself: libraries go by the class's name
        model.config.hidden_size,
        model.vocab_size,
        config=model.config,
        init_method=model.config.init_method,
        bias=False,
        skip_weight_param_allocation=ties,
        tp_group=shards,
    )
    if ties:  # one weight, of the embedding's rows; the first chunk saves it
        model.tie_embeddings_and_output_weights_state_dict = lambda *args, **options: None
    else:
        head.weight.is_embedding_or_output_parameter = True
    _allow_another_size(head)
    model.output_layer = head
    if not model.post_process:
        return

    def stop_before_logits(hidden: Tensor, **options: Any) -> tuple[Tensor, None]:
        return state.shared_vocabulary.before_logits(hidden), None

    def keep_labels(labels: Tensor, logits: Tensor) -> Tensor:
        kept: Tensor = state.shared_vocabulary.keep_labels(labels, logits)
        return kept

    head.forward = stop_before_logits
    model.compute_language_model_loss = keep_labels
