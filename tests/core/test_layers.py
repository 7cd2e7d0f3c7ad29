"""Layers of every stage: balanced by costs, given by the user, and what the stages then cost."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_vshape.core.model.costs import with_copies
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import Widths, even_layers, parse_layers
from megatron_vshape.core.model.pieces import Piece, Pieces, regroup
from megatron_vshape.core.model.placement import Placement, linear, looping, v_shape

LAYER = Piece(10.0, 11.0, 9.0, 400.0, 100.0)
EMBEDDING = Piece(1.0, 0.5, 0.5, 50.0, 0.0)
HEAD = Piece(15.0, 15.0, 15.0, 900.0, 300.0)
PIECES = Pieces(LAYER, EMBEDDING, HEAD, 3.0)


def busiest_us(pieces: Pieces, layers: tuple[int, ...], placement: Placement) -> float:
    return pieces.costs(layers).busy_us(placement, max(placement) + 1, 1)


def test_a_heavy_head_takes_layers_from_the_stages_at_the_ends() -> None:
    # The head is worth 1.5 layers.
    assert PIECES.balanced(32, linear(8)) == (4, 4, 4, 4, 4, 4, 5, 3)
    assert PIECES.balanced(8, v_shape(4)) == (1, 1, 1, 1, 1, 1, 2, 0)
    assert PIECES.balanced(31, v_shape(4)) == (4, 4, 4, 4, 4, 4, 4, 3)


def test_equal_stages_stay_equal() -> None:
    nothing = LAYER.times(0.0)
    free = Pieces(LAYER, nothing, nothing, 0.0)
    for placement in (linear(4), looping(4, 2), v_shape(4)):
        assert free.balanced(16, placement) == (16 // len(placement),) * len(placement)


@given(
    st.sampled_from([linear(2), linear(4), looping(2, 2), v_shape(2), v_shape(1)]),
    st.integers(4, 9),
    st.floats(0, 60),
    st.floats(0, 200),
)
def test_no_other_split_leaves_the_busiest_device_less(
    placement: Placement, num_layers: int, embedding: float, head: float
) -> None:
    ends = (EMBEDDING.times(embedding), HEAD.times(head / 20))
    pieces = Pieces(LAYER, *ends, 0.0)
    found = pieces.balanced(num_layers, placement)
    assert sum(found) == num_layers
    assert all(found[1:-1])
    others = [
        layers
        for layers in itertools.product(range(num_layers + 1), repeat=len(placement))
        if sum(layers) == num_layers and all(layers[1:-1])
    ]
    best = min(busiest_us(pieces, layers, placement) for layers in others)
    # An empty end counts as taking LEAST.
    assert busiest_us(pieces, found, placement) <= best + 0.01 * LAYER.time_us


def test_too_few_layers_to_balance() -> None:
    with pytest.raises(ScheduleError, match="3 layers are too few for 8 stages: .* at least 6"):
        PIECES.balanced(3, v_shape(4))


def test_measured_stages_come_apart_and_together() -> None:
    layers = (1, 3, 2, 4, 2, 2, 2, 0)
    measured = PIECES.costs(layers)
    assert measured.layers == layers
    found = Pieces.of(measured, layers)
    for mine, theirs in zip(
        (found.layer, found.first, found.last), (LAYER, EMBEDDING, HEAD), strict=True
    ):
        amounts = [each for each in Piece.__slots__ if each != "others"]
        assert list(map(mine.__getattribute__, amounts)) == pytest.approx(
            list(map(theirs.__getattribute__, amounts))
        )
        assert mine.others == theirs.others
    assert found.send_us == 3.0
    assert found.costs((2,) * 8).forward_us == pytest.approx(PIECES.costs((2,) * 8).forward_us)


def test_two_stages_come_apart() -> None:
    found = Pieces.of(PIECES.costs((2, 2)), (2, 2))
    # Nothing tells the embedding from the layers of its stage.
    assert found.layer.forward_us == pytest.approx(10.5)
    assert found.last.forward_us == pytest.approx(14)


def test_coarser_stages_add_their_layers_up() -> None:
    assert regroup(PIECES.costs((1, 2, 2, 1)), 2, "1f1b").layers == (3, 3)


def test_given_layers() -> None:
    assert parse_layers("2,3,3,0", 8, v_shape(2)) == (2, 3, 3, 0)
    assert even_layers(8, v_shape(2)) == (2, 2, 2, 2)


@pytest.mark.parametrize(
    ("num_layers", "advice"),
    [
        (4, ""),
        (6, ", or add --layer-split auto (to training: --pipeline-layer-split)"),
        (12, ", such as 8 or 16, or add --layer-split auto (to training: --pipeline-layer-split)"),
    ],
)
def test_layers_that_do_not_divide_are_told_what_would_do(num_layers: int, advice: str) -> None:
    with pytest.raises(ScheduleError) as error:
        even_layers(num_layers, v_shape(4))
    assert str(error.value) == (
        f"{num_layers} layers do not divide among 8 stages (4 devices with 2 each): give "
        f"a multiple of 8{advice}"
    )
    if "auto" in advice:
        assert sum(PIECES.balanced(num_layers, v_shape(4))) == num_layers


def test_the_head_by_its_products() -> None:
    # 9.6B of the paper: 4096 wide, one layer has 12 h^2 weights.
    widths = Widths(4096, 4096, 2 * 4096, 4 * 4096, False, 0, 12 * 4096)
    assert widths.head_in_layers == pytest.approx(1.0)
    estimated = Pieces.estimated(2.0, 4.0)
    assert estimated.costs((4, 4, 4, 2)).forward_us == (1.0, 1.0, 1.0, 1.0)
    assert estimated.costs((4, 4, 4, 2)).held_after_forward_bytes == (1.0, 1.0, 1.0, 0.5)


def test_layers_take_their_copies_along() -> None:
    layers = (1, 3, 2, 2)
    own = with_copies(PIECES.costs(layers), 0.5)
    pieces = Pieces.of(own, layers)
    again = pieces.costs(layers)
    assert again.copies
    assert again.held_after_forward_bytes == pytest.approx(own.held_after_forward_bytes)
    for (name, values), (known, expected) in zip(again.others, own.others, strict=True):
        assert (name, values) == (known, pytest.approx(expected))
    moved = pieces.costs((2, 2, 2, 2))
    ((name, copied_us), *_) = moved.others
    assert copied_us[1] == pytest.approx(copied_us[2]), name
    assert copied_us[1] == pytest.approx(dict(own.others)[name][1] * 2 / 3)
