"""Dry runs of training commands: memory and work follow from the sizes of the model."""

import csv
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rehearsal.planned import off_the_plan, with_copies
from rehearsal.reports import pass_of, report_of
from rehearsal.warm import Warm, alone, rehearse

from megatron_vshape import Costs, load_schedule, make, peak_held, simulate, verify
from megatron_vshape.core.model.kinds import HEAD_WEIGHT, LOGITS, LOOKUP, LOOKUP_WEIGHT
from megatron_vshape.core.program.lowering import fuse
from megatron_vshape.rehearsal.command import sizes_of
from megatron_vshape.rehearsal.command_reader import read_command
from megatron_vshape.rehearsal.costs_from_reports import MICROBATCHES, both_backwards, with_measured
from megatron_vshape.rehearsal.gpus import GPUS
from megatron_vshape.rehearsal.rank_job import RankJob
from megatron_vshape.rehearsal.ranks import DryRunConfig
from megatron_vshape.rehearsal.step_time import DISPATCH, PERMUTED

pytest.importorskip("megatron.core")

GIB = 2**30
KEYS = ("schedule", "pipeline_parallel", "recompute")
HIDDEN, LAYERS, VOCABULARY, TOKENS = 256, 4, 1152, 128
TINY = f"""
    --num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 4 --seq-length {TOKENS}
    --max-position-embeddings {TOKENS} --micro-batch-size 2 --global-batch-size 16
    --pipeline-model-parallel-size 2 --bf16 --transformer-impl local --no-persist-layer-norm
    --untie-embeddings-and-output-weights --position-embedding-type rope --disable-bias-linear
    --vocab-size {VOCABULARY} --data-path not there --tokenizer-type NotThere --attention-dropout 0
    --hidden-dropout 0 --no-rope-fusion --ffn-hidden-size {VOCABULARY}
""".split()  # an MLP as wide as the vocabulary, which is not taken for logits


def test_a_model_by_its_config_json(warm: Warm, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    layers, hidden, width = 4, 64, 128
    values = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden}
    values |= {"num_attention_heads": 4, "intermediate_size": width, "vocab_size": VOCABULARY}
    (tmp_path / "config.json").write_text(json.dumps(values))
    flags = "--pipeline-model-parallel-size 2 --transformer-impl local --no-persist-layer-norm"
    options = ("--model", str(tmp_path), "--ranks", "first", "--alone")
    printed, report = rehearse(warm, tmp_path, [*flags.split(), "--no-rope-fusion"], *options)
    (first,) = report["ranks"]
    layer = 4 * hidden**2 + 3 * hidden * width + 2 * hidden
    assert first["parameters"] == layers // 2 * layer + VOCABULARY * hidden
    assert "DP 1: 2 H100 with 79.6 GiB, 8 microbatches" in printed


def test_memory_of_a_tiny_run_follows_from_its_sizes(tmp_path: Path) -> None:
    """The command runs in separate processes, as for a user."""
    printed, report = rehearse(alone, tmp_path, TINY)
    first, last = report["ranks"]
    assert [first["rank"], last["rank"]] == [0, 1]
    attention, mlp, norms = 4 * HIDDEN**2, 2 * HIDDEN * VOCABULARY, 4 * HIDDEN
    of_layers = LAYERS // 2 * (attention + mlp + norms)
    ends = VOCABULARY * HIDDEN  # and the last rank's norm
    for rank, parameters in ((first, of_layers + ends), (last, of_layers + ends + 2 * HIDDEN)):
        assert rank["parameters"] == parameters
        parts = rank["parts"]
        assert parts["weights"] == pytest.approx(2 * parameters, rel=0.02)
        assert parts["gradients"] == pytest.approx(4 * parameters, rel=0.02)
        assert parts["optimizer"] == pytest.approx(12 * parameters, rel=0.02)  # copies and moments
        assert sum(parts.values()) == rank["peak_bytes"] > rank["held_bytes"]
        segments, unused = divmod(rank["reserved_bytes"], 2 * 2**20)
        assert 1 < segments / (rank["peak_bytes"] / 2 / 2**20) < 2
        assert unused == 0
    # In 1F1B, the first rank keeps one more microbatch; the last rank has the logits.
    logits = 2 * TOKENS * VOCABULARY
    assert first["parts"]["logits"] == 0
    assert last["parts"]["logits"] >= 4 * logits
    assert first["parts"]["activations"] > 1.5 * last["parts"]["activations"]
    assert report["step_s"] > 0
    assert report["assumed"]["gpu"] == "h100"
    assert "rank 1: peak in" in printed
    assert "reserves about 0.1 GiB (peak 0.1)" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json"]


@pytest.fixture(scope="module")
def v_half(
    warm: Warm, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any], Path]:
    """Return the output and the report of a dry run with V-Half, and its picture."""
    folder = tmp_path_factory.mktemp("v-half")
    saved = folder / "memory.svg"
    flags = [*TINY, "--pipeline-schedule", "v-half"]
    return *rehearse(warm, folder, flags, "--save", str(saved)), saved


def test_a_v_schedule_is_compared_with_megatrons_schedule(
    v_half: tuple[str, dict[str, Any], Path],
) -> None:
    printed, report, saved = v_half
    first, last = report["ranks"]
    kinds = {(passes["kind"], passes["chunk"]) for passes in first["kinds"]}
    assert kinds >= {(kind, chunk) for kind in ("F", "B", "W") for chunk in (0, 1)}
    assert (
        first["parts"]["logits"] > last["parts"]["logits"] == 0
    )  # a V has embedding and output layer on rank 0
    assert "Megatron's own schedule: peak" in printed
    schedule = make("v-half", 2, first["microbatches"])
    off = off_the_plan(schedule, report["ranks"])
    assert max(map(abs, off.values())) < 0.03  # messages are not in the plan
    assert saved.read_text().count("GiB") == 2  # a panel per rank
    for rank in (first, last):
        assert all(max(sizes[who] for _, _, sizes in rank["curve"]) > 0 for who in "FB")


def test_vocabulary_parallelism_shards_the_logits(warm: Warm, tmp_path: Path) -> None:
    flags = [*TINY, "--pipeline-schedule", "v-half", "--pipeline-vocab-parallel"]
    _, report = rehearse(warm, tmp_path, flags, "--alone")
    for rank in report["ranks"]:
        kinds = {passes["kind"] for passes in rank["kinds"]}
        assert kinds >= {str(LOGITS), str(HEAD_WEIGHT), str(LOOKUP), str(LOOKUP_WEIGHT)}
        # In bf16, of half the vocabulary, for one or two microbatches.
        assert rank["parts"]["logits"] / (2 * TOKENS * VOCABULARY // 2 * 2) in (1, 2)


def test_slices_of_a_sequence_have_smaller_passes(
    v_half: tuple[str, dict[str, Any], Path], warm: Warm, tmp_path: Path
) -> None:
    flags = [*TINY, "--pipeline-schedule", "v-half", "--pipeline-slices", "2"]
    _, report = rehearse(warm, tmp_path, flags, "--alone")
    bytes_whole, bytes_sliced = (
        next(passes["adds_bytes"] for passes in ranks[1]["kinds"] if passes["kind"] == "F")
        for ranks in (v_half[1]["ranks"], report["ranks"])
    )
    # The pass with the least traffic is that of the first slice, which attends to itself only.
    assert 0.4 * bytes_whole < bytes_sliced < 0.5 * bytes_whole


@pytest.mark.usefixtures("te_python")
def test_w_gathers_the_inputs_that_b_keeps_sharded(warm: Warm, tmp_path: Path) -> None:
    shards = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    flags = [*TINY, "--transformer-impl", "transformer_engine", *shards]
    _, report = rehearse(warm, tmp_path, [*flags, "--pipeline-schedule", "v-half"], "--alone")
    ran = {entry["kind"]: entry for entry in report["ranks"][1]["kinds"] if entry["chunk"] == 0}
    number = {
        kind: sum(
            entry["number"]
            for entry in ran[kind]["work"]["exchanges"]
            if entry["kind"].startswith("all_gather")
        )
        for kind in ("B", "W")
    }
    # a layer's column-parallel inputs in W alone, its row-parallel gradients in both
    assert number == {"B": 2 * LAYERS // 4, "W": 4 * LAYERS // 4}
    # Left after F and B: shards of these four, two messages, and activations of this rank alone.
    two_bytes_a_part = 2 * TOKENS * LAYERS // 4
    values = (4 + 2) * HIDDEN + 3 * HIDDEN + HIDDEN + 2 * VOCABULARY
    assert ran["F"]["adds_bytes"] + ran["B"]["adds_bytes"] == two_bytes_a_part * values


@pytest.mark.usefixtures("te_python")
def test_memory_of_cuda_graphs_is_counted_separately(warm: Warm, tmp_path: Path) -> None:
    """The flags capture graphs in step 2; a dry run captures none."""
    schedule_flags = ["--transformer-impl", "transformer_engine", "--pipeline-schedule", "v-half"]
    graphs = ["--cuda-graph-impl", "transformer_engine", "--cuda-graph-warmup-steps", "1"]
    printed, report = rehearse(warm, tmp_path, [*TINY, *schedule_flags, *graphs], "--alone")
    _, eager = rehearse(warm, tmp_path, [*TINY, *schedule_flags], "--alone")
    for rank, eager_rank in zip(report["ranks"], eager["ranks"], strict=True):
        assert rank["peak_bytes"] == eager_rank["peak_bytes"]  # split alike
        assert eager_rank["graph_bytes"] is None
        parts = rank["graph_bytes"]
        assert sum(parts.values()) > rank["peak_bytes"] > max(parts.values())
        assert min(parts.values()) > 0
        hidden = 2 * 2 * TOKENS * HIDDEN  # bytes of a layer's input
        assert parts["inputs"] % hidden == 0
    assert "CUDA graphs' pool" in printed
    run = [*TINY, *schedule_flags[:2]]
    counted, plain = (
        costs_of(warm, tmp_path, [*run, *extra_flags]) for extra_flags in (graphs, [])
    )
    for with_graphs, without in zip(
        counted.held_after_forward_bytes, plain.held_after_forward_bytes, strict=True
    ):
        assert with_graphs - without == hidden * LAYERS // 4
    assert counted.held_after_backward_bytes == plain.held_after_backward_bytes
    schedule = make("v-half", 2, report["ranks"][0]["microbatches"])
    graph_bytes = [
        captured - uncaptured
        for captured, uncaptured in zip(
            peak_held(schedule, counted), peak_held(schedule, plain), strict=True
        )
    ]
    for rank, planned in zip(report["ranks"], graph_bytes, strict=True):
        reserved = sum(rank["graph_bytes"].values())
        assert 0 < reserved - rank["peak_bytes"] <= 1.05 * planned < 4 * 2**20


def costs_of(warm: Warm, tmp_path: Path, command: list[str]) -> Costs:
    """Count the costs of a command's stages."""
    file = tmp_path / "costs.json"
    warm(tmp_path, "rehearse", "--costs", str(file), "--", "pretrain_gpt.py", *command)
    return Costs.load(file)


def test_offloaded_activations_are_not_counted_on_the_gpu(warm: Warm, tmp_path: Path) -> None:
    schedule = with_copies(make("v-half", 2, 8))
    plan = tmp_path / "plan.json"
    plan.write_text(schedule.to_json())
    _, report = rehearse(warm, tmp_path, [*TINY, "--pipeline-schedule", str(plan)], "--alone")
    adds = {
        (passes["kind"], passes["chunk"]): passes["adds_bytes"]
        for passes in report["ranks"][1]["kinds"]
    }
    assert adds["R", 0] == -adds["L", 0] > 0.9 * adds["F", 0]
    off = off_the_plan(schedule, report["ranks"])
    assert max(map(abs, off.values())) < 0.05  # messages are not in the plan


@pytest.mark.parametrize(
    ("flags", "removed", "wrong"),
    [
        ("--no-such-flag", "", "unrecognized arguments: --no-such-flag"),
        ("--num-layers 5", "", "5 layers do not divide among 2 pipeline ranks"),
        ("--pipeline-schedule auto", "", "nothing is measured here"),
        (
            "--recompute-granularity selective --recompute-modules mlp",
            "--disable-bias-linear",
            "this run never ends: the checkpoint of Megatron returns the bias",
        ),
        # Fused RoPE of local layers.
        (
            "",
            "--no-rope-fusion",
            "Please install TE >= 1.4. Or add --no-rope-fusion: without it",
        ),
    ],
)
def test_invalid_commands_end_with_one_error_line(
    warm: Warm, tmp_path: Path, flags: str, removed: str, wrong: str
) -> None:
    command = ["pretrain_gpt.py", *(flag for flag in TINY if flag != removed), *flags.split()]
    ran = warm(tmp_path, "rehearse", "--strict", "--ranks", "last", "--", *command)
    assert ran.returncode == 2
    assert wrong in ran.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "status", "printed"),
    [
        ("v-half --num-layers-per-virtual-pipeline-stage 1", 0, "starts with v-half"),
        ("auto --pipeline-profile-iterations 2:3", 0, "starts with auto"),
        ("v-half --pipeline-model-parallel-size 1", 0, "starts with v-half"),
        (
            "v-half --hybrid-context-parallel",
            1,
            "does not start with v-half: --pipeline-schedule v-half does not work with "
            "--hybrid-context-parallel: ",
        ),
    ],
)
def test_check_runs_the_start_up_checks_alone(
    warm: Warm, tmp_path: Path, flags: str, status: int, printed: str
) -> None:
    flags_of_run = [*TINY, "--pipeline-schedule", *flags.split()]
    ran = warm(tmp_path, "rehearse", "--check", "--", "pretrain_gpt.py", *flags_of_run)
    assert ran.returncode == status, ran.stderr
    assert printed in ran.stdout.splitlines()[-1]
    translated = "num_layers_per_virtual_pipeline_stage 1: " in ran.stdout
    assert translated == ("--num-layers-per-virtual" in flags)
    unused = "--pipeline-schedule v-half unused: one pipeline rank" in ran.stdout
    assert unused == ("--pipeline-model-parallel-size 1" in flags)
    assert "GiB" not in ran.stdout


@pytest.mark.parametrize("strict", [False, True])
def test_flags_of_forks_are_ignored_unless_strict(warm: Warm, tmp_path: Path, strict: bool) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        f"python pretrain_gpt.py {' '.join(TINY)} --use-mpi --swap-optimizer --lr $LR\n"
    )
    options = ["--check", *(["--strict"] if strict else [])]
    ran = warm(tmp_path, "rehearse", *options, "--", str(script))
    assert ran.returncode == strict, ran.stderr
    assert ("unrecognized arguments: --use-mpi --swap-optimizer" in ran.stdout) == strict
    ignored = (
        "Ignored flags that this version of Megatron does not have: --use-mpi, --swap-optimizer. "
        "Some may lower the memory: --swap-optimizer."
    )
    assert (ignored in ran.stdout.replace("\n", " ")) != strict
    assert "unknown values and no effect on a step: --lr" in ran.stdout


def test_a_script_for_another_megatron_needs_its_checkout(warm: Warm, tmp_path: Path) -> None:
    script = tmp_path / "pretrain_fork.py"
    script.write_text("from megatron.core import patches_of_a_fork\n")
    ran = warm(tmp_path, "rehearse", "--check", "--", str(script), *TINY)
    assert ran.returncode == 1, ran.stderr
    assert "pass its checkout with --megatron DIR" in ran.stdout


TWO_STAGES = "--num-virtual-stages-per-pipeline-rank 2"
PARALLEL = "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 63"


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (
            "--pipeline-schedule interleaved-1f1b --global-batch-size 34",
            "--pipeline-schedule interleaved-1f1b does not work with 17 microbatches",
        ),
        (
            f"{TWO_STAGES} --eval-global-batch-size 6",
            "3 microbatches, the number in an evaluation step",
        ),
        (
            PARALLEL,
            "--sequence-parallel does not work with --seq-length 63: "
            "--tensor-model-parallel-size 2 does not divide the tokens of a rank. Make "
            "--seq-length a multiple of 2",
        ),
        (f"{PARALLEL} --pipeline-schedule v-half", "does not work with --seq-length 63"),
    ],
)
def test_check_rejects_a_command_whose_first_step_raises(
    warm: Warm, tmp_path: Path, flags: str, error: str
) -> None:
    ran = warm(tmp_path, "rehearse", "--check", "--", "pretrain_gpt.py", *TINY, *flags.split())
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert error in ran.stdout


@pytest.mark.parametrize(
    ("gpu", "world", "ranks"), [("h100", 16, 8), ("h100", 2, 2), ("gb200", 16, 4), ("gb300", 2, 2)]
)
def test_a_host_has_one_rank_per_gpu(
    monkeypatch: pytest.MonkeyPatch, gpu: str, world: int, ranks: int
) -> None:
    """A Grace host has four, although NVLink connects 72."""
    from megatron_vshape.rehearsal.one_rank import _set_environment

    monkeypatch.setattr(os, "environ", dict(os.environ))
    _set_environment(RankJob("", [], GPUS[gpu], world, world - 1))
    assert os.environ["LOCAL_WORLD_SIZE"] == str(ranks)
    assert os.environ["LOCAL_RANK"] == str(ranks - 1)


FSDP = """
    --pipeline-model-parallel-size 1 --use-megatron-fsdp --use-distributed-optimizer
    --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor
    --no-gradient-accumulation-fusion
""".split()


def test_fsdp_exchanges_in_every_microbatch(warm: Warm, tmp_path: Path) -> None:
    ranks = []
    for batch in ("16", "128"):
        flags = [*TINY, *FSDP, "--global-batch-size", batch]
        _, report = rehearse(warm, tmp_path, flags, "--gpus", "4")
        ranks.append(report["ranks"][0])
    few, many = ranks
    assert (few["microbatches"], many["microbatches"]) == (2, 16)
    assert few["traced_microbatches"] == many["traced_microbatches"] == 2
    assert many["time"]["exchanges"] == pytest.approx(8 * few["time"]["exchanges"])
    assert many["time"]["data parallel"] == few["time"]["data parallel"]
    number = {
        exchange["kind"]: exchange["number"]
        for exchange in many["work"]["exchanges"]
        if exchange["group"].endswith(" in each microbatch")
    }
    # Weights of all layers for F and again for B; gradients of layers, embedding and output layer.
    assert number == {
        "all_gather_into_tensor": 2 * 2 * LAYERS,
        "reduce_scatter_tensor": 2 * (LAYERS + 1),
    }


def test_fsdp_with_tensor_parallelism(warm: Warm, tmp_path: Path) -> None:
    """The state of random numbers of tensor-parallel rank 0 was awaited, and every run failed."""
    flags = [*TINY, *FSDP, "--tensor-model-parallel-size", "2", "--global-batch-size", "16"]
    _, report = rehearse(warm, tmp_path, flags, "--gpus", "4")
    assert report["ranks"][0]["microbatches"] == 4


def test_a_costs_file_is_counted(
    warm: Warm, tmp_path: Path, v_half: tuple[str, dict[str, Any], Path]
) -> None:
    file = tmp_path / "costs.json"
    ran = warm(tmp_path, "rehearse", "--costs", str(file), "--", "pretrain_gpt.py", *TINY)
    assert ran.returncode == 0, ran.stderr
    costs = Costs.load(file)
    assert costs.num_stages == 4
    assert costs.layers == (1, 1, 1, 1)
    assert dict(costs.sources)["forward_us"].startswith("counted by a rehearsal")
    # The last stage has the output layer: its states are those of a layer and of the vocabulary.
    assert costs.forward_us[3] > costs.forward_us[1] == costs.forward_us[2]
    state = costs.lists()["state_bytes"]
    vocabulary = VOCABULARY * HIDDEN * (2 + 4 + 12)
    assert state[3] - state[2] == pytest.approx(vocabulary, rel=0.02)
    layer = 4 * HIDDEN**2 + 2 * HIDDEN * VOCABULARY + 4 * HIDDEN
    assert state[2] == pytest.approx(layer * LAYERS // 4 * (2 + 4 + 12), rel=0.02)
    # Planned peaks with these costs equal those of a dry run of the schedule.
    _, report, _ = v_half
    microbatches = report["ranks"][0]["microbatches"]
    planned = peak_held(make("v-half", 2, microbatches), costs)
    rehearsed = [rank["peak_bytes"] for rank in report["ranks"]]
    assert planned == pytest.approx(rehearsed, rel=0.02)


def test_with_full_recomputation_a_layer_keeps_its_input(warm: Warm, tmp_path: Path) -> None:
    """The received input counts, too: it is allocated before F, and a first layer keeps only it."""
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    hidden = 2 * 2 * TOKENS * HIDDEN
    layers = 2
    costs = costs_of(warm, tmp_path, [*TINY, *full.split(), "--num-layers", str(4 * layers)])
    after_forward = costs.held_after_forward_bytes
    assert after_forward[:2] == pytest.approx((layers * hidden,) * 2, rel=0.05)
    assert costs.held_after_backward_bytes == (0.0,) * 4


MODELS = {
    "TP": ["--tensor-model-parallel-size", "2"],
    "experts": "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2".split(),
}


@pytest.mark.parametrize("model", ["TP", pytest.param("experts", marks=pytest.mark.slow)])
def test_a_costs_file_is_measured(warm: Warm, tmp_path: Path, model: str) -> None:
    """Times are measured on this CPU; communication and memory stay estimated."""
    flags = [*TINY, *MODELS[model]]
    costs_by_name = {}
    for name in ("counted", "measured"):
        options = ["--ranks", "first", "--costs", f"{name}.json"]
        options += ["--measure"] if name == "measured" else []
        ran = warm(tmp_path, "rehearse", *options, "--", "pretrain_gpt.py", *flags)
        assert ran.returncode == 0, ran.stderr
        costs_by_name[name] = Costs.load(tmp_path / f"{name}.json")
    costs, counted = costs_by_name["measured"], costs_by_name["counted"]
    assert "rank 0 on cpu: B0 " in ran.stdout
    for name, values in counted.lists().items():
        measured = costs.lists()[name]
        computes = name in ("forward_us", "backward_us", "weight_us", "whole_backward_us")
        assert (measured == values) != computes, name
        if computes:
            assert min(measured) > 1
        source = dict(costs.sources)[name]
        assert source.startswith("measured on cpu" if computes else "counted by a rehearsal")
    assert costs.send_us == counted.send_us
    if model == "TP":
        assert min(costs.lists()["forward_exchange_us"]) > 0


def test_a_gpu_measures_memory_too() -> None:
    rank = report_of(kinds=[pass_of("F", adds_bytes=1, meanwhile_bytes=1)])
    ran = {"kind": "F", "chunk": 0, "ms": 2.5, "adds_bytes": 3, "meanwhile_bytes": 4, "number": 3}
    for on_gpu, sizes in ((True, (3, 4)), (False, (1, 1))):
        measured = {"device": "it", "on_gpu": on_gpu, "kinds": [ran]}
        (report,) = with_measured(rank, measured).step.kinds
        assert (report.ms, report.adds_bytes, report.meanwhile_bytes) == (2.5, *sizes)


def test_advise_compares_the_current_run_with_alternatives(
    warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, plan = tmp_path / "advice.json", tmp_path / "plan.json"
    command = ["advise", "--gpus", "4xH100"]
    command += ["--json", str(file), "--export", str(plan), "--seconds", "1", "--keep", "tp,pp"]
    flags = [*TINY, "--recompute-granularity", "full", "--recompute-method", "uniform"]
    ran = warm(tmp_path, *command, "--", "pretrain_gpt.py", *flags, "--recompute-num-layers", "1")
    assert ran.returncode == 0, ran.stderr
    report = json.loads(file.read_text())
    rows = ["today", "stock", "best", "same", "least", "DON'T", "fsdp"]
    assert list(report) == rows, ran.stdout
    assert report["today"]["flags"] == []
    assert "remove --recompute-*" in report["stock"]["flags"]
    assert f"--pipeline-schedule {plan}" in report["best"]["flags"] or report["best"]["is_stock"]
    assert max(report["least"]["peak_bytes"]) <= max(report["best"]["peak_bytes"])
    assert "\nFlags, best stock: remove --recompute-*" in ran.stdout
    today, stock, best = (report[what] for what in ("today", "stock", "best"))
    assert today["schedule"] == "1f1b"
    assert today["shape"]["recompute"] == "full"
    # Recomputation is removed if there is enough memory.
    assert stock["shape"]["recompute"] == "none"
    assert stock["step_s"] < today["step_s"]
    assert max(stock["peak_bytes"]) > max(today["peak_bytes"])
    assert best["step_s"] <= stock["step_s"]
    assert best["step_s"] <= report["same"]["step_s"]
    assert report["DON'T"]["schedule"] == "v-half"
    assert load_schedule(plan).num_devices == best["shape"]["pipeline"]
    assert "Estimated, not measured" in ran.stdout
    assert ran.stdout.startswith("Recommendation")
    assert "\nnot recommended " in ran.stdout


def test_a_pattern_is_estimated_as_the_gpt_that_it_is(
    warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pattern is `*-` per layer, with or without stages; no checkout has the script."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    reports = {}
    for name, model in (
        ("gpt", ("pretrain_gpt.py",)),
        ("hybrid", ("pretrain_hybrid.py", "--hybrid-layer-pattern", "*-" * LAYERS)),
        ("stages", ("pretrain_hybrid.py", "--hybrid-layer-pattern", "*-*-|*-*-")),
    ):
        file = tmp_path / f"{name}.json"
        command = ["advise", "--gpus", "2xH100", "--seconds", "1", "--json", str(file)]
        command += ["--keep", "recompute,tp,pp,cp,microbatch", "--", model[0], *TINY, *model[1:]]
        ran = warm(tmp_path, *command)
        assert ran.returncode == 0, ran.stderr
        reports[name] = json.loads(file.read_text())
    for name, layers in (("gpt", [2, 2]), ("hybrid", [4, 4]), ("stages", [4, 4])):
        today, twin = reports[name]["today"], reports["gpt"]["today"]
        assert today["layers"] == layers
        # So small a model takes as long as its kernels, and these local layers have 5% more.
        assert today["step_s"] == pytest.approx(twin["step_s"], rel=0.06)
        assert today["peak_bytes"] == pytest.approx(twin["peak_bytes"], rel=0.01)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("rehearse --measure", "--measure writes a costs file: add --costs"),
        ("advise --gpus H100", "is not a number, an x and a GPU, as in 128xH100"),
        ("advise --gpus 4xH100 --keep all", "is not one of recompute, tp, pp"),
        (
            "advise --gpus 4xH100 --training-share 30",
            "--training-share 30 is not above 0 and",
        ),
    ],
)
def test_invalid_options_are_rejected(warm: Warm, command: str, words: str, tmp_path: Path) -> None:
    ran = warm(tmp_path, *command.split(), "--", "pretrain_gpt.py", *TINY)
    assert ran.returncode == 2
    assert words in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


@pytest.mark.parametrize("devices", [2, 4, 8, 16])
def test_split_backwards_of_a_counted_step_are_not_fused(devices: int) -> None:
    """A W directly after its B would be fused, as in the cool-down of a long pipeline."""
    schedule = both_backwards(devices)
    verify(schedule)
    for row in fuse(simulate(schedule)).order:
        assert {kind for kind, _, microbatch in row if microbatch < MICROBATCHES} == {"F", "B", "W"}
        assert {kind for kind, _, microbatch in row if microbatch >= MICROBATCHES} == {"F", "BW"}


def test_a_sweep_counts_every_parallel_configuration_once(
    warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second sweep uses the cache; planned peaks equal those of a dry run."""
    pytest.importorskip("pydantic")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cluster.yaml").write_text(
        "{name: four, nodes: 1, devices_per_node: 4, inside_node_gb_per_s: 450, "
        "between_nodes_gb_per_s: 50, device: {name: H100, memory_gib: 79, peak_tflops: 989, "
        "memory_tb_per_s: 3.35, processors: 132}, assumptions: {beside_gib: 1.0e-9}}"
    )
    (tmp_path / "grid.yaml").write_text(
        "{name: tiny, cluster: cluster.yaml, grid: {schedule: [1f1b, v-half], layout: [even], "
        "pipeline_parallel: [1, 2], recompute: [given, core_attn]}}"
    )
    table = tmp_path / "all.csv"
    command = ["sweep", "grid.yaml", "--predict-only"]
    command += ["--csv", str(table), "--", "pretrain_gpt.py", *TINY]
    ran = warm(tmp_path, *command)
    assert ran.returncode == 0, ran.stderr
    assert "6 combinations have stages of 2 shapes, each counted once" in ran.stdout
    cached = sorted((tmp_path / "cache").rglob("*.json"))
    assert len(cached) == 2
    with table.open() as stream:
        rows = {tuple(row[name] for name in KEYS): row for row in csv.DictReader(stream)}
    planned = [float(peak) for peak in rows["v-half", "2", "given"]["predicted_ranks"].split()]
    flags = [*TINY, "--pipeline-schedule", "v-half"]
    _, report = rehearse(warm, tmp_path, flags, "--alone", "--gpus", "4")
    rehearsed = [rank["peak_bytes"] / GIB for rank in report["ranks"]]
    assert planned == pytest.approx(rehearsed, rel=0.03, abs=0.006)
    for file in cached:  # the results come from these files
        file.write_text(file.read_text().replace('"kernels": ', '"kernels": 9'))
    slower = warm(tmp_path, *command)
    with table.open() as stream:
        slower_rows = {tuple(row[name] for name in KEYS): row for row in csv.DictReader(stream)}
    key = "1f1b", "2", "given"
    assert float(slower_rows[key]["predicted_step_s"]) > float(rows[key]["predicted_step_s"])
    assert slower.stdout.count("counted once") == 1


def test_microbatches_that_repeat_are_computed(warm: Warm) -> None:
    """The last rank runs 4 of 8 microbatches, with the bytes and the step time of all 8."""
    command = read_command(["pretrain_gpt.py", *TINY, "--pipeline-model-parallel-size", "4"])
    config = DryRunConfig.of(command, GPUS["h100"], jobs=1)
    job = config.job(command, sizes_of(command, None), 3, "")
    jobs = [
        replace(job, name=str(traces_all), traces_all=traces_all) for traces_all in (False, True)
    ]
    reports = {report["name"]: report for report in warm.run_jobs(config.programs, jobs)}
    few, every = reports["False"], reports["True"]
    assert (few["traced_microbatches"], every["traced_microbatches"]) == (4, 8)
    for name in ("peak_bytes", "held_bytes", "parts", "holders", "held_between_passes_bytes"):
        assert few[name] == every[name], name
    # Scalar operations between the passes count as work once per step.
    assert few["time"] == pytest.approx(every["time"], rel=1e-5)


def test_the_step_is_that_of_all_microbatches(warm: Warm, tmp_path: Path) -> None:
    """At most 4 microbatches per rank run; the step of 32 was reported as that of 8."""
    steps = []
    for schedule, ranks in ((None, "all"), ("v-zb", "all"), ("v-zb", "first")):
        schedule_flags = ["--pipeline-schedule", schedule] if schedule else []
        flags = [*TINY, "--global-batch-size", "64", *schedule_flags]
        printed, report = rehearse(warm, tmp_path, flags, "--alone", "--ranks", ranks)
        assert report["ranks"][0]["microbatches"] == 32
        assert f": 32 microbatches, {schedule or '1f1b'} simulated" in printed
        steps.append(report["step_s"])
    assert max(steps) < 1.25 * min(steps)


def test_gradients_are_scaled_once_per_step(warm: Warm, tmp_path: Path) -> None:
    """Their norm and scaling were counted in half of the microbatches without a pipeline."""
    flags = [*TINY, "--pipeline-model-parallel-size", "1", "--micro-batch-size", "1"]
    ranks = []
    for batch in ("4", "64"):
        options = ["--alone", "--gpus", "1"]
        _, report = rehearse(warm, tmp_path, [*flags, "--global-batch-size", batch], *options)
        ranks += report["ranks"]
    few, many = ranks
    # Read for the norm, read and written for the scale, in fp32.
    assert few["work"]["once_bytes"] > 3 * 4 * few["parameters"]
    assert many["time"]["optimizer"] == pytest.approx(few["time"]["optimizer"], rel=0.01)
    assert many["time"]["memory"] == pytest.approx(16 * few["time"]["memory"])


WIDE = """
    --hidden-size 4096 --ffn-hidden-size 65536 --bf16 --use-distributed-optimizer
    --overlap-grad-reduce --grad-reduce-in-bf16
""".split()
LONG = ["--seq-length", "1024", "--max-position-embeddings", "1024"]


@pytest.mark.parametrize(
    ("flags", "gpus"),
    [([], 2), (WIDE, 4), ([*WIDE, *LONG], 4)],
    ids=["tiny", "wide", "wide, long"],
)
def test_advise_and_rehearse_agree_on_the_step(
    warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], gpus: int
) -> None:
    """With wide layers, advise took the scaling of all gradients for work of each microbatch, and
    counted fp32 copies of them as held during the passes.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    command = [*TINY, *flags]
    _, report = rehearse(warm, tmp_path, command, "--alone", "--gpus", str(gpus))
    file = tmp_path / "advice.json"
    keep = "tp,pp,ep,cp,microbatch,recompute"
    options = ["advise", "--gpus", f"{gpus}xH100", "--json", str(file), "--seconds", "1"]
    options += ["--keep", keep]
    ran = warm(tmp_path, *options, "--", "pretrain_gpt.py", *command)
    assert ran.returncode == 0, ran.stderr
    today = json.loads(file.read_text())["today"]
    assert today["step_s"] == pytest.approx(report["step_s"], rel=0.02)
    peaks = [rank["peak_bytes"] for rank in report["ranks"]]
    # Megatron's local layers have a dummy gradient in the passes, of one weight.
    dummy = 2 * 4096 * 65536 if flags else 0
    assert today["peak_bytes"] == pytest.approx(peaks, rel=0.02, abs=dummy)


EXPERTS = """
    --transformer-impl transformer_engine --num-experts 8 --expert-model-parallel-size 4 --swiglu
    --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-grouped-gemm --moe-router-dtype fp32
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --ffn-hidden-size 512
""".split()


@pytest.mark.usefixtures("te_python")
def test_deepep_receives_a_token_once(warm: Warm, tmp_path: Path) -> None:
    flex = ["--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend"]
    dispatches, peaks = [], []
    for backend, kind in (("deepep", f"{DISPATCH}2"), ("hybridep", f"{DISPATCH}2{PERMUTED}")):
        flags = [*TINY, *EXPERTS, *flex, backend]
        _, report = rehearse(warm, tmp_path, flags, "--alone", "--gpus", "8", "--ranks", "last")
        (rank,) = report["ranks"]
        (dispatch,) = [
            exchange for exchange in rank["work"]["exchanges"] if exchange["kind"] == kind
        ]
        dispatches.append((dispatch["number"], dispatch["bytes"]))
        peaks.append(rank["peak_bytes"])
    assert dispatches[0] == dispatches[1]
    tokens, microbatches = 2 * TOKENS, 2
    # Dispatch and combine, in F and in B, for the layers of a rank.
    assert dispatches[0] == (4 * 2 * microbatches, 4 * 2 * microbatches * tokens * HIDDEN * 2)
    assert peaks[0] == pytest.approx(peaks[1], rel=0.1)


@pytest.mark.usefixtures("te_python")
def test_overlapped_passes_have_activations(warm: Warm, tmp_path: Path) -> None:
    """They were counted as workspaces: Megatron calls no forward_step with this overlap."""
    flags = [*TINY, *EXPERTS, *"--pipeline-model-parallel-size 1 --swiglu".split()]
    overlap = ["--overlap-moe-expert-parallel-comm", "--moe-token-dispatcher-type", "alltoall"]
    printed, overlapped = rehearse(warm, tmp_path, [*flags, *overlap], "--alone", "--gpus", "4")
    _, plain = rehearse(warm, tmp_path, [*flags, *overlap[1:]], "--alone", "--gpus", "4")
    parts, plain_parts = (report["ranks"][0]["parts"] for report in (overlapped, plain))
    # A forward and a backward of two microbatches are in memory.
    assert parts["activations"] > plain_parts["activations"] > 0
    assert parts["rest"] < 2 * plain_parts["rest"]
    assert "of microbatch" in printed
    assert "Balanced routing. With --imbalance 1.1 (10% more tokens" in printed.replace("\n", " ")


def test_a_cluster_file_is_used_by_rehearse_and_advise(
    warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "{name: two, nodes: 1, devices_per_node: 2, inside_node_gb_per_s: 20, "
        "between_nodes_gb_per_s: 20, device: {name: A100-40GB, memory_gib: 39.5, peak_tflops: 312, "
        "memory_tb_per_s: 1.555, processors: 108}}"
    )
    printed, _ = rehearse(warm, tmp_path, TINY, "--alone", "--cluster", str(file))
    assert "2 A100 with 39.5 GiB" in printed.replace("A100-40GB", "A100")
    options = ["advise", "--cluster", str(file), "--seconds", "1", "--headroom", "30GiB"]
    keep = ["--keep", "tp,pp,ep,cp,microbatch,recompute"]
    ran = warm(tmp_path, *options, *keep, "--", "pretrain_gpt.py", *TINY)
    assert ran.returncode == 0, ran.stderr
    assert "are a guess from its data sheet" in ran.stdout.replace("\n", " ")


@pytest.mark.usefixtures("te_python")
def test_attention_in_fp32_has_no_fused_kernel(warm: Warm, tmp_path: Path) -> None:
    """Transformer Engine then computes it without one, and F leaves the scores of every layer."""
    half = [*TINY, "--transformer-impl", "transformer_engine"]
    full = [flag for flag in half if flag != "--bf16"]
    added_bytes = {}
    for flags in (half, full):
        _, report = rehearse(warm, tmp_path, flags, "--alone", "--ranks", "first")
        (forward,) = [entry for entry in report["ranks"][0]["kinds"] if entry["kind"] == "F"]
        added_bytes[flags is half] = forward["adds_bytes"]
    scores_bytes = 4 * 2 * 4 * TOKENS**2 * LAYERS // 2  # microbatches of 2, 4 heads
    assert added_bytes[False] > 2 * added_bytes[True] + scores_bytes / 2
