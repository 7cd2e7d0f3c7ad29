"""Layers per stage: balanced by costs or specified by the user, and the resulting costs."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_vshape.core.check.bounds import min_memory
from megatron_vshape.core.model.costs import with_copies
from megatron_vshape.core.model.kinds import COPY_OUT, Kind, ScheduleError
from megatron_vshape.core.model.layers import Widths, even_layers, parse_layers
from megatron_vshape.core.model.pieces import Pieces, regroup
from megatron_vshape.core.model.placement import Placement, linear, looping, v_shape
from megatron_vshape.core.model.stage_costs import StageCosts
from megatron_vshape.core.planner.lighter import fitting_layers

LAYER = StageCosts.of(10.0, 11.0, 9.0, 400.0, 100.0)
EMBEDDING = StageCosts.of(1.0, 0.5, 0.5, 50.0, 0.0)
HEAD = StageCosts.of(15.0, 15.0, 15.0, 900.0, 300.0)
PIECES = Pieces(LAYER, EMBEDDING, HEAD, 3.0)


def max_busy_us(pieces: Pieces, layers: tuple[int, ...], placement: Placement) -> float:
    return pieces.costs(layers).busy_us(placement, max(placement) + 1, 1)


def test_expensive_head_moves_layers_off_the_outer_stages() -> None:
    # The head costs as much as 1.5 layers.
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
def test_balanced_split_minimizes_the_busiest_device(
    placement: Placement, num_layers: int, embedding: float, head: float
) -> None:
    ends = (EMBEDDING.times(embedding), HEAD.times(head / 20))
    pieces = Pieces(LAYER, *ends, 0.0)
    balanced = pieces.balanced(num_layers, placement)
    assert sum(balanced) == num_layers
    assert all(balanced[1:-1])
    splits = [
        layers
        for layers in itertools.product(range(num_layers + 1), repeat=len(placement))
        if sum(layers) == num_layers and all(layers[1:-1])
    ]
    best = min(max_busy_us(pieces, layers, placement) for layers in splits)
    # An outer stage without layers counts as LEAST layers.
    assert max_busy_us(pieces, balanced, placement) <= best + 0.01 * LAYER.total_us


@given(
    st.sampled_from([linear(3), looping(2, 2), v_shape(2), v_shape(3)]),
    st.lists(st.integers(1, 4), min_size=6, max_size=6),
    st.floats(0, 4),
    st.floats(0, 4),
    st.floats(0.3, 1.5),
)
def test_no_move_brings_a_split_closer_to_the_limit(
    placement: Placement, counts: list[int], embedding: float, head: float, limit_share: float
) -> None:
    pieces = Pieces(LAYER, EMBEDDING.times(embedding), HEAD.times(head), 0.0)
    layers, num_devices = tuple(counts[: len(placement)]), max(placement) + 1

    def largest_need(split: Sequence[int]) -> float:
        return max(min_memory(pieces.costs(split), placement, num_devices))

    limit = limit_share * largest_need(layers)
    fitting = fitting_layers(pieces, layers, placement, limit)
    assert sum(fitting) == sum(layers)
    for source, target in itertools.permutations(range(len(placement)), 2):
        moved = [n - (s == source) + (s == target) for s, n in enumerate(fitting)]
        if placement[source] != placement[target] and all(moved[1:-1]) and min(moved) >= 0:
            assert max(limit, largest_need(moved)) >= largest_need(fitting) * (1 - 1e-9)
    assert fitting == layers or limit_share < 1


def test_too_few_layers_to_balance() -> None:
    with pytest.raises(ScheduleError, match="3 layers are too few for 8 stages: .* at least 6"):
        PIECES.balanced(3, v_shape(4))


def test_layer_costs_are_recovered_from_measured_stages() -> None:
    layers = (1, 3, 2, 4, 2, 2, 2, 0)
    measured = PIECES.costs(layers)
    assert measured.layers == layers
    fitted = Pieces.of(measured, layers)
    for fitted_piece, expected_piece in zip(
        (fitted.layer, fitted.first, fitted.last), (LAYER, EMBEDDING, HEAD), strict=True
    ):
        for amount in fitted_piece.amounts | expected_piece.amounts:
            assert fitted_piece[amount] == pytest.approx(expected_piece[amount])
    assert fitted.send_us == 3.0
    assert fitted.costs((2,) * 8).forward_us == pytest.approx(PIECES.costs((2,) * 8).forward_us)


def test_layer_costs_are_recovered_from_two_stages() -> None:
    fitted = Pieces.of(PIECES.costs((2, 2)), (2, 2))
    # The embedding cannot be separated from the layers of its stage.
    assert fitted.layer[Kind.F.time] == pytest.approx(10.5)
    assert fitted.last[Kind.F.time] == pytest.approx(14)


def test_coarser_stages_sum_their_layers() -> None:
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
def test_indivisible_layers_are_rejected_with_advice(num_layers: int, advice: str) -> None:
    with pytest.raises(ScheduleError) as error:
        even_layers(num_layers, v_shape(4))
    assert str(error.value) == (
        f"{num_layers} layers do not divide among 8 stages (4 devices with 2 each): give "
        f"a multiple of 8{advice}"
    )
    if "auto" in advice:
        assert sum(PIECES.balanced(num_layers, v_shape(4))) == num_layers


def test_head_cost_in_layers_from_gemms() -> None:
    # Model 9.6B of the paper: hidden size 4096; one layer has 12 h^2 weights.
    widths = Widths(4096, 4096, 2 * 4096, 4 * 4096, False, 0, 12 * 4096)
    assert widths.head_in_layers == pytest.approx(1.0)
    estimated = Pieces.estimated(2.0, 4.0)
    assert estimated.costs((4, 4, 4, 2)).forward_us == (1.0, 1.0, 1.0, 1.0)
    assert estimated.costs((4, 4, 4, 2)).held_after_forward_bytes == (1.0, 1.0, 1.0, 0.5)


def test_offload_costs_scale_with_layers() -> None:
    layers = (1, 3, 2, 2)
    stage_costs = with_copies(PIECES.costs(layers), 0.5)
    pieces = Pieces.of(stage_costs, layers)
    rebuilt = pieces.costs(layers)
    assert rebuilt.copies
    assert rebuilt.held_after_forward_bytes == pytest.approx(stage_costs.held_after_forward_bytes)
    assert rebuilt.extra_amounts.keys() == stage_costs.extra_amounts.keys()
    for amount, expected in stage_costs.extra_amounts.items():
        assert rebuilt.extra_amounts[amount] == pytest.approx(expected)
    moved = pieces.costs((2, 2, 2, 2))
    copied_us = moved.extra_amounts[COPY_OUT.time]
    assert copied_us[1] == pytest.approx(copied_us[2])
    assert copied_us[1] == pytest.approx(stage_costs.extra_amounts[COPY_OUT.time][1] * 2 / 3)
