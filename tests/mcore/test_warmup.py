"""--pipeline-warmup: first calls of all ranks at the same time, and nothing is left behind."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mcore import test_graphs as graphs
from mcore.conftest import needs_hybrid
from mcore.farm import Ended, Farm
from mcore.parity import FP8, UNTIED, assert_same_bits
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MTPLossLoggingHelper,
)
from torch import Tensor, nn

from megatron_vshape import lower, make
from megatron_vshape.core.program.instructions import Await, Receive, Run
from megatron_vshape.mcore.features.warmup import FEATURE
from megatron_vshape.mcore.features.warmup.step import Snapshot, first_microbatch
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.step import rewind

WARMUP = "--pipeline-warmup"

EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --disable-bias-linear"
)
SHARDED = (
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--ddp-bucket-size 4000"
)
CASES = {
    "dropout, ten steps": "v-half --attention-dropout 0.1 --hidden-dropout 0.1 --train-iters 10",
    "router bias, statistics and auxiliary losses": f"v-zb {EXPERTS}",
    "losses of MTP, loss scale": "v-half --mtp-num-layers 1 --fp16 --initial-loss-scale 65536",
    "vocabulary parallelism": "v-half --pipeline-vocab-parallel",
    "slices": f"v-zb --pipeline-slices 2 --hidden-dropout 0.1 {EXPERTS}",
    "auto": "auto --pipeline-profile-iterations 2:3 --train-iters 8",
    "main gradients and DDP buckets": f"v-half --pipeline-model-parallel-size 2 {SHARDED}",
    "tensor parallelism": (
        "zb-h1 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 "
        "--hidden-dropout 0.1 --sequence-parallel"
    ),
}
"""Runs by the state that they change."""

STEPS = (*"--train-iters 3 --num-layers 4 --global-batch-size 4".split(), UNTIED)


def train(farm: Farm, case: str, *flags: str) -> Ended:
    ranks = 4 if "--pipeline-model-parallel-size" in CASES[case] else 2
    return farm.run(ranks, *STEPS, "--pipeline-schedule", *CASES[case].split(), *flags).check()


@pytest.mark.parametrize("case", CASES)
def test_training_equals_training_without_warmup(farm: Farm, case: str) -> None:
    assert_equal(train(farm, case, WARMUP), train(farm, case))


MAMBA = (
    "v-half --hybrid-layer-pattern M*-MM*-M --mamba-head-dim 16 --mamba-state-dim 8 "
    "--mamba-num-groups 2"
)
GRAPHS = (
    f"v-half {graphs.OPTIONS} --train-iters 4 "
    "--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 1"
)


@needs_hybrid
def test_mamba_layers_equal_those_without_warmup(farm: Farm) -> None:
    compare(farm, f"--pipeline-schedule {MAMBA}", "mamba_on_cpu")


def test_graphs_equal_those_without_warmup(te_farm: Farm) -> None:
    run = compare(te_farm, f"--pipeline-schedule {GRAPHS}", "graphs_on_cpu")
    assert "a CUDA graph replays them" in run.output[0]


def compare(farm: Farm, flags: str, plugin: str) -> Ended:
    words = (*STEPS, *flags.split())
    without, run = (farm.run(2, *words, *more, plugin=plugin).check() for more in ((), (WARMUP,)))
    assert_equal(run, without)
    return run


def assert_equal(run: Ended, without: Ended) -> None:
    """Compare training with a warm-up and without one, bit for bit."""
    assert "pipeline warm-up: " in run.output[0]
    assert "pipeline warm-up: " not in without.output[0]
    tensors = "gradients", "parameters", "moments"
    assert_same_bits(run, without, tensors, view=Ended.by_place, norms=True)
    assert run.record["losses"]


SLEEP_S = 1.0


def test_first_calls_run_at_the_same_time(farm: Farm) -> None:
    """8 stages of a layer: 8 sleeps one after the other without warm-up, 2 per rank with it."""
    flags = ("--pipeline-schedule", "v-half", "--train-iters", "2", UNTIED)
    cold, warm = (
        farm.run(4, *flags, *warmup, plugin="plugins:slow_first_call", argument=SLEEP_S).check()
        for warmup in ((), (WARMUP,))
    )
    cold_s, warm_s = map(first_step_s, (cold, warm))
    print(f"first step: {cold_s:.1f} s, with warm-up {warm_s:.1f} s")
    assert cold_s >= 7 * SLEEP_S
    assert 2 * SLEEP_S <= warm_s < 6 * SLEEP_S
    pattern = r"pipeline warm-up: ([0-9. ]+) s by rank; slowest: stage [0-7], ([0-9.]+) s"
    ((seconds, slowest),) = re.findall(pattern, warm.output[0])
    assert all(2 * SLEEP_S <= float(text) < 6 * SLEEP_S for text in seconds.split())
    assert SLEEP_S <= float(slowest) < 2 * SLEEP_S


def first_step_s(run: Ended) -> float:
    """Return the longest first step of any rank, warm-up included, without its other costs."""
    seconds = [re.findall(r"step needed ([0-9.]+) s", text) for text in run.output]
    assert all(len(steps) == 2 for steps in seconds)
    return max(float(first) - float(second) for first, second in seconds)


def test_te_layers_mark_the_first_microbatch_again(te_farm: Farm) -> None:
    """A CPU has no FP8 kernels: their scales are tested in `test_snapshot_restores_state`."""
    compare(te_farm, f"{graphs.TE} --pipeline-schedule v-half {FP8}", "plugins:fp8_unquantized")


class Fp8Meta:
    """A stand-in for Transformer Engine's compiled FP8TensorMeta, which has no `__dict__`."""

    __slots__ = ("amax_history", "scale")
    __module__ = "transformer_engine_torch"

    def __init__(self) -> None:
        self.scale, self.amax_history = torch.ones(2), torch.zeros(4, 2)


class Layer(nn.Module):
    """A layer with the state of Megatron's and Transformer Engine's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.weight.main_grad = torch.zeros(3)
        self.weight.grad_added_to_main_grad = False
        self.register_buffer("expert_bias", torch.zeros(4))
        self.is_first_microbatch = True
        self.caches: dict[str, Tensor] = {}
        self.fp8_meta = {"scaling_fwd": Fp8Meta()}
        self.router_replay = RouterReplay()
        self.calls = [1]


def compute_gradient(layer: Layer) -> None:
    layer.weight.grad = torch.ones(3)
    layer.weight.main_grad += 2
    layer.weight.grad_added_to_main_grad = True


def fill_log(layer: Layer) -> None:
    MTPLossLoggingHelper.tracker["values"] = torch.ones(1)
    MTPLossAutoScaler.main_loss_backward_scale = torch.tensor(8.0)


STATE: dict[str, tuple[Callable[[Layer], object], Callable[[Layer], object]]] = {
    "gradients": (
        compute_gradient,
        lambda layer: (layer.weight.grad, layer.weight.main_grad.tolist()),
    ),
    "fused gradients": (compute_gradient, lambda layer: layer.weight.grad_added_to_main_grad),
    "router bias": (
        lambda layer: layer.expert_bias.add_(1),
        lambda layer: layer.expert_bias.tolist(),
    ),
    "first microbatch": (
        lambda layer: setattr(layer, "is_first_microbatch", False),
        lambda layer: layer.is_first_microbatch,
    ),
    "weight caches": (
        lambda layer: layer.caches.update(weight=torch.ones(1)),
        lambda layer: list(layer.caches),
    ),
    "FP8 scales": (
        lambda layer: layer.fp8_meta["scaling_fwd"].scale.mul_(3),
        lambda layer: layer.fp8_meta["scaling_fwd"].scale.tolist(),
    ),
    "amax histories": (
        lambda layer: layer.fp8_meta["scaling_fwd"].amax_history.add_(3),
        lambda layer: layer.fp8_meta["scaling_fwd"].amax_history.tolist(),
    ),
    "router replay": (
        lambda layer: layer.router_replay.record_indices(torch.ones(2)),
        lambda layer: layer.router_replay.get_recorded_indices(),
    ),
    "counters": (lambda layer: layer.calls.append(2), lambda layer: list(layer.calls)),
    "logs of MTP losses": (fill_log, lambda layer: list(MTPLossLoggingHelper.tracker)),
    "scale of MTP losses": (fill_log, lambda layer: MTPLossAutoScaler.main_loss_backward_scale),
    "random numbers of torch": (
        lambda layer: torch.rand(1),
        lambda layer: torch.get_rng_state().tolist(),
    ),
    "random numbers of the tracker": (
        lambda layer: torch.rand(1, generator=TRACKER["model"]),
        lambda layer: TRACKER["model"].get_state().tolist(),
    ),
    "random numbers of Python": (lambda layer: random.random(), lambda layer: random.getstate()),
    "random numbers of numpy": (
        lambda layer: np.random.rand(),
        lambda layer: np.random.get_state()[1].tolist(),
    ),
}
"""By name of the state: a function that changes it, and one that reads it."""

TRACKER = {"model": torch.Generator()}


@pytest.fixture(autouse=True)
def _generators(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = SimpleNamespace(get_states=lambda: dict(TRACKER), set_states=lambda states: None)
    monkeypatch.setattr(
        rewind, "tensor_parallel", SimpleNamespace(get_cuda_rng_tracker=lambda: tracker)
    )
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", torch.set_rng_state)


@pytest.mark.parametrize("name", STATE)
def test_snapshot_restores_state(name: str) -> None:
    change, read = STATE[name]
    layer = Layer()
    state = read(layer)
    snapshot = Snapshot([nn.Sequential(layer)])
    change(layer)
    assert repr(read(layer)) != repr(state)
    snapshot.restore()
    assert repr(read(layer)) == repr(state)


def test_snapshot_copies_no_weights() -> None:
    layer = nn.Linear(1000, 1000)
    layer.weight.main_grad = torch.zeros(1000, 1000)
    memory = torch.ones(3, 1000, 1000)
    layer.views = list(memory)  # a buffer of gradients that is not one of the layer's
    layer.copies = [layer.weight.detach(), layer.weight.main_grad[:5]]
    restorers = Snapshot([layer])._restorers
    copies = [restore.args[0] for restore in restorers if len(getattr(restore, "args", ())) == 1]
    sizes = [value.nbytes for value in copies if isinstance(value, Tensor)]
    assert memory.nbytes <= sum(sizes) < memory.nbytes + 1000


def test_gradients_before_the_first_step_are_rejected() -> None:
    layer = Layer()
    layer.weight.main_grad[1] = 1
    with pytest.raises(UnsupportedError, match="requires zero gradients before the first step"):
        Snapshot([layer])


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", ["1f1b", "v-half", "dualpipev"])
def test_warmup_has_each_pass_of_a_microbatch_once(name: str, kernels: bool) -> None:
    program = first_microbatch(lower(make(name, 2, 4), kernels=kernels))
    instructions = [instruction for row in program.instructions for instruction in row]
    works = [work for item in instructions if isinstance(item, Run) for work in item.passes]
    parts = sorted((str(part), work.stage) for work in works for part in work.parts())
    stages = range(program.schedule.num_stages)
    assert parts == sorted((part, stage) for part in "BFW" for stage in stages)
    assert not any(isinstance(item, Receive) for item in instructions)
    messages = [item.message.work for item in instructions if isinstance(item, Await)]
    assert len(messages) == (2 if name == "1f1b" else 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moves_memory": True}, "does not support offloading"),
        ({"moe_paged_stash": True}, "does not work with --moe-paged-stash: it records"),
        ({"variable_seq_lengths": True}, "does not work with variable_seq_lengths .*: the shapes"),
        (
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_warmup_steps": 0},
            "Set --cuda-graph-warmup-steps to at least 1",
        ),
    ],
)
def test_unsupported_options_are_rejected(changes: dict[str, Any], message: str) -> None:
    choice, options = SimpleNamespace(moves_memory=False), Options(warmup=True)
    settings: Any = SimpleNamespace(model=SimpleNamespace(), choice=choice, options=options)
    FEATURE.check(settings)
    for name, value in changes.items():
        setattr(choice if hasattr(choice, name) else settings.model, name, value)
    with pytest.raises(UnsupportedError, match=message):
        FEATURE.check(settings)
