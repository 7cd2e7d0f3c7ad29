"""Overlapped data-parallel reductions: their passes, and equal gradients."""

from collections import Counter

import pytest
from mcore.farm import Ended, Train
from mcore.parity import RECOMPUTE, UNTIED, assert_same_bits, assert_same_tensors

TWO_BY_TWO = ("--pipeline-model-parallel-size", "2", "--clip-grad", "0", "--train-iters", "2")
SMALL_BUCKETS = ("--ddp-bucket-size", "4000")
OVERLAP = ("--overlap-grad-reduce", *SMALL_BUCKETS)
LAST = 3  # the microbatch (of four) whose W completes the gradients


@pytest.mark.parametrize(
    ("schedule", "embeddings"),
    [
        ("v-zb", (UNTIED,)),
        *(
            pytest.param(name, embeddings, marks=pytest.mark.slow)
            for name, embeddings in (("v-half", ()), ("v-zb", ()), ("v-min", (UNTIED,)))
        ),
    ],
)
def test_bucket_is_reduced_in_the_w_that_completes_it(
    train: Train, schedule: str, embeddings: tuple[str, ...]
) -> None:
    flags = ("--pipeline-schedule", schedule, *TWO_BY_TWO, *embeddings)
    overlapping, unoverlapped = train(4, *flags, *OVERLAP), train(4, *flags)
    assert_same_bits(overlapping, unoverlapped, ["gradients"], Ended.by_place)
    first_rank = overlapping.records[0]["reductions"]
    places = [
        Counter(where for step, where, _ in first_rank if step == expected_step)
        for expected_step in (0, 1)
    ]
    assert places[0] == places[1]  # from the first step on
    # Megatron makes many buckets of a rank's first chunk and one of the others.
    assert places[0].keys() == {f"W0.{LAST}", f"W3.{LAST}"}
    assert places[0][f"W0.{LAST}"] >= 3
    # Without overlap, all buckets are reduced after the last pass.
    assert {where for _, where, _ in unoverlapped.records[0]["reductions"]} == {None}


def test_distributed_optimizer_with_both_overlaps(train: Train) -> None:
    flags = ("--pipeline-schedule", "v-half", *TWO_BY_TWO, UNTIED, "--use-distributed-optimizer")
    overlapping = train(4, *flags, *OVERLAP, "--overlap-param-gather")
    unoverlapped = train(4, *flags)
    assert_same_tensors(overlapping.merged("parameters"), unoverlapped.merged("parameters"))
    where = {where for _, where, _ in overlapping.records[0]["reductions"]}
    assert where == {f"W0.{LAST}", f"W3.{LAST}"}


def test_full_recompute_with_overlap(train: Train) -> None:
    flags = ("--pipeline-schedule", "v-min", *TWO_BY_TWO, UNTIED, *RECOMPUTE.split())
    overlapping, unoverlapped = train(4, *flags, *OVERLAP), train(4, *flags)
    assert_same_bits(overlapping, unoverlapped, ["gradients"], Ended.by_place)
    where = {where for _, where, _ in overlapping.records[0]["reductions"]}
    assert where == {f"BW0.{LAST}", f"BW3.{LAST}"}
