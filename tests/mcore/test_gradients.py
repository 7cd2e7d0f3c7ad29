"""Every gradient of the first step, bit by bit those of a single rank."""

from collections.abc import Callable

import pytest
import torch
from mcore.conftest import UNTIED
from mcore.farm import Ended


@pytest.mark.parametrize("precision", [(), ("--bf16",)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("schedule", ["v-min", "v-half", "v-zb"])
def test_gradients_equal_one_rank_bitwise(
    train: Callable[..., Ended], schedule: str, precision: tuple[str, ...]
) -> None:
    # Clipping would scale by a norm that is summed in another order.
    flags = (UNTIED, "--clip-grad", "0", "--train-iters", "2", *precision)
    alone = train(1, *flags)
    ours = train(4, "--pipeline-schedule", schedule, *flags)
    mine, theirs = ours.merged("gradients"), alone.merged("gradients")
    assert mine.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == []
    assert all(gradient.abs().sum() > 0 for gradient in theirs.values())
    assert ours.record["losses"] == alone.record["losses"]
