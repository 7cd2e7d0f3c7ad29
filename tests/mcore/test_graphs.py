"""CUDA graphs of TE and of Megatron, captured and replayed by graphs_on_cpu.

A graph's memory is used again by the next, as on a GPU. A message or a weight job that still
referred to it would change the results of the same run without graphs.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from mcore.farm import Ended, Farm
from mcore.graphs_on_cpu import POOL_ID, PRINTED
from mcore.parity import UNTIED, assert_same_bits
from megatron import core
from megatron.core.transformer import cuda_graphs
from torch import nn

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.placement import stages_of
from megatron_vshape.core.paper.catalogue import NAMES
from megatron_vshape.mcore.refusals import UnsupportedError, check_config
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.setup.run_config import ScheduleChoice
from megatron_vshape.mcore.split.graphs import (
    capture_late,
    capture_order,
    cover_whole_layers,
    covered,
)
from megatron_vshape.mcore.step.forward_backward import _check_captured
from megatron_vshape.mcore.step_state import StepState
from megatron_vshape.runtime.graph_memory import GraphMemory
from megatron_vshape.runtime.weight_jobs import GatheringJob

PLUGIN = "graphs_on_cpu"
MODEL = f"--bf16 --train-iters 3 --clip-grad 0 {UNTIED} --eval-iters 1 --eval-interval 2"
SMALL = "--num-layers 4 --global-batch-size 4"
"""Layers and microbatches for two ranks."""
GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 1"


def captured_orders(ended: Ended) -> list[list[int]]:
    """Return in which order every rank's graphs were captured, which each did once."""
    order_texts = [
        [line.removeprefix(PRINTED) for line in text.splitlines() if line.startswith(PRINTED)]
        for text in ended.output
    ]
    assert [len(texts) for texts in order_texts] == [1] * len(order_texts)
    return [json.loads(text) for (text,) in order_texts]


def rows_of(schedule: str, ranks: int, microbatches: int) -> list[list[int]]:
    """Return the rows of the schedule in TE's format."""
    choice = ScheduleChoice(ranks, schedule)
    rank_stages = stages_of(choice.placement, ranks)
    rows = []
    for rank, row in enumerate(Planner(choice).plan_step(microbatches).schedule.order):
        number = {stage: chunk for chunk, stage in enumerate(rank_stages[rank], 1)}
        rows.append([number[work.stage] * SIGNS[work.kind] for work in row if work.kind in SIGNS])
    return rows


SIGNS = {Kind.F: 1, Kind.B: -1, Kind.BW: -1}

MODULES = "--cuda-graph-scope" if core.__version__.startswith("0.17.") else "--cuda-graph-modules"
slow = pytest.mark.slow


@pytest.mark.parametrize("settings", [{"cuda_graph_impl": "local"}, {"enable_cuda_graph": True}])
def test_the_graphs_that_megatron_captures_are_rejected(settings: dict[str, object]) -> None:
    with pytest.raises(UnsupportedError, match="Use --cuda-graph-impl transformer_engine"):
        check_config(SimpleNamespace(**settings))
    disabled = {"cuda_graph_impl": "transformer_engine", "enable_cuda_graph": False}
    check_config(SimpleNamespace(**disabled))


TE = "--transformer-impl transformer_engine --attention-backend unfused"
OPTIONS = f"--pipeline-split-graphs off {TE} {MODEL} {SMALL}"


@pytest.mark.parametrize(
    ("schedule", "modules"),
    [
        ("v-half", ""),
        pytest.param("v-zb", "attn", marks=pytest.mark.slow),
        pytest.param("zb-h1", "mlp", marks=pytest.mark.slow),
    ],
)
def test_graph_replays_equal_passes(te_farm: Farm, schedule: str, modules: str) -> None:
    flags = f"--pipeline-schedule {schedule} {OPTIONS}".split()
    scope = [MODULES, modules] if modules else []
    package_run = te_farm.run(2, *flags, *GRAPHS.split(), *scope, plugin=PLUGIN).check()
    plain = te_farm.run(2, *flags).check()
    assert_same_bits(package_run, plain)
    assert captured_orders(package_run) == rows_of(schedule, 2, 4)
    assert "a CUDA graph replays them with B" in package_run.output[0]


def test_a_message_without_a_copy_is_overwritten(te_farm: Farm) -> None:
    flags = f"--pipeline-schedule v-half {OPTIONS} {GRAPHS}".split()
    careless = te_farm.run(2, *flags, plugin=PLUGIN, given="messages")
    assert any("was overwritten while it was under way" in text for text in careless.output)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_is_the_programs_with_every_microbatch_once(name: str) -> None:
    planner = Planner(ScheduleChoice(4, name))
    program = planner.plan_step(8).program
    for rank, stages in enumerate(stages_of(planner.choice.placement, 4)):
        order = capture_order(program, rank, stages)
        chunks = range(1, len(stages) + 1)
        assert sorted(order) == sorted([*chunks, *(-chunk for chunk in chunks)] * 8)
        assert order == rows_of(name, 4, 8)[rank]
        open_of = dict.fromkeys(chunks, 0)  # F that have no B yet
        for signed_chunk in order:
            open_of[abs(signed_chunk)] += 1 if signed_chunk > 0 else -1
            assert open_of[abs(signed_chunk)] >= 0


def test_stacks_of_layers_are_not_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron asks for its layers alone, though a stack, or a hybrid model, can be captured."""

    class Graphable(nn.Module):
        config = SimpleNamespace(cuda_graph_impl="transformer_engine")

        def _get_submodules_under_cudagraphs(self) -> list[nn.Module]:
            return [self]

    monkeypatch.setattr(cuda_graphs, "_layer_is_graphable", lambda layer, config: True)
    model, layer = Graphable(), Graphable()
    layer.layer_number, layer.linear = 1, nn.Linear(1, 1)
    model.layers, model.output_layer = nn.ModuleList([layer]), nn.Linear(1, 1)
    for module in (model.layers, layer.linear, model.output_layer):
        module.config = SimpleNamespace(cuda_graph_impl="none")
    assert covered([model]) == {layer, layer.linear}


class TestMemory:
    def test_tensors_in_graph_memory_are_copied(self, monkeypatch: pytest.MonkeyPatch) -> None:
        memory, static, outside = GraphMemory(), torch.zeros(8), torch.zeros(8)
        _has_pools(monkeypatch, static)
        assert memory.kept(static) is static  # nothing has been captured
        memory.look()
        copied = memory.kept([static[2:4], [outside, None]])
        static += 1
        assert copied[0].tolist() == [0, 0]
        assert copied[1][0] is outside
        assert copied[1][1] is None

    def test_a_job_keeps_a_copy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        state, static, recorded = StepState(), torch.ones(4), []
        _has_pools(monkeypatch, static)
        state.graph_memory.look()
        with state.jobs.collect("B"):
            state.defer(
                GatheringJob(lambda tensor: recorded.append(tensor.clone()), [static], [None]), []
            )
        static.zero_()  # by the replay that has the memory next
        state.jobs.run("B")
        assert recorded[0].tolist() == [1, 1, 1, 1]


def _has_pools(monkeypatch: pytest.MonkeyPatch, *pools: torch.Tensor) -> None:
    segments = [
        {"address": pool.data_ptr(), "total_size": pool.nbytes, "segment_pool_id": POOL_ID}
        for pool in pools
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)


class TestScope:
    @pytest.mark.parametrize(
        ("options", "covers"),
        [
            ({}, True),
            ({"cuda_graph_modules": ["attn", "mlp"]}, True),
            ({"cuda_graph_scope": "full"}, True),
            ({"cuda_graph_scope": "attn"}, False),
            ({"cuda_graph_modules": ["attn", "mlp"], "num_experts": 8}, False),
            ({"cuda_graph_modules": ["attn", "moe"], "num_moe_experts": 8}, True),
            ({"cuda_graph_modules": ["attn", "moe"], "num_experts": 8, "moe_layer_freq": 2}, False),
            ({"cuda_graph_impl": "none"}, False),
        ],
    )
    def test_covers_layers(self, options: dict[str, object], covers: bool) -> None:
        config = SimpleNamespace(**{"cuda_graph_impl": "transformer_engine"} | options)
        assert cover_whole_layers(config) is covers

    def test_stages_that_are_covered_run_whole_backwards(self) -> None:
        plan = Planner(ScheduleChoice(4, "v-half", whole_stages=frozenset(range(7)))).plan_step(8)
        kinds = {work.kind for row in plan.schedule.order for work in row if work.stage < 7}
        assert kinds == {Kind.F, Kind.BW}
        kinds = {work.kind for row in plan.schedule.order for work in row if work.stage == 7}
        assert Kind.W in kinds


def test_graphs_are_captured_when_the_order_is_the_last() -> None:
    options = SimpleNamespace(cuda_graph_warmup_steps=3)
    capture_late(options, 2)
    assert options.cuda_graph_warmup_steps == 3
    capture_late(options, 9)
    assert options.cuda_graph_warmup_steps == 9


def test_no_other_program_runs_than_the_captured_one() -> None:
    planner = Planner(ScheduleChoice(4, "v-half"))
    captured = planner.plan_step(8).program
    _check_captured(None, captured)
    _check_captured(captured, planner.plan_step(8).program)
    with pytest.raises(ValueError, match="captured for the passes of 8 microbatches in one order"):
        _check_captured(captured, planner.plan_step(12).program)
