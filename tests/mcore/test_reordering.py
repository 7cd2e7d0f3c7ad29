"""Variable-length microbatches are reordered to shorten the step."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mcore.farm import Ended, Farm, Train
from mcore.parity import (
    CONTEXT,
    EXPERT_PARALLEL,
    PIPELINE,
    TENSOR,
    UNTIED,
    Tolerance,
    assert_same_bits,
    assert_same_training,
)
from mcore.test_library import assert_equal_outputs, assert_equal_results, run_library

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.mcore.features.variable_length.reorder import (
    InOrder,
    MicrobatchReorderer,
    PeekableIterator,
    lengths_of,
    may_reorder,
)
from megatron_vshape.mcore.setup.configure import _counts_calls
from megatron_vshape.mcore.step.microbatches import in_data_order

PLUGIN = "variable_lengths"
STEPS = ("--train-iters", "2", "--clip-grad", "0", UNTIED)
CONFIG = SimpleNamespace(
    kv_channels=128,
    num_attention_heads=32,
    num_query_groups=8,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_moe_experts=None,
    gated_linear_unit=True,
    variable_seq_lengths=True,
)

ROUNDED = Tolerance(1e-5, 1e-4, 1e-4)


def test_lengths_are_read_from_batches() -> None:
    ends = torch.tensor([[0, 5, 12, 12]])  # the last one is padding
    assert lengths_of({"cu_seqlens": ends, "tokens": torch.zeros(1, 12)}, False) == [5, 7]
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 3, 4]))
    assert lengths_of({"packed_seq_params": packed}, False) == [3, 1]
    assert lengths_of(SimpleNamespace(packed_seq_params=packed), False) == [3, 1]
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    padded = {"attention_mask": mask, "input_ids": torch.zeros(2, 3)}
    assert lengths_of(padded, True) == [2, 1]
    assert lengths_of(padded, False) is None  # padding is computed too
    assert lengths_of({"tokens": torch.zeros(2, 9)}, True) == [9, 9]
    assert lengths_of({"attention_mask": torch.ones(1, 1, 4, 4)}, True) is None
    assert lengths_of([1, 2], True) is None


def test_peeked_batches_are_returned_in_pass_order() -> None:
    ahead = PeekableIterator(iter("abcdef"))
    assert [ahead.look(number) for number in (0, 2, 1)] == ["a", "c", "b"]
    order = (2, 0, 3, 1)
    placed = InOrder(ahead, order)
    results = [next(placed) for _ in order]
    assert results == ["c", "a", "d", "b"]
    assert next(ahead) == "e"
    assert in_data_order(results, order) == ["a", "b", "c", "d"]
    assert in_data_order(results, None) == results


PRINTED = "variable_lengths:printed_orders"


@pytest.fixture
def costs_file(tmp_path: Path) -> str:
    file = tmp_path / "costs.json"
    file.write_text(Costs.uniform(2, 4, 100, 120, 90, 5).to_json())
    return str(file)


def orders_of(ended: Ended) -> list[str]:
    """Return the order of each step with its microbatches."""
    return [line for line in ended.output[0].splitlines() if line.startswith("order ")]


def test_repeated_steps_use_the_same_order(farm: Farm, costs_file: str) -> None:
    """Bitwise equal, also with evaluations between the steps."""
    flags = ("--pipeline-schedule", "auto", "--pipeline-costs", costs_file, UNTIED)
    flags = (*flags, *"--num-layers 4 --train-iters 4 --eval-interval 2 --eval-iters 1".split())
    once = farm.run(2, *flags, plugin=PRINTED).check()
    twice = farm.run(2, *flags, plugin=PRINTED, argument="repeats").check()
    assert len(set(orders_of(once))) == len(orders_of(once)) == 4
    assert orders_of(twice) == [order for order in orders_of(once) for _ in range(2)]
    assert_same_bits(once, twice, norms=True)


def test_resumed_run_continues_with_unused_batches(
    farm: Farm, costs_file: str, tmp_path: Path
) -> None:
    flags = ("--pipeline-schedule", "auto", "--pipeline-costs", costs_file, UNTIED)
    flags = (*flags, *"--num-layers 4 --num-workers 1 --train-iters 6".split())
    flags = (*flags, "--ckpt-format", "torch_dist")
    uninterrupted = farm.run(2, *flags, plugin=PRINTED).check()
    saved = ("--save", str(tmp_path), "--save-interval", "4", "--exit-interval", "4")
    first = farm.run(2, *flags, *saved, plugin=PRINTED, argument="saves").check()
    second = farm.run(2, *flags, "--load", str(tmp_path), plugin=PRINTED).check()
    assert first.record["losses"] + second.record["losses"] == uninterrupted.record["losses"]
    orders = [orders_of(run) for run in (first, second, uninterrupted)]
    assert orders[0] + orders[1] == orders[2]


def test_long_documents_cost_more_than_many_short_ones() -> None:
    lengths = [[8192], [1024] * 8, [4096]]
    costs = MicrobatchReorderer(CONFIG, None).variable_length_costs(Costs.uniform(2, 4), lengths)
    shares = {amount.name: factors for amount, factors in costs.by_microbatch}
    assert shares["forward_us"][0] > 1.1 * shares["forward_us"][1]
    assert shares["backward_us"][0] / shares["backward_us"][1] > (
        shares["forward_us"][0] / shares["forward_us"][1]
    )
    assert shares["weight_us"] == pytest.approx((1.2, 1.2, 0.6))
    assert simulate(make("v-half", 2, 3), costs).makespan > 0


@pytest.mark.parametrize("microbatch_order", [None, "kept"])
def test_reordered_training_equals_1f1b(
    train: Train, farm: Farm, costs_file: str, microbatch_order: str | None
) -> None:
    planned = ("--pipeline-schedule", "auto", "--pipeline-costs", costs_file)
    megatron_run = train(2, "--pipeline-schedule", "1f1b", *STEPS, plugin=PLUGIN)
    keep_order = () if microbatch_order is None else ("--pipeline-keep-order",)
    package_run = farm.run(2, *planned, *keep_order, *STEPS, plugin=PLUGIN).check()
    assert_same_training(package_run, megatron_run, ROUNDED)
    if keep_order:
        assert_same_bits(package_run, megatron_run)
    assert ("microbatches reordered" in package_run.output[0]) != bool(keep_order)


def test_log_probabilities_are_returned_in_data_order(farm: Farm, costs_file: str) -> None:
    """For forward-only steps, which are not reordered, and for reordered training steps."""
    run_options = {"reads_logits": "call"}
    plain = run_library(farm, "verl", None, ranks=2, **run_options)
    costs = {"costs_file": costs_file}
    package_run = run_library(farm, "verl", "auto", options=costs, ranks=2, **run_options)
    assert_equal_results(package_run, plain)
    lengths, expected = package_run.received_lengths, plain.received_lengths
    is_reordered = [
        step != expected_step for step, expected_step in zip(lengths, expected, strict=True)
    ]
    assert is_reordered == [True, False, True]
    assert [*map(sorted, lengths)] == [*map(sorted, expected)]
    assert_equal_outputs(package_run, plain, ("log_probs", "entropy"))


def test_active_dropout_prevents_reordering(farm: Farm, costs_file: str) -> None:
    """As in an adapter on a single rank, which no config contains."""
    options = {"costs_file": costs_file}
    plain = run_library(farm, "verl", None, ranks=2)
    package_run = run_library(farm, "verl", "auto", options=options, ranks=2, drops_out=1)
    assert_equal_results(package_run, plain)
    assert package_run.received_lengths == plain.received_lengths


def test_stored_logits_prevent_reordering() -> None:
    """Megatron matches stored logits to microbatches by the number of calls."""
    stored = ("logits_load_dir", "logits_save_dir", "use_routing_replay", "use_indexer_replay")
    for name, keeps in (*((option, True) for option in stored), ("other", False)):
        assert _counts_calls(SimpleNamespace(**{name: "somewhere"})) is keeps
    assert not _counts_calls(SimpleNamespace(logits_load_dir=None, use_indexer_replay=False))


def test_error_on_one_rank_ends_all_ranks(farm: Farm, costs_file: str) -> None:
    """The rank of the first stage fails, which is not rank 0 here."""
    options = {"costs_file": costs_file}
    with pytest.raises(AssertionError) as failed:
        run_library(farm, "verl", "auto", options=options, ranks=2, lengths=[0])
    first, last = str(failed.value).split("--- rank ")[1:]
    assert first.startswith("0: exit code 1")
    assert last.startswith("1: exit code 1")
    assert str(failed.value).count("lengths returned [0] for a microbatch") == 1
    assert "Traceback" not in str(failed.value)


OVERLAPPED = {"TP": TENSOR, "CP": CONTEXT, "EP": EXPERT_PARALLEL}


@pytest.mark.parametrize(
    "parallelism", ["CP", *(pytest.param(name, marks=pytest.mark.slow) for name in ("TP", "EP"))]
)
def test_ranks_of_a_stage_use_the_same_order(farm: Farm, costs_file: str, parallelism: str) -> None:
    """All ranks of a stage must read the same microbatch before their collectives.

    One context-parallel rank decides for the others, which see other lengths. Replicas with shared
    expert parallelism read different microbatches at the same position.
    """
    steps = "--train-iters 4 --eval-interval 3 --eval-iters 1 --num-layers 4 --num-workers 1"
    flags = (*STEPS, *f"{steps} {PIPELINE} {OVERLAPPED[parallelism]}".split())
    megatron_run = farm.run(4, "--pipeline-schedule", "1f1b", *flags, plugin=PLUGIN).check()
    planned = ("--pipeline-schedule", "auto", "--pipeline-costs", costs_file)
    plugin = f"{PLUGIN}:of_first_rank" if parallelism == "CP" else PLUGIN
    package_run = farm.run(4, *planned, *flags, plugin=plugin).check()
    assert "microbatches reordered" in package_run.output[0]
    assert package_run.record["evaluations"]
    assert_same_training(package_run, megatron_run, ROUNDED, Ended.by_place)


BOTH_LOSSES = ["seq_aux_loss", "global_aux_loss"]


@pytest.mark.parametrize(
    ("changed", "may"),
    [
        ({}, True),
        ({"num_moe_experts": 4}, True),
        ({"num_moe_experts": 4, "moe_input_jitter_eps": 0.1}, False),
        ({"num_moe_experts": 4, "moe_router_load_balancing_type": "global_aux_loss"}, False),
        ({"num_moe_experts": 4, "moe_router_load_balancing_type": BOTH_LOSSES}, False),
        ({"attention_dropout": 0.1}, False),
    ],
)
def test_options_that_prevent_reordering(changed: dict[str, Any], may: bool) -> None:
    plain = {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "moe_input_jitter_eps": None,
        "moe_router_load_balancing_type": "aux_loss",
        "num_moe_experts": None,
    }
    assert may_reorder(SimpleNamespace(**plain | changed)) == may
