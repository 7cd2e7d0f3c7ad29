"""Counted ranks, and what of them depends on where they run."""

import pytest

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import Pieces
from megatron_vshape.core.model.pieces import Piece
from megatron_vshape.mcore.layout.sizes import layers_with_experts
from megatron_vshape.rehearsal.flags import read_command
from megatron_vshape.rehearsal.shapes import Counted, least_of, of_unlike_layers
from megatron_vshape.rehearsal.step_time import Rates
from megatron_vshape.rehearsal.work import Work

EXPERTS = read_command(
    """pretrain_gpt.py --num-layers 16 --num-attention-heads 8 --num-experts 8 --micro-batch-size 2
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2
    --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --global-batch-size 32
    --recompute-granularity full --num-layers-per-virtual-pipeline-stage 2""".split()
)


def test_a_shape_is_counted_in_the_same_world_whatever_its_pipeline_and_replicas() -> None:
    few, sizes = least_of(EXPERTS)
    assert few.number("--num-layers", 0) == 8
    assert (sizes.pipeline, sizes.world, sizes.replicas) == (4, 32, 2)
    assert not few.has("--num-layers-per-virtual-pipeline-stage")
    longer = EXPERTS.having(pipeline_model_parallel_size=8, num_layers=64, global_batch_size=512)
    assert least_of(longer)[1] == sizes


def test_a_stage_of_a_pattern_has_all_its_symbols() -> None:
    flags = "--pipeline-model-parallel-size 4 --hidden-size 64 --num-attention-heads 4 --num-layers"
    command = read_command(
        ["pretrain_hybrid.py", *flags.split(), "8", "--hybrid-layer-pattern", "MMM*|MM-M/*-"]
    )
    few, _ = least_of(command)
    assert few.pattern == "|".join(["MMM*M-"] * 8) + "/*-"  # in their order
    assert not few.has("--num-layers")
    nothing = Piece(0.0, 0.0, 0.0, 0.0, 0.0)
    layer = Piece(*(8.0,) * 5)
    counted = Counted(Pieces(layer, nothing, nothing, 0.0), 0.0, 0.0, Rates(), 8.0, 0.0)
    priced = of_unlike_layers(counted, command, 4)
    stage = priced.pieces.costs((1, 1, 1, 1, 1, 1, 1, 1)).forward_us
    mamba, attention, mlp = stage[0], stage[3], stage[6]
    assert 4 * mamba + attention + mlp == pytest.approx(8)
    assert mlp / attention == pytest.approx(8 / 4)  # without a sequence, as their weights
    assert priced.layer_flops == pytest.approx(attention + mlp)  # a layer of a GPT


@pytest.mark.parametrize(
    ("frequency", "dense"),
    [
        ("1", []),
        ("4", [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15]),
        ("([0]*3+[1]*13)", [0, 1, 2]),
        ("([1]*3+[0])*4", [3, 7, 11, 15]),
    ],
)
def test_dense_layers_are_read_as_megatron_reads_them(frequency: str, dense: list[int]) -> None:
    layers = layers_with_experts(EXPERTS.having(moe_layer_freq=frequency).option)
    assert [layer for layer, has in enumerate(layers) if not has] == dense


@pytest.mark.parametrize("frequency", ["__import__('os')", "(1"])
def test_an_expression_for_moe_layers_that_is_no_list_is_rejected(frequency: str) -> None:
    with pytest.raises(ScheduleError, match=r"--moe-layer-freq .* give an integer, or lists"):
        layers_with_experts(EXPERTS.having(moe_layer_freq=frequency).option)


@pytest.mark.parametrize(("sharded", "state"), [(False, 1.0), (True, 49152 / 55705.6)])
def test_dense_layers_of_a_model_with_experts_have_costs_of_their_own(
    sharded: bool, state: float
) -> None:
    """They were estimated as MoE layers: a rank with only dense ones had twice its memory."""
    command = EXPERTS.having(
        hidden_size=64,
        ffn_hidden_size=256,
        moe_ffn_hidden_size=64,
        moe_layer_freq="([0]*3+[1]*13)",
        use_distributed_optimizer=sharded or None,
    )
    layer, nothing = Piece(*(8.0,) * 5), Piece(0.0, 0.0, 0.0, 0.0, 0.0)
    counted = Counted(Pieces(layer, nothing, nothing, 0.0), 0.0, 0.0, Rates(), 8.0, 0.0)
    shares = of_unlike_layers(counted, command, 32).pieces.shares
    assert shares[3:] == ((1.0, 1.0, 1.0),) * 13
    (dense,) = {*shares[:3]}
    assert dense.time == 1.5  # 4 h^2 of attention and 8 h^2, beside 4 h^2 of two experts
    assert dense.held == 1.0  # full recomputation keeps the input of any layer
    # Two experts per rank without tensor parallelism, whose optimizer 4 ranks share, not 8.
    assert dense.state == pytest.approx(state)
    every = of_unlike_layers(counted, command.having(moe_layer_freq=1), 32).pieces
    assert every.shares == ()


def test_what_a_step_has_once_is_spread_over_replicas() -> None:
    tensor, data = ("all_gather", "TENSOR", 8, 8), ("reduce_scatter", "DATA_PARALLEL", 2, 9)
    work = Work(optimizer_bytes=16.0, exchanges={tensor: [4, 8.0], data: [1, 32.0]})
    four = work.spread(4.0, is_sharded=True)
    assert four.optimizer_bytes == 4.0
    assert four.exchanges == {
        tensor: [4, 8.0],
        ("reduce_scatter", "DATA_PARALLEL", 8, 57): [1, 32.0],
    }
    assert work.spread(4.0, is_sharded=False).optimizer_bytes == 16.0
    assert Work.of(four.plain()) == four
