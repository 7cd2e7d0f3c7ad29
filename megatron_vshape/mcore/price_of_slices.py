"""What a pass of a slice takes beside its share of a whole one, measured on one device.

A slice launches as many kernels as a whole microbatch, its products have fewer rows and its queries
look at keys that are not its own. So K slices take longer than the microbatch that they are of:
K - 1 times what is measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import torch

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.costs_file import MEASURED
from megatron_vshape.core.model.kinds import PARTS, Kind
from megatron_vshape.mcore import on_ranks, one_device
from megatron_vshape.mcore.one_device import WARM_UP, Model
from megatron_vshape.runtime.measure import PassTimer

LEAST_SHARE = 0.1
"""Minimum share of a pass that is work, whatever the measured fixed overhead."""


def with_price(
    costs: Costs,
    model: Model,
    layers: Sequence[int],
    counts: Sequence[int],
    repeats: int,
    tell: Callable[[str], None],
) -> Costs:
    """Return the costs with the fixed price of a pass as slices tell it, of the largest stage.

    Of several numbers of slices the dearest counts; `tell` hears of each. What a whole pass takes
    stays what was measured.
    """
    prices = []
    for slices in counts:
        times = median(on_ranks.of_all(_price_us(model.alone(), max(layers), slices, repeats)))
        prices.append(max(times, 0.0))
        tokens = model.sequence_length // slices
        tell(f"{slices} slices of {tokens} tokens: {prices[-1]:.1f} us of overhead per pass")
    price = max(prices)
    whole_us = costs.whole_backward_us
    own: dict[str, Any] = {
        kind.time: tuple(max(us - price, LEAST_SHARE * us) for us in costs.lists()[kind.time])
        for kind in PARTS
    }
    if whole_us is not None:
        own[Kind.BW.time] = tuple(max(us - price, LEAST_SHARE * us) for us in whole_us)
    made = replace(costs.having(**own), host_us=costs.host_us + price)
    told = f"{MEASURED} of {', '.join(map(str, counts))} slices"
    return made.with_source(told, "host_us")


def _price_us(model: Model, num_layers: int, slices: int, repeats: int) -> float:
    """Return how much longer the passes of all slices take than those of the whole, by pass."""
    from megatron_vshape.mcore.split import sliced_attention
    from megatron_vshape.mcore.step.slices import Slices

    state = one_device.split_state()
    chunk = one_device.build(model, state, num_layers, is_first=False, is_last=False)
    sliced_attention.install(state, [chunk])
    one_device.zero_gradients([chunk])
    total = WARM_UP + repeats
    whole = one_device.alone(model, state, chunk, total)
    cut = one_device.alone(model, state, chunk, total)
    cut.step.slices = slices
    cut.step.parts.append(Slices(slices, model.sequence_length))
    part = replace(model, sequence_length=model.sequence_length // slices)
    times: dict[tuple[int, Kind], list[float]] = {}
    for count, stage, one in ((1, whole, model), (slices, cut, part)):
        timer = PassTimer(torch.device(model.device))
        for microbatch in range(total):
            _run(one, stage, microbatch, count, timer)
        for work, start, end in timer.slots():
            if work.microbatch >= count * WARM_UP:
                times.setdefault((count, work.kind), []).append(end - start)
    more = (slices * fmean(times[slices, kind]) - fmean(times[1, kind]) for kind in PARTS)
    return fmean(more) / (slices - 1)


def _run(model: Model, stage: Any, microbatch: int, slices: int, timer: PassTimer) -> None:
    """Run the passes of one microbatch: F of its slices one after the other, B and W in reverse."""
    numbers = range(microbatch * slices, (microbatch + 1) * slices)
    for number in numbers:
        handed = [one_device.made_up(model)]
        with one_device.observed(timer, Kind.F, number):
            stage.forward(number, handed.pop())
    for number in reversed(numbers):
        handed = [one_device.made_up(model)]
        with one_device.observed(timer, Kind.B, number):
            stage.backward_inputs(number, handed.pop())
        with one_device.observed(timer, Kind.W, number):
            stage.backward_weights(number)
