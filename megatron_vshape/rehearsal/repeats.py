"""1F1B until it repeats: two equal microbatches of its steady state represent all further ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_vshape.mcore.refusals import captures_graphs
from megatron_vshape.rehearsal.ledger import NEVER, Ledger, Record
from megatron_vshape.rehearsal.work import Work

_REMEMBERS = (
    "num_microbatches_with_partial_activation_checkpoints",
    "fine_grained_activation_offloading",
    "cpu_offloading_num_layers",
    "use_megatron_fsdp",
    "use_torch_fsdp2",
)
"""Options of Megatron with which a microbatch may depend on the number of those before it."""

_MORE = 3
"""Microbatches beyond those in flight: the first backward differs, as it may allocate for the full
step and frees no gradient of an earlier one; two are compared; the last receives no input."""


class NotRepeatedError(Exception):
    """Two consecutive microbatches differ, so all of them have to be traced."""


class Repeated(NamedTuple):
    """A microbatch of the steady state: its work, and the storages that stay until the step ends.

    An example of the latter is the loss, of which the last rank keeps one per microbatch.
    """

    work: Work
    retained: list[Record]


def needed_microbatches(args: Any, stage: int) -> int | None:
    """Return the number of microbatches after which 1F1B repeats; None: trace the usual number."""
    ranks = args.pipeline_model_parallel_size
    if ranks < 2 or captures_graphs(args) or any(getattr(args, name, 0) for name in _REMEMBERS):
        return None
    return int(ranks - stage) + _MORE


def repeated_microbatch(ledger: Ledger) -> Repeated:
    """Compare the last two microbatches of the steady state; called when the last forward starts.

    Raises:
        NotRepeatedError: They differ in their work or in their sequence of allocations and frees.
    """
    first, second = [record for record in ledger.passes if record.phase.kind == "F"][-2:]
    records, start = ledger.records, first.clock
    events = [(record.born, record.size) for record in records if record.born >= start]
    events += [(record.died, -record.size) for record in records if start <= record.died < NEVER]
    events.sort()
    first_sizes = [size for clock, size in events if clock < second.clock]
    second_sizes = [size for clock, size in events if clock >= second.clock]
    if first_sizes != second_sizes:
        raise NotRepeatedError("two consecutive microbatches allocate differently")
    works = second.work_before.minus(first.work_before), ledger.work.minus(second.work_before)
    if not works[0].is_close(works[1]):
        raise NotRepeatedError("two consecutive microbatches have different work")
    retained = _retained(records, second.clock)
    if sum(record.size for record in retained) != sum(second_sizes):
        raise NotRepeatedError("a microbatch frees memory of an earlier step")
    return Repeated(works[1], retained)


def _retained(records: Sequence[Record], start: int) -> list[Record]:
    """Return the storages since `start` that replace none of an earlier microbatch."""
    freed = Counter(
        _storage_key(record) for record in records if record.born < start <= record.died < NEVER
    )
    retained = []
    for record in records:
        if record.born >= start and record.died == NEVER:
            if freed[_storage_key(record)] > 0:
                freed[_storage_key(record)] -= 1
            else:
                retained.append(record)
    return retained


def _storage_key(record: Record) -> tuple[Any, ...]:
    return record.size, record.shape, record.place, record.code, record.phase.kind
