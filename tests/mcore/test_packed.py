"""Packed sequences: attention stays within a sequence in all stages, as under 1F1B."""

from typing import Any

import pytest
import torch
from mcore.farm import Farm
from mcore.parity import assert_close_tensors


def run_packed(farm: Farm, ranks: int, **settings: Any) -> list[dict[str, Any]]:
    return farm.run(ranks, plugin="packed_sequences", given=settings).check().records


def gradients_by_parameter(run: list[dict[str, Any]]) -> dict[tuple[str, int], torch.Tensor]:
    return {
        (name, rank["tensor_rank"]): value
        for rank in run
        for name, value in rank["gradients"].items()
    }


@pytest.mark.parametrize(
    ("schedule", "tensor", "pipeline"),
    [
        ("v-half", 1, 2),
        pytest.param("v-half", 2, 2, marks=pytest.mark.slow),
        pytest.param("v-half", 1, 4, marks=pytest.mark.slow),
        pytest.param("v-zb", 2, 4, marks=pytest.mark.slow),
        pytest.param("v-half", 1, 8, marks=pytest.mark.slow),
        pytest.param("v-zb", 2, 8, marks=pytest.mark.slow),
    ],
)
def test_packed_sequences_train_like_1f1b(
    farm: Farm, schedule: str, tensor: int, pipeline: int
) -> None:
    ranks = tensor * pipeline
    settings = {"tensor": tensor, "config": {"num_layers": max(8, 2 * pipeline)}}
    megatron_ranks = run_packed(farm, ranks, schedule=None, **settings)
    package_ranks = run_packed(farm, ranks, schedule=schedule, **settings)
    assert package_ranks[-1]["losses"] == pytest.approx(megatron_ranks[-1]["losses"], abs=1e-6)
    gradients = map(gradients_by_parameter, (package_ranks, megatron_ranks))
    assert_close_tensors(*gradients, rtol=1e-5, atol=1e-6)


def test_stage_without_sequence_boundaries_is_rejected(farm: Farm) -> None:
    packed, merged = (
        run_packed(farm, 2, schedule="v-half", tensor=1, merges=merges)[-1]["losses"]
        for merges in (False, True)
    )
    assert packed[1] == pytest.approx(merged[1], abs=1e-6)  # one sequence
    assert packed[0] != pytest.approx(merged[0], abs=1e-4)
    with pytest.raises(AssertionError, match="stages 1, 2 were called without packed_seq_params"):
        run_packed(farm, 2, schedule="v-half", tensor=1, without=0)
