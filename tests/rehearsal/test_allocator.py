"""The replay of torch's caching allocator follows its documented rules."""

import pytest

from megatron_vshape.rehearsal.allocator import (
    MIB,
    Allocator,
    AllocatorSettings,
    Lifetime,
    OutOfMemoryError,
    replay,
)

FIXED, EXPANDABLE = AllocatorSettings(), AllocatorSettings(expandable_segments=True)


def reserved_after(settings: AllocatorSettings, *sizes: int) -> list[float]:
    """Return the reserved MiB after each of these requests."""
    allocator = Allocator(settings)
    reserved = []
    for size in sizes:
        allocator.allocate(size)
        reserved.append(allocator.reserved / MIB)
    return reserved


def test_segments_follow_the_size_of_the_request() -> None:
    assert reserved_after(FIXED, 1) == [2]  # small pool
    assert reserved_after(FIXED, MIB, MIB, MIB) == [2, 2, 4]
    assert reserved_after(FIXED, MIB + 1, 9 * MIB) == [20, 20]  # both in one large segment
    assert reserved_after(FIXED, 10 * MIB, 11 * MIB + 1) == [10, 22]  # multiples of 2 MiB


def test_expandable_segments_map_pages_at_the_end() -> None:
    assert reserved_after(EXPANDABLE, 1, MIB) == [2, 2]
    assert reserved_after(EXPANDABLE, 30 * MIB, 30 * MIB) == [40, 60]
    allocator = Allocator(EXPANDABLE)
    first, second = allocator.allocate(30 * MIB), allocator.allocate(30 * MIB)
    assert second.address == first.address + 30 * MIB  # in the rest of the second page
    allocator.free(second)
    third = allocator.allocate(50 * MIB)  # free block and new pages
    assert (third.address, allocator.reserved) == (first.address + 30 * MIB, 80 * MIB)


def test_the_block_that_expands_least_is_the_best_fit() -> None:
    allocator = Allocator(EXPANDABLE)
    hole, wall, end = (allocator.allocate(size * MIB) for size in (30, 10, 20))
    allocator.free(hole)
    allocator.free(end)  # smaller than the hole, but before unmapped addresses
    assert allocator.allocate(15 * MIB).address == wall.address - 30 * MIB


def test_freed_neighbors_merge_and_small_remainders_are_not_split() -> None:
    allocator = Allocator(FIXED)
    first, second = allocator.allocate(5 * MIB), allocator.allocate(5 * MIB)
    allocator.free(first)
    allocator.free(second)
    merged = allocator.allocate(9 * MIB + 512)  # of the 20 MiB of the merged segment
    assert (merged.address, merged.size) == (first.address, 9 * MIB + 512)
    tail = allocator.allocate(10 * MIB - 512)
    assert (tail.size, allocator.reserved) == (11 * MIB - 512, 20 * MIB)  # 1 MiB stays in the block


def test_large_blocks_are_not_split_above_the_limit() -> None:
    allocator = Allocator(AllocatorSettings.of({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32"}))
    allocator.free(allocator.allocate(100 * MIB))
    allocator.allocate(30 * MIB)  # below the limit: no block above it
    assert allocator.reserved == 130 * MIB
    allocator.allocate(79 * MIB)  # above the limit: a block at most 20 MiB larger
    assert allocator.reserved == 209 * MIB + MIB
    allocator.allocate(81 * MIB)
    assert allocator.reserved == 210 * MIB


@pytest.mark.parametrize(
    ("divisions", "size", "rounded"), [(0, 1200, 1536), (4, 5000, 5120), (4, 4096, 4096)]
)
def test_sizes_are_rounded(divisions: int, size: int, rounded: int) -> None:
    settings = f"expandable_segments:False,roundup_power2_divisions:{divisions}"
    assert AllocatorSettings.of({"PYTORCH_ALLOC_CONF": settings}).rounded(size) == rounded


def test_schedules_use_expandable_segments_unless_the_user_decides() -> None:
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}
    assert AllocatorSettings.of_run({}, has_schedule=True, registers=False) == EXPANDABLE
    assert AllocatorSettings.of_run({}, has_schedule=True, registers=True) == FIXED
    assert AllocatorSettings.of_run({}, has_schedule=False, registers=False) == FIXED
    assert AllocatorSettings.of_run(environment, has_schedule=True, registers=False) == FIXED


def test_cached_blocks_return_only_if_memory_is_needed() -> None:
    allocator = Allocator(FIXED, memory_bytes=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert (allocator.reserved, allocator.peak_reserved) == (80 * MIB, 80 * MIB)
    with pytest.raises(OutOfMemoryError, match="83886080 bytes are reserved"):
        allocator.allocate(30 * MIB)


@pytest.mark.parametrize("settings", [FIXED, EXPANDABLE])
def test_an_emptied_cache_keeps_pages_in_use(settings: AllocatorSettings) -> None:
    allocator = Allocator(settings)
    blocks = [allocator.allocate(size * MIB) for size in (40, 15, 40)]
    for block in blocks[::2]:
        allocator.free(block)
    reserved = allocator.reserved
    allocator.empty_cache()
    # Pages of 20 MiB: the block in use is in one page, from 40 to 55 MiB.
    assert (reserved, allocator.reserved) == ((96 * MIB, 16 * MIB), (100 * MIB, 20 * MIB))[
        settings.expandable_segments
    ]


def test_blocks_of_other_streams_are_not_reused() -> None:
    allocator = Allocator(FIXED)
    allocator.free(allocator.allocate(20 * MIB, stream=1))
    allocator.allocate(20 * MIB)
    assert allocator.reserved == 40 * MIB


def test_the_last_step_is_repeated_and_fragments_memory() -> None:
    """A longer-lived small tensor splits the block of the large one in the next step."""
    lives = [Lifetime(100 * MIB, 1, 3), Lifetime(40 * MIB, 4, None), Lifetime(100 * MIB, 5, 6)]
    assert replay(lives, [], 5, FIXED).reserved == 200 * MIB
    assert replay(lives, [4], 5, FIXED).reserved == 140 * MIB  # the cache is emptied before
    assert replay(lives, [], 5, EXPANDABLE).reserved == 140 * MIB


def test_the_unsplit_remainder_of_a_block_counts_as_allocated() -> None:
    lives = [Lifetime(11 * MIB + MIB // 2, 1, None), Lifetime(2 * MIB, 2, 3)]
    assert replay(lives, [], 1, FIXED)[1:] == (14 * MIB, MIB // 2)  # torch reserves even MiB
    assert replay(lives, [], 1, EXPANDABLE)[1:] == (13 * MIB + MIB // 2, 0)
