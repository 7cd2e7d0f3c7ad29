"""Measured activation memory of the ranks, compared with the schedules."""

import re
from pathlib import Path

import pytest
from mcore.farm import Ended, Farm, Train
from mcore.parity import UNTIED

from megatron_vshape.core.check.simulate import peak_held
from megatron_vshape.core.paper.catalogue import make

FLAGS = (UNTIED, "--global-batch-size", "16", "--train-iters", "2")


def memory_figures(run: Ended) -> tuple[list[float], list[float]]:
    """Return the measured and the predicted peaks of the closing line, by rank."""
    (line,) = [line for line in run.output[0].splitlines() if "peak activation memory" in line]
    match = re.search(r"measured \[(.*?)\], predicted \[(.*?)\]", line)
    assert match is not None, line
    measured, predicted = ([float(value) for value in text.split(", ")] for text in match.groups())
    return measured, predicted


@pytest.mark.parametrize("schedule", ["v-half", "v-min"])
def test_peak_against_1f1b(train: Train, tmp_path: Path, schedule: str) -> None:
    measured, predicted = memory_figures(train(4, "--pipeline-schedule", schedule, *FLAGS))
    one_f_one_b = tmp_path / "1f1b.json"
    one_f_one_b.write_text(make("1f1b", 4, 16).to_json())
    expected_peaks, expected = memory_figures(
        train(4, "--pipeline-schedule", str(one_f_one_b), *FLAGS)
    )
    assert measured == pytest.approx(predicted, rel=0.1)
    assert expected_peaks == pytest.approx(expected, rel=0.1)
    ratio = max(measured) / max(expected_peaks)
    in_chunks = max(peak_held(make(schedule, 4, 16))) / max(peak_held(make("1f1b", 4, 16)))
    assert ratio == pytest.approx(in_chunks, rel=0.1)
    assert ratio == pytest.approx(max(predicted) / max(expected), rel=0.1)


@pytest.mark.parametrize("schedule", ["v-half", pytest.param("v-zb", marks=pytest.mark.slow)])
def test_allocated_memory_is_in_the_plan(farm: Farm, schedule: str) -> None:
    sizes = ("--hidden-size", "64", "--seq-length", "64", "--max-position-embeddings", "64")
    vocabulary = ("--vocab-size", "2047")  # the logits of one microbatch are half a MiB
    flags = (*FLAGS, *sizes, *vocabulary, "--pipeline-schedule", schedule)
    run = farm.run(4, *flags, live=True).check()
    _, predicted = memory_figures(run)
    message_bytes = 64 * 64 * 4
    for record, activations_mib in zip(run.records, predicted, strict=True):
        # Posted receives, and the result that the last pass has handed over.
        messages = (record["most_posted"] + 1) * message_bytes
        model = activations_mib * 2**20 + messages
        assert record["live_bytes"] == pytest.approx(model, rel=0.05)
        # What autograd saved is gone; gloo keeps the last message of each of 8 streams at most,
        # and the loss rank the reports.
        assert record["left_bytes"] <= 8 * message_bytes + 4096
