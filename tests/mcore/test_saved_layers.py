"""A checkpoint by ranks (--ckpt-format torch) loads where its layers are, and nowhere else."""

from argparse import Namespace
from pathlib import Path

import pytest
from mcore.farm import Ended, Farm

pytest.importorskip("megatron.training")

from megatron_vshape.mcore.hooks.checkpoints import RECORD, check_layers, saved_layers
from megatron_vshape.mcore.refusals import UnsupportedError

V_HALF = "--pipeline-schedule v-half"
FORMAT = ("--ckpt-format", "torch")
LOOPING = [[[0, 1, 2], [5, 6]], [[3, 4], [7, 8, -1]]]


def saved(**changed: object) -> Namespace:
    given = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "num_layers": 8,
    }
    return Namespace(**(given | changed))


def test_megatrons_own_checkpoints_have_layers_in_its_order() -> None:
    assert saved_layers(saved()) == LOOPING
    assert saved_layers(saved(pipeline_schedule="interleaved-1f1b")) == LOOPING
    one = saved(virtual_pipeline_model_parallel_size=None)
    assert saved_layers(one) == [[[0, 1, 2, 3, 4]], [[5, 6, 7, 8, -1]]]


def test_what_the_record_says_counts() -> None:
    layers = [[[0, 1], [8, -1]], [[2, 3, 4], [5, 6, 7]]]
    assert saved_layers(saved(pipeline_schedule="v-half", **{RECORD: layers})) == layers


@pytest.mark.parametrize(
    "changed",
    [
        {"pipeline_schedule": "v-half"},  # of a version without a record
        {"decoder_first_pipeline_num_layers": 1},
        {"pipeline_model_parallel_layout": "Et|t|t|tL"},
        {"hybrid_layer_pattern": "*-*-*-*-"},
    ],
)
def test_other_checkpoints_may_not_tell(
    changed: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    assert saved_layers(saved(**changed)) is None
    check_layers(None, LOOPING, "/folder")
    assert "does not state which rank had which layers" in caplog.text


def test_the_error_names_a_difference() -> None:
    here = [[[0], [7, 8, -1]], [[1, 2, 3, 4], [5, 6]]]
    with pytest.raises(UnsupportedError) as rejected:
        check_layers(LOOPING, here, "/folder")
    told = "rank 0 had embedding, 1, 2 | 5, 6 and has embedding | 7, 8, output here"
    assert told in str(rejected.value)
    with pytest.raises(UnsupportedError, match="it has 2 pipeline ranks and this run 1"):
        check_layers(LOOPING, here[:1], "/folder")


@pytest.fixture(scope="module")
def folder(farm: Farm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint by ranks that v-half has saved after two steps, of 2 layers a chunk."""
    path = tmp_path_factory.mktemp("saved")
    farm.run(2, *V_HALF.split(), *SAVED, "--save", str(path)).check()
    return path


SAVED = (*FORMAT, "--train-iters", "3", "--save-interval", "2", "--exit-interval", "2")
LOADED = (*FORMAT, "--train-iters", "3")
TWO_CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"


def rejected(run: Ended) -> bool:
    told = "does not work with this schedule: the checkpoint was saved with --ckpt-format torch"
    is_told = [told in text for text in run.output]
    return run.codes == [1, 1] and is_told == [True, False]


def test_the_same_placement_resumes(farm: Farm, folder: Path) -> None:
    whole = farm.run(2, *V_HALF.split(), "--train-iters", "3").check()
    run = farm.run(2, "--pipeline-schedule", "v-zb", *LOADED, "--load", str(folder)).check()
    (step,) = run.record["losses"]
    assert step["lm loss"] == pytest.approx(whole.record["losses"][2]["lm loss"], rel=1e-6)


@pytest.mark.parametrize(
    "flags",
    [
        f"{V_HALF} --pipeline-layer-split 3,1,3,1",  # of as many parameters: even the moments fit
        f"{V_HALF} --pipeline-layer-split 1,3,2,2 --no-load-optim",
        pytest.param(
            "--pipeline-schedule interleaved-1f1b --no-load-optim", marks=pytest.mark.slow
        ),
        pytest.param(f"{TWO_CHUNKS} --no-load-optim", marks=pytest.mark.slow),
        pytest.param("--pipeline-schedule zb-h1 --no-load-optim", marks=pytest.mark.slow),
    ],
)
def test_other_places_are_rejected(farm: Farm, folder: Path, flags: str) -> None:
    run = farm.run(2, *flags.split(), *LOADED, "--load", str(folder), timeout_s=60)
    assert rejected(run), run.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunks", "schedule", "loads"),
    [("", "zb-h1", True), ("", "v-half", False), (TWO_CHUNKS, "v-half", False)],
)
def test_a_checkpoint_of_megatron_alone(
    farm: Farm, tmp_path: Path, chunks: str, schedule: str, loads: bool
) -> None:
    farm.run(2, *chunks.split(), *SAVED, "--save", str(tmp_path), stock=True).check()
    flags = ("--pipeline-schedule", schedule, "--no-load-optim", *LOADED, "--load", str(tmp_path))
    run = farm.run(2, *flags, timeout_s=60)
    assert rejected(run) != loads, run.output
    assert (run.codes == [0, 0]) == loads, run.output


@pytest.mark.slow
def test_the_fix_that_the_error_names(farm: Farm, folder: Path, tmp_path: Path) -> None:
    converts = ("--ckpt-convert-format", "torch_dist", "--ckpt-convert-save", str(tmp_path))
    run = farm.run(2, *V_HALF.split(), *LOADED, "--load", str(folder), *converts)
    assert "converted checkpoint: torch -> torch_dist" in run.output[0]
    loads = ("--ckpt-format", "torch_dist", "--load", str(tmp_path / "torch_dist"))
    flags = "--pipeline-schedule zb-h1 --train-iters 3"
    other = farm.run(2, *flags.split(), *loads).check()
    whole = farm.run(2, *V_HALF.split(), "--train-iters", "3").check()
    (step,) = other.record["losses"]
    assert step["lm loss"] == pytest.approx(whole.record["losses"][2]["lm loss"], rel=1e-6)
