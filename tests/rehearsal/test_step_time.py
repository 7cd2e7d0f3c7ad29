"""Step times from counted work: collectives by hop, overlap, and the published errors."""

from dataclasses import replace

import pytest

from megatron_vshape.rehearsal import accuracy
from megatron_vshape.rehearsal.fitted import LEFT_OUT, PAIRS
from megatron_vshape.rehearsal.gpus import GPUS
from megatron_vshape.rehearsal.step_time import (
    DISPATCH,
    PERMUTED,
    LinkBytes,
    Rates,
    Scale,
    link_bytes_of,
    ranks_per_node,
    step_time,
)
from megatron_vshape.rehearsal.work import EACH, Work

GB = 1e9
H100 = replace(GPUS["h100"], near_rate=400 * GB, far_rate=50 * GB)
RATES = Rates(
    wire=1, dispatch=1, network=1, exchange_us=0, kernel_us=0, launch_us=0, replicas_exposed=0.25,
    module_us=0, shards_exposed=1, shards_left=0.25,
)  # fmt: skip
EXPERTS = "EXPERT_MODEL_PARALLEL_GROUP"


def seconds(kind: str, group: str, ranks: int, span: int, size: float) -> dict[str, float]:
    work = Work(exchanges={(kind, group, ranks, span): [1, size]})
    return step_time(work, H100, Scale(1, 1, 1, 1), RATES)


@pytest.mark.parametrize(
    ("ranks", "span", "within"), [(8, 8, 8), (16, 16, 8), (16, 31, 4), (8, 57, 1), (2, 9, 1)]
)
def test_ranks_of_a_group_that_share_a_node(ranks: int, span: int, within: int) -> None:
    assert ranks_per_node(ranks, span, node=8) == within


def test_a_plain_all_to_all_sends_one_part_to_every_rank() -> None:
    assert link_bytes_of("all_to_all_single", 16, 16, 16.0, node=8) == LinkBytes(7.0, 8.0)
    exchange_s = seconds("all_to_all_single", EXPERTS, 16, 16, 16 * GB)["exchanges"]
    assert exchange_s == pytest.approx(8 / 50)  # NVLink needs 7 / 400 at the same time


def test_deepep_sends_a_token_once_to_every_node() -> None:
    inside = link_bytes_of(f"{DISPATCH}8", 8, 8, 1.0, node=8)
    assert inside.far == 0
    # 8 experts in 4 nodes of 8: 0.9 of a token's copies per node, 0.22 per rank
    linked = link_bytes_of(f"{DISPATCH}8", 32, 32, 1.0, node=8)
    assert linked.far == pytest.approx(3 * (1 - 0.75**8))
    assert linked.near == pytest.approx(31 * (1 - (31 / 32) ** 8))
    plain = link_bytes_of("all_to_all_single", 32, 32, 8.0, node=8)
    assert plain.far == 6.0 > 2 * linked.far


def test_hybridep_sorts_the_received_tokens_by_expert() -> None:
    kind, ranks, copies = f"{DISPATCH}8", 8, 8
    plain, permuted = (
        seconds(name, EXPERTS, ranks, ranks, GB)["exchanges"] for name in (kind, kind + PERMUTED)
    )
    received = ranks * (1 - (1 - 1 / ranks) ** copies)  # copies of a token for different ranks
    traffic_s = GB * (received + copies) / H100.memory_rate / RATES.memory
    assert permuted == pytest.approx(plain + traffic_s)


def test_ranks_of_a_node_share_a_ring_between_nodes() -> None:
    group = "DATA_PARALLEL_GROUP"
    one = seconds("all_gather_into_tensor", group, 2, 9, 16 * GB)  # one rank per node
    eight = seconds("all_gather_into_tensor", group, 16, 16, 16 * GB)
    assert one["data parallel"] == pytest.approx(8 / 50)
    assert eight["data parallel"] == pytest.approx(15 / 8 / 50)


def test_data_parallel_collectives_overlap_passes_only() -> None:
    size = 32 * GB
    work = Work(
        exchanges={("reduce_scatter_tensor", "DATA_PARALLEL_GROUP", 2, 9): [1, size]},
        attention_flops={"bfloat16": H100.bf16_flops * RATES.attention},
    )
    full = 16 / 50
    long = step_time(work, H100, Scale(4, 1, 1, 1), RATES)  # a microbatch lasts a second
    assert long["data parallel"] == pytest.approx(RATES.replicas_exposed * full)
    work.attention_flops["bfloat16"] *= 0.1
    short = step_time(work, H100, Scale(4, 1, 1, 1), RATES)
    assert short["data parallel"] == pytest.approx(full - 0.1)


def test_fsdp_gathers_in_every_microbatch() -> None:
    key = "all_gather_into_tensor", "DATA_PARALLEL_GROUP" + EACH, 8, 8
    work = Work(exchanges={key: [2, 800 * GB]})
    parts = step_time(work, H100, Scale(8, 2, 1, 1), RATES)
    assert parts["data parallel"] == 0
    assert parts["exchanges"] == pytest.approx(4 * 700 / 400)


def test_the_host_limits_small_kernels() -> None:
    rates = replace(RATES, launch_us=100.0)
    work = Work(kernels=1000, bytes_moved=0.01 * H100.memory_rate * rates.memory)
    parts = step_time(work, H100, Scale(1, 1, 1, 1), rates)
    assert parts["memory"] == pytest.approx(0.01)
    assert parts["step_s"] == pytest.approx(0.1, rel=1e-3)
    assert step_time(work, H100, Scale(1, 1, 1, 1, graphs=True), rates)["host"] == 0


def test_the_host_starts_only_kernels_outside_of_graphs() -> None:
    rates = replace(RATES, launch_us=100.0, module_us=1000.0)
    work = Work({("bfloat16", 1, 1, 1, 1): 20}, kernels=1000)
    scale = Scale(1, 1, 1, 1)
    assert step_time(work, H100, scale, rates)["step_s"] == pytest.approx(0.12, rel=1e-3)
    work.captured, work.captured_gemms = 600, 15
    assert step_time(work, H100, scale, rates)["step_s"] == pytest.approx(0.045, rel=1e-3)


def test_the_host_cannot_run_ahead_of_a_plain_all_to_all() -> None:
    rates = replace(RATES, launch_us=100.0)
    gpu_s = host_s = 0.1
    work = Work(kernels=1000, bytes_moved=gpu_s * H100.memory_rate * rates.memory)
    ahead = step_time(work, H100, Scale(1, 1, 1, 1), rates)["step_s"]
    work.exchanges["all_to_all_single", EXPERTS, 8, 8] = [1, 0]
    waiting = step_time(work, H100, Scale(1, 1, 1, 1), rates)["step_s"]
    assert max(gpu_s, host_s) < ahead < waiting < gpu_s + host_s


def test_tensor_parallel_overlap_hides_collectives() -> None:
    work = Work(exchanges={("all_gather", "TENSOR_MODEL_PARALLEL_GROUP", 2, 2): [1, 800 * GB]})
    exposed, overlapped = (
        step_time(work, H100, Scale(1, 1, 1, 1, shards_overlapped=overlaps), RATES)["exchanges"]
        for overlaps in (False, True)
    )
    assert overlapped == pytest.approx(0.25 * exposed)


def test_a_ring_between_nodes_is_free_while_attention_computes() -> None:
    work = Work(
        exchanges={("isend", "CONTEXT_PARALLEL_GROUP", 2, 9): [1, 50 * GB]},
        attention_flops={"bfloat16": 0.25 * H100.bf16_flops * RATES.attention},
    )
    scale = Scale(1, 1, 1, 1)
    assert step_time(work, H100, scale, RATES)["exchanges"] == pytest.approx(0.75)
    work.attention_flops["bfloat16"] *= 8
    assert step_time(work, H100, scale, RATES)["exchanges"] == 0
    near = Work(exchanges={("isend", "CONTEXT_PARALLEL_GROUP", 2, 2): [1, 50 * GB]})
    assert step_time(near, H100, scale, RATES)["exchanges"] == pytest.approx(0.125)


def test_the_error_is_the_one_of_the_case() -> None:
    assert accuracy.case_of(False, 1, 1, GPUS["h100"]) == accuracy.DENSE
    assert accuracy.case_of(True, 16, 16, GPUS["h100"]) == accuracy.BETWEEN
    assert accuracy.case_of(True, 16, 16, GPUS["gb200"]) == accuracy.WITHIN
    text = " ".join(accuracy.sentences(accuracy.DENSE, GPUS["gb200"], 64))
    for name in (accuracy.DENSE, "GB200", "up to 64 GPUs"):
        assert f"{name} {LEFT_OUT[name].median_percent:g}%" in text
        assert f"({LEFT_OUT[name].runs} runs)" in text
    assert "guess" not in text
    assert "MI355X are a guess" in accuracy.sentences(accuracy.DENSE, GPUS["mi355x"], 8)[1]
    assert PAIRS.pairs < accuracy.ENOUGH  # so the error of all runs is the least
    assert accuracy.threshold(accuracy.DENSE) >= LEFT_OUT["all"].median_percent / 100


def test_exposed_all_to_alls_between_nodes_are_an_upper_bound() -> None:
    (text,) = accuracy.upper_bound(accuracy.BETWEEN, overlaps_experts=False)
    assert "upper bounds" in text
    assert accuracy.upper_bound(accuracy.BETWEEN, overlaps_experts=True) == []
    assert accuracy.upper_bound(accuracy.WITHIN, overlaps_experts=False) == []


def test_the_error_of_few_runs_is_widened() -> None:
    few, everything = LEFT_OUT[accuracy.BETWEEN], LEFT_OUT["all"]
    assert few.runs < accuracy.ENOUGH
    widened = accuracy.errors_of(accuracy.BETWEEN)
    assert widened.runs == few.runs
    assert widened.median_percent == max(few.median_percent, everything.median_percent)
    assert widened.ninth_percent == max(few.ninth_percent, everything.ninth_percent)
    text = accuracy.sentences(accuracy.BETWEEN, GPUS["h100"], 1024)[0]
    assert f"({few.runs} runs, few runs: at least the error of all)" in text


def test_left_out_errors_reach_their_targets() -> None:
    targets = {
        "with a pipeline": (6, 16),
        accuracy.WITHIN: (8, 20),
        accuracy.BETWEEN: (15, 30),
    }
    for name, (median, ninth) in targets.items():
        assert LEFT_OUT[name].median_percent <= median
        assert LEFT_OUT[name].ninth_percent <= ninth
    assert LEFT_OUT["all"].worst_factor <= 2  # Qwen3 30B on H100 in 25.11; the others: 1.5
    assert PAIRS.right_percent >= 90


def test_published_runs_that_span_nodes_are_near() -> None:
    """A larger EP across nodes was estimated 2.7x slower than measured."""
    from published_runs import case_of, is_counted, predicted, published

    rows = [row for row in published() if is_counted(row) and case_of(row) == accuracy.BETWEEN]
    ratios = [predicted(row)["step_s"] / row["step_s"] for row in rows]
    assert len(ratios) == LEFT_OUT[accuracy.BETWEEN].runs
    assert all(0.8 < ratio < 1.25 for ratio in ratios)
