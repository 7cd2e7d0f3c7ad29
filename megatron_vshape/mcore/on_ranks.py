"""What a profile measures of several ranks: exchanges within a stage, messages, the host's time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from megatron_vshape.core.model.costs import ASSUMED, MEASURED, Costs, Piece
from megatron_vshape.core.model.kinds import PARTS, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.mcore import one_device
from megatron_vshape.mcore.one_device import Model
from megatron_vshape.mcore.setup.plans import one_microbatch
from megatron_vshape.runtime.copies import Copies, priced
from megatron_vshape.runtime.measure import PassTimer, measure_send_us
from megatron_vshape.runtime.p2p import Transport
from megatron_vshape.runtime.program_runner import run_program

EXCHANGES = ("forward_exchange_us", "backward_exchange_us", "whole_exchange_us")
ALL_REDUCES = 2
"""Of a layer with tensor parallelism, in F and again in B: after attention, and after the MLP."""


@dataclass(frozen=True, slots=True)
class Link:
    """What is assumed where nothing can be measured: GB/s (10^9) each way, and us to begin."""

    gb_per_s: float
    latency_us: float

    def message_us(self, num_bytes: float) -> float:
        """Return the time of a message."""
        return self.latency_us + num_bytes / self.gb_per_s / 1e3

    def all_reduce_us(self, num_bytes: float, ranks: int) -> float:
        """Return the time of a sum over ranks, which each sends twice but for its own part."""
        return self.message_us(2 * (ranks - 1) / ranks * num_bytes) if ranks > 1 else 0.0

    def __str__(self) -> str:
        return f"{self.gb_per_s:g} GB/s, {self.latency_us:g} us"


def num_ranks() -> int:
    """Return how many processes a launcher such as torchrun has started for this measurement."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_ranks(tensor_parallel: int) -> None:
    """Raise ScheduleError unless the ranks there are make whole stages."""
    if num_ranks() > 1 and num_ranks() % tensor_parallel:
        raise ScheduleError(
            f"--tensor-parallel {tensor_parallel} does not divide the {num_ranks()} ranks that "
            f"were started: start {tensor_parallel} for the exchanges, or twice as many for "
            "messages between stages too"
        )


def measure(
    model: Model,
    layers: Sequence[int],
    tensor_parallel: int,
    repeats: int,
    tell: Callable[[str, Piece], None],
) -> Costs:
    """Return what these ranks measure together, the same on every one; rank 0 tells of it.

    An exchange takes what a pass takes longer on a rank of its stage than with the same share of
    the model alone. So the passes' times stay those that were measured with the exchanges.
    """
    torch.manual_seed(1)  # ranks of a stage have the same tokens
    one_device.form_groups(1)
    alone = one_device.profile_stages(model.shard(tensor_parallel), layers, repeats)
    one_device.form_groups(tensor_parallel)
    together = one_device.profile_stages(
        replace(model, tensor_parallel=tensor_parallel), layers, repeats
    )
    found: dict[str, Piece] = {}
    for name, piece in together.items():
        own = with_exchanges(alone[name], piece) if tensor_parallel > 1 else piece
        found[name] = Piece.middle(_of_all(own))
        if dist.get_rank() == 0:
            tell(name, found[name])
    host_us = median(_of_all(host_us_of(replace(model, tensor_parallel=tensor_parallel), repeats)))
    send_us, between = _send_us(model, tensor_parallel)
    stages = [found[name] for name in one_device.names_of(layers)]
    where = f"on {dist.get_world_size()} ranks, tensor-parallel {tensor_parallel}"
    costs = Costs.of(stages, send_us, layers, host_us)
    costs = costs.with_source(f"{MEASURED} between {between}", "send_us")
    if tensor_parallel > 1:
        nothing = (0.0,) * len(layers)
        measured: dict[str, Any] = {name: getattr(costs, name) or nothing for name in EXCHANGES}
        costs = replace(costs, **measured)
    return costs.with_source(f"{MEASURED} {where}")


def assumed(costs: Costs, model: Model, tensor_parallel: int, within: Link) -> Costs:
    """Return costs of one device with the exchanges of a stage's ranks as they are assumed.

    In F and B every layer sums twice over the ranks, the embedding's F and the head's B once. In a
    whole backward they run beside the weight gradients, as long as these last.
    """
    if tensor_parallel == 1 or costs.layers is None:
        return costs
    each_us = within.all_reduce_us(model.message_bytes, tensor_parallel)
    sums = [ALL_REDUCES * count for count in costs.layers]
    forward = [(count + (at == 0)) * each_us for at, count in enumerate(sums)]
    last = len(sums) - 1
    again = sum(AGAIN.get(module, 0) for module in model.recompute.split(","))
    backward = [
        (count + (at == last) + again * layers) * each_us
        for at, (count, layers) in enumerate(zip(sums, costs.layers, strict=True))
    ]
    left = [max(0.0, b - w) for b, w in zip(backward, costs.weight_us, strict=True)]
    found: dict[str, Any] = dict(zip(EXCHANGES, map(tuple, (forward, backward, left)), strict=True))
    text = f"{ASSUMED}: all-reduces over {tensor_parallel} ranks at {within}"
    return replace(costs, **found).with_source(text, *EXCHANGES)


AGAIN = {"full": ALL_REDUCES, "mlp": 1, "moe": 1}
"""By module, how many of a layer's sums in F are made again where a backward computes it again."""


def with_copies(
    costs: Costs, model: Model, layers: Sequence[int], tensor_parallel: int, repeats: int
) -> Costs:
    """Return the costs with those of copies to the host and back, all ranks copying at once."""
    alone = num_ranks() == 1
    own = model.shard(tensor_parallel) if alone else replace(model, tensor_parallel=tensor_parallel)
    found = {
        name: Copies(*map(median, zip(*_of_all(tuple(each)), strict=True)))
        for name, each in one_device.profile_copies(own, layers, repeats).items()
    }
    stages = [found[name] for name in one_device.names_of(layers)]
    where = "one device" if alone else f"{dist.get_world_size()} ranks at once"
    return priced(costs, stages, f"{MEASURED} on {where}")


def with_exchanges(alone: Piece, together: Piece) -> Piece:
    """Return what was measured together, with what is more than alone called exchange."""
    forward = max(0.0, together.forward_us - alone.forward_us)
    backward = max(0.0, together.backward_us - alone.backward_us)
    whole_us = together.backward_us + together.weight_us - together.saved_us
    whole_alone_us = alone.backward_us + alone.weight_us - alone.saved_us
    # No whole backward computes for less than the longer of its halves.
    most = whole_us - max(together.backward_us - backward, together.weight_us)
    shown = max(0.0, min(whole_us - whole_alone_us, backward, most))
    return replace(
        together,
        forward_us=together.forward_us - forward,
        backward_us=together.backward_us - backward,
        saved_us=max(0.0, together.saved_us - (backward - shown)),
        forward_exchange_us=forward,
        backward_exchange_us=backward,
        hidden_exchange_us=min(backward - shown, together.saved_us),
    )


def host_us_of(model: Model, repeats: int) -> float:
    """Return what lies between two passes of the program runner that wait for nothing.

    It is what the device sees: on a GPU the time for which it has nothing to do, as the launch of
    the next pass has not come yet.
    """
    state = one_device.split_state()
    chunk = one_device.build(model, state, 1, is_first=True, is_last=True)
    one_device.zero_gradients([chunk])
    count = one_device.WARM_UP + repeats
    row = tuple(Pass(kind, 0, at) for at in range(count) for kind in PARTS)
    program = lower(Schedule("alone", 1, count, (0,), (row,)))
    ranks = [[rank] for rank in range(dist.get_world_size())]
    transport = Transport(ranks, model.shape, model.torch_dtype, model.device)
    transport.prepare(program)
    stage = one_device.alone(model, state, chunk, count)
    timer = PassTimer(torch.device(model.device))
    run_program(program, 0, {0: stage}, transport, timer)
    transport.close()
    slots = timer.slots()[len(PARTS) * one_device.WARM_UP :]
    return median(max(0.0, after.start - before.end) for before, after in pairwise(slots))


def _send_us(model: Model, tensor_parallel: int) -> tuple[float, str]:
    """Return the mean time of a message between neighbours, all pipelines at once, and of whom."""
    world = dist.get_world_size()
    if world > tensor_parallel:
        pipelines = [tuple(range(at, world, tensor_parallel)) for at in range(tensor_parallel)]
        between = "pipeline neighbours"
    else:
        pipelines, between = [tuple(range(world))], "ranks of one stage, which are all there are"
    devices = len(pipelines[0])
    program = lower(one_microbatch(tuple(range(devices)), devices))
    transport = Transport(pipelines, model.shape, model.torch_dtype, model.device)
    transport.prepare(program)
    own = measure_send_us(program, transport.device, transport, transport.blank())
    transport.close()
    return fmean(each for each in _of_all(own) if each is not None), between


def _of_all(own: Any) -> list[Any]:
    """Return what every rank has."""
    found = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found
