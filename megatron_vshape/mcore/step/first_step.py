"""Warnings after the first training step, for mistakes that silently change gradients.

These mistakes are visible only in the passes, not in the options or the built model.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from megatron_vshape.mcore.refusals import UnsupportedError, refusing
from megatron_vshape.mcore.step.stage import StepContext, StepFeature, StepHook
from megatron_vshape.mcore.step_state import unwrapped
from megatron_vshape.runtime.hosts import gather_objects

logger = logging.getLogger(__name__)

PACKED = "packed_seq_params"

RECURRENT = frozenset({"MambaMixer", "GatedDeltaNet"})
"""Classes of layers without attention whose state passes from token to token."""


class _StageFindings(NamedTuple):
    """The findings of one stage."""

    stage: int
    without_gradient: int  # trainable parameters, if the output of an F requires no gradient
    packed: frozenset[bool]  # whether the model got packed sequences, over all microbatches
    lacks_seq_idx: bool = False  # whether Mamba layers got packed sequences without seq_idx


class FirstStepWarnings(StepFeature):
    """Observes the first training step; warns once, on rank 0, or ends the run before it learns."""

    def __init__(self) -> None:
        """Start before the first step."""
        self._look: _Look | None = None
        self._is_over = False

    def begin(self, context: StepContext) -> StepHook | None:
        """Return the observing hook in the first training step."""
        if self._is_over or context.forward_only:
            return None
        self.clear()  # that of a step that was rolled back
        self._look = _Look(context)
        return self._look

    def end(self, context: StepContext) -> None:
        """Compare the stages of the pipeline; all of its ranks call this."""
        look, self._look, self._is_over = self._look, None, True
        if look is not None:
            look.close()
            everyones = gather_objects(look.found(), look.group)
            stages = [finding for findings in everyones for finding in findings]
            with refusing():
                check_packed(stages)
            if dist.get_rank() == 0:
                for text in warnings(stages):
                    logger.warning(text)

    def clear(self) -> None:
        """Free the reference to the model."""
        if self._look is not None:
            self._look.close()
        self._look = None


class _Look(StepHook):
    """Observations of the passes of a rank's stages."""

    def __init__(self, context: StepContext) -> None:
        """Register a hook on each chunk with attention or state, to see how it is called."""
        # Do not store `context`: it references this hook, and the reference cycle would
        # keep the trainer's data iterators alive, whose processes then outlive the trainer.
        self.group = context.groups.pp
        self._cut_off: set[int] = set()
        self._packed: dict[int, set[bool]] = {}
        self._without_seq_idx: set[int] = set()
        self._chunks = dict(zip(context.stages, map(unwrapped, context.chunks), strict=True))
        self._hooks = []
        for stage, chunk in self._chunks.items():
            names = list(inspect.signature(chunk.forward).parameters)
            if PACKED in names and _mixes_tokens(chunk):
                note = partial(self._note, stage, names.index(PACKED))
                self._hooks.append(chunk.register_forward_pre_hook(note, with_kwargs=True))

    def _note(self, stage: int, position: int, model: nn.Module, args: Any, options: Any) -> None:
        packed = args[position] if len(args) > position else options.get(PACKED)
        self._packed.setdefault(stage, set()).add(packed is not None)
        has_mamba = any("MambaMixer" in _class_names(module) for module in model.modules())
        if has_mamba and _lacks_seq_idx(packed):
            self._without_seq_idx.add(stage)

    def ends_forward(self, stage: int, is_last: bool, number: int, output: Tensor) -> None:
        """Record an output without gradient: autograd found no trainable parameter before it."""
        if not output.requires_grad:
            self._cut_off.add(stage)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def found(self) -> list[_StageFindings]:
        """Return the findings by stage."""
        return [
            _StageFindings(
                stage,
                _num_trainable(chunk) if stage in self._cut_off else 0,
                frozenset(self._packed.get(stage, ())),
                lacks_seq_idx=stage in self._without_seq_idx,
            )
            for stage, chunk in self._chunks.items()
        ]


def _mixes_tokens(chunk: nn.Module) -> bool:
    """Return whether a layer of the chunk lets tokens depend on earlier ones."""
    return any(
        getattr(module, "core_attention", None) is not None or _class_names(module) & RECURRENT
        for module in chunk.modules()
    )


def _class_names(module: nn.Module) -> set[str]:
    # Names, because importing the classes needs the packages of their kernels.
    return {base.__name__ for base in type(module).__mro__}


def _lacks_seq_idx(packed: Any) -> bool:
    """Return whether several packed sequences have no seq_idx, the only field that Mamba reads."""
    ends = getattr(packed, "cu_seqlens_q", None)
    has_several = isinstance(ends, Tensor) and len(ends) > 2
    # Megatron before 0.17 has no such field, and rejects packed sequences in Mamba layers.
    return has_several and getattr(packed, "seq_idx", ends) is None


def _num_trainable(chunk: nn.Module) -> int:
    return sum(parameter.numel() for parameter in chunk.parameters() if parameter.requires_grad)


def warnings(findings: Iterable[_StageFindings]) -> list[str]:
    """Return one warning text per mistake of a pipeline's stages."""
    stages = sorted(set(findings), key=lambda finding: finding.stage)
    return [
        f"stage {finding.stage}: {finding.without_gradient:,} trainable parameters get no "
        "gradient, because neither the input of its first layer nor the output of its last one "
        "requires one: "
        "under full recompute a frozen embedding has this effect. Make the embedding's output "
        "require a gradient (a forward hook that calls output.requires_grad_()), or use "
        "--recompute-granularity selective"
        for finding in stages
        if finding.without_gradient
    ]


def check_packed(findings: Iterable[_StageFindings]) -> None:
    """Raise UnsupportedError if a stage does not get the borders of packed sequences.

    Its attention and its Mamba layers would cross them, and train on that.
    """
    stages = sorted(
        (finding for finding in set(findings) if finding.packed), key=lambda finding: finding.stage
    )
    without_seq_idx = ", ".join(str(finding.stage) for finding in stages if finding.lacks_seq_idx)
    if without_seq_idx:
        raise UnsupportedError(
            f"stages {without_seq_idx} have Mamba layers and were called with {PACKED} without "
            "seq_idx: the state of these layers would cross the borders of packed sequences. Pass "
            "total_tokens to PackedSeqParams, which computes seq_idx, on every stage"
        )
    if len({finding.packed for finding in stages}) > 1:
        without = ", ".join(str(finding.stage) for finding in stages if False in finding.packed)
        raise UnsupportedError(
            f"stages {without} were called without {PACKED} for microbatches that other stages got "
            "it for: their layers would cross the borders of packed sequences. Pass it to the "
            "model on every stage, from a data iterator on every rank and for every chunk"
        )
