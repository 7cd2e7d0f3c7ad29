"""Errors of the estimated step time for a case, from published runs left out of the fit."""

from __future__ import annotations

from megatron_vshape.rehearsal.fitted import LEFT_OUT, PAIRS, Errors
from megatron_vshape.rehearsal.gpus import Gpu
from megatron_vshape.rehearsal.step_time import ranks_per_node

DENSE = "dense"
WITHIN = "experts, within a node"
BETWEEN = "experts, between nodes"

SIZES = {64: "up to 64 GPUs", 256: "65 to 256 GPUs", None: "more than 256 GPUs"}
"""Keys of `LEFT_OUT` by the largest number of GPUs."""

ENOUGH = 20
"""Runs from which an error is printed as it is."""

RELEASES = "NeMo 25.09 to 26.08"
"""Releases that measured the published runs."""


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


def size_of(gpus: int) -> str:
    """Classify a run by its number of GPUs; a key of `LEFT_OUT`."""
    return next(name for limit, name in SIZES.items() if limit is None or gpus <= limit)


def errors_of(name: str) -> Errors:
    """Return the errors of a key of `LEFT_OUT`, widened if it has few runs.

    The error of a few runs can be small by chance, so it is at least that of all runs.
    """
    errors, everything = LEFT_OUT[name], LEFT_OUT["all"]
    if errors.runs >= ENOUGH:
        return errors
    return Errors(errors.runs, *map(max, errors[1:], everything[1:]))


def threshold(case: str) -> float:
    """Return the fraction of the step time below which a gain is not significant.

    It is the largest of the median errors of the ratio of two configurations, of the runs of the
    case and, with few pairs, of all runs.
    """
    percents = [PAIRS.median_percent, errors_of(case).median_percent]
    if PAIRS.pairs < ENOUGH:
        percents.append(LEFT_OUT["all"].median_percent)
    return max(percents) / 100


def sentences(case: str, gpu: Gpu, gpus: int) -> list[str]:
    """Format the errors of the case, the GPU and the number of GPUs for an estimate."""
    system = gpu.name.upper()
    names = [case, *([system] if system in LEFT_OUT else []), size_of(gpus)]
    parts = []
    for name in names:
        errors = errors_of(name)
        few = ", few runs: at least the error of all" if errors.runs < ENOUGH else ""
        parts.append(
            f"{name} {errors.median_percent:g}%, {errors.ninth_percent:g}% ({errors.runs} runs"
            f"{few})"
        )
    texts = [
        "Error of the step time, median and 90% of published runs (their model on their system "
        f"left out of the fit): {'; '.join(parts)}."
    ]
    if system not in LEFT_OUT:
        texts.append(
            f"The rates of {system} are a guess from its data sheet: no published run on "
            "it was compared. Absolute times can be wrong by 1.5x or more."
        )
    texts.append(
        f"Ratio of two configurations of one software release: {PAIRS.median_percent:g}% (median "
        f"of {PAIRS.pairs} pairs), {PAIRS.right_percent:g}% of them in the right order. Gains "
        f"below {100 * threshold(case):.1f}% are not significant. The rates are those of "
        f"{RELEASES}, which differ by up to 10%."
    )
    return texts


def upper_bound(case: str, overlaps_experts: bool) -> list[str]:
    """Format that nothing hides all-to-alls between nodes, if that is so."""
    if case != BETWEEN or overlaps_experts:
        return []
    return [
        "EP spans nodes, and nothing hides its all-to-alls without "
        "--overlap-moe-expert-parallel-comm: the step times are upper bounds."
    ]
