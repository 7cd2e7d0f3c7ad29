"""Costs of a parallel configuration from two or three counted ranks.

A configuration is counted with one layer per stage in the V placement; if some layers have linear
attention, with several, of which one has softmax attention. The first rank has the embedding and
the output layer, the second only layers, and a third the dense layers of a model with experts. A
stage with more layers costs proportionally more. The pipeline length and the number of replicas are
not counted: costs once per step follow from them. Counted ranks are cached in the user's folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_vshape.core.model.amounts import STATE_BYTES
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import WORKSPACES, Kind, ScheduleError
from megatron_vshape.core.model.pieces import Pieces
from megatron_vshape.core.model.placement import Placement
from megatron_vshape.core.model.stage_costs import Share, StageCosts
from megatron_vshape.mcore.layout import hybrid
from megatron_vshape.mcore.layout import sizes as layer_sizes
from megatron_vshape.rehearsal import report_cache
from megatron_vshape.rehearsal.command import STAGE_BEFORE_DATA, Command, Sizes, sizes_of
from megatron_vshape.rehearsal.costs_from_reports import (
    always_bytes,
    both_backwards,
    counted_costs,
    model_state_bytes,
)
from megatron_vshape.rehearsal.gpus import Gpu
from megatron_vshape.rehearsal.rank_report import FailedRank, RankReport
from megatron_vshape.rehearsal.ranks import DryRunConfig, rehearse_all
from megatron_vshape.rehearsal.step_time import (
    Rates,
    data_parallel_s,
    exposed_s,
    optimizer_s,
    rates_of,
)

Ranks = Sequence[RankReport]


PIPELINE = 4
"""Pipeline size in which a configuration is counted. In a shorter pipeline, the second rank would
have the turn of the V, and send activations to itself."""

_THIRD_DENSE = "([1,1,0]*2+[1,1])"
"""--moe-layer-freq with which both stages of the third rank have a dense layer."""


def reports_of_commands(
    config: DryRunConfig, commands: Iterable[Command], report: Callable[[int, int], None]
) -> list[Ranks | str]:
    """Run or read from the cache the counted ranks of each command; for `costs_of_counted_ranks`.

    The result of a command whose dry run fails is the error message. `report` is called with the
    numbers of finished and of all dry runs, unless all are cached.

    Raises:
        ScheduleError: Nothing can be estimated here.
    """
    stamp, keys = report_cache.hash_of_programs(config), []
    results: dict[str, Ranks | str] = {}
    uncached: dict[str, Command] = {}
    for command in commands:
        try:
            key = report_cache.key_of(*smallest_command(command), config, stamp)
        except ScheduleError as error:
            key = str(error)
            results[key] = key
        keys.append(key)
        cached = report_cache.read(key) if key not in results else None
        if cached is not None:
            results[key] = cached
        elif key not in results:
            uncached[key] = command
    if uncached:
        results |= _run_dry_runs(config, uncached, report)
    return [results[key] for key in keys]


def _run_dry_runs(
    config: DryRunConfig, commands: Mapping[str, Command], report: Callable[[int, int], None]
) -> dict[str, Ranks | str]:
    reduced = {key: smallest_command(command) for key, command in commands.items()}
    ranks: dict[str, list[RankReport]] = {key: [] for key in commands}
    results: dict[str, Ranks | str] = {}
    with counting_schedule(PIPELINE) as with_schedule:
        jobs = [
            config.job(with_schedule(few, sizes), sizes, stage, key)
            for key, (few, sizes) in reduced.items()
            for stage in counted_ranks(few)
        ]
        for num_finished, result in enumerate(rehearse_all(config.programs, jobs), start=1):
            report(num_finished, len(jobs))
            if isinstance(result, FailedRank):
                results.setdefault(result.name, result.error)
            else:
                ranks[result.name].append(result.without_timeline())
    for key in commands.keys() - results.keys():
        results[key] = reports = sorted(ranks[key], key=lambda report: report.stage)
        report_cache.write(key, reports)
    return results


def smallest_command(command: Command) -> tuple[Command, Sizes]:
    """Return the command with one layer per stage in the V placement, on the fewest GPUs.

    A stage of a hybrid model has `_counted_symbols`. State that replicas shard is sharded between
    at least two.

    Raises:
        ScheduleError: The sizes do not divide.
    """
    if command.pattern:
        stages = hybrid.BEGINS_STAGE.join([_counted_symbols(command)] * 2 * PIPELINE)
        multi_token_part = command.pattern.partition(hybrid.BEGINS_MTP)
        model: dict[str, Any] = {
            hybrid.OPTION: stages + "".join(multi_token_part[1:]),
            "num_layers": None,
        }
    else:
        layers = _layers_per_stage(command)
        model = {"num_layers": 2 * PIPELINE * layers}
        if command.has("--linear-attention-freq"):
            model["linear_attention_freq"] = layers if layers > 1 else f"[1]*{2 * PIPELINE}"
    few = (
        command.of_megatron()
        .without_chunks()
        .having(
            **model,
            hybrid_override_pattern=None,
            pipeline_model_parallel_size=PIPELINE,
            global_batch_size=None,
            rampup_batch_size=None,
            **dict.fromkeys(_SAMPLES),
            account_for_embedding_in_pipeline_split=None,
            account_for_loss_in_pipeline_split=None,
            decoder_first_pipeline_num_layers=None,
            decoder_last_pipeline_num_layers=None,
            moe_layer_freq=_THIRD_DENSE if layer_sizes.has_dense_layers(command.option) else None,
        )
    )
    return few, sizes_of(few, 2 * sizes_of(few, None).world)


_SAMPLES = ("train_samples", "lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")
"""Options in samples, of which Megatron accepts none in a run of iterations."""


def _layers_per_stage(command: Command) -> int:
    """Return the layers of a counted stage of a GPT: several if some have linear attention.

    Both kinds alternate in such a model, so that each layer counts as the mean of the stage.
    """
    linear = layer_sizes.layers_with_linear_attention(command.option)
    if not any(linear) or all(linear) or layer_sizes.has_dense_layers(command.option):
        return 1
    return max(2, min(_MAX_LAYERS_PER_SYMBOL, round(len(linear) / linear.count(False))))


def counted_ranks(command: Command) -> range:
    """Return the ranks that are counted, of a result of `smallest_command`."""
    return range(3 if command.value("--moe-layer-freq") == _THIRD_DENSE else 2)


_MAX_LAYERS_PER_SYMBOL = 4
"""Layers of one symbol in a counted stage."""


def _counted_symbols(command: Command) -> str:
    """Return the symbols of a counted stage: all that the pattern has, near their proportion.

    Their order is that of the pattern, on which the peak within a pass depends.
    """
    symbols = hybrid.without_stages((command.pattern or "").partition(hybrid.BEGINS_MTP)[0])
    min_count = min(map(symbols.count, symbols))
    remaining = {
        symbol: min(_MAX_LAYERS_PER_SYMBOL, round(symbols.count(symbol) / min_count))
        for symbol in symbols
    }
    selected = []
    for symbol in symbols:
        if remaining[symbol]:
            selected.append(symbol)
            remaining[symbol] -= 1
    return "".join(selected)


@contextmanager
def counting_schedule(num_devices: int) -> Iterator[Callable[[Command, Sizes], Command]]:
    """Create the schedule file for counting; yields a function that adds it to a command."""
    schedule = both_backwards(num_devices)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "counted.json")
        file.write_text(schedule.to_json())

        def with_schedule(command: Command, sizes: Sizes) -> Command:
            samples = command.number("--micro-batch-size", 1) * sizes.replicas
            batch = samples * schedule.num_microbatches
            return command.having(pipeline_schedule=file, global_batch_size=batch)

        yield with_schedule


class Parameters(NamedTuple):
    """Parameters of a layer on a rank, and of the embedding and the output layer."""

    layer: float = 0.0
    first: float = 0.0
    last: float = 0.0


@dataclass(frozen=True, slots=True)
class CountedCosts:
    """Costs of a configuration: one layer, embedding and output layer, and work once per step."""

    pieces: Pieces
    optimizer_s_per_byte: float  # per byte of a device's weights, gradients and optimizer
    data_s_per_byte: float  # data-parallel collectives without overlap
    rates: Rates
    layer_flops: float  # forward FLOPs of a microbatch per layer and rank
    ends_flops: float
    parameters: Parameters = Parameters()
    state_bytes_per_parameter: float = 18.0  # of weights, gradients and optimizer on a rank
    communicators: int = 0  # of a rank
    message_bytes: float = 0.0  # of P2P
    dense: StageCosts | None = None  # a dense layer of a model with experts
    update_share: float = 0.0  # memory of the optimizer's step relative to that of the state

    def after_us(self, costs: Costs, placement: Placement) -> float:
        """Estimate the time after the passes: gradient reduction, optimizer, parameter gathering.

        It is that of the device whose stages have most parameters. Collectives of one of its stages
        overlap with the passes of the others, as in `step_time`.
        """
        devices = max(placement) + 1
        fixed = costs.fixed_bytes(placement, devices)
        chunks = len(placement) // devices
        microbatch_us = costs.busy_us(placement, devices, 1)
        meanwhile_us = microbatch_us * (1 + devices * (chunks - 1) / chunks)
        state = max(fixed) - costs.device_bytes
        exposed = exposed_s(state * self.data_s_per_byte, 1e-6 * meanwhile_us, self.rates)
        return 1e6 * (state * self.optimizer_s_per_byte + exposed)


def costs_of_counted_ranks(
    reports: Ranks | str, command: Command, gpu: Gpu, world: int, pipeline: int
) -> CountedCosts:
    """Estimate the costs of a command for this pipeline and world size from its counted ranks.

    Raises:
        ScheduleError: the reports are an error message of `reports_of_commands`, or lack a pass, or
            --moe-layer-freq cannot be read.
    """
    if isinstance(reports, str):
        raise ScheduleError(f"cannot be rehearsed: {reports}")
    # Not `sizes_of`, whose pipeline is the command's.
    tensor, context = (
        command.number(f"--{name}-parallel-size", 1) for name in ("tensor-model", "context")
    )
    sizes = Sizes(world, tensor, context, pipeline, command.has(STAGE_BEFORE_DATA))
    layers = 1 if command.pattern else _layers_per_stage(command)
    costs = _with_equal_layers(reports, gpu, sizes, layers)
    return with_layer_kinds(costs, command, world)


def _with_equal_layers(reports: Ranks, gpu: Gpu, sizes: Sizes, layers: int) -> CountedCosts:
    """Convert the counted ranks to a layer, both ends and the work once per step, for these sizes.

    A counted stage has this number of layers.
    """
    rates = rates_of(gpu)
    ratio = sizes.world // sizes.pipeline * PIPELINE / reports[0].sizes.world
    first, second, *dense = (_with_replicas(report, ratio) for report in reports)
    costs = counted_costs((first, second), gpu, PIPELINE, sizes.stage_stride)
    step = second.step.work.spread(ratio, second.model.shards_optimizer)
    state = model_state_bytes(second)
    of_stage = _forward_flops(second, 0)
    ends = _forward_flops(first, 0) + _forward_flops(first, 1) - 2 * of_stage
    pieces = Pieces.of(replace(costs, layers=None), (layers,) * costs.num_stages)
    once = optimizer_s(step, gpu, rates) / state, data_parallel_s(step, gpu, rates) / state
    of_stages = second.model.chunk_parameters
    stage = sum(of_stages) / len(of_stages)
    ends_parameters = (count - stage for count in first.model.chunk_parameters)
    parameters = Parameters(stage / layers, *ends_parameters)
    return CountedCosts(
        pieces,
        *once,
        rates,
        of_stage / layers,
        ends,
        parameters,
        state / sum(of_stages),
        communicators=max(report.communicators for report in reports),
        message_bytes=float(second.model.message_bytes),
        dense=_dense_layer(first, dense[0], costs, gpu) if dense else None,
        update_share=second.memory.update_bytes / state,
    )


def _dense_layer(first: RankReport, rank: RankReport, costs: Costs, gpu: Gpu) -> StageCosts:
    """Return a layer of a rank with dense ones, in a run whose other layers have these costs."""
    dense_costs = counted_costs((first, replace(rank, stage=1)), gpu, PIPELINE, PIPELINE)
    layer = dense_costs.stages[1].as_part()
    # Dummy gradients and workspaces for the sizes of its weights, beyond those of other layers.
    extra_bytes = max(0.0, always_bytes(rank) - costs.device_bytes)
    return layer.changed({amount: layer[amount] + extra_bytes for amount in WORKSPACES})


def with_layer_kinds(costs: CountedCosts, command: Command, world: int) -> CountedCosts:
    """Estimate layers of other kinds: in hybrid models, and in MoE models with dense layers.

    In a hybrid model, their costs relative to each other follow from their GEMMs and sizes.

    Raises:
        ScheduleError: --moe-layer-freq cannot be read.
    """

    def option(name: str) -> Any:
        return world if name == "world_size" else command.option(name)

    if costs.dense is not None:
        return replace(costs, pieces=_with_dense(costs.pieces, costs.dense, option))
    if not command.pattern:
        return costs
    shares = layer_sizes.sizes_of(option, 0).shares
    symbols = hybrid.without_stages(command.pattern.partition(hybrid.BEGINS_MTP)[0])
    of_symbol = dict(zip(symbols, shares, strict=True))
    stage = Share.total([of_symbol[symbol] for symbol in _counted_symbols(command)])
    layer = costs.pieces.layer.scaled(stage.inverse())
    return replace(
        costs,
        pieces=replace(costs.pieces, layer=layer, shares=shares),
        layer_flops=costs.layer_flops / stage.time,
        parameters=costs.parameters._replace(layer=costs.parameters.layer / stage.state),
    )


def _with_dense(pieces: Pieces, dense: StageCosts, option: layer_sizes.Options) -> Pieces:
    """Set the shares of dense layers; the workspace of the leading ones is in the first stage."""
    memory, state = (dense[a] / pieces.layer[a] for a in (Kind.F.allocated, STATE_BYTES))
    share = Share(dense.total_us / pieces.layer.total_us, memory, state)
    layers = layer_sizes.layers_with_experts(option)
    first = pieces.first
    if not layers[0]:
        first = first.changed({a: max(first[a], dense[a]) for a in WORKSPACES})
    shares = tuple(Share(1.0, 1.0, 1.0) if has_experts else share for has_experts in layers)
    return replace(pieces, first=first, shares=shares)


def _with_replicas(rank: RankReport, ratio: float) -> RankReport:
    """Return a rank's report if `ratio` times the replicas shard the optimizer."""
    parts, update_bytes = dict(rank.memory.held_parts), rank.memory.update_bytes
    optimizer_bytes = parts["optimizer"]
    if rank.model.shards_optimizer:
        parts["optimizer"], update_bytes = optimizer_bytes / ratio, update_bytes / ratio
    held_bytes = rank.memory.held_bytes - optimizer_bytes + parts["optimizer"]
    memory = replace(
        rank.memory, held_parts=parts, held_bytes=held_bytes, update_bytes=update_bytes
    )
    return replace(rank, memory=memory)


def _forward_flops(rank: RankReport, chunk: int) -> float:
    forwards = (report for report in rank.step.kinds if report.kind == "F")
    (work,) = (report.work for report in forwards if report.chunk == chunk)
    products = sum(
        2.0 * rows * inner * columns * gemms * number
        for (_, rows, inner, columns, gemms), number in work.products.items()
    )
    return float(products + sum(work.attention_flops.values()))
