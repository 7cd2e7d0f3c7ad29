"""Combinations that a schedule of this package rejects, before anything is built.

A message has the problem, the reason and the fix. `REFUSALS` is the table of reasons and fixes. An
entry without a fix advises to remove the feature of this package.
"""

from __future__ import annotations

import importlib.util
import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, NamedTuple

from megatron_vshape.core.model.files import UnreadableError
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.mcore.options import UnsupportedError as UnsupportedError
from megatron_vshape.mcore.options import with_keywords


class MissingError(UnsupportedError):
    """A library that an option needs is not installed."""


class RefusedError(SystemExit):
    """Ends every rank of a run that cannot continue; the reason is printed once."""

    def __init__(self, why: object, prints: bool | None = None) -> None:
        """Set the reason, and whether this rank prints it; by default, rank 0 does.

        All ranks raise this. For an unreadable file, the first rank of every node prints the
        reason, since the file may be missing on some nodes only.
        """
        if prints is None:
            rank = os.environ.get("RANK", "0")
            of_node = os.environ.get("LOCAL_RANK", rank)
            prints = int(of_node if isinstance(why, UnreadableError) else rank) == 0
        self.why = str(why)
        super().__init__(f"megatron-vshape: {self.why}" if prints else 1)


def name_keywords(error: BaseException) -> None:
    """Name the options in the message of an error by the keywords of `register`, not by flags."""
    if isinstance(error, RefusedError):
        error.why = with_keywords(error.why)
        if isinstance(error.code, str):  # this rank prints it
            error.code = with_keywords(error.code)
            error.args = (error.code,)
    elif isinstance(error, ScheduleError | UnsupportedError):
        error.args = (with_keywords(str(error)), *error.args[1:])


@contextmanager
def refusing() -> Iterator[None]:
    """End all ranks with one message if a check in this context fails, equally on all ranks."""
    try:
        yield
    except (ScheduleError, UnsupportedError) as error:
        raise RefusedError(error) from None


@contextmanager
def refusing_together() -> Iterator[None]:
    """End all ranks with one message if a check in this context fails on any of them.

    All ranks of the world call this together. The context must not communicate, because a rank
    whose check fails leaves early.
    """
    from megatron_vshape.runtime.hosts import gather_objects

    local_error: str | None = None
    try:
        yield
    except (ScheduleError, UnsupportedError) as error:
        local_error = str(error)
    everyones = gather_objects(local_error)
    for rank, fault in enumerate(everyones):
        if fault is not None:
            where = "" if fault == everyones[0] else f"on rank {rank}: "
            raise RefusedError(f"{where}{fault}")


class By(StrEnum):
    """The feature that rejects options."""

    SCHEDULE = "every schedule"
    LATE = "every schedule, of a config"  # turned off if seen in time
    CHUNKS = "schedules with several chunks per rank, or with reordered ranks"
    RECORDING = "CUDA graphs and the paged stash"
    SPLIT_GRAPHS = "CUDA graphs of weight gradients"  # the run goes on: they stay in B


class Refusal(NamedTuple):
    """An option that is rejected if `is_set(value)`, or if `holds(options)`.

    `why` is the reason, `fix` the advice; None: remove the feature that rejects the option.
    """

    name: str  # attribute of Megatron's arguments or config
    why: str
    flag: str | None = None  # if it is not the name with dashes
    is_set: Callable[[Any], bool] = bool
    in_config: bool = True  # also a field of the TransformerConfig
    shows_value: bool = False  # only some values are rejected
    is_derived: bool = False  # known only after Megatron has validated its arguments
    holds: Callable[[Any], bool] | None = None  # for all options
    fix: str | None = None

    @property
    def option(self) -> str:
        """Return the option as a flag."""
        return self.flag or f"--{self.name.replace('_', '-')}"

    def said_of(self, options: Any) -> str | None:
        """Return the option as given in arguments or a config, or None if it is not given."""
        if self.holds is not None:
            return self.option if self.holds(options) else None
        value = getattr(options, self.name, None)
        if not hasattr(options, self.name) or not self.is_set(value):
            return None
        return f"{self.option} {value}" if self.shows_value and value is not None else self.option


def each_of(why: str, *names: str, **alike: Any) -> tuple[Refusal, ...]:
    """Return refusals with one reason that differ by name."""
    return tuple(Refusal(name, why, **alike) for name in names)


def other_than(*fine: object) -> Callable[[Any], bool]:
    return lambda value: value not in fine


is_given = other_than(None)


def is_one_of(*refused: object) -> Callable[[Any], bool]:
    return lambda value: value in refused


is_off = is_one_of(False)


def above_one(value: Any) -> bool:
    return value is not None and value > 1


def has_part(part: str) -> Callable[[Any], bool]:
    return lambda value: part in parts_of(value)


def parts_of(scope: Any) -> set[str]:
    """Return the names in a list of layer parts, in any notation."""
    parts = scope if isinstance(scope, list | tuple) else str(scope or "").split(",")
    return {str(getattr(part, "name", part)).strip() for part in parts} - {""}


GRAPH_SCOPES = ("cuda_graph_modules", "cuda_graph_scope", "cuda_graph_scope_deprecated")
"""Names of the scope of CUDA graphs in releases of Megatron; the last is the parser's."""


def graph_scope(options: Any) -> set[str]:
    """Return the parts of a layer that CUDA graphs cover; empty for the full layer."""
    scopes = (parts_of(getattr(options, name, None)) for name in GRAPH_SCOPES)
    return next(filter(None, scopes), set()) - {"full"}


def _verified(options: Any) -> bool:
    recipe = getattr(options, "fp8_recipe", None) or "delayed"
    return str(getattr(recipe, "value", recipe)) in ("delayed", "tensorwise", "blockwise")


def num_experts(options: Any) -> int | None:
    """Return the number of experts of a layer, in arguments or in a config."""
    return getattr(options, "num_experts", None) or getattr(options, "num_moe_experts", None)


def _saves_by_rank(options: Any) -> bool:
    uses_files = any(getattr(options, name, None) for name in ("save", "load"))
    return uses_files and getattr(options, "ckpt_format", None) == "torch"


def _captures_experts(options: Any) -> bool:
    return bool(num_experts(options)) and "moe" in (graph_scope(options) or {"moe"})


def _recomputes_biased_mlp(options: Any) -> bool:
    """Return whether a dense MLP with a bias is recomputed by itself."""
    if getattr(options, "recompute_granularity", None) != "selective":
        return False
    experts = num_experts(options)
    every = getattr(options, "moe_layer_freq", 1)
    has_dense = not experts or (0 in every if isinstance(every, list) else every != 1)
    has_dense |= "-" in (getattr(options, "hybrid_layer_pattern", None) or "")
    modules = parts_of(getattr(options, "recompute_modules", None))
    return has_dense and "mlp" in modules and bool(getattr(options, "add_bias_linear", False))


OVERLAP_OPTION = "overlap_moe_expert_parallel_comm"
"""Megatron's option for overlapped forward-backward passes, by its layer plans."""


ENGINE = "transformer_engine"
"""Default of --transformer-impl."""

BATCH_SIZES = ("rampup_batch_size", "step_batch_size_schedule")
"""Megatron's options that change the number of microbatches of a training step."""


def changing_batch_size(args: Any) -> str | None:
    """Return the option that changes the number of microbatches of a step, if one is set."""
    return next((name for name in BATCH_SIZES if getattr(args, name, None) is not None), None)


ROUTER_REPLAY = ("moe_enable_routing_replay", "enable_routing_replay", "use_routing_replay")
"""Names of router replay in Megatron and in libraries."""

_USE_TE_GRAPHS = "Use --cuda-graph-impl transformer_engine"
_HOST_SYNC = "a schedule synchronizes host and GPU within a step (loss checks, P2P messages)"
_OWN_ORDER = "it supports only Megatron's schedules"
_UNSPLIT = "its weight gradients cannot be computed in W"
_SECOND_MODEL = "a second model for inference would get the stages of the schedule"
_GENERATE = "Remove it, so that the trained model generates"
_TOO_LATE = "the layers are already built with it"
_SET_EARLY = "Set it where the config is created; it is then turned off"
_NEW_ORDER = "graphs and stash are recorded for a fixed number of microbatches"
_NO_RAMP = "Remove it, or train without CUDA graphs and --moe-paged-stash"
_UNVERIFIED = "equal gradients have not been verified with it"
_TO_CAPTURE = "Remove it to capture weight gradients separately"
UNTRIED = "the combination is not implemented"
RECOMPUTED_BIAS = (
    "the checkpoint of Megatron returns the bias, so that its backward calls itself forever"
)
NO_RECOMPUTED_BIAS = "Set --disable-bias-linear, or remove mlp from --recompute-modules"

LENGTHS = "variable_seq_lengths (variable-length microbatches)"
GRAPHS: dict[str, Any] = {
    "flag": "--cuda-graph-impl (CUDA graphs)",
    "is_set": other_than(None, "none"),
}
FP8: dict[str, Any] = {"flag": "--fp8-format", "is_set": other_than(None, "none")}
FP4: dict[str, Any] = {"flag": "--fp4-format", "is_set": other_than(None, "none")}
_OTHER_RANKS = "an encoder needs to be on the pipeline rank of the first stage"
_NO_FSDP = "it supports DDP only"
_DDP = "Use DDP, with or without --use-distributed-optimizer"

REFUSALS: Mapping[By, tuple[Refusal, ...]] = {
    By.SCHEDULE: (
        Refusal(
            "cuda_graph_impl",
            _HOST_SYNC,
            fix=_USE_TE_GRAPHS,
            is_set=is_one_of("full_iteration"),
            shows_value=True,
        ),
        *each_of(
            _HOST_SYNC,
            *GRAPH_SCOPES,
            fix=_USE_TE_GRAPHS,
            flag="--cuda-graph-scope full_iteration",
            is_set=has_part("full_iteration"),
        ),
        *each_of(
            "Megatron captures these graphs for the pass order of its own schedules",
            *("cuda_graph_impl", "enable_cuda_graph"),
            fix=_USE_TE_GRAPHS,
            flag="--cuda-graph-impl local",
            is_set=is_one_of("local", True),
        ),
        *each_of(_NO_FSDP, "use_megatron_fsdp", "use_torch_fsdp2", fix=_DDP),
        Refusal(
            "num_microbatches_with_partial_activation_checkpoints",
            _OWN_ORDER,
            fix="Remove num_microbatches_with_partial_activation_checkpoints",
            flag="num_microbatches_with_partial_activation_checkpoints",
            is_set=is_given,
        ),
        Refusal(
            "recompute_modules",
            RECOMPUTED_BIAS,
            fix=NO_RECOMPUTED_BIAS,
            flag="--recompute-modules mlp with biases",
            holds=_recomputes_biased_mlp,
        ),
        Refusal("hybrid_context_parallel", _OWN_ORDER, fix="Remove --hybrid-context-parallel"),
        Refusal(
            "gtp_weight_remat_size",
            _UNSPLIT,
            fix="Make the two sizes equal",
            flag="--tensor-parallel-num-weight-shards above --tensor-model-parallel-size",
            is_set=above_one,
            is_derived=True,
        ),
        Refusal(
            "expert_gtp_weight_remat_size",
            _UNSPLIT,
            fix="Make the two sizes equal",
            flag="--expert-tensor-parallel-num-weight-shards above --expert-tensor-parallel-size",
            is_set=above_one,
            is_derived=True,
        ),
        Refusal(
            "pipeline_model_parallel_comm_backend",
            "P2P messages use --distributed-backend",
            fix="Remove it, or set it to nccl",
            is_set=other_than(None, "nccl"),
            shows_value=True,
        ),
        *(
            Refusal(
                f"rl_inference_{what}_model_parallel_size",
                _SECOND_MODEL,
                fix=_GENERATE,
                is_set=is_given,
            )
            for what in ("tensor", "pipeline", "expert", "expert_tensor")
        ),
        Refusal(
            "dist_train",
            _OTHER_RANKS,
            fix="Set dist_train.use_dist_train=False",
            flag="dist_train.use_dist_train",
            is_set=lambda settings: bool(getattr(settings, "use_dist_train", False)),
        ),
        *(
            Refusal(name, _OTHER_RANKS, fix=f"Set {name}=True", flag=f"{name}=False", is_set=is_off)
            for name in ("add_encoder", "add_decoder")
        ),
        Refusal(
            "vision_cuda_graph_impl",
            "CUDA graphs of the encoder are untested",
            fix="Set vision_cuda_graph_impl to none",
            flag="vision_cuda_graph_impl",
            is_set=other_than(None, "none"),
            shows_value=True,
        ),
        Refusal(
            "transformer_impl",
            "its layers are not supported",
            fix="Use local or transformer_engine",
            is_set=other_than(None, "local", "transformer_engine"),
            in_config=False,
            shows_value=True,
        ),
    ),
    By.LATE: (
        *each_of(
            _TOO_LATE,
            *("fine_grained_activation_offloading", "delay_wgrad_compute"),
            fix=_SET_EARLY,
        ),
        *(
            Refusal(name, _TOO_LATE, fix=_SET_EARLY, flag=name)
            for name in (
                "defer_embedding_wgrad_compute",
                "overlap_dispatch_backward_with_experts_wgrad",
            )
        ),
    ),
    By.CHUNKS: (
        Refusal(
            "perform_rl_step",
            "its loop uses only the first chunk of each rank, in the order of the ranks",
            fix="Use a schedule with one chunk per rank, such as zb-h1",
        ),
        Refusal(
            "ckpt_format",
            "it stores layers by rank and chunk",
            fix="Use --ckpt-format torch_dist, which any schedule loads",
            flag="--ckpt-format torch",
            in_config=False,
            holds=_saves_by_rank,
        ),
    ),
    By.RECORDING: each_of(_NEW_ORDER, *BATCH_SIZES, fix=_NO_RAMP, is_set=is_given),
    By.SPLIT_GRAPHS: (
        Refusal(
            "transformer_impl",
            "Transformer Engine captures weight gradients only of its own layers",
            fix="Use --transformer-impl transformer_engine to capture them",
            is_set=is_one_of("local"),
            shows_value=True,
        ),
        Refusal("fp4", _UNVERIFIED, fix=_TO_CAPTURE, **FP4),
        Refusal(
            "fp8_recipe",
            _UNVERIFIED,
            fix="Use one of these to capture weight gradients separately",
            holds=lambda options: bool(getattr(options, "fp8", None)) and not _verified(options),
            flag="--fp8-recipe other than delayed, tensorwise and blockwise",
        ),
        *each_of(
            _UNVERIFIED, "tp_comm_overlap", "use_transformer_engine_op_fuser", fix=_TO_CAPTURE
        ),
        Refusal("experimental_attention_variant", _UNVERIFIED, fix=_TO_CAPTURE, is_set=is_given),
        Refusal(
            "hybrid_layer_pattern",
            _UNVERIFIED,
            "Mamba layers",
            fix="No option captures them separately",
            is_set=lambda pattern: "M" in (pattern or ""),
        ),
        Refusal(
            "num_experts",
            "their grouped GEMM is not captured separately",
            fix="Restrict --cuda-graph-modules to other parts, such as attn moe_router "
            "moe_preprocess",
            flag="experts in CUDA graphs",
            holds=_captures_experts,
        ),
    ),
}
"""Every rejected option of Megatron that no feature owns, with reason and fix."""


def check_arguments(args: Namespace, schedule: str, placement: Placement) -> None:
    """Raise UnsupportedError for the first Megatron option that `schedule` does not support."""
    refusals = [refusal for refusal in REFUSALS[By.SCHEDULE] if not refusal.is_derived]
    chunked = () if is_plain(placement) else REFUSALS[By.CHUNKS]
    check_refusals((*refusals, *chunked), args, f"--pipeline-schedule {schedule}")
    if captures_graphs(args):
        check_refusals(
            REFUSALS[By.RECORDING], args, f"--pipeline-schedule {schedule} with CUDA graphs"
        )
    if uses_stash(args):
        flag = f"--pipeline-schedule {schedule} with --moe-paged-stash"
        check_refusals(REFUSALS[By.RECORDING], args, flag)
    contexts = getattr(args, "context_parallel_size", 1)
    if getattr(args, "perform_rl_step", False) and above_one(contexts):
        raise UnsupportedError(
            f"--pipeline-schedule {schedule} does not work with --perform-rl-step and "
            f"--context-parallel-size {contexts} together: {_SECOND_MODEL}. Set "
            "--context-parallel-size 1",
            "perform_rl_step",
        )
    if getattr(args, "transformer_impl", ENGINE) == ENGINE and not has_transformer_engine():
        raise MissingError(
            "--transformer-impl transformer_engine needs Transformer Engine, which is not "
            "installed here: install it, or use --transformer-impl local",
            "transformer_impl",
        )


def captures_graphs(options: Any) -> bool:
    """Return whether arguments or a config enable the CUDA graphs of Transformer Engine."""
    by_name = getattr(options, "cuda_graph_impl", None) == "transformer_engine"
    return by_name or bool(getattr(options, "external_cuda_graph", False))


TE_OF_SPLIT_GRAPHS = "2.11.0"
"""The first Transformer Engine release that can capture a W anywhere after its B."""


def check_split_graphs(options: Any) -> None:
    """Raise UnsupportedError if weight gradients of captured layers must stay in B."""
    what = "--pipeline-split-graphs auto"
    check_refusals(REFUSALS[By.SPLIT_GRAPHS], options, what)
    from megatron.core.utils import get_te_version, is_te_min_version

    release = str(get_te_version())
    if release != "0.0.0" and not is_te_min_version(TE_OF_SPLIT_GRAPHS):  # 0: not installed
        raise UnsupportedError(
            f"{what} does not work with Transformer Engine {release}, which captures W right "
            f"after B at best. Use {TE_OF_SPLIT_GRAPHS} or later"
        )


def uses_stash(options: Any) -> bool:
    """Return whether arguments or a config enable Megatron's paged stash (since 0.18)."""
    return bool(getattr(options, "moe_paged_stash", False))


def check_derived(args: Namespace, schedule: str) -> None:
    """Raise UnsupportedError for unsupported values that Megatron derives from options."""
    derived = [refusal for refusal in REFUSALS[By.SCHEDULE] if refusal.is_derived]
    check_refusals(derived, args, f"--pipeline-schedule {schedule}")


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine can be imported."""
    return importlib.util.find_spec("transformer_engine") is not None


def check_config(config: Any) -> None:
    """Raise UnsupportedError for an option that a script has set only in the TransformerConfig."""
    refusals = [
        refusal for by in (By.SCHEDULE, By.LATE) for refusal in REFUSALS[by] if refusal.in_config
    ]
    check_refusals(refusals, config, "--pipeline-schedule")


def check_library(config: Any, schedule: str, placement: Placement) -> None:
    """Raise UnsupportedError for an option in a library's config that `schedule` rejects."""
    check_config(config)
    check_refusals(
        () if is_plain(placement) else REFUSALS[By.CHUNKS], config, f"schedule {schedule}"
    )


def is_plain(placement: Placement) -> bool:
    """Return whether every rank has one stage, in the order of the ranks."""
    return placement == tuple(range(len(placement)))


def check_one_module(schedule: str, *communicators: Any) -> None:
    """Raise UnsupportedError if the trainer passes communicators for several modules of a model.

    Such modules, for example an image encoder and a language model, each have their own pipeline.
    """
    for communicator in communicators:
        # By class name, because this check also runs without Megatron.
        if any(base.__name__.startswith("MultiModule") for base in type(communicator).__mro__):
            raise refused_model(schedule, type(communicator).__name__)


SEVERAL_STACKS = frozenset({"LLaVAModel", "MimoModel", "T5Model"})
"""Models of Megatron with several stacks of layers, by class name."""


def check_stacks(schedule: str, chunks: Iterable[Any]) -> None:
    """Raise UnsupportedError if an unwrapped chunk has several stacks of layers."""
    for chunk in chunks:
        if SEVERAL_STACKS & {base.__name__ for base in type(chunk).__mro__}:
            raise refused_model(schedule, type(chunk).__name__)


def refused_model(schedule: str, name: str) -> UnsupportedError:
    """Return the error for a model with more than one stack of layers."""
    return UnsupportedError(
        f"schedule {schedule} does not work with {name}: it needs one stack of layers, and this "
        "model has several. Use a model with its encoder on the first stage, such as "
        "Qwen3-VL, or remove the schedule, and Megatron runs its own"
    )


def model_with_encoder(chunks: Iterable[Any]) -> str | None:
    """Return the class of the unwrapped chunks if the language model is only a part of it."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    for chunk in chunks:
        if not isinstance(chunk, LanguageModule):
            if any(isinstance(module, LanguageModule) for module in chunk.modules()):
                return type(chunk).__name__
    return None


def check_encoder(chunks: Iterable[Any], flag: str, why: str) -> None:
    """Raise UnsupportedError if the language model is a part of a model with an encoder.

    Args:
        chunks: The unwrapped chunks of this rank.
        flag: The feature that does not support an encoder.
        why: The reason.
    """
    name = model_with_encoder(chunks)
    if name is not None:
        raise UnsupportedError(
            f"{flag} does not support the encoder of {name}: {why}. Remove {flag}"
        )


def check_refusals(refusals: Iterable[Refusal], options: Any, flag: str) -> None:
    for refusal in refusals:
        said = refusal.said_of(options)
        if said is not None:
            raise UnsupportedError(rejection(flag, said, refusal), refusal.name)


def rejection(flag: str, said: str, refusal: Refusal) -> str:
    """Format problem, reason and fix; `flag` is that of the feature, maybe with a value."""
    fix = refusal.fix or f"Remove {flag.split()[0]}"
    return f"{flag} does not work with {said}: {refusal.why}. {fix}"
