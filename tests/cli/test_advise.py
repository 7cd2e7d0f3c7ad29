"""The gain of a full step of which training is a share, as in reinforcement learning."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from megatron_vshape.tuning.advice_report import format_full_step
from megatron_vshape.tuning.comparison import Comparison
from megatron_vshape.tuning.predictor import Verdict


def line(step_s: float, *, is_stock: bool) -> Any:
    return SimpleNamespace(step_s=step_s, is_stock=is_stock, verdict=Verdict.RUNS)


def test_the_gain_of_a_full_step_is_a_share_of_that_of_training() -> None:
    today, stock = line(10.0, is_stock=True), line(9.0, is_stock=True)
    comparison = Comparison(today, stock, line(6.0, is_stock=False))
    (text,) = format_full_step(comparison, 0.25)
    assert text == (
        "Full step, of which training takes 25% today: 2.5% (best stock), 10.0% (best with this "
        "package) faster, and the rest unchanged."
    )
    (text,) = format_full_step(replace(comparison, best=stock), 0.5)
    assert "today: 5.0% (best stock) faster" in text


def test_without_other_phases_nothing_is_added() -> None:
    today = line(10.0, is_stock=True)
    assert format_full_step(Comparison(today, today, today), 1.0) == []
    assert format_full_step(Comparison(today), 0.3) == []
