"""All attributes of Megatron that this package replaces, with reasons, and their removal.

Each module of hooks ends with its table `HOOKS`, whose entries share one `Session`. A replacement
of a function is marked with `replaces` or `replaces_always` (`mcore.hook`). For a constructor or a
class (`model_init`, `linear_function`), the table has a factory (session, original) -> replacement.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron import core  # an attribute of its package only once it has been imported

from megatron_vshape.mcore.hook import ABSENT, Dependency, Hook, Replaced, Target, release
from megatron_vshape.mcore.hooks.checkpoints import HOOKS as CHECKPOINT_HOOKS
from megatron_vshape.mcore.hooks.core_hooks import HOOKS as STAGE_HOOKS
from megatron_vshape.mcore.hooks.session import HOOKS as STEP_HOOKS
from megatron_vshape.mcore.hooks.session import ProcessState, Session
from megatron_vshape.mcore.options import options_from
from megatron_vshape.mcore.setup.features import features
from megatron_vshape.mcore.step.stage import Execution

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_UTILS = "megatron.core.pipeline_parallel.utils"
_DISTRIBUTED = "megatron.core.distributed"
_TRAINER = "megatron.training"
_TRAINING = "megatron.training.training"


class HookError(RuntimeError):
    """This Megatron-Core does not match the hooks; the message has the difference."""


def _why_no_trainer() -> str | None:
    """Return the reason why Megatron-LM's trainer cannot be imported, or None."""
    try:
        importlib.import_module(_TRAINER)
    except ImportError as error:
        return str(error)
    return None


def _trainers_hooks() -> tuple[Hook, ...]:
    """Return the hooks of Megatron-LM's trainer, without which libraries can use megatron.core."""
    if _why_no_trainer() is not None:
        return ()
    from megatron_vshape.mcore.hooks import training

    return training.HOOKS


HOOKS = (
    *_trainers_hooks(),
    *STAGE_HOOKS,
    *STEP_HOOKS,
    *CHECKPOINT_HOOKS,
    *(hook for feature in features() for hook in feature.hooks()),
)
"""All hooks."""

PROBES = (
    Dependency(
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
        "runs the forward pass of a stage",
    ),
    Dependency(
        _SCHEDULES,
        "backward_step",
        ("input_tensor", "output_tensor", "output_tensor_grad", "config"),
        "runs the backward pass of a stage",
    ),
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
    *(
        Dependency(_TRAINING, name, (parameter,), "is replaced while a step is logged or validated")
        for name, parameter in (
            ("print_rank_last", "message"),
            ("report_theoretical_memory", "args"),
            ("logical_and_across_model_parallel_group", "input"),
            ("reduce_max_stat_across_model_parallel_group", "stat"),
        )
    ),
    # `step.gradient_sync` starts the reductions of DDP's bucket groups itself.
    Dependency(
        f"{_DISTRIBUTED}.distributed_data_parallel",
        "DistributedDataParallel.__init__",
        ("self",),
        "groups the gradients that a W completes",
        ("ddp_config", "bucket_groups", "expert_parallel_bucket_groups"),
    ),
    Dependency(
        f"{_DISTRIBUTED}.distributed_data_parallel",
        "DistributedDataParallel.scale_gradients",
        ("scaling_factor",),
        "divides gradients by the number of tokens",
    ),
    Dependency(
        f"{_DISTRIBUTED}.distributed_data_parallel_config",
        "DistributedDataParallelConfig.overlap_grad_reduce",
        (),
        "makes reductions asynchronous",
    ),
    Dependency(
        f"{_DISTRIBUTED}.param_and_grad_buffer",
        "_ParamAndGradBucketGroup.__init__",
        ("self",),
        "has the state of a reduction, which the last W of its bucket starts",
        ("buckets", "is_first_batch", "is_last_microbatch"),
    ),
    Dependency(
        f"{_DISTRIBUTED}.param_and_grad_buffer",
        "_ParamAndGradBucketGroup.start_grad_sync",
        ("self", "force_all_reduce"),
        "starts the reduction of a bucket group",
    ),
    Dependency(
        f"{_DISTRIBUTED}.param_and_grad_buffer",
        "_ParamAndGradBucket.__init__",
        ("self",),
        "has the parameters whose gradients are reduced together",
        ("params_list",),
    ),
)

# Megatron's modules are process-wide, so the session with their original attributes is too.
_session: Session | None = None


def install(options: Mapping[str, Any] | None = None, execution: Execution | None = None) -> None:
    """Replace the attributes in `HOOKS`, also in modules that have imported them by name.

    Until a schedule is chosen, every replacement behaves as the original; hooks with
    `only_with_pipeline` are installed only then (`Session.choose`). A second call does nothing.
    `options` are those of `megatron_vshape.register` or of the environment variable; `execution`
    runs the passes, if it is not the default.

    Raises:
        HookError: A target is missing or has another signature. Nothing is replaced in this case.
        UnsupportedError: An option does not exist.
    """
    global _session
    if _session is not None:
        return
    # Validated before the trainer is looked for: the error about an option is the more useful one.
    registered = options_from(dict(options)) if options else None
    why = _why_no_trainer()
    if why is not None and registered is None:
        raise HookError(
            f"megatron-core {megatron_version()} is here without Megatron-LM's trainer, whose "
            f"flags name a schedule ({why}): give register a schedule, or install "
            "megatron-core[training]"
        )
    # Check all targets before the first replacement, so that a failure leaves Megatron unchanged.
    faults = [state.fault for state in examine() if state.fault is not None]
    if faults:
        raise HookError(faults[0])
    process = ProcessState(registered=registered, execution=execution or Execution())
    _session = session = Session(process=process)
    replacements_by_id: dict[int, Any] = {}  # names of one object get one replacement
    # Read before any replacement: `_swap` finds imports by name through the identity of the
    # original.
    originals = [hook.original() for hook in HOOKS if hook.everywhere]
    # A replacement calls the original with the given arguments until a schedule is chosen, so hooks
    # can be installed before anything is known about the run.
    for hook in HOOKS:
        _install(hook, session, replacements_by_id)
    # `from module import name` binds the original in the importing module, so replacing it in its
    # own module is not enough.
    pairs = {
        id(original): (original, replacements_by_id[id(original)])
        for original in originals
        if original is not ABSENT
    }
    _swap(pairs, session.process.replaced)


def uninstall() -> None:
    """Restore all attributes that `install` replaced, also in modules that imported them."""
    global _session
    if _session is None:
        return
    undone = _session.process.pipeline_hooks.undo() + _session.process.replaced.undo()
    _session = None
    # Only functions have an identity to search for: a value such as True is shared by everything.
    pairs = {id(value): (value, original) for value, original in undone}
    _swap({key: pair for key, pair in pairs.items() if inspect.isfunction(pair[1])}, Replaced())


_WITHOUT_MEGATRON = frozenset({"megatron_vshape", "torch", "numpy", "sympy"})
"""Packages without imports of Megatron, whose modules have more than half of all attributes."""


def _swap(pairs: Mapping[int, tuple[Any, Any]], replaced: Replaced) -> None:
    """Replace `pair[0]` by `pair[1]` under any name in all modules outside this package."""
    # A copy of the list: reading attributes of lazy modules can import further modules.
    for module in list(sys.modules.values()):
        package = str(getattr(module, "__name__", "")).partition(".")[0]
        if module is None or package in _WITHOUT_MEGATRON:
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


def _install(hook: Hook, session: Session, replacements_by_id: dict[int, Any]) -> None:
    owner, original = hook.owner(), hook.original()
    if owner is None or original is ABSENT:
        return
    # One object under two names must get one replacement.
    if id(original) not in replacements_by_id:
        replacements_by_id[id(original)] = hook.replacement(session, original)
    if hook.only_with_pipeline:
        replacement = owner, hook.name, replacements_by_id[id(original)]
        session.process.pipeline_hooks.values.append(replacement)
    else:
        session.process.replaced.put(owner, hook.name, replacements_by_id[id(original)])


def _examine(record: Target) -> Finding:
    original = record.original()
    if original is ABSENT:
        return Finding(record, False, _absence(record))
    return Finding(record, True, _other_parameters(record, original) or _unset(record, original))


def _absence(record: Target) -> str | None:
    """Return the error message for a missing target, or None if it may be missing."""
    does = "calls"
    if isinstance(record, Hook):
        does = "hooks"
        if release() < record.since:
            return None
    # Libraries may install megatron.core without the trainer.
    if record.module.startswith(_TRAINER) and _why_no_trainer() is not None:
        return None
    return (
        f"megatron-core {megatron_version()} has no {record.target}, which this package {does}: it "
        f"{record.reason}"
    )


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
        f"megatron-core {megatron_version()} is not supported: {record.target} takes "
        f"({', '.join(parameters)}) and this package needs {', '.join(missing)}"
    )


def _unset(record: Target, original: Any) -> str | None:
    """Return the error message if a constructor does not set the attributes of its probe."""
    if not isinstance(record, Dependency) or not record.sets:
        return None
    # An object of this class would need process groups. The names of a function's code include
    # those of the attributes that it sets.
    code = getattr(inspect.unwrap(original), "__code__", None)
    missing = [name for name in record.sets if code is not None and name not in code.co_names]
    if not missing:
        return None
    return (
        f"megatron-core {megatron_version()} is not supported: {record.target} does not set "
        f"{', '.join(missing)}, which this package uses"
    )


def megatron_version() -> str:
    """Return Megatron's version, with the commit if it is imported from a checkout.

    Megatron appends the commit of any repository around its folder, even of one that has it in a
    virtual environment.
    """
    version = str(core.__version__)
    is_installed = {"site-packages", "dist-packages"} & set(Path(core.__file__).parts)
    return version.partition("+")[0] if is_installed else version
