"""Pool of host memory for offloaded activations, in blocks of one size that steps reuse."""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Condition
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_vshape.core.check.simulate import HOST_BLOCKS
from megatron_vshape.runtime.hosts import has_peers, ranks_in_environment

logger = logging.getLogger(__name__)

MOST_BLOCK_BYTES = 64 << 20
"""Maximum block size. torch pins powers of two, so blocks of such sizes waste nothing."""


LONGEST_LAUNCH_SECONDS = 1.0
"""Time for which `take` waits for blocks that are about to return, before it allocates more."""

KEPT_FREE = 0.1
"""Share of free host memory for data loading and checkpoints."""


class Moment(NamedTuple):
    """Position in a CUDA stream; empty on a CPU, where every call completes before it returns."""

    event: torch.cuda.Event | None

    @classmethod
    def of(cls, device: torch.device) -> Moment:
        """Return the end of all work submitted so far to the stream of this thread."""
        if device.type != "cuda":
            return cls(None)
        event = torch.cuda.Event()
        event.record()
        return cls(event)

    def wait(self) -> None:
        """Make the stream of this thread wait for this position; the host does not wait."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class HostMemory:
    """Blocks of host memory, pinned for copies to and from a GPU.

    The pool grows while copies find no free block, up to the peak that the schedule requires. After
    the first steps it no longer grows; growing synchronizes the whole GPU. So the thread of the
    program allocates blocks, and the copying threads return them. `nbytes` is the size of the pool.
    """

    def __init__(
        self, device: torch.device, most_bytes: float = math.inf, ranks: int | None = None
    ) -> None:
        """Create an empty pool for copies to and from this device, of at most `most_bytes`.

        `ranks` is the number of ranks that share this host's free memory; None: read from the
        launcher.
        """
        self._device = device
        self._ranks = ranks
        self._most_bytes = most_bytes
        self._lock = Condition()
        self._returning = 0  # launches pending of copies that return blocks
        self._free: deque[tuple[Tensor, Moment]] = deque()
        self._block_bytes = 0
        self._is_full = False
        self.nbytes = 0

    def take(self, num_bytes: int) -> list[tuple[Tensor, Moment]] | None:
        """Allocate blocks of at least `num_bytes` in total; None if host memory is exhausted.

        Each block comes with the position until which a copy still reads it. The call waits for
        blocks that are about to return. Exhausted memory is logged once.
        """
        with self._lock:
            if not self._block_bytes:
                # The power of two at or below 1/HOST_BLOCKS of the first request.
                power = max(1, num_bytes // HOST_BLOCKS).bit_length() - 1
                self._block_bytes = min(MOST_BLOCK_BYTES, 1 << power)
            count = -(-num_bytes // self._block_bytes)
            # Waiting is cheaper than growing, which synchronizes the GPU.
            self._lock.wait_for(
                lambda: len(self._free) >= count or not self._returning, LONGEST_LAUNCH_SECONDS
            )
            missing = count - len(self._free)
            if missing > 0 and not self._grow(missing):
                return None
            return [self._free.popleft() for _ in range(count)]

    def expect_back(self) -> None:
        """Announce that a thread will return blocks."""
        with self._lock:
            self._returning += 1

    def give_back(self, blocks: Sequence[Tensor], moment: Moment) -> None:
        """Return blocks to the pool; they can be overwritten from that position on."""
        with self._lock:
            self._free.extend((block, moment) for block in blocks)
            # Not below zero: `copy_back` without a preceding `expect_back` is allowed.
            self._returning = max(self._returning - 1, 0)
            self._lock.notify()

    def clear(self) -> None:
        """Free all unused blocks, and forget the allocated ones."""
        with self._lock:
            self._free.clear()
            self.nbytes = 0

    def _grow(self, count: int) -> bool:
        """Allocate `count` more blocks; return False if there is not enough memory."""
        wanted_bytes = count * self._block_bytes
        free_bytes = free_host_bytes(self._ranks)
        try:
            if self.nbytes + wanted_bytes > self._most_bytes:
                raise MemoryError(f"the limit is {self._most_bytes / 2**20:,.0f} MiB")
            if free_bytes is not None and wanted_bytes > free_bytes:
                raise MemoryError(f"{free_bytes / 2**20:,.0f} MiB of this rank's share are free")
            pinned = self._device.type == "cuda"
            new_blocks = [
                torch.empty(self._block_bytes, dtype=torch.uint8, pin_memory=pinned)
                for _ in range(count)
            ]
        except (RuntimeError, MemoryError) as error:
            if not self._is_full:
                self._is_full = True
                logger.warning(
                    "no host memory for activations beyond %s MiB on rank %s (%s more wanted: %s): "
                    "the rest stays in GPU memory",
                    f"{self.nbytes / 2**20:,.0f}",
                    os.environ.get("RANK", "0"),
                    f"{wanted_bytes / 2**20:,.0f}",
                    str(error).partition("\n")[0],
                )
            return False
        start = Moment(None)
        # To the left, where `take` starts: no copy reads a new block, so its user need not wait.
        self._free.extendleft((block, start) for block in new_blocks)
        self.nbytes += wanted_bytes
        return True


def free_host_bytes(ranks: int | None = None) -> int | None:
    """Return the free host memory per rank in bytes; None if unknown, as in a dry run.

    If `ranks` is None, the number of ranks is read from the launcher.
    """
    if not has_peers():  # this host is not a training host
        return None
    free_by_source = list(_free_by_source())
    # All ranks of the host allocate at about the same time.
    share = (1 - KEPT_FREE) / (ranks or ranks_in_environment() or 1)
    return int(share * min(free_by_source)) if free_by_source else None


def _free_by_source() -> Iterator[int]:
    """Yield the free memory according to the system and to the container."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        yield 1024 * int(line.split()[1])
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        max_bytes, used_bytes = (
            (group / f"memory.{name}").read_text() for name in ("max", "current")
        )
        yield max(0, int(max_bytes) - int(used_bytes))  # int("max") fails: no limit
