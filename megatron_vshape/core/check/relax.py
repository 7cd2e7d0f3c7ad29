"""Costs at which nothing takes longer: what bounds are proved for, and searches begin with.

What runs at the costs that each of these is given runs at those it returns, no later and holding no
more, but for `never_split`, which is a search's.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_vshape.core.model.costs import LEAST, Costs, pair_of
from megatron_vshape.core.model.kinds import EXCHANGES, HELD, PARTS, TIMES, Kind


def of_shortest(costs: Costs) -> Costs:
    """Return the costs with every microbatch as short as the shortest of each pass, or as told."""
    return _with_shares(costs, lambda shares: min(1.0, *shares))


def of_largest(costs: Costs) -> Costs:
    """Return the costs with every microbatch as long as the longest, which must fit alone."""
    return _with_shares(costs, max)


def _with_shares(costs: Costs, of_all: Callable[[Sequence[float]], float]) -> Costs:
    amounts = {
        name: tuple(of_all(shares) * each for each in costs.lists()[name])
        for name, shares in costs.by_microbatch
    }
    return replace(costs, by_microbatch=()).having(**amounts) if amounts else costs


def in_passes(costs: Costs) -> Costs:
    """Return the costs with all that a pass takes in its own time, exchanges and host too.

    Without joint passes.
    """
    if costs.joins:
        return in_passes(costs.never_joined())
    if not costs.host_us and all(getattr(costs, name) is None for name in EXCHANGES):
        return costs
    stages = range(costs.num_stages)
    times = {kind.time: tuple(costs.time_us(kind, stage) for stage in stages) for kind in PARTS}
    bare = replace(costs, host_us=0.0)
    return bare.having(**times, whole_backward_us=costs.whole_us, **dict.fromkeys(EXCHANGES))


def joined_no_slower(costs: Costs) -> Costs:
    """Return costs without joint passes at which none would be faster than its two passes.

    What runs at these costs runs at those, every joint pass as its F and then its backward, no
    later and holding no more. Each pass is spared what may hide of its exchange, and half of
    what a measured pair saves beyond that.
    """
    if not costs.joins:
        return costs
    stages, hidden = range(costs.num_stages), costs.hidden_share or 0.0
    left = {
        kind: [costs.time_us(kind, s) - hidden * costs.exchanges_us(kind, s) for s in stages]
        for kind in (Kind.F, Kind.B, Kind.BW)
    }
    spared = {kind: [0.0] * costs.num_stages for kind in left}
    for name, price in costs.joint:
        f, kind, b = pair_of(name)
        half = (left[Kind.F][f] + left[kind][b] - price) / 2
        for each, stage in ((Kind.F, f), (kind, b)):
            spared[each][stage] = max(spared[each][stage], half)
    forward, backward, whole = (
        tuple(max(t - s, t / 1000) for t, s in zip(left[kind], spared[kind], strict=True))
        for kind in left
    )
    return in_passes(costs).having(
        forward_us=forward,
        backward_us=backward,
        whole_backward_us=tuple(map(max, whole, backward)),
    )


def split_no_slower(costs: Costs) -> Costs:
    """Return costs at which a split backward loses nothing to a whole one, if these differ.

    Nor do an F and a backward one after the other to a joint pass.

    What runs at these costs runs at those, every BW as B and W, no later and holding no more:
    so bounds for these hold.
    """
    priced = in_passes(joined_no_slower(of_shortest(costs)))
    # a BW holds what its F left until it ends, even if a B left more for its W
    held = map(min, costs.held_after_forward_bytes, costs.held_after_backward_bytes)
    priced = priced.having(held_after_backward_bytes=tuple(held))
    if priced.whole_backward_us is None:
        return priced
    backward, weight = [], []
    for b, w, whole in zip(
        priced.backward_us, priced.weight_us, priced.whole_backward_us, strict=True
    ):
        weight.append(min(w, max(whole - b, whole / 1000)))  # above 0, as a time is
        backward.append(min(b, whole - weight[-1]))
    return priced.having(
        backward_us=tuple(backward), weight_us=tuple(weight), whole_backward_us=None
    )


def never_split(costs: Costs) -> Costs:
    """Return costs at which B is a whole backward, and W next to nothing, as a time is."""
    whole = [costs.time_us(Kind.BW, stage) for stage in range(costs.num_stages)]
    rest = 1e-6  # of it
    return in_passes(costs).having(
        backward_us=tuple(each * (1 - rest) for each in whole),
        weight_us=tuple(max(each * rest, LEAST) for each in whole),
        whole_backward_us=None,
        held_after_backward_bytes=(0.0,) * costs.num_stages,
    )


def least_of(settings: Sequence[Costs]) -> Costs:
    """Return costs of which none of these has less of anything."""
    split = [dict(split_no_slower(costs).amounts) for costs in settings]
    least = {
        name: tuple(map(min, zip(*(each[name] for each in split), strict=True)))
        for name in (*TIMES, *HELD)
    }
    return split_no_slower(settings[0]).having(**least)
