"""The flags this package adds to Megatron's parser, and what they ask for."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass

from megatron_vshape.core import catalogue

MEGATRONS_OWN = ("1f1b", "interleaved-1f1b")
"""The schedules that Megatron's own functions run."""

TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """The flags' values."""

    schedule: str | None  # a name, the path of a schedule file, or None: as Megatron decides
    timeout_seconds: float  # how long a rank waits for a message before it gives up


def schedule_names() -> tuple[str, ...]:
    """Return every name that `--pipeline-schedule` knows."""
    return (*MEGATRONS_OWN, *(name for name in catalogue.NAMES if name not in MEGATRONS_OWN))


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the flags to `parser` and return it."""
    group = parser.add_argument_group("pipeline schedules (megatron-vshape)")
    group.add_argument(
        "--pipeline-schedule",
        metavar="NAME|FILE",
        default=None,
        help=f"order of the passes: {', '.join(schedule_names())}, or a schedule file (JSON). "
        "Default: as Megatron decides.",
    )
    group.add_argument(
        "--pipeline-timeout",
        metavar="SECONDS",
        type=float,
        default=TIMEOUT_SECONDS,
        help="how long a pipeline rank waits for a message before the run ends with an error. "
        f"Default: {TIMEOUT_SECONDS:g}.",
    )
    return parser


def options_of(args: Namespace) -> PipelineOptions:
    """Return the flags' values in parsed arguments."""
    return PipelineOptions(args.pipeline_schedule, args.pipeline_timeout)
