"""megatron-vshape profile: a costs file that plan reads, or one sentence."""

import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from operator import add
from pathlib import Path

import pytest

from megatron_vshape.cli.main import main
from megatron_vshape.cli.profile import stage_layers
from megatron_vshape.core.model.costs import Costs, Piece
from megatron_vshape.core.model.kinds import PARTS, VOCABULARY, Kind
from megatron_vshape.core.planner.vocabulary import tells_shared

MODEL = (
    "name: small\nlayers: 6\nhidden_size: 32\nattention_heads: 4\nvocabulary_size: 64\n"
    "parameter_bytes: 4\nflash_attention: false\n"
)

A100 = str(Path(__file__).parents[2] / "configs" / "clusters" / "a100_80gb_40.yaml")

EXPERTS = "experts: {count: 4, per_token: 2, ffn_hidden_size: 64}\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the file of a model of six small layers."""
    path = tmp_path / "model.yaml"
    path.write_text(MODEL)
    return path


def profiled(arguments: list[object]) -> str:
    """Return what a process that measures on the CPU prints."""
    run = subprocess.run(
        [sys.executable, "-m", "megatron_vshape.cli.main", "profile", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def test_a_model_is_measured_and_planned(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("megatron.core")
    found = tmp_path / "costs.json"
    arguments = ["--model", model, "--devices", "2", "--tensor-parallel", "2", "--seq-length", "64"]
    arguments += ["--device", "cpu", "--repeats", "3", "--send-us", "7", "--output", found]
    printed = profiled(arguments)
    lines = printed.splitlines()
    assert [line[:26].strip() for line in lines[1:4]] == [
        "first stage, 1 layer",
        "inner stage, 2 layers",
        "last stage, 1 layer",
    ]
    costs = Costs.load(found)
    assert costs.layers == (1, 2, 2, 1)
    assert costs.send_us == 7
    assert costs.forward_us[1] == costs.forward_us[2]
    told = "\n".join(lines[4:])
    assert "send_us: assumed: given as --send-us" in told
    assert "whole_exchange_us: assumed: all-reduces over 2 ranks at 235 GB/s, 20 us" in told
    assert "host_us: measured on one device" in told
    # 64 tokens x 32 x 4 bytes, of which each of two ranks sends all: twice a layer, and the ends.
    each_us = 20 + 64 * 32 * 4 / 235e3
    assert costs.forward_exchange_us == pytest.approx([count * each_us for count in (3, 4, 4, 2)])
    assert costs.backward_exchange_us == pytest.approx([count * each_us for count in (2, 4, 4, 3)])
    assert costs.whole_exchange_us is not None
    assert all(
        shown == pytest.approx(max(0.0, exchange - weight))
        for shown, exchange, weight in zip(
            costs.whole_exchange_us, costs.backward_exchange_us, costs.weight_us, strict=True
        )
    )
    assert 0 < costs.host_us < costs.forward_us[1]
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
    shown = capsys.readouterr().out
    assert "limit 0.01 GiB" in shown
    assert "split backward" in shown
    assert "send_us: assumed: given as --send-us" in shown


@pytest.mark.slow
def test_the_first_and_the_last_stage_may_have_no_layers(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    found = tmp_path / "costs.json"
    arguments = ["--model", model, "--devices", "2", "--layer-split", "0,3,3,0", "--device", "cpu"]
    arguments += ["--seq-length", "64", "--repeats", "2", "--send-us", "7", "--output", found]
    profiled(arguments)
    costs = Costs.load(found)
    assert costs.layers == (0, 3, 3, 0)
    assert 0 < costs.forward_us[0] < costs.forward_us[1]
    assert costs.held_after_forward_bytes[0] < costs.held_after_forward_bytes[1]


@pytest.mark.slow
def test_a_shared_vocabularys_passes_are_measured(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So does multi-token prediction; the file says what of it was not measured."""
    pytest.importorskip("megatron.core")
    model.write_text(MODEL.replace("vocabulary_size: 64", "vocabulary_size: 4096\nmtp_layers: 1"))
    found = tmp_path / "costs.json"
    arguments = ["--model", model, "--devices", "2", "--seq-length", "64", "--device", "cpu"]
    arguments += ["--repeats", "3", "--vocab-parallel", "--output", found]
    printed = profiled(arguments)
    parts = "lookup_us, logits_us, head_weight_us, lookup_weight_us: measured on one device, with "
    assert f"{parts}1/2 of the vocabulary each" in printed
    assert "lookup_sum_us, logits_sum_us: assumed: 2 x 8,192 bytes at 45 GB/s" in printed
    written = printed[
        printed.index("as written, with the embedding and the output layer shared:") :
    ]
    assert re.search(r"^stage 0: 1 layer +[0-9. ]+$", written, re.M)
    logits_us = dict(Costs.load(found).others)["logits_us"][0]
    assert f"its part of the output layer, ms {logits_us / 1000:17.3f}" in written
    costs = Costs.load(found)
    assert tells_shared(costs)
    assert costs.layers == (1, 2, 2, 1)
    # the last stage has a layer more, and the merging before it; no stage has the ends
    assert costs.forward_us[1] == pytest.approx(2 * costs.forward_us[0])
    assert 2 < costs.forward_us[3] / costs.forward_us[0] < 2.3
    # both heads' probabilities of half of the words, and a hidden state each
    assert dict(costs.others)["logits_bytes"] == (2 * (64 * 2048 + 64 * 32) * 4,) * 4
    plan = ["plan", "--devices", "2", "--microbatches", "4", "--costs", str(found)]
    assert main([*plan, "--memory-limit", "0.1GiB"]) == 0
    assert "with 1/2 of the vocabulary each" in capsys.readouterr().out


def test_what_is_derived_goes_with_plain_stages_alone(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("megatron.core")
    arguments = ["profile", "--model", str(model), "--devices", "2", "--seq-length", "64"]
    arguments += ["--device", "cpu", "--output", str(tmp_path / "costs.json")]
    assert main([*arguments, "--vocab-parallel", "--offload"]) == 2
    assert "--vocab-parallel does not support --offload" in capsys.readouterr().err


@pytest.mark.slow
def test_copies_are_measured(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    found = tmp_path / "costs.json"
    arguments = ["--model", model, "--devices", "2", "--seq-length", "64", "--device", "cpu"]
    arguments += ["--repeats", "3", "--offload"]
    run = subprocess.run(
        [sys.executable, "-m", "megatron_vshape.cli.main", "profile"]
        + [*map(str, arguments), "--output", str(found)],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "copies to host memory of up to " in run.stdout
    costs = Costs.load(found)
    assert Costs.from_json(costs.to_json()) == costs
    assert dict(costs.sources)["copy_back_us"] == "measured on one device"
    others = dict(costs.others)
    for stage, held in enumerate(costs.held_after_forward_bytes):
        # All but the output of the stage and what is small.
        assert 0.8 * held < others["offloaded_bytes"][stage] <= held
        assert others["copy_out_us"][stage] > 0
        assert others["copy_back_us"][stage] > 0


def test_a_price_of_slices_is_measured(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A whole pass takes what it took; K slices take K - 1 times the price more."""
    pytest.importorskip("megatron.core")
    path = tmp_path / "costs.json"
    sizes = ["--devices", "2", "--seq-length", "64", "--device", "cpu", "--repeats", "3"]
    measured = ["--model", str(model), *sizes, "--output", str(path), "--slices"]
    printed = profiled([*measured, "2", "4"])
    line = r"^(\d) slices of (\d+) tokens: ([\d.]+) us of overhead per pass"
    told = re.findall(line, printed, re.M)
    assert [each[:2] for each in told] == [("2", "32"), ("4", "16")]
    costs, price = Costs.load(path), max(float(each[2]) for each in told)
    assert costs.host_us >= price - 0.1 > 0
    assert dict(costs.sources)["host_us"] == "measured of 2, 4 slices"
    whole, part = costs.time_us(Kind.F, 1), costs.sliced(4).time_us(Kind.F, 1)
    assert 4 * part == pytest.approx(whole + 3 * costs.host_us)
    # What cannot be cut is told before anything is measured.
    assert main(["profile", *measured, "1"]) == 2
    assert main(["profile", *measured, "7"]) == 2
    assert "64 tokens cannot be cut in 7 equal slices" in capsys.readouterr().err


def on_two_ranks(model: Path, found: Path, *more: str) -> tuple[str, Costs]:
    """Profile on two ranks over gloo; return what was printed, and the costs."""
    pytest.importorskip("megatron.core")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["--model", model, "--devices", "2", "--seq-length", "64"]
    arguments += ["--device", "cpu", "--repeats", "3", "--output", found, *more]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(port), "-m", "megatron_vshape.cli.main", "profile"]
    run = subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout, Costs.load(found)


def test_ranks_measure_their_exchanges_and_messages(model: Path, tmp_path: Path) -> None:
    """Two ranks of a stage, over gloo: everything in the file is measured."""
    printed, costs = on_two_ranks(model, tmp_path / "costs.json", "--tensor-parallel", "2")
    assert printed.count("inner stage, 2 layers") == 1  # one rank tells
    sources = dict(costs.sources)
    assert sources.pop("send_us") == "measured between ranks of one stage, which are all there are"
    exchanges = {"forward_exchange_us", "backward_exchange_us", "whole_exchange_us"}
    assert exchanges | {"forward_us", "host_us"} <= set(sources)
    assert set(sources.values()) == {"measured on 2 ranks, tensor-parallel 2"}
    assert costs.send_us > 0
    assert costs.host_us > 0
    # A sum over processes takes longer than such small products: some of it shows.
    waits = [costs.exchanges_us(Kind.F, at) + costs.exchanges_us(Kind.B, at) for at in range(4)]
    assert sum(waits) > 0
    for stage in range(4):
        whole, split = costs.time_us(Kind.BW, stage), costs.time_us(Kind.B, stage)
        assert 0 < whole <= split + costs.time_us(Kind.W, stage)


def test_ranks_measure_the_passes_of_a_shared_vocabulary(model: Path, tmp_path: Path) -> None:
    """Two ranks, of four devices: each has a quarter of the rows, and they make real sums."""
    model.write_text(MODEL.replace("vocabulary_size: 64", "vocabulary_size: 32768"))
    more = ("--devices", "4", "--layers", "8", "--vocab-parallel")
    _, costs = on_two_ranks(model, tmp_path / "costs.json", *more)
    assert tells_shared(costs)
    sources, others = dict(costs.sources), dict(costs.others)
    times = {kind.time for kind in VOCABULARY}
    told = "measured on 2 ranks at once, with 1/4 of the vocabulary each"
    assert {sources[name] for name in times} == {told}
    assert all(others[name][0] > 0 for name in times)
    assert others["logits_us"][0] > others["lookup_us"][0]  # products with 8,192 rows, and 64 rows


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_measure_what_their_experts_exchange(
    model: Path, tmp_path: Path, sequence_parallel: bool
) -> None:
    model.write_text(MODEL + EXPERTS)
    flags = ["--expert-parallel", "2"]
    flags += ["--tensor-parallel", "2", "--sequence-parallel"] * sequence_parallel
    _, costs = on_two_ranks(model, tmp_path / "costs.json", *flags)
    shared = (
        "tensor-parallel 2 with sequence parallelism"
        if sequence_parallel
        else ("tensor-parallel 1")
    )
    told = dict(costs.sources)["forward_exchange_us"]
    assert told == f"measured on 2 ranks, {shared}, expert-parallel 2"
    waits = [costs.exchanges_us(Kind.F, at) + costs.exchanges_us(Kind.B, at) for at in range(4)]
    assert sum(waits) > 0
    assert min(costs.forward_us) > 0


def test_what_experts_exchange_is_assumed_on_one_device() -> None:
    pytest.importorskip("megatron.core")
    from megatron_vshape.mcore.on_ranks import Link, assumed
    from megatron_vshape.mcore.one_device import Experts, Model

    costs = Costs.of([Piece(10.0, 10.0, 8.0, 1.0, 1.0)] * 2, 0.0, layers=(1, 2))
    model = Model(3, 32, 4, 64, 64, 1, "cpu", "float32", tensor_parallel=2, expert_parallel=4)
    experts = Experts(count=8, per_token=3, ffn_hidden_size=64)
    found = assumed(costs, replace(model, experts=experts), Link(1.0, 0.0))
    size_us = 64 * 32 * 4 / 1e3  # of an activation at 1 GB/s
    # A layer: one sum over two ranks, and there and back three quarters of half of its tokens, each
    # of which goes to three experts. The embedding sums once in F, the head in B.
    layer_us = size_us + 2 * 3 * size_us / 2 * 3 / 4
    assert found.forward_exchange_us == pytest.approx([layer_us + size_us, 2 * layer_us])
    assert found.backward_exchange_us == pytest.approx([layer_us, 2 * layer_us + size_us])
    told = "all-reduces over 2 ranks and all-to-alls over 4 ranks at 1 GB/s, 0 us"
    assert dict(found.sources)["whole_exchange_us"] == f"assumed: {told}"


def test_a_rank_alone_computes_as_much_as_with_others() -> None:
    pytest.importorskip("megatron.core")
    from megatron_vshape.mcore.one_device import Experts

    assert Experts(8, 2, 64).shard(2) == Experts(4, 2, 64)
    assert Experts(8, 4, 64).shard(4) == Experts(2, 2, 128)  # wider, as there are only two


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--expert-parallel", "2"], "has no experts; add experts: with count, per_token and"),
        (["--sequence-parallel"], "--sequence-parallel needs --tensor-parallel of at least 2"),
        (
            ["--sequence-parallel", "--tensor-parallel", "2"],
            "start this with torchrun --nproc-per-node 2",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    pytest.importorskip("megatron.core")
    given = ["--model", str(model), "--devices", "2", "--seq-length", "64", "--device", "cpu"]
    assert main(["profile", *given, "--output", str(tmp_path / "costs.json"), *flags]) == 2
    assert said in capsys.readouterr().err


def test_what_cannot_fit_is_told_before_the_system_ends_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of experts as large as those of a model in use, and of a sequence that nobody has."""
    pytest.importorskip("megatron.core")
    from megatron_vshape.runtime import host_memory

    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: 12 * 2**30)
    large = tmp_path / "large.yaml"
    text = MODEL.replace("hidden_size: 32", "hidden_size: 2048").replace("layers: 6", "layers: 8")
    large.write_text(text + "experts: {count: 128, per_token: 8, ffn_hidden_size: 1024}\n")
    output = ["--device", "cpu", "--output", str(tmp_path / "costs.json")]
    few = ["--model", str(large), "--devices", "1", "--seq-length", "512", *output]
    assert main(["profile", *few]) == 2
    # 4 layers of 128 experts with two matrices of 2048 x 1024, 8 bytes a parameter
    assert (
        "a stage of 4 layers needs at least 16.9 GiB, and 12.0 GiB are free per rank: "
        "try --devices 2 or --expert-parallel 2"
    ) in capsys.readouterr().err
    long = ["--model", str(model), "--devices", "1", "--seq-length", "99999999999", *output]
    assert main(["profile", *long]) == 2
    assert "try --seq-length 8192" in capsys.readouterr().err


def test_what_is_exchange_is_told_from_the_rest() -> None:
    pytest.importorskip("megatron.core")
    from megatron_vshape.mcore.on_ranks import with_exchanges

    alone = Piece(10.0, 10.0, 8.0, 1.0, 1.0)
    # B waits for 6, of which a whole backward hides 4: it takes 20 where B and W take 24.
    found = with_exchanges(alone, Piece(13.0, 16.0, 8.0, 1.0, 1.0, 4.0))
    assert (found.forward_us, found.forward_exchange_us) == (10.0, 3.0)
    assert (found.backward_us, found.backward_exchange_us) == (10.0, 6.0)
    assert (found.saved_us, found.hidden_exchange_us) == (0.0, 4.0)
    costs = Costs.of([found], 0.0)
    assert [costs.time_us(kind, 0) for kind in (*PARTS, Kind.BW)] == [13.0, 16.0, 8.0, 20.0]


BAD = {
    "unknown key": ({"text": MODEL + "colour: red\n"}, "unknown key colour"),
    "layers": ({"options": ["--layers", "7"]}, "of 4, such as 4 or 8, or give --layer-split"),
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
    "link": ({"options": ["--link", "45"]}, "'45' is not a rate above 0 in GB/s and a time of"),
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
