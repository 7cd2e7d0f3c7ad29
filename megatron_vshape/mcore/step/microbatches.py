"""The trainer's data iterators in a step, and the order of its calls.

A rank has one iterator per chunk, or one shared by several chunks. Libraries that record choices of
experts (router replay) order their records as the calls of their forward step (`ForwardCalls`).
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from torch import nn

from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.step_state import StepState, unwrapped


class ForwardingIterator:
    """An iterator over a trainer's iterator, to which it forwards all attributes except `next`."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Self:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)


@dataclass(eq=False)
class _Shared:
    """An iterator of which several chunks read every microbatch at different times."""

    source: Any
    readers: int
    _given: int = 0  # number of items read from the source
    _waiting: dict[int, tuple[Any, int]] = field(default_factory=dict)  # item, readers left

    def read(self, number: int) -> Any:
        """Return a microbatch: a copy to each reader except the last, which gets the original.

        Readers need copies because a forward step may modify its batch.
        """
        while self._given <= number:
            self._waiting[self._given] = next(self.source), self.readers
            self._given += 1
        item, num_readers = self._waiting[number]
        self.leave(number)
        return item if num_readers == 1 else copy.copy(item)

    def leave(self, number: int) -> None:
        """Count one reader less for a microbatch, and free it after the last."""
        if number in self._waiting:
            item, num_readers = self._waiting.pop(number)
            if num_readers > 1:
                self._waiting[number] = item, num_readers - 1


class Reader(ForwardingIterator):
    """One chunk's view of a shared iterator in one step."""

    def __init__(self, shared: _Shared) -> None:
        super().__init__(shared.source)
        self.shared = shared
        self._number = 0

    def __next__(self) -> Any:
        item = self.shared.read(self._number)
        self._number += 1
        return item

    def pass_over(self) -> None:
        """Skip the next microbatch."""
        self.shared.leave(self._number)
        self._number += 1


def iterators_by_chunk(data_iterator: Any, num_chunks: int) -> list[Any]:
    """Return one iterator per chunk from the trainer's argument; chunks may share an iterator.

    Raises:
        UnsupportedError: The number is neither one nor that of the chunks, or several chunks share
            an object that is not read by `next`.
    """
    iterators = list(data_iterator) if isinstance(data_iterator, list | tuple) else [data_iterator]
    if len(iterators) == 1:
        iterators = iterators * num_chunks
    if len(iterators) != num_chunks:
        raise UnsupportedError(
            f"{len(iterators)} data iterators are given for the {num_chunks} model chunks of this "
            "rank: pass one iterator per chunk over the same microbatches, or one for all"
        )
    for iterator, readers in _readers(iterators).values():
        if readers > 1 and iterator is not None and not hasattr(iterator, "__next__"):
            raise UnsupportedError(
                f"one {type(iterator).__name__} is given for {readers} model chunks, and it is not "
                "an iterator that they could share: pass one iterator per chunk"
            )
    return iterators


def share_iterators(iterators: Sequence[Any]) -> list[Any]:
    """Return the iterators of a step's chunks; chunks that share one each read all its items.

    None stays None.
    """
    shared = {
        key: _Shared(iterator, readers) for key, (iterator, readers) in _readers(iterators).items()
    }
    return [
        iterator
        if iterator is None or shared[id(iterator)].readers == 1
        else Reader(shared[id(iterator)])
        for iterator in iterators
    ]


def read_again(iterators: Sequence[Any]) -> tuple[list[Any], Any]:
    """Return the iterators of a step's chunks, and another one over the last chunk's microbatches.

    An object that is not read by `next` is copied for this in its current state.
    """
    last = iterators[-1]
    if last is not None and not hasattr(last, "__next__"):
        return share_iterators(iterators), copy.copy(last)
    *shared, second_reader = share_iterators([*iterators, last])
    return shared, second_reader


def in_data_order(reports: list[Any], order: Sequence[int] | None) -> list[Any]:
    """Return reports of microbatches, which ran in this order, in the order of the iterator."""
    if order is None or len(reports) != len(order):
        return reports
    return [report for _, report in sorted(zip(order, reports, strict=True), key=lambda x: x[0])]


def _readers(iterators: Sequence[Any]) -> dict[int, tuple[Any, int]]:
    """Return every distinct iterator with the number of its chunks."""
    times = Counter(map(id, iterators))
    return {id(iterator): (iterator, times[id(iterator)]) for iterator in iterators}


@dataclass(slots=True)
class ForwardCalls:
    """The calls of the trainer's forward step in a step, in the order in which they return.

    Each is (microbatch, chunk), as in Megatron's schedule table.
    """

    order: Sequence[int] | None  # of microbatches; None: as they come
    ended: list[tuple[int, int]] = field(default_factory=list)

    def recording(
        self,
        function: Callable[..., Any],
        chunks: Sequence[nn.Module],
        state: StepState,
        has_loss: bool,
    ) -> Callable[..., Any]:
        """Wrap the trainer's function so that its calls are recorded."""
        # Megatron's layer plans call the function with the model without its wrappers.
        chunk_of = {id(unwrapped(model_chunk)): chunk for chunk, model_chunk in enumerate(chunks)}
        numbers = Counter[int]()

        @functools.wraps(function)
        def call(iterator: Any, model: Any, *args: Any, **options: Any) -> Any:
            result = function(iterator, model, *args, **options)
            if has_loss or not state.has_logits:  # else a call for another rank's chunk
                chunk = chunk_of[id(unwrapped(model))]
                place = numbers[chunk]
                numbers[chunk] += 1
                self.ended.append((place if self.order is None else self.order[place], chunk))
            return result

        return call


def schedule_table(
    calls: ForwardCalls | None, layers: Sequence[int], num_microbatches: int, num_chunks: int
) -> list[tuple[int, int]]:
    """Return (microbatch, chunk) of every forward call of the last step.

    `layers` are those of the stages.

    Raises:
        UnsupportedError: That step had other calls, or its microbatches were reordered; or a stage
            has no layers, and so no records.
    """
    empty = [str(stage) for stage, count in enumerate(layers) if not count]
    if empty:
        raise UnsupportedError(
            f"recorded router replay needs expert choices of every stage, and stages "
            f"{', '.join(empty)} of layer split {','.join(map(str, layers))} have no layers: give "
            "--pipeline-layer-split with at least one layer per stage"
        )
    if calls is None or len(calls.ended) != num_microbatches * num_chunks:
        raise UnsupportedError(
            f"get_schedule_table is asked for {num_microbatches} microbatches and {num_chunks} "
            f"chunks, and the last step had {len(calls.ended) if calls else 0} forward calls: it "
            "is known for the last step alone. Sort recorded expert choices after each step"
        )
    if calls.order is not None:
        raise UnsupportedError(
            "recorded router replay does not support reordered microbatches, as libraries take "
            "records for ascending ones. Add --pipeline-keep-order"
        )
    return calls.ended
