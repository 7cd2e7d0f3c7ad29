"""Hooks on megatron.core that place stages, for every trainer.

They create process groups and models for the placement of the stages, and answer stage queries for
the running stage. The hooks of the TransformerConfig set chunks per rank and layers per stage; they
act only for a library with its own configuration.
"""

from __future__ import annotations

import functools
import inspect
import sys
from itertools import accumulate
from typing import Any
from weakref import ref

from megatron.core import parallel_state

from megatron_vshape.mcore.hook import Function, Replaced, replaces, replaces_always
from megatron_vshape.mcore.hooks import nemo_rl
from megatron_vshape.mcore.hooks.replacements import has_end
from megatron_vshape.mcore.hooks.session import Session
from megatron_vshape.mcore.layout import multi_token, stages
from megatron_vshape.mcore.layout.stage_map import check_tied_embeddings
from megatron_vshape.mcore.layout.stages import StageLayout
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.refusals import UnsupportedError, refusing
from megatron_vshape.mcore.setup import configure
from megatron_vshape.mcore.setup.choice import ScheduleConfig, choice_for
from megatron_vshape.mcore.setup.features import BuiltChunk, features
from megatron_vshape.mcore.setup.pipeline import Pipeline
from megatron_vshape.mcore.setup.ready import (
    complete_environment,
    leave_allocator,
    withdraw_loading_mode,
)
from megatron_vshape.mcore.setup.translate import tell, translate


def options_of(session: Session) -> Options | None:
    """Return the options of a library's run; None if flags decide or no schedule is requested."""
    return session.library if session.is_librarys else None


@replaces_always
def config_post_init(session: Session, original: Function, config: Any) -> None:
    """Choose the stages and set them on a pipeline config before the config checks itself."""
    options = options_of(session)
    if options is not None and config.pipeline_model_parallel_size > 1:
        with refusing():
            _choose(session, options, config)
        _have_chunks_provided(session, config)
        if session.pipeline is not None and session.pipeline.stage_map.num_chunks > 1:
            nemo_rl.keep_all_chunks(session)
    original(config)


@replaces_always
def data_parallel_config_post_init(session: Session, original: Function, config: Any) -> None:
    """Record that NCCL registers buffers, and undo environment variables that conflict with it.

    This config can be created before or after the model's config, and Megatron may reject the
    combination.
    """
    if getattr(config, "nccl_ub", False):
        session.registers = True
        session.set_variables -= leave_allocator(session.set_variables)
    original(config)


def _have_chunks_provided(session: Session, config: Any) -> None:
    """Patch a library's provider of hybrid models, which is its config, to build several chunks."""
    owner: Any = next((each for each in type(config).__mro__ if "provide" in vars(each)), None)
    if not getattr(config, "is_hybrid_model", False) or owner in (None, *session.providers):
        return
    session.providers.append(owner)
    session.replaced.put(owner, "provide", provide_hybrid(session, owner.provide))


@replaces
def provide_hybrid(
    session: Session,
    original: Function,
    config: Any,
    pre_process: bool | None = None,
    post_process: bool | None = None,
    vp_stage: int | None = None,
) -> Any:
    """Build one of several chunks with a provider that rejects virtual pipeline stages.

    Megatron-Bridge's provider rejects them, although its model supports them. The provider sees a
    config without chunks; `model_init` passes the chunk to the model's constructor.
    """
    if session.pipeline is None or vp_stage is None:
        return original(config, pre_process, post_process, vp_stage)
    session.provided_chunk = vp_stage
    try:
        with Replaced() as replaced:
            # The provider raises if the config has virtual stages.
            replaced.put(config, "virtual_pipeline_model_parallel_size", None)
            return original(config, pre_process, post_process)
    finally:
        session.provided_chunk = None


def _choose(session: Session, options: Options, config: Any) -> None:
    """Set the pipeline's stages on the config; the first config determines them.

    Raises:
        UnsupportedError: A second model differs in size from the first.
    """
    layout = config.pipeline_model_parallel_layout
    if isinstance(layout, StageLayout):
        return  # a copy of a config that already has the stages
    pipeline = session.pipeline
    if pipeline is None:
        pipeline = configure.prepare_config(config, options)
        session.choose(pipeline, None)
        session.set_variables = complete_environment(config, pipeline, session.registers)
        return
    sizes = config.pipeline_model_parallel_size, config.num_layers
    known = pipeline.stage_map.num_ranks, sum(pipeline.stage_map.layers)
    if sizes != known:
        raise UnsupportedError(
            f"a second model has {sizes[1]} layers on {sizes[0]} pipeline ranks, and schedule "
            f"{options.schedule!r} is made for {known[1]} on {known[0]}: one process can have one "
            "schedule"
        )
    configure.tell_config(config, pipeline.stage_map)


@replaces_always
def initialize_model_parallel(
    session: Session, original: Function, *args: Any, **given: Any
) -> Any:
    """Create the embedding group from the ranks of the first and last stage."""
    bound = inspect.signature(original).bind(*args, **given)
    with refusing():
        choice = _choice(session, bound.arguments.get("pipeline_model_parallel_size", 1))
    if choice is None:
        return original(*args, **given)
    placement = choice.placement
    chunks = len(placement) // (max(placement) + 1)
    bound.arguments["virtual_pipeline_model_parallel_size"] = chunks if chunks > 1 else None
    # If all ranks share the embedding, no rank has a copy of another rank's rows.
    ends = placement[:1] if choice.shares else placement
    bound.arguments["get_embedding_ranks"] = lambda group, *_: stages.embedding_ranks(ends, group)
    return original(*bound.args, **bound.kwargs)


def _choice(session: Session, ranks: int) -> ScheduleConfig | None:
    """Return the schedule for `ranks` pipeline ranks, or None if Megatron's schedule runs."""
    pipeline, options = session.pipeline, options_of(session)
    if pipeline is not None and pipeline.stage_map.num_ranks == ranks:
        return pipeline.choice
    return None if options is None or ranks == 1 else choice_for(options, ranks, loss_last=True)


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
        if chunk is None and session.provided_chunk is not None:
            chunk = bound.arguments["vp_stage"] = session.provided_chunk
            config = bound.arguments["config"]
            config.virtual_pipeline_model_parallel_size = pipeline.stage_map.num_chunks
        if chunk is None and pipeline.stage_map.num_chunks > 1:
            raise UnsupportedError(
                f"{type(self).__name__} is built without a vp_stage, and every rank has "
                f"{pipeline.stage_map.num_chunks} chunks: choose a schedule with one, such as zb-h1"
            )
        multi_token.check_model(pipeline.stage_map, bound.arguments["config"])
        rank = parallel_state.get_pipeline_model_parallel_rank()
        first, last = pipeline.ends(rank, chunk)
        # The caller derived both from the position of the rank, which is wrong for a V placement.
        bound.arguments["pre_process"], bound.arguments["post_process"] = first, last
        session.is_building = False  # Megatron's constructor queries the position of the rank
        original(*bound.args, **bound.kwargs)
        session.is_building = True
        _build_features(session, pipeline, self, chunk or 0)
        _have_stages_found(session, pipeline)

    return init


def _build_features(session: Session, pipeline: Pipeline, model: Any, chunk: int) -> None:
    """Let features change a chunk, before the library wraps it."""
    if chunk == 0:
        session.first_chunk = ref(model)
    built = BuiltChunk(
        pipeline=pipeline,
        state=session.step,
        first=session.first_chunk(),
        model=model,
        chunk=chunk,
        rank=parallel_state.get_pipeline_model_parallel_rank(),
        patch=session.patch_once,
    )
    with refusing():
        for feature in features():
            feature.build_chunk(built)


_ROWS = "embedding.word_embeddings.weight"

_CONVERTER = "mcore_adapter.models.converter.dist_converter"


def _have_stages_found(session: Session, pipeline: Pipeline) -> None:
    """Make ROLL's mcore_adapter load the weights of the stages of this rank.

    The converter numbers stages by chunk, then rank, and treats a tied output layer as a separate
    weight. The patch applies only if mcore_adapter builds the model.
    """
    converter = getattr(sys.modules.get(_CONVERTER), "DistConverter", None)
    if converter is None or converter in session.providers:
        return
    session.providers.append(converter)
    stage_map, is_here = pipeline.stage_map, converter.is_on_this_rank

    def layer_info(self: Any, layer: int) -> tuple[int, int, int]:
        stage = next(each for each, end in enumerate(accumulate(stage_map.layers)) if layer < end)
        local = layer - sum(stage_map.layers[:stage])
        return local, stage_map.placement[stage], stage_map.chunk(stage)

    def is_first(self: Any, vp_stage: int) -> bool:
        return pipeline.ends(self.pipeline_model_parallel_rank, vp_stage)[0]

    def is_last(self: Any, vp_stage: int) -> bool:
        return pipeline.ends(self.pipeline_model_parallel_rank, vp_stage)[1]

    def is_on_this_rank(self: Any, weight_name: str, vp_stage: int | None = None) -> bool:
        # A tied output layer is the embedding itself, so only the chunk of the first stage loads
        # it.
        is_twice = stage_map.ends_meet and weight_name == _ROWS and not self.revert
        elsewhere = is_twice and not is_first(self, vp_stage or 0)
        return not elsewhere and bool(is_here(self, weight_name, vp_stage))

    session.replaced.put(converter, "_get_layer_info", layer_info)
    session.replaced.put(converter, "is_pipeline_first_stage", is_first)
    session.replaced.put(converter, "is_pipeline_last_stage", is_last)
    session.replaced.put(converter, "is_on_this_rank", is_on_this_rank)


@replaces
def setup_embeddings(session: Session, original: Function, model: Any) -> None:
    """Share one weight between the embedding and the last stage if both are on one rank.

    The last stage shares the output layer if the model ties it, and the embedding of multi-token
    prediction. The chunk with the embedding is built before the last. A library that replaces an
    embedding calls this function again (Megatron-Bridge for Gemma 3). Megatron would then set the
    weight of the last stage to zero, as a copy to be filled, but here it is the embedding itself.
    """
    pipeline, first = session.pipeline, session.joined.get(model)
    if pipeline is not None:
        with refusing():
            if any(each.owns_embeddings(pipeline, model) for each in features()):
                return
    if first is not None:
        _join(first, model)
        return
    original(model)
    if pipeline is None or pipeline.choice.shares:
        return
    stage_map, ties = pipeline.stage_map, model.share_embeddings_and_output_weights
    predicts = getattr(model, "mtp_process", False)
    if ties:
        check_tied_embeddings(stage_map)
    if stage_map.ends_meet and model.pre_process:
        session.embedding_end = model
    elif session.embedding_end is not None:
        session.joined[model], session.embedding_end = session.embedding_end, None
        _join(session.joined[model], model)
    elif ties and predicts and model.post_process:
        model.output_layer.weight = None  # never read, and checkpoints cannot be saved with it


def _join(first: Any, last: Any) -> None:
    """Make the last chunk of a rank use the shared weights of the first one."""
    if getattr(last, "mtp_process", False):
        multi_token.share_embedding(first, last)
    if last.share_embeddings_and_output_weights:
        stages.tie_embeddings(first, last)


def _is_end(session: Session, end: int, chunk: int | None) -> bool | None:
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
    elif not session.is_building or chunk is None:
        return None
    return pipeline.ends(parallel_state.get_pipeline_model_parallel_rank(), chunk)[end]


def is_end_of_chunks(end: int) -> Function:
    """Create the replacement of Megatron's check whether a chunk is the first or last of its rank.

    Libraries combine it with `is_end_of_ranks`. While models are built, both are true together for
    the chunk with this end of the model, wherever the schedule places it.
    """

    @replaces
    def is_end(
        session: Session, original: Function, vp_stage: int | None, vp_size: int | None
    ) -> bool:
        chunk = session.provided_chunk if vp_stage is None else vp_stage
        found = _is_end(session, end, chunk)
        return bool(original(vp_stage, vp_size)) if found is None else found

    return is_end


def is_end_of_ranks(end: int) -> Function:
    """Create the replacement of Megatron's check whether a rank is the first or last of a pipeline.

    While models are built, it is true for the rank that has this end of the model in any chunk.
    """

    @replaces
    def is_end(session: Session, original: Function, pp_group: Any) -> bool:
        found = _is_end(session, end, session.provided_chunk)
        if found is not None:
            return found
        return has_end(session, end) if session.is_building else bool(original(pp_group))

    return is_end


@replaces
def get_megatron_optimizer(session: Session, original: Function, *args: Any, **options: Any) -> Any:
    """Record the optimizer, whose state counts as static memory for a memory limit.

    The models are complete at this call. Options of the optimizer config that conflict with the
    schedule are logged and turned off.
    """
    session.is_building = False
    if session.pipeline is not None:
        config = inspect.signature(original).bind(*args, **options).arguments["config"]
        tell(translate(config, session.pipeline.stage_map.placement))
    session.optimizer = made = original(*args, **options)
    withdraw_loading_mode(session.set_variables)  # the model is on its device by now
    return made
