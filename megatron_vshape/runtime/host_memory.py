"""Host memory that activations wait in: blocks of one size, kept for the steps to come."""

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
from megatron_vshape.runtime.hosts import told_ranks

logger = logging.getLogger(__name__)

MOST_BLOCK_BYTES = 64 << 20
"""A block is no larger. torch pins powers of two, so that a block of one wastes nothing."""


LONGEST_LAUNCH_SECONDS = 1.0
"""How long blocks that are to come back are waited for before more are made."""

KEPT_FREE = 0.1
"""Share of free host memory for data loading and checkpoints."""


class Moment(NamedTuple):
    """Where a stream was; on a CPU, where all is done when the call returns, there is none."""

    event: torch.cuda.Event | None

    @classmethod
    def of(cls, device: torch.device) -> Moment:
        """Return where the stream of this thread is now, behind all that it has been given."""
        if device.type != "cuda":
            return cls(None)
        event = torch.cuda.Event()
        event.record()
        return cls(event)

    def wait(self) -> None:
        """Have the stream of this thread wait for it; the host does not."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class HostMemory:
    """Blocks of host memory, pinned where a GPU copies to them.

    It grows as long as copies find no free block, so that its size is what the schedule has waiting
    at once: after the first steps there is nothing more to make, which on a GPU waits for the whole
    device. So the thread that runs the program takes blocks, and those that copy give them back.
    `nbytes` is its size.
    """

    def __init__(
        self, device: torch.device, most_bytes: float = math.inf, ranks: int | None = None
    ) -> None:
        """Make memory for copies from and to this device, at most so much.

        So many `ranks` share what this host has free; None: as many as a launcher says.
        """
        self._device = device
        self._ranks = ranks
        self._most_bytes = most_bytes
        self._lock = Condition()
        self._returning = 0  # copies that are to give blocks back, and have not been launched yet
        self._free: deque[tuple[Tensor, Moment]] = deque()
        self._block_bytes = 0
        self._is_full = False
        self.nbytes = 0

    def take(self, num_bytes: int) -> list[tuple[Tensor, Moment]] | None:
        """Return blocks of at least so many bytes together, or None where there is no more memory.

        Each with the moment up to which it is still read from. What is about to be given back is
        waited for. That there is no more is told once.
        """
        with self._lock:
            size = self._size_of_block(num_bytes)
            count = -(-num_bytes // size)
            self._lock.wait_for(
                lambda: len(self._free) >= count or not self._returning, LONGEST_LAUNCH_SECONDS
            )
            missing = count - len(self._free)
            if missing > 0 and not self._grow(missing):
                return None
            return [self._free.popleft() for _ in range(count)]

    def expect_back(self) -> None:
        """Note that some thread is going to give blocks back."""
        with self._lock:
            self._returning += 1

    def give_back(self, blocks: Sequence[Tensor], moment: Moment) -> None:
        """Take blocks back, which others may write to from that moment on."""
        with self._lock:
            self._free.extend((block, moment) for block in blocks)
            self._returning = max(self._returning - 1, 0)
            self._lock.notify()

    def clear(self) -> None:
        """Let go of all that is free, and forget what has been taken."""
        with self._lock:
            self._free.clear()
            self.nbytes = 0

    def _size_of_block(self, num_bytes: int) -> int:
        if not self._block_bytes:
            power = max(1, num_bytes // HOST_BLOCKS).bit_length() - 1
            self._block_bytes = min(MOST_BLOCK_BYTES, 1 << power)
        return self._block_bytes

    def _grow(self, count: int) -> bool:
        """Make so many blocks more; return whether there was memory for them."""
        wanted = count * self._block_bytes
        left = free_host_bytes(self._ranks)
        try:
            if self.nbytes + wanted > self._most_bytes:
                raise MemoryError(f"the limit is {self._most_bytes / 2**20:,.0f} MiB")
            if left is not None and wanted > left:
                raise MemoryError(f"{left / 2**20:,.0f} MiB of this rank's share are free")
            pinned = self._device.type == "cuda"
            made = [
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
                    f"{wanted / 2**20:,.0f}",
                    str(error).partition("\n")[0],
                )
            return False
        start = Moment(None)
        self._free.extendleft((block, start) for block in made)
        self.nbytes += wanted
        return True


def free_host_bytes(ranks: int | None = None) -> int | None:
    """Return what each of the host's ranks may take of the memory that is free; None if unknown.

    Where `ranks` is None, they are as many as a launcher says.
    """
    found = list(_free_by_source())
    share = (1 - KEPT_FREE) / (ranks or told_ranks() or 1)
    return int(share * min(found)) if found else None


def _free_by_source() -> Iterator[int]:
    """Yield what the system and what the container says is free."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(each for each in lines if each.startswith("MemAvailable:"))
        yield 1024 * int(line.split()[1])
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        most, used = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
        yield max(0, int(most) - int(used))  # "max" says that there is no limit
