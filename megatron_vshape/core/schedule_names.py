"""Names of schedules: the published ones, and the schedules of stock Megatron among them."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.blocks import BuildingBlock
from megatron_vshape.core.paper.catalogue import EVERY_NAME, NAMES, OPTIONS, make, make_block

AUTO = "auto"
"""The best schedule within a limit."""

PLUS = "+"
MEMORY_NAMES = ("v-min", "v-half", "v-zb")
PLUS_NAMES = tuple(name + PLUS for name in MEMORY_NAMES)
"""The best schedule with the memory and the placement of the schedule before the plus."""

SCHEDULE_NAMES = (*EVERY_NAME, *PLUS_NAMES)
"""Names of schedules; `SUFFIXES` are those of schedule files."""

SUFFIXES = (".json", ".csv")
"""Suffixes of schedule files."""

MEGATRONS_OWN = ("1f1b", "interleaved-1f1b")
"""Schedules of stock Megatron."""

MAX_COMPARED_PASSES = 20_000
"""Maximum passes of a published schedule in a comparison: generating a larger one is slower than
planning, which starts from the same blocks. Also the largest step for which further numbers of
chunks are searched."""


def is_megatrons_own(name: str | None) -> bool:
    """Return whether Megatron's functions run the named schedule, for any number of stages."""
    return name is not None and name.partition(":")[0] in MEGATRONS_OWN


def megatrons_name(chunks: int) -> str:
    """Name stock Megatron's schedule with this number of virtual stages per rank."""
    return "1f1b" if chunks == 1 else f"interleaved-1f1b:{chunks}"


NOT_STOCK = "not supported by stock Megatron"


def why_not_stock(name: str, num_devices: int, num_microbatches: int) -> str:
    """Return the reason why stock Megatron rejects one of its schedules; empty if it does not.

    Empty for other schedules.
    """
    base_name = name.partition(":")[0]
    interleaved = base_name in ("interleaved-1f1b", "overlapped-interleaved-1f1b")
    if not interleaved or num_microbatches % num_devices == 0:
        return ""
    return f"{num_microbatches} microbatches are not a multiple of {num_devices} ranks"


_cached_schedule = lru_cache(maxsize=64)(make)
"""A frontier evaluates the same schedules at every limit."""


class BaselineSpec(NamedTuple):
    """A catalogue schedule with its stages per device (if optional) and slices per microbatch."""

    name: str
    chunks: int | None = None
    slices: int = 1

    def __str__(self) -> str:
        name = self.name if self.chunks is None else f"{self.name}:{self.chunks}"
        return name if self.slices == 1 else f"{name} in {self.slices} slices"

    def block(self, num_devices: int, num_microbatches: int) -> BuildingBlock:
        """Make its building block; raises ScheduleError for unsupported sizes."""
        return make_block(self.name, num_devices, num_microbatches, **self._choices())

    def make(self, num_devices: int, num_microbatches: int) -> Schedule:
        """Make the schedule; raises ScheduleError for unsupported sizes."""
        return _cached_schedule(self.name, num_devices, num_microbatches, **self._choices())

    def _choices(self) -> dict[str, int]:
        chunks = {} if self.chunks is None else {"num_chunks": self.chunks}
        return {"slices": self.slices, **chunks}

    def is_megatrons(self, num_devices: int, num_microbatches: int) -> bool:
        """Return whether Megatron runs it; interleaved 1F1B requires complete groups."""
        has_full_groups = self.name == "1f1b" or num_microbatches % num_devices == 0
        return self.name in MEGATRONS_OWN and has_full_groups and self.slices == 1


def with_chunks(text: str) -> BaselineSpec | None:
    """Parse a name with stages per device, as interleaved-1f1b:4; None for another form.

    Raises:
        ScheduleError: the schedule has no optional stages per device, or no number follows the
            colon.
    """
    name, colon, chunks = text.partition(":")
    if not colon or name not in EVERY_NAME:
        return None
    if name not in OPTIONS or not (chunks.isdecimal() and 0 < len(chunks.lstrip("0")) < 4):
        examples = " or ".join(f"{option}:4" for option in OPTIONS)
        raise ScheduleError(
            f"{text!r:.60} is not a schedule: a number of chunks per rank can follow "
            f"the colon of {examples}"
        )
    return BaselineSpec(name, int(chunks))


def baselines_of(
    num_devices: int,
    num_microbatches: int,
    chunk_counts: Iterable[int],
    slice_counts: Iterable[int] = (1,),
) -> Iterator[tuple[BaselineSpec, BuildingBlock]]:
    """Yield the baselines for these numbers of stages per device, with their blocks.

    A schedule with optional stages per device is included once per number. Schedules larger than
    `MAX_COMPARED_PASSES` are omitted. With several slices, only Megatron's schedules are included,
    as other libraries slice them; the search itself starts from the sliced blocks of all others.
    """
    allowed = sorted(set(chunk_counts))
    for slices, name in product(slice_counts, NAMES):
        if slices > 1 and name not in MEGATRONS_OWN:
            continue
        optional_counts = [chunks for chunks in allowed if chunks > 1]
        for chunks in optional_counts if name in OPTIONS else (None,):
            passes = 3 * num_devices * num_microbatches * slices
            if (chunks or 1) * passes > MAX_COMPARED_PASSES:
                continue  # its block alone is slow to generate
            try:
                baseline = BaselineSpec(name, chunks, slices)
                block = baseline.block(num_devices, num_microbatches)
            except ScheduleError:  # not for these sizes
                continue
            chunks_of_block = len(block.placement) // num_devices
            if chunks_of_block in allowed and chunks_of_block * passes <= MAX_COMPARED_PASSES:
                yield baseline, block
