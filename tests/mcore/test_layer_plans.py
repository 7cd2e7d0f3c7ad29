"""Megatron's layer plans: overlapped passes equal separate ones bit by bit; their conflicts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mcore.farm import Ended, Farm, Train
from mcore.parity import (
    BF16,
    EVALUATED,
    EXPERT_PARALLEL,
    OVERLAP,
    PIPELINE,
    assert_same_bits,
    assert_same_training,
    losses,
    relative,
)
from mcore.ranks import run_ranks

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.placement import looping, v_shape
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.program.lowering import lower, pair_adjacent, with_full_backwards
from megatron_vshape.mcore.features.overlap import REFUSALS, check_layer_plans, check_script
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.setup.translate import translate

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


FINE: dict[str, Any] = {
    "overlap_moe_expert_parallel_comm": True,
    "expert_model_parallel_size": 8,
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "hybridep",
    "bf16": True,
    "fp16": False,
    "num_layers": 8,
    "num_experts": 64,
    "moe_layer_freq": [0, 0, 0, 1, 1, 1, 1, 1],
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn", "layernorm", "moe_act", "mlp", "shared_experts"],
    "sequence_parallel": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "mtp_num_layers": 1,
    "fp8": "e4m3",
    "fp8_recipe": "mxfp8",
    "first_last_layers_bf16": False,
}
REFUSED = {
    "--expert-model-parallel-size 1": {"expert_model_parallel_size": 1},
    "--moe-token-dispatcher-type allgather": {"moe_token_dispatcher_type": "allgather"},
    "fp32 training": {"bf16": False},
    "--recompute-granularity full": {"recompute_granularity": "full"},
    "--recompute-modules moe": {"recompute_modules": ["moe"]},
    "--moe-shared-expert-overlap": {"moe_shared_expert_overlap": True},
    "--mtp-num-layers above 1": {"mtp_num_layers": 2},
    "--moe-layer-freq with a dense last layer": {"moe_layer_freq": 2},
    "--sequence-parallel and dropout": {"hidden_dropout": 0.1},
    "--fp8-recipe delayed": {"fp8_recipe": "delayed"},
    "--first-last-layers-bf16 with FP8": {"first_last_layers_bf16": True},
    "--fp32-residual-connection": {"fp32_residual_connection": True},
    "enable_autocast": {"enable_autocast": True},
    "cpu_offloading": {"cpu_offloading": True},
    "variable_seq_lengths (variable-length microbatches)": {"variable_seq_lengths": True},
    "--moe-latent-size": {"moe_latent_size": 64},
    "--moe-paged-stash": {"moe_paged_stash": True},
    "--use-transformer-engine-op-fuser": {"use_transformer_engine_op_fuser": True},
    "--moe-ncclep-zero-copy": {"moe_ncclep_zero_copy": True},
    "a hybrid model": {"hybrid_layer_pattern": "*E*E"},
}


def test_every_conflict_is_rejected_with_its_reason() -> None:
    assert list(REFUSED) == [refusal.option for refusal in REFUSALS]
    check_layer_plans(SimpleNamespace(**FINE), v_shape(4))
    for option, conflict in REFUSED.items():
        with pytest.raises(UnsupportedError) as error:
            check_layer_plans(SimpleNamespace(**FINE | conflict), v_shape(4))
        start = f"--overlap-moe-expert-parallel-comm does not work with {option}: "
        assert str(error.value).startswith(start)
        off = FINE | conflict | {"overlap_moe_expert_parallel_comm": False}
        check_layer_plans(SimpleNamespace(**off), v_shape(4))


def test_a_stage_a_rank_is_too_few() -> None:
    with pytest.raises(UnsupportedError, match="a schedule with one chunk per rank: passes"):
        check_layer_plans(SimpleNamespace(**FINE), looping(4, 1))


def test_layer_options_without_conflicts_are_accepted() -> None:
    permuted = {"first_last_layers_bf16": True, "moe_token_dispatcher_type": "alltoall"}
    check_layer_plans(SimpleNamespace(**FINE | permuted), v_shape(4))
    check_layer_plans(SimpleNamespace(**FINE | {"moe_layer_freq": 7}), v_shape(4))


def test_a_script_that_makes_no_plan() -> None:
    def forward_step(data_iterator: Any, model: Any) -> None: ...

    def with_plan(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> None: ...

    check_script(with_plan)
    with pytest.raises(UnsupportedError, match="its forward step forward_step takes no return_sch"):
        check_script(forward_step)


@pytest.mark.parametrize(
    "conflict",
    [
        {"cuda_graph_impl": "transformer_engine"},
        {"mixed_precision": "bf16_with_nvfp4_mixed"},
        {"fine_grained_activation_offloading": True},
    ],
    ids=lambda conflict: next(iter(conflict)),
)
def test_option_is_ignored_without_layer_plans(conflict: dict[str, Any]) -> None:
    options = SimpleNamespace(**FINE | conflict, delay_wgrad_compute=True)
    said = [str(notice) for notice in translate(options, v_shape(4)).notices]
    assert said[0].startswith("delay_wgrad_compute: turned off, W computes the weight gradients")
    assert said[1].startswith("overlap_moe_expert_parallel_comm: ignored (no overlap)")
    assert not options.overlap_moe_expert_parallel_comm
    options = SimpleNamespace(**FINE, delay_wgrad_compute=True)
    assert len(translate(options, v_shape(4)).notices) == 1
    assert options.overlap_moe_expert_parallel_comm
    assert not options.delay_wgrad_compute


SIZE = f"{PIPELINE} --global-batch-size 16"
OVERLAPPED = ("--overlap-moe-expert-parallel-comm",)


def overlap_adjacent_passes(schedule: Schedule) -> Schedule:
    """Overlap every F with the next B of its rank unless the result would deadlock."""
    for row in schedule.order:
        last_index = -1
        for index, (work, next_work) in enumerate(zip(row, row[1:], strict=False)):
            kinds = work.kind is Kind.F and next_work.kind in (Kind.B, Kind.BW)
            if index > last_index and kinds and work.microbatch != next_work.microbatch:
                overlapped_schedule = replace(schedule, overlapped=schedule.overlapped | {work})
                try:
                    lower(overlapped_schedule, simulate(overlapped_schedule))
                except ScheduleError:
                    continue
                schedule, last_index = overlapped_schedule, index + 1
    return schedule


def overlapped(name: str, devices: int = 2) -> Schedule:
    return overlap_adjacent_passes(make(name, devices, 8))


TRAININGS: dict[str, tuple[Callable[[], Schedule], str]] = {
    "V-ZB, split": (lambda: overlapped("v-zb"), ""),
    "V-Half, whole, gradients reduced on the way": (
        lambda: overlap_adjacent_passes(with_full_backwards(make("v-half", 2, 8))),
        OVERLAP,
    ),
    "multi-token prediction, shared experts": (
        lambda: overlapped("v-half"),
        "--mtp-num-layers 1 --moe-shared-expert-intermediate-size 16",
    ),
    "four stages per rank": (
        lambda: make("overlapped-interleaved-1f1b", 2, 8, num_chunks=4),
        "",
    ),
    "V-ZB, 4 pipeline ranks": (lambda: overlapped("v-zb", 4), ""),
    "interleaved, 4 pipeline ranks": (lambda: overlapped("interleaved-1f1b", 4), ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", TRAININGS)
def test_overlapped_passes_give_bitwise_equal_training(
    train: Train, tmp_path: Path, case: str
) -> None:
    make_schedule, options = TRAININGS[case]
    schedule = make_schedule()
    devices = schedule.num_devices
    assert len(schedule.overlapped) >= 2 * devices
    size = f"--pipeline-model-parallel-size {devices} --global-batch-size 16"
    flags = f"{EVALUATED} {size} {EXPERT_PARALLEL} {options} --bf16".split()
    runs = []
    for variant in (schedule, replace(schedule, overlapped=frozenset())):
        file = tmp_path / f"{len(variant.overlapped)}.json"
        file.write_text(variant.to_json())
        overlap = OVERLAPPED if variant.overlapped else ()
        runs.append(train(2 * devices, "--pipeline-schedule", str(file), *flags, *overlap))
    assert_same_steps(*runs)
    megatron_run = train(2 * devices, "--pipeline-schedule", "1f1b", *flags)
    assert_same_training(runs[0], megatron_run, BF16, Ended.by_place)


assert_same_steps = functools.partial(
    assert_same_bits, keys=("gradients", "parameters"), view=Ended.by_place, norms=True
)


def test_adjacent_passes_of_a_schedule_by_name_overlap(train: Train) -> None:
    """Bitwise equal, with overlapped gradient reduction."""
    assert pair_adjacent(make("v-zb", 2, 8)).overlapped
    flags = (
        f"--pipeline-schedule v-zb {EVALUATED} {SIZE} {EXPERT_PARALLEL} {OVERLAP} --bf16".split()
    )
    assert_same_steps(train(4, *flags, *OVERLAPPED), train(4, *flags))


AUTO = "--pipeline-schedule auto --pipeline-profile-iterations 2:3"


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["--pipeline-schedule dualpipev", AUTO], ids=["dualpipev", AUTO])
def test_named_and_planned_schedules_with_overlapped_passes(train: Train, chosen: str) -> None:
    flags = f"--train-iters 6 --bf16 {SIZE} {EXPERT_PARALLEL}".split()
    package_run = train(4, *chosen.split(), *flags, *OVERLAPPED)
    megatron_run = train(4, "--pipeline-schedule", "1f1b", *flags)
    assert len(losses(package_run)) == 6
    assert relative(losses(package_run), losses(megatron_run)) <= 2e-3
