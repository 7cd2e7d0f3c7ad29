"""Lines about the runs of a sweep: submitted, interrupted and finished ones."""

from collections.abc import Callable
from dataclasses import dataclass

from megatron_vshape.tuning.configurations import Configuration
from megatron_vshape.tuning.results import Result


@dataclass
class RunLog:
    """Report runs by `say`; `done` of the `total` runs have ended."""

    say: Callable[[str], None]
    total: int
    done: int

    def __post_init__(self) -> None:
        if self.done:
            self.say(f"{self.done} of {self.total} runs were made before")

    def started(self, configuration: Configuration) -> None:
        """Report that a run has been submitted."""
        self.say(f"start  {configuration}")

    def put_back(self, configuration: Configuration, reason: str) -> None:
        """Report that a run, interrupted for external reasons, will be submitted again."""
        self.say(f"again  {configuration} {reason}")

    def ended(self, result: Result) -> None:
        """Report the result of a run."""
        self.done += 1
        outcome = result.outcome
        speed = "" if outcome.step_s is None else f" {outcome.step_s:.3f} s a step"
        count = f"({self.done} of {self.total})"
        self.say(f"{outcome.status.value:6s} {result.configuration}{speed} {count}")
