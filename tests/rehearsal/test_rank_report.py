"""Reports of ranks are unchanged by JSON, and errors name their cause."""

import io
import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from rehearsal.reports import pass_of, report_of

from megatron_vshape.rehearsal.command import Command
from megatron_vshape.rehearsal.gpus import GIB, GPUS
from megatron_vshape.rehearsal.phases import Phase
from megatron_vshape.rehearsal.rank_report import (
    GraphBytes,
    Holder,
    ParallelSizes,
    PeakMoment,
    RankReport,
)
from megatron_vshape.rehearsal.report import describe_phase, format_peak
from megatron_vshape.rehearsal.simulated import estimate_step
from megatron_vshape.rehearsal.step_time import Scale
from megatron_vshape.rehearsal.work import Work
from megatron_vshape.rehearsal.worker import _error_text

WORK = Work(
    products={("bfloat16", 1, 2, 3, 1): 4},
    attention_flops={"bfloat16": 1.0},
    bytes_moved=5.0,
    kernels=6,
    exchanges={("all_gather", "TENSOR", 2, 2): [1, 8.0]},
)
FULL = report_of(
    rank=5,
    stage=1,
    peak_bytes=7,
    graph_bytes=GraphBytes(1, 2, 3),
    when=PeakMoment(Phase("B", 0, 7), "decoder.layers.0"),
    holders=[Holder("logits", "output_layer", "gpt_model.py:1 forward", 2, 1)],
    scale=Scale(1, 1, 1, 1, experts_hidden=True),
    curve=[(0.5, 7, {"F": 7})],
    kinds=[pass_of("F", work=WORK, static_bytes=0), pass_of("B", adds_bytes=0.5)],
    work=WORK,
)


def test_a_report_is_equal_after_json() -> None:
    plain = json.loads(json.dumps(FULL.to_json()))
    assert RankReport.from_json(plain) == FULL
    assert plain["when"] == {"pass": "B 0 7", "place": "decoder.layers.0"}
    assert plain["scale"] == {"graphs": False, "experts_hidden": True, "shards_overlapped": False}
    assert "static_bytes" in plain["kinds"][0]
    assert "static_bytes" not in plain["kinds"][1]
    assert not {"measured", "memory_measured"} & plain.keys()
    measured = report_of(measured="cpu", memory_measured=False, kinds=[pass_of("F", ms=2.0)])
    assert RankReport.from_json(measured.to_json()) == measured


def test_overlapped_passes_are_not_simulated() -> None:
    reports = [report_of(sizes=ParallelSizes(2, 1, 1, 2, 1), scale=FULL.step.scale)] * 2
    step = estimate_step(reports, Command("pretrain_gpt.py", ()), GPUS["h100"], 1)
    assert step.seconds == 1.0
    assert "with the textbook bubble, not simulated: parts of overlapped passes" in step.how


def test_a_cached_report_keeps_costs() -> None:
    cached = FULL.without_timeline()
    assert cached.step == FULL.step
    assert cached.memory == replace(FULL.memory, curve=[], holders=[])


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("F 0 7", "F of microbatch 7"),
        ("B 1 7", "B of microbatch 7, chunk 1"),
        ("S 0 7", "S (output layer and softmax of vocabulary parallelism) of microbatch 7"),
        ("T 0 7", "T (weight gradient of the shared output layer) of microbatch 7"),
        ("I 0 7", "I (shared embedding) of microbatch 7"),
        ("J 0 7", "J (gradient of the shared embedding) of microbatch 7"),
        ("E 0 7", "E of microbatch 7"),
    ],
)
def test_passes_without_a_stage_have_words(phase: str, words: str) -> None:
    assert describe_phase(Phase.parse(phase)) == words


def test_an_assertion_without_a_text_is_reported_by_its_statement(tmp_path: Path) -> None:
    """Megatron checks heads and hidden size with `assert`; the error was "no reason given"."""
    script = tmp_path / "arguments.py"
    script.write_text("heads = 33\nassert heads % 2 == 0\n")
    with pytest.raises(AssertionError) as raised:
        runpy.run_path(str(script))
    text = _error_text(raised.value, io.StringIO())
    assert text == "AssertionError: assert heads % 2 == 0 (arguments.py, line 2)"


@pytest.mark.parametrize(
    ("phase", "name"),
    [
        ("model", "parameters that DDP copies into its buffer"),
        ("B 0 3", "workspaces and P2P buffers"),
    ],
)
def test_the_phase_of_the_peak_names_its_other_memory(phase: str, name: str) -> None:
    """During the construction of the model, the parameters exist twice."""
    holders = [Holder("rest", "", "", 2 * GIB, 7), Holder("logits", "", "", GIB, 1)]
    report = report_of(stage=3, when=PeakMoment(Phase.parse(phase), ""), holders=holders)
    assert format_peak(report).endswith(f"; {name} 2.0 GiB, logits 1.0 GiB")
