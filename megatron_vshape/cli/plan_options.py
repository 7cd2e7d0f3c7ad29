"""Conversion of the options of `plan` to a plan request: costs, layers and memory limits."""

import argparse
import math
from dataclasses import replace
from pathlib import Path

from megatron_vshape.cli.options import (
    UNIT_COST,
    UNITS,
    decimal_unit_hint,
    ends_of,
    float_or_nan,
    headroom_of,
    stage_cost_function,
)
from megatron_vshape.core.check.simulate import usable_host_bytes
from megatron_vshape.core.evaluation import limits_of
from megatron_vshape.core.model.amounts import SAVED_US
from megatron_vshape.core.model.costs import Costs, chunk_of, with_copies
from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.layers import AUTO_SPLIT, even_layers
from megatron_vshape.core.model.pieces import Pieces
from megatron_vshape.core.model.placement import looping
from megatron_vshape.core.model.schedule import check_size
from megatron_vshape.core.paper.catalogue import EVERY_NAME
from megatron_vshape.core.planner.vocabulary import (
    ALL_REDUCE_TIME,
    estimate_logits_bytes,
    shared_pieces,
)
from megatron_vshape.core.program.torch_file import find_torch_name
from megatron_vshape.core.request import PlanRequest, StageCostFunction
from megatron_vshape.core.schedule_names import AUTO, SUFFIXES
from megatron_vshape.view.names import plain
from megatron_vshape.view.numbers import GIB

MOST_CHUNKS = 12
"""Default maximum of chunks per rank."""

_BASE_CHUNKS = 4
"""Chunks per rank of the costs from which the search starts, if the layers allow.

The plan may have another number."""

_FIRST_SHARE = 0.5
"""Share of --seconds for the search; the comparison needs the rest."""


def load_costs(file: str, layers: int | None) -> Costs:
    """Load a costs file.

    Raises:
        ScheduleError: --layers contradicts the file.
    """
    costs = Costs.load(file)
    of_file = sum(costs.layers or ()) or layers
    if layers is not None and layers != of_file:
        raise ScheduleError(
            f"--layers {layers} contradicts --costs {file}, which is for {of_file} layers: remove "
            "--layers"
        )
    return costs


def request_of(options: argparse.Namespace, costs: Costs, measured: Costs | None) -> PlanRequest:
    """Return the plan request of the options, without its memory limit.

    Args:
        options: the options of `plan`.
        costs: the result of `costs_of`.
        measured: the costs file of --costs.

    Raises:
        ScheduleError: the options contradict each other.
    """
    request = PlanRequest(
        AUTO,
        options.devices,
        options.microbatches,
        costs,
        _cost_function(options, measured),
        chunks=tuple(range(1, (options.chunks or MOST_CHUNKS) + 1)),
        objective=options.objective,
        slices=options.slices or 1,
        seconds=None if options.seconds is None else options.seconds * _FIRST_SHARE,
        layers=_layers_to_split(options, measured),
    )
    if options.format:
        # torchtitan and NeMo Automodel derive the stages of a rank from a schedule name.
        placements = request.searched_placements()
        torch_placements = tuple(
            shape for shape in placements if find_torch_name(shape, options.devices)
        )
        request = replace(request, placements=torch_placements)
    return replace(request, moved_limit=_in_host(options, request))


def _cost_function(options: argparse.Namespace, measured: Costs | None) -> StageCostFunction:
    if options.vocab_parallel is not None:
        return _layer_cost_function(options, measured)
    ends = ends_of(options, options.layers)
    base = stage_cost_function(options.devices, options.cost, measured, options.layers, ends)

    def costs_of_stages(num_stages: int, name: str) -> Costs:
        costs = base(num_stages, name)
        if options.offload is not None:
            costs = with_copies(costs, options.offload)
        return costs if options.host is None else replace(costs, host_us=options.host)

    return costs_of_stages


def _layers_to_split(
    options: argparse.Namespace, measured: Costs | None
) -> tuple[Pieces, int] | None:
    """Return the costs of a layer, the embedding and the output layer, and the number of layers.

    None without --layer-split.
    """
    if options.layer_split is None:
        return None
    if measured is None and options.layers is None:
        raise ScheduleError("--layer-split auto needs --layers N or --costs FILE")
    pieces, layers = _layer_costs(options, measured, "--layer-split auto")
    if options.offload is not None:
        pieces = pieces.with_copies(options.offload)
    return pieces, round(layers)


def costs_of(options: argparse.Namespace, measured: Costs | None) -> Costs:
    """Return costs for `_BASE_CHUNKS` chunks per rank if the layers allow, or those of --costs.

    For other numbers of chunks, the search calls the request's `stage_cost_function`.
    """
    devices, max_chunks = options.devices, options.chunks
    split = _layers_to_split(options, measured)
    if split is not None:
        pieces, num_layers = split
        counts = (
            num_chunks
            for num_chunks in (_BASE_CHUNKS, 2)
            if num_chunks <= (max_chunks or _BASE_CHUNKS)
        )
        chunks = next(
            (num_chunks for num_chunks in counts if num_chunks * devices <= num_layers + 2), 1
        )
        return pieces.costs(pieces.balanced(num_layers, looping(devices, chunks)))
    costs_of_stages = _cost_function(options, measured)
    if measured is not None:
        if max_chunks is None or measured.num_stages <= max_chunks * devices:
            shares = options.vocab_parallel is not None
            return costs_of_stages(measured.num_stages, "a plan") if shares else measured
    total = options.layers if measured is None else measured.num_stages
    # even numbers first: the V placement needs one
    for chunks in (_BASE_CHUNKS, 2, *range(6, MOST_CHUNKS + 1, 2), 3, 1):
        if chunks <= (max_chunks or MOST_CHUNKS) and (total or 0) % (chunks * devices) == 0:
            check_size(chunks * devices, options.microbatches)
            return costs_of_stages(chunks * devices, "a plan")
    raise ScheduleError(
        f"--layers {options.layers} is not a multiple of {devices} ranks: change --layers, or add "
        f"--layer-split {AUTO_SPLIT}"
    )


def memory_limit_of(options: argparse.Namespace, request: PlanRequest, in_bytes: bool) -> float:
    """Return the memory limit without the headroom, in the unit of the costs' memory.

    Raises:
        ScheduleError: not a limit, GiB without a costs file, or nothing is left.
    """
    text: str | None = options.memory_limit
    name = (text or "1f1b").partition(":")[0]
    if text is None or name in EVERY_NAME or Path(name).suffix in SUFFIXES:
        limit = max(limits_of(replace(request, limit=text)))
    else:
        alternative = ", nor a schedule such as interleaved-1f1b:4"
        limit = _memory("--memory-limit", text, request, in_bytes, alternative)
    return limit - headroom_of(options.headroom, limit, in_bytes)


def _memory(
    option: str, text: str, request: PlanRequest, in_bytes: bool, alternative: str = ""
) -> float:
    """Parse chunks or GiB of an option, to the unit of the costs' memory."""
    lowered = text.lower().strip()
    unit = next((name for name in (*UNITS, CHUNKS) if lowered.endswith(name)), "")
    value = float_or_nan(lowered.removesuffix(unit))
    chunk = chunk_of(request.full_costs(), request.num_devices)
    if not 0 < value < math.inf:
        raise ScheduleError(
            f"{option} {text!r:.40} is neither chunks above 0, such as {request.num_devices + 2}, "
            f"nor GiB such as 12.5GiB{alternative}{decimal_unit_hint(text)}"
        )
    if in_bytes and not unit:
        raise ScheduleError(
            f"{option} {text} has no unit: use {text}GiB, or {text}{CHUNKS} of activations, which "
            f"are {value * chunk / GIB:.1f} GiB with these costs"
        )
    if unit in UNITS and not in_bytes:
        raise ScheduleError(f"{option} {text} needs --costs FILE; without it, use chunks")
    return value * UNITS.get(unit, chunk)


CHUNKS = "chunks"
"""Unit of a limit: a chunk is the activations of 1 / (2 x ranks) of the model."""


def _in_host(options: argparse.Namespace, request: PlanRequest) -> float:
    """Return the host memory limit per rank, in the unit of the costs' memory.

    Raises:
        ScheduleError: not a limit, or offloading is not enabled.
    """
    text = options.host_memory_limit
    if text is None:
        return math.inf
    if not request.full_costs().copies:
        raise ScheduleError(
            f"--host-memory-limit {text:.40} needs --offload T, or --costs FILE with copy times"
        )
    in_bytes = options.costs is not None
    limit = _memory("--host-memory-limit", text, request, in_bytes)
    return usable_host_bytes(limit) if in_bytes else limit


def _layer_cost_function(options: argparse.Namespace, measured: Costs | None) -> StageCostFunction:
    """Return a function that gives the costs of any number of stages with these options.

    All stages have equal numbers of layers, unless the layers in the costs file differ.
    """
    pieces, layers = _layer_costs(options, measured, "--vocab-parallel")
    even = measured is None or len(set(measured.layers or ())) < 2

    def costs_of_stages(num_stages: int, name: str) -> Costs:
        if measured is None and options.layers is None:
            stage = pieces.layer.times(layers / num_stages)
            return replace(replace(pieces, layer=stage).costs((1,) * num_stages), layers=None)
        placement = looping(options.devices, num_stages // options.devices)
        try:
            distribute = even_layers if even else pieces.balanced
            return pieces.costs(distribute(round(layers), placement))
        except ScheduleError as error:
            raise ScheduleError(f"{plain(name)}: {error}") from None

    return costs_of_stages


def _layer_costs(
    options: argparse.Namespace, measured: Costs | None, option_name: str
) -> tuple[Pieces, float]:
    """Return the costs of a layer, the embedding and the output layer, and the number of layers.

    Without a number of layers, chunks of 1 / (2 D) of the model count as layers. Error messages
    name the option that requires the costs.

    Raises:
        ScheduleError: the number of layers is required but unknown, or the costs cannot be split
            into layers.
    """
    chunks = 2 * options.devices
    if measured is None:
        layers = float(options.layers or chunks)
        if options.vocab_parallel is not None and options.head is None:
            raise ScheduleError(
                "--vocab-parallel needs --head (time of the output layer) or --costs"
            )
        first, last = ends_of(options, options.layers)
        times = options.cost or UNIT_COST
        pieces = Pieces.estimated(0.0, layers / chunks, times.split)
        layer = pieces.layer.changed({SAVED_US: times.saved * chunks / layers})
        pieces = replace(pieces, layer=layer, first=first, last=last, host_us=options.host or 0.0)
    else:
        layers = float(options.layers or sum(measured.layers or ()))
        _check_measured(options, measured, layers, option_name)
        even = (layers / measured.num_stages,) * measured.num_stages
        pieces = Pieces.of(measured, measured.layers or even)
    is_sharded = measured is not None and measured.shards_output_layer
    if options.vocab_parallel is not None and not is_sharded:
        sum_us = options.vocab_parallel
        if math.isnan(sum_us):
            sum_us = ALL_REDUCE_TIME * pieces.layer[Kind.F.time] * layers / chunks
        logits_bytes = 0.0 if measured is None else estimate_logits_bytes(pieces, options.devices)
        pieces = shared_pieces(pieces, options.devices, sum_us, logits_bytes)
    return pieces, layers


def _check_measured(
    options: argparse.Namespace, measured: Costs, layers: float, option_name: str
) -> None:
    if not layers:
        raise ScheduleError(f"{options.costs} does not contain the number of layers: add --layers")
    if measured.copies and options.vocab_parallel is not None:
        raise ScheduleError(
            f"{option_name}: {options.costs} has copy times of the measured stages, not of single "
            f"layers; leave one of the two out"
        )
    if not measured.shards_output_layer:
        return
    all_reduce_time = options.vocab_parallel
    if all_reduce_time is not None and not math.isnan(all_reduce_time):
        raise ScheduleError(
            f"--vocab-parallel {all_reduce_time:g}: {options.costs} contains the all-reduce time: "
            "remove the value"
        )
