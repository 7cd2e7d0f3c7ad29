"""Offloading of microbatches to host memory: equal numerics and the predicted memory."""

import re
from argparse import Namespace
from pathlib import Path

import pytest
from mcore.farm import Ended, Farm, Train
from mcore.parity import EXPERT_PARALLEL, RECOMPUTE, SEQUENCE, UNTIED, assert_same_bits
from mcore.ranks import run_ranks
from mcore.rejections import rejection
from mcore.test_memory import memory_figures
from offloaded import choose_all, choose_every_third, with_offloads

from megatron_vshape.core.check.simulate import HOST_BLOCKS, peak_moved
from megatron_vshape.core.model.amounts import GIB
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import COPY_BACK, COPY_OUT
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import NAMES, make
from megatron_vshape.mcore.features.offload import check_offloading
from megatron_vshape.mcore.options import MEGATRONS_OWN, Options
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.setup.choice import resolve_schedule
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.setup.run_config import ScheduleChoice
from megatron_vshape.runtime.offload import Copies, costs_with_copies

STEPS = ("--clip-grad", "0", "--train-iters", "3", "--eval-interval", "2", "--eval-iters", "1")


def train_schedule(
    farm: Farm, folder: Path, schedule: Schedule, *flags: str, ranks: int = 4
) -> Ended:
    file = folder / "schedule.json"
    file.write_text(schedule.to_json())
    flags = ("--pipeline-schedule", str(file), *flags)
    return farm.run(ranks, *flags, plugin="plugins:poisoned").check()


TENSORS = "gradients", "parameters"
OURS = [name for name in NAMES if name not in MEGATRONS_OWN]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "v-half")) for name in OURS],
)
def test_losses_equal_for_every_named_schedule_with_offloading(
    train: Train, farm: Farm, tmp_path: Path, name: str
) -> None:
    baseline_run = train(4, "--pipeline-schedule", name, *STEPS, UNTIED)
    chosen = choose_every_third if name == "v-zb" else choose_all
    package_run = train_schedule(
        farm, tmp_path, with_offloads(make(name, 4, 8), chosen), *STEPS, UNTIED
    )
    assert_same_bits(package_run, baseline_run, TENSORS, view=Ended.by_place)


PARALLEL = {
    "experts": (4, f"{EXPERT_PARALLEL} --global-batch-size 16"),  # two data-parallel replicas
    "TP + SP": (4, SEQUENCE),
    "bf16, recompute": (2, f"--bf16 {RECOMPUTE}"),
    "tied, dropout": (2, "--attention-dropout 0.1 --hidden-dropout 0.1"),
}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "tied, dropout")) for name in PARALLEL],
)
def test_offloading_with_other_megatron_features(
    train: Train, farm: Farm, tmp_path: Path, layout: str
) -> None:
    ranks, text = PARALLEL[layout]
    flags = (*STEPS, "--pipeline-model-parallel-size", "2", *text.split())
    baseline_run = train(ranks, "--pipeline-schedule", "v-half", *flags)
    package_run = train_schedule(
        farm, tmp_path, with_offloads(make("v-half", 2, 8)), *flags, ranks=ranks
    )
    assert_same_bits(package_run, baseline_run, TENSORS, view=Ended.by_place)


SIZES = (
    "--hidden-size 64 --seq-length 64 --max-position-embeddings 64 --global-batch-size 16 "
    "--train-iters 2"
).split()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v-half", "1f1b-v"])
def test_measured_peaks_equal_predicted_peaks(
    train: Train, farm: Farm, tmp_path: Path, name: str
) -> None:
    baseline_peaks, _ = memory_figures(train(4, "--pipeline-schedule", name, *SIZES, UNTIED))
    run = train_schedule(farm, tmp_path, with_offloads(make(name, 4, 16)), *SIZES, UNTIED)
    measured, predicted = memory_figures(run)
    assert measured == pytest.approx(predicted, rel=0.05)
    assert max(measured) < 0.7 * max(baseline_peaks)
    (line,) = [line for line in run.output[0].splitlines() if "peak activation memory" in line]
    assert re.search(r"host memory \[[0-9., ]+\]", line)


def test_live_bytes_drop_by_the_predicted_amount(farm: Farm, tmp_path: Path) -> None:
    """Offloading changes activation memory only; P2P buffers and other live bytes are equal."""
    file = tmp_path / "schedule.json"
    file.write_text(with_offloads(make("v-half", 4, 16)).to_json())
    names = ("v-half", str(file))
    flags = (*SIZES, UNTIED, "--pipeline-schedule")
    baseline_run, package_run = (farm.run(4, *flags, name, live=True).check() for name in names)
    predicted = zip(memory_figures(baseline_run)[1], memory_figures(package_run)[1], strict=True)
    records = zip(baseline_run.records, package_run.records, predicted, strict=True)
    for plain, copied, (more_mib, less_mib) in records:
        saved_bytes = plain["live_bytes"] - copied["live_bytes"]
        assert saved_bytes == pytest.approx((more_mib - less_mib) * 2**20, rel=0.05)
        assert copied["left_bytes"] <= plain["left_bytes"] + 4096


LARGER = ("--clip-grad", "0", UNTIED, "--global-batch-size", "16", "--train-iters")
AUTO = ("--pipeline-schedule", "auto", "--pipeline-memory-limit", "v-min")


def test_auto_plans_offloading_from_a_costs_file(train: Train, farm: Farm, tmp_path: Path) -> None:
    file = write_copy_costs(tmp_path)
    baseline_run = train(2, "--pipeline-schedule", "v-half", *LARGER, "3")
    # Three of the four activations that every schedule without copies holds.
    flags = ("--pipeline-schedule", "auto", "--pipeline-memory-limit", "0.0028")
    package_run = farm.run(
        2, *flags, "--pipeline-costs", str(file), *LARGER, "3", plugin="plugins:poisoned"
    ).check()
    (line,) = [text for text in package_run.output[0].splitlines() if "are offloaded" in text]
    assert re.search(r"of \d+ of 64 microbatches and .*: at most 0\.0\d+ GiB per rank of \d", line)
    assert package_run.record["losses"] == baseline_run.record["losses"]
    assert re.search(r"host memory \[[0-9., ]+\]", package_run.output[0])


@pytest.mark.slow
def test_auto_measures_copies_if_offloading_is_enabled(
    train: Train, farm: Farm, tmp_path: Path
) -> None:
    baseline_run = train(2, "--pipeline-schedule", "v-half", *LARGER, "7")
    flags = ("--pipeline-profile-iterations", "2:3", "--pipeline-trace", str(tmp_path))
    package_run = farm.run(
        2, *AUTO, *flags, "--fine-grained-activation-offloading", *LARGER, "7"
    ).check()
    assert "fine_grained_activation_offloading: translated to offloading" in package_run.output[0]
    assert package_run.record["losses"] == baseline_run.record["losses"]
    costs = Costs.load(tmp_path / "costs.json")
    assert costs.copies
    assert dict(costs.sources)["copy_out_us"] == "measured on 2 ranks at once"
    for moved, retained in zip(
        costs.lists()["offloaded_bytes"], costs.held_after_forward_bytes, strict=True
    ):
        # At the turn of the V the input counts as memory of the previous stage.
        assert 0.8 * retained < moved <= 1.05 * retained


@pytest.mark.slow
def test_offloaded_steps_are_rolled_back(train: Train, farm: Farm, tmp_path: Path) -> None:
    """Most steps clip gradients after an early start, so post-validation rolls them back."""
    text = "--optimizer-post-validation --rerun-mode disabled --clip-grad 4.0 --train-iters 6"
    flags = (
        *text.split(),
        *"--log-interval 10 --no-check-for-nan-in-loss-and-grad".split(),
        UNTIED,
    )
    baseline_run = train(2, "--pipeline-schedule", "v-zb", *flags)
    package_run = train_schedule(farm, tmp_path, with_offloads(make("v-zb", 2, 8)), *flags, ranks=2)
    undo_lines = [
        re.search(r"post-validation: .* undone", run.output[0])
        for run in (package_run, baseline_run)
    ]
    assert undo_lines[0] is not None
    assert undo_lines[1] is not None
    assert undo_lines[0][0] == undo_lines[1][0]
    assert_same_bits(package_run, baseline_run, TENSORS, view=Ended.by_place)


def test_schedule_file_with_invalid_copies_is_rejected(tmp_path: Path) -> None:
    """The pass order of a rank defines the start of each copy."""
    schedule = with_offloads(make("v-half", 2, 4), lambda *position: position == (1, 2))
    file = tmp_path / "waits.csv"
    file.write_text(schedule.to_csv())
    assert resolve_schedule(Options(str(file)), 2).from_file is not None
    for old, new, message in (
        ("R1.2,H1.2,", "", "D1.2 on device 1 has no R1.2"),
        ("H1.2,", "", "D1.2 on device 1 has no H1.2"),
        ("F1.2,D1.2", "D1.2,F1.2", "D1.2 runs before F1.2 on device 1, .*: D needs its result"),
    ):
        assert old in schedule.to_csv()
        file.write_text(schedule.to_csv().replace(old, new))
        with pytest.raises(ValueError, match=message):
            resolve_schedule(Options(str(file)), 2)


LARGE = 0.95e6
"""Bytes copied per microbatch and stage in `write_copy_costs`."""


def write_copy_costs(tmp_path: Path) -> Path:
    times, bytes_ = (1000.0,) * 4, (1e6,) * 4
    costs = Costs.of(times, times, times, 50.0, bytes_, bytes_, layers=(2,) * 4)
    copies = Copies(LARGE, 300.0, 300.0, 300.0, 300.0)
    file = tmp_path / "costs.json"
    file.write_text(costs_with_copies(costs, [copies] * 4, "assumed for a test").to_json())
    return file


def test_auto_respects_the_host_memory_limit(tmp_path: Path) -> None:
    """The limit includes the unused part of partly filled host memory blocks."""
    file = write_copy_costs(tmp_path)
    costs, peaks = Costs.load(file), []
    for chunks in (3.0, 1e6):
        limit = chunks * LARGE * (1 + 1 / HOST_BLOCKS) / GIB
        options = Options("auto", 60.0, str(file), "v-min", limit)
        schedule = Planner(resolve_schedule(options, 2)).plan_step(16).schedule
        peaks.append(max(peak_moved(schedule, costs)))
    assert 0 < peaks[0] <= 3 * LARGE * (1 + 1e-9) < peaks[1]


def test_schedule_file_beyond_the_host_memory_limit(
    train: Train, farm: Farm, tmp_path: Path
) -> None:
    """Without measured costs, activations beyond the limit stay in GPU memory."""
    baseline_run = train(2, "--pipeline-schedule", "v-half", *STEPS, UNTIED)
    schedule = with_offloads(make("v-half", 2, 8))
    limit = ("--pipeline-host-memory-limit", "0.0006")
    package_run = train_schedule(farm, tmp_path, schedule, *limit, *STEPS, UNTIED, ranks=2)
    assert_same_bits(package_run, baseline_run, TENSORS, view=Ended.by_place)
    rejections = [
        line for run in package_run.output for line in run.splitlines() if "no host memory" in line
    ]
    assert rejections
    assert all("the limit is 1 MiB" in line for line in rejections)
    match = re.search(r"host memory \[([0-9., ]+)\]", package_run.output[0])
    assert match is not None
    assert all(0 < float(gigabytes) * 2**20 <= 0.0006 * GIB for gigabytes in match[1].split(","))


@pytest.mark.parametrize(
    ("name", "limit_gib", "message"),
    [
        ("v-half", 1.0, "--pipeline-host-memory-limit requires --pipeline-schedule auto, or a sch"),
        ("auto", -1.0, "--pipeline-host-memory-limit -1 is not a number of GiB above 0"),
        (
            "file",
            0.002,
            r"has 0.00\d GiB of rank 0 wait in host memory at once, by --pipeline-costs, and "
            r"--pipeline-host-memory-limit 0.002 has room for 0.002: raise it, or plan with",
        ),
    ],
)
def test_invalid_host_memory_limits_are_rejected(
    tmp_path: Path, name: str, limit_gib: float, message: str
) -> None:
    if name == "file":
        name = str(tmp_path / "schedule.json")
        Path(name).write_text(with_offloads(make("v-half", 2, 8)).to_json())
    options = Options(name, 60.0, str(write_copy_costs(tmp_path)), None, limit_gib)
    with pytest.raises(ValueError, match=message):
        resolve_schedule(options, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v-zb", "zb-h1"])
def test_slices_are_offloaded_except_keys_and_values(
    train: Train, farm: Farm, tmp_path: Path, name: str
) -> None:
    flags = (*SIZES, "--num-layers", "4", UNTIED)
    alone = train(2, "--pipeline-schedule", name, "--pipeline-slices", "4", *flags)
    package_run = train_schedule(
        farm, tmp_path, with_offloads(make(name, 2, 16, slices=4)), *flags, ranks=2
    )
    assert_same_bits(package_run, alone, TENSORS, view=Ended.by_place)
    measured, predicted = memory_figures(package_run)
    assert measured == pytest.approx(predicted, rel=0.05)
    assert max(measured) < 0.95 * max(memory_figures(alone)[0])


def test_estimated_copy_lasts_as_long_as_the_forward_of_its_stage() -> None:
    schedule, estimate = with_offloads(make("v-half", 2, 4)), Costs.uniform(2, 4, 1.5)
    choice = ScheduleChoice(2, "own", from_file=schedule, estimate=estimate)
    costs = Planner(choice).plan_step(4).costs
    assert costs is not None
    for kind in (COPY_OUT, COPY_BACK):
        assert [costs.time_us(kind, stage) for stage in range(4)] == [1.5] * 4


def test_offloading_rejects_cuda_graphs() -> None:
    graphs = Namespace(cuda_graph_impl="transformer_engine")
    check_offloading(True, Namespace(), "plan.json")
    check_offloading(False, graphs, "plan.json")
    with pytest.raises(UnsupportedError, match="offloads activations, which CUDA graphs do not"):
        check_offloading(True, graphs, "plan.json")


def test_schedule_file_with_copies_rejects_cuda_graphs(tmp_path: Path) -> None:
    file = tmp_path / "schedule.json"
    file.write_text(with_offloads(make("v-half", 4, 8)).to_json())
    reason = rejection("--pipeline-schedule", str(file), "--cuda-graph-impl", "transformer_engine")
    assert "offloads activations, which CUDA graphs do not support" in reason


def find_stream_faults(rank: int) -> list[list[str]]:
    from megatron_vshape.mcore import cpu

    cpu.install()
    from mcore.offload_beside import wrong_beside_shared_experts

    return [
        wrong_beside_shared_experts(rank, skips_other_streams)
        for skips_other_streams in (True, False)
    ]


def test_tensors_read_by_another_stream_in_b_are_not_reused(farm: Farm) -> None:
    """Shared experts are computed on a separate stream, concurrent with the routed experts.

    If their saved tensors are reloaded on the compute stream, the allocator can reuse the memory
    while the shared experts still read it.
    """
    for package_faults, faults_without_skip in run_ranks(
        farm, 2, find_stream_faults, timeout_s=120
    ):
        assert package_faults == []
        assert set(faults_without_skip) == {"memory of main goes while stream 1 may use it"}
