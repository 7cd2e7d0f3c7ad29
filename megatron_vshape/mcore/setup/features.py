"""The interface of an optional feature, and the list of all features.

A feature is a folder of `mcore.features`. Its `FEATURE` takes part in the setup of a run, and its
function `in_steps` creates its part in steps (`step.stage.StepFeature`). Loading a feature imports
neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.mcore import features as home
from megatron_vshape.mcore.hook import Hook
from megatron_vshape.mcore.layout.stage_map import ModelEnds, StageMap
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.refusals import Refusal
from megatron_vshape.mcore.setup.planned_step import PlannedStep
from megatron_vshape.mcore.setup.run_config import RunConfig, ScheduleChoice, Settings

if TYPE_CHECKING:  # it imports torch
    from megatron_vshape.mcore.step_state import StepState

Patch = Callable[[type, Callable[[], Mapping[str, Any]]], None]
"""Sets attributes of a library's class once: the class, and a function that makes them."""


@dataclass(frozen=True, slots=True)
class BuiltChunk:
    """A chunk of the model that Megatron has just built."""

    pipeline: RunConfig
    state: StepState
    first: Any  # the first chunk of this rank
    model: Any
    chunk: int
    rank: int
    patch: Patch


class Feature:
    """An optional feature of a schedule; the defaults do nothing.

    A method that rejects a run raises ScheduleError or UnsupportedError.
    """

    flag = ""  # the option that enables the feature, for reports
    refusals: tuple[Refusal, ...] = ()  # options of Megatron that the feature rejects
    supports_slices: bool = False  # whether a run may have sequence slices as well

    def label(self, settings: Settings) -> str | None:
        """Return the name of the feature for messages if the run uses it, else None."""
        return None

    def requires_ours(self, options: Options) -> bool:
        """Return whether the options enable the feature, which Megatron's schedules do not have."""
        return False

    def configure(self, choice: ScheduleChoice, options: Options) -> ScheduleChoice:
        """Return the choice with the feature's options; raises for a value that does not fit."""
        return choice

    def check(self, settings: Settings) -> None:
        """Reject options that the feature does not support, before the stages are known."""

    def narrow(self, settings: Settings) -> ScheduleChoice:
        """Return the choice without alternatives that the model does not support."""
        return settings.choice

    def check_stages(self, settings: Settings, stage_map: StageMap) -> None:
        """Reject stages that the feature does not support."""

    def ends(self, choice: ScheduleChoice) -> ModelEnds | None:
        """Return the costs of a model whose ends belong to no stage, if the feature does that."""
        return None

    # Kinds of passes whose memory per microbatch a run measures, in addition to F, B and W.
    measured_kinds: tuple[Kind, ...] = ()

    def adapt_costs(
        self, choice: ScheduleChoice, costs: Costs | None, num_stages: int
    ) -> Costs | None:
        """Return the costs of a run: with the feature's passes if it is enabled, else without.

        None: all passes have equal costs.
        """
        return costs

    def adapt_schedule(self, schedule: Schedule, costs: Costs) -> Schedule:
        """Return the schedule with the feature's passes, if the costs include them."""
        return schedule

    def adapt_evaluation(self, choice: ScheduleChoice, wave: Schedule) -> Schedule:
        """Return the schedule of an evaluation with the feature's passes."""
        return wave

    def least_bytes(self, costs: Costs) -> float:
        """Return the memory that the feature's passes need on every device."""
        return 0.0

    def notes(self, pipeline: RunConfig, plan: PlannedStep, local_ranks: int | None) -> str:
        """Return lines for the log about a plan, each after a line break."""
        return ""

    def change_arguments(self, args: Any, pipeline: RunConfig) -> None:
        """Change Megatron's arguments before Megatron validates them."""

    def build_chunk(self, built: BuiltChunk) -> None:
        """Change a chunk of the model when it is built, before it is wrapped."""

    def owns_embeddings(self, pipeline: RunConfig, model: Any) -> bool:
        """Return whether Megatron must not share the embeddings of a chunk between ranks.

        Rejects a chunk whose embedding a library has replaced.
        """
        return False

    def change_layers(
        self, state: StepState, chunks: Sequence[Any], choice: ScheduleChoice
    ) -> None:
        """Change the layers of the built model for the passes of the feature."""

    def check_chunks(self, pipeline: RunConfig, rank: int, chunks: Sequence[Any]) -> None:
        """Reject changes of a library to the built model that the feature would drop."""

    def check_config(self, config: Any, options: Options) -> None:
        """Reject options that a script has set only in the TransformerConfig, in every step."""

    def hooks(self) -> tuple[Hook, ...]:
        """Return the feature's replacements of Megatron's attributes."""
        return ()


def adapted_costs(choice: ScheduleChoice, costs: Costs | None, num_stages: int) -> Costs | None:
    """Return the costs with the passes of enabled features, and without those of others."""
    for feature in features():
        costs = feature.adapt_costs(choice, costs, num_stages)
    return costs


def adapted_schedule(schedule: Schedule, costs: Costs | None) -> Schedule:
    """Return the schedule with the passes of the features that the costs include."""
    if costs is not None:
        for feature in features():
            schedule = feature.adapt_schedule(schedule, costs)
    return schedule


@cache
def feature_modules() -> tuple[Any, ...]:
    """Return the folders of `mcore.features`, by name."""
    folders = sorted(module.name for module in iter_modules(home.__path__))
    return tuple(import_module(f"{home.__name__}.{name}") for name in folders)


@cache
def features() -> tuple[Feature, ...]:
    """Return the features of all folders."""
    return tuple(module.FEATURE for module in feature_modules())
