"""All attributes of Megatron that this package replaces, with reasons, and their removal."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron import core  # an attribute of its package only once it has been imported

from megatron_vshape.mcore.hook import ABSENT, Dependency, Hook, Release, Replaced, Target
from megatron_vshape.mcore.hooks import core_hooks, replacements
from megatron_vshape.mcore.hooks.session import Session
from megatron_vshape.mcore.layout import hybrid
from megatron_vshape.mcore.options import options_from
from megatron_vshape.mcore.setup.features import features


class HookError(RuntimeError):
    """This Megatron-Core does not match the hooks; the message has the difference."""


def _training(name: str) -> Callable[[Session, Any], Any]:
    """Return a replacement from `hooks.training`, imported when it is first installed."""

    def replacement(session: Session, original: Any) -> Any:
        module = importlib.import_module("megatron_vshape.mcore.hooks.training")
        return getattr(module, name)(session, original)

    return replacement


_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_STATE = "megatron.core.parallel_state"
_UTILS = "megatron.core.pipeline_parallel.utils"
_GRAPHS = "megatron.core.transformer.cuda_graphs"
_LAYERS = "megatron.core.tensor_parallel.layers"
_TRAINER = "megatron.training"
_ARGUMENTS = "megatron.training.arguments"
_TRAINING = "megatron.training.training"

_GENERAL = (
    # Megatron-LM's trainer: flags, arguments, config, model, then training, checkpoints and log.
    Hook(
        _ARGUMENTS,
        "add_megatron_arguments",
        ("parser",),
        "adds --pipeline-schedule and its companions to Megatron's parser",
        _training("add_megatron_arguments"),
    ),
    Hook(
        _ARGUMENTS,
        "validate_args",
        ("args", "defaults"),
        "sets the number of chunks per rank, rejects unsupported options",
        _training("validate_args"),
        everywhere=True,
    ),
    *(
        Hook(
            module,
            "core_transformer_config_from_args",
            ("args",),
            "puts the layers of every stage on the config, where Megatron asks for them",
            _training("core_transformer_config_from_args"),
            since=since,
            everywhere=True,
        )
        # 0.18 moved the function; the old module still has the name.
        for module, since in ((_ARGUMENTS, (0, 0)), ("megatron.training.argument_utils", (0, 18)))
    ),
    Hook(
        _TRAINING,
        "pretrain",
        ("forward_step_func", "model_provider"),
        "model chunks of the right stages before 0.19; no data is kept after the run",
        _training("pretrain"),
        everywhere=True,
    ),
    *(
        Hook(
            module,
            "select_pipeline_segment",
            ("main_pattern", "pp_group", "vp_stage"),
            "gives a stage its part of a hybrid model's pattern of layers, wherever the stage is",
            replacements.select_pipeline_segment,
            since=since,
            until=until,
        )
        for module, since, until in hybrid.PLACES
    ),
    Hook(
        _TRAINING,
        "train",
        ("forward_step_func", "model", "config"),
        "shows the schedule before the first step, speed and memory after the last",
        _training("train"),
    ),
    Hook(
        _TRAINING,
        "evaluate_and_print_results",
        ("process_non_loss_data_func", "non_loss_data_func"),
        "rejects data that only the last rank would collect, which would hang the pipeline",
        _training("evaluate_and_print_results"),
    ),
    Hook(
        "megatron.training.checkpointing",
        "read_metadata",
        ("tracker_filename",),
        "makes good the file that names the last checkpoint, where a full disk left it empty",
        _training("read_metadata"),
    ),
    Hook(
        "megatron.training.checkpointing",
        "load_checkpoint",
        ("ddp_model",),
        "compares where a checkpoint by ranks (--ckpt-format torch) and the model have each layer",
        _training("load_checkpoint"),
        everywhere=True,
    ),
    Hook(
        "megatron.training.checkpointing",
        "_load_base_checkpoint",
        ("load_dir", "rank0"),
        "rejects a checkpoint by ranks (--ckpt-format torch) that has layers in other places",
        _training("load_base_checkpoint"),
    ),
    Hook(
        _TRAINING,
        "training_log",
        ("iteration",),
        "measures the bubble of the iteration that is logged",
        _training("training_log"),
    ),
    Hook(
        _TRAINING,
        "print_rank_last",
        ("message",),
        "adds bubble and MFU to an iteration's line, to TensorBoard and to W&B",
        _training("print_rank_last"),
    ),
    Hook(
        _TRAINING,
        "report_theoretical_memory",
        ("args",),
        "omits an estimate that supports Megatron's schedules only",
        _training("report_theoretical_memory"),
    ),
    Hook(
        _TRAINING,
        "save_checkpoint",
        ("iteration", "model", "optimizer"),
        "saves no trace of a step that has begun early, and where each layer is",
        _training("save_checkpoint"),
    ),
    Hook(
        "megatron.training.models.dist_utils",
        "build_virtual_pipeline_stages",
        ("build_model_func", "pg_collection", "vp_size"),
        "embedding and loss where the first and the last stage are, in models of any class",
        _training("build_virtual_pipeline_stages"),
        since=(0, 18),
    ),
    # megatron.core, which libraries use without the trainer.
    Hook(
        _SCHEDULES,
        "get_forward_backward_func",
        (),
        "hands the trainer this package's function instead of Megatron's",
        replacements.get_forward_backward_func,
        everywhere=True,
    ),
    Hook(
        "megatron.core.transformer.transformer_config",
        "TransformerConfig.__post_init__",
        ("self",),
        "sets chunks per rank and layers per stage on a library's config",
        core_hooks.config_post_init,
    ),
    Hook(
        "megatron.core.distributed.distributed_data_parallel_config",
        "DistributedDataParallelConfig.__post_init__",
        ("self",),
        "leaves the allocator alone where NCCL registers buffers, which a library's schedule sets",
        core_hooks.data_parallel_config_post_init,
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
        core_hooks.initialize_model_parallel,
        everywhere=True,
    ),
    *(
        Hook(
            module,
            name,
            ("pre_process", "post_process", "vp_stage"),
            "builds a library's chunk as the stage that it is",
            core_hooks.model_init,
            since=since,
        )
        for module, name, since in (
            ("megatron.core.models.gpt.gpt_model", "GPTModel.__init__", (0, 0)),
            ("megatron.core.models.hybrid.hybrid_model", "HybridModel.__init__", (0, 18)),
        )
    ),
    Hook(
        "megatron.core.models.common.language_module.language_module",
        "LanguageModule.setup_embeddings_and_output_layer",
        ("self",),
        "shares one weight of tied or repeated embeddings on one rank",
        core_hooks.setup_embeddings,
    ),
    *(
        Hook(
            f"megatron.core.models.{module}",
            f"{model}.__init__",
            ("self",),
            "rejects models with several stacks of layers, which no schedule supports",
            replacements.several_stacks_init,
            optional=True,
        )
        for module, model in (
            ("multimodal.llava_model", "LLaVAModel"),
            ("T5.t5_model", "T5Model"),
            ("mimo.model.base", "MimoModel"),
        )
    ),
    *(
        Hook(_UTILS, name, expects, reason, replacement, everywhere=True)
        for name, expects, replacement in (
            ("is_pp_first_stage", ("pp_group",), core_hooks.is_end_of_ranks(0)),
            ("is_pp_last_stage", ("pp_group",), core_hooks.is_end_of_ranks(1)),
            ("is_vp_first_stage", ("vp_stage", "vp_size"), core_hooks.is_end_of_chunks(0)),
            ("is_vp_last_stage", ("vp_stage", "vp_size"), core_hooks.is_end_of_chunks(1)),
        )
        for reason in ("answers for the stage that runs, or while models are built for their ends",)
    ),
    Hook(
        "megatron.core.optimizer",
        "get_megatron_optimizer",
        ("config", "model_chunks"),
        "remembers a library's optimizer, whose memory a limit has to leave room for",
        core_hooks.get_megatron_optimizer,
        everywhere=True,
    ),
    Hook(
        _SCHEDULES,
        "forward_step",
        (
            "forward_step_func",
            "data_iterator",
            "model",
            "num_microbatches",
            "input_tensor",
            "forward_data_store",
            "config",
            "cp_group_size",
            "collect_non_loss_data",
            "checkpoint_activations_microbatch",
            "is_first_microbatch",
            "current_microbatch",
            "vp_stage",
            "is_last_stage",
        ),
        "measures Megatron's schedules for comparison; this package calls it too",
        replacements.forward_step,
    ),
    Hook(
        _SCHEDULES,
        "backward_step",
        ("input_tensor", "output_tensor", "output_tensor_grad", "config"),
        "measures Megatron's schedules for comparison; this package calls it too",
        replacements.backward_step,
    ),
    Hook(
        _SCHEDULES,
        "get_schedule_table",
        ("num_microbatches", "num_model_chunks"),
        "gives libraries the order of the passes of the schedule, to sort recorded expert choices",
        replacements.get_schedule_table,
        everywhere=True,
    ),
    Hook(
        _GRAPHS,
        "convert_schedule_table_to_order",
        ("num_warmup_microbatches", "num_model_chunks", "schedule_table"),
        "has CUDA graphs captured in the order of the schedule's passes, which replays follow",
        replacements.convert_schedule_table_to_order,
    ),
    Hook(
        _GRAPHS,
        "TECudaGraphHelper.create_cudagraphs",
        ("self",),
        "finds out which memory graphs have, of which messages and weight jobs keep copies",
        replacements.create_cudagraphs,
    ),
    Hook(
        "megatron.core.rerun_state_machine",
        "RerunStateMachine.validate_result",
        ("result", "rejection_func", "message", "comparison_func", "tolerance", "fatal"),
        "checks the losses of a step at its end: each check is a wait of the host for the device",
        replacements.validate_result,
    ),
    Hook(
        _STATE,
        "is_pipeline_first_stage",
        ("ignore_virtual", "vp_stage"),
        "the stage with the embedding may be any chunk of any rank",
        replacements.is_pipeline_first_stage,
        everywhere=True,
    ),
    Hook(
        _STATE,
        "is_pipeline_last_stage",
        ("ignore_virtual", "vp_stage"),
        "the stage with the loss may be any chunk of any rank",
        replacements.is_pipeline_last_stage,
        everywhere=True,
    ),
    Hook(
        "megatron.core.transformer.module",
        "Float16Module.forward",
        ("inputs", "fp32_output", "kwargs"),
        "it asks for the last rank, and would send fp32 from there and compute a 16-bit loss",
        replacements.float16_module_forward,
    ),
    # Only while a schedule is chosen: all linear layers of the process would see these.
    Hook(
        _LAYERS,
        "LinearWithGradAccumulationAndAsyncCommunication",
        (
            "input",
            "weight",
            "bias",
            "gradient_accumulation_fusion",
            "allreduce_dgrad",
            "sequence_parallel",
            "tp_group",
        ),
        "lets W run later than B",
        replacements.linear_function,
        chosen=True,
    ),
    Hook(
        _LAYERS,
        "fused_weight_gradient_mlp_cuda",
        (),
        "gradient accumulation fusion by torch where apex is missing",
        replacements.fused_kernels,
        optional=True,
        chosen=True,
    ),
    Hook(
        _LAYERS,
        "_grad_accum_fusion_available",
        (),
        "gradient accumulation fusion by torch where apex is missing",
        replacements.fusion_available,
        chosen=True,
    ),
)

HOOKS = (*_GENERAL, *(hook for feature in features() for hook in feature.hooks()))
"""All hooks, those of features included."""

PROBES = (
    Dependency(
        _SCHEDULES,
        "deallocate_output_tensor",
        ("out", "deallocate_pipeline_outputs"),
        "frees an output that has been sent",
    ),
    Dependency(
        _SCHEDULES,
        "check_first_val_step",
        ("first_val_step", "forward_only", "cond"),
        "reports whether a pass is the first of its step",
    ),
    Dependency(
        _SCHEDULES,
        "get_tensor_shapes",
        (
            "seq_length",
            "micro_batch_size",
            "decoder_seq_length",
            "config",
            "tp_group",
            "cp_group",
        ),
        "returns the shape of P2P messages",
    ),
    Dependency(
        "megatron.core.pipeline_parallel.combined_1f1b",
        "combined_forward_backward_step",
        (
            "forward_step_func",
            "data_iterator",
            "f_model",
            "num_microbatches",
            "input_tensor",
            "forward_data_store",
            "b_model",
            "b_input_tensor",
            "b_output_tensor",
            "b_output_tensor_grad",
            "config",
            "f_model_chunk_id",
            "collect_non_loss_data",
            "is_first_microbatch",
            "current_microbatch",
        ),
        "runs an F, a backward or both by layer plans (--overlap-moe-expert-parallel-comm)",
    ),
    *(
        Dependency(
            "megatron.core.models.common.model_chunk_schedule_plan",
            f"TransformerModelChunkSchedulePlan.{name}",
            expects,
            "has the nodes of a chunk's layers, whose weight gradients run with them",
        )
        for name, expects in (("num_layers", ("self",)), ("get_layer", ("self", "i")))
    ),
    Dependency(_UTILS, "set_streams", ("comm_stream",), "makes the stream of experts' exchanges"),
    Dependency(
        "megatron.core.transformer.multi_token_prediction",
        "MTPLossLoggingHelper.tracker",
        (),
        "has the losses of multi-token prediction, which another rank logs",
    ),
    Dependency(
        _TRAINING,
        "num_floating_point_operations",
        ("args", "batch_size"),
        "counts a step's operations for the MFU",
    ),
)

# Megatron's modules are process-wide, so the record of their original attributes is too.
_replaced = Replaced()
_chosen = Replaced()  # hooks that are active only while a schedule is chosen


def install(options: Mapping[str, Any] | None = None) -> None:
    """Replace the attributes in `HOOKS`, also in modules that have imported them by name.

    Until a schedule is chosen, every replacement behaves as the original; hooks with `chosen` are
    installed only then. A second call does nothing. `options` are those of
    `megatron_vshape.register` or of the environment variable.

    Raises:
        HookError: A target is missing or has another signature. Nothing is replaced in this case.
        UnsupportedError: An option does not exist.
    """
    if _replaced:
        return
    # Validated before the trainer is looked for: the error about an option is the more useful one.
    given = options_from(dict(options)) if options else None
    why = _why_no_trainer()
    if why is not None and given is None:
        raise HookError(
            f"{_version()} is here without Megatron-LM's trainer, whose flags name a schedule "
            f"({why}): give register a schedule, or install megatron-core[training]"
        )
    # Check all targets before the first replacement, so that a failure leaves Megatron unchanged.
    faults = [each.fault for each in examine() if each.fault is not None]
    if faults:
        raise HookError(faults[0])
    session = Session(library=given, replaced=_replaced, chosen=_chosen)
    made: dict[int, Any] = {}  # names of one object get one replacement
    # Read before any replacement: `_swap` finds imports by name through the identity of the
    # original.
    named = [hook.original() for hook in HOOKS if hook.everywhere]
    for hook in HOOKS:
        _install(hook, session, made)
    # `from module import name` binds the original in the importing module, so replacing it in its
    # own module is not enough.
    _swap({id(each): (each, made[id(each)]) for each in named if each is not ABSENT}, _replaced)


def uninstall() -> None:
    """Restore all attributes that `install` replaced, also in modules that imported them."""
    undone = _chosen.undo() + _replaced.undo()
    replacements = {id(value): (value, original) for value, original in undone}
    # Only functions have an identity to search for: a value such as True is shared by everything.
    made = {key: pair for key, pair in replacements.items() if inspect.isfunction(pair[1])}
    _swap(made, Replaced())


def _swap(pairs: Mapping[int, tuple[Any, Any]], replaced: Replaced) -> None:
    """Replace `pair[0]` by `pair[1]` under any name in all modules outside this package."""
    # A copy of the list: reading attributes of lazy modules can import further modules.
    for module in list(sys.modules.values()):
        if module is None or str(getattr(module, "__name__", "")).startswith("megatron_vshape"):
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            pair = pairs.get(id(value))
            if pair is not None and value is pair[0]:
                replaced.put(module, name, pair[1])


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of the check of one target in the installed Megatron."""

    record: Target
    is_there: bool
    fault: str | None  # the error message of `install`


def examine() -> list[Finding]:
    """Check all probes and hooks against the installed Megatron."""
    return [*map(_examine, PROBES), *map(_examine, HOOKS)]


def _install(hook: Hook, session: Session, made: dict[int, Any]) -> None:
    owner, original = hook.owner(), hook.original()
    # A function is replaced only if it exists. A value without parameters can also be added: for
    # example, Megatron lacks the fused kernels if apex is missing.
    if owner is None or (original is ABSENT and hook.expects):
        return
    # One object under two names must get one replacement. Plain values can be equal by chance.
    if not hook.expects or id(original) not in made:
        made[id(original)] = hook.replacement(session, original)
    if hook.chosen:
        session.on_choice.append((owner, hook.name, made[id(original)]))
    else:
        _replaced.put(owner, hook.name, made[id(original)])


def _examine(record: Target) -> Finding:
    original = record.original()
    if original is ABSENT:
        return Finding(record, False, _absence(record))
    return Finding(record, True, _other_parameters(record, original))


def _absence(record: Target) -> str | None:
    """Return the error message for a missing target, or None if it may be missing."""
    does = "calls"
    if isinstance(record, Hook):
        does = "hooks"
        if record.optional or not record.since <= _release() <= record.until:
            return None
    # Libraries may install megatron.core without the trainer.
    if record.module.startswith(_TRAINER) and _why_no_trainer() is not None:
        return None
    return f"{_version()} has no {record.target}, which this package {does}: it {record.reason}"


def _why_no_trainer() -> str | None:
    """Return the reason why Megatron-LM's trainer cannot be imported, or None."""
    try:
        importlib.import_module(_TRAINER)
    except ImportError as error:
        return str(error)
    return None


def _other_parameters(record: Target, original: Any) -> str | None:
    """Return the error message if the target lacks expected parameters, or None."""
    if not record.expects:
        return None
    is_class = inspect.isclass(original)
    function = original.forward if is_class else original
    parameters = inspect.signature(function).parameters
    missing = [name for name in record.expects if name not in parameters]
    if not missing:
        return None
    return (
        f"{_version()} is not supported: {record.target} takes ({', '.join(parameters)}) and "
        f"this package needs {', '.join(missing)}"
    )


def _version() -> str:
    return f"megatron-core {core.__version__}"


def _release() -> Release:
    major, minor, *_ = core.__version__.split(".")
    return int(major), int(minor)
