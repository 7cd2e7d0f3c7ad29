"""Which shapes are looked at, and what of a counted one depends on where it runs."""

from argparse import Namespace

import pytest

from megatron_vshape import verify
from megatron_vshape.cli.advise import _Advice
from megatron_vshape.core.model.layers import Pieces
from megatron_vshape.core.model.pieces import Piece
from megatron_vshape.rehearsal.counted import both_backwards
from megatron_vshape.rehearsal.flags import read_command, sizes_of
from megatron_vshape.rehearsal.gpus import GPUS
from megatron_vshape.rehearsal.shapes import Counted, least_of, of_pattern, shape_of, shapes_beside
from megatron_vshape.rehearsal.step_time import Rates
from megatron_vshape.rehearsal.work import Work

EXPERTS = read_command(
    """pretrain_gpt.py --num-layers 16 --num-attention-heads 8 --num-experts 8 --micro-batch-size 2
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2
    --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --global-batch-size 32
    --recompute-granularity full --num-layers-per-virtual-pipeline-stage 2""".split()
)


def test_every_size_is_a_candidate_unless_it_is_kept() -> None:
    own = shape_of(EXPERTS)
    assert own.told() == "TP 2 PP 2 CP 2 EP 4 microbatch 2, full recompute"
    shapes = dict(shapes_beside(EXPERTS, 32, [], 16))
    fitting = [shape for shape, why in shapes.items() if not why]
    assert {shape.experts for shape in fitting} == {2, 4, 8}
    assert {shape.context for shape in fitting} >= {1, 2, 4}
    assert {shape.microbatch for shape in fitting} == {1, 2, 4}
    assert {shape.recompute for shape in shapes} == {"none"}
    selective = EXPERTS.having(recompute_granularity="selective")
    both = [shape for shape, _ in shapes_beside(selective, 32, [], 16) if shape.recompute != "none"]
    assert [(shape.microbatch, shape.tensor) for shape in both] == [(2, 1), (4, 2)]
    kept = shapes_beside(EXPERTS, 32, ["ep", "cp", "microbatch", "recompute"], 16)
    for shape, _ in kept:
        assert (shape.experts, shape.context, shape.microbatch) == (4, 2, 2)
        assert shape.recompute == "full"
    command = fitting[-1].command(EXPERTS)
    assert shape_of(command) == fitting[-1]


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
    assert few.pattern == "|".join(["MMMM*-"] * 8) + "/*-"
    assert not few.has("--num-layers")
    nothing = Piece(0.0, 0.0, 0.0, 0.0, 0.0)
    layer = Piece(*(8.0,) * 5)
    counted = Counted(Pieces(layer, nothing, nothing, 0.0), 0.0, 0.0, Rates(), 8.0, 0.0)
    priced = of_pattern(counted, command)
    stage = priced.pieces.costs((1, 1, 1, 1, 1, 1, 1, 1)).forward_us
    mamba, attention, mlp = stage[0], stage[3], stage[6]
    assert 4 * mamba + attention + mlp == pytest.approx(8)
    assert mlp / attention == pytest.approx(8 / 4)  # without a sequence, as their weights
    assert priced.layer_flops == pytest.approx(attention + mlp)  # a layer of a GPT


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


def test_the_schedule_that_counts_can_run() -> None:
    schedule = both_backwards(4)
    verify(schedule)
    kinds = {str(work.kind) for row in schedule.order for work in row}
    assert kinds == {"F", "B", "W", "BW"}


def test_stock_megatron_may_deal_layers_out_by_their_work() -> None:
    """An output layer of four layers makes the last of even ranks the one that all wait for."""
    flags = "--num-layers 36 --pipeline-model-parallel-size 4 --global-batch-size 32"
    command = read_command(["pretrain_gpt.py", *flags.split(), "--micro-batch-size", "1"])
    own, layer = shape_of(command), Piece(1.0, 1.0, 1.0, 1.0, 0.0)
    advice = _Advice(command, Namespace(headroom=None), 4, GPUS["h100"], 36)
    head = Piece(4.0, 4.0, 4.0, 0.0, 0.0)
    pieces = Pieces(layer, Piece(0.0, 0.0, 0.0, 0.0, 0.0), head, 0.0)
    advice.counted[own], advice.sizes[own] = (
        Counted(pieces, 0.0, 0.0, Rates(), 1.0, 0.0),
        sizes_of(command, 4),
    )
    lines = {(line.name, line.is_even): line for line in advice._stock(own)}
    even, dealt = lines["1f1b", True], lines["1f1b", False]
    assert even.known.costs.layers == (9, 9, 9, 9)
    assert dealt.known.costs.layers == (10, 10, 10, 6)
    assert dealt.step_s < 0.8 * even.step_s
    layout = "Et*10|(t*10|)*2t*6L"
    assert dealt.changes_megatron(command) == [f"--pipeline-model-parallel-layout '{layout}'"]
    # Megatron refuses virtual stages that are told twice.
    assert len(lines["interleaved-1f1b:3", False].changes_megatron(command)) == 1
    assert even.changes_megatron(command) == ["no virtual stages (1F1B)"]
    advice.command = command.having(pipeline_model_parallel_layout=layout)
    assert advice._today(own).step_s == dealt.step_s
    assert even.changes_megatron(advice.command)[0] == "remove --pipeline-model-parallel-layout"
    advice.limit = 38.0  # of 40 that a first rank with ten layers needs
    found = [line.known.costs.layers for line in advice._stock(own) if line.name == "1f1b"]
    assert found == [(9, 9, 9, 9), (10, 10, 10, 6), (9, 10, 10, 7)]
