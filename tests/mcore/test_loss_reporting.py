"""Losses on their way from the rank that has them to the one that logs them."""

from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from mcore.farm import Farm
from mcore.ranks import run_ranks

from megatron_vshape.mcore.layout import multi_token
from megatron_vshape.mcore.step.losses import LossGatherer


class Losses(NamedTuple):
    value: torch.Tensor
    count: int


def make_reports(step: int) -> list[Any]:
    """Return possible reports of a loss function for 64 microbatches, and one more in step 2."""
    torch.manual_seed(step)
    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64)
    results: list[Any] = [
        {
            "loss": Losses(torch.randn(2, requires_grad=True), 3),
            "rest": [
                (
                    index,
                    torch.randn(3, index % 3).to(kinds[index % 5]).t(),
                    torch.tensor(0.1 * index),
                )
            ],
        }
        for index in range(64)
    ]
    return [*results, "more"] if step == 2 else results


def check_reports(brought: list[Any], expected: list[Any]) -> None:
    assert len(brought) == len(expected)
    for received, expected_report in zip(brought[:64], expected, strict=False):
        assert isinstance(received["loss"], Losses)
        assert received["loss"].count == 3
        (index, *received_tensors), (number, *expected_tensors) = (
            received["rest"][0],
            expected_report["rest"][0],
        )
        assert index == number
        for tensor, expected_tensor in zip(
            [received["loss"].value, *received_tensors],
            [expected_report["loss"].value, *expected_tensors],
            strict=True,
        ):
            assert (tensor.dtype, tensor.shape) == (expected_tensor.dtype, expected_tensor.shape)
            assert not tensor.requires_grad
            assert torch.equal(tensor, expected_tensor)


def send_reports(rank: int) -> list[int]:
    """Bring the reports of four steps from rank 0 to rank 1; return how often each step copies.

    Only calls that wait for a device or copy tensors are counted.
    """
    copies: Counter[str] = Counter()
    elsewhere: list[Any] = []
    counts, received = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multi_token, "take_metrics", lambda: {"values": torch.arange(3.0)})
        patch.setattr(multi_token, "add_metrics", elsewhere.append)
        stores = [make_reports(step) if rank == 0 else [] for step in range(4)]
        for name in ("to", "cpu", "cuda", "tolist", "item", "numpy", "__int__"):
            original = getattr(torch.Tensor, name)

            def counted(self: Any, *args: Any, _of: Any = original, _name: str = name) -> Any:
                copies[_name] += 1
                return _of(self, *args)

            patch.setattr(torch.Tensor, name, counted)
        courier = LossGatherer()
        for store in stores:
            copies.clear()
            received.append(
                courier.send_to_last_rank(store, 0, dist.group.WORLD, torch.device("cpu"))
            )
            counts.append(sum(copies.values()))
            courier.wait_for_sends()
    for step, brought in enumerate(received if rank == 1 else ()):
        check_reports(brought, make_reports(step))
    assert [report["values"].tolist() for report in elsewhere] == [[0, 1, 2]] * (4 * rank)
    return counts


def test_losses_are_sent_in_one_message_without_changes(farm: Farm) -> None:
    """Values that are not tensors are sent only if they differ from the previous step."""
    send_counts, received = run_ranks(farm, 2, send_reports)
    assert send_counts == [1, 0, 1, 1]
    assert received == [3, 1, 3, 3]
