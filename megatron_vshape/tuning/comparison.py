"""The predictions that `advise` compares, and the recommended one."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from megatron_vshape.core.model.kinds import MOVING_NAME
from megatron_vshape.rehearsal.megatron_layers import is_even
from megatron_vshape.tuning.configurations import ADAPTIVE, GIVEN, NONE, Configuration, Subject
from megatron_vshape.tuning.predictor import Prediction, step_seconds


class ComparisonRow(NamedTuple):
    """A prediction of the comparison, with its key in --json and its title."""

    key: str
    title: str
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class Comparison:
    """Predictions to compare; None if no configuration of that kind is known to run."""

    today: Prediction
    stock: Prediction | None = None  # the fastest of stock Megatron
    best: Prediction | None = None  # the fastest of all, possibly of stock Megatron
    same_sizes: Prediction | None = None  # the fastest of this package in the sizes of the command
    least_memory: Prediction | None = None  # among those as fast as the best within the error
    avoided: Prediction | None = None  # a V schedule with full recomputation
    fsdp: Prediction | None = None  # without a pipeline

    @property
    def rows(self) -> list[ComparisonRow]:
        """The existing predictions, in the order of the report."""
        rows = (
            ("today", "today", self.today),
            ("stock", "best stock", self.stock),
            ("best", "best with this package", self.best),
            ("same", "current parallelism", self.same_sizes),
            ("least", "least memory within the error", self.least_memory),
            ("DON'T", "not recommended", self.avoided),
            ("fsdp", "without a pipeline", self.fsdp),
        )
        return [ComparisonRow(key, title, row) for key, title, row in rows if row is not None]

    def distinct_rows(self, subject: Subject) -> list[ComparisonRow]:
        """Return the rows that differ in their description or step time; `best` if not stock."""
        distinct: dict[tuple[str, float], ComparisonRow] = {}
        for row in self.rows:
            prediction = row.prediction
            if row.key != "best" or not prediction.is_stock:
                key = describe(prediction, subject), step_seconds(prediction)
                distinct.setdefault(key, row)
        return list(distinct.values())

    def without(self, rejected: Collection[Prediction]) -> "Comparison":
        """Return the comparison without these predictions; the best of the others replaces best."""

        def unless_rejected(prediction: Prediction | None) -> Prediction | None:
            is_rejected = any(prediction is rejected_row for rejected_row in rejected)
            return None if is_rejected else prediction

        stock, same_sizes, least_memory = map(
            unless_rejected, (self.stock, self.same_sizes, self.least_memory)
        )
        other_rows = [row for row in (stock, same_sizes, least_memory) if row is not None]
        best = unless_rejected(self.best) or min(other_rows, key=step_seconds, default=None)
        return Comparison(
            self.today,
            stock,
            best,
            same_sizes,
            least_memory,
            unless_rejected(self.avoided),
            unless_rejected(self.fsdp),
        )

    def recommended(self, threshold: float) -> Prediction | None:
        """Return today's prediction, unless the gain of another one is significant.

        Of stock and this package it is stock, unless the gain of this package is significant.

        Args:
            threshold: fraction of the step time below which a gain is not significant.
        """
        if self.best is None:
            return None
        clearly = 1 - threshold
        if self.today.fits and step_seconds(self.best) >= clearly * step_seconds(self.today):
            return self.today
        if self.stock is None or step_seconds(self.best) <= clearly * step_seconds(self.stock):
            return self.best
        return self.stock


def sizes_text(config: Configuration, subject: Subject) -> str:
    """Format the parallel sizes and the recomputation."""
    suffix = "" if config.sequence_parallel else " without SP"
    words = f"TP {config.tensor_parallel}{suffix} PP {config.pipeline_parallel}"
    sizes = {
        "CP": config.context_parallel,
        "EP": config.expert_parallel,
        "microbatch": config.microbatch_size,
    }
    words += "".join(f" {name} {size}" for name, size in sizes.items() if size > 1)
    recompute = recompute_of(config, subject)
    return words if recompute == NONE else f"{words}, {recompute} recompute"


def recompute_of(config: Configuration, subject: Subject) -> str:
    """Return the granularity of the recomputation."""
    return subject.recompute if config.recompute == GIVEN else config.recompute


def schedule_name(prediction: Prediction) -> str:
    """Return the name of the schedule."""
    config, schedule = prediction.configuration, prediction.schedule
    if config.schedule != ADAPTIVE:
        return config.schedule
    return "planned schedule" + f" with {MOVING_NAME}" * bool(schedule and schedule.copies)


def describe(prediction: Prediction, subject: Subject) -> str:
    """Format schedule and parallel configuration."""
    suffix = "".join(f", {feature}" for feature in prediction.configuration.features)
    if prediction.is_stock and not is_even(prediction.layers):
        suffix = ", uneven layers"
    sizes = sizes_text(prediction.configuration, subject)
    return f"{schedule_name(prediction)}{suffix}, {sizes}"
