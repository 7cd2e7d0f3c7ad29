"""The predictor, by counts of a small model that are given."""

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tuning.counts import MIB, predictor_of
from tuning.samples import CLUSTER, ROOT, load_sample

from megatron_vshape import Costs
from megatron_vshape.core.model.kinds import COPY_BACK, COPY_OUT
from megatron_vshape.core.model.placement import looping, v_shape
from megatron_vshape.core.model.schedule import Objective
from megatron_vshape.rehearsal.gpus import MEASURED_GIB, Software
from megatron_vshape.tuning import predictor as predicting
from megatron_vshape.tuning.configurations import Layout, SweepError
from megatron_vshape.tuning.files import load_sweep
from megatron_vshape.tuning.grid import expand_grid
from megatron_vshape.tuning.machine import Machine
from megatron_vshape.tuning.predictor import key_of_count, plan_adaptive
from megatron_vshape.tuning.trainer_flags import trainer_command
from megatron_vshape.view.numbers import GIB

SWEEPS = ROOT / "configs" / "sweeps"
ADAPTIVE_GRID = {"schedule": ["adaptive"], "microbatch_size": [2]}


def test_flops_are_megatrons() -> None:
    """72 L s h^2 (1 + s / 6h + V / 12 L h), Narayanan et al. 2021 without recompute."""
    subject, sequence = load_sweep(SWEEPS / "grid_98b_a100.yaml").subject, 3072
    hidden, layers, vocabulary = 10240, 78, 50304
    expected = 72 * layers * sequence * hidden**2
    expected *= 1 + sequence / (6 * hidden) + vocabulary / (12 * layers * hidden)
    assert subject.flops(sequence, 1) == pytest.approx(expected)


def test_shapes_are_counted_whatever_the_order_and_the_pipeline() -> None:
    """The paper's grid: three lengths, four sizes of TP, three of the microbatch."""
    configs = expand_grid(load_sweep(SWEEPS / "grid_98b_a100.yaml")).possible
    assert len({key_of_count(config) for config in configs}) <= 3 * 4 * 3 < len(configs) / 3


def test_infeasible_limit_is_reported_in_gib(tmp_path: Path) -> None:
    (config,) = expand_grid(load_sample(tmp_path, ADAPTIVE_GRID)).possible
    costs = Costs.of(*((1.0,) * 4,) * 3, 0.0, (GIB,) * 4, (GIB,) * 4)
    with pytest.raises(SweepError, match="rank 0 is 1.5 GiB, and one .* ranks is 2 GiB"):
        plan_adaptive(config, v_shape(2), costs, [1.5 * GIB] * 2, Objective.MAKESPAN)


def test_adaptive_plan_uses_the_better_placement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_sample(tmp_path, ADAPTIVE_GRID)
    (config,) = expand_grid(loaded).possible
    best, times_s = predictor_of(loaded)(config), {}
    for placement in (v_shape(2), looping(2, 2)):
        monkeypatch.setattr(
            predicting, "default_placements", lambda *_, placement=placement: [placement]
        )
        times_s[placement] = predictor_of(loaded)(config).step_s
    assert len(set(times_s.values())) == 2
    assert best.step_s == min(times_s.values())
    monkeypatch.undo()
    assert times_s[best.schedule.placement] == best.step_s


HEAVY = {"vocab_size": 65536}


def test_vocabulary_parallelism_is_predicted(tmp_path: Path) -> None:
    """Its passes are in the step, and no rank has all parameters of the vocabulary."""
    grid = {"schedule": ["v-half"], "vocab_parallel": [False, True]}
    loaded = load_sample(tmp_path, grid, model=HEAVY)
    unshared, shared = expand_grid(loaded).possible[:2]
    assert (unshared.vocab_parallel, shared.vocab_parallel) == (False, True)
    predictor = predictor_of(loaded)
    one, two = predictor(unshared), predictor(shared)
    assert two.step_s < 0.8 * one.step_s
    ends = 2 * 4 * MIB * 64  # of the vocabulary, on the first rank of a V
    assert one.peak_bytes - two.peak_bytes > 0.5 * ends
    assert str(shared).endswith("vocab-parallel")


def test_multi_token_prediction_is_predicted(tmp_path: Path) -> None:
    """In time, memory and FLOPs; a layer split by its work makes the step faster."""
    predictions = []
    for mtp_layers in (0, 1):
        loaded = load_sample(tmp_path, model={**HEAVY, "num_nextn_predict_layers": mtp_layers})
        even = replace(expand_grid(loaded).possible[0], schedule="v-half")
        predictor = predictor_of(loaded)
        times = [predictor(replace(even, layout=layout)) for layout in (Layout.EVEN, Layout.AUTO)]
        times.append(predictor(replace(even, layout=Layout.AUTO, vocab_parallel=True)))
        predictions.append((*times, loaded.subject.flops(64, 1)))
    (plain, _, alone, flops), (even, auto, shared, mtp_flops) = predictions
    assert even.step_s > 1.2 * plain.step_s  # there are two heads
    assert auto.step_s <= even.step_s
    assert even.peak_bytes > plain.peak_bytes
    assert alone.step_s < shared.step_s < auto.step_s  # both heads are shared
    assert alone.peak_bytes < shared.peak_bytes < auto.peak_bytes
    assert 1.7 < mtp_flops / flops < 2


def test_offload_times_follow_the_host_link(tmp_path: Path) -> None:
    """At 10 GB/s, 1 MB needs 100 us."""
    costs = Costs.uniform(2, 4).having(held_after_forward_bytes=(1e6, 2e6, 2e6, 1e6))
    cluster = load_sample(tmp_path, cluster={"host_link": {"gb_per_s": 10}}).cluster
    copied_costs = Machine.of(cluster).copied(costs)
    for kind in (COPY_OUT, COPY_BACK):
        assert [copied_costs.time_us(kind, stage) for stage in (0, 1)] == pytest.approx((100, 200))
    machine = Machine.of(load_sample(tmp_path).cluster)
    assert (machine.copied(costs), machine.moved_limit_bytes) == (costs, math.inf)


def test_adaptive_plan_offloads_if_the_cluster_has_a_host_link(tmp_path: Path) -> None:
    workloads = [{"sequence_length": 64, "global_batch_size": 32}]
    # Little more than the memory without activations, so that the schedule waits for memory.
    device = CLUSTER["device"] | {"memory_gib": 2.45}

    def predict(**link: float) -> tuple[float, int]:
        """Return the step's time and how many copies there are to the host."""
        over = {"device": device} | ({"host_link": link} if link else {})
        sweep = {"workloads": workloads}
        loaded = load_sample(tmp_path, ADAPTIVE_GRID, sweep=sweep, cluster=over)
        (config,) = expand_grid(loaded).possible
        prediction = predictor_of(loaded)(config)
        command = trainer_command(loaded, config, tmp_path / "plan.json")
        assert ("--pipeline-host-memory-limit" in command) == ("memory_gib" in link)
        return prediction.step_s, sum(
            work.kind is COPY_OUT for row in prediction.schedule.order for work in row
        )

    alone_s, num_copies = predict()
    linked_s, copies = predict(gb_per_s=10.0)
    assert num_copies == 0 < copies
    assert linked_s < 0.99 * alone_s
    slow_s, _ = predict(gb_per_s=10.0 / 32)
    assert linked_s < slow_s <= alone_s * (1 + 1e-9)
    assert predict(gb_per_s=10.0, memory_gib=0.001) == (pytest.approx(alone_s, rel=0.005), 0)


evidence = pytest.importorskip("evidence", reason="the page needs the extra [sweep]")


@pytest.fixture(scope="module")
def rows() -> list[Any]:
    return evidence.grid_predictions()


def test_every_predicted_winner_is_the_published_one(rows: list[Any]) -> None:
    for length in (1024, 3072, 16384):
        group = [row for row in rows if row.published.sequence_length == length]
        published = max(group, key=lambda row: row.published.mfu_percent or 0.0)
        predicted = max(group, key=lambda row: row.mfu_percent * row.prediction.fits)
        assert predicted.published.schedule == published.published.schedule


def test_a_method_fits_if_it_ran_in_the_paper(rows: list[Any]) -> None:
    """At 16384 tokens only V-Half ran, with 1.2 GiB to spare."""
    assert len(rows) == 9
    for row in rows:
        assert row.prediction.fits == (row.published.mfu_percent is not None)


def test_memory_of_cuda_is_that_of_published_messages() -> None:
    text = (ROOT / "benchmarks" / "evidence" / "outside_memory.csv").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    outside = [
        float(row["in use"]) - float(row["allocated"]) - float(row["unallocated"])
        for row in csv.DictReader(lines)
    ]
    assert len(outside) == 4
    assert all(gib == pytest.approx(MEASURED_GIB[Software.TORCH, 8], abs=0.02) for gib in outside)
