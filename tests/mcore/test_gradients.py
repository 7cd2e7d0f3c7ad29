"""Input gradients that Megatron saves, bit by bit those of its 1F1B."""

from pathlib import Path

import pytest
import torch
from mcore.farm import Train
from mcore.parity import UNTIED, assert_same_tensors


def saved_gradients(folder: Path, offsets: list[list[int]]) -> dict[str, torch.Tensor]:
    """Load the tensors of --save-dgrads-interval, by the numbers of the layers in the model.

    `offsets` has the number of the first layer of each chunk, by rank.
    """
    tensors = {}
    for rank, chunks in enumerate(offsets):
        file = folder / f"dgrads/iter_0000002/mp_rank_00_{rank:03d}.pth"
        for chunk, gradients in torch.load(file).items():
            first = chunks[int(chunk.removeprefix("model_chunk"))]
            for name, gradient in gradients.items():
                parts = name.split(".")
                if parts[:2] == ["decoder", "layers"]:
                    parts[2] = str(first + int(parts[2]))
                tensors[".".join(parts)] = gradient
    return tensors


def test_saved_input_gradients_equal_megatron_bitwise(train: Train, tmp_path: Path) -> None:
    pytest.importorskip("megatron.training.dgrad_logging")  # not in every release
    # In fp32, Megatron's cross entropy changes the logits in place, which its own hooks reject.
    options = "--bf16 --clip-grad 0 --train-iters 2 --save-dgrads-interval 2 --save-interval 9"
    common = (UNTIED, *options.split(), "--ckpt-format", "torch_dist", "--save")
    for schedule in ("1f1b", "v-half"):
        flags = ("--pipeline-schedule", schedule, *common, str(tmp_path / schedule))
        train(2, *flags, plugin="plugins:dgrads_without_te")
    package_gradients = saved_gradients(tmp_path / "v-half", [[0, 6], [2, 4]])
    megatron_gradients = saved_gradients(tmp_path / "1f1b", [[0], [4]])
    assert len(megatron_gradients) > 80
    assert_same_tensors(package_gradients, megatron_gradients)
