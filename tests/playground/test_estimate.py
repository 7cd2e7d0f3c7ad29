"""Estimates of pasted commands, whose scripts are not run and whose files are not read."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from playground.answers import frames

from megatron_vshape.cli.files import is_installed
from megatron_vshape.cli.pasted import safe_words
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.playground.estimate import EXAMPLE, parse_estimate
from megatron_vshape.rehearsal.gpus import GPUS

SIZES = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --micro-batch-size 1"
GPT = f"""torchrun --nproc-per-node 2 /opt/Megatron-LM/pretrain_gpt.py {SIZES} \\
    --seq-length 16 --max-position-embeddings 16 --global-batch-size 2 --data-path /data/corpus \\
    --transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion \\
    --no-persist-layer-norm --no-rope-fusion --bf16"""


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def estimated(client: Any, **fields: Any) -> list[tuple[str, Any]]:
    body = {"command": GPT, "gpu": "h100", "number": 2, **fields}
    response = client.post("/api/estimate", json=body)
    assert response.status_code == 200, response.text
    return [(kind, json.loads(data)) for kind, data in frames(response.content)]


def test_estimate_has_memory_parts_verdict_and_step_time(client: Any) -> None:
    if not (is_installed("torch") and is_installed("megatron.training")):
        pytest.skip("Megatron is not installed")
    received = estimated(client)
    assert received[0] == ("P", {"doing": "estimating"})
    kind, report = received[-1]
    assert kind == "R", report
    (rank,) = report["ranks"]
    parts = {"weights", "gradients", "optimizer", "activations", "logits", "rest"}
    assert set(rank["parts"]) == parts
    assert sum(rank["parts"].values()) == pytest.approx(rank["peak_bytes"], rel=0.01)
    assert rank["reserved_bytes"] >= rank["peak_bytes"]
    assert report["gpu_memory_bytes"] == GPUS["h100"].memory_bytes
    assert report["step_s"] > 0
    assert report["verdict"].startswith("Fits: rank 0")
    assert f"; {rank['spare_bytes'] / 2**30:.1f} GiB are spare" in report["verdict"]
    assert report["run"].startswith("Megatron's own schedule, TP 1 x PP 1 x CP 1 x DP 2: 2 H100")
    assert report["remedies"] == []


def test_vocabulary_size_is_requested_and_used(client: Any) -> None:
    if not (is_installed("torch") and is_installed("megatron.training")):
        pytest.skip("Megatron is not installed")
    command = f"{GPT} --tokenizer-type HuggingFaceTokenizer --tokenizer-model an/example"
    kind, error = estimated(client, command=command)[-1]
    assert (kind, error["field"]) == ("E", "vocabulary")
    assert error["text"].endswith("enter the vocabulary size")
    kind, report = estimated(client, command=command, vocabulary=64_000)[-1]
    assert kind == "R", report
    embedding_bytes = 2 * 64_000 * 32  # bf16
    assert report["ranks"][0]["parts"]["weights"] > embedding_bytes


def test_example_has_all_fields_and_names_no_file() -> None:
    entries = {**EXAMPLE, "number": None, "vocabulary": int(EXAMPLE["vocabulary"])}
    request = parse_estimate(entries, {name: gpu.memory_bytes for name, gpu in GPUS.items()})
    assert request.options() == ["--gpu", "h100", "--vocabulary", "128256"]
    words = safe_words(request.command)
    assert words[words.index("--nnodes") + 1] == "4"
    assert "--untie-embeddings-and-output-weights" in words


def test_an_error_is_one_message(client: Any) -> None:
    kind, error = estimated(client, number=3, command=f"{GPT} --tensor-model-parallel-size 2")[-1]
    assert (kind, error["field"]) == ("E", "command")
    assert error["text"].startswith("3 GPUs do not divide among TP 2")
    assert "\n" not in error["text"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("command", "  "),
        ("command", 5),
        ("command", "x" * 100_001),
        ("gpu", "h100; rm"),
        ("gpu", None),
        ("number", 0),
        ("number", "8"),
        ("number", True),
        ("vocabulary", -1),
        ("vocabulary", "128k"),
    ],
)
def test_invalid_field_is_rejected(client: Any, field: str, value: object) -> None:
    body = {"command": GPT, "gpu": "h100", "number": None, field: value}
    response = client.post("/api/estimate", json=body)
    assert response.status_code == 422
    assert response.json()["field"] == field


def test_estimate_rejects_other_origins(client: Any) -> None:
    body = {"command": GPT, "gpu": "h100", "number": None}
    for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
        assert client.post("/api/estimate", json=body, headers=headers).status_code == 403


def test_the_script_of_a_command_is_replaced(empty_folder: Path) -> None:
    words = safe_words(f"PYTHONPATH=/opt/Megatron-LM NVTE_FP8_DPA_BWD=0 {GPT}")
    assert words[:4] == ["NVTE_FP8_DPA_BWD=0", "--nproc-per-node", "2", "pretrain_gpt.py"]
    assert words[4:8] == SIZES.split()[:4]
    assert list(empty_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("python /home/me/steal.py --num-layers 2", "runs no script but"),
        (
            "#!/bin/bash\nx=1\ntorchrun pretrain_gpt.py --num-layers 2\ny=2",
            "reads no shell scripts",
        ),
        ("pretrain_gpt.py /etc/passwd", "reads no files"),
        ("pretrain_gpt.py --num-layers 2 --pipeline-schedule plan.json", "reads no files"),
        ("pretrain_gpt.py --num-layers 2 --yaml-cfg=/etc/x", "reads no files"),
        ("CUBLAS_LOGDEST_DBG=/home/me/.profile pretrain_gpt.py --num-layers 2", "reads no files"),
        ("pretrain_gpt.py --num-layers 2 --spec os system", "imports no modules but"),
        ("pretrain_gpt.py --num-layers '2", "cannot be split into words"),
        ("# nothing\n", "is empty"),
    ],
)
def test_no_script_file_or_module_of_a_command_is_used(command: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        safe_words(command)


def test_slashes_of_a_pattern_and_paths_of_data_are_allowed() -> None:
    flags = "--hybrid-layer-pattern M*|M-/M/M --load /checkpoints --spec megatron.core.x y"
    assert safe_words(f"pretrain_hybrid.py {flags}")[0] == "pretrain_hybrid.py"


def test_one_estimate_at_a_time_and_closing_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_vshape.playground import estimate

    started = []

    async def sleeping(request: Any, folder: str) -> Any:
        pipe = asyncio.subprocess.PIPE
        how = {"stdin": pipe, "stderr": pipe, "start_new_session": True}
        started.append(await asyncio.create_subprocess_exec("sleep", "600", **how))
        return started[-1]

    async def use() -> None:
        estimator = estimate.Estimator()
        request = estimate.EstimateRequest(GPT, "h100", None)
        first = estimator.answer(request)
        assert (await anext(first))[:1] == b"P"
        assert b"another estimate is running" in await anext(estimator.answer(request))
        await first.aclose()
        await estimator.close()
        assert started[0].returncode == -signal.SIGKILL
        second = estimator.answer(request)
        assert (await anext(second))[:1] == b"P"
        monkeypatch.setattr(estimate, "LIMIT_S", 0)
        os.killpg(started[1].pid, signal.SIGTERM)
        assert b"it ended without a message" in await anext(second)
        await second.aclose()
        assert b"no result within" in await anext(estimator.answer(request))
        await estimator.close()

    monkeypatch.setattr(estimate, "_start", sleeping)
    asyncio.run(use())
