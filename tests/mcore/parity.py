"""The comparison of two training runs: losses, gradient norms, evaluations and tensors."""

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
