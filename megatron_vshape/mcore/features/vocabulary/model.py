"""Vocabulary parallelism: every pipeline rank has rows of the embedding and of the output layer.

Every rank builds Megatron's two modules as if tensor parallelism also spanned the pipeline ranks,
pipeline before tensor. So shapes, attributes and the checkpoint metadata of the rows are correct,
and equal to those of any other sharding of the two tensors. The modules' own forward is never
called. A replacement returns the result of the vocabulary passes (`step`) to the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from megatron_vshape.mcore.layout import multi_token
from megatron_vshape.mcore.layout.shared_vocabulary import FLAG
from megatron_vshape.mcore.layout.stage_map import StageMap
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.step_state import MutableState


class Shards(NamedTuple):
    """Replacement of the process group of the shared vocabulary; nothing is sent through it."""

    number: int
    of: int

    def rank(self) -> int:
        """Return the index of this rank's shard."""
        return self.number

    def size(self) -> int:
        """Return the number of shards."""
        return self.of


class VocabularyPasses(Protocol):
    """The vocabulary passes of a step; implemented by `step.SharedVocabulary`."""

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens for the running F."""

    def before_logits(self, hidden: Tensor) -> Tensor:
        """Return the replacement of the logits for a hidden state of the running F."""

    def keep_labels(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Store labels; return the replacement of their losses."""


@dataclass(slots=True)
class RunningStep(MutableState):
    """The vocabulary passes of the step that a model runs, for the modules of both ends."""

    running: VocabularyPasses | None = None

    @property
    def passes(self) -> VocabularyPasses:
        """Return the passes of the running step."""
        assert self.running is not None, "no step runs"
        return self.running


def running_step_of(first: Any) -> RunningStep:
    """Return the running step of the model whose first chunk on this rank is given."""
    step: RunningStep = first.vshape_running_step
    return step


@dataclass(frozen=True, slots=True)
class _SharedLookup:
    """Replaces the forward of the word embedding on the first stage."""

    step: RunningStep

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.step.passes.embedded(tokens)


@dataclass(frozen=True, slots=True)
class _StopBeforeLogits:
    """Replaces the forward of the output layer on the last stage."""

    step: RunningStep

    def __call__(self, hidden: Tensor, **options: Any) -> tuple[Tensor, None]:
        return self.step.passes.before_logits(hidden), None


@dataclass(frozen=True, slots=True)
class _KeepLabels:
    """Replaces the loss of the model on the last stage."""

    step: RunningStep

    def __call__(self, labels: Tensor, logits: Tensor) -> Tensor:
        return self.step.passes.keep_labels(labels, logits)


class _LocalRows(MegatronModule):  # type: ignore[misc]
    """The embedding module of a rank without the first stage: its rows, under Megatron's name."""

    def __init__(self, config: Any, rows: Any) -> None:
        super().__init__(config=config)
        self.word_embeddings = rows


def _allow_size_change(head: Any) -> None:
    """Allow loading another vocabulary size into the output layer, as Megatron does."""
    describe = head.sharded_state_dict

    def sharded_state_dict(*args: Any, **options: Any) -> Any:
        state = describe(*args, **options)
        for sharded_tensor in state.values():
            sharded_tensor.allow_shape_mismatch = True
        return state

    head.sharded_state_dict = sharded_state_dict


def share_rows(first: Any, model: Any, stage_map: StageMap, rank: int, chunk: int) -> None:
    """Give a chunk its rank's rows: the first chunk the embedding's, the last the output layer's.

    `first` is the rank's first chunk. Call this when the chunk is built, before it is wrapped.

    Raises:
        UnsupportedError: The vocabulary is not divisible by the number of ranks, or the logits have
            another dtype than the parameters.
    """
    dtype = getattr(model, "logit_dtype", None)
    if dtype not in (None, model.config.params_dtype):
        raise UnsupportedError(
            f"{FLAG} does not support logit_dtype {dtype}: each rank computes its rows of the "
            f"logits in params_dtype, {model.config.params_dtype}. Remove logit_dtype, or {FLAG}"
        )
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
        _share_embedding(model, shards)
    if chunk == stage_map.num_chunks - 1:
        _share_head(first, model, shards)
        if model.post_process and stage_map.predicting:
            _share_prediction_lookup(first, model)


def has_shared_rows(model: Any) -> bool:
    """Return whether `share_rows` has changed this chunk, the first or the last of its rank."""
    ends = getattr(model, "embedding", None), getattr(model, "output_layer", None)
    rows = getattr(ends[0], "word_embeddings", None), ends[1]
    return any(isinstance(getattr(module, "tp_group", None), Shards) for module in rows)


def check_rows(model: Any) -> None:
    """Raise UnsupportedError if a library has replaced a chunk's embedding since `share_rows`."""
    if getattr(model, "embedding", None) is not None:
        rows = getattr(model.embedding, "word_embeddings", None)
        _check_rows(rows, tensor_parallel.VocabParallelEmbedding, "word embedding")


def check_ends(first: Any, last: Any, ends: tuple[bool, bool]) -> None:
    """Reject a model whose embedding, output layer or loss has changed since `share_rows`.

    The passes of the vocabulary use the weights of these modules and skip their forward, so they
    would drop the change without a message. A change of the module around the word embedding is
    supported: its forward runs on the first stage.

    Args:
        first, last: The first and the last chunk of this rank, unwrapped.
        ends: Whether `first` is the model's first stage, and `last` its last one.

    Raises:
        UnsupportedError: On the ranks that have such a change.
    """
    head: Any = getattr(last, "output_layer", None)
    embedding: Any = getattr(first, "embedding", None)
    _check_rows(head, tensor_parallel.ColumnParallelLinear, "output layer")
    _check_attribute(head, "forward", _StopBeforeLogits if ends[1] else None, "output layer")
    rows: Any = getattr(embedding, "word_embeddings", None)
    _check_rows(rows, tensor_parallel.VocabParallelEmbedding, "word embedding")
    if isinstance(embedding, _LocalRows):
        if type(embedding) is not _LocalRows:
            raise _changed_model_error(
                f"embedding by {_owner(embedding, 'forward')} outside the first stage"
            )
    else:
        _check_attribute(rows, "forward", _SharedLookup, "word embedding")
    loss = "compute_language_model_loss"
    if getattr(type(last), loss) is not getattr(LanguageModule, loss):
        raise _changed_model_error(f"loss by {_owner(last, loss)}.{loss}")
    _check_attribute(last, loss, _KeepLabels if ends[1] else None, "loss")
    for module, part in ((head, "output layer"), (last, "last stage")):
        if module._forward_hooks or module._backward_hooks:
            raise _changed_model_error(f"{part} by a hook")


def _check_rows(module: Any, expected_type: type, part: str) -> None:
    """Raise UnsupportedError unless a module has this rank's rows and Megatron's forward."""
    if not isinstance(getattr(module, "tp_group", None), Shards):
        raise UnsupportedError(
            f"{FLAG} does not support a model with {type(module).__name__} as its {part}: it "
            f"requires Megatron's {expected_type.__name__}, whose rows it distributes (a critic "
            f"has no output layer of the vocabulary). Remove {FLAG} for this model"
        )
    if type(module).forward is not expected_type.forward:  # type: ignore[attr-defined]
        raise _changed_model_error(f"{part} by {_owner(module, 'forward')}")


def _check_attribute(module: nn.Module, name: str, expected_type: type | None, part: str) -> None:
    """Raise UnsupportedError if an instance attribute is not the one that `share_rows` has set."""
    attribute = vars(module).get(name)
    if not (attribute is None if expected_type is None else isinstance(attribute, expected_type)):
        raise _changed_model_error(f"{part} by a {name} of its own")


def _owner(module: Any, name: str) -> str:
    """Return the name of the class that defines an attribute of a module."""
    return next(base.__name__ for base in type(module).__mro__ if name in vars(base))


def _changed_model_error(part: str) -> UnsupportedError:
    return UnsupportedError(
        f"{FLAG} does not support a model that changes its {part}: every rank computes with its "
        f"rows of the vocabulary alone, and that change would be dropped. Remove {FLAG}"
    )


def _share_embedding(model: Any, shards: Shards) -> None:
    rows = tensor_parallel.VocabParallelEmbedding(
        model.vocab_size,
        model.config.hidden_size,
        init_method=model.config.embedding_init_method,
        config=model.config,
        tp_group=shards,
    )
    rows.weight.is_embedding_or_output_parameter = True
    model.vshape_running_step = RunningStep()
    if getattr(model, "embedding", None) is None:
        model.embedding = _LocalRows(model.config, rows)
    else:
        _replace_lookup(model.embedding, rows, model.vshape_running_step)


def _replace_lookup(embedding: Any, rows: Any, step: RunningStep) -> None:
    """Make Megatron's embedding, which adds positions etc., look up tokens in shared rows."""
    rows.reduce_scatter_embeddings = embedding.reduce_scatter_embeddings
    rows.forward = _SharedLookup(step)
    embedding.word_embeddings = rows


def _share_prediction_lookup(first: Any, last: Any) -> None:
    """Make multi-token prediction look up tokens in the rows of its rank's first chunk."""
    if first is last:
        multi_token.save_no_copy(last)
        return
    if not first.pre_process:
        _replace_lookup(last.embedding, first.embedding.word_embeddings, running_step_of(first))
        first.embedding = last.embedding
    multi_token.share_embedding(first, last)


def _share_head(first: Any, model: Any, shards: Shards) -> None:
    ties = model.share_embeddings_and_output_weights
    head = tensor_parallel.ColumnParallelLinear(  # no subclass: libraries check the class name
        model.config.hidden_size,
        model.vocab_size,
        config=model.config,
        init_method=model.config.init_method,
        bias=False,
        skip_weight_param_allocation=ties,
        tp_group=shards,
    )
    if ties:  # one weight, the rows of the embedding; the first chunk saves it
        model.tie_embeddings_and_output_weights_state_dict = lambda *args, **options: None
        # Frameworks that look for either layer in the last chunk after they have loaded weights
        # find the same rows as unregistered attributes.
        vars(head)["weight"] = first.embedding.word_embeddings.weight
        if not hasattr(model, "embedding"):
            vars(model)["embedding"] = first.embedding
    else:
        head.weight.is_embedding_or_output_parameter = True
    _allow_size_change(head)
    model.output_layer = head
    if not model.post_process:
        return
    step = running_step_of(first)
    head.forward = _StopBeforeLogits(step)
    model.compute_language_model_loss = _KeepLabels(step)
