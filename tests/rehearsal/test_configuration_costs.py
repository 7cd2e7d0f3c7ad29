"""Costs from counted ranks, and their dependence on the pipeline and on the links."""

import pytest
from rehearsal.reports import pass_of, report_of

from megatron_vshape.core.model.amounts import STATE_BYTES
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.pieces import Pieces, under_megatron
from megatron_vshape.core.model.placement import v_shape
from megatron_vshape.core.model.stage_costs import StageCosts
from megatron_vshape.mcore.layout.sizes import layers_with_experts
from megatron_vshape.rehearsal.command import Command
from megatron_vshape.rehearsal.command_reader import read_command
from megatron_vshape.rehearsal.configuration_costs import (
    PIPELINE,
    CountedCosts,
    Parameters,
    costs_of_counted_ranks,
    counted_ranks,
    smallest_command,
    with_layer_kinds,
)
from megatron_vshape.rehearsal.costs_from_reports import counted_costs
from megatron_vshape.rehearsal.gpus import GPUS
from megatron_vshape.rehearsal.rank_report import RankReport
from megatron_vshape.rehearsal.step_time import Rates, send_us
from megatron_vshape.rehearsal.work import Work

EXPERTS = read_command(
    """pretrain_gpt.py --num-layers 16 --num-attention-heads 8 --num-experts 8 --micro-batch-size 2
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2
    --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --global-batch-size 32
    --recompute-granularity full --num-layers-per-virtual-pipeline-stage 2""".split()
)


def test_pipeline_size_and_replicas_do_not_change_the_counted_world() -> None:
    few, sizes = smallest_command(EXPERTS)
    assert few.number("--num-layers", 0) == 8
    assert (sizes.pipeline, sizes.world, sizes.replicas) == (4, 32, 2)
    assert not few.has("--num-layers-per-virtual-pipeline-stage")
    longer = EXPERTS.having(pipeline_model_parallel_size=8, num_layers=64, global_batch_size=512)
    assert smallest_command(longer)[1] == sizes


@pytest.mark.parametrize(
    ("frequency", "layers", "counted_frequency"),
    [
        ("4", 32, "4"),
        ("([1]*2+[0]+[1]*3+[0]+[1]*9)", 32, "4"),  # at most four layers
        ("([0]*12+[1]*4)", 16, "2"),
        ("[1]*16", 8, "[1]*8"),
    ],
)
def test_a_stage_has_both_kinds_of_attention(
    frequency: str, layers: int, counted_frequency: str
) -> None:
    few, _ = smallest_command(EXPERTS.having(linear_attention_freq=frequency))
    assert few.number("--num-layers", 0) == layers
    assert few.value("--linear-attention-freq") == counted_frequency


def test_a_stage_of_a_pattern_has_all_its_symbols() -> None:
    flags = "--pipeline-model-parallel-size 4 --hidden-size 64 --num-attention-heads 4 --num-layers"
    command = read_command(
        ["pretrain_hybrid.py", *flags.split(), "8", "--hybrid-layer-pattern", "MMM*|MM-M/*-"]
    )
    few, _ = smallest_command(command)
    assert few.pattern == "|".join(["MMM*M-"] * 8) + "/*-"  # in their order
    assert not few.has("--num-layers")
    nothing = StageCosts.of(0, 0, 0)
    layer = StageCosts.of(*(8.0,) * 5)
    layer_costs = CountedCosts(Pieces(layer, nothing, nothing, 0.0), 0.0, 0.0, Rates(), 8.0, 0.0)
    costs = with_layer_kinds(layer_costs, command, 4)
    stage = costs.pieces.costs((1, 1, 1, 1, 1, 1, 1, 1)).forward_us
    mamba, attention, mlp = stage[0], stage[3], stage[6]
    assert 4 * mamba + attention + mlp == pytest.approx(8)
    assert mlp / attention == pytest.approx(8 / 4)  # without a sequence, as their weights
    assert costs.layer_flops == pytest.approx(attention + mlp)  # a layer of a GPT


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
    assert [layer for layer, has_experts in enumerate(layers) if not has_experts] == dense


def test_options_in_samples_are_removed_together() -> None:
    """Megatron rejects a learning rate in samples without --train-samples."""
    options = {f"{name}_samples": 9 for name in ("train", "lr_decay", "lr_warmup")}
    few, _ = smallest_command(EXPERTS.having(**options))
    assert not any(flag.endswith("-samples") for flag in few.flags)


@pytest.mark.parametrize("frequency", ["__import__('os')", "(1"])
def test_an_expression_for_moe_layers_that_is_no_list_is_rejected(frequency: str) -> None:
    with pytest.raises(ScheduleError, match=r"--moe-layer-freq .* give an integer, or lists"):
        layers_with_experts(EXPERTS.having(moe_layer_freq=frequency).option)


def test_dense_layers_of_a_model_with_experts_are_counted_too() -> None:
    """They were estimated by their sizes: a rank with only dense ones needed 9% more memory."""
    command = EXPERTS.having(moe_layer_freq="([0]*3+[1]*13)")
    few, _ = smallest_command(command)
    assert counted_ranks(few) == range(3)
    dense = [not has_experts for has_experts in layers_with_experts(few.option)]
    assert dense == [rank == 2 for rank in v_shape(PIPELINE)]
    every, _ = smallest_command(command.having(moe_layer_freq=1))
    assert counted_ranks(every) == range(2)

    layer, nothing = StageCosts.of(*(8.0,) * 5, state_bytes=8.0), StageCosts.of(0, 0, 0)
    pieces = Pieces(layer, nothing, nothing, 0.0)
    one = StageCosts.of(4.0, 4.0, 4.0, 24.0, 8.0, state_bytes=16.0, backward_work_bytes=7.0)
    layer_costs = CountedCosts(pieces, 0.0, 0.0, Rates(), 8.0, 0.0, dense=one)
    costs = with_layer_kinds(layer_costs, command, 32).pieces.costs((3, 13))
    assert costs.forward_us == (3 * 4.0, 13 * 8.0)
    assert costs.held_after_forward_bytes == (3 * 24.0, 13 * 8.0)
    assert costs.by_stage.get(STATE_BYTES) == (3 * 16.0, 13 * 8.0)
    assert costs.lists()["backward_work_bytes"] == (7.0, 0.0)


MESSAGE = 8


def rank(
    stage: int, always: int, parameters: tuple[int, int] = (1, 1), message_bytes: int = MESSAGE
) -> RankReport:
    """Return the report of a counted rank with 2000 bytes of states and 40 retained in layers."""
    amounts = {"F": (100, 130), "BW": (-90, 20), "B": (-60, 30), "W": (-40, 0)}
    kinds = [
        pass_of(kind, chunk=chunk, adds_bytes=adds, meanwhile_bytes=meanwhile)
        for kind, (adds, meanwhile) in amounts.items()
        for chunk in (0, 1)
    ]
    parts = {"weights": 2000, "gradients": 0, "optimizer": 0}
    return report_of(
        stage=stage,
        kinds=kinds,
        held_parts=parts,
        held_bytes=2000 + always + 40,
        replaced_bytes=40,
        chunk_parameters=parameters,
        chunk_layers=[1, 1],
        chunk_dummy_bytes=[0, 0],
        message_bytes=message_bytes,
    )


def test_messages_and_replaced_memory_are_in_the_costs() -> None:
    """Each was missing: up to 1.3% of the peak of a hybrid model, 1.1% with full recompute."""
    costs = counted_costs((rank(0, 12), rank(1, 5)), GPUS["h100"], 4, 1)
    # Of the first stage, the backward frees all but the output, which is sent.
    assert costs.held_after_forward_bytes == (90, *(90 + MESSAGE,) * 7)
    works = costs.lists()
    assert works["forward_work_bytes"] == (130 - 90, *(130 - 90,) * 7)
    assert works["whole_work_bytes"] == (*(20 + MESSAGE,) * 7, 20)
    # A layer keeps 20 bytes until its next forward, but the others have freed their inputs by then.
    assert costs.device_bytes == 5
    assert costs.by_stage.get(STATE_BYTES) == (
        *(1000 + 20 - MESSAGE,) * 7,
        1000 + 20 - MESSAGE + 12 - 5,
    )
    megatron_costs = under_megatron(costs, MESSAGE).lists()
    assert megatron_costs["forward_work_bytes"] == (40, *(40 + 2 * MESSAGE,) * 7)
    assert megatron_costs["whole_work_bytes"] == (28, *(28 + MESSAGE,) * 6, 28)


def test_parameters_are_counted_without_the_inputs_that_layers_keep() -> None:
    costs = costs_of_counted_ranks((rank(0, 12, (5, 4)), rank(1, 5)), EXPERTS, GPUS["h100"], 32, 4)
    assert costs.parameters == Parameters(1.0, 4.0, 3.0)
    assert costs.state_bytes_per_parameter == 1000
    assert costs.pieces.layer[STATE_BYTES] == 1000 + 20 - MESSAGE
    linear = EXPERTS.having(linear_attention_freq=4)  # four layers per stage
    costs = costs_of_counted_ranks((rank(0, 12, (5, 4)), rank(1, 5)), linear, GPUS["h100"], 32, 4)
    assert costs.parameters == Parameters(0.25, 4.0, 3.0)
    assert costs.pieces.layer[STATE_BYTES] == (1000 + 20 - MESSAGE) / 4


@pytest.mark.parametrize(("order", "distance"), [((), 8), (("--use-tp-pp-dp-mapping",), 2)])
def test_messages_between_neighboring_ranks_of_a_node_use_its_fast_links(
    order: tuple[str, ...], distance: int
) -> None:
    """The rank order decides: they used the network even if stages are TP x CP ranks apart."""
    flags = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "4", *order)
    command, gpu, size = Command("pretrain_gpt.py", flags), GPUS["h100"], 2**24
    ranks = [rank(stage, 5, message_bytes=size) for stage in (0, 1)]
    pieces = costs_of_counted_ranks(ranks, command, gpu, 32, 4).pieces
    assert pieces.send_us == send_us(size, gpu, distance)
    assert send_us(size, gpu, 8) > 4 * send_us(size, gpu, 2)


def test_work_once_per_step_is_spread_over_replicas() -> None:
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
