"""Costs of offloading: copy times and offloadable bytes of every stage."""

from statistics import median

from megatron_vshape.core.model.costs import LEAST, Amounts, Costs
from megatron_vshape.core.model.kinds import COPY_BACK, COPY_OUT, OFFLOAD, RELEASE, other_amounts


def with_copies(costs: Costs, forwards: float) -> Costs:
    """Make all activations of a stage offloadable; a copy one way costs `forwards` times F.

    F is that of an inner stage, because the embedding and output layer add time without
    activations.
    """
    held = costs.held_after_forward_bytes
    each = median(us / more for us, more in zip(costs.forward_us, held, strict=True) if more)
    times = tuple(max(forwards * each * more, LEAST * forwards * each) for more in held)
    return with_copies_of(costs, times, held, times)


def with_copies_of(costs: Costs, out_us: Amounts, moved_bytes: Amounts, back_us: Amounts) -> Costs:
    """Make these bytes of every stage offloadable, with copy times for each direction."""
    copies = {COPY_OUT.time: out_us, RELEASE.frees: moved_bytes, COPY_BACK.time: back_us}
    return costs.having(**copies)


def without_copies(costs: Costs) -> Costs:
    """Return the costs without offloading."""
    return costs.having(**dict.fromkeys(other_amounts(OFFLOAD)))
