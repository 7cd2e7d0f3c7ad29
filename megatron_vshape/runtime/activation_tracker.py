"""Activation memory of a rank, counted from saved tensors instead of an allocator.

The count includes the storages of tensors that autograd saved for a backward or that a
weight-gradient job references: each storage once, with its full size, from the pass after which it
is first found until it is freed. It excludes parameters, gradient buffers, messages in flight and
temporary memory of a pass. The autograd graph is read without saved-tensor hooks, which would
replace the weight objects that Megatron passes to custom Functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.runtime.weight_jobs import plain_tensors


class ActivationTracker:
    """Activation tracker: storages of saved tensors in one step, and the bytes that passes add."""

    def __init__(self, not_counted: Iterable[Tensor]) -> None:
        excluded_tensors = plain_tensors(list(not_counted))
        self._excluded = {tensor.untyped_storage()._cdata for tensor in excluded_tensors}
        self._known: dict[int, StorageWeakRef] = {}
        self._held = 0
        self._added: dict[tuple[Kind, int], list[int]] = {}
        self.peak_bytes = 0
        self.shared: dict[int, tuple[int, int]] = {}  # by chunk: the sums of `shares`

    def add(self, tensor: Tensor) -> None:
        """Count the storage while it is alive; for a quantized tensor, those of its parts."""
        for part in plain_tensors(tensor):
            storage = part.untyped_storage()
            key = storage._cdata
            if key not in self._excluded and key not in self._known and storage.nbytes():
                # The weak reference keeps the address from reuse, so `key` stays unique while it is
                # known.
                self._known[key] = StorageWeakRef(storage)

    def add_graph(self, output: Tensor) -> None:
        """Count all tensors saved by the graph of `output`."""
        if output.grad_fn is not None:
            for node in nodes_behind(output.grad_fn):
                for _, tensor in saved_by(node):
                    self.add(tensor)

    def shares(self, chunk: int, sizes_bytes: tuple[int, int]) -> None:
        """Add the bytes that a layer's passes of one microbatch share, and the bytes they owe."""
        pairs = zip(self.shared.get(chunk, (0, 0)), sizes_bytes, strict=True)
        retained, gradient_bytes = map(sum, pairs)
        self.shared[chunk] = retained, gradient_bytes

    def ends(self, work: Pass) -> None:
        """Update the counts after a pass."""
        dead = [key for key, reference in self._known.items() if reference.expired()]
        for key in dead:
            del self._known[key]
        # Current sizes: a living storage may have been emptied.
        held_bytes = sum(map(size_now, self._known.values()))
        self._added.setdefault((work.kind, work.stage), []).append(held_bytes - self._held)
        self._held = held_bytes
        self.peak_bytes = max(self.peak_bytes, held_bytes)

    def held_bytes(self, stage: int, passes: int = 1) -> tuple[float, float]:
        """Return the bytes of a microbatch and stage after its passes F, and after its passes B.

        Medians over the microbatches. If no separate B ran, the bytes after B equal the bytes after
        F.
        """
        # Without B, `added_bytes` is 0 and both results are equal.
        after_forward = self.added_bytes(Kind.F, stage, passes)
        return after_forward, max(after_forward + self.added_bytes(Kind.B, stage, passes), 0.0)

    def added_bytes(self, kind: Kind, stage: int, passes: int = 1) -> float:
        """Return the bytes that the `passes` of a microbatch add (median over microbatches)."""
        added = self._added.get((kind, stage), [0])
        # Passes that ran as BW are missing from B's list, so it has no groups by microbatch.
        if passes > 1 and kind is not Kind.F:
            return passes * fmean(added)
        starts = range(0, len(added), passes)
        return float(median(sum(added[start : start + passes]) for start in starts))


def size_now(reference: StorageWeakRef) -> int:
    """Return the current size of a storage in bytes, which may have been emptied or refilled."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else storage.nbytes()


def nodes_behind(root: Node) -> Iterator[Node]:
    """Yield every node of the graph once."""
    visited, pending = {root}, [root]
    while pending:
        node = pending.pop()
        yield node
        for follower, _ in node.next_functions:
            if follower is not None and follower not in visited:
                visited.add(follower)
                pending.append(follower)


def saved_by(node: Node) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors saved by a node with the attribute's name; a tensor can occur twice."""
    for name in _saving_attributes(type(node)):
        yield from ((name, tensor) for tensor in _tensors_in(getattr(node, name)))
    # A custom Function may store tensors on its context without save_for_backward.
    for name, value in getattr(node, "__dict__", {}).items():
        yield from ((name, tensor) for tensor in _tensors_in(value))


@cache
def _saving_attributes(kind: type) -> tuple[str, ...]:
    return tuple(
        name for name in dir(kind) if name.startswith("_saved_") or name == "saved_tensors"
    )


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
