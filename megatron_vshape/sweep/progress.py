"""Live progress of a sweep: what runs, what has ended and how; plain lines where no one watches."""

from rich import progress as rich_progress
from rich.console import Console

from megatron_vshape.sweep.grid import Combination
from megatron_vshape.sweep.results import Result


class LiveProgress:
    """A bar over all runs, a line for each that runs, and one for each that has ended.

    `before` of the `total` runs were made by an earlier sweep.
    """

    def __init__(self, console: Console, total: int, before: int) -> None:
        self._made_before = f"{before} of {total} runs were made before" if before else ""
        self._bars = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}", markup=False),
            rich_progress.BarColumn(),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._running: dict[Combination, rich_progress.TaskID] = {}
        self._all = self._bars.add_task("runs", total=total, completed=before)

    def __enter__(self) -> "LiveProgress":
        self._bars.start()
        if self._made_before:
            self._say(self._made_before)
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def started(self, combination: Combination) -> None:
        """Show that a run has been submitted."""
        self._running[combination] = self._bars.add_task(f"  {combination}", total=1)

    def put_back(self, combination: Combination, reason: str) -> None:
        """Show that a run, ended by no fault of its own, will be submitted again."""
        self._forget(combination)
        self._say(f"again  {combination} {reason}")

    def ended(self, result: Result) -> None:
        """Show how a run ended."""
        self._forget(result.combination)
        self._bars.advance(self._all)
        outcome = result.outcome
        speed = "" if outcome.step_s is None else f" {outcome.step_s:.3f} s a step"
        self._say(f"{outcome.status.value:6s} {result.combination}{speed}")

    def _forget(self, combination: Combination) -> None:
        task = self._running.pop(combination, None)
        if task is not None:
            self._bars.remove_task(task)

    def _say(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False)
