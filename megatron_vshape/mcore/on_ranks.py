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

from megatron_vshape.core.model.costs import Costs, Piece
from megatron_vshape.core.model.costs_file import ASSUMED, MEASURED
from megatron_vshape.core.model.kinds import COLLECTIVES, KINDS, PARTS, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.mcore import one_device, shared_ends
from megatron_vshape.mcore.one_device import Model
from megatron_vshape.mcore.setup.plans import one_microbatch
from megatron_vshape.runtime.copies import Copies, priced
from megatron_vshape.runtime.measure import PassTimer, measure_send_us
from megatron_vshape.runtime.p2p import Transport
from megatron_vshape.runtime.program_runner import run_program

EXCHANGES = ("forward_exchange_us", "backward_exchange_us", "whole_exchange_us")
ALL_REDUCES = 2
"""Of a layer with tensor parallelism, in F and again in B: after attention, and after the MLP."""

ALL_TO_ALLS = 2
"""Of a layer of experts, likewise: to the experts that tokens go to, and back."""


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

    def all_to_all_us(self, num_bytes: float, ranks: int) -> float:
        """Return the time in which every rank sends so much, in equal parts, one to itself."""
        return self.message_us((ranks - 1) / ranks * num_bytes) if ranks > 1 else 0.0

    def __str__(self) -> str:
        return f"{self.gb_per_s:g} GB/s, {self.latency_us:g} us"


def num_ranks() -> int:
    """Return how many processes a launcher such as torchrun has started for this measurement."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_ranks(model: Model) -> None:
    """Raise ScheduleError unless the ranks there are make whole stages."""
    of_stage = model.ranks
    for name, share in (("tensor", model.tensor_parallel), ("expert", model.expert_parallel)):
        if of_stage % share:
            raise ScheduleError(
                f"--{name}-parallel {share} does not divide the {of_stage} ranks of a stage"
            )
    if num_ranks() > 1 and num_ranks() % of_stage:
        raise ScheduleError(
            f"a stage has {of_stage} ranks, which does not divide the {num_ranks()} that were "
            f"started: start {of_stage} to measure collectives, or {2 * of_stage} to measure P2P "
            "messages too"
        )
    if num_ranks() == 1 and model.sequence_parallel:
        raise ScheduleError(
            "--sequence-parallel is measured on the ranks of a stage: start this with torchrun "
            f"--nproc-per-node {of_stage}"
        )


def measure(
    model: Model, layers: Sequence[int], repeats: int, tell: Callable[[str, Piece], None]
) -> Costs:
    """Return what these ranks measure together, the same on every one; rank 0 tells of it.

    An exchange takes what a pass takes longer on a rank of its stage than with the same share of
    the model alone. So the passes' times stay those that were measured with the exchanges.
    """
    torch.manual_seed(1)  # ranks that share a layer have the same tokens, others have others
    one_device.form_groups()
    alone = one_device.profile_stages(model.alone(), layers, repeats)
    one_device.form_groups(model.tensor_parallel, model.expert_parallel)
    torch.manual_seed(1 + dist.get_rank() // model.tensor_parallel)
    together = one_device.profile_stages(model, layers, repeats)
    found: dict[str, Piece] = {}
    for name, piece in together.items():
        own = with_exchanges(alone[name], piece) if model.ranks > 1 else piece
        found[name] = Piece.middle(of_all(own))
        if dist.get_rank() == 0:
            tell(name, found[name])
    host_us = median(of_all(host_us_of(model, repeats)))
    send_us, between = _send_us(model)
    stages = [found[name] for name in one_device.names_of(layers)]
    where = f"on {dist.get_world_size()} ranks, {_shared(model)}"
    costs = Costs.of(stages, send_us, layers, host_us)
    costs = costs.with_source(f"{MEASURED} between {between}", "send_us")
    if model.ranks > 1:
        nothing = (0.0,) * len(layers)
        costs = costs.having(**{name: costs.lists().get(name, nothing) for name in EXCHANGES})
    return costs.with_source(f"{MEASURED} {where}")


def _shared(model: Model) -> str:
    """Return by how many ranks a layer is shared, in words."""
    told = f"tensor-parallel {model.tensor_parallel}"
    told += " with sequence parallelism" * model.sequence_parallel
    return told + f", expert-parallel {model.expert_parallel}" * (model.expert_parallel > 1)


def assumed(costs: Costs, model: Model, within: Link) -> Costs:
    """Return costs of one device with the exchanges of a stage's ranks as they are assumed.

    In F and B every layer sums twice over the tensor-parallel ranks, the embedding's F and the
    head's B once. A layer of experts sums once, and for a shared expert twice; its tokens, as often
    as they go to an expert, go to the expert-parallel ranks and back. In a whole backward all of it
    runs beside the weight gradients, as long as these last.
    """
    if model.ranks == 1 or costs.layers is None:
        return costs
    experts, ranks = model.experts, (model.tensor_parallel, model.expert_parallel)
    sum_us = within.all_reduce_us(model.message_bytes, ranks[0])
    layer_us, told = ALL_REDUCES * sum_us, [f"all-reduces over {ranks[0]} ranks"] * (ranks[0] > 1)
    mlp_us = sum_us
    if experts is not None:
        # Tensor-parallel ranks have the same tokens, and send their share of them.
        sent = experts.per_token * model.message_bytes / ranks[0]
        mlp_us = ALL_TO_ALLS * within.all_to_all_us(sent, ranks[1])
        mlp_us += sum_us if experts.shared_ffn_hidden_size else 0.0
        layer_us = (ALL_REDUCES - 1) * sum_us + mlp_us
        told += [f"all-to-alls over {ranks[1]} ranks"] * (ranks[1] > 1)
    layers = [count * layer_us for count in costs.layers]
    forward = [layers[0] + sum_us, *layers[1:]]
    backward = [*layers[:-1], layers[-1] + sum_us]
    left = [max(0.0, b - w) for b, w in zip(backward, costs.weight_us, strict=True)]
    found = dict(zip(EXCHANGES, map(tuple, (forward, backward, left)), strict=True))
    text = f"{ASSUMED}: {' and '.join(told)} at {within}"
    return costs.having(**found).with_source(text, *EXCHANGES)


def with_shared_ends(costs: Costs, model: Model, devices: int, heads: int, repeats: int) -> Costs:
    """Return the costs with what is measured here of a vocabulary that so many devices share.

    A sum lasts as long as on the rank that waits longest.
    """
    everyones = of_all(shared_ends.measure(model, devices, heads, repeats))
    found = {name: median(each[name] for each in everyones) for name in everyones[0]}
    for name in {kind.time for kind in KINDS if kind.resource == COLLECTIVES} & found.keys():
        found[name] = max(each[name] for each in everyones)
    others = {name: (us,) * costs.num_stages for name, us in found.items()}
    where = "one device" if num_ranks() == 1 else f"{dist.get_world_size()} ranks at once"
    told = f"{MEASURED} on {where}, with 1/{devices} of the vocabulary each"
    return costs.having(**others).with_source(told, *found)


def with_copies(costs: Costs, model: Model, layers: Sequence[int], repeats: int) -> Costs:
    """Return the costs with those of copies to the host and back, all ranks copying at once."""
    alone = num_ranks() == 1
    own = model.alone() if alone else model
    found = {
        name: Copies(*map(median, zip(*of_all(tuple(each)), strict=True)))
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


def _send_us(model: Model) -> tuple[float, str]:
    """Return the mean time of a message between neighbours, all pipelines at once, and of whom."""
    world, of_stage = dist.get_world_size(), model.ranks
    if world > of_stage:
        pipelines = [tuple(range(at, world, of_stage)) for at in range(of_stage)]
        between = "pipeline neighbours"
    else:
        pipelines, between = [tuple(range(world))], "ranks of one stage, which are all there are"
    devices = len(pipelines[0])
    program = lower(one_microbatch(tuple(range(devices)), devices))
    transport = Transport(pipelines, model.shape, model.torch_dtype, model.device)
    transport.prepare(program)
    own = measure_send_us(program, transport.device, transport, transport.blank())
    transport.close()
    return fmean(each for each in of_all(own) if each is not None), between


def of_all(own: Any) -> list[Any]:
    """Return what every rank has."""
    found = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found
