"""Run a training command, write its output to a file, and show a summary of it.

    python scripts/watch_training.py [--verbose] --log FILE COMMAND...

The summary has the schedule with its bubble, peak and picture, a line per logged step, the
losses of evaluations, and the table at the end. If the run fails, it has the reason or the last
lines. The exit status is that of the command.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
from collections import deque
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatron_vshape.tuning.training_run import STEP

SHOWN = ("megatron-vshape", "megatron-core", "torch", "numba")
LAST_LINES = 25
_EVALUATION = re.compile(r"validation loss at (?P<at>.*?) \|.*lm loss value: (?P<loss>\S+) \|")
_SEQUENCE = re.compile(r" +seq_length \.+ (\d+)$")
_REFUSED = re.compile(r"megatron-vshape: (.*)")
_HEADLINE = re.compile(r"pipeline schedule .*, (?P<ranks>\d+) ranks, \d+ microbatches")
_PICTURE = "one row per rank):"
_AS_IT_IS = re.compile(
    r".*; peak activation memory per rank in MiB: "
    r"|.* +predicted +measured +ratio$"
    r"|.* +[\d.]+ +[\d.]+ +[\d.]+$"
    r"|(step time|activation memory) .*predict"
)


class Screen:
    """Selects and shortens the lines to show."""

    def __init__(self) -> None:
        self._sequence_length = 0
        self._ranks = 0
        self._in_header = False
        self._rows = 0  # remaining rows of the picture

    def shown(self, line: str) -> str | None:
        """Return the text to show for a line, or None."""
        sequence = _SEQUENCE.match(line)
        if sequence:
            self._sequence_length = int(sequence[1])
        if self._is_header(line):
            return line
        step = STEP.search(line)
        if step and step["loss"]:
            return self._step(step)
        evaluation = _EVALUATION.search(line)
        if evaluation:
            return f"validation loss {float(evaluation['loss']):.3f} at {evaluation['at']}"
        refused = _REFUSED.search(line)
        if refused:
            return refused[0]
        return line if _AS_IT_IS.match(line) else None

    def _is_header(self, line: str) -> bool:
        """Return whether the line is the schedule's headline, a note, or part of its picture."""
        headline = _HEADLINE.match(line)
        if headline:
            self._ranks, self._in_header = int(headline["ranks"]), True
            return True
        if self._in_header:
            self._in_header = not line.endswith(_PICTURE)
            self._rows = 0 if self._in_header else self._ranks
            return True
        shown, self._rows = self._rows > 0, max(self._rows - 1, 0)
        return shown

    def _step(self, match: re.Match[str]) -> str:
        step, steps, step_s = int(match["step"]), int(match["steps"]), float(match["ms"]) / 1e3
        tokens_per_s = int(match["batch"]) * self._sequence_length / step_s
        remaining = _time((steps - step) * step_s) if step < steps else "done"
        return (
            f"step {step:{len(str(steps))}}/{steps}  loss {float(match['loss']):6.3f}  "
            f"{tokens_per_s:9,.0f} tokens/s  {100 * step // steps:3} %, {remaining}"
        )


def _time(left_s: float) -> str:
    return f"{left_s:.0f} s left" if left_s < 100 else f"{left_s / 60:.0f} min left"


def installed() -> str:
    """Return the versions of the libraries."""
    versions = [f"python {sys.version.split()[0]}"]
    for name in SHOWN:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"no {name}")
    return ", ".join(versions)


def watch(command: list[str], log: Path, verbose: bool) -> int:
    """Run the command and return its status."""
    last: deque[str] = deque(maxlen=LAST_LINES)
    screen, has_error = Screen(), False
    # Without a buffer, so that the log is always complete.
    with log.open("w", encoding="utf-8", buffering=1) as stream:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        # Ctrl-C reaches the command directly; the command ends by its rules, with its output.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
        assert process.stdout is not None
        for line in process.stdout:
            stream.write(line)
            text = line.rstrip()
            last.append(text)
            shown = screen.shown(text)
            has_error |= bool(_REFUSED.search(text))
            if verbose:
                print(text, flush=True)
            elif shown is not None:
                print(shown, flush=True)
        status = process.wait()
    if status and not verbose and not has_error:
        print(f"the run failed; the last lines of {log}:", *last, sep="\n", file=sys.stderr)
    return status if status >= 0 else 128 - status


def main() -> int:
    """Parse the arguments and watch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--log", type=Path, required=True, help="File for the output (required)")
    parser.add_argument("--verbose", action="store_true", help="Show every line")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    options.log.parent.mkdir(parents=True, exist_ok=True)
    print(installed(), flush=True)
    return watch(options.command, options.log, options.verbose)


if __name__ == "__main__":
    sys.exit(main())
