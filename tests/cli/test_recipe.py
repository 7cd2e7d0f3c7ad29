"""doctor --recipe: what becomes of a configuration's options, and an exit status that says it."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_vshape.cli import recipe
from megatron_vshape.cli.main import main
from megatron_vshape.mcore import refusals

KIMI = "kimi_k2_pretrain_512gpu_h100_bf16_config"


@pytest.fixture(autouse=True)
def _has_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "has_transformer_engine", lambda: True)


def doctor(*arguments: str) -> int:
    return main(["doctor", "--recipe", *arguments])


def written(tmp_path: Path, content: Any) -> str:
    file = tmp_path / "recipe.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def test_a_published_recipe_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(KIMI, "--schedule", "zb-h1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{KIMI} (recipes/kimi/h100/kimi_k2.py)"
    assert lines[1] == "zb-h1: 16 devices, 16 stages"
    assert lines[lines.index("translated") + 1].startswith(
        "  pipeline_model_parallel_layout Et*4|(t*4|)*14tL: its 16 stages as the schedule's 16"
    )
    assert "  pipeline_model_parallel_size, tensor_model_parallel_size," in "\n".join(lines)
    assert "refused" not in lines
    assert lines[-1] == "starts with zb-h1"


def test_what_is_refused_is_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {
        "model": {
            "pipeline_model_parallel_size": 4,
            "virtual_pipeline_model_parallel_size": 5,
            "num_layers": 38,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
            "hybrid_context_parallel": True,
            "cuda_graph_impl": "none",
        },
        "optimizer": {"overlap_param_gather_with_optimizer_step": True, "lr": None},
    }
    assert doctor(written(tmp_path, options)) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "v-half: 4 devices, 8 stages",
        "",
        "translated",
        "  account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split: 40 layers "
        "with the",
        "    ends among 8 stages: layers per stage 4,5,5,5,5,5,5,4",
        "",
        "set aside",
        "  virtual_pipeline_model_parallel_size 5: set aside, the schedule says how many chunks a "
        "rank has",
        "",
        "supported",
        "  pipeline_model_parallel_size, num_layers, overlap_param_gather_with_optimizer_step",
        "",
        "refused",
        "  --pipeline-schedule v-half does not work with --hybrid-context-parallel: it assumes the "
        "order of",
        "    Megatron's own schedules: leave it out",
        "",
        "does not start with v-half",
    ]


def test_what_needs_the_number_of_layers_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 3}
    assert doctor(written(tmp_path, options)) == 1
    told = capsys.readouterr().out
    assert "counted from it, which needs num_layers" in " ".join(told.split())
    assert told.endswith(
        "does not start with v-half here:\n"
        "  the layers have to fit 4 stages, and num_layers is not given\n"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_layers": 18}, "refused 18 layers do not divide among 8 stages"),
        ({"pipline_vocab": 1}, "unknown pipline_vocab: no option of Megatron or this package has"),
        ({"pipeline_vocab_paralel": 1}, "name; near is pipeline_vocab_parallel"),
        ({"cuda_graph_impl": "local"}, "does not work with --cuda-graph-impl local"),
        (
            {"optimizer_post_validation": True, "rerun_mode": "disabled", "fp8": "hybrid"},
            "--optimizer-post-validation does not work with --fp8-format",
        ),
        (
            {"optimizer_post_validation": True, "rerun_mode": "disabled", "rampup_batch_size": [1]},
            "--optimizer-post-validation does not work with --rampup-batch-size",
        ),
        ({"pipeline_vocab_parallel": True, "use_mup": True}, "does not work with --use-mup"),
    ],
)
def test_what_training_refuses_does_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any], said: str
) -> None:
    given = {"pipeline_model_parallel_size": 4, "num_layers": 16, "transformer_impl": "local"}
    assert doctor(written(tmp_path, given)) == 0
    assert doctor(written(tmp_path, given | options)) == 1
    told = capsys.readouterr().out
    assert said in " ".join(told.split())
    assert told.endswith("\ndoes not start with v-half\n")


def test_what_is_not_installed_is_said_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "has_transformer_engine", lambda: False)
    assert doctor(written(tmp_path, {"pipeline_model_parallel_size": 4, "num_layers": 16})) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "refused" not in told
    assert "does not start with v-half here: --transformer-impl transformer_engine needs" in told


def test_a_recipe_may_name_its_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"pipeline_model_parallel_size": 4, "num_layers": 20, "pipeline_schedule": "zb-h1"}
    file = written(tmp_path, options)
    assert doctor(file) == 0
    assert capsys.readouterr().out.endswith("starts with zb-h1\n")
    assert doctor(file, "--schedule", "v-half") == 1
    assert doctor(file, "--schedule", "1f1b") == 2
    assert "1f1b is Megatron's own schedule, which runs as" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not valid JSON: "),
        ([1], "it must hold an object"),
        ("[" * 5000, "is not valid JSON: it is nested too deep"),
        ({"num_layers": 8}, "has pipeline_model_parallel_size 1: there is nothing to schedule"),
        ({"pipeline_model_parallel_size": "4"}, "there is nothing to schedule"),
        (
            {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": 7},
            "has a value that no option takes",
        ),
    ],
)
def test_what_is_no_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, said: str
) -> None:
    assert doctor(written(tmp_path, content)) == 2
    assert said in capsys.readouterr().err


def test_a_layout_that_does_not_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {
        "pipeline_model_parallel_size": 4,
        "num_layers": 8,
        "pipeline_model_parallel_layout": "Et*4|tL",
        "overlap_p2p_comm_warmup_flush": True,
    }
    assert doctor(written(tmp_path, options)) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "Et*4|tL has 5 layers and the model 8" in told
    assert "overlap_p2p_comm_warmup_flush: set aside" in told  # the rest is told all the same


def test_an_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("kimi_k2_pretrain_512gpu") == 2
    told = capsys.readouterr().err
    assert "is neither a file nor a published recipe; near are " in told
    assert KIMI in told


def test_an_installed_package_takes_files_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(recipe, "PUBLISHED", tmp_path / "none.json")
    assert doctor(KIMI) == 2
    assert (
        "known in a checkout of megatron-vshape only: give a JSON file" in capsys.readouterr().err
    )


def test_what_is_known_to_lose_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"pipeline_model_parallel_size": 4, "num_layers": 16, "transformer_impl": "local"}
    given |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    for granularity, schedule, is_told in (
        ("full", "v-half", True),
        ("full", "1f1b-v", False),
        (None, "v-half", False),
    ):
        file = written(tmp_path, given | {"recompute_granularity": granularity})
        assert doctor(file, "--schedule", schedule) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert ("takes longer than interleaved-1f1b" in told) == is_told
        assert ("megatron-vshape advise compares them" in told) == is_told
