"""The verdict of an estimate, and the flags that lower the peak."""

from dataclasses import replace

import pytest
from rehearsal.reports import report_of

from megatron_vshape.core.model.pieces import Pieces
from megatron_vshape.core.model.stage_costs import StageCosts
from megatron_vshape.rehearsal import report
from megatron_vshape.rehearsal.gpus import GIB, GPUS, HEADROOM
from megatron_vshape.rehearsal.rank_report import RankReport
from megatron_vshape.rehearsal.remedies import Remedy, remedies, useful_remedies

H100 = GPUS["h100"]
LAYER = StageCosts.of(1.0, 1.0, 1.0, 1.0 * GIB, 0.5 * GIB, state_bytes=1.0 * GIB)
EMBEDDING = StageCosts.of(0.1, 0.0, 0.1, 0.0, 0.0, state_bytes=6.0 * GIB)
HEAD = StageCosts.of(2.0, 2.0, 2.0, 1.0 * GIB, 1.0 * GIB, state_bytes=6.0 * GIB)
LARGE_VOCABULARY = Pieces(LAYER, EMBEDDING, HEAD, 0.0)


def rank(stage: int, gib: float, first_gib: float | None = None) -> RankReport:
    first = gib if first_gib is None else first_gib
    sizes = {"peak_bytes": int(gib * GIB), "first_peak_bytes": int(first * GIB)}
    return report_of(stage=stage, reserved_bytes=int((gib + 1) * GIB), communicators=4, **sizes)


@pytest.mark.parametrize(
    ("ranks", "start", "part"),
    [
        ([rank(0, 50.8), rank(1, 38.7)], "Fits: rank 0 ", "51.8 GiB (peak 50.8) of the 79.6 GiB"),
        ([rank(0, 50.8), rank(1, 38.7)], "Fits: rank 0 ", "25.0 GiB are spare after about 2.8"),
        ([rank(0, 20.0), rank(3, 76.0)], "May not fit: rank 3 ", "the headroom of 3.2 GiB"),
        ([rank(0, 90.0), rank(1, 81.0)], "Does not fit: rank 0 ", "13.2 GiB above the 79.6 GiB"),
        ([rank(0, 90.0, 70.0)], "Does not fit: rank 0 ", "(from the second step on)"),
    ],
)
def test_verdict_names_the_largest_rank_and_the_margin(ranks, start, part):
    text = report.format_verdict(ranks, H100, HEADROOM * H100.memory_bytes)
    assert text.startswith(start)
    assert part in text


def test_verdict_names_the_rank_that_needs_the_most_memory():
    """It was said to have the largest peak: rank 1 has that, but fewer communicators."""
    ranks = [replace(rank(0, 90.0), communicators=40), rank(1, 90.5)]
    text = report.format_verdict(ranks, H100, 0.0)
    assert text.startswith("Does not fit: rank 0 needs the most memory: a peak of 90.0 ")
    tight = [replace(rank(0, 73.0), communicators=20), rank(1, 73.5)]
    text = report.format_verdict(tight, H100, HEADROOM * H100.memory_bytes)
    assert text.startswith("May not fit: rank 0 needs the most memory: a peak of 73.0 ")


def test_all_ranks_that_do_not_fit_are_named():
    text = report.format_verdict([rank(0, 90.0), rank(1, 81.0), rank(2, 40.0)], H100, 0.0)
    assert "too large: ranks 0, 1." in text


def test_the_allocator_has_to_return_cached_blocks():
    """Reserved memory without a limit is no reason why a rank does not fit."""
    report_70 = rank(0, 70.0)
    memory = replace(report_70.memory, reserved_bytes=78 * GIB)
    fragmented = replace(report_70, memory=memory)
    text = report.format_verdict([fragmented], H100, HEADROOM * H100.memory_bytes)
    assert text.startswith("Fits: rank 0 reserves about 78.0 GiB (peak 70.0)")
    assert "1.2 GiB more than are free" in text
    assert "expandable_segments:True" in text


def test_vocabulary_parallelism_helps_where_the_v_alone_does_not():
    by_flags = {
        remedy.text: remedy for remedy in remedies(LARGE_VOCABULARY, 16, 4, 16, can_share=True)
    }
    alone = by_flags["--pipeline-schedule v-half"]
    shared = by_flags["--pipeline-schedule v-half --pipeline-vocab-parallel"]
    assert alone.largest == 0  # the rank of embedding and output layer
    assert shared.most_bytes < 0.9 * alone.most_bytes
    best, *_ = useful_remedies(list(by_flags.values()), alone.most_bytes, 80.0 * GIB)
    assert best == shared


def test_layers_are_moved_where_the_vocabulary_cannot_be_shared():
    candidates = remedies(LARGE_VOCABULARY, 16, 4, 16, can_share=False)
    even, split = candidates[:2]
    assert even.text == "--pipeline-schedule v-half"
    assert split.text.startswith("--pipeline-schedule v-half --pipeline-layer-split ")
    assert split.most_bytes < even.most_bytes


def test_the_simplest_flags_that_fit_come_first():
    v_half = Remedy({"pipeline_schedule": "v-half"}, (70.0,))
    v_min = Remedy({"pipeline_schedule": "v-min"}, (60.0,))
    useless = Remedy({"pipeline_schedule": "v-half", "pipeline_vocab_parallel": True}, (99.0,))
    assert useful_remedies([v_half, useless, v_min], 100.0, 80.0) == [v_half, v_min]
    assert useful_remedies([v_half, useless, v_min], 100.0, 65.0) == [v_min, v_half]
