"""Unsupported runs end before training: one clear sentence on rank 0, an error on all ranks."""

import importlib.util
import json
from argparse import Namespace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from mcore.farm import Farm
from mcore.rejections import rejection
from megatron.core.transformer import TransformerConfig

from megatron_vshape.core.model.files import UnreadableError
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.mcore.hooks.training import _reject_unvalidated_schedule
from megatron_vshape.mcore.refusals import RefusedError, UnsupportedError

V_HALF = "--pipeline-schedule v-half"


def rejection_text(
    farm: Farm, *arguments: str, ranks: int = 4, timeout_s: float = 30, **options: Any
) -> str:
    """Return the output of rank 0, after checking that all ranks end in time with an error."""
    run = farm.run(ranks, *arguments, timeout_s=timeout_s, **options)
    assert run.codes == [1] * ranks, run.output
    said = [text.partition("megatron-vshape: ")[2] for text in run.output]
    assert said[0], run.output[0]
    assert said[1:] == [""] * (ranks - 1)
    assert not any("Traceback" in text or "lm loss" in text for text in run.output)
    return said[0].strip()


def test_unknown_schedule(farm: Farm) -> None:
    text = rejection_text(farm, "--pipeline-schedule", "v-quarter")
    assert text.startswith("there is no schedule 'v-quarter'. The names are 1f1b")


@pytest.mark.parametrize("schedule", ["", "--pipeline-schedule 1f1b"])
@pytest.mark.parametrize(
    "flags",
    [
        "--pipeline-memory-limit 60",
        "--pipeline-host-memory-limit 60",
        "--pipeline-trace traces",
        "--pipeline-profile-iterations 2:3",
        "--pipeline-costs costs.json",
        "--pipeline-vocab-parallel",
    ],
)
def test_package_flags_are_rejected_with_megatron_schedules(flags: str, schedule: str) -> None:
    what = "1f1b" if schedule else "Megatron's own schedule"
    message = f"{flags.split()[0]} has no effect with {what}: remove it"
    assert rejection(*f"{flags} {schedule}".split()).startswith(message)


RECOMPUTED = "--recompute-granularity selective --recompute-modules core_attn mlp"
EXPERTS = "--num-experts 4 --moe-router-load-balancing-type none"


@pytest.mark.parametrize("flags", ["--disable-bias-linear", EXPERTS])
def test_an_mlp_without_biases_is_recomputed(flags: str) -> None:
    """With biases its backward does not end, with stock Megatron too (megatron-core 0.19.2)."""
    with pytest.raises(AssertionError, match="nothing is rejected"):
        rejection(*f"{V_HALF} {RECOMPUTED} {flags}".split())


def test_a_schedule_that_the_checks_have_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    args = Namespace(pipeline_schedule="v-zb", pipeline_model_parallel_size=4)
    with pytest.raises(RefusedError, match="^megatron-vshape: --pipeline-schedule v-zb came with"):
        _reject_unvalidated_schedule(args)
    args.pipeline_model_parallel_size = 1
    _reject_unvalidated_schedule(args)


@pytest.mark.parametrize(
    ("ranks", "error", "prints"),
    [
        (("8", "0"), UnreadableError, True),  # of a second node, where a file may be missing
        (("9", "1"), UnreadableError, False),
        (("9", None), UnreadableError, False),
        (("8", "0"), UnsupportedError, False),
        (("0", "0"), UnsupportedError, True),
    ],
)
def test_one_rank_prints_the_reason(
    ranks: tuple[str, str | None],
    error: type[Exception],
    prints: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in zip(("RANK", "LOCAL_RANK"), ranks, strict=True):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert RefusedError(error("no")).code == ("megatron-vshape: no" if prints else 1)


class TestScheduleFiles:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        return tmp_path / "schedule.json"

    def test_for_other_devices(self, file: Path) -> None:
        file.write_text(make("v-half", 3, 8).to_json())
        text = rejection("--pipeline-schedule", str(file))
        assert f"the schedule file {file} is for 3 devices, this run has 4 pipeline ranks" in text

    def test_for_other_microbatches(self, file: Path) -> None:
        file.write_text(make("v-half", 4, 12).to_json())
        text = rejection("--pipeline-schedule", str(file))
        assert f"the schedule file {file} is for 12 microbatches, this run has 8 in a step" in text

    def test_with_a_changing_number_of_microbatches(self, file: Path) -> None:
        file.write_text(make("v-half", 4, 8).to_json())
        flags = ("--rampup-batch-size", "4", "2", "8")
        text = rejection("--pipeline-schedule", str(file), *flags)
        assert "remove --rampup-batch-size" in text

    def test_that_deadlocks(self, file: Path) -> None:
        data = json.loads(make("v-half", 4, 8).to_json())
        row = data["order"][2]
        a, b = row.index("F2.0"), row.index("F5.0")
        row[a], row[b] = row[b], row[a]
        file.write_text(json.dumps(data))
        text = rejection("--pipeline-schedule", str(file))
        assert text.startswith(f"the schedule file {file} cannot run: ")
        assert "deadlock" in text
        assert "waits for" in text

    def test_that_forgets_a_pass(self, file: Path) -> None:
        data = json.loads(make("v-half", 4, 8).to_json())
        data["order"][1].remove("F1.3")
        file.write_text(json.dumps(data))
        text = rejection("--pipeline-schedule", str(file))
        assert "F1.3 runs " in text
        assert "device 1" in text

    def test_that_is_none(self, farm: Farm, file: Path) -> None:
        text = rejection_text(farm, "--pipeline-schedule", str(file))
        assert text.startswith(f"the schedule file {file} cannot be read: ")
        file.write_text("{")
        text = rejection("--pipeline-schedule", str(file))
        assert text.startswith(f"the schedule file {file} is not valid JSON: ")

    def test_with_ends_that_cannot_be_tied(self, file: Path) -> None:
        data = json.loads(make("1f1b", 4, 8).to_json())
        data["placement"] = [3, 1, 2, 0]
        data["order"][0], data["order"][3] = data["order"][3], data["order"][0]
        file.write_text(json.dumps(data))
        text = rejection("--pipeline-schedule", str(file))
        assert "add --untie-embeddings-and-output-weights" in text


AHEAD = "--overlap-param-gather-with-optimizer-step"
DETACHED = "v-half --pipeline-vocab-parallel --mtp-num-layers 1 --mtp-detach-heads"
LAYOUT = "v-half --pipeline-model-parallel-layout"
SPLIT = "--pipeline-layer-split"
BIASES = "--recompute-modules mlp with biases ... Set --disable-bias-linear"
REJECTED = {
    f"v-half {RECOMPUTED}": BIASES,
    f"v-half {RECOMPUTED} {EXPERTS} --moe-layer-freq 2": BIASES,
    f"v-half {SPLIT} 2,2,2,2": "has 4 numbers and the schedule 8 stages",
    f"1f1b {SPLIT} 2,2,2,3": "adds up to 9 layers and the model has 8",
    f"zb-h1 {SPLIT} 2,0,3,3": "leaves stage 1 without layers",
    f"zb-h1 {SPLIT} 2,-1,4,3": "gives a stage -1 layers",
    f"v-half {SPLIT} even": "'even' is neither auto nor whole numbers",
    f"v-half {SPLIT} auto --num-layers 5": "make --num-layers at least 6",
    f"1f1b {SPLIT} auto --account-for-loss-in-pipeline-split": "remove one of them",
    "v-half --hybrid-context-parallel": "--hybrid-context-parallel",
    "v-half --perform-rl-step": "--perform-rl-step",
    f"{LAYOUT} Et*4|t*3|L": "has 7 layers and the model 8",
    f"{LAYOUT} Et*4|t*4|mL": "has multi-token prediction of depth 1",
    "1f1b --num-virtual-stages-per-pipeline-rank 2": "use interleaved-1f1b",
    "v-half --pipeline-timeout 0": "--pipeline-timeout 0",
    "auto": "--pipeline-costs FILE",
    "v-half --pipeline-memory-limit 1": "--pipeline-memory-limit requires --pipeline-schedule auto",
    f"v-half --rerun-mode disabled --optimizer-post-validation {AHEAD}": AHEAD,
    "1f1b --optimizer-post-validation": "--optimizer-post-validation needs a schedule",
    "v-zb --optimizer-post-validation --rerun-mode disabled --num-experts 4": "--num-experts",
    DETACHED: "--mtp-detach-heads",
    "v-half --pipeline-vocab-parallel --optimizer-post-validation --rerun-mode disabled": (
        "--pipeline-vocab-parallel does not work with --optimizer-post-validation"
    ),
    "v-zb --pipeline-warmup --optimizer-post-validation --rerun-mode disabled": (
        "--pipeline-warmup does not support --optimizer-post-validation"
    ),
    "v-half --pipeline-vocab-parallel --fine-grained-activation-offloading "
    "--offload-modules attn_norm": "offloading of activations",
}


@pytest.mark.parametrize(("flags", "said"), REJECTED.items(), ids=REJECTED)
def test_unsupported_flags_are_rejected_by_name(flags: str, said: str) -> None:
    if flags == DETACHED and not hasattr(TransformerConfig, "mtp_detach_heads"):
        pytest.skip("Megatron has it from 0.19 on")
    text = rejection("--pipeline-schedule", *flags.split())
    assert all(part in text for part in said.split(" ... "))


def test_a_layer_split_without_a_schedule() -> None:
    assert "needs --pipeline-schedule" in rejection("--pipeline-layer-split", "auto")


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="it is installed"
)
def test_transformer_engine_that_is_not_installed() -> None:
    text = rejection(*V_HALF.split(), "--transformer-impl", "transformer_engine")
    assert text.endswith("install it, or use --transformer-impl local")


@pytest.mark.skipif(
    metadata.version("megatron-core") >= "0.19", reason="from 0.19 on Megatron builds the model"
)
def test_models_of_later_megatron_releases_are_rejected(farm: Farm) -> None:
    attention = ("--experimental-attention-variant", "gated_delta_net")
    run = farm.run(2, "--pipeline-schedule", "v-half", *attention, "--linear-attention-freq", "4")
    assert run.codes == [1, 1], run.output
    said = "--experimental-attention-variant needs megatron-core 0.19 or later in this script"
    assert run.output[0].strip().endswith(said)
    assert "Traceback" not in run.output[0]


EVALUATES = "--eval-interval 1 --eval-iters 1"


@pytest.mark.parametrize("flags", ["--pipeline-schedule 1f1b", V_HALF, f"{V_HALF} --skip-train"])
def test_data_that_only_the_last_rank_would_collect(farm: Farm, flags: str) -> None:
    arguments = [*flags.split(), *EVALUATES.split()]
    functions = ["process_non_loss_data_func"]
    options = {"plugin": "plugins:non_loss_data", "argument": functions, "timeout_s": 60}
    text = rejection_text(farm, *arguments, ranks=2, **options)
    assert f"{flags.split()[1]} does not work with process_non_loss_data_func alone" in text
    assert "Give pretrain a non_loss_data_func as well" in text


def test_data_that_all_ranks_collect(farm: Farm, tmp_path: Path) -> None:
    functions = ["process_non_loss_data_func", "non_loss_data_func"]
    flags = (*V_HALF.split(), *EVALUATES.split(), "--tensorboard-dir", str(tmp_path))
    run = farm.run(
        2, *flags, plugin="plugins:non_loss_data", argument=functions, timeout_s=60
    ).check()
    assert "non-loss data of iteration 1: 2 chunks" in run.output[1]


def test_data_without_an_evaluation(farm: Farm) -> None:
    functions = ["process_non_loss_data_func"]
    options = {"plugin": "plugins:non_loss_data", "argument": functions, "timeout_s": 60}
    farm.run(2, *V_HALF.split(), **options).check()
