"""All options of this package; each is defined once, here.

A field of `Options` is the keyword of `register` and the key in the variable MEGATRON_VSHAPE. Its
metadata define the flag in Megatron's parser, parsing and validation of the value, and the row of
the table in docs/reference.md.
"""

from __future__ import annotations

import math
import os
import re
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.files import is_whole
from megatron_vshape.core.model.pieces import Encoder
from megatron_vshape.core.paper import catalogue
from megatron_vshape.core.schedule_names import AUTO, MEGATRONS_OWN, PLUS_NAMES, is_megatrons_own

VARIABLE = "MEGATRON_VSHAPE"

MEGATRONS_TIMEOUT_MINUTES = 10
"""Default of --distributed-timeout-minutes."""

TIMEOUT_SHARE = 0.9
"""Default of --pipeline-timeout as a share of --distributed-timeout-minutes."""

TRACE_STEPS = (4, 6)
"""Profiled steps if only a trace is requested; the first steps still fill caches."""


class UnsupportedError(ValueError):
    """The schedule does not support an option; the message has the option and the fix."""

    def __init__(self, text: str, *options: str) -> None:
        """Set the message and the names of the options that cause it."""
        super().__init__(text)
        self.options = options


class Values(NamedTuple):
    """The valid values of an option."""

    wants: str  # description for error messages
    fits: Callable[[Any], bool]
    read: Callable[[str], Any] = str  # parses a text

    def of_text(self, text: str) -> Any:
        """Parse a text without validation; raises ArgumentTypeError."""
        try:
            return self.read(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r:.40} is not {self.wants}") from None

    def check(self, value: Any, option_name: str) -> None:
        """Raise UnsupportedError, naming the option, if the value is invalid."""
        if not self.fits(value):
            shown = f"{value:g}" if isinstance(value, float) else f"{value!r:.40}"
            raise UnsupportedError(f"{option_name} {shown} is not {self.wants}")


class Option(NamedTuple):
    """Metadata of an option in addition to its keyword and default."""

    flag: str  # empty: only a keyword
    metavar: str  # empty: a switch
    help: str
    values: Values
    for_ours: bool  # used only by schedules of this package

    @property
    def argument(self) -> str:
        """Return the name of the attribute in Megatron's arguments."""
        return self.flag[2:].replace("-", "_")


def _is_above_0(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _are_steps(value: Any) -> bool:
    are_two = isinstance(value, tuple | list) and len(value) == 2 and all(map(is_whole, value))
    return are_two and bool(2 <= value[0] <= value[1])


def _limit(text: str) -> float | str:
    """Parse a number of GiB or the name of a schedule, which is validated later."""
    try:
        return float(text)
    except ValueError:
        if not text:
            raise
        return text


def _steps(text: str) -> tuple[int, int]:
    first, last = map(int, text.split(":"))
    return first, last


def _no_function(text: str) -> None:
    raise ValueError(f"{text!r:.40} is a text")


def _switch(text: str) -> bool:
    return bool(["false", "0", "true", "1"].index(text.lower()) // 2)


_ENCODER = re.compile(r"(\d+\.?\d*|\.\d+)(:frozen)?")
_TEXT = Values("a text", lambda value: isinstance(value, str))
_PATH = Values("a path", lambda value: isinstance(value, str | os.PathLike))
_SWITCH = Values("true or false", lambda value: isinstance(value, bool), _switch)
_GIB = Values("a number of GiB above 0", _is_above_0, float)


def schedule_names() -> tuple[str, ...]:
    """Return all names that `--pipeline-schedule` supports."""
    published_names = (name for name in catalogue.EVERY_NAME if name not in MEGATRONS_OWN)
    return (*MEGATRONS_OWN, *published_names, *PLUS_NAMES, AUTO)


def _option(
    flag: str, values: Values, help_text: str, default: Any = None, for_ours: bool = True
) -> Any:
    """Create the field of an option; `flag` includes the metavar, if it has a value."""
    name, _, metavar = flag.partition(" ")
    return field(
        default=default, metadata={"option": Option(name, metavar, help_text, values, for_ours)}
    )


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run."""

    schedule: str | None = _option(
        "--pipeline-schedule NAME|FILE",
        _TEXT,
        f"schedule: {', '.join(schedule_names())}, or a schedule file (JSON). Default: none, "
        "Megatron is unchanged.",
        for_ours=False,
    )
    timeout_seconds: float = _option(
        "--pipeline-timeout SECONDS",
        Values("a number of seconds above 0", _is_above_0, float),
        "time limit in seconds for a P2P message before the run ends with an error. "
        f"Default: {TIMEOUT_SHARE:g} of --distributed-timeout-minutes, so that this error, with "
        "its cause, comes first.",
        default=TIMEOUT_SHARE * 60 * MEGATRONS_TIMEOUT_MINUTES,
        for_ours=False,
    )
    costs_file: str | None = _option(
        "--pipeline-costs FILE",
        _PATH,
        "costs file (JSON) of every stage, for auto and for the estimates in the log",
    )
    memory_limit_gib: float | str | None = _option(
        "--pipeline-memory-limit GIB|NAME",
        Values(_GIB.wants, lambda value: isinstance(value, str) or _is_above_0(value), _limit),
        "memory limit in GiB for all tensors of a rank, for auto; or a schedule, as in "
        "interleaved-1f1b:4, whose peak activation memory is the limit. Default: 1f1b.",
    )
    host_memory_limit_gib: float | None = _option(
        "--pipeline-host-memory-limit GIB",
        _GIB,
        "host memory limit in GiB per rank for offloaded activations; further ones stay in GPU "
        "memory. Default: the free host memory.",
    )
    profile_steps: tuple[int, int] | None = _option(
        "--pipeline-profile-iterations A:B",
        Values(
            "A:B, as a keyword (A, B), with 2 <= A <= B; the first step counts memory",
            _are_steps,
            _steps,
        ),
        "training steps A to B whose passes are measured; auto then plans again",
    )
    trace_folder: str | None = _option(
        "--pipeline-trace DIR",
        _PATH,
        "directory for the planned and measured timeline of the last profiled step. "
        f"Default steps: {TRACE_STEPS[0]}:{TRACE_STEPS[1]}.",
    )
    layer_split: str | None = _option(
        "--pipeline-layer-split auto|N,N,...",
        _TEXT,
        "layers per stage, in model order; auto balances them by costs or model sizes. "
        "Default: even.",
        for_ours=False,
    )
    encoder_layers: float | str | None = _option(
        "--pipeline-encoder-layers X[:frozen]",
        Values(
            "a number of layers, as in 3.2, or 3.2:frozen",
            lambda value: _ENCODER.fullmatch(str(value)) is not None,
        ),
        "forward time of the image encoder in layers of the language model (frozen: no backward), "
        "for --pipeline-layer-split auto and predictions. Default: 0.",
        for_ours=False,
    )
    vocab_parallel: bool = _option(
        "--pipeline-vocab-parallel",
        _SWITCH,
        "use vocabulary parallelism: all pipeline ranks share embedding and output layer, in "
        "addition to tensor parallelism",
        default=False,
    )
    post_validates: bool = _option(
        "--optimizer-post-validation",
        _SWITCH,
        "run the optimizer step before the global gradient norm and inf check are known, and "
        "undo it if they require clipping or skipping: identical results, without a barrier "
        "between iterations. Requires one more copy of parameters and moments.",
        default=False,
        for_ours=False,
    )
    slices: int | str = _option(
        "--pipeline-slices K|auto",
        Values(
            "a whole number of at least 1, or auto",
            lambda value: value == AUTO or (is_whole(value) and value >= 1),
            lambda text: text if text == AUTO else int(text),
        ),
        "sequence slices per microbatch: less activation memory and bubble with long sequences "
        "and few microbatches; auto chooses K with the schedule. Default: 1.",
        default=1,
    )
    keep_order: bool = _option(
        "--pipeline-keep-order",
        _SWITCH,
        "keep variable-length microbatches in data order (bitwise equal to 1F1B). By default, auto "
        "reorders them",
        default=False,
    )
    split_graphs: str = _option(
        "--pipeline-split-graphs auto|off",
        Values("auto or off", lambda value: value in (AUTO, "off")),
        "with --cuda-graph-impl transformer_engine, auto captures weight gradients in graphs of "
        "their own, so that captured layers are split too; off leaves them in B. Default: auto.",
        default=AUTO,
    )
    warmup: bool = _option(
        "--pipeline-warmup",
        _SWITCH,
        "before the first step, run one microbatch on all ranks at the same time, which compiles "
        "and tunes kernels, and send a message of real size on every P2P connection",
        default=False,
    )
    lengths: Callable[[Any], Sequence[int]] | None = _option(
        "",
        Values("a function, which the keyword of register alone can give", callable, _no_function),
        "the lengths of a microbatch's sequences",
    )

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Options:
        """Create options from values that are not None; a trace implies profiled steps."""
        steps = {"profile_steps": TRACE_STEPS} if values.get("trace_folder") is not None else {}
        return cls(**steps | {name: value for name, value in values.items() if value is not None})

    def check(self) -> None:
        """Raise UnsupportedError for an invalid value."""
        for name in self._changed():
            OPTIONS[name].values.check(getattr(self, name), OPTIONS[name].flag or name)

    def flags_for_ours(self) -> list[str]:
        """Return the given flags that only schedules of this package use.

        Profiled steps that a trace implies do not count.
        """
        implied_name = None if self.trace_folder is None else "profile_steps"
        option_names = [
            name for name in self._changed() if OPTIONS[name].for_ours and name != implied_name
        ]
        return [OPTIONS[name].flag or name for name in option_names]

    def _changed(self) -> list[str]:
        return [
            option_field.name
            for option_field in fields(self)
            if getattr(self, option_field.name) != option_field.default
        ]

    @property
    def asks_for_megatrons_own(self) -> bool:
        """Return whether Megatron itself runs the schedule."""
        return is_megatrons_own(self.schedule) and self.slices == 1

    @property
    def checked_steps(self) -> tuple[int, int]:
        """Return the steps that are compared with the prediction from the profiled steps.

        The step in between measures the memory of the new schedule, and its one-time costs.
        """
        first, last = self.profile_steps or (0, -1)
        return last + 2, last + 2 + (last - first)

    @property
    def encoder(self) -> Encoder | None:
        """Return the cost of the image encoder, if it is given."""
        cost = _ENCODER.fullmatch(str(self.encoder_layers))
        return None if cost is None else Encoder(float(cost[1]), is_frozen=cost[2] is not None)

    def costs(self) -> Costs | None:
        """Return the costs from the file, if one is given."""
        return None if self.costs_file is None else Costs.load(self.costs_file)


OPTIONS: dict[str, Option] = {
    option_field.name: option_field.metadata["option"] for option_field in fields(Options)
}
"""All options by keyword."""

_FILE = r"\S+\.(?:json|csv)"
_NUMBERS = r"\d[\d.,:]*(?:e[+-]?\d+)?(?<![.,:])"


def with_keywords(text: str) -> str:
    """Replace the flags of this package in a message by the keywords of `register`.

    A value after a flag stays with it. Megatron's flags remain, since libraries have its names too.

    >>> with_keywords("--pipeline-slices 3 does not divide 64 tokens. Remove --pipeline-slices")
    'slices=3 does not divide 64 tokens. Remove slices'
    """
    for name, option in OPTIONS.items():
        if option.flag:
            names = sorted((*option.metavar.split("|"), *schedule_names()), key=len, reverse=True)
            values = "|".join((_FILE, *map(re.escape, filter(None, names)), "off", _NUMBERS))
            flag = rf"{re.escape(option.flag)}(?![\w-])(?:[ =]({values})(?![\w-]))?"
            text = re.sub(flag, partial(_with_keyword, name), text)
    return text


def _with_keyword(name: str, match: re.Match[str]) -> str:
    return name if match[1] is None else f"{name}={match[1]}"


INPUTS_OF_PLANS = ("costs_file", "memory_limit_gib", "host_memory_limit_gib")
"""Options that only the choice of a schedule reads."""


def add_arguments(parser: ArgumentParser, record: Callable[[str], str] = str) -> ArgumentParser:
    """Add the flags to `parser` and return it; `record` is called with the given schedule name."""
    group = parser.add_argument_group("pipeline schedules (megatron-vshape)")
    for name, option in OPTIONS.items():
        if not option.flag:
            continue
        how: dict[str, Any] = {"action": "store_true"}
        if option.metavar:
            read = record if name == "schedule" else option.values.of_text
            how = {"metavar": option.metavar, "type": read}
        # Options that are not given leave no attribute in the arguments.
        group.add_argument(option.flag, default=SUPPRESS, help=option.help, **how)
    return parser


def options_of(args: Namespace) -> Options:
    """Return the options in parsed arguments.

    By default, a pipeline rank times out before Megatron's watchdogs. Those of other process groups
    count from the launch of a collective on the host.
    """
    values = {name: getattr(args, option.argument, None) for name, option in OPTIONS.items()}
    if values["timeout_seconds"] is None:
        values["timeout_seconds"] = TIMEOUT_SHARE * watchdog_seconds(args)
    return Options.from_values(values)


def watchdog_seconds(args: Namespace) -> float:
    """Return the timeout of Megatron's watchdogs in seconds."""
    return 60.0 * getattr(args, "distributed_timeout_minutes", MEGATRONS_TIMEOUT_MINUTES)


def options_from(values: Mapping[str, Any]) -> Options:
    """Validate the arguments of `register` and return them as options.

    Raises:
        UnsupportedError: An option does not exist, has an invalid value, or requires Megatron's
            trainer.
    """
    unknown = sorted(values.keys() - OPTIONS.keys())
    if unknown:
        option_names = sorted(OPTIONS.keys() - {"post_validates"})  # rejected below
        raise UnsupportedError(
            f"register knows no option {unknown[0]!r:.60}; "
            f"its options are {', '.join(option_names)}"
        )
    for name, value in values.items():
        if value is not None:
            OPTIONS[name].values.check(value, name)
    options = Options.from_values(values)
    if options.schedule is None or options.asks_for_megatrons_own:
        raise UnsupportedError(
            f"schedule is {options.schedule!r}: give one of this package, such as 'v-half'; "
            "Megatron's own run without it"
        )
    if options.post_validates:
        raise UnsupportedError(
            "post_validates is for Megatron-LM's own trainer, whose steps it takes apart: leave it "
            "out"
        )
    return options


def options_in(text: str) -> dict[str, Any]:
    """Parse the text of the environment variable, comma-separated `name=value`.

    Raises:
        ValueError: A part has no `=`, or a value is invalid.
    """
    options: dict[str, Any] = {}
    last = None
    for part in filter(None, map(str.strip, text.split(","))):
        name, separator, value = part.partition("=")
        if separator:
            options[name.strip()], last = value.strip(), name.strip()
        elif last == "layer_split":  # its value contains commas
            options[last] += f",{part}"
        else:
            raise ValueError(
                f"{VARIABLE}={text!r:.80}: {part!r:.40} is no name=value, as in schedule=v-half"
            )
    for name in options.keys() & OPTIONS.keys():
        try:
            options[name] = OPTIONS[name].values.of_text(options[name])
        except ArgumentTypeError as error:
            raise ValueError(f"{VARIABLE}={text!r:.80}: {name} {error}") from None
    return options
