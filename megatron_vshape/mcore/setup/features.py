"""The interface of an optional feature, and the list of all features.

A feature is a folder of `mcore.features`; its `FEATURE` takes part in the setup and steps of a run.
Loading a feature imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_vshape.mcore import features as home
from megatron_vshape.mcore.hook import Hook
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.refusals import Refusal, check_refusals
from megatron_vshape.mcore.setup.run_config import RunConfig, ScheduleChoice, Settings

if TYPE_CHECKING:  # plans import torch
    from megatron_vshape.mcore.setup.plans import PlannedStep


class Maturity(StrEnum):
    """The largest hardware on which something has trained."""

    SEVERAL_GPUS = "several GPUs"
    SHARED_GPU = "one GPU, shared by several ranks"
    ONE_RANK = "one GPU, as one rank"
    CPU = "CPU ranks only"


class Support(NamedTuple):
    """A feature in reports and tables."""

    title: str
    flag: str  # the option that enables the feature
    maturity: Maturity = Maturity.CPU  # raised by a run in benchmarks/evidence.md or configs/costs
    with_slices: bool = False  # whether a run may have sequence slices as well


class Feature:
    """An optional feature of a schedule; the defaults do nothing.

    A method that rejects a run raises ScheduleError or UnsupportedError.
    """

    support: Support
    refusals: tuple[Refusal, ...] = ()  # options of Megatron that the feature rejects

    def label(self, settings: Settings) -> str | None:
        """Return the name of the feature for messages if the run uses it, else None."""
        return None

    def configure(self, choice: ScheduleChoice, options: Options) -> ScheduleChoice:
        """Return the choice with the feature's options; raises for a value that does not fit."""
        return choice

    def check(self, settings: Settings) -> ScheduleChoice:
        """Reject options that the feature does not support, before the stages have layers.

        Returns the choice without alternatives that the model does not support.
        """
        if self.label(settings) is not None:
            check_refusals(self.refusals, settings.model, self.support.flag)
        return settings.choice

    def notes(self, pipeline: RunConfig, plan: PlannedStep, local_ranks: int | None) -> str:
        """Return lines for the log about a plan, each after a line break."""
        return ""

    def check_chunks(self, pipeline: RunConfig, rank: int, chunks: Sequence[Any]) -> None:
        """Reject changes of a library to the built model that the feature would drop."""

    def hooks(self) -> tuple[Hook, ...]:
        """Return the feature's replacements of Megatron's attributes."""
        return ()

    def in_steps(self, runner: Any) -> Any:
        """Return its part in the steps of a `PipelineRunner`, a `StepFeature`, or None."""


def maturities() -> list[tuple[str, str, Maturity]]:
    """Return name, option and maturity of the schedules and of every feature."""
    return [
        ("schedules with split backward", "--pipeline-schedule", Maturity.SHARED_GPU),
        ("CUDA graphs of weight gradients", "--pipeline-split-graphs", Maturity.SHARED_GPU),
        *(feature.support[:3] for feature in features()),
    ]


@cache
def features() -> tuple[Feature, ...]:
    """Return the features of all folders of `mcore.features`, by name."""
    folders = sorted(module.name for module in iter_modules(home.__path__))
    return tuple(import_module(f"{home.__name__}.{name}").FEATURE for name in folders)
