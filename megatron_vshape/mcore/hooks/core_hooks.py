"""Hooks on megatron.core that place stages, for every trainer.

They create process groups and models for the placement of the stages, and answer stage queries for
the running stage. The hooks of the TransformerConfig set chunks per rank and layers per stage; they
act only for a library with its own configuration.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Sequence
from typing import Any
from weakref import ref

from megatron.core import parallel_state
from megatron.core.transformer import module as transformer_module

from megatron_vshape.core.model.placement import Placement
from megatron_vshape.mcore.features.vocabulary.model import check_rows, has_shared_rows, share_rows
from megatron_vshape.mcore.frameworks import adapt_frameworks
from megatron_vshape.mcore.hook import Function, Hook, replaces, replaces_always
from megatron_vshape.mcore.hooks.session import Session
from megatron_vshape.mcore.layout import hybrid, multi_token
from megatron_vshape.mcore.layout.stage_map import check_tied_embeddings
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.refusals import UnsupportedError, refusing
from megatron_vshape.mcore.setup import configure
from megatron_vshape.mcore.setup.choice import resolve_schedule
from megatron_vshape.mcore.setup.configure import StageLayout
from megatron_vshape.mcore.setup.one_planner import RankZeroPlanner
from megatron_vshape.mcore.setup.run_config import RunConfig, ScheduleChoice
from megatron_vshape.mcore.setup.translate import log_translated, translate

logger = logging.getLogger(__name__)


@replaces_always
def config_post_init(session: Session, original: Function, config: Any) -> None:
    """Choose the stages and set them on a pipeline config before the config checks itself."""
    options = session.library_options
    if options is not None and config.pipeline_model_parallel_size > 1:
        with refusing():
            _set_stages(session, options, config)
        adapt_frameworks(session, config)
    original(config)


@replaces_always
def data_parallel_config_post_init(session: Session, original: Function, config: Any) -> None:
    """Record that NCCL registers buffers, and undo environment variables that conflict with it.

    This config can be created before or after the model's config, and Megatron may reject the
    combination.
    """
    if getattr(config, "nccl_ub", False):
        session.process.environment.register_buffers()
    original(config)


def _set_stages(session: Session, options: Options, config: Any) -> None:
    """Set the pipeline's stages on the config; the first config determines them.

    Raises:
        UnsupportedError: A second model differs in size from the first.
    """
    layout = config.pipeline_model_parallel_layout
    if isinstance(layout, StageLayout):
        return  # a copy of a config that already has the stages
    pipeline = session.pipeline
    if pipeline is None:
        pipeline = configure.pipeline_from_config(config, options)
        rank_zero = RankZeroPlanner(str(options.schedule), options.timeout_seconds)
        session.choose(pipeline, None, rank_zero)
        session.process.environment.set_variables(config, pipeline)
        return
    sizes = config.pipeline_model_parallel_size, config.num_layers
    built_sizes = pipeline.stage_map.num_ranks, sum(pipeline.stage_map.layers)
    if sizes != built_sizes:
        raise UnsupportedError(
            f"a second model has {sizes[1]} layers on {sizes[0]} pipeline ranks, and schedule "
            f"{options.schedule!r} is made for {built_sizes[1]} on {built_sizes[0]}: one process "
            "can have one schedule"
        )
    configure.set_stages_in_config(config, pipeline.stage_map)


@replaces_always
def initialize_model_parallel(
    session: Session, original: Function, *args: Any, **options: Any
) -> Any:
    """Create the embedding group from the ranks of the first and last stage."""
    # Libraries may initialize process groups before or after they create the config.
    bound = inspect.signature(original).bind(*args, **options)
    with refusing():
        choice = _schedule_for(session, bound.arguments.get("pipeline_model_parallel_size", 1))
    if choice is None:
        return original(*args, **options)
    placement = choice.placement
    chunks = len(placement) // (max(placement) + 1)
    # Megatron asks this number wherever it distinguishes chunks, even if a library has set none.
    bound.arguments["virtual_pipeline_model_parallel_size"] = chunks if chunks > 1 else None
    # If all ranks share the embedding, no rank has a copy of another rank's rows.
    ends = placement[:1] if choice.shards_output_layer else placement
    bound.arguments["get_embedding_ranks"] = lambda group, *_: embedding_ranks(ends, group)
    return original(*bound.args, **bound.kwargs)


def embedding_ranks(placement: Placement, pipeline_ranks: Sequence[int]) -> list[int]:
    """Return the global ranks of a pipeline whose embedding gradients Megatron must sum.

    If one rank has the first and the last stage, it is the only one: the weight is shared, so there
    is nothing to sum.
    """
    return sorted({pipeline_ranks[placement[0]], pipeline_ranks[placement[-1]]})


def _schedule_for(session: Session, ranks: int) -> ScheduleChoice | None:
    """Return the schedule for `ranks` pipeline ranks, or None if Megatron's schedule runs."""
    pipeline, options = session.pipeline, session.library_options
    if pipeline is not None and pipeline.stage_map.num_ranks == ranks:
        return pipeline.choice
    return (
        None if options is None or ranks == 1 else resolve_schedule(options, ranks, loss_last=True)
    )


def model_init(session: Session, original: Function) -> Function:
    """Build a chunk with the embedding or the output layer if its stage has them."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **options: Any) -> None:
        pipeline = session.pipeline
        if pipeline is None:
            original(self, *args, **options)
            return
        # By name: releases differ in the order of the constructor's parameters.
        bound = signature.bind(self, *args, **options)
        chunk = bound.arguments.get("vp_stage")
        num_chunks = pipeline.stage_map.num_chunks
        if chunk is None and num_chunks > 1:
            chunk = bound.arguments["vp_stage"] = session.build.current_chunk
            if chunk is None:
                raise UnsupportedError(
                    f"{type(self).__name__} is built without a vp_stage, and every rank has "
                    f"{num_chunks} chunks: choose a schedule with one, such as zb-h1"
                )
            bound.arguments["config"].virtual_pipeline_model_parallel_size = num_chunks
        multi_token.check_model(pipeline.stage_map, bound.arguments["config"])
        rank = parallel_state.get_pipeline_model_parallel_rank()
        first, last = pipeline.ends(rank, chunk)
        # The caller derived both from the position of the rank, which is wrong for a V placement.
        bound.arguments["pre_process"], bound.arguments["post_process"] = first, last
        # Megatron's constructor queries the position of the rank.
        session.build.is_extensible = False
        original(*bound.args, **bound.kwargs)
        session.build.is_extensible = True
        # Before DDP and Float16Module wrap the model, which copy its parameters into buffers.
        _share_vocabulary(session, pipeline, self, chunk or 0)
        adapt_frameworks(session, bound.arguments["config"])

    return init


def _share_vocabulary(session: Session, pipeline: RunConfig, model: Any, chunk: int) -> None:
    """Replace embedding and output layer of a chunk by the rows of this rank, if it shares them."""
    if chunk == 0:
        session.build.first_chunk = ref(model)
    if not pipeline.choice.shards_output_layer:
        return
    rank = parallel_state.get_pipeline_model_parallel_rank()
    with refusing():
        first_chunk = session.build.first_chunk()
        share_rows(first_chunk, model, pipeline.stage_map, rank, chunk)


@replaces
def setup_embeddings(session: Session, original: Function, model: Any) -> None:
    """Share one weight between the embedding and the last stage if both are on one rank.

    The last stage shares the output layer if the model ties it, and the embedding of multi-token
    prediction. The chunk with the embedding is built before the last. A library that replaces an
    embedding calls this function again. Megatron would then set the weight of the last stage to
    zero, as a copy to be filled, but here it is the embedding itself.
    """
    pipeline, build = session.pipeline, session.build
    first = build.tied_to.get(model)
    if pipeline is not None and pipeline.choice.shards_output_layer and has_shared_rows(model):
        with refusing():
            check_rows(model)  # a library may have replaced the embedding
        return
    if first is not None:
        _join(first, model)
        return
    original(model)
    if pipeline is None or pipeline.choice.shards_output_layer:
        return
    stage_map, ties = pipeline.stage_map, model.share_embeddings_and_output_weights
    predicts = getattr(model, "mtp_process", False)
    if ties:
        check_tied_embeddings(stage_map)
    if stage_map.ends_meet and model.pre_process:
        build.embedding_chunk = model
    elif build.embedding_chunk is not None:
        build.tied_to[model], build.embedding_chunk = build.embedding_chunk, None
        _join(build.tied_to[model], model)
    elif ties and predicts and model.post_process:
        model.output_layer.weight = None  # never read, and checkpoints cannot be saved with it


def _join(first: Any, last: Any) -> None:
    """Make the last chunk of a rank use the shared weights of the first one."""
    if getattr(last, "mtp_process", False):
        multi_token.share_embedding(first, last)
    if last.share_embeddings_and_output_weights:
        tie_embeddings(first, last)


def tie_embeddings(first: Any, last: Any) -> None:
    """Make the output layer of `last` use the word embedding of `first`, both on this rank.

    The result is one Parameter, owned by `first`. Two copies under one name could not be saved in
    parallel, and their gradients would have to be summed. Code that looks for either layer in
    `last` finds the same weight, such as a framework that loads weights into the last chunk of the
    last rank. Call this before the chunks are wrapped.
    """
    weight = first.embedding.word_embeddings.weight
    # The gradient comes from two passes, of which only one may add to main_grad directly.
    weight.zero_out_wgrad = True
    last.output_layer._parameters.pop("weight", None)
    vars(last.output_layer)["weight"] = weight  # an attribute, not registered
    last._modules.pop("embedding", None)  # if a library has added one
    vars(last)["embedding"] = first.embedding
    last.shared_embedding_or_output_weight = lambda: weight
    # Adds nothing to a checkpoint: the chunk with the embedding saves the tied weight.
    last.tie_embeddings_and_output_weights_state_dict = lambda *_, **__: None


def _chunk_has_end(session: Session, end: int, chunk: int | None) -> bool | None:
    """Return whether a stage is the model's first (`end` 0) or last (`end` 1).

    The stage is the running one or, while models are built, that of `chunk`. None if there is no
    such stage; then the caller answers for the rank.
    """
    pipeline, step = session.pipeline, session.step
    if step.has_logits:
        return True
    if pipeline is None:
        return None
    if step.running_chunk is not None:
        chunk = step.running_chunk
    elif not session.build.is_extensible or chunk is None:
        return None
    return pipeline.ends(parallel_state.get_pipeline_model_parallel_rank(), chunk)[end]


def _rank_has_end(session: Session, end: int) -> bool:
    """Return whether a chunk of this rank is the model's first (`end` 0) or last (1) stage."""
    assert session.pipeline is not None
    rank = parallel_state.get_pipeline_model_parallel_rank()
    return bool(session.pipeline.stage_map.end_ranks[end] == rank)


# A pipeline group per chunk, of rank `stage % ranks`, makes Megatron's own checks right for a V: in
# Megatron-LM's trainer (0.19), losses are equal without the next four hooks and that of
# Float16Module. They stay because a framework asks with the group of the run while it builds
# models, and because the last stage of a shared vocabulary must not convert its
# output to fp32.
def vp_stage_check(end: int) -> Function:
    """Create the replacement of `is_vp_first_stage` (`end` 0) or of `is_vp_last_stage` (`end` 1).

    Megatron checks whether a chunk is the first or last of its rank. Libraries combine it with the
    check of `pp_stage_check`. While models are built, both are true together for the chunk with
    this end of the model, wherever the schedule places it.
    """

    @replaces
    def check(
        session: Session, original: Function, vp_stage: int | None, vp_size: int | None
    ) -> bool:
        chunk = session.build.provided_chunk if vp_stage is None else vp_stage
        has_end = _chunk_has_end(session, end, chunk)
        return bool(original(vp_stage, vp_size)) if has_end is None else has_end

    return check


def pp_stage_check(end: int) -> Function:
    """Create the replacement of `is_pp_first_stage` (`end` 0) or of `is_pp_last_stage` (`end` 1).

    Megatron checks whether a rank is the first or last of its pipeline. While models are built, the
    check is true for the rank that has this end of the model in any chunk.
    """

    @replaces
    def check(session: Session, original: Function, pp_group: Any) -> bool:
        has_end = _chunk_has_end(session, end, session.build.provided_chunk)
        if has_end is None and session.build.is_extensible:
            has_end = _rank_has_end(session, end)
        return bool(original(pp_group)) if has_end is None else has_end

    return check


def pipeline_stage_check(end: int) -> Function:
    """Create the replacement of `is_pipeline_first_stage` (`end` 0) or `..._last_stage` (`end` 1).

    The stage is that of `vp_stage` if given (and not ignored), else that of the running chunk. If
    no chunk runs, the result is about the rank. While models are built: whether any of its chunks
    is that stage. Afterwards: Megatron's result, its position in the pipeline, because the last
    rank gets the results of the loss (`loss_last` of `pipeline_from_config`).
    """

    @replaces
    def check(
        session: Session,
        original: Function,
        ignore_virtual: bool = True,
        vp_stage: int | None = None,
    ) -> bool:
        pipeline = session.pipeline
        # Every rank computes a part of the loss here, and counts as first and last.
        if session.step.has_logits:
            return True
        if not ignore_virtual and session.step.running_chunk is None:
            session.build.queried_chunk = vp_stage
        chunk = session.step.running_chunk if ignore_virtual else vp_stage
        # With one chunk per rank, callers pass no vp_stage; chunk 0 is the only candidate.
        if pipeline is not None and not ignore_virtual and pipeline.stage_map.num_chunks == 1:
            chunk = 0
        if chunk is None and session.build.is_extensible and pipeline is not None:
            return _rank_has_end(session, end)
        if pipeline is None or chunk is None:
            return bool(original(ignore_virtual=ignore_virtual, vp_stage=vp_stage))
        return pipeline.ends(parallel_state.get_pipeline_model_parallel_rank(), chunk)[end]

    return check


@replaces
def get_megatron_optimizer(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Record the optimizer, whose state counts as static memory for a memory limit.

    The models are complete at this call. Options of the optimizer config that conflict with the
    schedule are logged and turned off.
    """
    session.build.is_extensible = False
    if session.pipeline is not None:
        config = inspect.signature(original).bind(*args, **options).arguments["config"]
        log_translated(translate(config, session.pipeline.stage_map.placement))
    session.build.optimizer = optimizer = original(*args, **options)
    session.process.environment.withdraw_loading_mode()  # the model is on its device by now
    return optimizer


@replaces
def select_pipeline_segment(
    session: Session,
    original: Function,
    main_pattern: str,
    pp_group: Any,
    vp_stage: int | None,
    *args: Any,
    **options: Any,
) -> Any:
    """Return the part of a hybrid model's layer pattern that belongs to the stage of a chunk."""
    if session.pipeline is None:
        return original(main_pattern, pp_group, vp_stage, *args, **options)
    stage_map = session.pipeline.stage_map
    stage = stage_map.stage(pp_group.rank(), vp_stage)
    # Cut by our stages: a library may give its model alone a pattern with others.
    pattern_layers = hybrid.parts(main_pattern)
    if stage == 0 and len(pattern_layers) > 1 and pattern_layers != stage_map.layers:
        logger.info(
            "%s %.80s: its %d stages as the schedule's %d: layers per stage %s",
            *(hybrid.OPTION, main_pattern, len(pattern_layers), len(stage_map.layers)),
            ",".join(map(str, stage_map.layers)),
        )
    segments = hybrid.cut_pattern(main_pattern, stage_map.layers).split(hybrid.BEGINS_STAGE)
    allocation: Any = inspect.getmodule(original)
    layers = allocation.validate_segment_layers(segments[stage])
    return layers, sum(map(len, segments[:stage]))


@replaces
def heterogeneous_layer_spec(
    session: Session, original: Function, *args: Any, **options: Any
) -> Any:
    """Return the layer specs of the chunk that is built; Megatron calls it without its vp_stage."""
    bound = inspect.signature(original).bind(*args, **options)
    if bound.arguments.get("vp_stage") is None:
        bound.arguments["vp_stage"] = session.build.provided_chunk
    return original(*bound.args, **bound.kwargs)


@replaces
def block_init(
    session: Session, original: Function, block: Any, *args: Any, **options: Any
) -> None:
    """Build the layers of a chunk, or all layers of an encoder on one rank.

    A library's Qwen3-VL builds the layers of a chunk once more without its vp_stage. Another copies
    the config of the language model for an encoder on one rank. The copy still has the
    stages of the language model, so that Megatron would build the layers of a stage.

    Raises:
        UnsupportedError: The encoder has several pipeline ranks.
    """
    bound = inspect.signature(original).bind(block, *args, **options)
    config = bound.arguments["config"]
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    if isinstance(layout, StageLayout):
        sizes = config.pipeline_model_parallel_size, config.num_layers
        stage_map = layout.stage_map
        if sizes == (stage_map.num_ranks, sum(stage_map.layers)):
            if bound.arguments.get("vp_stage") is None:
                bound.arguments["vp_stage"] = session.build.current_chunk
        elif sizes[0] == 1:
            config.pipeline_model_parallel_layout = None
        else:
            # Not RefusedError: only some ranks build an encoder, and a library reports an exception
            # of one rank.
            raise UnsupportedError(
                f"an encoder of {sizes[1]} layers on {sizes[0]} pipeline ranks is not supported: "
                "a schedule has the stages of one model, the language model. Set "
                "pipeline_model_parallel_size 1 in the config of the encoder, or remove the "
                "schedule, and Megatron runs its own"
            )
    original(*bound.args, **bound.kwargs)


@replaces
def float16_module_forward(
    session: Session,
    original: Function,
    module: Any,
    *inputs: Any,
    fp32_output: bool = True,
    **options: Any,
) -> Any:
    """Convert inputs on the first stage and outputs on the last stage of any placement."""
    pipeline = session.pipeline
    if pipeline is None:
        return original(module, *inputs, fp32_output=fp32_output, **options)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    first, last = pipeline.ends(rank, module.vp_stage)
    if first:
        inputs = transformer_module.fp32_to_float16(inputs, module.float16_convertor)
    outputs = module.module(*inputs, **options)
    # If all ranks share the output layer, the last stage ends before the logits. While all ranks
    # compute logits (`has_logits`), each of them converts its own.
    makes_loss = session.step.has_logits or (last and not pipeline.choice.shards_output_layer)
    return transformer_module.float16_to_fp32(outputs) if makes_loss and fp32_output else outputs


_STATE = "megatron.core.parallel_state"
_UTILS = "megatron.core.pipeline_parallel.utils"

HOOKS = (
    Hook(
        "megatron.core.models.hybrid.hybrid_layer_allocation",
        "select_pipeline_segment",
        ("main_pattern", "pp_group", "vp_stage"),
        "gives a stage its part of a hybrid model's pattern of layers, wherever the stage is",
        select_pipeline_segment,
        since=(0, 18),
        former_module="megatron.core.ssm.mamba_hybrid_layer_allocation",
        everywhere=True,
    ),
    Hook(
        "megatron.core.transformer.transformer_config",
        "TransformerConfig.__post_init__",
        ("self",),
        "sets chunks per rank and layers per stage on a library's config",
        config_post_init,
    ),
    Hook(
        "megatron.core.distributed.distributed_data_parallel_config",
        "DistributedDataParallelConfig.__post_init__",
        ("self",),
        "leaves the allocator alone where NCCL registers buffers, which a library's schedule sets",
        data_parallel_config_post_init,
    ),
    Hook(
        _STATE,
        "initialize_model_parallel",
        (
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "get_embedding_ranks",
        ),
        "creates the embedding group of the ranks with embedding and output layer",
        initialize_model_parallel,
        everywhere=True,
    ),
    *(
        Hook(
            module,
            name,
            ("pre_process", "post_process", "vp_stage"),
            "builds a chunk as the stage that it is",
            model_init,
            since=since,
        )
        for module, name, since in (
            ("megatron.core.models.gpt.gpt_model", "GPTModel.__init__", (0, 0)),
            ("megatron.core.models.hybrid.hybrid_model", "HybridModel.__init__", (0, 18)),
        )
    ),
    Hook(
        "megatron.core.transformer.transformer_block",
        "TransformerBlock.__init__",
        ("self", "config", "vp_stage"),
        "builds the layers of a chunk without a vp_stage, and all layers of an encoder",
        block_init,
    ),
    Hook(
        "megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs",
        "get_gpt_heterogeneous_layer_spec",
        ("config", "vp_stage"),
        "builds the layers of each chunk; the trainer calls it without vp_stage",
        heterogeneous_layer_spec,
        everywhere=True,
    ),
    Hook(
        "megatron.core.models.common.language_module.language_module",
        "LanguageModule.setup_embeddings_and_output_layer",
        ("self",),
        "shares one weight of tied or repeated embeddings on one rank",
        setup_embeddings,
    ),
    *(
        Hook(_UTILS, name, expects, reason, replacement, everywhere=True)
        for name, expects, replacement in (
            ("is_pp_first_stage", ("pp_group",), pp_stage_check(0)),
            ("is_pp_last_stage", ("pp_group",), pp_stage_check(1)),
            ("is_vp_first_stage", ("vp_stage", "vp_size"), vp_stage_check(0)),
            ("is_vp_last_stage", ("vp_stage", "vp_size"), vp_stage_check(1)),
        )
        for reason in ("answers for the stage that runs, or while models are built for their ends",)
    ),
    Hook(
        "megatron.core.optimizer",
        "get_megatron_optimizer",
        ("config", "model_chunks"),
        "remembers a library's optimizer, whose memory a limit has to leave room for",
        get_megatron_optimizer,
        everywhere=True,
    ),
    Hook(
        _STATE,
        "is_pipeline_first_stage",
        ("ignore_virtual", "vp_stage"),
        "the stage with the embedding may be any chunk of any rank",
        pipeline_stage_check(0),
        everywhere=True,
    ),
    Hook(
        _STATE,
        "is_pipeline_last_stage",
        ("ignore_virtual", "vp_stage"),
        "the stage with the loss may be any chunk of any rank",
        pipeline_stage_check(1),
        everywhere=True,
    ),
    Hook(
        "megatron.core.transformer.module",
        "Float16Module.forward",
        ("inputs", "fp32_output", "kwargs"),
        "it asks for the last rank, and would send fp32 from there and compute a 16-bit loss",
        float16_module_forward,
    ),
)
"""The functions of megatron.core that place and build stages, for every trainer."""
