"""Expand the grid to combinations, with the reason for each infeasible one."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from pydantic import dataclasses as checked

from megatron_vshape.core.ask import PlanRequest, ask, with_chunks
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import Pieces, even_layers, even_with_ends, without_ends
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.paper import catalogue
from megatron_vshape.core.paper.catalogue import OPTIONS
from megatron_vshape.sweep.files import (
    GIVEN,
    NONE,
    Cluster,
    Format,
    Grid,
    Layout,
    Loaded,
    Positive,
    Recompute,
    SweepError,
    Workload,
)
from megatron_vshape.sweep.subject import Subject

ADAPTIVE = "adaptive"
"""Method that plans for the costs and the memory of each combination."""

MAX_COMBINATIONS = 100_000
MAX_PASSES = 2_000_000
"""Maximum passes of a step on all devices, which are generated and simulated for a prediction."""


@checked.dataclass(frozen=True, slots=True, config={"extra": "forbid"})
class Combination:
    """One training configuration: all settings of a run besides the model and the cluster.

    Invalid types, as in a damaged results file, raise pydantic's ValidationError.
    """

    schedule: str
    sequence_length: Positive
    global_batch_size: Positive
    data_parallel: Positive
    tensor_parallel: Positive
    pipeline_parallel: Positive
    context_parallel: Positive
    microbatch_size: Positive
    recompute: Recompute
    layout: Layout
    arguments: tuple[str, ...] = ()
    vocab_parallel: bool = False
    expert_parallel: Positive = 1
    format: Format = "given"

    def __post_init__(self) -> None:
        # With vocabulary parallelism, embedding and output layer do not count as layers of a stage.
        if self.vocab_parallel and self.layout is Layout.BALANCED:
            object.__setattr__(self, "layout", Layout.AUTO)

    @property
    def workload(self) -> tuple[int, int]:
        """Key for comparable step times: sequence length and global batch size."""
        return self.sequence_length, self.global_batch_size

    @property
    def num_devices(self) -> int:
        """Number of devices of the combination."""
        return (
            self.data_parallel
            * self.tensor_parallel
            * self.pipeline_parallel
            * self.context_parallel
        )

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches per pipeline and step."""
        return self.global_batch_size // (self.data_parallel * self.microbatch_size)

    def __str__(self) -> str:
        text = (
            f"{self.schedule} s{self.sequence_length} gbs{self.global_batch_size} "
            f"dp{self.data_parallel} tp{self.tensor_parallel} pp{self.pipeline_parallel}"
        )
        if self.context_parallel > 1:
            text += f" cp{self.context_parallel}"
        if self.expert_parallel > 1:
            text += f" ep{self.expert_parallel}"
        text += f" mbs{self.microbatch_size} {self.layout}"
        if self.recompute not in (NONE, GIVEN):
            text += f" recompute-{self.recompute}"
        if self.format != GIVEN:
            text += f" {self.format}"
        if self.vocab_parallel:
            text += " vocab-parallel"
        return " ".join((text, *self.arguments))


@dataclass(frozen=True, slots=True)
class Dropped:
    """A combination that will not run; `kind` is the reason without its numbers."""

    combination: Combination
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Expanded:
    """All combinations of the grid."""

    possible: tuple[Combination, ...]
    dropped: tuple[Dropped, ...]
    note: str = ""  # about changed layouts


def expand(loaded: Loaded) -> Expanded:
    """Return every combination of the grid, with reasons for infeasible ones.

    Raises:
        SweepError: a schedule does not exist, or no combination is feasible.
    """
    sweep, model, cluster = loaded.sweep, loaded.subject, loaded.cluster
    known = (*catalogue.NAMES, ADAPTIVE)
    for name in (*sweep.grid.schedule, *(each.schedule for each in sweep.also)):
        try:
            own = with_chunks(name)
            if (name if own is None else own.name) not in known:
                raise catalogue.no_such_schedule(name, known)
        except ScheduleError as error:
            raise SweepError(f"{loaded.path}: {error}") from None
    _check_size(sweep.grid, len(sweep.workloads), loaded)
    possible: dict[Combination, None] = {}
    dropped: list[Dropped] = []
    dealt_out: dict[Combination, None] = {}
    for workload in sweep.workloads:
        every = itertools.chain(
            ((sweep.grid, each) for each in _of_grid(sweep.grid, workload, cluster)),
            ((one, Combination(**dict(workload), **dict(one))) for one in sweep.also),
        )
        for said, combination in every:
            if "layout" not in said.model_fields_set and _halves_layers(combination, model):
                combination = replace(combination, layout=Layout.AUTO)
                dealt_out[combination] = None
            fault = next(_faults(combination, model, cluster, sweep.post_validation), None)
            if fault is None:
                possible[combination] = None
            else:
                dropped.append(Dropped(combination, *fault))
    if not possible:
        first = {each.kind: each.reason for each in reversed(dropped)}
        raise SweepError(
            f"{loaded.path}: no combination of the grid can run: " + "; ".join(first.values())
        )
    cut = possible.keys() & dealt_out.keys()
    note = (
        f"{model.layers} layers and both ends do not divide among the stages of {len(cut)} "
        f"combinations: layout {Layout.AUTO} instead of {Layout.BALANCED}"
    )
    return Expanded(tuple(possible), tuple(dropped), note if cut else "")


def _halves_layers(it: Combination, model: Subject) -> bool:
    """Return whether the default layout would divide a layer; then `auto` is used."""
    try:
        stages = count_stages(it.schedule, it.pipeline_parallel)
    except ScheduleError:  # reported by `_faults`
        return False
    if it.layout is not Layout.BALANCED:
        return False
    return bool(model.command.pattern) or (model.layers + 2) % stages != 0


def _check_size(grid: Grid, num_workloads: int, loaded: Loaded) -> None:
    lists = [value for _, value in grid if isinstance(value, list)]
    count = num_workloads * math.prod(map(len, lists))
    if count > MAX_COMBINATIONS:
        raise SweepError(
            f"{loaded.path}: the grid has {count} combinations, more than the {MAX_COMBINATIONS} "
            "that are predicted; give fewer values"
        )


def _of_grid(grid: Grid, workload: Workload, cluster: Cluster) -> Iterator[Combination]:
    names = [each.name for each in fields(Combination) if each.name in Grid.model_fields]
    lists = {name: getattr(grid, name) or [None] for name in names}
    lists["schedule"] = list(_schedules(grid))
    for values in itertools.product(*lists.values()):
        given = dict(zip(names, values, strict=True))
        if given["data_parallel"] is None:
            taken = (
                given["tensor_parallel"] * given["pipeline_parallel"] * given["context_parallel"]
            )
            given["data_parallel"] = max(1, cluster.num_devices // taken)
        yield Combination(**workload.model_dump(), **given)


def _schedules(grid: Grid) -> Iterator[str]:
    """Yield the schedules' names, with every number of stages per device if that is optional."""
    for name in grid.schedule:
        if grid.vpp is None or name not in OPTIONS:
            yield name
        else:
            yield from ("1f1b" if chunks == 1 else f"{name}:{chunks}" for chunks in grid.vpp)


def _faults(
    it: Combination, model: Subject, cluster: Cluster, post_validation: bool
) -> Iterator[tuple[str, str]]:
    """Yield the reasons why the combination is infeasible; each may rely on the earlier ones."""
    if it.num_devices != cluster.num_devices:
        yield (
            "another number of devices than the cluster's",
            f"DP {it.data_parallel} x TP {it.tensor_parallel} x PP {it.pipeline_parallel} x CP "
            f"{it.context_parallel} takes {it.num_devices} devices, the cluster has "
            f"{cluster.num_devices}",
        )
    if fault := _tensor_fault(it, model, cluster) or _expert_fault(it, model):
        yield "sizes that TP, CP or EP do not divide", fault
    if it.global_batch_size % (it.data_parallel * it.microbatch_size):
        yield (
            "a global batch that does not divide",
            f"the global batch of {it.global_batch_size} is not a multiple of DP "
            f"{it.data_parallel} x microbatch size {it.microbatch_size}",
        )
    if fault := _size_fault(it, model):
        yield "too many passes", fault
    if fault := _vocabulary_fault(it, post_validation):
        yield "a vocabulary that cannot be shared", fault
    if fault := _layer_fault(it, model):
        yield "layers that do not divide, or a schedule that cannot be", fault


def _tensor_fault(it: Combination, model: Subject, cluster: Cluster) -> str | None:
    if it.tensor_parallel > cluster.devices_per_node:
        return (
            f"TP {it.tensor_parallel} does not fit into a node of {cluster.devices_per_node} "
            "devices"
        )
    for what, count in (
        ("attention_heads", model.heads),
        ("query_groups", model.groups),
        ("ffn_hidden_size", model.command.number("--ffn-hidden-size", 0)),
        ("vocabulary_size", model.vocabulary if model.translated else 0),
    ):
        if count % it.tensor_parallel:
            return f"TP {it.tensor_parallel} does not divide {what} {count}"
    if it.sequence_length % (it.tensor_parallel * 2 * it.context_parallel):
        return (
            f"sequence_length {it.sequence_length} does not divide into 2 x CP "
            f"{it.context_parallel} x TP {it.tensor_parallel} parts"
        )
    return None


def _expert_fault(it: Combination, model: Subject) -> str | None:
    if it.expert_parallel == 1:
        return None
    if not model.experts:
        return f"EP {it.expert_parallel}: the model has no experts"
    if model.experts % it.expert_parallel:
        return f"EP {it.expert_parallel} does not divide {model.experts} experts"
    shards = model.command.number("--expert-tensor-parallel-size", it.tensor_parallel)
    ranks = it.data_parallel * it.tensor_parallel * it.context_parallel
    if ranks % (it.expert_parallel * shards):
        return (
            f"EP {it.expert_parallel} x ETP {shards} does not divide the {ranks} ranks of a stage"
        )
    return None


def _size_fault(it: Combination, model: Subject) -> str | None:
    """Return the reason if the prediction would need minutes and GiB."""
    if it.pipeline_parallel > model.layers + 2:
        return f"PP {it.pipeline_parallel} has more devices than {model.layers} layers and two ends"
    passes = 3 * 2 * it.pipeline_parallel * it.num_microbatches
    if passes > MAX_PASSES:
        return f"its step of {passes} passes is longer than the {MAX_PASSES} that are predicted"
    return None


def _vocabulary_fault(it: Combination, post_validation: bool) -> str | None:
    """Return the reason if the trainer does not support vocabulary parallelism here."""
    if not it.vocab_parallel:
        return None
    if it.pipeline_parallel == 1:
        return "one pipeline device has nobody to share the vocabulary with"
    if post_validation:
        return "post_validation does not go with vocab_parallel yet"
    return None


def _layer_fault(it: Combination, model: Subject) -> str | None:
    try:
        stages = count_stages(it.schedule, it.pipeline_parallel)
    except ScheduleError as error:
        return str(error)
    if it.pipeline_parallel == 1 and it.schedule != "1f1b":
        return f"{it.schedule} on one pipeline device is 1f1b with more overhead"
    layers = model.layers
    if it.layout is Layout.BALANCED and model.command.pattern:
        return "layout balanced counts both ends as layers, and a hybrid model's differ: use auto"
    if it.layout is Layout.AUTO:
        few = layers < max(stages - 2, 1)
        return f"{layers} layers are too few for {stages} stages" if few else None
    counted = layers + 2 if it.layout is Layout.BALANCED else layers
    if counted % stages:
        ends = " and both ends" if it.layout is Layout.BALANCED else ""
        return f"{layers} layers{ends} do not divide among {stages} stages"
    if stages == 1 and it.layout is Layout.BALANCED:
        return "one stage has no ends to balance; its layout is even"
    return None


@lru_cache(maxsize=256)
def count_stages(schedule: str, num_devices: int) -> int:
    """Return the number of stages of a schedule; the adaptive method has two per device.

    Raises:
        ScheduleError: the schedule does not exist or does not support `num_devices`.
    """
    if schedule == ADAPTIVE:
        return 2 * num_devices
    return ask(PlanRequest(schedule, num_devices, 1)).schedule.num_stages


def layers_of_stages(
    combination: Combination, model: Subject, placement: Placement
) -> tuple[int, ...]:
    """Return the number of layers per stage; with layout auto, as in the trainer."""
    num_stages = len(placement)
    if combination.layout is Layout.EVEN:
        return (model.layers // num_stages,) * num_stages
    if combination.layout is Layout.AUTO:
        sizes = model.sizes(combination.sequence_length)
        pieces = Pieces.estimated(sizes.head_in_layers, sizes.blocks / num_stages)
        pieces = replace(pieces, shares=sizes.shares)
        if combination.vocab_parallel:
            pieces = without_ends(pieces)
        pieces = pieces.predicting(sizes.predicting, sizes.merging_in_layers, sizes.predicted)
        return pieces.balanced(model.layers, placement)
    return even_with_ends(model.layers, num_stages) or even_layers(model.layers, placement)
