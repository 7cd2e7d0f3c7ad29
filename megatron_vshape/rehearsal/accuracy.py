"""Errors of the estimated step time for a case, from published runs left out of the fit."""

from __future__ import annotations

from megatron_vshape.rehearsal.fitted import LEFT_OUT, PAIRS
from megatron_vshape.rehearsal.gpus import Gpu
from megatron_vshape.rehearsal.step_time import ranks_per_node

DENSE = "dense"
WITHIN = "experts, within a node"
BETWEEN = "experts, between nodes"


def case_of(has_experts: bool, experts_ranks: int, span: int, gpu: Gpu) -> str:
    """Classify a run by its experts: none, within a node, or between nodes; a key of `LEFT_OUT`.

    Args:
        has_experts: whether the model has experts.
        experts_ranks: ranks of an expert-parallel group.
        span: distance from the first to the last of them, plus one.
        gpu: GPU, for the number of GPUs of a node.
    """
    if not has_experts:
        return DENSE
    apart = ranks_per_node(experts_ranks, span, gpu.node) < experts_ranks
    return BETWEEN if apart else WITHIN


def threshold(case: str) -> float:
    """Return the fraction of the step time below which a gain is not significant.

    It is the median error of the ratio of two configurations, or of the runs of the case if that
    is larger.
    """
    return max(PAIRS.median_percent, LEFT_OUT[case].median_percent) / 100


def sentences(case: str, gpu: Gpu) -> list[str]:
    """Format the errors of the case for the header of an estimate."""
    errors = LEFT_OUT[case]
    texts = [
        f"Error of the step time, {case}: median {errors.median_percent:g}%, 90% of {errors.runs} "
        f"published runs within {errors.ninth_percent:g}% (their model on their system left out "
        "of the fit)."
    ]
    if gpu.name.upper() not in LEFT_OUT:
        texts.append(
            f"The rates of {gpu.name.upper()} are a guess from its data sheet: no published run on "
            "it was compared. Absolute times can be wrong by 1.5x or more."
        )
    texts.append(
        f"Ratio of two configurations of one software release: {PAIRS.median_percent:g}% (median "
        f"of {PAIRS.pairs} pairs), {PAIRS.right_percent:g}% of them in the right order. Gains "
        f"below {100 * threshold(case):.1f}% are not significant. Releases differ by up to 10%."
    )
    return texts
