"""Variable-length microbatches: their lengths, and their order in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_vshape.mcore.setup.features import Feature, Support

if TYPE_CHECKING:
    from megatron_vshape.mcore.step.forward_backward import PipelineRunner
    from megatron_vshape.mcore.step.stage import StepFeature


class VariableLengthFeature(Feature):
    """Reorders variable-length microbatches."""

    support = Support("order of variable-length microbatches", "--pipeline-schedule auto")

    def in_steps(self, runner: PipelineRunner) -> StepFeature:
        """Return the part that reorders the microbatches of a step."""
        from megatron_vshape.mcore.features.variable_length.reorder import VariableLength

        return VariableLength(runner)


FEATURE = VariableLengthFeature()
