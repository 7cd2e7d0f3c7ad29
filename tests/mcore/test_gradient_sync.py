"""Reductions of gradients: when they start, and the same bits with all overlaps."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mcore.farm import Ended, Farm, Train
from mcore.parity import (
    EVALUATED,
    PIPELINE,
    RECOMPUTE,
    SEQUENCE,
    TENSOR,
    UNTIED,
    assert_same_bits,
    assert_same_tensors,
    assert_same_training,
)
from torch import Tensor

from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.program.lowering import DeferredWgradOverlap
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.step.gradient_sync import GradientSync, splits_last
from megatron_vshape.mcore.step.stage import MegatronStage
from megatron_vshape.mcore.step_state import StepState
from megatron_vshape.runtime.weight_jobs import defer, run_beside


class Group:
    """A bucket group that notes when its reduction starts."""

    def __init__(self, name: str, log: list[str], chunk: Any) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        self.buckets = [SimpleNamespace(params_list=self.parameters)]
        self.is_first_batch = self.is_last_microbatch = True
        self._name, self._log, self._chunk = name, log, chunk

    def start_grad_sync(self, force_all_reduce: bool) -> None:
        assert self._chunk.ddp_config.overlap_grad_reduce
        self._log.append(self._name + "!" * force_all_reduce)


def chunk_of(name: str, log: list[str], groups: int = 2, experts: int = 0) -> Any:
    chunk = SimpleNamespace(ddp_config=SimpleNamespace(overlap_grad_reduce=True))
    chunk.bucket_groups = [Group(f"{name}{i}", log, chunk) for i in range(groups)]
    chunk.expert_parallel_bucket_groups = [Group(f"{name}x{i}", log, chunk) for i in range(experts)]
    return chunk


def pipeline_of(recomputes: bool) -> Any:
    choice = SimpleNamespace(keeps_full_backward=recomputes)
    return SimpleNamespace(overlaps_grad_reduce=True, choice=choice)


def sync_of(
    chunks: list[Any], recomputes: bool = False, forward_only: bool = False, no_sync: Any = None
) -> GradientSync:
    config: Any = SimpleNamespace(param_sync_func=None, no_sync_func=no_sync)
    return GradientSync(config, chunks, pipeline_of(recomputes), 2, False, forward_only)


def jobs_of(chunk: Any) -> list[list[Tensor]]:
    """Return the parameters of each job of a chunk: one per parameter, last layer first."""
    groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
    return [[parameter] for group in groups for parameter in group.parameters]


def run_w(sync: GradientSync, log: list[str], number: int, jobs: list[list[Tensor]]) -> None:
    sync.weights_begin(number)
    for place, parameters in enumerate(jobs):
        log.append(f"job {place}")
        sync.added(parameters)
    sync.weights_done(number)


def test_each_bucket_starts_after_the_job_that_completes_it() -> None:
    log: list[str] = []
    chunk = chunk_of("b", log, experts=1)
    sync, jobs = sync_of([chunk]), jobs_of(chunk)
    with sync.without_ddp():
        assert not chunk.ddp_config.overlap_grad_reduce  # DDP's hooks are to be quiet
        for _ in range(2):
            for parameters in jobs:
                sync.deferred(parameters)
        run_w(sync, log, 0, jobs)
        assert "b0" not in log
        log.clear()
        run_w(sync, log, 0, jobs)
    assert log == ["job 0", "job 1", "b0", "job 2", "job 3", "b1", "job 4", "job 5", "bx0"]
    assert chunk.ddp_config.overlap_grad_reduce
    assert not any(group.is_first_batch for group in chunk.bucket_groups)


def test_buckets_keep_their_order_and_those_without_jobs_start_first() -> None:
    log: list[str] = []
    chunk = chunk_of("b", log, groups=3)
    sync = sync_of([chunk])
    jobs = [[chunk.bucket_groups[2].parameters[0]], [chunk.bucket_groups[1].parameters[0]]]
    sync.weights_done(0)
    for parameters in jobs:
        sync.deferred(parameters)
    run_w(sync, log, 0, jobs)
    assert log == ["b0", "job 0", "job 1", "b1", "b2"]


def test_the_bucket_of_a_tied_weight_waits_for_the_last_stage() -> None:
    log: list[str] = []
    chunks = [chunk_of("first", log), chunk_of("last", log)]
    tied = chunks[0].bucket_groups[1].parameters[0]
    tied.zero_out_wgrad = True
    sync = sync_of(chunks)
    sync.weights_done(0)
    sync.weights_done(1)
    sync.deferred([tied])  # by the output layer, in the last stage's B
    sync.weights_begin(0)
    sync.weights_done(0)
    assert log == ["first0"]
    run_w(sync, log, 1, [[tied]])
    assert log == ["first0", "last0", "last1", "job 0", "first1"]


def test_the_last_whole_backward_is_split_unless_layers_are_recomputed() -> None:
    for recomputes in (False, True):
        log: list[str] = []
        sync = sync_of([chunk_of("b", log)], recomputes=recomputes)
        assert not sync.splits(0)
        sync.weights_done(0)
        assert sync.splits(0) != recomputes
        sync.weights_done(0)
        assert log == ["b0", "b1"]


def test_chunk_outside_megatron_ddp_is_rejected_in_training() -> None:
    with pytest.raises(UnsupportedError, match="Remove --overlap-grad-reduce"):
        sync_of([torch.nn.Linear(2, 2)])
    evaluates = sync_of([torch.nn.Linear(2, 2)], forward_only=True)  # as with --skip-train
    with evaluates.without_ddp():
        assert not evaluates.overlaps


def test_the_caller_who_accumulates_over_several_calls_reduces_itself() -> None:
    """As NeMo-RL does for streamed rollouts: DDP's no_sync around calls, then start_grad_sync."""
    log: list[str] = []
    chunk = chunk_of("b", log)
    for group in chunk.bucket_groups:
        group.is_last_microbatch = False  # as within no_sync
    sync = sync_of([chunk])
    with sync.without_ddp():
        assert not chunk.ddp_config.overlap_grad_reduce  # DDP's hooks expect a gradient in every B
        for _ in range(2):
            run_w(sync, log, 0, [])
    assert log == []


def test_a_step_within_no_sync_does_not_end_it() -> None:
    chunk = chunk_of("b", [])

    @contextmanager
    def no_sync() -> Iterator[None]:
        """Megatron's: it sets the flag at its end, without a look at its value before."""
        for group in chunk.bucket_groups:
            group.is_last_microbatch = False
        yield
        for group in chunk.bucket_groups:
            group.is_last_microbatch = True

    with no_sync():
        with sync_of([chunk], no_sync=no_sync).without_ddp():
            assert not sync_of([chunk], no_sync=no_sync).overlaps
        assert not any(group.is_last_microbatch for group in chunk.bucket_groups)
    with sync_of([chunk], no_sync=no_sync).without_ddp():
        assert not any(group.is_last_microbatch for group in chunk.bucket_groups)


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_last_backward_is_split_in_every_step_as_captured(recomputes: bool) -> None:
    """CUDA graphs are captured once, for steps within the caller's no_sync as well."""
    splits = []
    for is_last_call in (False, True):
        chunk = chunk_of("b", [])
        for group in chunk.bucket_groups:
            group.is_last_microbatch = is_last_call
        sync = sync_of([chunk], recomputes=recomputes)
        sync.weights_done(0)
        splits.append(sync.splits(0))
    assert splits == [splits_last(pipeline_of(recomputes), chunk)] * 2 == [not recomputes] * 2


TWO_BY_TWO = ("--pipeline-model-parallel-size", "2", "--clip-grad", "0", "--train-iters", "2")
SMALL_BUCKETS = ("--ddp-bucket-size", "4000")
OVERLAP = ("--overlap-grad-reduce", *SMALL_BUCKETS)
LAST = 3  # the microbatch (of four) whose W completes the gradients


@pytest.mark.parametrize(
    ("schedule", "embeddings"),
    [
        ("v-zb", (UNTIED,)),
        *(
            pytest.param(name, embeddings, marks=pytest.mark.slow)
            for name, embeddings in (("v-half", ()), ("v-zb", ()), ("v-min", (UNTIED,)))
        ),
    ],
)
def test_bucket_is_reduced_in_the_w_that_completes_it(
    train: Train, schedule: str, embeddings: tuple[str, ...]
) -> None:
    flags = ("--pipeline-schedule", schedule, *TWO_BY_TWO, *embeddings)
    overlapping, unoverlapped = train(4, *flags, *OVERLAP), train(4, *flags)
    assert_same_bits(overlapping, unoverlapped, ["gradients"], Ended.by_place)
    first_rank = overlapping.records[0]["reductions"]
    places = [
        Counter(where for step, where, _ in first_rank if step == expected_step)
        for expected_step in (0, 1)
    ]
    assert places[0] == places[1]  # from the first step on
    # Megatron makes many buckets of a rank's first chunk and one of the others.
    assert places[0].keys() == {f"W0.{LAST}", f"W3.{LAST}"}
    assert places[0][f"W0.{LAST}"] >= 3
    # Without overlap, all buckets are reduced after the last pass.
    assert {where for _, where, _ in unoverlapped.records[0]["reductions"]} == {None}


def test_distributed_optimizer_with_both_overlaps(train: Train) -> None:
    flags = ("--pipeline-schedule", "v-half", *TWO_BY_TWO, UNTIED, "--use-distributed-optimizer")
    overlapping = train(4, *flags, *OVERLAP, "--overlap-param-gather")
    unoverlapped = train(4, *flags)
    assert_same_tensors(overlapping.merged("parameters"), unoverlapped.merged("parameters"))
    where = {where for _, where, _ in overlapping.records[0]["reductions"]}
    assert where == {f"W0.{LAST}", f"W3.{LAST}"}


def test_full_recompute_with_overlap(train: Train) -> None:
    flags = ("--pipeline-schedule", "v-min", *TWO_BY_TWO, UNTIED, *RECOMPUTE.split())
    overlapping, unoverlapped = train(4, *flags, *OVERLAP), train(4, *flags)
    assert_same_bits(overlapping, unoverlapped, ["gradients"], Ended.by_place)
    where = {where for _, where, _ in overlapping.records[0]["reductions"]}
    assert where == {f"BW0.{LAST}", f"BW3.{LAST}"}


def saved_gradients(folder: Path, offsets: list[list[int]]) -> dict[str, torch.Tensor]:
    """Load the tensors of --save-dgrads-interval, by the numbers of the layers in the model.

    `offsets` has the number of the first layer of each chunk, by rank.
    """
    tensors = {}
    for rank, chunks in enumerate(offsets):
        file = folder / f"dgrads/iter_0000002/mp_rank_00_{rank:03d}.pth"
        for chunk, gradients in torch.load(file).items():
            first = chunks[int(chunk.removeprefix("model_chunk"))]
            for name, gradient in gradients.items():
                parts = name.split(".")
                if parts[:2] == ["decoder", "layers"]:
                    parts[2] = str(first + int(parts[2]))
                tensors[".".join(parts)] = gradient
    return tensors


def test_saved_input_gradients_equal_megatron_bitwise(train: Train, tmp_path: Path) -> None:
    pytest.importorskip("megatron.training.dgrad_logging")  # not in every release
    # In fp32, Megatron's cross entropy changes the logits in place, which its own hooks reject.
    options = "--bf16 --clip-grad 0 --train-iters 2 --save-dgrads-interval 2 --save-interval 9"
    common = (UNTIED, *options.split(), "--ckpt-format", "torch_dist", "--save")
    for schedule in ("1f1b", "v-half"):
        flags = ("--pipeline-schedule", schedule, *common, str(tmp_path / schedule))
        train(2, *flags, plugin="plugins:dgrads_without_te")
    package_gradients = saved_gradients(tmp_path / "v-half", [[0, 6], [2, 4]])
    megatron_gradients = saved_gradients(tmp_path / "1f1b", [[0], [4]])
    assert len(megatron_gradients) > 80
    assert_same_tensors(package_gradients, megatron_gradients)


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
    together = farm.run(4, *package_flags, plugin=PLUGIN, argument=False).check()
    apart = farm.run(4, *package_flags, plugin=PLUGIN, argument=True).check()
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
    assert sum(inside(farm.run(4, *flags, plugin=PLUGIN, argument=False).check())) == 0


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
    assert not ran  # the plan overlaps nothing with that B
    stage.backward_inputs(3, None)
    assert ran == ([] if counted else ["job"])
