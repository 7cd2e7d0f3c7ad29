"""Kendall's tau."""

import pytest

from megatron_vshape.tuning.ranking import kendall_tau


def test_tau_of_known_rankings() -> None:
    assert kendall_tau([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert kendall_tau([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    # SciPy's documentation of kendalltau has this one.
    assert kendall_tau([12, 2, 1, 12, 2], [1, 4, 7, 1, 0]) == pytest.approx(-0.47140452)


def test_undefined_tau_is_none() -> None:
    assert kendall_tau([], []) is None
    assert kendall_tau([1], [2]) is None
    assert kendall_tau([1, 1], [1, 2]) is None


def test_tau_within_groups() -> None:
    """The two long ones are the wrong way round, the two short ones right."""
    assert kendall_tau([1, 2, 10, 20], [1, 2, 20, 10]) == pytest.approx(2 / 3)
    assert kendall_tau([1, 2, 10, 20], [1, 2, 20, 10], ["a", "a", "b", "b"]) == 0
    assert kendall_tau([1, 2], [1, 2], ["a", "b"]) is None
