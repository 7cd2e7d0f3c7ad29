"""The numbers beside a picture are in one unit each."""

import pytest

from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.view.numbers import GIB, enough, numbers_of


@pytest.mark.parametrize(("name", "stages"), [("1f1b", 4), ("v-zb", 8)])
def test_the_peak_in_bytes_is_compared_with_1f1b_in_bytes(name: str, stages: int) -> None:
    held = (8 * GIB / stages,) * stages
    costs = Costs((1000.0,) * stages, (1000.0,) * stages, (1000.0,) * stages, 0.0, held, held)
    numbers = numbers_of(simulate(make(name, 4, 8), costs), costs)
    assert numbers.peak_bytes is not None
    assert max(numbers.peak_bytes) == 8 * GIB
    assert numbers.relative_peak == 1


@pytest.mark.parametrize(
    ("held", "text"), [(2, "2"), (0.1 + 0.2, "0.3"), (6.40006717, "6.40007"), (1 / 3, "0.333334")]
)
def test_a_limit_is_rounded_up(held: float, text: str) -> None:
    assert enough(held) == text
    assert float(text) * (1 + 1e-9) >= held


def test_what_holds_nothing_holds_no_more_than_1f1b() -> None:
    ones, nothing = (1.0,) * 4, (0.0,) * 4
    costs = Costs(ones, ones, ones, 0.0, nothing, nothing)
    assert numbers_of(simulate(make("1f1b", 4, 8), costs), costs).relative_peak == 1
