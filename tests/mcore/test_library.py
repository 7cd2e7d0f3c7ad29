"""Schedules registered for libraries on megatron.core equal the 1F1B of these libraries."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from mcore.callers import CALLERS
from mcore.conftest import needs_hybrid
from mcore.farm import Farm
from mcore.other_trainer import DeferredConfig
from mcore.parity import assert_close_tensors

import megatron_vshape
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.mcore.observe.report import opening_lines
from megatron_vshape.mcore.options import Options, options_from
from megatron_vshape.mcore.refusals import RefusedError, UnsupportedError, refusing
from megatron_vshape.mcore.setup.choice import resolve_schedule
from megatron_vshape.mcore.setup.configure import pipeline_from_config
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.step.microbatches import iterators_by_chunk, share_iterators

RANKS = 2
REPLICATED = 2 * RANKS


class RunResults(NamedTuple):
    """Results of a run."""

    losses: list[list[float]]  # of every step, where the library reads them
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    chunks: int
    first: dict[str, Any]  # all that the first rank has kept
    read: list[dict[str, Any]]  # of every rank: of every step, what it reads in each known way
    logit_results: list[Any]  # by step: the results that the last rank computes from logits
    received_lengths: list[list[int]]  # by step: the lengths that the first stage receives


def join_records(records: list[dict[str, Any]]) -> RunResults:
    reads = [record["losses"] for record in records if record["losses"] and record["losses"][0]]
    merged = {
        key: {name: value for record in records for name, value in record.get(key, {}).items()}
        for key in ("gradients", "parameters")
    }
    return RunResults(
        sum(reads, []),
        records[0]["norms"],
        **merged,
        chunks=records[0]["chunks"],
        first=records[0],
        read=[record.get("read", {}) for record in records],
        logit_results=records[-1].get("made", []),
        received_lengths=next((r["seen"] for r in records if any(r.get("seen", ()))), []),
    )


def assert_equal_results(package_run: RunResults, megatron_run: RunResults) -> None:
    assert len(package_run.losses) == len(megatron_run.losses)
    assert sum(package_run.losses, []) == pytest.approx(sum(megatron_run.losses, []), abs=1e-6)
    assert package_run.norms == pytest.approx(megatron_run.norms, rel=1e-5)
    for key in ("gradients", "parameters"):
        tensors, expected = getattr(package_run, key), getattr(megatron_run, key)
        if expected:  # no gradients are complete on a rank of a distributed optimizer
            assert_close_tensors(tensors, expected, rtol=1e-5, atol=1e-6)
        assert tensors.keys() == expected.keys()


def assert_equal_outputs(
    package_run: RunResults, megatron_run: RunResults, names: Sequence[str]
) -> None:
    """Compare the outputs of these names that the last rank computes from logits."""
    assert list(map(len, package_run.logit_results)) == [8, 4, 8]
    runs = (sum(run.logit_results, []) for run in (package_run, megatron_run))
    for results, expected in zip(*runs, strict=True):
        for name in names:
            torch.testing.assert_close(results[name], expected[name], rtol=1e-6, atol=2e-6)


STOCK_RUNS: dict[str, RunResults] = {}
"""Runs without this package's schedules, which several tests compare with."""


def run_library(
    farm: Farm,
    shape: str,
    schedule: str | None,
    flags: Sequence[str] = (),
    options: dict[str, Any] | None = None,
    ranks: int = RANKS,
    **call_options: Any,
) -> RunResults:
    key = repr((shape, flags, options, ranks, call_options))
    if schedule is None and key in STOCK_RUNS:
        return STOCK_RUNS[key]
    module = "parsing_trainer" if shape == "slime" else "other_trainer"
    call_options |= {"shape": shape, "schedule": schedule, "options": options or {}}
    run = farm.run(ranks, *flags, plugin=module, argument=call_options)
    result = join_records(run.check().records)
    if schedule is None:
        STOCK_RUNS[key] = result
    return result


slow = pytest.mark.slow
BOTH = ["v-half", pytest.param("zb-h1", marks=slow)]
CHUNKS = {"v-half": 2, "v-zb": 2, "zb-h1": 1}


@pytest.mark.parametrize(
    ("shape", "schedule"),
    [
        ("bridge", "v-half"),
        ("verl", "v-zb"),
        ("areal", "zb-h1"),
        *(pytest.param("bridge", name, marks=slow) for name in ("v-zb", "zb-h1")),
        *(pytest.param("verl", name, marks=slow) for name in ("v-half", "zb-h1")),
        *(pytest.param("areal", name, marks=slow) for name in ("v-half", "v-zb")),
    ],
)
def test_training_equals_the_library_with_1f1b(farm: Farm, shape: str, schedule: str) -> None:
    plain = run_library(farm, shape, None)
    assert plain.chunks == 1
    assert len(plain.losses) == 3  # one rank reads them
    package_run = run_library(farm, shape, schedule)
    assert package_run.chunks == CHUNKS[schedule]
    assert_equal_results(package_run, plain)


COUNTS = ((4, 4, 4, 5, 3, 4), (4, 3, 3, 6, 4, 3))
"""Microbatches of each replica: equal, new to one of them or to both, and known to both."""


@pytest.mark.parametrize(
    ("schedule", "overlaps"),
    [
        ("v-half", True),
        ("zb-h1", False),
        pytest.param("v-half", False, marks=slow),
        pytest.param("zb-h1", True, marks=slow),
    ],
)
def test_losses_equal_megatron_with_unequal_microbatches_of_replicas(
    farm: Farm, schedule: str, overlaps: bool
) -> None:
    options = {"pipeline": 2, "counts": COUNTS, "distributed_optimizer": overlaps}
    options |= {"ranks": REPLICATED}
    plain = run_library(farm, "verl", None, **options)
    assert sorted(map(len, plain.losses)) == sorted(sum(COUNTS, ()))
    assert_equal_results(run_library(farm, "verl", schedule, **options), plain)


@pytest.mark.parametrize("schedule", BOTH)
def test_results_are_on_the_ranks_that_libraries_read(farm: Farm, schedule: str) -> None:
    """On the ranks of two replicas, with every reader that `callers` lists."""
    plain = run_library(farm, "any", None, ranks=REPLICATED, pipeline=2)
    package_run = run_library(farm, "any", schedule, ranks=REPLICATED, pipeline=2)
    readers = {caller.reader for caller in CALLERS if caller.reader}
    pairs = zip(package_run.read, plain.read, strict=True)
    for rank, (results, expected_results) in enumerate(pairs):
        assert results.keys() == expected_results.keys() >= readers
        for reader, steps in results.items():
            for step, expected in zip(steps, expected_results[reader], strict=True):
                assert step == pytest.approx(expected, abs=1e-6), f"{reader} on rank {rank}"


@pytest.mark.parametrize("schedule", BOTH)
def test_an_embedding_that_the_library_replaces_stays_tied(farm: Farm, schedule: str) -> None:
    """The library ties the embedding of every chunk again. In a V, first and last share it."""
    plain = run_library(farm, "areal", None, extends=["replaced"])
    assert_equal_results(run_library(farm, "areal", schedule, extends=["replaced"]), plain)


def test_ranks_with_lost_connections_report_the_first_failure(farm: Farm) -> None:
    """Outside of all passes, on the rank that the others wait for in the next step."""
    with pytest.raises(AssertionError) as failed:
        run_library(farm, "verl", "v-half", ranks=4, fails=3)
    text = str(failed.value)
    assert "rank 3: KeyError: 'metrics'\n" in text
    message = r"rank \d \(device \d\): .*connection failed: .*; before, rank 3: KeyError"
    assert re.search(message, text)


@pytest.mark.parametrize("how", ["bare", pytest.param("repeated", marks=pytest.mark.slow)])
def test_one_data_iterator_serves_all_chunks(farm: Farm, how: str) -> None:
    """All chunks see the same microbatches, even if one removes entries that another needs."""
    plain = run_library(farm, "verl", None)
    assert_equal_results(run_library(farm, "verl", "v-half", iterators=how), plain)


def test_a_shared_microbatch_is_kept_until_the_last_chunk_has_read_it() -> None:
    source = iter([{"tokens": index} for index in range(3)])
    chunks = iterators_by_chunk([source], 2)
    first, second = share_iterators(chunks)
    assert [next(first).pop("tokens") for _ in range(2)] == [0, 1]
    assert next(second) == {"tokens": 0}
    assert [next(iterator)["tokens"] for iterator in (second, second, first)] == [1, 2, 2]
    assert first.shared._waiting == {}
    assert list(first) == []
    assert share_iterators(iterators_by_chunk(None, 2)) == [None, None]
    assert share_iterators(chunks[:1]) == [source]  # whose own it is, untouched


def test_unusable_data_iterators_are_rejected_with_the_fix() -> None:
    with pytest.raises(UnsupportedError, match="3 data iterators are given for the 2 model chunks"):
        iterators_by_chunk([iter(()), iter(()), iter(())], 2)
    with pytest.raises(UnsupportedError, match="one SimpleNamespace is given for 2 model chunks"):
        iterators_by_chunk(SimpleNamespace(get_next=lambda keys: {}), 2)


SLIME = (
    "--pipeline-model-parallel-size 2 --use-distributed-optimizer --variable-seq-lengths".split()
)


@pytest.mark.parametrize("parsing", ["apart", pytest.param("flags", marks=slow)])
def test_a_library_with_megatrons_parser(farm: Farm, parsing: str) -> None:
    """By flags in one process, and by `register` where another one validates the arguments."""
    plain = run_library(farm, "slime", None, SLIME, ranks=REPLICATED, apart=False)
    apart = parsing == "apart"
    flags = [*SLIME, *(() if apart else ("--pipeline-schedule", "v-half"))]
    run_options = {"options": {"schedule": "v-half"} if apart else {}, "apart": apart}
    package_run = run_library(farm, "slime", "v-half", flags, ranks=REPLICATED, **run_options)
    assert (plain.chunks, package_run.chunks) == (1, 2)
    assert_equal_results(package_run, plain)


def test_schedule_registered_in_another_process_is_rejected(farm: Farm) -> None:
    flags = [*SLIME, "--pipeline-schedule", "v-half"]
    with pytest.raises(AssertionError, match="v-half came with arguments that Megatron does not"):
        run_library(farm, "slime", "v-half", flags, ranks=REPLICATED, apart=True)


@needs_hybrid
@pytest.mark.parametrize("schedule", BOTH)
def test_a_hybrid_model(farm: Farm, schedule: str) -> None:
    """Only the constructor gets the pattern. Stages in the pattern are those of the library."""
    plain = run_library(farm, "areal", None, pattern="M-*-|M*-*")
    package_run = run_library(farm, "areal", schedule, pattern="M-*-M*-*")
    assert_equal_results(package_run, plain)
    chunks = "M-|*-|M*|-*" if CHUNKS[schedule] == 2 else "M-*-|M*-*"
    marked = run_library(farm, "areal", schedule, pattern=chunks)
    assert_equal_results(marked, plain)


@pytest.mark.slow
@needs_hybrid
def test_a_provider_of_hybrid_models_that_knows_of_no_chunks(farm: Farm) -> None:
    plain = run_library(farm, "bridge", None, pattern="M-*-|M*-*")
    for schedule, chunks in (("v-half", 2), ("zb-h1", 1)):
        package_run = run_library(farm, "bridge", schedule, pattern="M-*-M*-*")
        assert package_run.chunks == chunks
        assert_equal_results(package_run, plain)


@pytest.mark.parametrize(
    ("schedule", "steps_ahead"), [("v-half", True), pytest.param("zb-h1", False, marks=slow)]
)
def test_the_first_chunk_is_stepped_first_where_there_are_several(
    farm: Farm, schedule: str, steps_ahead: bool
) -> None:
    """On replicas; with one chunk per rank there is nothing to step first, and it is turned off."""
    sharded = {"ranks": REPLICATED, "pipeline": 2, "distributed_optimizer": True}
    package_run = run_library(farm, "bridge", schedule, **sharded, steps_ahead=True)
    assert package_run.first["stepped_ahead"] is steps_ahead
    assert_equal_results(package_run, run_library(farm, "bridge", None, **sharded))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["dualpipev", "v-half"])
def test_overlapped_all_to_all_of_experts(farm: Farm, schedule: str) -> None:
    """The library sets Megatron's option in its config. Its 1F1B does not support it."""
    sizes = {"ranks": REPLICATED, "pipeline": 2}
    plain = run_library(farm, "bridge", None, **sizes, beside=False)
    package_run = run_library(farm, "bridge", schedule, **sizes, beside=True)
    assert package_run.chunks == 2
    assert sum(package_run.losses, []) == pytest.approx(sum(plain.losses, []), rel=2e-3)
    assert package_run.norms == pytest.approx(plain.norms, rel=2e-2)
    assert package_run.parameters.keys() == plain.parameters.keys()
    assert any("local_experts" in name for name in package_run.parameters)
    for name, value in plain.gradients.items():
        difference = (package_run.gradients[name].float() - value.float()).norm()
        assert difference <= 2e-2 * value.float().norm() + 1e-6, name


def test_megatron_core_without_a_trainer(farm: Farm, tmp_path: Path) -> None:
    """In processes in which megatron.training cannot be imported."""
    plain = run_library(farm, "bridge", None)
    port = str(random.SystemRandom().randrange(10_000, 32_000))
    alone = Path(__file__).with_name("without_trainer.py")
    ended = subprocess.run(
        [sys.executable, str(alone), str(tmp_path), port],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(alone.parents[2])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    assert "flags name a schedule (No module named 'megatron.training')" in ended.stdout
    package_run = join_records(
        [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]
    )
    assert package_run.chunks == 2
    assert_equal_results(package_run, plain)


@pytest.mark.slow
def test_a_loop_of_megatrons_rl_with_one_chunk(farm: Farm) -> None:
    plain = run_library(farm, "rl", None)
    assert len({tuple(losses) for losses in plain.losses}) == 3  # the weights move
    for schedule in ("zb-h1", "gpipe"):
        package_run = run_library(farm, "rl", schedule)
        assert package_run.chunks == 1
        assert_equal_results(package_run, plain)


@pytest.mark.slow
def test_a_schedule_file_and_a_layer_split(farm: Farm, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(make("v-half", RANKS, 8).to_json())
    plain = run_library(farm, "bridge", None)
    options = {"layer_split": "0,1,2,1"}
    package_run = run_library(farm, "bridge", str(file), options=options)
    assert package_run.chunks == 2
    assert_equal_results(package_run, plain)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schedul": "v-half"}, "register knows no option 'schedul'; its options are costs_file"),
        ({"layer_split": "auto"}, "schedule is None: give one of this package, such as 'v-half'"),
        ({"schedule": "1f1b"}, "schedule is '1f1b': give one of this package"),
        ({"schedule": "v-zb", "post_validates": True}, "post_validates is for Megatron-LM's own"),
        ({"schedule": "v-zb", "timeout_seconds": "120"}, "timeout_seconds '120' is not a number"),
    ],
)
def test_bad_options_are_rejected_at_registration(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        megatron_vshape.register(**options)


def test_a_rejection_ends_every_rank_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    why = (
        "--pipeline-schedule auto needs costs: give --pipeline-costs FILE, or "
        "--pipeline-profile-iterations A:B to measure them"
    )
    for rank, status in (("0", f"megatron-vshape: {why}"), ("1", 1)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(RefusedError) as refused, refusing():
            resolve_schedule(Options("auto"), RANKS)
        assert (refused.value.code, refused.value.why) == (status, why)


def test_recomputed_inputs_are_logged_as_with_flags() -> None:
    config = DeferredConfig(
        num_layers=8,
        hidden_size=32,
        num_attention_heads=4,
        recompute_granularity="selective",
        recompute_modules=["core_attn", "layernorm"],
    )
    config.pipeline_model_parallel_size = RANKS
    pipeline = pipeline_from_config(config, options_from({"schedule": "v-half"}))
    assert pipeline.recomputed_inputs == ("layernorm",)
    line = "activations that B recomputes for layernorm (--recompute-modules) are stored until W"
    assert line in opening_lines(pipeline, Planner(pipeline.choice), 8)


def test_memory_limit_includes_static_memory(farm: Farm, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(Costs.uniform(RANKS, 2 * RANKS, 100, 120, 90, 5).to_json())
    options = {"costs_file": str(costs), "memory_limit_gib": 1e-9}
    with pytest.raises(AssertionError, match="nothing fits memory_limit_gib=1e-09: rank 0"):
        run_library(farm, "areal", "auto", options=options)
    package_run = run_library(farm, "bridge", "auto", options=options | {"memory_limit_gib": 8.0})
    assert package_run.chunks == 2
    assert len(package_run.losses) == 3
