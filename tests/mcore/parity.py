"""The comparison of two training runs, and flags of the runs that several tests compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from mcore.farm import Ended
from torch import Tensor

View = Callable[[Ended, str], Mapping[Any, Tensor]]
"""How the tensors of the ranks are joined: a method of `Ended`."""


class Tolerance(NamedTuple):
    """Largest difference: relative of losses and norms, absolute of parameters."""

    losses: float = 1e-6
    norms: float = 1e-5
    parameters: float = 1e-5


FP32 = Tolerance()
BF16 = Tolerance(2e-3, 2e-2, 4e-3)
WEIGHTS = 1e-4
"""Of parameters with sums in another order: Adam takes steps of 1e-3 by the sign of a gradient."""

UNTIED = "--untie-embeddings-and-output-weights"
TWO = "--train-iters 2"
EVALUATED = "--train-iters 2 --eval-interval 2 --eval-iters 1"
PIPELINE = "--pipeline-model-parallel-size 2"
TENSOR = "--tensor-model-parallel-size 2"
SEQUENCE = f"{TENSOR} --sequence-parallel"
CONTEXT = "--context-parallel-size 2"
EXPERTS = (
    "--num-experts 4 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
    "--disable-bias-linear --moe-token-dispatcher-type alltoall"
)
# gloo gathers only parts of one size, and expert-tensor-parallel ranks have tokens by their number.
EXPERT_PARALLEL = (
    f"{EXPERTS} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 {UNTIED}"
)
SHARDED = "--use-distributed-optimizer"
OVERLAP = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 4000"
SHARED = "--pipeline-vocab-parallel"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
FP8 = "--fp8-format hybrid --fp8-recipe delayed"


def losses(run: Ended) -> list[float]:
    return [step["lm loss"] for step in run.record["losses"]]


def relative(values: list[float], expected: list[float]) -> float:
    assert len(values) == len(expected)
    return max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))


def assert_same_training(
    run: Ended, expected: Ended, tolerance: Tolerance = FP32, view: View = Ended.merged
) -> None:
    """Compare losses, gradient norms, evaluations and parameters to rounding."""
    assert relative(losses(run), losses(expected)) <= tolerance.losses
    # The norm adds stages in another order, so clipped weights can differ in the last bit.
    assert relative(run.record["grad_norms"], expected.record["grad_norms"]) <= tolerance.norms
    evaluations = zip(run.record["evaluations"], expected.record["evaluations"], strict=True)
    for values, expected_values in evaluations:
        assert values["lm loss"] == pytest.approx(expected_values["lm loss"], rel=tolerance.losses)
    parameters = view(run, "parameters"), view(expected, "parameters")
    assert_close_tensors(*parameters, atol=tolerance.parameters)


def assert_close_gradients(
    run: Ended,
    expected: Ended,
    rtol: float = 1e-5,
    atol: float = 1e-7,
    view: View = Ended.merged,
) -> None:
    gradients = view(run, "gradients"), view(expected, "gradients")
    assert_close_tensors(*gradients, rtol=rtol, atol=atol)


def assert_close_tensors(
    tensors: Mapping[Any, Tensor],
    expected: Mapping[Any, Tensor],
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    assert expected
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(tensors[name], value, rtol=rtol, atol=atol, msg=str(name))


def assert_same_bits(
    run: Ended,
    expected: Ended,
    keys: Sequence[str] = ("parameters",),
    view: View = Ended.merged,
    norms: bool = False,
) -> None:
    """Compare losses, evaluations and the tensors of `keys` bit by bit."""
    for key in ("losses", "evaluations", *["grad_norms"] * norms):
        assert run.record[key] == expected.record[key]
    for key in keys:
        assert_same_tensors(view(run, key), view(expected, key))


def assert_same_tensors(tensors: Mapping[Any, Tensor], expected: Mapping[Any, Tensor]) -> None:
    assert expected
    assert tensors.keys() == expected.keys()
    assert [name for name, value in expected.items() if not _is_same(tensors[name], value)] == []


def _is_same(values: Tensor, expected: Tensor) -> bool:
    # The padding of buckets is not a number, so only its bytes are equal.
    return values.equal(expected) or _bytes(values).equal(_bytes(expected))


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


Scalars = dict[str, list[tuple[int, float]]]
"""Values in a log, with their steps, by the name of a metric."""


def logged_scalars(run: Ended) -> Scalars:
    """Return the values that the last rank has given to W&B."""
    scalars: Scalars = {}
    for step, values in run.record["wandb"]:
        for tag, value in values.items():
            scalars.setdefault(tag, []).append((step, value))
    return scalars


def assert_same_metrics(run: Ended, expected: Ended, depth: int) -> None:
    """Compare the logged metrics of multi-token prediction, of which each depth has a loss."""
    metrics, expected_metrics = (
        {name: values for name, values in logged_scalars(ended).items() if name.startswith("mtp_")}
        for ended in (run, expected)
    )
    assert len([name for name in metrics if name.endswith(" loss")]) == depth
    assert metrics.keys() == expected_metrics.keys()
    for name, values in expected_metrics.items():
        steps, scalars = zip(*values, strict=True)
        assert tuple(step for step, _ in metrics[name]) == steps
        assert [scalar for _, scalar in metrics[name]] == pytest.approx(scalars, rel=1e-5), name


def join_rows(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with the rows of several ranks, "name@first row", concatenated."""
    parts: dict[str, list[Tensor]] = {}
    for name in sorted(tensors):
        parts.setdefault(name.partition("@")[0], []).append(tensors[name])
    return {name: torch.cat(rows) if rows[1:] else rows[0] for name, rows in parts.items()}


def gradients_by_parameter(ranks: list[dict[str, Any]]) -> dict[tuple[str, int], Tensor]:
    """Return the gradients of a library's ranks by name and tensor-parallel rank."""
    return {
        (name, rank["tensor_rank"]): value
        for rank in ranks
        for name, value in rank["gradients"].items()
    }
