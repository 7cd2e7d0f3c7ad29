"""Warm-up before the first step: all ranks compile and tune their kernels at the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_vshape.mcore.refusals import (
    LENGTHS,
    Refusal,
    UnsupportedError,
    captures_graphs,
    uses_stash,
)
from megatron_vshape.mcore.setup.features import Feature, Support
from megatron_vshape.mcore.setup.run_config import ScheduleChoice, Settings

if TYPE_CHECKING:
    from megatron_vshape.mcore.step.forward_backward import PipelineRunner
    from megatron_vshape.mcore.step.stage import StepFeature

FLAG = "--pipeline-warmup"

REFUSALS = (
    Refusal(
        "variable_seq_lengths",
        "the shapes of the messages are not known before the first step",
        flag=LENGTHS,
    ),
    Refusal(
        "cuda_graph_warmup_steps",
        "graphs are captured before the first step",
        fix="Set --cuda-graph-warmup-steps to at least 1",
        holds=lambda model: captures_graphs(model) and model.cuda_graph_warmup_steps == 0,
    ),
    Refusal("moe_paged_stash", "it records the order of the passes", holds=uses_stash),
)
"""Options of Megatron that the warm-up rejects."""


class WarmupFeature(Feature):
    """Rejects state that the warm-up cannot restore."""

    support = Support("warm-up", FLAG, with_slices=True)
    refusals = REFUSALS

    def label(self, settings: Settings) -> str | None:
        """Return the flag if it is given."""
        return FLAG if settings.options.warmup else None

    def check(self, settings: Settings) -> ScheduleChoice:
        """Reject options with state that the warm-up cannot restore."""
        choice, moves_memory = super().check(settings), settings.choice.moves_memory
        if settings.options.warmup and (moves_memory or settings.options.post_validates):
            name = "offloading" if moves_memory else "--optimizer-post-validation"
            raise UnsupportedError(
                f"{FLAG} does not support {name}, whose state it cannot restore: remove {FLAG}"
            )
        return choice

    def in_steps(self, runner: PipelineRunner) -> StepFeature | None:
        """Return the warm-up of a run."""
        if not runner.pipeline.options.warmup:
            return None
        from megatron_vshape.mcore.features.warmup.step import Warmup

        return Warmup(runner)


FEATURE = WarmupFeature()
