"""Expand the grid to combinations, with the reason for each infeasible one."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.paper import catalogue
from megatron_vshape.core.paper.catalogue import OPTIONS
from megatron_vshape.core.schedule_names import with_chunks
from megatron_vshape.tuning.configurations import (
    ADAPTIVE,
    Configuration,
    Layout,
    Subject,
    SweepError,
    count_stages,
    faults,
)
from megatron_vshape.tuning.files import Also, Grid, Loaded, Workload
from megatron_vshape.tuning.machine import Machine

_MAX_COMBINATIONS = 100_000


@dataclass(frozen=True, slots=True)
class Dropped:
    """A configuration that will not run; `kind` is the reason without its numbers."""

    configuration: Configuration
    kind: str
    reason: str


def group_by_kind(dropped: Sequence[Dropped]) -> dict[str, list[Dropped]]:
    """Group configurations by the kind of their reasons."""
    kinds: dict[str, list[Dropped]] = {}
    for rejection in dropped:
        kinds.setdefault(rejection.kind, []).append(rejection)
    return kinds


@dataclass(frozen=True, slots=True)
class Expanded:
    """All combinations of the grid."""

    possible: tuple[Configuration, ...]
    dropped: tuple[Dropped, ...]


def expand_grid(loaded: Loaded, machine: Machine | None = None) -> Expanded:
    """Return every combination of the grid, with reasons for infeasible ones.

    `machine` replaces the cluster.

    Raises:
        SweepError: a schedule does not exist, or no combination is feasible.
    """
    sweep, model = loaded.sweep, loaded.subject
    machine = machine or Machine.of(loaded.cluster)
    sizes = machine.num_devices, machine.gpu.node
    schedule_names = (*catalogue.NAMES, ADAPTIVE)
    for name in (*sweep.grid.schedule, *(run.schedule for run in sweep.also)):
        try:
            parsed = with_chunks(name)
            if (name if parsed is None else parsed.name) not in schedule_names:
                raise catalogue.no_such_schedule(name, schedule_names)
        except ScheduleError as error:
            raise SweepError(f"{loaded.path}: {error}") from None
    _check_size(sweep.grid, len(sweep.workloads), loaded)
    possible: dict[Configuration, None] = {}
    dropped: list[Dropped] = []
    for workload in sweep.workloads:
        combinations = itertools.chain(
            (
                (sweep.grid, config)
                for config in _grid_configurations(sweep.grid, workload, machine.num_devices)
            ),
            ((run, configuration_of(run, workload)) for run in sweep.also),
        )
        for source, combination in combinations:
            if "layout" not in source.model_fields_set and _halves_layers(combination, model):
                combination = replace(combination, layout=Layout.AUTO)
            fault = next(faults(combination, model, *sizes, sweep.post_validation), None)
            if fault is None:
                possible[combination] = None
            else:
                dropped.append(Dropped(combination, *fault))
    if not possible:
        first = {rejection.kind: rejection.reason for rejection in reversed(dropped)}
        raise SweepError(
            f"{loaded.path}: no combination of the grid can run: " + "; ".join(first.values())
        )
    return Expanded(tuple(possible), tuple(dropped))


def configuration_of(run: Also, workload: Workload) -> Configuration:
    """Return the configuration of an additional run."""
    settings = {**dict(run), **dict(workload), "arguments": tuple(run.arguments)}
    return Configuration(**settings)


def _halves_layers(config: Configuration, model: Subject) -> bool:
    """Return whether the default layout would divide a layer; then `auto` is used."""
    try:
        stages = count_stages(config.schedule, config.pipeline_parallel)
    except ScheduleError:  # reported by `faults`
        return False
    if config.layout is not Layout.BALANCED:
        return False
    return bool(model.command.pattern) or (model.layers + 2) % stages != 0


def _check_size(grid: Grid, num_workloads: int, loaded: Loaded) -> None:
    lists = [value for _, value in grid if isinstance(value, list)]
    count = num_workloads * math.prod(map(len, lists))
    if count > _MAX_COMBINATIONS:
        raise SweepError(
            f"{loaded.path}: the grid has {count} combinations, more than the {_MAX_COMBINATIONS} "
            "that are predicted; give fewer values"
        )


def _grid_configurations(grid: Grid, workload: Workload, number: int) -> Iterator[Configuration]:
    names = [field.name for field in fields(Configuration) if field.name in Grid.model_fields]
    lists = {name: getattr(grid, name) or [None] for name in names}
    lists["schedule"] = list(_schedules(grid))
    for values in itertools.product(*lists.values()):
        settings = dict(zip(names, values, strict=True))
        config = Configuration(**dict(workload), **settings | {"data_parallel": 1})
        replicas = settings["data_parallel"]
        yield replace(config, data_parallel=replicas) if replicas else config.on_devices(number)


def _schedules(grid: Grid) -> Iterator[str]:
    """Yield the schedules' names, with every number of stages per device if that is optional."""
    for name in grid.schedule:
        if grid.vpp is None or name not in OPTIONS:
            yield name
        else:
            yield from ("1f1b" if chunks == 1 else f"{name}:{chunks}" for chunks in grid.vpp)
