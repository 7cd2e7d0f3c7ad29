"""Relaxed costs for lower bounds and for the start of a search.

A schedule that is feasible at the given costs is feasible at the relaxed costs, no slower and with
no more memory. The exception is `never_split`, which is for searches.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_vshape.core.model.costs import LEAST, Costs
from megatron_vshape.core.model.kinds import EXCHANGES, PARTS, Kind


def of_shortest(costs: Costs) -> Costs:
    """Scale every microbatch to the shortest of each pass, and at most to the given cost."""
    return _with_shares(costs, lambda shares: min(1.0, *shares))


def of_largest(costs: Costs) -> Costs:
    """Scale every microbatch to the longest of each pass, which must fit alone."""
    return _with_shares(costs, max)


def _with_shares(costs: Costs, of_all: Callable[[Sequence[float]], float]) -> Costs:
    amounts = {
        name: tuple(of_all(shares) * each for each in costs.lists()[name])
        for name, shares in costs.by_microbatch
    }
    return replace(costs, by_microbatch=()).having(**amounts) if amounts else costs


def in_passes(costs: Costs) -> Costs:
    """Move collectives and host time into the times of the passes."""
    if not costs.host_us and all(getattr(costs, name) is None for name in EXCHANGES):
        return costs
    stages = range(costs.num_stages)
    times = {kind.time: tuple(costs.time_us(kind, stage) for stage in stages) for kind in PARTS}
    bare = replace(costs, host_us=0.0)
    return bare.having(**times, whole_backward_us=costs.whole_us, **dict.fromkeys(EXCHANGES))


def split_no_slower(costs: Costs) -> Costs:
    """Relax the costs so that full backwards are no faster than separate passes.

    A schedule at the given costs then runs with each BW as B and W, no slower and with no more
    memory. So bounds for the relaxed costs apply.
    """
    priced = in_passes(of_shortest(costs))
    # BW retains F's activations until it ends, even if B would retain more for its W.
    held = map(min, costs.held_after_forward_bytes, costs.held_after_backward_bytes)
    priced = priced.having(held_after_backward_bytes=tuple(held))
    if priced.whole_backward_us is None:
        return priced
    backward, weight = [], []
    for b, w, whole in zip(
        priced.backward_us, priced.weight_us, priced.whole_backward_us, strict=True
    ):
        weight.append(min(w, max(whole - b, whole / 1000)))  # positive, as times must be
        backward.append(min(b, whole - weight[-1]))
    return priced.having(
        backward_us=tuple(backward), weight_us=tuple(weight), whole_backward_us=None
    )


def never_split(costs: Costs) -> Costs:
    """Return costs for schedules without split backwards: B is the full backward, W negligible."""
    whole = [costs.time_us(Kind.BW, stage) for stage in range(costs.num_stages)]
    rest = 1e-6  # share of W; times must be positive
    return in_passes(costs).having(
        backward_us=tuple(each * (1 - rest) for each in whole),
        weight_us=tuple(max(each * rest, LEAST) for each in whole),
        whole_backward_us=None,
        held_after_backward_bytes=(0.0,) * costs.num_stages,
    )
