"""Megatron's paged stash, in which what experts save for B waits in pages (0.18 on).

It records the order of the first step that it takes part in, whatever that is, and asks for the
same in every step from then on. An overflow shows after a step, which is then run again without it.
"""

from typing import Any

from megatron_vshape.mcore.refusals import uses_stash


def begin_step(config: Any, trains: bool) -> None:
    """Tell the stash that a step begins, as Megatron's own schedules do.

    `trains` is whether it takes part: in steps whose order is the run's last.
    """
    if not uses_stash(config):
        return
    from megatron.core.transformer.moe.paged_stash import PagedStashManager, paged_stash_reset

    stash = PagedStashManager.get_instance()
    if stash.status == "begin":
        stash.current_layer = None  # it counts microbatches before it takes part, too
    paged_stash_reset(enabled=trains, config=config)
