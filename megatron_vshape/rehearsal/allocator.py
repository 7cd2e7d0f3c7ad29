"""Replay of allocations through torch's caching allocator: memory that it reserves from the GPU.

It follows c10/cuda/CUDACachingAllocator.cpp of torch 2.11 and needs no torch. A request goes to
the pool of its size and stream: small up to 1 MiB, else large. The pool returns its smallest free
block that is large enough, and splits it. Without such a block, memory is reserved from the GPU: a
segment by cudaMalloc, or pages at the end of an expandable segment. Freed blocks merge with free
neighbors. Memory returns to the GPU only if a request fails, or if the program empties the cache.

With the same calls, it reserves the same bytes as torch on an H200 (benchmarks/allocator.md). A dry
run has no streams, so all of its storages share the pools of one stream.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_vshape.environment import ALLOCATOR, required_settings

MIB = 1 << 20
UNIT = 512
SMALL = MIB
"""Largest request of the small pool in bytes; a rest of a large block is at least as large."""
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
"""Segments of requests below 1 MiB and below 10 MiB, and pages of expandable segments."""
_MIN_LARGE = 10 * MIB
_LARGE_MULTIPLE = 2 * MIB
_NO_LIMIT = 1 << 62
_GAP = LARGE_SEGMENT << 22  # a multiple of both kinds of pages
"""Distance of the addresses of expandable segments."""


class OutOfMemoryError(Exception):
    """A request exceeds the memory of the GPU."""


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """Settings of PYTORCH_CUDA_ALLOC_CONF that affect the reserved memory."""

    expandable_segments: bool = False
    max_split_bytes: int = _NO_LIMIT
    roundup_divisions: int = 0  # of a power of two; 0: multiples of 512 bytes

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> AllocatorSettings:
        """Read the environment; settings that a replay does not support are ignored."""
        text = next((environment[name] for name in ALLOCATOR if name in environment), "")
        options = dict(re.findall(r"(\w+):(\w+)", text))
        split = options.get("max_split_size_mb")
        divisions = options.get("roundup_power2_divisions", "0")
        return cls(
            options.get("expandable_segments", "").lower() == "true",
            _NO_LIMIT if split is None else int(split) * MIB,
            int(divisions) if divisions.isdigit() else 0,
        )

    @classmethod
    def of_run(
        cls, environment: Mapping[str, str], has_schedule: bool, registers: bool
    ) -> AllocatorSettings:
        """Read the environment; without a setting, use that of this package's schedules.

        Args:
            environment: variables of the run.
            has_schedule: whether the run has a schedule of this package.
            registers: whether NCCL registers buffers.
        """
        if has_schedule and not any(name in environment for name in ALLOCATOR):
            defaults = required_settings(kernels=True, ordered=False, registers=registers)
            return cls.of({name: value for name, (value, _) in defaults.items()})
        return cls.of(environment)

    def rounded(self, size: int) -> int:
        """Round a request to the size of its block."""
        # As torch's roundup_power2_next_division: steps of 1/divisions of the power of two below.
        divisions = self.roundup_divisions
        if divisions <= 1 or size <= UNIT * divisions or size & (size - 1) == 0:
            return max(UNIT, -(-size // UNIT) * UNIT)
        step = (1 << (size.bit_length() - 1)) >> (divisions.bit_length() - 1)
        return -(-size // step) * step


@dataclass(eq=False, slots=True)
class Block:
    """A range of addresses; neighbors are of the same segment."""

    address: int
    size: int
    pool: _Pool
    expandable: bool
    is_free: bool = True
    mapped: bool = True
    previous_block: Block | None = None
    next_block: Block | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.address

    @property
    def largest(self) -> int:
        """Size to which the block can expand."""
        next_block = self.next_block
        return self.size + (
            next_block.size if next_block is not None and not next_block.mapped else 0
        )

    def cut(self, size: int) -> Block:
        """Shorten the block, and return the rest as its neighbor."""
        remainder = Block(self.address + size, self.size - size, self.pool, self.expandable)
        remainder.mapped, remainder.previous_block, remainder.next_block = (
            self.mapped,
            self,
            self.next_block,
        )
        if self.next_block is not None:
            self.next_block.previous_block = remainder
        self.next_block, self.size = remainder, size
        return remainder


@dataclass(eq=False, slots=True)
class _Pool:
    """Free blocks of a size class and stream, sorted by (size, address)."""

    is_small: bool
    keys: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)  # free and mapped, by address
    unmapped: dict[int, Block] = field(default_factory=dict)  # by address

    @property
    def page(self) -> int:
        return SMALL_SEGMENT if self.is_small else LARGE_SEGMENT

    def add(self, block: Block) -> None:
        if block.mapped:
            insort(self.keys, block.key)
            self.blocks[block.address] = block
        else:
            self.unmapped[block.address] = block

    def remove(self, block: Block) -> None:
        if block.mapped:
            del self.keys[bisect_left(self.keys, block.key)]
            del self.blocks[block.address]
        else:
            del self.unmapped[block.address]

    def merged(self, block: Block) -> Block:
        """Merge a block that is in no list with its free neighbors."""
        previous_block, next_block = block.previous_block, block.next_block
        if (
            previous_block is not None
            and previous_block.is_free
            and previous_block.mapped == block.mapped
        ):
            self.remove(previous_block)
            block.address, block.size = previous_block.address, block.size + previous_block.size
            block.previous_block = previous_block.previous_block
            if block.previous_block is not None:
                block.previous_block.next_block = block
        if next_block is not None and next_block.is_free and next_block.mapped == block.mapped:
            self.remove(next_block)
            block.size, block.next_block = block.size + next_block.size, next_block.next_block
            if block.next_block is not None:
                block.next_block.previous_block = block
        return block


class Allocator:
    """State of the allocator in bytes.

    `reserved` is the memory from the GPU, and `allocated` the sum of the blocks in use: with
    cudaMalloc, a block can be up to 1 MiB larger than its request.
    """

    def __init__(self, settings: AllocatorSettings, memory_bytes: int = _NO_LIMIT) -> None:
        """Start with no reserved memory.

        Args:
            settings: settings of torch's allocator.
            memory_bytes: memory of the GPU that the allocator can reserve.
        """
        self.settings, self.memory_bytes = settings, memory_bytes
        self.reserved = self.peak_reserved = self.allocated = self.peak_allocated = 0
        self.next_address = _GAP  # of cudaMalloc; the driver's own choice is not documented
        self._pools: dict[tuple[bool, int], _Pool] = {}
        self._ranges = 0

    def allocate(self, size: int, stream: int = 0) -> Block:
        """Allocate a block for a request of `size` bytes.

        Raises:
            OutOfMemoryError: The request does not fit even without cached blocks.
        """
        size = self.settings.rounded(size)
        is_small = size <= SMALL
        pool = self._pools.setdefault((is_small, stream), _Pool(is_small))
        # torch retries in this order, too: cached block, GPU, empty cache, GPU.
        block = self._cached(pool, size) or self._reserve(pool, size)
        if block is None:
            self.empty_cache()
            block = self._reserve(pool, size)
        if block is None:
            raise OutOfMemoryError(f"{size} bytes; {self.reserved} bytes are reserved")
        if self._splits(block, size):
            pool.add(block.cut(size))
        block.is_free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Return a block to its pool."""
        block.is_free = True
        self.allocated -= block.size
        block.pool.add(block.pool.merged(block))

    def empty_cache(self) -> None:
        """Return unused segments and pages to the GPU."""
        for pool in self._pools.values():
            for block in [pool.blocks[address] for _, address in pool.keys]:
                if block.expandable:
                    self._unmap(block)
                # Only a complete segment can be returned by cudaFree.
                elif block.previous_block is None and block.next_block is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def _cached(self, pool: _Pool, size: int) -> Block | None:
        index = bisect_left(pool.keys, (size, 0))
        if index == len(pool.keys):
            return None
        block = pool.blocks[pool.keys[index][1]]
        # The best fit of an expandable segment is the block that can expand least.
        for _, address in pool.keys[index + 1 :] if block.expandable else ():
            if pool.blocks[address].largest >= block.largest:
                break
            block = pool.blocks[address]
        limit = self.settings.max_split_bytes
        # As in torch: a block above the limit serves only requests above it, up to 20 MiB smaller.
        if size < limit <= block.size or (size >= limit and block.size >= size + LARGE_SEGMENT):
            return None
        pool.remove(block)
        return block

    def _splits(self, block: Block, size: int) -> bool:
        remainder = block.size - size
        # A smaller remainder stays part of the block, as internal fragmentation.
        if block.pool.is_small or self.settings.expandable_segments:
            return remainder >= UNIT
        return size < self.settings.max_split_bytes and remainder > SMALL

    def _reserve(self, pool: _Pool, size: int) -> Block | None:
        if self.settings.expandable_segments:
            return self._expand(pool, size)
        size = pool.page if size < _MIN_LARGE else -(-size // _LARGE_MULTIPLE) * _LARGE_MULTIPLE
        if not self._reserve_from_gpu(size):
            return None
        block = Block(self.next_address, size, pool, expandable=False)
        self.next_address += size
        return block

    def _reserve_from_gpu(self, size: int) -> bool:
        if self.reserved + size > self.memory_bytes:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    # ---- expandable segments ----

    def _expand(self, pool: _Pool, size: int) -> Block | None:
        block = self._find_range(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        # Each mapped range merges with the block before it; the last one is the complete block.
        while block.size < size:
            next_block = block.next_block
            assert next_block is not None
            if not self._map(next_block, min(size - block.size, next_block.size)):
                return None
            block = next_block
        pool.remove(block)
        return block

    def _find_range(self, pool: _Pool, size: int) -> Block:
        """Find the first free range with enough addresses, or start an expandable segment."""
        for _, block in sorted(pool.unmapped.items()):
            # The free end of the mapped pages, to be extended.
            if block.previous_block is not None and block.previous_block.is_free:
                block = block.previous_block
            free_bytes = 0
            neighbor: Block | None = block
            while free_bytes < size and neighbor is not None and neighbor.is_free:
                free_bytes, neighbor = free_bytes + neighbor.size, neighbor.next_block
            if free_bytes >= size:
                return block
        self._ranges += 1
        block = Block(self._ranges * _GAP, _GAP // 2, pool, expandable=True, mapped=False)
        pool.add(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map pages of a block and merge them with the free block before."""
        pool = block.pool
        size = -(-size // pool.page) * pool.page
        if not self._reserve_from_gpu(size):
            return False
        pool.remove(block)
        if size < block.size:
            pool.add(block.cut(size))
        block.mapped = True
        pool.add(pool.merged(block))
        return True

    def _unmap(self, block: Block) -> None:
        """Return the pages that are entirely within a free block."""
        pool = block.pool
        start = -(-block.address // pool.page) * pool.page
        end = (block.address + block.size) // pool.page * pool.page
        if start >= end:
            return
        pool.remove(block)
        if start > block.address:
            head, block = block, block.cut(start - block.address)
            pool.add(head)
        if end < block.address + block.size:
            pool.add(block.cut(end - block.address))
        self.reserved -= block.size
        block.mapped = False
        pool.add(pool.merged(block))


_MAX_REPEATS = 3
"""Repetitions of the last traced step: fragmentation can grow for a few steps."""


class Lifetime(NamedTuple):
    """Size of a storage in bytes, and the clock when it is allocated and freed."""

    size: int
    born: int
    died: int | None  # None: never


class Replayed(NamedTuple):
    """Result of a replay in bytes; allocated memory is that of torch.cuda.memory_allocated."""

    reserved: int  # peak
    allocated: int  # peak
    unsplit: int  # at the end: blocks in use beyond the rounded requests


def replay(
    lives: Sequence[Lifetime], emptied: Sequence[int], last_step: int, settings: AllocatorSettings
) -> Replayed:
    """Compute the memory that torch's caching allocator reserves for the allocations of a dry run.

    Args:
        lives: storages of the run, in the order of their allocation.
        emptied: clock of each call of `torch.cuda.empty_cache`.
        last_step: clock at the start of the last step, which is repeated for the reserved memory.
        settings: settings of torch's allocator.
    """
    allocator = Allocator(settings)
    _replay(allocator, lives, emptied)
    allocated, allocated_at_end = allocator.peak_allocated, allocator.allocated
    unsplit = allocated_at_end - sum(
        settings.rounded(lifetime.size) for lifetime in lives if lifetime.died is None
    )
    # Without storages that stay: a repeated step would allocate them again.
    step = [
        lifetime for lifetime in lives if lifetime.born >= last_step and lifetime.died is not None
    ]
    for _ in range(_MAX_REPEATS):
        previous_peak = allocator.peak_reserved
        _replay(allocator, step, ())
        if allocator.peak_reserved == previous_peak:
            break
    return Replayed(allocator.peak_reserved, allocated, unsplit)


def _replay(allocator: Allocator, lives: Sequence[Lifetime], emptied: Sequence[int]) -> None:
    events = [(clock, 0, 0) for clock in emptied]
    for index, lifetime in enumerate(lives):
        events.append((lifetime.born, 1, index))
        if lifetime.died is not None:
            events.append((lifetime.died, 2, index))
    blocks: dict[int, Block] = {}
    for _, event, index in sorted(events):
        if event == 0:
            allocator.empty_cache()
        elif event == 1:
            blocks[index] = allocator.allocate(lives[index].size)
        else:
            allocator.free(blocks.pop(index))
