"""Checkpoints that depend on the layers of each rank.

Megatron writes a checkpoint of `--ckpt-format torch` by rank and chunk, with layer numbers local to
the chunk, and loads it whatever this option is, so schedules with several chunks per rank reject
it. Weights in distributed checkpoints have global layer numbers, and any schedule loads them.

By default, Megatron's distributed optimizer saves the buffers of each rank without the names of
their parameters (`dp_reshardable`, and the older forms). A run with other layers on a rank would
load the state of other parameters where the sizes are equal, and fail with "Global shape mismatch"
where they are not. So a checkpoint records the layers of all ranks, and they are compared before
such state is loaded. All trainers save and load through `megatron.core.dist_checkpointing`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import Placement, looping, stages_of
from megatron_vshape.core.schedule_names import is_megatrons_own
from megatron_vshape.mcore.frameworks import frameworks
from megatron_vshape.mcore.hook import Function, Hook, Replaced, replaces, replaces_always
from megatron_vshape.mcore.hooks.session import Session
from megatron_vshape.mcore.layout import hybrid
from megatron_vshape.mcore.layout.given_layout import (
    DECODER,
    EMBEDDING,
    LOSS,
    MTP,
    OPTION,
    of_ranks,
    stages_in,
)
from megatron_vshape.mcore.layout.multi_token import num_predicting
from megatron_vshape.mcore.layout.stage_map import StageMap
from megatron_vshape.mcore.refusals import UnsupportedError, is_plain, refusing
from megatron_vshape.mcore.setup.run_config import RunConfig
from megatron_vshape.mcore.setup.translate import FIRST, LAST, count_layers, first_given

logger = logging.getLogger(__name__)

UNKNOWN_LAYERS = (
    "the checkpoint in %s does not state which rank had which layers: make sure that this run has "
    "the same pipeline schedule and layer split"
)

_FORM = "param_state_sharding_type"
"""Entry of an optimizer's state with the name of its form."""


def layers_of_pipeline(pipeline: RunConfig) -> Layers:
    """Return the layers of all ranks under a schedule of this package."""
    return layers_of_stages(pipeline.stage_map, pipeline.choice.shards_output_layer)


@replaces
def save(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Record the layers of all ranks in the content metadata of a checkpoint."""
    bound = inspect.signature(original).bind(*args, **options)
    metadata = bound.arguments.get("content_metadata")
    # Without content metadata, Megatron takes a checkpoint for one of an older release.
    if session.pipeline is not None and metadata is not None:
        layers = layers_of_pipeline(session.pipeline)
        bound.arguments["content_metadata"] = {**metadata, RECORD: layers}
    return original(*bound.args, **bound.kwargs)


@replaces_always
def load(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Reject optimizer state that was saved with other layers on the ranks."""
    arguments = inspect.signature(original).bind(*args, **options).arguments
    if has_state_by_rank(arguments["sharded_state_dict"]):
        with refusing():
            _compare_layers(session, str(arguments["checkpoint_dir"]))
    return original(*args, **options)


def has_state_by_rank(state: Any) -> bool:
    """Return whether a state dict has optimizer state in a form that depends on the rank."""
    if not isinstance(state, Mapping):
        return False
    form = state.get(_FORM)
    if form is not None:
        return form not in DistributedOptimizer.checkpoint_fully_reshardable_formats
    # An optimizer, or several under their numbers (experts have another one than dense layers).
    return any(map(has_state_by_rank, state.values()))


def _compare_layers(session: Session, folder: str) -> None:
    """Compare the layers of all ranks in a checkpoint with those of this run.

    Raises:
        UnsupportedError: A rank had other layers, or they are unknown.
    """
    pipeline = session.pipeline
    common = dist_checkpointing.load_common_state_dict(folder)
    record = (common.get("content_metadata") or {}).get(RECORD)
    if record is None and session.is_idle:  # no schedule of this package, neither then nor now
        return
    saved_options = (framework.saved_options(folder) for framework in frameworks())
    options = common.get("args") or next(filter(None, saved_options), None)
    saved = record or saved_layers(options)
    name = getattr(options, "pipeline_schedule", None)
    # A release without the record saved it under this schedule.
    if saved is None and pipeline is not None and name == pipeline.choice.name:
        logger.warning(UNKNOWN_LAYERS, folder)
        return
    # None without the trainer's arguments.
    current = layers_of_megatron(session.arguments)
    if pipeline is not None:
        current = layers_of_pipeline(pipeline)
    if current is not None:
        check_optimizer_state(saved, current, folder)


def check_optimizer_state(saved: Layers | None, current: Layers, folder: str) -> None:
    """Raise UnsupportedError unless optimizer state by rank was saved with the current layers."""
    differs = "the checkpoint does not state which rank had which layers"
    if saved is not None:
        first_difference = difference(saved, current)
        if first_difference is None:
            return
        differs = first_difference
    raise UnsupportedError(
        f"the optimizer state in {folder} does not work with this schedule: the distributed "
        f"optimizer saved it by rank, in Megatron's default form, and {differs}. Resume with "
        f"{LAYER_OPTIONS} of the run that saved it "
        "(none of them for stock Megatron); with --dist-ckpt-optim-fully-reshardable, any schedule "
        "loads the checkpoints that it saves. Or add --no-load-optim to load the weights alone"
    )


@replaces
def fully_reshardable_state(
    session: Session, original: Function, optimizer: Any, *args: Any, **options: Any
) -> Any:
    """Save fully reshardable state of the right parameters if buckets are padded.

    Megatron up to 0.19 gathers the buckets of a buffer without their padding, and then reads the
    state of every parameter at its index in the buffer with padding. With several padded buckets
    (--overlap-grad-reduce), it would save the state of neighboring parameters. Later releases
    correct the indices themselves.
    """
    if "cumulative_padding_stripped" in inspect.unwrap(original).__code__.co_varnames:
        return original(optimizer, *args, **options)
    with Replaced() as replaced:
        for buffer in optimizer.buffers:
            replaced.put(buffer, "param_index_map", _indices_without_padding(buffer))
        return original(optimizer, *args, **options)


def _indices_without_padding(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """Return start, end and bucket of every parameter in a buffer without padding of buckets."""
    padding = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
    padding_before = [0, *accumulate(padding)]
    return {
        parameter: (start - padding_before[bucket], end - padding_before[bucket], bucket)
        for parameter, (start, end, bucket) in buffer.param_index_map.items()
    }


@replaces
def load_base_checkpoint(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Reject a checkpoint by ranks (--ckpt-format torch) if a rank has several chunks."""
    state, *settings, form = original(*args, **options)
    arguments = inspect.signature(original).bind(*args, **options).arguments
    # With rank0, only the arguments are read.
    if getattr(form, "name", None) == "LEGACY" and not arguments.get("rank0"):
        with refusing():
            _check_placement(session, arguments["load_dir"])
    return state, *settings, form


def _check_placement(session: Session, folder: str) -> None:
    """Raise UnsupportedError unless the stages are in the order of the ranks, as in stock runs."""
    pipeline = session.pipeline
    if pipeline is None or is_plain(pipeline.stage_map.placement):
        return
    raise UnsupportedError(
        f"--load {folder} does not work with --pipeline-schedule {pipeline.choice.name}: the "
        "checkpoint was saved with --ckpt-format torch, which stores layers by rank and chunk. "
        "Convert it by a run with the flags that saved it, --ckpt-convert-format torch_dist and "
        "--ckpt-convert-save DIR; any schedule loads the result"
    )


_SERIALIZATION = "megatron.core.dist_checkpointing.serialization"

RECORD = "pipeline_rank_layers"
"""Name of the layers in a checkpoint: in its arguments, or in its content metadata."""

Layers = list[list[list[int]]]
"""Layer numbers per rank and chunk, or one of the numbers in `WORDS`.

Layers of multi-token prediction are counted after the other layers.
"""

_EMBEDDING, _OUTPUT, _VOCABULARY_ROWS = 0, -1, -2

WORDS = {_EMBEDDING: "embedding", _OUTPUT: "output", _VOCABULARY_ROWS: "vocabulary rows"}
"""Names of the entries that are no layers."""

LAYER_OPTIONS = "the schedule, --pipeline-layer-split and --pipeline-vocab-parallel"
"""Options that determine the layers of the ranks."""


def layers_of_stages(stage_map: StageMap, has_vocabulary_rows: bool = False) -> Layers:
    """Return the layers of the ranks; with vocabulary rows, all ranks have parts of both ends."""
    stages = _with_ends(stage_map.layers, stage_map.predicting)
    ranks = _numbered(stages, stage_map.placement)
    for rank in ranks if has_vocabulary_rows else ():
        rank[0].append(_VOCABULARY_ROWS)
        if len(rank) > 1:
            rank[-1].append(_VOCABULARY_ROWS)
    return ranks


def saved_layers(args: Any) -> Layers | None:
    """Return the layers according to a checkpoint's arguments; None if unknown.

    A checkpoint without a record is from Megatron's schedules or from an earlier version of this
    package.
    """
    record: Layers | None = getattr(args, RECORD, None)
    name = getattr(args, "pipeline_schedule", None)
    if record is not None or (name is not None and not is_megatrons_own(name)):
        return record
    return layers_of_megatron(args)


def layers_of_megatron(options: Any) -> Layers | None:
    """Return the layers of the ranks under a schedule of Megatron; None if unknown.

    `options` are Megatron's arguments after validation, or the values of a config.
    """
    ranks = getattr(options, "pipeline_model_parallel_size", None)
    if ranks is None or count_layers(options) is None:
        return None
    try:
        stages = _stages_of_megatron(options, ranks)
    except ScheduleError:
        return None
    if not stages or len(stages) % ranks:
        return None
    return _numbered(stages, looping(ranks, len(stages) // ranks))


def _stages_of_megatron(options: Any, ranks: int) -> list[list[str]] | None:
    """Return the names of the layers of every stage, as Megatron splits the model.

    Source: get_num_layers_to_build in megatron/core/transformer/transformer_block.py.

    Raises:
        ScheduleError: The options do not fit the model.
    """
    layout = getattr(options, OPTION, None)
    if layout is not None:
        return stages_in(layout)
    predicting = num_predicting(options)
    if hybrid.marks_stages(options):
        return _with_ends(hybrid.parts(options.hybrid_layer_pattern), predicting)
    chunks = getattr(options, "virtual_pipeline_model_parallel_size", None) or 1
    total = count_layers(options)
    first, last = first_given(options, FIRST), first_given(options, LAST)
    if total is None:  # the layers of the checkpoint are unknown
        return None
    if first is not None or last is not None:
        counts = of_ranks(total, ranks, first, last)
        return _with_ends([count // chunks for count in counts] * chunks, predicting)
    less_first = bool(getattr(options, "account_for_embedding_in_pipeline_split", False))
    less_last = bool(getattr(options, "account_for_loss_in_pipeline_split", False))
    stage_size, remainder = divmod(total + less_first + less_last, ranks * chunks)
    if remainder:
        return None
    layers = [stage_size] * (ranks * chunks)
    layers[0] -= less_first
    layers[-1] -= less_last
    return _with_ends(layers, predicting)


def _with_ends(layers: Sequence[int], predicting: int) -> list[list[str]]:
    stages = [[DECODER] * count for count in layers]
    stages[0].insert(0, EMBEDDING)
    stages[-1] += [MTP] * predicting + [LOSS]
    return stages


def _numbered(stages: Sequence[Sequence[str]], placement: Placement) -> Layers:
    """Return the numbers of the named layers of all stages, by rank and chunk."""
    ends = {EMBEDDING: _EMBEDDING, LOSS: _OUTPUT}
    number = 0
    numbers: list[list[int]] = []
    for stage in stages:
        numbers.append([])
        for name in stage:
            number += name not in ends
            numbers[-1].append(ends.get(name, number))
    ranks = stages_of(placement, max(placement) + 1)
    return [[numbers[stage] for stage in rank_stages] for rank_stages in ranks]


def difference(saved: Layers, current: Layers) -> str | None:
    """Describe the first rank whose layers differ; None if all are equal."""
    if saved == current:
        return None
    if len(saved) != len(current):
        return f"it has {len(saved)} pipeline ranks and this run {len(current)}"
    rank = next(rank for rank, chunks in enumerate(saved) if chunks != current[rank])
    return f"rank {rank} had {_text(saved[rank])} and has {_text(current[rank])} here"


def _text(chunks: Sequence[Sequence[int]]) -> str:
    return " | ".join(
        ", ".join(WORDS.get(layer, str(layer)) for layer in chunk) or "no layers"
        for chunk in chunks
    )


HOOKS = (
    Hook(
        _SERIALIZATION,
        "save",
        ("sharded_state_dict", "content_metadata"),
        "records the layers of every rank in a distributed checkpoint",
        save,
        everywhere=True,
    ),
    Hook(
        _SERIALIZATION,
        "load",
        ("sharded_state_dict", "checkpoint_dir"),
        "rejects optimizer state by rank if the ranks have other layers",
        load,
        everywhere=True,
    ),
    Hook(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer.sharded_param_state_fully_reshardable",
        ("self", "model_sharded_state_dict", "is_loading"),
        "saves optimizer state of the right parameters if several buckets are padded",
        fully_reshardable_state,
    ),
    Hook(
        "megatron.training.checkpointing",
        "_load_base_checkpoint",
        ("load_dir", "rank0"),
        "rejects a checkpoint by ranks (--ckpt-format torch) if a rank has several chunks",
        load_base_checkpoint,
    ),
)
"""The functions that save and load checkpoints, for every trainer and for Megatron-LM's."""
