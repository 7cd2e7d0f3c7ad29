"""Live progress of a sweep: running and finished runs; plain lines without a terminal."""

from rich import progress as rich_progress
from rich.console import Console

from megatron_vshape.sweep.configurations import Configuration
from megatron_vshape.sweep.results import Result


class LiveProgress:
    """A bar over all runs, a line per running run, and a line per finished one.

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
        self._running: dict[Configuration, rich_progress.TaskID] = {}
        self._all = self._bars.add_task("runs", total=total, completed=before)

    def __enter__(self) -> "LiveProgress":
        self._bars.start()
        if self._made_before:
            self._say(self._made_before)
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def started(self, combination: Configuration) -> None:
        """Show that a run has been submitted."""
        self._running[combination] = self._bars.add_task(f"  {combination}", total=1)

    def put_back(self, combination: Configuration, reason: str) -> None:
        """Show that a run, interrupted for external reasons, will be submitted again."""
        self._forget(combination)
        self._say(f"again  {combination} {reason}")

    def ended(self, result: Result) -> None:
        """Show the result of a run."""
        self._forget(result.combination)
        self._bars.advance(self._all)
        outcome = result.outcome
        speed = "" if outcome.step_s is None else f" {outcome.step_s:.3f} s a step"
        self._say(f"{outcome.status.value:6s} {result.combination}{speed}")

    def _forget(self, combination: Configuration) -> None:
        task = self._running.pop(combination, None)
        if task is not None:
            self._bars.remove_task(task)

    def _say(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False)
