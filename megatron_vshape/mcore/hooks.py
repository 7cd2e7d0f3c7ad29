"""Every attribute of Megatron that this package replaces, why, and how to undo it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import megatron.core

from megatron_vshape.mcore import replacements
from megatron_vshape.mcore.session import Session


class HookError(RuntimeError):
    """This Megatron-Core is not one the hooks were written for; the text says where it differs."""


@dataclass(frozen=True, slots=True)
class Hook:
    """One attribute that is replaced: `attribute` of `module`, dotted where it is a class's.

    `expects` are parameters that the original must have, or, where it is a class, its `forward`.
    `replacement` gets the session and the original.
    """

    module: str
    attribute: str
    expects: tuple[str, ...]
    reason: str
    replacement: Callable[[Session, Any], Any]
    optional: bool = False  # some supported versions do not have it

    @property
    def target(self) -> str:
        """Return the attribute's full name."""
        return f"{self.module}.{self.attribute}"


@dataclass(frozen=True, slots=True)
class Probe:
    """A function of Megatron that is called, not replaced, and the parameters it is called with."""

    module: str
    attribute: str
    expects: tuple[str, ...]

    @property
    def target(self) -> str:
        """Return the function's full name."""
        return f"{self.module}.{self.attribute}"


_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_STATE = "megatron.core.parallel_state"
_LAYERS = "megatron.core.tensor_parallel.layers"
_ARGUMENTS = "megatron.training.arguments"
_TRAINING = "megatron.training.training"

HOOKS = (
    Hook(
        _ARGUMENTS,
        "add_megatron_arguments",
        ("parser",),
        "adds --pipeline-schedule and its companions to Megatron's parser",
        replacements.add_megatron_arguments,
    ),
    *(
        Hook(
            module,
            "validate_args",
            ("args", "defaults"),
            "sets the number of chunks per rank, refuses what the schedule cannot have",
            replacements.validate_args,
            optional=module != _ARGUMENTS,  # 0.17 calls a copy it has imported
        )
        for module in (_ARGUMENTS, "megatron.training.initialize")
    ),
    *(
        Hook(
            module,
            "core_transformer_config_from_args",
            ("args",),
            "puts the layers of every stage on the config, where Megatron asks for them",
            replacements.core_transformer_config_from_args,
            optional=module != _ARGUMENTS,  # it moved in 0.18, and arguments kept the name
        )
        for module in (_ARGUMENTS, "megatron.training.argument_utils")
    ),
    *(
        Hook(
            module,
            "pretrain",
            ("forward_step_func", "get_embedding_ranks"),
            "embedding group of the ranks that hold the model's ends; model chunks before 0.19",
            replacements.pretrain,
        )
        for module in (_TRAINING, "megatron.training")
    ),
    Hook(
        _TRAINING,
        "train",
        ("forward_step_func", "model", "config"),
        "shows the schedule before the first step, speed and memory after the last",
        replacements.train,
    ),
    Hook(
        "megatron.training.models.dist_utils",
        "build_virtual_pipeline_stages",
        ("build_model_func", "pg_collection", "vp_size"),
        "embedding and loss where the first and the last stage are; one tied weight (from 0.19 on)",
        replacements.build_virtual_pipeline_stages,
        optional=True,
    ),
    *(
        Hook(
            module,
            "get_forward_backward_func",
            (),
            "hands the trainer this package's function instead of Megatron's",
            replacements.get_forward_backward_func,
        )
        for module in (_SCHEDULES, "megatron.core.pipeline_parallel", _TRAINING)
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
        "counts the memory of Megatron's own schedules, to compare; this package calls it too",
        replacements.forward_step,
    ),
    Hook(
        _SCHEDULES,
        "backward_step",
        ("input_tensor", "output_tensor", "output_tensor_grad", "config"),
        "counts the memory of Megatron's own schedules, to compare; this package calls it too",
        replacements.backward_step,
    ),
    Hook(
        _STATE,
        "is_pipeline_first_stage",
        ("ignore_virtual", "vp_stage"),
        "the stage with the embedding may be any chunk of any rank",
        replacements.is_pipeline_first_stage,
    ),
    Hook(
        _STATE,
        "is_pipeline_last_stage",
        ("ignore_virtual", "vp_stage"),
        "the stage with the loss may be any chunk of any rank",
        replacements.is_pipeline_last_stage,
    ),
    Hook(
        "megatron.core.transformer.module",
        "Float16Module.forward",
        ("inputs", "fp32_output", "kwargs"),
        "it asks for the last rank, and would send fp32 from there and compute a 16-bit loss",
        replacements.float16_module_forward,
    ),
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
    ),
    Hook(
        _LAYERS,
        "fused_weight_gradient_mlp_cuda",
        (),
        "gradient accumulation fusion by torch where apex is not installed",
        replacements.fused_kernels,
        optional=True,
    ),
    Hook(
        _LAYERS,
        "_grad_accum_fusion_available",
        (),
        "gradient accumulation fusion by torch where apex is not installed",
        replacements.fusion_available,
    ),
)

PROBES = (
    Probe(_SCHEDULES, "deallocate_output_tensor", ("out", "deallocate_pipeline_outputs")),
    Probe(_SCHEDULES, "check_first_val_step", ("first_val_step", "forward_only", "cond")),
    Probe(
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
    ),
)

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _Replaced:
    """What `owner.name` was, for `uninstall`."""

    owner: Any
    name: str
    original: Any


# Megatron's modules belong to the process, and so does the record of what to put back.
_replaced: list[_Replaced] = []


def install() -> None:
    """Replace what `HOOKS` lists; does nothing where that has been done.

    Raises:
        HookError: a target is missing or has another signature; nothing is replaced then.
    """
    if _replaced:
        return
    for probe in PROBES:
        _check_parameters(probe, _find(probe))
    session = Session()
    made: dict[int, Any] = {}  # names of one object get one replacement
    try:
        for hook in HOOKS:
            _install(hook, session, made)
    except HookError:
        uninstall()
        raise


def uninstall() -> None:
    """Put back every attribute that `install` replaced."""
    while _replaced:
        owner, name, original = _unpack(_replaced.pop())
        if original is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def targets() -> Iterator[tuple[Any, str]]:
    """Yield the owner and the name of every attribute of this Megatron that is replaced."""
    for hook in HOOKS:
        owner, name = _owner(hook), hook.attribute.rpartition(".")[2]
        # An attribute that may be absent and has no parameters is put there where it is.
        if owner is not None and (name in vars(owner) or not hook.expects):
            yield owner, name


def _install(hook: Hook, session: Session, made: dict[int, Any]) -> None:
    owner = _owner(hook)
    name = hook.attribute.rpartition(".")[2]
    original = vars(owner).get(name, _ABSENT) if owner is not None else _ABSENT
    if original is _ABSENT and not hook.optional:
        raise HookError(
            f"{_version()} has no {hook.target}, which this package hooks: it {hook.reason}"
        )
    if owner is None or (original is _ABSENT and hook.expects):
        return
    if original is not _ABSENT:
        _check_parameters(hook, original)
    if id(original) not in made:
        made[id(original)] = hook.replacement(session, None if original is _ABSENT else original)
    replacement = made[id(original)] if hook.expects else hook.replacement(session, original)
    _replaced.append(_Replaced(owner, name, original))
    setattr(owner, name, replacement)


def _owner(hook: Hook | Probe) -> Any:
    """Return the module or class that holds the attribute, or None where it is not there."""
    try:
        owner: Any = importlib.import_module(hook.module)
    except ModuleNotFoundError:
        return None
    for part in hook.attribute.split(".")[:-1]:
        owner = getattr(owner, part, None)
    return owner


def _find(probe: Probe) -> Any:
    found = getattr(_owner(probe), probe.attribute, None)
    if found is None:
        raise HookError(f"{_version()} has no {probe.target}, which this package calls")
    return found


def _check_parameters(hook: Hook | Probe, original: Any) -> None:
    if not hook.expects:
        return
    function = original.forward if inspect.isclass(original) else original
    parameters = inspect.signature(function).parameters
    missing = [name for name in hook.expects if name not in parameters]
    if missing:
        raise HookError(
            f"{_version()} is not supported: {hook.target} takes ({', '.join(parameters)}) and "
            f"this package needs {', '.join(missing)}"
        )


def _unpack(record: _Replaced) -> tuple[Any, str, Any]:
    return record.owner, record.name, record.original


def _version() -> str:
    return f"megatron-core {megatron.core.__version__}"
