"""The gain of a full step of which training is a share, as in reinforcement learning."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from megatron_vshape.cli.advise import _full_step
from megatron_vshape.tuning.predictor import Verdict


def line(step_s: float, *, is_stock: bool) -> Any:
    return SimpleNamespace(step_s=step_s, is_stock=is_stock, verdict=Verdict.RUNS)


def test_the_gain_of_a_full_step_is_a_share_of_that_of_training() -> None:
    today, stock = line(10.0, is_stock=True), line(9.0, is_stock=True)
    lines = {"today": today, "stock": stock, "best": line(6.0, is_stock=False)}
    (text,) = _full_step(0.25, lines)
    assert text == (
        "Full step, of which training takes 25% today: 2.5% (best stock), 10.0% (best with this "
        "package) faster, and the rest unchanged."
    )
    (text,) = _full_step(0.5, lines | {"best": stock})
    assert "today: 5.0% (best stock) faster" in text


def test_without_other_phases_nothing_is_added() -> None:
    today = line(10.0, is_stock=True)
    assert _full_step(1.0, {"today": today, "stock": today, "best": today}) == []
    assert _full_step(0.3, {"today": today, "stock": None, "best": None}) == []
