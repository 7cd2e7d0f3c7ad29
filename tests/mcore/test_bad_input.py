"""What cannot run ends before any training: one clear sentence on rank 0, an error on all."""

import importlib.util
import json
from argparse import ArgumentParser, Namespace
from importlib import metadata
from pathlib import Path

import pytest
from mcore.farm import Farm

pytest.importorskip("megatron.training")


from megatron_vshape.core.model.files import UnreadableError
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.mcore.hooks.training import _refuse_what_was_not_seen
from megatron_vshape.mcore.options import add_arguments
from megatron_vshape.mcore.refusals import RefusedError, UnsupportedError
from megatron_vshape.mcore.setup.configure import prepare

V_HALF = "--pipeline-schedule v-half"


def refused(farm: Farm, *arguments: str, without: tuple[str, ...] = ()) -> str:
    """Return what rank 0 says, having checked that all four ranks end in time, with an error."""
    run = farm.run(4, *arguments, without=without, timeout_s=30)
    assert run.codes == [1] * 4, run.output
    said = [text.partition("megatron-vshape: ")[2] for text in run.output]
    assert said[0], run.output[0]
    assert said[1:] == [""] * 3
    assert not any("Traceback" in text or "lm loss" in text for text in run.output)
    return said[0].strip()


def test_unknown_schedule(farm: Farm) -> None:
    text = refused(farm, "--pipeline-schedule", "v-quarter")
    assert text.startswith("there is no schedule 'v-quarter'. The names are 1f1b, interleaved-1f1b")
    assert "v-min, v-half, v-zb" in text


@pytest.mark.parametrize("schedule", [(), ("--pipeline-schedule", "1f1b")])
@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--pipeline-memory-limit", "60"),
        ("--pipeline-host-memory-limit", "60"),
        ("--pipeline-trace", "traces"),
        ("--pipeline-profile-iterations", "2:3"),
        ("--pipeline-costs", "costs.json"),
    ],
)
def test_flags_that_megatrons_own_schedules_have_no_use_for(
    flag: str, value: str, schedule: tuple[str, ...]
) -> None:
    parser = ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args([flag, value, *schedule])
    args.pipeline_model_parallel_size = 4
    what = "1f1b" if schedule else "Megatron's own schedule"
    with pytest.raises(UnsupportedError, match=f"^{flag} has no effect with {what}: remove it"):
        prepare(args)


def test_a_schedule_that_the_checks_have_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    args = Namespace(pipeline_schedule="v-zb", pipeline_model_parallel_size=4)
    with pytest.raises(RefusedError, match="^megatron-vshape: --pipeline-schedule v-zb came with"):
        _refuse_what_was_not_seen(args)
    args.pipeline_model_parallel_size = 1
    _refuse_what_was_not_seen(args)


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
def test_who_prints_a_reason(
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


def test_layers_that_do_not_divide(farm: Farm) -> None:
    text = refused(farm, *V_HALF.split(), "--num-layers", "12")
    assert text == (
        "12 layers do not divide among 8 stages (4 devices with 2 each): give a multiple of 8, "
        "such as 8 or 16, or add --layer-split auto (to training: --pipeline-layer-split)"
    )


SPLITS = {
    "v-half --pipeline-layer-split 2,2,2,2": (
        "--pipeline-layer-split 2,2,2,2 has 4 numbers and the schedule 8 stages (4 devices with 2 "
        "each): give one number per stage, in the model's order"
    ),
    "1f1b --pipeline-layer-split 2,2,2,3": (
        "--pipeline-layer-split 2,2,2,3 adds up to 9 layers and the model has 8"
    ),
    "zb-h1 --pipeline-layer-split 2,0,3,3": "leaves stage 1 without layers: only the first",
    "zb-h1 --pipeline-layer-split 2,-1,4,3": "gives a stage -1 layers",
    "v-half --pipeline-layer-split even": "'even' is neither auto nor whole numbers with commas",
    "v-half --pipeline-layer-split auto --num-layers 5": (
        "5 layers are too few for 8 stages: only the first and the last may be without, so make "
        "--num-layers at least 6"
    ),
    "1f1b --pipeline-layer-split auto --account-for-loss-in-pipeline-split": (
        "because --pipeline-layer-split defines the layers of each stage"
    ),
}


@pytest.mark.parametrize(("flags", "said"), SPLITS.items(), ids=SPLITS)
def test_layer_splits_that_cannot_be(farm: Farm, flags: str, said: str) -> None:
    assert said in refused(farm, "--pipeline-schedule", *flags.split())


def test_a_layer_split_without_a_schedule(farm: Farm) -> None:
    text = refused(farm, "--pipeline-layer-split", "auto")
    assert text == ("--pipeline-layer-split auto needs --pipeline-schedule, such as 1f1b or v-half")


class TestScheduleFiles:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        return tmp_path / "schedule.json"

    def test_for_other_devices(self, farm: Farm, file: Path) -> None:
        file.write_text(make("v-half", 3, 8).to_json())
        text = refused(farm, "--pipeline-schedule", str(file))
        assert f"the schedule file {file} is for 3 devices, this run has 4 pipeline ranks" in text

    def test_for_other_microbatches(self, farm: Farm, file: Path) -> None:
        file.write_text(make("v-half", 4, 12).to_json())
        text = refused(farm, "--pipeline-schedule", str(file))
        assert f"the schedule file {file} is for 12 microbatches, this run has 8 in a step" in text

    def test_with_a_changing_number_of_microbatches(self, farm: Farm, file: Path) -> None:
        file.write_text(make("v-half", 4, 8).to_json())
        # Up to Megatron 0.17 a batch may ramp up only where training is counted in samples.
        flags = ("--rampup-batch-size", "4", "2", "8", "--train-samples", "24")
        text = refused(farm, "--pipeline-schedule", str(file), *flags, without=("--train-iters",))
        assert "remove --rampup-batch-size" in text

    def test_that_deadlocks(self, farm: Farm, file: Path) -> None:
        data = json.loads(make("v-half", 4, 8).to_json())
        row = data["order"][2]
        a, b = row.index("F2.0"), row.index("F5.0")
        row[a], row[b] = row[b], row[a]
        file.write_text(json.dumps(data))
        text = refused(farm, "--pipeline-schedule", str(file))
        assert text.startswith(f"the schedule file {file} cannot run: ")
        assert "deadlock" in text
        assert "waits for" in text

    def test_that_forgets_a_pass(self, farm: Farm, file: Path) -> None:
        data = json.loads(make("v-half", 4, 8).to_json())
        data["order"][1].remove("F1.3")
        file.write_text(json.dumps(data))
        text = refused(farm, "--pipeline-schedule", str(file))
        assert "F1.3 runs " in text
        assert "device 1" in text

    def test_that_is_none(self, farm: Farm, file: Path) -> None:
        text = refused(farm, "--pipeline-schedule", str(file))
        assert text.startswith(f"the schedule file {file} cannot be read: ")
        file.write_text("{")
        text = refused(farm, "--pipeline-schedule", str(file))
        assert text.startswith(f"the schedule file {file} is not valid: ")
        assert "JSON" in text

    def test_with_ends_that_cannot_be_tied(self, farm: Farm, file: Path) -> None:
        data = json.loads(make("1f1b", 4, 8).to_json())
        data["placement"] = [3, 1, 2, 0]
        data["order"][0], data["order"][3] = data["order"][3], data["order"][0]
        file.write_text(json.dumps(data))
        text = refused(farm, "--pipeline-schedule", str(file))
        assert "add --untie-embeddings-and-output-weights" in text


OPTIONS = [
    "--cuda-graph-impl full_iteration",
    "--use-megatron-fsdp",
    "--hybrid-context-parallel",
    "--perform-rl-step",
    "--transformer-impl inference_optimized",
]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.split()[0])
def test_unsupported_options_are_named(farm: Farm, option: str) -> None:
    if option == OPTIONS[0] and metadata.version("megatron-core") < "0.18":
        pytest.skip("Megatron has no such graphs before 0.18")
    text = refused(farm, *V_HALF.split(), *option.split())
    assert text.startswith(f"--pipeline-schedule v-half does not work with {option.split()[0]}")


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="it is installed"
)
def test_transformer_engine_that_is_not_installed(farm: Farm) -> None:
    text = refused(farm, *V_HALF.split(), "--transformer-impl", "transformer_engine")
    assert text.endswith("install it, or use --transformer-impl local")


AHEAD = "--overlap-param-gather-with-optimizer-step"
TRANSLATED = {
    "--pipeline-model-parallel-layout Et*4|t*3|L": "has 7 layers and the model 8",
    "--pipeline-model-parallel-layout Et*4|t*4|mL": "has multi-token prediction of depth 1, and",
    "--pipeline-model-parallel-layout Et*4|t*4L --account-for-loss-in-pipeline-split": (
        "each define the layers of each stage: remove all but one"
    ),
    f"--rerun-mode disabled --optimizer-post-validation {AHEAD}": (
        f"--optimizer-post-validation does not work with {AHEAD}"
    ),
}


@pytest.mark.parametrize(("flags", "said"), TRANSLATED.items(), ids=TRANSLATED)
def test_what_cannot_be_translated(farm: Farm, flags: str, said: str) -> None:
    assert said in refused(farm, *V_HALF.split(), *flags.split())


def test_1f1b_with_chunks(farm: Farm) -> None:
    flags = "--pipeline-schedule 1f1b --num-virtual-stages-per-pipeline-rank 2"
    assert "use interleaved-1f1b" in refused(farm, *flags.split())


def test_a_timeout_of_nothing(farm: Farm) -> None:
    text = refused(farm, *V_HALF.split(), "--pipeline-timeout", "0")
    assert text == "--pipeline-timeout 0 is not a number of seconds above 0"


@pytest.mark.skipif(
    metadata.version("megatron-core") >= "0.19", reason="from 0.19 on Megatron builds the model"
)
def test_what_only_later_megatrons_build_is_refused(farm: Farm) -> None:
    attention = ("--experimental-attention-variant", "gated_delta_net")
    run = farm.run(2, "--pipeline-schedule", "v-half", *attention, "--linear-attention-freq", "4")
    assert run.codes == [1, 1], run.output
    said = "--experimental-attention-variant needs megatron-core 0.19 or later in this script"
    assert run.output[0].strip().endswith(said)
    assert "Traceback" not in run.output[0]


EVALUATES = "--eval-interval 1 --eval-iters 1"
NON_LOSS_DATA = Path(__file__).with_name("non_loss_data.py")


@pytest.mark.parametrize("flags", ["--pipeline-schedule 1f1b", V_HALF, f"{V_HALF} --skip-train"])
def test_data_that_only_the_last_rank_would_collect(farm: Farm, flags: str) -> None:
    given = [*flags.split(), *EVALUATES.split()]
    functions = ["process_non_loss_data_func"]
    run = farm.run(2, *given, plugin=NON_LOSS_DATA, given=functions, timeout_s=60)
    assert run.codes == [1, 1], run.output
    text = run.output[0].partition("megatron-vshape: ")[2]
    assert f"{flags.split()[1]} does not work with process_non_loss_data_func alone" in text
    assert "Give pretrain a non_loss_data_func as well" in text
    assert not any("Traceback" in each or "lm loss" in each for each in run.output)


def test_data_that_all_ranks_collect(farm: Farm, tmp_path: Path) -> None:
    functions = ["process_non_loss_data_func", "non_loss_data_func"]
    flags = (*V_HALF.split(), *EVALUATES.split(), "--tensorboard-dir", str(tmp_path))
    run = farm.run(2, *flags, plugin=NON_LOSS_DATA, given=functions, timeout_s=60).check()
    assert "non-loss data of iteration 1: 2 chunks" in run.output[1]


def test_data_without_an_evaluation(farm: Farm) -> None:
    functions = ["process_non_loss_data_func"]
    farm.run(2, *V_HALF.split(), plugin=NON_LOSS_DATA, given=functions, timeout_s=60).check()
