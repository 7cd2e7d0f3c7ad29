"""A plugin of the farm: B runs no jobs of a W, or the number of those jobs is printed."""

from __future__ import annotations

import functools

from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.split import linear_layers
from megatron_vshape.runtime.weight_jobs import _Open


def start(rank: int, given: object) -> None:
    """Keep W's jobs apart from every B where `given` is true, else print each that is not."""
    if given:
        Planner._beside = lambda *unused: {}  # type: ignore[method-assign]
        return
    run = linear_layers.run_beside

    @functools.wraps(run)
    def counted() -> None:
        if _Open.may_run:
            print("a job ran inside a B", flush=True)
        run()

    linear_layers.run_beside = counted
