"""CUDA graphs of TE and of Megatron, captured and replayed by graphs_on_cpu.

A graph's memory is used again by the next, as on a GPU. A message or a weight job that still
referred to it would change the results of the same run without graphs.
"""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mcore.farm import Ended, Farm
from mcore.graphs_on_cpu import POOL_ID, PRINTED
from mcore.parity import UNTIED, assert_same_bits
from mcore.test_te_training import EXPERTS, LATENT, MODELS
from megatron import core
from megatron.core.transformer import cuda_graphs
from packaging.version import Version
from torch import nn

from megatron_vshape.core.model.kinds import Kind
from megatron_vshape.core.model.placement import stages_of
from megatron_vshape.core.paper.catalogue import NAMES
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.refusals import UnsupportedError, check_split_graphs
from megatron_vshape.mcore.setup.configure import _splits_graphs
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.setup.run_config import ScheduleChoice
from megatron_vshape.mcore.split.graphs import (
    Capture,
    ChunkPass,
    capture_late,
    capture_order,
    cover_whole_layers,
    covered,
    layer_order,
    passes_of,
    replayed,
    with_last_split,
)
from megatron_vshape.mcore.split.te_layers import JobStore, StoreError
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
    careless = te_farm.run(2, *flags, plugin=PLUGIN, argument="messages")
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


EIGHT_RANKS = (
    "--pipeline-model-parallel-size 4 --num-layers 16 --use-distributed-optimizer "
    "--overlap-grad-reduce"
)
TWO = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"
SHARED_SEQUENCE = f"{TWO} --sequence-parallel"
RECOMPUTES = MODELS["selective recompute"]


class Trained:
    """Trains with Transformer Engine's Python, every set of flags without graphs once."""

    def __init__(self, farm: Farm) -> None:
        self._farm = farm
        self._plain: dict[tuple[Any, ...], Ended] = {}

    def __call__(
        self,
        schedule: str,
        flags_text: str = "",
        *,
        modules: str = "",
        ranks: int = 4,
        fused: bool = False,
        argument: str | None = None,
    ) -> tuple[Ended, Ended]:
        """Return a run with graphs of W, and the same without any graphs."""
        flags = f"--pipeline-schedule {schedule} {TE} {MODEL} {flags_text}".split()
        scope = [MODULES, *modules.split()] if modules else []
        without = ("--no-gradient-accumulation-fusion",) if fused else ()
        graphs = [*GRAPHS.split(), *scope]
        package_run = self._farm.run(
            ranks, *flags, *graphs, plugin=PLUGIN, without=without, argument=argument
        )
        key = schedule, flags_text, ranks, fused
        if key not in self._plain:
            self._plain[key] = self._farm.run(ranks, *flags, without=without).check()
        return package_run, self._plain[key]


@pytest.fixture(scope="module")
def trained(te_farm: Farm) -> Trained:
    return Trained(te_farm)


class TestTraining:
    @pytest.mark.parametrize(
        ("schedule", "flags_text", "options"),
        [
            ("v-half", SMALL, {"ranks": 2}),
            ("v-half", f"{SHARED_SEQUENCE} {SMALL}", {}),
            pytest.param("v-half", "", {}, marks=slow),
            pytest.param("v-half", TWO, {}, marks=slow),
            pytest.param("v-half", "", {"fused": True}, marks=slow),
            pytest.param("v-zb", "", {"modules": "attn"}, marks=slow),
            pytest.param("v-min", "", {"modules": "mlp"}, marks=slow),
            pytest.param("zb-h1", "", {}, marks=slow),
            pytest.param("zb-h2", "", {"modules": "mlp"}, marks=slow),
            pytest.param("1f1b-v", "", {}, marks=slow),
            pytest.param("v-half", EIGHT_RANKS, {"ranks": 8, "fused": True}, marks=slow),
        ],
    )
    def test_graph_replays_equal_passes(
        self, trained: Trained, schedule: str, flags_text: str, options: dict[str, Any]
    ) -> None:
        package_run, plain = trained(schedule, flags_text, **options)
        assert_same_bits(package_run.check(), plain)
        assert all(-1.5 in order for order in captured_orders(package_run))
        assert "a CUDA graph replays them with B" not in package_run.output[0]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("flags_text", "modules"),
        [
            (EXPERTS, "attn moe_router moe_preprocess"),
            (f"{EXPERTS} --moe-shared-expert-intermediate-size 32", "moe_router moe_preprocess"),
            (LATENT, "attn"),
            ("--mtp-num-layers 1", ""),
            ("--hybrid-layer-pattern *-*-*-*-", ""),
            (RECOMPUTES, ""),
        ],
    )
    def test_other_models(self, trained: Trained, flags_text: str, modules: str) -> None:
        package_run, plain = trained("v-half", flags_text, modules=modules)
        assert_same_bits(package_run.check(), plain)
        assert all(
            any(signed_chunk != int(signed_chunk) for signed_chunk in order)
            for order in captured_orders(package_run)
        )


class TestHazards:
    """Hazards that change results or end the run if the code ignores them."""

    def test_a_w_that_reads_static_tensors_ends_the_run(self, trained: Trained) -> None:
        package_run, _ = trained("v-half", SMALL, ranks=2, argument="static tensors")
        assert package_run.codes != [0] * 2
        assert any("may be overwritten before W" in text for text in package_run.output)

    @pytest.mark.slow
    def test_replays_in_another_order_than_captured_end_the_run(self, trained: Trained) -> None:
        package_run, _ = trained("v-half", EIGHT_RANKS, argument="last whole", ranks=8, fused=True)
        assert package_run.codes != [0] * 8
        assert any("CUDA graphs were captured for BW" in text for text in package_run.output)


def _rows(name: str, ranks: int, microbatches: int) -> list[tuple[int, list[ChunkPass]]]:
    """Return of every rank of a schedule how many chunks and which passes it has."""
    planner = Planner(ScheduleChoice(ranks, name))
    program = planner.plan_step(microbatches).program
    stages = stages_of(planner.choice.placement, ranks)
    return [
        (len(rank_stages), passes_of(program, rank, rank_stages))
        for rank, rank_stages in enumerate(stages)
    ]


class TestOrder:
    @pytest.mark.parametrize("splits_last", [False, True])
    @pytest.mark.parametrize("name", NAMES)
    def test_every_layer_and_microbatch_has_f_then_b_then_w(
        self, name: str, splits_last: bool
    ) -> None:
        for chunks, passes in _rows(name, 4, 8):
            split = with_last_split(passes) if splits_last else passes
            order = layer_order(split, [[True, True]] * chunks, 8)
            place = {chunk_pass: index for index, chunk_pass in enumerate(order)}
            assert len(place) == len(order) == 3 * 2 * chunks * 8
            for number in range(1, 2 * chunks * 8 + 1):
                assert place[number] < place[-number] < place[-number - 0.5]

    def test_passes_become_layers(self) -> None:
        f, b, w, bw = Kind.F, Kind.B, Kind.W, Kind.BW
        passes = [
            ChunkPass(kind, 0, microbatch)
            for kind, microbatch in (
                (f, 0),
                (f, 1),
                (b, 0),
                (b, 1),
                (w, 1),
                (f, 2),
                (w, 0),
                (bw, 2),
            )
        ]
        # Three microbatches of two layers; the W of the second comes first.
        start = [1, 2, 3, 4, -2, -1, -4, -3, -4.5, -3.5, 5, 6, -2.5, -1.5]
        assert layer_order(passes, [[True, True]], 3) == [*start, -6, -6.5, -5, -5.5]
        split = layer_order(with_last_split(passes), [[True, True]], 3)
        assert split == [*start, -6, -5, -6.5, -5.5]

    def test_layers_without_linear_layers_have_no_w(self) -> None:
        passes = [ChunkPass(kind, 0, 0) for kind in (Kind.F, Kind.B, Kind.W)]
        order = layer_order(passes, [[False, True]], 1)
        assert order == [1, 2, -2, -1, -2.5]

    def test_chunks_are_numbered_one_after_the_other(self) -> None:
        passes = [ChunkPass(Kind.F, 1, 0), ChunkPass(Kind.F, 0, 0)]
        assert layer_order(passes, [[True] * 3, [True] * 2], 1) == [4, 5, 1, 2, 3]


class _Store(JobStore):
    def __init__(self) -> None:
        """Be one of ours, of no layer."""


class _Linear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.wgrad_store = _Store()
        self.weight.main_grad = self.bias.main_grad = torch.zeros(2)


class TestCapture:
    @pytest.mark.parametrize("called", [(0, 1), (1, 0)])
    def test_jobs_of_a_w_run_in_the_order_of_b_whichever_layer_is_called_first(
        self, monkeypatch: pytest.MonkeyPatch, called: tuple[int, ...]
    ) -> None:
        layer, ran = nn.Sequential(_Linear(), _Linear()), list[int]()
        passes = [ChunkPass(kind, 0, 0) for kind in (Kind.F, Kind.B, Kind.W)]
        capture = Capture([[layer]], {*layer.modules()}, passes)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with capture.active(StepState()):
            capture._begin_backward((layer, 0), set(), layer(torch.ones(2)))
            for index in (1, 0):
                capture.put(layer[index], GatheringJob(partial(ran.append, index), [], []), [])
            for index in called:
                layer[index].backward_dw()
        assert ran == [1, 0]
        assert not hasattr(layer[0], "backward_dw")

    def test_jobs_keep_copies_of_static_tensors_alone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layer = nn.Sequential(_Linear())
        capture = Capture([[layer]], {*layer.modules()}, [])
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        static, non_static, gradient = torch.ones(2), torch.ones(4), torch.ones(2)
        job = GatheringJob(lambda *unused: None, [static[:1], non_static, [gradient]], [None] * 3)
        with capture.active(StepState()):
            capture._begin_backward((layer, 0), {static.data_ptr()}, gradient)
            capture.put(layer[0], job, [])
        static.zero_()
        gradient.zero_()
        assert [tensor.tolist() for tensor in (job.tensors[0], *job.tensors[2])] == [[1], [1, 1]]
        assert job.tensors[1] is non_static
        assert capture.copies == 2
        assert capture.peak_retained_bytes == 4 + 16 + 8

    def test_a_parameter_without_main_grad(self) -> None:
        layer = nn.Sequential(_Linear())
        del layer[0].weight.main_grad
        capture = Capture([[layer]], {*layer.modules()}, [])
        with pytest.raises(StoreError, match="a parameter has none"):
            capture.make(lambda *unused, **options: None, (layer,), [()])

    def test_a_frozen_layer_has_no_w(self) -> None:
        layer = nn.Sequential(_Linear().requires_grad_(False), _Linear())
        capture = Capture([[layer]], {*layer.modules()}, [])
        assert [capture.splits(linear) for linear in layer] == [False, True]


class _Graph:
    """A graphed callable whose W counts how often it is replayed."""

    def __init__(self) -> None:
        self.weights_run = 0

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 2, x.detach()

    def backward_dw(self) -> None:
        self.weights_run += 1

    def reset(self) -> None: ...


class TestReplays:
    def test_b_leaves_w_to_the_schedule(self) -> None:
        state, graph = StepState(), _Graph()
        run = replayed(state, graph, [])
        output, _ = run(torch.ones(2, requires_grad=True))
        with state.jobs.collect("B"):
            output.sum().backward()
        assert graph.weights_run == 0
        state.jobs.run("B")
        assert graph.weights_run == 1

    def test_a_whole_backward_runs_it_at_once(self) -> None:
        graph = _Graph()
        output, _ = replayed(StepState(), graph, [])(torch.ones(2, requires_grad=True))
        output.sum().backward()
        assert graph.weights_run == 1

    def test_without_gradients_there_is_no_w(self) -> None:
        graph = _Graph()
        with torch.no_grad():
            replayed(StepState(), graph, [])(torch.ones(2))
        assert graph.weights_run == 0


UNVERIFIED = "equal gradients have not been verified"


@pytest.mark.parametrize(
    ("graph_settings", "said"),
    [
        ({"transformer_impl": "local"}, "--transformer-impl local: Transformer Engine captures"),
        ({"fp4": "e2m1"}, f"--fp4-format: {UNVERIFIED}"),
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, f"--fp8-recipe other than .*: {UNVERIFIED}"),
        ({"tp_comm_overlap": True}, f"--tp-comm-overlap: {UNVERIFIED}"),
        ({"use_transformer_engine_op_fuser": True}, f"op-fuser: {UNVERIFIED}"),
        ({"hybrid_layer_pattern": "M*-|M*-"}, f"Mamba layers: {UNVERIFIED}"),
        ({"num_moe_experts": 8}, "experts in CUDA graphs: their grouped GEMM"),
        ({"num_experts": 8, "cuda_graph_modules": ["attn", "moe"]}, "experts in CUDA graphs"),
    ],
)
def test_unsupported_options_are_rejected(graph_settings: dict[str, object], said: str) -> None:
    options = SimpleNamespace(**{"cuda_graph_impl": "transformer_engine"} | graph_settings)
    with pytest.raises(UnsupportedError, match=f"auto does not work with .*{said}"):
        check_split_graphs(options)


def test_supported_options_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    options = SimpleNamespace(
        cuda_graph_impl="transformer_engine",
        num_experts=8,
        cuda_graph_modules=["attn"],
        fp8="hybrid",
        fp8_recipe="tensorwise",
    )
    check_split_graphs(options)
    monkeypatch.setattr("megatron.core.utils._te_version", Version("2.10.0"))
    with pytest.raises(UnsupportedError, match="Transformer Engine 2.10.0, which captures W right"):
        check_split_graphs(options)


@pytest.mark.parametrize(
    ("graph_settings", "split_graphs", "splits", "said"),
    [
        ({}, "auto", True, ""),
        ({}, "off", False, ""),
        ({"cuda_graph_impl": "none"}, "auto", False, ""),
        ({"fp4": "e2m1"}, "auto", False, "captured layers compute their weight gradients in B"),
    ],
)
def test_reason_for_weight_gradients_in_b_is_logged(
    caplog: pytest.LogCaptureFixture,
    graph_settings: dict[str, object],
    split_graphs: str,
    splits: bool,
    said: str,
) -> None:
    options = SimpleNamespace(**{"cuda_graph_impl": "transformer_engine"} | graph_settings)
    assert _splits_graphs(options, Options(split_graphs=split_graphs)) is splits
    assert bool(said) == bool(caplog.text)
    assert said in caplog.text
