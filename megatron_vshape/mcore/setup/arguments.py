"""The flags this package adds to Megatron's parser, and what they ask for."""

from __future__ import annotations

import math
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megatron_vshape.core.ask import AUTO, PLUS_NAMES
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.paper import catalogue
from megatron_vshape.core.rivals import MEGATRONS_OWN
from megatron_vshape.mcore.refusals import UnsupportedError

MEGATRONS_TIMEOUT_MINUTES = 10
"""What --distributed-timeout-minutes is unless it is given."""

TIMEOUT_SHARE = 0.9
"""Of --distributed-timeout-minutes: how long a rank waits for a message unless it is told."""

TRACE_STEPS = (4, 6)
"""Profiled where only a trace is asked for; the first steps still set caches up."""


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """The flags' values."""

    schedule: str | None  # a name, the path of a schedule file, or None: as Megatron decides
    timeout_seconds: float  # how long a rank waits for a message before it gives up
    costs_file: str | None = None
    # Of a device, everything included, for auto; or of whose activations the peak is the limit.
    memory_limit_gib: float | str | None = None
    host_memory_limit_gib: float | None = None  # of a device: what activations may take there
    profile_steps: tuple[int, int] | None = None  # first and last training step of this process
    trace_folder: str | None = None
    layer_split: str | None = None  # auto, or the layers of every stage with commas
    vocab_parallel: bool = False  # all ranks share the embedding and the output layer
    post_validates: bool = False  # step before the gradient norm is known, and undo if it has to be
    slices: int | str = 1  # in which every microbatch is cut along its sequence; or auto

    @property
    def checked_steps(self) -> tuple[int, int]:
        """Return the steps that are held against what the profiled ones predict.

        The step in between counts the new order's memory, and pays for what it needs first.
        """
        first, last = self.profile_steps or (0, -1)
        return last + 2, last + 2 + (last - first)

    def costs(self) -> Costs | None:
        """Return the costs in the file, if one is given."""
        return None if self.costs_file is None else Costs.load(self.costs_file)


def check_timeout(option: str, seconds: object) -> None:
    """Raise UnsupportedError unless it is a number of seconds above 0."""
    if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise UnsupportedError(f"{option} {seconds!s:.40} is not a number of seconds above 0")


def schedule_names() -> tuple[str, ...]:
    """Return every name that `--pipeline-schedule` knows."""
    own = (name for name in catalogue.EVERY_NAME if name not in MEGATRONS_OWN)
    return (*MEGATRONS_OWN, *own, *PLUS_NAMES, AUTO)


def add_arguments(parser: ArgumentParser, hear: Callable[[str], str] = str) -> ArgumentParser:
    """Add the flags to `parser` and return it; `hear` is given the schedule that is named."""
    group = parser.add_argument_group("pipeline schedules (megatron-vshape)")
    add = partial(group.add_argument, default=SUPPRESS)  # what is not given leaves no trace
    add(
        "--pipeline-schedule",
        metavar="NAME|FILE",
        type=hear,
        help=f"order of the passes: {', '.join(schedule_names())}, or a schedule file (JSON). "
        "Default: as Megatron decides.",
    )
    add(
        "--pipeline-timeout",
        metavar="SECONDS",
        type=float,
        help="how long a pipeline rank waits for a message before the run ends with an error. "
        f"Default: {TIMEOUT_SHARE:g} of --distributed-timeout-minutes, whose end says less.",
    )
    add(
        "--pipeline-costs",
        metavar="FILE",
        help="costs of every stage (JSON), for auto and for the times that the log predicts",
    )
    add(
        "--pipeline-memory-limit",
        metavar="GIB|NAME",
        type=memory_limit,
        help="device memory for all of a rank's tensors, for auto; or a schedule, as in "
        "interleaved-1f1b:4, whose activations are the limit for activations. Default: 1f1b.",
    )
    add(
        "--pipeline-host-memory-limit",
        metavar="GIB",
        type=float,
        help="host memory in which a rank's activations may wait: auto plans within it, and what a "
        "schedule file has wait beyond it stays on the device. Default: what is free.",
    )
    add(
        "--pipeline-profile-iterations",
        metavar="A:B",
        type=_step_range,
        help="measure the passes of this process's training steps A to B; auto then plans anew",
    )
    add(
        "--pipeline-layer-split",
        metavar="auto|N,N,...",
        help="how many layers every stage has, in the model's order; auto gives fewer to the first "
        "and the last, by the costs or by the sizes of the model. Default: equally many.",
    )
    add(
        "--pipeline-vocab-parallel",
        action="store_true",
        help="share the input embedding and the output layer out to all pipeline ranks, beside "
        "tensor parallelism's",
    )
    add(
        "--pipeline-slices",
        metavar="K|auto",
        type=_slices,
        help="cut every microbatch in K slices along its sequence: less is held, and less idle, "
        "where sequences are long and microbatches few; auto chooses K with the order. Default: 1.",
    )
    add(
        "--pipeline-trace",
        metavar="DIR",
        help="write the planned and the measured timeline of the last profiled step to DIR. "
        f"Default steps: {TRACE_STEPS[0]}:{TRACE_STEPS[1]}.",
    )
    add(
        "--optimizer-post-validation",
        action="store_true",
        help="step before the global gradient norm and inf check are known, begin the next "
        "iteration, and undo both where they would have clipped or skipped: the same numbers, "
        "without a barrier between iterations. Takes one more copy of parameters and moments.",
    )
    return parser


def memory_limit(text: str) -> float | str:
    """Return the GiB that a text says, or the schedule that it names; the name is checked later."""
    try:
        return float(text)
    except ValueError:
        return text


def _slices(text: str) -> int | str:
    return text if text == AUTO else int(text)


def _step_range(text: str) -> tuple[int, int]:
    try:
        first, last = map(int, text.split(":"))
    except ValueError:
        first, last = 0, 0
    if not 2 <= first <= last:
        raise ArgumentTypeError(
            f"{text!r:.40} is not A:B with whole numbers 2 <= A <= B; the first step counts memory"
        )
    return first, last


def _timeout_seconds(args: Namespace) -> float:
    """Return after how long a pipeline rank gives up: before Megatron's own watchdogs do.

    Those of its other groups count from when the host has asked for a collective.
    """
    given = getattr(args, "pipeline_timeout", None)
    return TIMEOUT_SHARE * watchdog_seconds(args) if given is None else float(given)


def watchdog_seconds(args: Namespace) -> float:
    """Return after how long Megatron's own watchdogs end a run."""
    return 60.0 * getattr(args, "distributed_timeout_minutes", MEGATRONS_TIMEOUT_MINUTES)


def options_of(args: Namespace) -> PipelineOptions:
    """Return the flags' values in parsed arguments."""
    given = vars(args).get
    profile, trace_folder = given("pipeline_profile_iterations"), given("pipeline_trace")
    if profile is None and trace_folder is not None:
        profile = TRACE_STEPS
    return PipelineOptions(
        given("pipeline_schedule"),
        _timeout_seconds(args),
        given("pipeline_costs"),
        given("pipeline_memory_limit"),
        given("pipeline_host_memory_limit"),
        profile,
        trace_folder,
        given("pipeline_layer_split"),
        given("pipeline_vocab_parallel", False),
        given("optimizer_post_validation", False),
        given("pipeline_slices", 1),
    )
