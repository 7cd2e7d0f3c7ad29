"""Costs of single layers for --vocab-parallel and --layer-split of `plan`."""

import argparse
import math
from dataclasses import replace

from megatron_vshape.cli.options import UNIT_COST, ends_of
from megatron_vshape.core.model.amounts import SAVED_US
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.layers import even_layers
from megatron_vshape.core.model.pieces import Pieces
from megatron_vshape.core.model.placement import looping
from megatron_vshape.core.planner.vocabulary import (
    ALL_REDUCE_TIME,
    estimate_logits_bytes,
    shared_pieces,
)
from megatron_vshape.core.request import StageCostFunction
from megatron_vshape.view.names import plain


def shares(options: argparse.Namespace, measured: Costs | None) -> bool:
    """Return whether the options, not the costs file, enable vocabulary parallelism."""
    is_sharded = measured is not None and measured.shards_output_layer
    return options.vocab_parallel is not None and not is_sharded


def stage_cost_function(options: argparse.Namespace, measured: Costs | None) -> StageCostFunction:
    """Return a function that gives the costs of any number of stages with these options.

    All stages have equal numbers of layers, unless the layers in the costs file differ.
    """
    pieces, layers = pieces_of(options, measured, "--vocab-parallel")
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


def pieces_of(
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
    if shares(options, measured):
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
