"""Passes by Megatron's layer plans, alone and overlapped, equal passes without plans bitwise."""

from contextlib import suppress
from importlib import metadata
from typing import Any

import pytest
from mcore.farm import Farm
from mcore.ranks import run_ranks

ALONE = "F0.0 B0.0 W0.0 F0.1 BW0.1"
JOINED = "F1.0 F0.0&B1.0 W1.0 F0.1&B0.0 F1.1 W0.0 B0.1 W0.1 BW1.1"
WHOLE = "F1.0 F0.0&BW1.0 F0.1&BW0.0 F1.1&BW0.1 BW1.1"
LATE = "F1.0 F1.1 F0.0&B1.1 F0.1&B1.0 W1.0 W1.1 BW0.1 BW0.0"

# Megatron keeps the sums of auxiliary losses for as many layers as the first case has.
PREDICTS = {"mtp_num_layers": 1, "moe_router_load_balancing_type": "none"}

CASES: dict[str, tuple[tuple[str, str], str, dict[str, Any]]] = {
    "alone": (("<MM", "MM>"), f"{ALONE} {ALONE.replace('0.', '1.')}", {}),
    "F with B": (("<MM", "MM>"), JOINED, {}),
    "F with BW": (("<MM", "MM>"), WHOLE, {}),
    "W later than the next": (("<MM", "MM>"), LATE, {}),
    "in the middle": (("MM", "MM"), WHOLE, {}),
    "dense and experts": (("<DM", "DMM>"), WHOLE, {}),
    "dense only before": (("<DD", "M>"), JOINED, {}),
    "more layers forward": (("<MMM", "M>"), WHOLE, {}),
    "more layers backward": (("<M", "MMM>"), JOINED, {}),
    "empty ends": (("<", ">"), WHOLE, {}),
    "an empty end": (("<MM", ">"), JOINED, {}),
    "tied": (("<M", "MM>"), WHOLE, {"ties": True}),
    "shared experts": (("<M", "MM>"), JOINED, {"moe_shared_expert_intermediate_size": 16}),
    "multi-token prediction": (("<M>", "<MM>"), JOINED, PREDICTS),
    "multi-token prediction, whole": (("<MM>", "<M>"), WHOLE, PREDICTS),
    "one expert a rank": (("<M", "M>"), WHOLE, {"num_moe_experts": 2}),
    "early release": (("<MM", "MM>"), WHOLE, {"ep_overlap_early_attn_memory_release": True}),
    "recomputed attention": (
        ("<DM", "M>"),
        JOINED,
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    ),
    "recomputed norms": (
        ("<DM", "MM>"),
        JOINED,
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
    ),
    "recomputed norms, whole": (
        ("<DM", "M>"),
        WHOLE,
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "core_attn"]},
    ),
    "recomputed experts": (
        ("<DM", "M>"),
        JOINED,
        {
            "recompute_granularity": "selective",
            "recompute_modules": ["shared_experts", "layernorm"],
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
}
with suppress(metadata.PackageNotFoundError):
    if metadata.version("megatron-core") < "0.18":  # whose plans predict on pipelines alone
        CASES = {name: case for name, case in CASES.items() if case[2] is not PREDICTS}

STREAMS: dict[str, tuple[tuple[str, str], str, dict[str, Any]]] = {
    "F with B": (("<M", "MM>"), JOINED, {}),
    "F with BW": (("<DM", "M>"), WHOLE, {"moe_shared_expert_intermediate_size": 16}),
    "one expert a rank": (("M", "M"), LATE, {"num_moe_experts": 2}),
    "early release": (("<M", "M>"), JOINED, {"ep_overlap_early_attn_memory_release": True}),
}
# What a mutant breaks, and a case in which that is found.
MUTANTS = {
    "no wait": ("F with BW", "does not wait for"),
    "no record": ("F with B", "goes while"),
    "results are not recorded": ("one expert a rank", "goes while"),
    "jobs are not recorded": ("one expert a rank", "goes while"),
    "emptied early": ("one expert a rank", "uses memory that has been emptied"),
}


Wrong = dict[str | None, dict[str, list[str]]]


def on_rank(rank: int) -> tuple[dict[str, list[str]], Wrong]:
    """Return the differences of every case, and the stream faults of all cases and mutants."""
    from megatron_vshape.mcore import cpu

    cpu.install()
    from mcore import chunks_by_layers

    mutants = {None: STREAMS} | {
        mutant: {case: STREAMS[case]} for mutant, (case, _) in MUTANTS.items()
    }
    unlike = chunks_by_layers.unlike(rank, CASES)
    return unlike, chunks_by_layers.wrong_on_streams(rank, mutants)


@pytest.fixture(scope="module")
def rank_results(farm: Farm) -> list[tuple[dict[str, list[str]], Wrong]]:
    """Return the results of both ranks. Each rank imports Megatron once."""
    return run_ranks(farm, 2, on_rank, timeout_s=550)


@pytest.fixture(scope="module")
def unlike(rank_results: list[tuple[dict[str, list[str]], Wrong]]) -> list[dict[str, list[str]]]:
    """Return the differences of every case, by rank."""
    return [differences for differences, _ in rank_results]


@pytest.fixture(scope="module")
def wrong(rank_results: list[tuple[dict[str, list[str]], Wrong]]) -> list[Wrong]:
    """Return the stream faults by rank: of all cases and of mutants."""
    return [faults for _, faults in rank_results]


@pytest.mark.parametrize("case", CASES)
def test_layer_plans_equal_passes_bitwise(unlike: list[dict[str, list[str]]], case: str) -> None:
    assert [differences[case] for differences in unlike] == [[], []]


@pytest.mark.parametrize("case", STREAMS)
def test_streams_wait_for_each_other(wrong: list[Wrong], case: str) -> None:
    assert [faults[None][case] for faults in wrong] == [[], []]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_streams_that_do_not_are_caught(wrong: list[Wrong], mutant: str) -> None:
    case, said = MUTANTS[mutant]
    for faults in wrong:
        assert any(said in text for text in faults[mutant][case])
