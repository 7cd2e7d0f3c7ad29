"""Every gradient of the first step, bit by bit those of a single rank."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mcore.conftest import UNTIED
from mcore.farm import Ended
from mcore.parity import assert_same_bits

WITHOUT_TE = Path(__file__).with_name("dgrads_without_te.py")


@pytest.mark.parametrize("precision", [(), ("--bf16",)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("schedule", ["v-min", "v-half", "v-zb"])
def test_gradients_equal_one_rank_bitwise(
    train: Callable[..., Ended], schedule: str, precision: tuple[str, ...]
) -> None:
    # Clipping would scale by a norm that is summed in another order.
    flags = (UNTIED, "--clip-grad", "0", "--train-iters", "2", *precision)
    alone = train(1, *flags)
    package_run = train(4, "--pipeline-schedule", schedule, *flags)
    assert_same_bits(package_run, alone, ["gradients"])
    assert all(gradient.abs().sum() > 0 for gradient in alone.merged("gradients").values())


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


def test_saved_input_gradients_equal_megatron_bitwise(
    train: Callable[..., Ended], tmp_path: Path
) -> None:
    pytest.importorskip("megatron.training.dgrad_logging")  # not in every release
    # In fp32, Megatron's cross entropy changes the logits in place, which its own hooks reject.
    options = "--bf16 --clip-grad 0 --train-iters 2 --save-dgrads-interval 2 --save-interval 9"
    common = (UNTIED, *options.split(), "--ckpt-format", "torch_dist", "--save")
    for schedule in ("1f1b", "v-half"):
        flags = ("--pipeline-schedule", schedule, *common, str(tmp_path / schedule))
        train(2, *flags, plugin=WITHOUT_TE)
    package_gradients = saved_gradients(tmp_path / "v-half", [[0, 6], [2, 4]])
    megatron_gradients = saved_gradients(tmp_path / "1f1b", [[0], [4]])
    assert package_gradients.keys() == megatron_gradients.keys()
    assert len(megatron_gradients) > 80
    assert [
        name
        for name in megatron_gradients
        if not torch.equal(package_gradients[name], megatron_gradients[name])
    ] == []


DROPOUT = (UNTIED, *"--hidden-dropout 0.1 --attention-dropout 0.1 --train-iters 2".split())
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --recompute-modules core_attn"


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [
        ("v-half", FULL),
        ("v-half --pipeline-slices 2", SELECTIVE),
        ("v-half --pipeline-vocab-parallel", FULL),
        pytest.param("v-half", SELECTIVE, marks=pytest.mark.slow),
        pytest.param("zb-h1", FULL, marks=pytest.mark.slow),
        pytest.param("v-half --pipeline-slices 2", FULL, marks=pytest.mark.slow),
        pytest.param("v-half --pipeline-vocab-parallel", SELECTIVE, marks=pytest.mark.slow),
    ],
)
def test_recompute_with_dropout_is_bitwise_equal(
    train: Callable[..., Ended], schedule: str, recompute: str
) -> None:
    flags = ("--pipeline-schedule", *schedule.split(), *DROPOUT)
    plain, recomputed = train(2, *flags), train(2, *flags, *recompute.split())
    assert_same_bits(recomputed, plain, ["gradients", "parameters"])
