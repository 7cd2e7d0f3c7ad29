"""Megatron's paged stash, which stores activations of experts for B in pages (since 0.18).

The stash records the pass order of its first enabled step, and requires the same order in every
later step. An overflow is detected after a step, which then runs again without the stash.
"""

from typing import Any

from megatron_vshape.mcore.refusals import uses_stash


def begin_step(config: Any, trains: bool) -> None:
    """Notify the stash of a new step, as Megatron's schedules do.

    `trains` enables the stash in this step; it must be false until the pass order is final.
    """
    if not uses_stash(config):
        return
    from megatron.core.transformer.moe.paged_stash import PagedStashManager, paged_stash_reset

    stash = PagedStashManager.get_instance()
    if stash.status == "begin":
        stash.current_layer = None  # the stash counts microbatches even while disabled
    paged_stash_reset(enabled=trains, config=config)
