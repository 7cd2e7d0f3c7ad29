"""The interface of an optional feature, and the list of all features.

A feature is a folder of `mcore.features`. Only this module loads it, so all other code uses it
through `Feature` and works without it. Loading a feature imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.refusals import Refusal

if TYPE_CHECKING:  # they use the features, or torch
    from megatron_vshape.mcore.layout.stage_map import StageMap
    from megatron_vshape.mcore.setup.choice import ScheduleConfig
    from megatron_vshape.mcore.step.forward_backward import PipelineRunner
    from megatron_vshape.mcore.step.step_hooks import StepFeature

NAMES = ("post_validation", "overlap", "vocabulary", "offload", "slices", "variable_length")
"""The folders of `mcore.features`, in the order of their checks."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run that start-up checks read."""

    model: Any  # Megatron's arguments or a library's config
    choice: ScheduleConfig
    options: Options
    may_offload: bool = False  # an option of Megatron enables offloading in plans


class Feature:
    """An optional feature of a schedule; the defaults do nothing.

    A method that rejects a run raises ScheduleError or UnsupportedError.
    """

    flag = ""  # the option that enables the feature, for reports
    refusals: tuple[Refusal, ...] = ()  # options of Megatron that the feature rejects

    def configure(self, choice: ScheduleConfig, options: Options) -> ScheduleConfig:
        """Return the choice with the feature's options; raises for a value that does not fit."""
        return choice

    def check(self, settings: Settings) -> None:
        """Reject options that the feature does not support, before the stages are known."""

    def fit(self, settings: Settings) -> ScheduleConfig:
        """Return the choice without alternatives that the model does not support."""
        return settings.choice

    def check_stages(self, settings: Settings, stage_map: StageMap) -> None:
        """Reject stages that the feature does not support."""

    def check_config(self, config: Any, options: Options) -> None:
        """Reject options that a script has set only in the TransformerConfig, in every step."""

    def in_steps(self, runner: PipelineRunner) -> StepFeature | None:
        """Return the feature's part in the steps of a run, if it has one."""
        return None


@cache
def features() -> tuple[Feature, ...]:
    """Return all features."""
    return tuple(import_module(f"megatron_vshape.mcore.features.{name}").FEATURE for name in NAMES)
