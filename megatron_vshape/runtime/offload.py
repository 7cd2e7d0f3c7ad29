"""Activations that wait in host memory between F and B (PipeOffload, arXiv 2503.01328).

After F the graph is read for what it saves, as `held_bytes` reads it. What belongs to this
microbatch alone is copied to the host (pass D), its storages are emptied (L), later made as large
as they were (R) and filled again (H), before B. Tensors, views, contexts of custom Functions and
weight jobs see their data again, as if nothing had been: no version of a tensor changes, and what
B computes is the same to the last bit. There are no saved-tensor hooks: what those return has lost
Megatron's attributes of parameters, and torch no longer sees what is changed in place.

On a GPU, D and H are launched by threads of their own on streams of their own (see
`program_runner`), and the streams wait for each other at the markers L and R, which the stream that
computes runs: so memory is given back and taken in its order alone, and follows from the device's
row however far the host is ahead. Nothing needs `record_stream`, whose memory comes back when the
host next allocates after the copy.

What was allocated on another stream, such as that of shared experts beside the others, stays where
it is: made large again it would be memory of the stream that computes, which hands it out anew
while the other may still read it in B. So R gives every storage memory of the stream it was of.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_vshape.core.model.kinds import COPY_BACK, COPY_OUT, RELEASE, RELOAD, Kind
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.runtime.graph_memory import Segments
from megatron_vshape.runtime.held_bytes import nodes_behind, saved_by
from megatron_vshape.runtime.host_memory import HostMemory, Moment
from megatron_vshape.runtime.stage import Handler

SMALL = 1 / 64
"""Share of the largest storage of a microbatch below which a storage is not offloaded."""

WALKS = 2
"""Microbatches of a stage whose graphs are compared before anything of it is emptied."""


class OffloadError(RuntimeError):
    """A pass found activations elsewhere than it needs them; the text says which and where."""


class _At(StrEnum):
    """Where the activations of a microbatch are."""

    MADE = "on the device"
    COPIED = "on the device and in host memory"
    RELEASED = "in host memory"
    MADE_ROOM = "in host memory, with room on the device"
    BACK = "on the device again"


class _Name(NamedTuple):
    """What a storage is in every microbatch of a stage: the how-manieth node of a type saves it."""

    node: str
    number: int
    attribute: str
    place: int


@dataclass(eq=False)
class _Activations:
    """The activations of one microbatch of one stage."""

    root: Node | None  # of its graph, until that has been read
    output: int  # the storage of F's output, which belongs to its reader
    made: Moment
    stays: bool  # as it is not known yet what belongs to this microbatch alone
    shared: frozenset[int]  # storages that others of the same microbatch read
    at: _At = _At.MADE
    storages: list[tuple[UntypedStorage, int]] = field(default_factory=list)  # and their bytes
    blocks: list[Tensor] = field(default_factory=list)
    free: list[Moment] = field(default_factory=list)  # from when on each block may be written to
    moment: Moment = Moment(None)  # of the last copy, or of the room for it


class Offload:
    """What of this rank's stages waits in host memory, by stage and microbatch."""

    def __init__(
        self, device: torch.device, most_bytes: float = math.inf, ranks: int | None = None
    ) -> None:
        """Take the device that computes, and how many ranks share the host.

        What does not fit in `most_bytes` of host memory stays on the device.
        """
        self.host = HostMemory(device, most_bytes, ranks)
        self._device = device
        self._kept: frozenset[int] = frozenset()
        self._waiting: dict[tuple[int, int], _Activations] = {}
        self._walks: dict[int, int] = {}
        self._seen: dict[int, tuple[StorageWeakRef, tuple[int, int], _Name]] = {}
        self._stays: set[tuple[int, _Name]] = set()  # as others share it, or another stream has it
        self._bytes: dict[int, int] = {}

    @property
    def bytes_by_stage(self) -> Mapping[int, int]:
        """Return what of a microbatch waits, or could, of the stages of which that is known."""
        return self._bytes

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Never touch these: parameters, gradients, buffers, as long as they live."""
        self._kept = frozenset(each.untyped_storage()._cdata for each in tensors)

    def has_learned(self, stages: Collection[int]) -> bool:
        """Return whether it is known what belongs to one microbatch alone, of all these stages."""
        return all(self._walks.get(stage, 0) >= WALKS for stage in stages)

    def ends_forward(
        self, stage: int, microbatch: int, output: Tensor, shared: Iterable[Tensor] = ()
    ) -> None:
        """Take note of what F has left behind; `output` still has its data, and `shared` stays.

        The graphs of a stage's first microbatches are compared: what two of them save, such as the
        table of a rotary embedding, belongs to neither. Until that is known, all stays.
        """
        if output.grad_fn is None:
            return
        storage: int = output.untyped_storage()._cdata
        learns = self._walks.get(stage, 0) < WALKS
        others = frozenset(each.untyped_storage()._cdata for each in shared)
        waiting = _Activations(output.grad_fn, storage, Moment.of(self._device), learns, others)
        self._waiting[stage, microbatch] = waiting
        if learns:
            self._learn(stage, waiting, output.grad_fn)
            waiting.stays = self._walks[stage] < WALKS

    def prepare(self, copy: Pass) -> None:
        """Do for D or H what the thread that runs the program has to, where that has the copy.

        Host memory is made here: on a GPU that waits for the whole device, its messages too, and
        that such a wait never hangs is proved for this place (see `program.kernels`).
        """
        if copy.kind is COPY_OUT:
            self._choose(copy.stage, self._find(*copy, _At.MADE))
        elif copy.kind is COPY_BACK:
            self.host.expect_back()

    def handlers(self) -> dict[Kind, Handler]:
        """Return what runs D, L, R and H."""
        return {
            COPY_OUT: Handler(lambda work: self.copy_out(*work[1:]), prepare=self.prepare),
            RELEASE: Handler(lambda work: self.release(*work[1:])),
            RELOAD: Handler(lambda work: self.make_room(*work[1:])),
            COPY_BACK: Handler(lambda work: self.copy_back(*work[1:]), prepare=self.prepare),
        }

    def copy_out(self, stage: int, microbatch: int) -> None:
        """Run D: copy what is to wait, on the stream of this thread."""
        waiting = self._find(COPY_OUT, stage, microbatch, _At.MADE)
        self._choose(stage, waiting)
        for each in (waiting.made, *waiting.free):
            each.wait()
        for part, place in self._parts(waiting):
            place.copy_(part, non_blocking=True)
        waiting.moment = Moment.of(self._device)
        waiting.at = _At.COPIED

    def release(self, stage: int, microbatch: int) -> None:
        """Run L: empty what has been copied."""
        waiting = self._find(RELEASE, stage, microbatch, _At.COPIED)
        waiting.moment.wait()
        for storage, _ in waiting.storages:
            storage.resize_(0)
        waiting.at = _At.RELEASED

    def make_room(self, stage: int, microbatch: int) -> None:
        """Run R: make what was emptied as large as it was."""
        waiting = self._find(RELOAD, stage, microbatch, _At.RELEASED)
        for storage, size in waiting.storages:
            storage.resize_(size)
        waiting.moment = Moment.of(self._device)
        waiting.at = _At.MADE_ROOM

    def copy_back(self, stage: int, microbatch: int) -> None:
        """Run H: fill it again, on the stream of this thread."""
        blocks: list[Tensor] = []
        try:
            waiting = self._find(COPY_BACK, stage, microbatch, _At.MADE_ROOM)
            waiting.moment.wait()
            for part, place in self._parts(waiting):
                part.copy_(place, non_blocking=True)
            waiting.moment = Moment.of(self._device)
            blocks, waiting.blocks = waiting.blocks, []
            waiting.at = _At.BACK
        finally:  # whoever takes blocks waits for this
            self.host.give_back(blocks, waiting.moment if blocks else Moment(None))

    def begins_backward(self, work: Pass) -> None:
        """Have B, or a whole backward, find what it reads.

        An emptied storage has no address, so a backward that read one would end the process.

        Raises:
            OffloadError: it is not there.
        """
        waiting = self._waiting.pop(work[1:], None)
        if waiting is None:
            return
        if waiting.at not in (_At.MADE, _At.BACK):
            self._waiting[work[1:]] = waiting
            raise OffloadError(_where(work, waiting.at))
        waiting.moment.wait()

    def begins_weights(self, work: Pass) -> None:
        """Check that W finds what it reads: its B has, so nothing of it may wait any more."""
        waiting = self._waiting.get(work[1:])
        if waiting is not None:
            raise OffloadError(_where(work, waiting.at))

    def forget(self) -> None:
        """Let go of what waits; after a step that failed, or that is undone."""
        self._waiting.clear()

    def clear(self) -> None:
        """Let go of all host memory too."""
        self.forget()
        self.host.clear()

    def _choose(self, stage: int, waiting: _Activations) -> None:
        """Choose what is to wait, and where, unless that has been."""
        root, waiting.root = waiting.root, None
        if waiting.stays or root is None:
            return
        chosen = self._chosen(stage, root, waiting)
        taken = self.host.take(sum(size for _, size in chosen)) if chosen else None
        if taken is not None:
            waiting.storages = chosen
            waiting.blocks = [block for block, _ in taken]
            waiting.free = [moment for _, moment in taken]

    def _find(self, kind: Kind, stage: int, microbatch: int, wanted: _At) -> _Activations:
        waiting = self._waiting.get((stage, microbatch))
        if waiting is None or waiting.at is not wanted:
            at = "gone, or not made yet" if waiting is None else waiting.at.value
            raise OffloadError(_where(Pass(kind, stage, microbatch), at))
        return waiting

    def _learn(self, stage: int, waiting: _Activations, root: Node) -> None:
        """Compare a microbatch's storages with those of others that are still there.

        And look which are another stream's, as those of the same name are in every microbatch.
        """
        walk = stage, self._walks.get(stage, 0)
        self._walks[stage] = walk[1] + 1
        self._seen = {key: seen for key, seen in self._seen.items() if not seen[0].expired()}
        others = _memory_of_other_streams()
        for name, storage in self._saved(root, waiting):
            if storage.data_ptr() in others:
                self._stays.add((stage, name))
            _, other, known_as = self._seen.setdefault(
                storage._cdata, (StorageWeakRef(storage), walk, name)
            )
            if other != walk:
                self._stays.update({(stage, name), (other[0], known_as)})
        self._bytes[stage] = sum(size for _, size in self._chosen(stage, root, waiting))

    def _chosen(
        self, stage: int, root: Node, waiting: _Activations
    ) -> list[tuple[UntypedStorage, int]]:
        """Return what of a microbatch is to wait, with its bytes; what was saved first is first."""
        names: dict[int, tuple[UntypedStorage, list[_Name]]] = {}
        for name, storage in self._saved(root, waiting):
            names.setdefault(storage._cdata, (storage, []))[1].append(name)
        own = [
            (storage, storage.nbytes())
            for storage, known_as in names.values()
            if not any((stage, name) in self._stays for name in known_as)
        ]
        least = SMALL * max((size for _, size in own), default=0)
        return [(storage, size) for storage, size in own if size >= least]

    def _saved(self, root: Node, waiting: _Activations) -> Iterator[tuple[_Name, UntypedStorage]]:
        """Yield the storages that a graph saves and that can be emptied, in the order of F."""
        numbers: dict[str, int] = {}
        for node in sorted(nodes_behind(root), key=lambda node: node._sequence_nr()):
            kind = type(node).__name__
            numbers[kind] = numbers.get(kind, -1) + 1
            places: dict[str, int] = {}
            for attribute, tensor in saved_by(node):
                places[attribute] = places.get(attribute, -1) + 1
                # A subclass may hold its data elsewhere, and a CPU's tensor is on the host.
                if type(tensor) is not Tensor or tensor.device.type != self._device.type:
                    continue
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key == waiting.output or key in self._kept or key in waiting.shared:
                    continue
                if storage.nbytes() and storage.resizable():
                    yield _Name(kind, numbers[kind], attribute, places[attribute]), storage

    def _parts(self, waiting: _Activations) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of the storages and of the blocks that they fill one after the other."""
        blocks = iter(waiting.blocks)
        left = torch.empty(0, dtype=torch.uint8)
        for storage, _ in waiting.storages:
            # Through a tensor of our own, so that no other's version counter moves.
            rest = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            while rest.numel():
                if not left.numel():
                    left = next(blocks)
                size = min(rest.numel(), left.numel())
                yield rest[:size], left[:size]
                rest, left = rest[size:], left[size:]


def _memory_of_other_streams() -> Segments:
    """Return what was allocated on other streams than this thread runs on."""
    if not torch.cuda.is_initialized():
        return Segments()
    own = torch.cuda.current_stream().cuda_stream
    return Segments(lambda each: each["stream"] != own)


def _where(work: Pass, at: str) -> str:
    return (
        f"{work}: the activations of stage {work.stage} for microbatch {work.microbatch} are {at}; "
        "F, D, L, R, H and B of a microbatch run in this order, each of them once"
    )
