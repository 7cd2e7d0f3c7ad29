"""The configurations next to a command's, and the rows that compare them."""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rehearsal.reports import report_of
from rehearsal.warm import Warm
from tuning.counts import Fake, predictor_of
from tuning.samples import load_sample, write_sweep

from megatron_vshape.cli.main import main
from megatron_vshape.core.budget import Budget
from megatron_vshape.core.evaluation import evaluate_named
from megatron_vshape.core.model.amounts import STATE_BYTES
from megatron_vshape.core.model.kinds import Kind, ScheduleError
from megatron_vshape.core.model.pieces import Pieces
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.model.stage_costs import StageCosts
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.request import PlanRequest, PlanResult
from megatron_vshape.rehearsal import accuracy, report
from megatron_vshape.rehearsal.command import Command, flag_changes
from megatron_vshape.rehearsal.command_reader import read_command
from megatron_vshape.rehearsal.configuration_costs import CountedCosts, Parameters
from megatron_vshape.rehearsal.gpus import GIB, GPUS, HEADROOM
from megatron_vshape.rehearsal.megatron_layers import is_even
from megatron_vshape.rehearsal.rank_job import RankJob
from megatron_vshape.rehearsal.ranks import DryRunConfig
from megatron_vshape.rehearsal.saved_config import LAYOUT
from megatron_vshape.rehearsal.step_time import Rates
from megatron_vshape.tuning import fsdp
from megatron_vshape.tuning.advice import Advice
from megatron_vshape.tuning.advice_report import format_rejection
from megatron_vshape.tuning.comparison import sizes_text
from megatron_vshape.tuning.configurations import (
    ADAPTIVE,
    FULL,
    GIVEN,
    NONE,
    Configuration,
    Subject,
    configuration_of_command,
    faults,
    neighbors,
)
from megatron_vshape.tuning.grid import expand_grid
from megatron_vshape.tuning.machine import Machine
from megatron_vshape.tuning.predictor import (
    Prediction,
    Predictor,
    Verdict,
    key_of_count,
    step_seconds,
)
from megatron_vshape.tuning.row_command import StartChecks, row_command, script_of

EXPERTS = """pretrain_gpt.py --num-layers 16 --num-attention-heads 8 --num-experts 8
    --micro-batch-size 2 --seq-length 512
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2
    --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --global-batch-size 32
    --recompute-granularity full --num-layers-per-virtual-pipeline-stage 2"""


SMALL = """--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --vocab-size 1023
    --pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method uniform
    --recompute-num-layers 1 --tokenizer-type NullTokenizer"""


def advise(*options: object) -> int:
    """Run the command for the small model, without headroom, and return its exit status."""
    words = ["advise", *map(str, options), "--headroom", "0"]
    return main([*words, "--", "pretrain_gpt.py", *SMALL.split()])


def subject(words: str, *flags: str) -> Subject:
    return Subject.of_command([*words.split(), *flags], "")


def changes(row: Prediction, model: Subject) -> list[str]:
    return flag_changes(model.command, row_command(row, model, "plan.json"))


@pytest.fixture
def fake_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the dry runs of `advise` by invented counts."""
    monkeypatch.setattr("megatron_vshape.cli.advice_options.Counts", Fake)


START = StartChecks.start


@pytest.fixture(autouse=True)
def no_start_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the start-up checks of `advise`, whose models here are numbers only."""
    monkeypatch.setattr("megatron_vshape.tuning.row_command.StartChecks.start", lambda *_: None)


def test_every_size_is_a_candidate_unless_it_is_kept() -> None:
    model = subject(EXPERTS)
    command_config = configuration_of_command(model, 32)
    configs = list(neighbors(command_config, model, 32, []))
    fitting = [config for config in configs if not list(faults(config, model, 32, 8))]
    assert {config.expert_parallel for config in fitting} == {2, 4, 8}
    assert {config.context_parallel for config in fitting} >= {1, 2, 4}
    assert {config.microbatch_size for config in fitting} == {1, 2, 4}
    # The command has no sequence parallelism, so its own sizes are also tried with it.
    assert {config.recompute for config in configs} == {NONE, GIVEN}
    assert [config for config in configs if config.recompute == GIVEN] == [
        replace(command_config, sequence_parallel=True)
    ]
    assert {config.num_devices for config in fitting} == {32}
    selective = subject(EXPERTS.replace("granularity full", "granularity selective"))
    selective_configs = [
        config
        for config in neighbors(command_config, selective, 32, [])
        if config.recompute == GIVEN
    ]
    sizes = [(config.microbatch_size, config.tensor_parallel) for config in selective_configs]
    assert sizes == [(2, 2), (2, 1), (4, 2)]
    keep = ["ep", "cp", "microbatch", "recompute"]
    for config in neighbors(command_config, model, 32, keep):
        sizes = (config.expert_parallel, config.context_parallel, config.microbatch_size)
        assert sizes == (4, 2, 2)
        assert config.recompute == GIVEN
    again = subject("pretrain_gpt.py", *command_config.command(model).flags)
    assert configuration_of_command(again, 32) == command_config


def test_today_has_sequence_parallelism_only_if_the_command_has() -> None:
    """It was counted with it, so the flag that other rows need was never among the changes."""
    layer = StageCosts.of(1.0, 1.0, 1.0, 3.0 * GIB, 0.0)
    parallel = layer.changed({Kind.F.allocated: 1.5 * GIB})
    words = f"{LAYERS_36} --global-batch-size 64 --tensor-model-parallel-size 2 --seq-length 64"
    words = words.replace("parallel-size 4", "parallel-size 2")
    advice = make_advice(subject(words), Pieces(layer, NOTHING, NOTHING, 0.0))
    counted = advice.predictor.counts.costs_of(advice.command_config)
    of_parallel = replace(counted, pieces=Pieces(parallel, NOTHING, NOTHING, 0.0))

    def costs_of(config: Configuration) -> CountedCosts:
        is_parallel = config.counted_command(advice.predictor.subject).has("--sequence-parallel")
        return of_parallel if is_parallel else counted

    model = advice.predictor.subject
    advice.predictor = replace(advice.predictor, counts=SimpleNamespace(costs_of=costs_of))
    keep = ["tp", "pp", "microbatch", "cp", "recompute"]
    advice.neighbors = list(neighbors(advice.command_config, model, 4, keep))
    assert len({key_of_count(config) for config in (advice.command_config, *advice.neighbors)}) == 2
    comparison = advice.compare()
    today, stock = comparison.today, comparison.stock
    assert (today.fits, stock.fits) == (False, True)
    assert sizes_text(today.configuration, model) == "TP 2 without SP PP 2"
    assert row_command(stock, model, "").has("--sequence-parallel")
    assert not row_command(today, model, "").has("--sequence-parallel")
    with_flag = subject(words, "--sequence-parallel")
    command_config = configuration_of_command(with_flag, 4)
    assert list(neighbors(command_config, with_flag, 4, keep)) == []
    assert command_config.command(with_flag).has("--sequence-parallel")


NOTHING = StageCosts.of(0, 0, 0)
EQUAL = Pieces(StageCosts.of(1.0, 1.0, 1.0, 1.0, 0.0), NOTHING, NOTHING, 0.0)


def make_advice(model: Subject, pieces: Pieces, communicators: int = 0, **options: Any) -> Advice:
    """Return an advice for four H100 by these costs, with 18 bytes of state per parameter."""
    parts = (pieces.layer, pieces.first, pieces.last)
    parameters = Parameters(*(part[STATE_BYTES] / 18 for part in parts))
    counted = CountedCosts(
        pieces, 0.0, 0.0, Rates(), 1.0, 0.0, parameters, communicators=communicators
    )
    machine = Machine(GPUS["h100"], 4)
    predictor = Predictor(
        model, machine, SimpleNamespace(costs_of=lambda config: counted), **options
    )
    command_config = configuration_of_command(model, 4)

    def make_dry_run_config() -> DryRunConfig:
        return DryRunConfig.of(model.command, machine.gpu)

    return Advice(predictor, command_config, accuracy.DENSE, 1.0, make_dry_run_config)


LAYERS_36 = """pretrain_gpt.py --num-layers 36 --pipeline-model-parallel-size 4
    --global-batch-size 32 --micro-batch-size 1 --untie-embeddings-and-output-weights"""


def test_stock_megatron_may_distribute_layers_by_their_work() -> None:
    """With an even split, an output layer as slow as four layers delays all ranks."""
    model, layer = subject(LAYERS_36), StageCosts.of(1.0, 1.0, 1.0, GIB, 0.0)
    head = StageCosts.of(4.0, 4.0, 4.0, 0.0, 0.0)
    pieces = Pieces(layer, NOTHING, head, 0.0)
    advice = make_advice(model, pieces)
    rows = {
        (row.configuration.schedule, is_even(row.layers)): row
        for row in advice.stock(advice.command_config)
    }
    even, uneven = rows["1f1b", True], rows["1f1b", False]
    assert even.layers == (9, 9, 9, 9)
    assert uneven.layers == (10, 10, 10, 6)
    assert step_seconds(uneven) < 0.8 * step_seconds(even)
    layout = "Et*10|(t*10|)*2t*6L"
    flag = "--pipeline-model-parallel-layout"
    assert changes(uneven, model) == [f"{flag} '{layout}'"]
    assert len(changes(rows["interleaved-1f1b:3", False], model)) == 1
    assert changes(even, model) == []
    split_advice = make_advice(subject(LAYERS_36, flag, layout), pieces)
    assert step_seconds(split_advice.today()) == step_seconds(uneven)
    assert changes(even, split_advice.predictor.subject) == [f"remove {flag}"]
    # Megatron rejects a second flag for virtual stages or for the layers of stages.
    old_flags = "--num-layers-per-virtual-pipeline-stage 3 --decoder-first-pipeline-num-layers 9"
    old = subject(LAYERS_36, *old_flags.split())
    removals = [f"remove {name}" for name in old_flags.split()[::2]]
    assert changes(uneven, old) == [*removals, f"{flag} '{layout}'"]
    assert changes(even, old) == removals
    # Of 40 layers' activations that a first rank with ten layers needs, 38 are there.
    total = GPUS["h100"].memory_bytes
    headroom_bytes = total - 40.0 * GIB  # of which 2 are outside of torch's allocator
    tight = make_advice(model, pieces, headroom_bytes=headroom_bytes)
    tight_rows = [
        row for row in tight.stock(tight.command_config) if row.configuration.schedule == "1f1b"
    ]
    assert [row.layers for row in tight_rows] == [(9, 9, 9, 9), (10, 10, 10, 6), (9, 10, 10, 7)]
    # One that does not fit is in no comparison, so it is not simulated.
    assert [row.step_s is not None for row in tight_rows] == [row.fits for row in tight_rows]


def test_sizes_whose_last_rank_has_most_work_may_be_the_fastest() -> None:
    """Vocabulary parallelism shards an output layer that is slower than any other rank."""
    model, layer, head = subject(LAYERS_36), StageCosts.of(1.0, 1.0, 1.0, 1.0, 0.0), 36.0
    last = StageCosts.of(head, head, head, 1.0, 0.0)
    advice = make_advice(model, Pieces(layer, NOTHING, last, 0.0))
    counted = advice.predictor.counts.costs_of(advice.command_config)
    faster = replace(counted.pieces, layer=layer.times(0.8), last=last.times(0.8))
    recompute_config = replace(advice.command_config, recompute=FULL)
    advice.predictor = replace(
        advice.predictor,
        counts=SimpleNamespace(
            costs_of=lambda config: (
                replace(counted, pieces=faster) if config.recompute == FULL else counted
            )
        ),
    )
    advice.neighbors = [recompute_config]
    best = advice.compare().best
    # Without vocabulary parallelism, the output layer alone is slower than this.
    assert step_seconds(best) < 32 * 3e-6 * 0.8 * head
    assert (best.configuration.recompute, best.configuration.vocab_parallel) == (FULL, True)
    assert advice._mean_busy_s(recompute_config) <= step_seconds(best)


@pytest.mark.parametrize("dummy_gib", [0.0, 2.0, 9.0])
def test_a_plan_like_1f1b_needs_the_memory_of_megatron_to_be_stock(
    dummy_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers per rank: 72 GiB, and the dummy gradients that Megatron's backward keeps."""

    def plan_1f1b(request: PlanRequest, budget: Budget) -> PlanResult:
        # As the search finds for these costs, but independent of its time limit.
        return PlanResult.of_plan(evaluate_named("1f1b", request), ())

    monkeypatch.setattr("megatron_vshape.tuning.predictor.plan_request", plan_1f1b)
    pieces = Pieces(
        StageCosts.of(
            1.0, 2.0, 0.01, 5 * GIB, 5 * GIB, state_bytes=15 * GIB, dummy_bytes=dummy_gib * GIB
        ),
        NOTHING,
        NOTHING,
        0.0,
        host_us=10.0,
    )
    advice = make_advice(subject(LAYERS_36.replace("36", "8")), pieces)
    plan = advice.predictor.planned_with_layers(advice.command_config, pieces, 0.5)
    stock = advice.published("1f1b", advice.command_config, is_stock=True)
    assert plan.is_stock == stock.fits == (dummy_gib < 9.0)
    assert plan.configuration.schedule == ("1f1b" if stock.fits else ADAPTIVE)
    assert step_seconds(plan) == pytest.approx(step_seconds(stock))
    less = 0.0 if stock.fits else 2 * dummy_gib * GIB
    assert plan.peak_bytes == pytest.approx(stock.peak_bytes - less)


FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
WITH_ENDS = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        (WITH_ENDS, (7, 8, 8, 7)),
        (f"{FIRST} 8 {LAST} 6", (8, 8, 8, 6)),
        (f"{WITH_ENDS} --num-layers-per-virtual-pipeline-stage 4", (3, 4, 4, 4, 4, 4, 4, 3)),
    ],
)
def test_today_has_the_layers_of_megatron(flags: str, layers: tuple[int, ...]) -> None:
    model = subject(f"{LAYERS_36} --num-layers 30 {flags}")
    row = make_advice(model, EQUAL).today()
    assert row.layers == layers
    assert row.fits
    assert format_rejection(row, model.command) == []


@pytest.mark.parametrize(
    ("flags", "reason", "fix"),
    [
        (
            "",
            "30 layers do not divide among 4 pipeline ranks",
            f"7, 8, 8, 7: {WITH_ENDS}",
        ),
        (
            f"{FIRST} 31",
            "30 layers do not divide among 4 pipeline ranks",
            f"{WITH_ENDS} and remove {FIRST}.",
        ),
        (
            f"{WITH_ENDS} --num-virtual-stages-per-pipeline-rank 3",
            "32 layers, with embedding and loss, do not divide among 4 pipeline ranks with 3 ",
            "--pipeline-model-parallel-layout",
        ),
    ],
)
def test_a_split_that_megatron_rejects_is_no_baseline(flags: str, reason: str, fix: str) -> None:
    """Stock Megatron asserts that the layers divide, or also embedding and output layer."""
    model = subject(f"{LAYERS_36} --num-layers 30 {flags}")
    advice = make_advice(model, EQUAL)
    row = advice.today()
    assert not row.fits
    assert row.step_s is not None
    (text,) = format_rejection(row, model.command)
    assert text.startswith(f"Megatron does not start this command: {reason}")
    assert fix in text
    stock = advice.compare().stock
    assert stock.fits
    # This package's schedules support uneven layers.
    package_flags = "--pipeline-schedule v-half --pipeline-layer-split auto"
    model = subject(f"{LAYERS_36} --num-layers 30 {package_flags}")
    assert make_advice(model, advice.predictor.pieces(advice.command_config)).today().fits


V_HALF, INTERLEAVED = "--pipeline-schedule v-half", "--pipeline-schedule interleaved-1f1b"
SPLIT = "--pipeline-layer-split"


@pytest.mark.parametrize(
    ("flags", "name", "layers"),
    [
        (f"--pipeline-schedule 1f1b {SPLIT} 9,9,8,6", "1f1b", (9, 9, 8, 6)),
        (f"--pipeline-schedule 1f1b {LAST} 5", "1f1b", (9, 9, 9, 5)),
        (f"{INTERLEAVED}:4", "interleaved-1f1b:4", (2,) * 16),
        (f"{INTERLEAVED} {SPLIT} 4,4,4,4,5,4,4,3", "interleaved-1f1b:2", (4, 4, 4, 4, 5, 4, 4, 3)),
        (
            f"{INTERLEAVED} --num-layers-per-virtual-pipeline-stage 2",
            "interleaved-1f1b:4",
            (2,) * 16,
        ),
        (V_HALF, "v-half", (4,) * 8),
        (
            f"{V_HALF} {LAYOUT} Et*3|(t*4|)*2t*5|t*5|(t*4|)*2t*3L",
            "v-half",
            (3, 4, 4, 5, 5, 4, 4, 3),
        ),
    ],
)
def test_today_has_the_schedule_and_layers_of_the_command(
    flags: str, name: str, layers: tuple[int, ...]
) -> None:
    """Layers were balanced for a loop instead, and Megatron's own schedules had less memory."""
    model = subject(f"{LAYERS_36} --num-layers 32 {flags}")
    head = StageCosts.of(4.0, 4.0, 4.0, 1.0, 0.0)
    layer = StageCosts.of(1.0, 1.0, 1.0, GIB, 0.0, state_bytes=GIB, dummy_bytes=GIB)
    pieces = Pieces(layer, NOTHING, head, 0.0)
    row = make_advice(model, pieces).today()
    assert (row.configuration.schedule, row.layers) == (name, layers)
    assert row.is_stock == (name != "v-half")
    if name == "1f1b":
        assert row.ranks[0].states == 2 * layers[0] * GIB  # with dummy gradients


def test_today_has_the_vocabulary_parallelism_of_the_command() -> None:
    head = StageCosts.of(32.0, 32.0, 32.0, 1.0, 0.0)
    pieces = Pieces(StageCosts.of(1.0, 1.0, 1.0, 1.0, 0.0), NOTHING, head, 0.0)

    def today(*flags: str) -> Prediction:
        return make_advice(subject(f"{LAYERS_36} --num-layers 32 {V_HALF}", *flags), pieces).today()

    shared = today("--pipeline-vocab-parallel")
    assert shared.configuration.vocab_parallel
    assert step_seconds(shared) < 0.7 * step_seconds(today())


def test_best_stock_has_no_pipeline_if_that_is_fastest() -> None:
    layer = StageCosts.of(100.0, 100.0, 100.0, 1.0, 0.0)
    model = subject(f"{LAYERS_36} --global-batch-size 8")
    advice = make_advice(model, Pieces(layer, NOTHING, NOTHING, 0.0))
    configs = list(neighbors(advice.command_config, model, 4, ["tp", "cp", "microbatch"]))
    advice.neighbors = [config for config in configs if config.pipeline_parallel in (1, 2)]
    stock = advice.compare().stock
    assert (stock.configuration.schedule, stock.layers) == ("1f1b", (36,))
    changes_of_flags = changes(stock, model)
    assert changes_of_flags == ["--pipeline-model-parallel-size 1"]
    kept = neighbors(advice.command_config, model, 4, ["pp"])
    assert {config.pipeline_parallel for config in kept} == {4}


def test_best_stock_has_full_recompute_if_nothing_else_fits() -> None:
    pieces = Pieces(StageCosts.of(1.0, 1.0, 1.0, 3.0 * GIB, 0.0), NOTHING, NOTHING, 0.0)
    recomputed = replace(pieces, layer=StageCosts.of(1.0, 2.0, 1.0, 0.1 * GIB, 0.0))
    advice = make_advice(subject(f"{LAYERS_36} --global-batch-size 64"), pieces)
    counted = advice.predictor.counts.costs_of(advice.command_config)

    def costs_of(config: Configuration) -> CountedCosts:
        return replace(counted, pieces=recomputed if config.recompute == FULL else pieces)

    advice.predictor = replace(advice.predictor, counts=SimpleNamespace(costs_of=costs_of))
    comparison = advice.compare()
    today, stock = comparison.today, comparison.stock
    assert (today.fits, stock.fits) == (False, True)
    assert "--recompute-granularity full" in changes(stock, advice.predictor.subject)


def test_a_stock_row_removes_the_flags_of_the_schedule() -> None:
    model = subject(f"{LAYERS_36} {V_HALF} {SPLIT} 4,5,5,4,4,5,5,4 --pipeline-vocab-parallel")
    advice = make_advice(model, EQUAL)
    stock = advice.published("1f1b", advice.command_config, is_stock=True)
    v_min = advice.published(
        "v-min", advice.command_config, is_stock=False, layers=(4, 5, 5, 4, 4, 5, 5, 4)
    )
    assert changes(stock, model) == [
        "remove --pipeline-schedule",
        "remove --pipeline-layer-split",
        "remove --pipeline-vocab-parallel",
    ]
    assert changes(v_min, model) == [
        "remove --pipeline-vocab-parallel",
        "--pipeline-schedule v-min",
    ]


@pytest.mark.parametrize(
    ("flags", "problem", "fix"),
    [
        ("--pipeline-schedule other", "there is no schedule 'other'", "The names are gpipe"),
        (f"{V_HALF} {LAST} 5 {WITH_ENDS}", "each define the layers", "remove all but one"),
        (f"{V_HALF} {SPLIT} 4,4", "4,4 has 2 numbers", "give one number per stage"),
        (
            f"{INTERLEAVED}:3 --num-virtual-stages-per-pipeline-rank 3",
            "defines the number of virtual stages per rank",
            "remove it",
        ),
    ],
)
def test_layers_that_training_rejects_are_rejected(flags: str, problem: str, fix: str) -> None:
    advice = make_advice(subject(f"{LAYERS_36} {flags}"), EQUAL)
    with pytest.raises(ScheduleError) as error:
        advice.today()
    assert problem in str(error.value)
    assert fix in str(error.value)


@pytest.mark.parametrize(
    ("flags", "problem", "fix"),
    [
        ("--pipeline-schedule auto", "does not support --pipeline-schedule auto", "remove"),
        (f"{V_HALF} --pipeline-slices 2", "does not support --pipeline-slices", "rehearse"),
        (f"{SPLIT} 4,4", f"{SPLIT} has no effect", "set --pipeline-schedule"),
        (
            "--pipeline-schedule 1f1b --pipeline-vocab-parallel",
            "--pipeline-vocab-parallel has no effect with 1f1b",
            "set --pipeline-schedule",
        ),
    ],
)
def test_flags_of_a_schedule_are_checked_before_dry_runs(
    flags: str,
    problem: str,
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("megatron_vshape.cli.advice_options.Counts", None)
    words = ["pretrain_gpt.py", *SMALL.split(), *flags.split()]
    assert main(["advise", "--gpus", "2xH100", "--", *words]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert problem in shown
    assert fix in shown


@pytest.mark.parametrize("peak_gib", [70.0, 73.5, 74.0, 76.5, 77.0])
@pytest.mark.parametrize("headroom", [0.0, HEADROOM])
def test_rehearse_and_advise_agree_whether_a_rank_fits(peak_gib: float, headroom: float) -> None:
    """Of 79.6 GiB, 2.8 are outside of torch's allocator, and 3.2 are kept free."""
    gpu, communicators = GPUS["h100"], 4
    first = NOTHING.changed({STATE_BYTES: peak_gib * GIB})
    pieces = Pieces(StageCosts.of(1.0, 1.0, 1.0, 0.0, 0.0), first, NOTHING, 0.0)
    advice = make_advice(
        subject(LAYERS_36),
        pieces,
        communicators=communicators,
        headroom_bytes=headroom * gpu.memory_bytes,
    )
    row = advice.published("1f1b", advice.command_config, is_stock=True)
    peak = int(row.ranks[0].allocated)
    assert peak == int(peak_gib * GIB)
    rank_report = report_of(
        peak_bytes=peak, reserved_bytes=int(1.01 * peak), communicators=communicators
    )
    verdict = report.format_verdict([rank_report], gpu, headroom * gpu.memory_bytes)
    assert verdict.partition(":")[0].lower() == row.fit
    assert row.fits == (peak <= (76.8 if headroom == 0 else 73.6) * GIB)


def test_the_last_rank_of_a_tied_model_has_a_copy_of_the_embedding() -> None:
    """In a V, the first rank has both the embedding and the output layer."""
    embedding = StageCosts.of(0.0, 0.0, 0.0, 0.0, 0.0, state_bytes=3.0 * GIB)
    pieces = Pieces(StageCosts.of(1.0, 1.0, 1.0, 0.0, 0.0), embedding, NOTHING, 0.0)

    def states(name: str, words: str) -> list[float]:
        advice = make_advice(subject(words), pieces)
        row: Prediction | None = advice.published(
            name, advice.command_config, is_stock=name == "1f1b"
        )
        return [rank.states / GIB for rank in row.ranks]

    tied = LAYERS_36.replace("--untie-embeddings-and-output-weights", "")
    assert states("1f1b", tied) == [3, 0, 0, 3]
    assert states("1f1b", LAYERS_36) == [3, 0, 0, 0]
    assert states("v-half", tied) == [3, 0, 0, 0]


@pytest.mark.usefixtures("fake_counts")
def test_advise_reads_the_grid_of_an_old_sweep_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best of `sweep --predict-only` is the best row of `advise`, with its flags."""
    file = tmp_path / "advice.json"
    assert advise("--grid", write_sweep(tmp_path), "--json", file) == 0
    rows = json.loads(file.read_text())
    loaded = load_sample(tmp_path)
    predictions = [predictor_of(loaded)(config) for config in expand_grid(loaded).possible]
    best = min(predictions, key=step_seconds)
    assert rows["best"]["schedule"] == best.configuration.schedule
    assert rows["best"]["step_s"] == best.step_s
    assert f"--pipeline-schedule {best.configuration.schedule}" in rows["best"]["flags"]
    assert rows["stock"]["schedule"] == "1f1b"
    # Stock Megatron runs this row, so its flags are Megatron's.
    assert rows["stock"]["is_stock"]
    assert not any(flag.startswith("--pipeline-schedule") for flag in rows["stock"]["flags"])
    shown = capsys.readouterr().out
    assert shown.startswith("Recommendation")
    assert "Without a pipeline (FSDP2): " in shown.replace("\n", " ")


@pytest.mark.usefixtures("fake_counts")
def test_a_grid_is_compared_for_the_workload_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step of a shorter sequence is no faster configuration; post-validation is a flag."""
    workloads = [{"sequence_length": length, "global_batch_size": 8} for length in (16, 64)]
    file, rows = tmp_path / "advice.json", {}
    for name, sweep in {
        "one": {},
        "two": {"workloads": workloads},
        "post-validated": {"post_validation": True},
    }.items():
        assert advise("--grid", write_sweep(tmp_path, sweep=sweep), "--json", file) == 0
        rows[name] = json.loads(file.read_text())
    assert rows["one"] == rows["two"]
    assert rows["post-validated"]["stock"] == rows["one"]["stock"]
    assert "--optimizer-post-validation" in rows["post-validated"]["best"]["flags"]
    assert rows["post-validated"]["best"]["step_s"] <= rows["one"]["best"]["step_s"]
    capsys.readouterr()
    assert advise("--grid", write_sweep(tmp_path, sweep={"workloads": workloads[:1]})) == 2
    assert "has no configuration for the workload of the command (64" in capsys.readouterr().err


def test_configurations_beyond_the_maximum_are_not_evaluated_and_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One less than the maximum was evaluated, and the others were omitted without a message."""
    counted: list[Configuration] = []

    class Recorded(Fake):
        def count(self, combinations: Iterable[Configuration], progress: Any) -> tuple[int, int]:
            counted.extend(combinations)
            return 0, 0

    monkeypatch.setattr("megatron_vshape.cli.advice_options.Counts", Recorded)
    monkeypatch.setattr("megatron_vshape.cli.advice_options.MAX_OTHER_CONFIGURATIONS", 1)
    words = ["pretrain_gpt.py", *SMALL.split()]
    command = ["advise", "--gpus", "2xH100", "--keep", "tp,cp", "--seconds", "0.1", "--", *words]
    assert main(command) == 0
    model = Subject.of_command(words, "")
    command_config = configuration_of_command(model, 2)
    neighbor_configs = [
        config
        for config in neighbors(command_config, model, 2, ["tp", "cp"])
        if not list(faults(config, model, 2, 8))
    ]
    assert counted == [command_config, *neighbor_configs[:1]]
    shown = " ".join(capsys.readouterr().out.split())
    why = "advise evaluates at most 1 other configurations"
    assert shown.count(why) == len(neighbor_configs) - 1 == 2
    assert (
        f"; {sizes_text(neighbor_configs[1], model)}: {why}"
        in shown.partition("Not evaluated: ")[2]
    )


@pytest.mark.parametrize(
    ("name", "value"), [("v-zb", "v-zb"), ("grouped-interleaved-1f1b:3", "plan.json")]
)
def test_flags_name_a_schedule_only_if_training_has_the_name(name: str, value: str) -> None:
    subject = Subject.of_command(["pretrain_gpt.py", *SMALL.split()], "")
    config = replace(configuration_of_command(subject, 2), schedule=name)
    row = Prediction(config, Verdict.RUNS, 0.0, layers=(2, 2, 2, 2))
    assert row_command(row, subject, "plan.json").value("--pipeline-schedule") == value


def test_rows_that_do_not_start_are_found(
    warm: Warm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Megatron rejects two flags for virtual stages; a plan is checked with its schedule file."""
    pytest.importorskip("megatron.core")
    monkeypatch.setattr("megatron_vshape.rehearsal.ranks.run_jobs", warm.run_jobs)
    monkeypatch.setattr(StartChecks, "start", START)
    subject = Subject.of_command(["pretrain_gpt.py", *SMALL.split(), "--swap-optimizer"], "")
    config = configuration_of_command(subject, 2)
    schedule = plan_request(PlanRequest("v-half", 2, config.num_microbatches)).schedule
    layers = (2, 2, 2, 2)
    rows = {
        "stock": Prediction(
            replace(config, schedule="1f1b"), Verdict.RUNS, 0.0, layers=(4, 4), is_stock=True
        ),
        "best": Prediction(config, Verdict.RUNS, 0.0, layers=layers, schedule=schedule),
        "few": Prediction(config, Verdict.RUNS, 0.0, layers=(1, 2, 2, 2), schedule=schedule),
    }
    programs = DryRunConfig.of(subject.command, GPUS["h100"], None, None)
    with ThreadPoolExecutor(1) as executor:
        checks = StartChecks(subject, 2, lambda: programs, executor)
        checks.start(rows["few"])
        ((row, fault),) = checks.faults(rows.values())
        assert not checks.faults([rows["stock"]])
    assert row is rows["few"]
    assert "adds up to 7 layers and the model has 8" in fault
    assert "does not have: --swap-optimizer. Some may lower the memory" in caplog.text


def test_a_row_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the best stock schedule runs during the search, and its row may be the best."""
    checked: list[str] = []

    def check_all(_: object, jobs: Iterable[RankJob]) -> list[object]:
        checked.extend(job.name for job in jobs)
        return []

    monkeypatch.setattr("megatron_vshape.tuning.row_command.check_all", check_all)
    monkeypatch.setattr(StartChecks, "start", START)
    model = subject("pretrain_gpt.py " + SMALL)
    config = configuration_of_command(model, 2)
    stock, gpipe = (
        Prediction(replace(config, schedule=name), Verdict.RUNS, 0.0, layers=(4, 4), is_stock=True)
        for name in ("1f1b", "gpipe")
    )
    programs = DryRunConfig.of(model.command, GPUS["h100"], None, None)
    with ThreadPoolExecutor(1) as executor:
        checks = StartChecks(model, 2, lambda: programs, executor)
        checks.start(None)
        checks.start(stock)
        assert checks.faults([stock, gpipe]) == []
    assert checked == ["1f1b"] * 2 + ["gpipe"] * 2


def test_a_row_without_a_pipeline_is_checked_with_few_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has all layers on every rank, with all their experts if they are not distributed."""
    jobs: list[RankJob] = []

    def check_all(_: object, checks: Iterable[RankJob]) -> list[object]:
        jobs.extend(checks)
        return []

    monkeypatch.setattr("megatron_vshape.tuning.row_command.check_all", check_all)
    model = subject("pretrain_gpt.py " + SMALL, "--moe-layer-freq", "([0]*2+[1]*6)")
    config = replace(configuration_of_command(model, 2), schedule="1f1b")
    rows = [
        Prediction(replace(config, pipeline_parallel=size), Verdict.RUNS, 0.0, is_stock=True)
        for size in (1, 2)
    ]
    monkeypatch.setattr(StartChecks, "start", START)
    programs = DryRunConfig.of(model.command, GPUS["h100"], None, None)
    with ThreadPoolExecutor(1) as executor:
        StartChecks(model, 2, lambda: programs, executor).faults(rows)
    layers = [Command("", tuple(job.flags)).option("num_layers") for job in jobs]
    assert layers == [4, 8, 8]
    assert ["--moe-layer-freq" in job.flags for job in jobs] == [False, True, True]


def test_script_starts_the_recommended_command(tmp_path: Path) -> None:
    subject = Subject.of_command(["A=1", "pretrain_gpt.py", "--data-path", "1 a b", "--bf16"], "")
    command = replace(subject.command, environment={"NVTE_FP8_DPA_BWD": "0"})
    path = tmp_path / "train.sh"
    path.write_text(script_of(command, 16, 8))
    again = read_command([str(path)])
    assert (again.flags, again.script) == (command.flags, "pretrain_gpt.py")
    assert again.environment["NVTE_FP8_DPA_BWD"] == "0"
    assert again.launched == {"--nnodes": "2", "--nproc-per-node": "8"}


def test_vocabulary_of_the_option_determines_the_work_of_the_output_layer(tmp_path: Path) -> None:
    words = "pretrain_gpt.py --num-layers 2 --hidden-size 8 --num-attention-heads 2".split()
    words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)]
    assert replace(Subject.of_command(words, ""), tokens=1000).vocabulary == 1000
    with pytest.raises(ScheduleError, match="add --vocabulary N"):
        _ = Subject.of_command(words, "").vocabulary
    (tmp_path / "config.json").write_text('{"vocab_size": 2000}')
    assert Subject.of_command(words, "").vocabulary == 2000
    tokenizer = {"model": {"vocab": {"a": 0, "b": 7}}, "added_tokens": [{"id": 9}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert Subject.of_command(words, "").vocabulary == 10


@pytest.mark.usefixtures("fake_counts")
def test_grid_lists_configurations_that_are_not_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--seconds was ignored, and impossible configurations were omitted without a message."""
    grid = {"schedule": ["1f1b", "adaptive"], "pipeline_parallel": [2, 16], "layout": ["even"]}
    path = write_sweep(tmp_path, sweep={"grid": grid})
    shown = {}
    for seconds in ("0", "60"):
        assert advise("--grid", path, "--seconds", seconds) == 0
        shown[seconds] = " ".join(capsys.readouterr().out.split())
    for text in shown.values():
        assert "Not evaluated: 2 impossible, such as 1f1b" in text
    note = "1 adaptive configurations: the time limit (--seconds) has passed"
    assert [note in text for text in shown.values()] == [True, False]
    assert ["planned schedule" in text for text in shown.values()] == [False, True]


@pytest.mark.usefixtures("fake_counts")
def test_the_plan_of_a_grid_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = {"schedule": ["adaptive"], "pipeline_parallel": [2], "layout": ["even"]}
    path = write_sweep(tmp_path, sweep={"grid": grid})
    plan, file = tmp_path / "plan.json", tmp_path / "advice.json"
    assert advise("--grid", path, "--export", plan, "--json", file) == 0
    assert f"--pipeline-schedule {plan}" in json.loads(file.read_text())["best"]["flags"]
    assert Schedule.from_json(plan.read_text()).num_devices == 2
    assert advise("--grid", path, "--keep", "tp") == 2
    assert "--keep tp does not work with --grid" in capsys.readouterr().err


def test_sharded_commands_have_no_single_queue_of_kernels() -> None:
    """Megatron rejects FSDP with CUDA_DEVICE_MAX_CONNECTIONS=1, which scripts export."""
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_ALGO": "Ring"}
    command = Command("pretrain_gpt.py", ("--bf16",), environment)
    sharded = fsdp.sharded_command(command)
    assert sharded.environment == {"NCCL_ALGO": "Ring"}
    assert flag_changes(command, sharded)[0] == "unset CUDA_DEVICE_MAX_CONNECTIONS"
