"""The arguments that several commands share, and what they stand for."""

import argparse
import math
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from megatron_vshape.core.building_block import BuildingBlock
from megatron_vshape.core.catalogue import NAMES, OPTIONS, make, make_block
from megatron_vshape.core.costs import Costs, regroup
from megatron_vshape.core.passes import ScheduleError
from megatron_vshape.core.schedule import Schedule, load_schedule
from megatron_vshape.core.verify import verify
from megatron_vshape.view.names import plain

SCHEDULE_SUFFIXES = (".json", ".csv")
UNIT_COST = (1.0, 1.0, 1.0, 0.0)
_COST_NAMES = ("F", "B", "W", "COMM")


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --devices and --microbatches."""
    parser.add_argument("--devices", type=count, metavar="D", help="pipeline devices")
    parser.add_argument("--microbatches", type=count, metavar="M", help="microbatches a step")


def add_cost_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --cost and --costs, of which one may be given."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--cost",
        type=cost,
        metavar="F,B,W,COMM",
        help="time of the passes of 1 / (2 D) of the model, and of a message (default 1,1,1,0)",
    )
    group.add_argument(
        "--costs", type=Path, metavar="FILE", help="costs of every stage, in us and bytes (JSON)"
    )


def count(text: str) -> int:
    """Return the whole number of at least 1 that an argument is."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def cost(text: str) -> tuple[float, float, float, float]:
    """Return the times that --cost names."""
    parts = text.split(",")
    if len(parts) != len(_COST_NAMES):
        raise argparse.ArgumentTypeError(
            f"{text!r} has {len(parts)} values; it needs four, F,B,W,COMM, as in 1,1.15,0.85,0.05"
        )
    forward, backward, weight, send = map(_number, parts, _COST_NAMES)
    return forward, backward, weight, send


def _number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    least_excluded = name != "COMM"
    if not math.isfinite(value) or value < 0 or (least_excluded and value == 0):
        wanted = "above 0" if least_excluded else "of at least 0"
        raise argparse.ArgumentTypeError(f"{name} is {text!r}; it must be a finite number {wanted}")
    return value


def read_schedule(
    name: str, devices: int | None, microbatches: int | None, choices: Mapping[str, int]
) -> tuple[Schedule, BuildingBlock | None]:
    """Return the schedule that `name` names, proved, and its block if it is the catalogue's.

    `choices` are keyword arguments of `make`; those that the schedule has no use for are left out.

    Raises:
        ScheduleError: there is no such schedule, or a size is missing, impossible or not the
            file's.
    """
    if name not in NAMES:
        path = Path(name)
        if path.suffix in SCHEDULE_SUFFIXES or path.is_file():
            return _read_file(path, devices, microbatches), None
        near = get_close_matches(name, NAMES, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise ScheduleError(
            f"there is no schedule {name!r:.80}{hint} The names are {', '.join(NAMES)}; a schedule "
            "file ends in .json or .csv"
        )
    if devices is None or microbatches is None:
        missing = "--devices" if devices is None else "--microbatches"
        raise ScheduleError(f"{name} needs {missing}, as in --devices 4 --microbatches 8")
    mine = {key: choices[key] for key in choices if key in OPTIONS.get(name, ())}
    block = make_block(name, devices, microbatches, **mine)
    return make(name, devices, microbatches, **mine), block


def _read_file(path: Path, devices: int | None, microbatches: int | None) -> Schedule:
    schedule = load_schedule(path)
    sizes = (
        ("--devices", devices, schedule.num_devices),
        ("--microbatches", microbatches, schedule.num_microbatches),
    )
    for option, wanted, found in sizes:
        if wanted is not None and wanted != found:
            raise ScheduleError(f"{path} is for {option} {found}, not {wanted}")
    try:
        verify(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    return schedule


def costs_for(
    schedule: Schedule, cost: tuple[float, float, float, float] | None, measured: Costs | None
) -> Costs:
    """Return the costs of the schedule's stages: measured ones if there are, else equal ones.

    Raises:
        ScheduleError: the measured costs are for stages that the schedule's are not made of.
    """
    if measured is None:
        sizes = (schedule.num_devices, schedule.num_stages)
        return Costs.uniform(*sizes, *(UNIT_COST if cost is None else cost))
    return regroup(measured, schedule.num_stages, plain(schedule.name))
