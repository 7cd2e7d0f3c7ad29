"""Plans of the numbers of microbatches that a run has had of late."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

MOST_MICROBATCHES = 8192
"""Maximum microbatches of the plans kept: about 150 MiB of host memory per rank at PP 8.

Dynamic batches can have a thousand different counts, and a plan grows with its count.
"""

_Plan = TypeVar("_Plan")


def recall(kept: dict[int, _Plan], num_microbatches: int) -> _Plan | None:
    """Return the plan of a number of microbatches, if it is kept, and note its use."""
    plan = kept.pop(num_microbatches, None)
    if plan is not None:
        kept[num_microbatches] = plan
    return plan


def keep(kept: dict[int, _Plan], num_microbatches: int, plan: _Plan) -> None:
    """Keep a plan, and drop those that have not been used for the longest time."""
    kept[num_microbatches] = plan
    while len(kept) > 1 and sum(kept) > MOST_MICROBATCHES:
        del kept[next(iter(kept))]


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause the cyclic garbage collector.

    A plan has tens of thousands of objects and no cycles. They would trigger full collections,
    each of which visits every object of the trainer and takes longer than the plan itself.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
