"""Weight gradients that B computes while it waits for tensor-parallel ranks: the same bits."""

from types import SimpleNamespace
from typing import Any

import pytest
from mcore.farm import Ended, Farm, Train
from mcore.parity import (
    EVALUATED,
    PIPELINE,
    SEQUENCE,
    TENSOR,
    UNTIED,
    assert_same_bits,
    assert_same_training,
)

from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.program.lowering import DeferredWgradOverlap
from megatron_vshape.mcore.step.stage import MegatronStage
from megatron_vshape.mcore.step_state import StepState
from megatron_vshape.runtime.weight_jobs import defer, run_beside

PLUGIN = "plugins:overlapped_jobs"
SIZE = f"{EVALUATED} {PIPELINE} --num-layers 4".split()
LAYOUTS = {
    "TP, tied": TENSOR,
    "SP, overlap": f"{SEQUENCE} {UNTIED} --overlap-grad-reduce --ddp-bucket-size 4000",
}


def inside(run: Ended) -> list[int]:
    """Return how many jobs every rank has run inside a B."""
    return [text.count("a job ran inside a B") for text in run.output]


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        ("SP, overlap", "v-half"),
        pytest.param("TP, tied", "v-half", marks=pytest.mark.slow),
        *(pytest.param(layout, "v-zb", marks=pytest.mark.slow) for layout in LAYOUTS),
    ],
)
def test_parameters_are_the_same_bits(farm: Farm, train: Train, layout: str, schedule: str) -> None:
    flags = (*SIZE, *LAYOUTS[layout].split())
    package_flags = ("--pipeline-schedule", schedule, *flags)
    together = farm.run(4, *package_flags, plugin=PLUGIN, given=False).check()
    apart = farm.run(4, *package_flags, plugin=PLUGIN, given=True).check()
    assert_same_bits(together, apart, view=Ended.by_place, norms=True)
    megatron_run = train(4, "--pipeline-schedule", "1f1b", *flags)
    assert_same_training(together, megatron_run, view=Ended.by_place)
    counts = inside(together)
    assert sum(counts) > 0
    assert counts[::2] == counts[1::2]  # tensor-parallel ranks run the same


@pytest.mark.slow
def test_profiled_passes_run_apart(farm: Farm) -> None:
    """Memory is counted in the first step, and the second is profiled."""
    flags = (*SIZE, *LAYOUTS["SP, overlap"].split())
    flags += ("--pipeline-schedule", "v-zb", "--pipeline-profile-iterations", "2:2")
    assert sum(inside(farm.run(4, *flags, plugin=PLUGIN, given=False).check())) == 0


@pytest.mark.parametrize("counted", [False, True])
def test_passes_whose_memory_is_counted_run_apart(counted: bool) -> None:
    state, ran = StepState(), []
    if counted:
        state.tracker = SimpleNamespace(ends=lambda work: None)  # type: ignore[assignment]
    with state.jobs.collect((2, 0)):
        defer(lambda: ran.append("job"))
    overlaps = {Pass.parse("B1.3"): DeferredWgradOverlap(Pass.parse("W2.0"), 1.0)}
    step: Any = SimpleNamespace(state=state, wgrad_overlaps=overlaps, hooks=[], pass_runner=None)
    stage = MegatronStage(step, 0, 1, is_last=False, has_several_chunks=True)
    stage._backward = lambda *unused: run_beside()  # type: ignore[method-assign]
    stage.backward_inputs(2, None)
    assert not ran  # the plan has nothing beside that B
    stage.backward_inputs(3, None)
    assert ran == ([] if counted else ["job"])
