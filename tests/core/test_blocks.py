"""Building blocks repeat, respect the dependencies, and have the offsets of the paper."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.placement import linear
from megatron_vshape.core.paper import blocks
from megatron_vshape.core.paper.blocks import BlockPass, BuildingBlock, repeat
from megatron_vshape.core.paper.catalogue import NAMES, make_block


def check_dependencies(block: BuildingBlock) -> None:
    """Fail unless every pass occurs once and starts after its inputs are complete."""
    by_pass = {
        Pass(kind, *block_pass.work[1:]): block_pass
        for block_pass in block.passes
        for kind in block_pass.work.parts()
    }
    stages = len(block.placement)
    assert len(by_pass) == 3 * stages * block.num_microbatches
    for block_pass in block.passes:
        for dependency in block_pass.work.needs(stages):
            assert by_pass[dependency].end <= block_pass.start, (
                block.name,
                block_pass,
                by_pass[dependency],
            )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("d", range(1, 17))
def test_every_pass_starts_after_its_inputs(name: str, d: int) -> None:
    check_dependencies(make_block(name, d, 2 * d))


@settings(max_examples=60)
@given(d=st.integers(1, 12), chunks=st.integers(1, 5), group=st.integers(1, 30))
def test_grouped_block_of_any_size_repeats(d: int, chunks: int, group: int) -> None:
    block = blocks.grouped_interleaved(d, chunks, group)
    check_dependencies(block)
    if chunks == 2 and 2 * group >= d:
        assert max(block.peaks()) == d + group


def test_lifespans_of_one_f_one_b() -> None:
    block = blocks.one_f_one_b(4)
    lives = block.lives()
    assert [end - start for start, end in map(lives.get, sorted(lives))] == [12, 9, 6, 3]
    assert block.peak_bounds() == block.peaks() == (4, 3, 2, 1)


def test_v_blocks_balance_memory() -> None:
    assert blocks.v_half(8).peaks() == (10,) * 8
    assert max(blocks.one_f_one_b_v(9).peaks()) - min(blocks.one_f_one_b_v(9).peaks()) <= 1


def test_two_thirds_block_has_two_microbatches() -> None:
    block = blocks.two_thirds(8)
    assert block.num_microbatches == 2
    assert block.interval == 6
    assert 2 * max(block.peaks()) == 12  # of 16 chunks


def test_block_overlapping_its_copy_is_rejected() -> None:
    passes = (BlockPass(Pass(Kind.F, 0, 0), 0), BlockPass(Pass(Kind.BW, 0, 0), 2, 2))
    with pytest.raises(ScheduleError) as error:
        BuildingBlock("mine", 1, linear(1), 3, passes)
    assert str(error.value) == (
        "the block mine does not repeat: on device 0, F0.0 and BW0.0 meet in slot 0 of 3"
    )


def test_repeating_keeps_the_slots() -> None:
    timeline = repeat(blocks.one_f_one_b(3), 4)
    assert timeline.draw() == "F  F  FBWFBW BW BW\n F  FBWFBWFBW BW\n  FBWFBWFBWFBW"


def test_last_copy_of_a_block_may_be_shortened() -> None:
    row = repeat(blocks.two_thirds(2), 3).schedule.order[0]
    assert {work.microbatch for work in row} == {0, 1, 2}
