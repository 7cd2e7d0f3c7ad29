"""Arguments that several commands share, and their conversion to costs and plan requests."""

import argparse
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megatron_vshape.cli.help import MODEL, REQUIRED, group
from megatron_vshape.core.check.bounds import LimitError
from megatron_vshape.core.model.amounts import SAVED_US
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.layers import even_layers
from megatron_vshape.core.model.pieces import NOTHING, recut, with_ends
from megatron_vshape.core.model.placement import looping
from megatron_vshape.core.model.stage_costs import StageCosts
from megatron_vshape.core.paper.catalogue import MAX_STAGES_PER_DEVICE
from megatron_vshape.core.request import StageCostFunction
from megatron_vshape.view.names import plain
from megatron_vshape.view.numbers import GIB, UnitFormat, argument, format_sufficient_limit


class Times(NamedTuple):
    """Times of F, B and W of 1 / (2 D) of the model and of a message; BW if it is not B + W."""

    forward: float
    backward: float
    weight: float
    send: float
    full_backward: float | None = None

    @property
    def split(self) -> tuple[float, float, float, float]:
        """Times of F, B, W and a message."""
        return self[:4]

    @property
    def saved(self) -> float:
        """Time that a full backward saves, compared with B + W."""
        return (
            0.0 if self.full_backward is None else self.backward + self.weight - self.full_backward
        )

    def __str__(self) -> str:
        full_backward = [] if self.full_backward is None else [f"BW={argument(self.full_backward)}"]
        return ",".join([*map(argument, self.split), *full_backward])


UNIT_COST = Times(1.0, 1.0, 1.0, 0.0)
_COST_NAMES = ("F", "B", "W", "COMM")
UNITS = {"gib": GIB, "mib": 2.0**20}


@contextmanager
def format_limit_errors(units: UnitFormat) -> Iterator[None]:
    """Format errors about limits that nothing fits in the units of the options."""
    try:
        yield
    except LimitError as error:
        raise ScheduleError(
            error.format_message(partial(units.memory, number=format_sufficient_limit))
        ) from None


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --devices and --microbatches."""
    model = group(parser, MODEL)
    model.add_argument("--devices", type=count, metavar="D", help="Pipeline ranks" + REQUIRED)
    model.add_argument(
        "--microbatches", type=count, metavar="M", help="Microbatches per step" + REQUIRED
    )


def add_cost_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --cost and --costs, which are mutually exclusive, --embedding and --head."""
    model = group(parser, MODEL)
    exclusive = model.add_mutually_exclusive_group()
    exclusive.add_argument(
        "--cost",
        type=cost,
        metavar="F,B,W,COMM",
        help="Relative times of a chunk (1/(2D) of the model) and of a P2P message (default: "
        "1,1,1,0); a fifth value BW=X is that of a full backward (default: B + W)",
    )
    exclusive.add_argument(
        "--costs", type=Path, metavar="FILE", help="Costs file (JSON): us and bytes of each stage"
    )
    for name, stage in (("--embedding", "first"), ("--head", "last")):
        model.add_argument(
            name,
            type=end,
            metavar="F,B,W",
            help=f"Extra time of the {stage} stage, in --cost units; plan: or layers (default: 0)",
        )


def count(text: str) -> int:
    """Parse an integer of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def chunks(text: str) -> int:
    """Parse the number of chunks per rank."""
    number = count(text)
    if number > MAX_STAGES_PER_DEVICE:
        raise argparse.ArgumentTypeError(
            f"{text}: a rank can have at most {MAX_STAGES_PER_DEVICE} chunks"
        )
    return number


def cost(text: str) -> Times:
    """Parse the times of --cost."""
    parts, full_backward = text.split(","), None
    if parts[-1].lower().startswith("bw="):
        full_backward = _time(parts.pop()[3:], "BW")
    if len(parts) == 2 and full_backward is None:
        forward, full = map(_time, parts, ("F", "BW"))
        return Times(forward, full / 2, full / 2, 0.0)
    if len(parts) != len(_COST_NAMES):
        raise argparse.ArgumentTypeError(
            f"{text!r:.60} has {len(parts)} values; it needs four, F,B,W,COMM, as in "
            "1,1.15,0.85,0.05, which BW=1.9 may follow; or two, F,BW, as in 1,2"
        )
    forward, backward, weight, send = map(_time, parts, _COST_NAMES)
    return Times(forward, backward, weight, send, full_backward)


def end(text: str) -> tuple[float, ...]:
    """Parse the times of --embedding or --head, or one number of layers."""
    values = tuple(map(float_or_nan, text.split(",")))
    if len(values) not in (1, 3) or not all(0 <= value < math.inf for value in values):
        raise argparse.ArgumentTypeError(
            f"{text!r:.40} is not F,B,W, three finite numbers of at least 0, as in 2,2,2"
        )
    return values


def ends_of(
    options: argparse.Namespace, num_layers: int | None = None
) -> tuple[StageCosts, StageCosts]:
    """Return the costs that the embedding and the output layer add to their stages.

    Raises:
        ScheduleError: a costs file is given too, or a number of layers without --layers.
    """
    times, ends = options.cost or UNIT_COST, []
    chunk = StageCosts.of(*times.split[:3]).changed({SAVED_US: times.saved})
    for name in ("embedding", "head"):
        values = getattr(options, name)
        if values is not None and options.costs is not None:
            raise ScheduleError(
                f"--{name}: a costs file contains embedding and output layer; remove --{name}"
            )
        if values is None:
            ends.append(NOTHING)
        elif len(values) == 3:
            ends.append(StageCosts.of(*values))
        elif num_layers is None:
            raise ScheduleError(
                f"--{name} {values[0]:g} is not F,B,W, as in 2,2,2; a number of layers needs "
                "--layers N of plan"
            )
        else:
            chunks = values[0] * 2 * options.devices / num_layers
            ends.append(chunk.times(chunks) if chunks else NOTHING)
    return ends[0], ends[1]


def float_or_nan(text: str) -> float:
    """Parse a number; NaN if the text is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def number_of(description: str, minimum: float = 0.0) -> Callable[[str], float]:
    """Return a parser for finite numbers of at least `minimum`; errors contain `description`."""

    def read(text: str) -> float:
        value = float_or_nan(text)
        if not minimum <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r:.40} is not {description}")
        return value

    return read


ABOVE_0 = math.nextafter(0.0, 1.0)
"""Lower limit for numbers above 0."""

nonnegative_time = number_of("a time of at least 0")


def decimal_unit_hint(text: str) -> str:
    """Return a hint for a text in GB or MB, units that are not supported; else an empty text."""
    match = re.fullmatch(r"([\d.]+)\s*([gm])b?", text.strip().lower())
    return f". Use {match[1]}{match[2].upper()}iB: a GiB is 2^30 bytes" if match else ""


def headroom_of(text: str | None, limit: float, in_bytes: bool) -> float:
    """Return the part of a limit that --headroom keeps free, in the limit's unit.

    It is a share (5% or 0.05), or GiB if the limit is in bytes. A number of at least 1 requires a
    unit because it is ambiguous.

    Raises:
        ScheduleError: the text is neither, or nothing would be left.
    """
    lowered = (text or "0%").lower().strip()
    share = float_or_nan(lowered)
    if 0 <= share < 1:
        return share * limit
    if share >= 1:
        alternative = f" or {text}GiB" if in_bytes else ""
        raise ScheduleError(f"--headroom {text!r:.40} has no unit: use {text:.40}%{alternative}")
    unit = next((name for name in UNITS if in_bytes and lowered.endswith(name)), "%")
    value = float_or_nan(lowered.removesuffix(unit))
    headroom = value * UNITS[unit] if unit in UNITS else value / 100 * limit
    if hint := decimal_unit_hint(lowered):
        raise ScheduleError(f"--headroom {text!r:.40} has an unsupported unit{hint}")
    if not (lowered.endswith(unit) and 0 <= headroom < limit):
        expected = "a share, as in 5% or 0.05" + (", or GiB, as in 2GiB" if in_bytes else "")
        raise ScheduleError(
            f"--headroom {text!r:.40} leaves no limit: give {expected}, of less than all of it"
        )
    return headroom


def _time(text: str, name: str) -> float:
    value = float_or_nan(text)
    excludes_zero = name != "COMM"
    if not math.isfinite(value) or value < 0 or (excludes_zero and value == 0):
        expected = "above 0" if excludes_zero else "of at least 0"
        raise argparse.ArgumentTypeError(
            f"{name} is {text!r}; it must be a finite number {expected}"
        )
    return value


def stage_cost_function(
    devices: int,
    cost: Times | None,
    measured: Costs | None,
    num_layers: int | None = None,
    ends: tuple[StageCosts, StageCosts] = (NOTHING, NOTHING),
) -> StageCostFunction:
    """Return a function that gives the costs of any number of stages.

    Measured costs are regrouped; without them all stages are equal, except for embedding and output
    layer (`ends`). With `num_layers`, a number of stages that does not divide the layers is an
    error.

    Args:
        devices: pipeline ranks.
        cost: relative times, if there is no costs file.
        measured: costs file, if any.
        num_layers: layers of the model, if known.
        ends: costs of embedding and output layer.
    """

    def costs_of_stages(num_stages: int, name: str) -> Costs:
        if measured is not None:
            return recut(measured, num_stages, devices, plain(name), num_layers)
        if num_layers is not None:
            even_layers(num_layers, looping(devices, num_stages // devices))
        times = cost or UNIT_COST
        costs = Costs.uniform(devices, num_stages, *times.split)
        if times.full_backward is not None:
            full_backward_us = times.full_backward * 2 * devices / num_stages
            costs = costs.having({Kind.BW.time: (full_backward_us,) * num_stages})
        return costs if ends == (NOTHING, NOTHING) else with_ends(costs, *ends)

    return costs_of_stages
