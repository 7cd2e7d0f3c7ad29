"""megatron-vshape profile: a costs file that plan reads, or one sentence."""

import os
import subprocess
import sys
from operator import add
from pathlib import Path

import pytest

from megatron_vshape.cli.main import main
from megatron_vshape.cli.profile import stage_layers
from megatron_vshape.core.model.costs import Costs

MODEL = (
    "name: small\nlayers: 6\nhidden_size: 32\nattention_heads: 4\nvocabulary_size: 64\n"
    "parameter_bytes: 4\nflash_attention: false\n"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the file of a model of six small layers."""
    path = tmp_path / "model.yaml"
    path.write_text(MODEL)
    return path


def test_a_model_is_measured_and_planned(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("megatron.core")
    found = tmp_path / "costs.json"
    arguments = ["--model", model, "--devices", "2", "--tensor-parallel", "2", "--seq-length", "64"]
    arguments += ["--device", "cpu", "--repeats", "3", "--send-us", "7", "--output", found]
    run = subprocess.run(
        [sys.executable, "-m", "megatron_vshape.cli.main", "profile", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = run.stdout.splitlines()
    assert [line[:26].strip() for line in lines[1:4]] == [
        "first stage, 1 layer",
        "inner stage, 2 layers",
        "last stage, 1 layer",
    ]
    costs = Costs.load(found)
    assert costs.layers == (1, 2, 2, 1)
    assert costs.send_us == 7
    assert costs.forward_us[1] == costs.forward_us[2]
    assert lines[0].split()[:8] == "F ms B ms W ms BW ms".split()
    # A whole backward does what both halves do; where it is measured to save nothing, none is told.
    whole_us = costs.whole_backward_us or map(add, costs.backward_us, costs.weight_us)
    for whole, b, w in zip(whole_us, costs.backward_us, costs.weight_us, strict=True):
        assert max(b, w) <= whole <= b + w
    assert costs.held_after_forward_bytes[1] > 1.5 * costs.held_after_forward_bytes[0]
    # Logits of 64 tokens and half of 64 words, kept by the loss beside the layer.
    assert costs.held_after_forward_bytes[3] > costs.held_after_forward_bytes[0]
    assert all(
        0 < after_b < after_f
        for after_f, after_b in zip(
            costs.held_after_forward_bytes, costs.held_after_backward_bytes, strict=True
        )
    )
    plan = ["plan", "--devices", "2", "--microbatches", "4", "--costs", str(found)]
    assert main([*plan, "--memory-limit", "0.01GiB"]) == 0
    assert "limit 0.01 GiB" in capsys.readouterr().out


BAD = {
    "unknown key": ({"text": MODEL + "colour: red\n"}, "unknown key colour"),
    "layers": ({"options": ["--layers", "7"]}, "make --layers a multiple of 4, such as 4 or 8"),
    "split": ({"options": ["--layer-split", "1,2"]}, "--layer-split 1,2 has 2 numbers and the"),
    "split by itself": (
        {"options": ["--layer-split", "auto"]},
        "--layer-split auto balances by the costs that are measured here: give every stage's",
    ),
    "split in words": ({"options": ["--layer-split", "even"]}, "'even' is not whole numbers with"),
    "tensor parallel": (
        {"options": ["--tensor-parallel", "3"]},
        "attention_heads 4 does not divide among 3 tensor-parallel ranks",
    ),
    "output": ({"options": ["--output", "costs.txt"]}, "--output costs.txt: the file's name must"),
    "no GPU": (
        {"options": ["--device", "cuda"]},
        "torch sees no GPU: run this where there is one, or with --device cpu",
    ),
    "no Transformer Engine": (
        {"options": ["--transformer-engine"]},
        "--transformer-engine: it is not installed; leave it out",
    ),
    "time": ({"options": ["--send-us", "-1"]}, "'-1' is not a time of at least 0"),
}


@pytest.mark.parametrize(("given", "told"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence(
    given: dict[str, str | list[str]],
    told: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("megatron.core")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    model.write_text(str(given.get("text", MODEL)))
    arguments = ["profile", "--model", str(model), "--devices", "2", "--seq-length", "16"]
    arguments += ["--device", "cpu", "--output", str(tmp_path / "costs.json")]
    assert main([*arguments, *given.get("options", [])]) == 2
    shown = capsys.readouterr()
    (line,) = [line for line in shown.err.splitlines() if line.startswith("megatron-vshape: ")]
    assert told in line
    assert "Traceback" not in shown.err  # torch may warn when it is imported
    assert shown.out == ""


def test_a_missing_model_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("megatron.core")
    arguments = ["profile", "--model", str(tmp_path / "none.yaml"), "--devices", "2"]
    arguments += ["--seq-length", "16", "--output", str(tmp_path / "costs.json")]
    assert main(arguments) == 2
    assert "none.yaml cannot be read" in capsys.readouterr().err


def test_the_ends_may_have_a_layer_less() -> None:
    assert stage_layers(30, 8, None) == (1, *[2] * 14, 1)
    assert stage_layers(16, 4, None) == (2,) * 8
    assert stage_layers(6, 2, "0,3,3,0") == (0, 3, 3, 0)
