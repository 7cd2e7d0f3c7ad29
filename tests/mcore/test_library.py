"""Schedules registered for libraries on megatron.core: as their own 1F1B, however they are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.training")

from mcore.farm import Farm

import megatron_vshape
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.mcore.refusals import UnsupportedError

RANKS = 4


def run(farm: Farm, folder: Path, shape: str, schedule: str | None, **options: Any) -> Any:
    folder = folder / f"{shape}-{Path(str(schedule)).stem}"
    folder.mkdir()
    # Imported, as a library is: what is run as a file is no module whose names can be found.
    trainer = folder / "trainer.py"
    trainer.write_text("from other_trainer import start")
    given = {"shape": shape, "schedule": schedule, "directory": str(folder), "options": options}
    farm.run(RANKS, plugin=trainer, given=given).check()
    kept = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]
    gradients = {name: value for each in kept for name, value in each["gradients"].items()}
    losses = [each["losses"] for each in kept if each["losses"][0]]
    return losses, gradients, kept[0]["chunks"]


@pytest.mark.parametrize("shape", ["bridge", "verl", "areal"])
def test_losses_and_gradients_are_those_of_the_librarys_own_1f1b(
    farm: Farm, tmp_path: Path, shape: str
) -> None:
    plain_losses, plain_gradients, chunks = run(farm, tmp_path, shape, None)
    assert chunks == 1
    for schedule, count in (("v-half", 2), ("v-zb", 2), ("zb-h1", 1)):
        losses, gradients, chunks = run(farm, tmp_path, shape, schedule)
        assert chunks == count
        assert len(losses) == len(plain_losses) == 1  # one rank reads them
        for own, plain in zip(losses[0], plain_losses[0], strict=True):
            assert own == pytest.approx(plain, abs=1e-6)
        assert gradients.keys() | {"output_layer.weight"} == plain_gradients.keys() | {
            "output_layer.weight"
        }
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, plain_gradients[name], rtol=1e-5, atol=1e-7)


def test_a_loop_of_megatrons_rl_with_one_chunk(farm: Farm, tmp_path: Path) -> None:
    plain_losses, plain_gradients, _ = run(farm, tmp_path, "rl", None)
    assert len({tuple(each) for each in plain_losses[0]}) == 3  # the weights move
    for schedule in ("zb-h1", "gpipe"):
        losses, gradients, chunks = run(farm, tmp_path, "rl", schedule)
        assert chunks == 1
        assert len(losses) == len(plain_losses) == 1
        for own, plain in zip(losses[0], plain_losses[0], strict=True):
            assert own == pytest.approx(plain, abs=1e-6)
        assert gradients.keys() == plain_gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, plain_gradients[name], rtol=1e-5, atol=1e-7)


def test_a_schedule_file_and_a_layer_split(farm: Farm, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(make("v-half", RANKS, 8).to_json())
    plain_losses, plain_gradients, _ = run(farm, tmp_path, "bridge", None)
    losses, gradients, chunks = run(
        farm, tmp_path, "bridge", str(file), layer_split="0,1,1,2,1,1,2,0"
    )
    assert chunks == 2
    assert losses[0][0] == pytest.approx(plain_losses[0][0], abs=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain_gradients[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schedul": "v-half"}, "register knows no option 'schedul'; its options are costs_file"),
        ({"layer_split": "auto"}, "schedule is None: give one of this package, such as 'v-half'"),
        ({"schedule": "1f1b"}, "schedule is '1f1b': give one of this package"),
        ({"schedule": "v-zb", "post_validates": True}, "post_validates is for Megatron-LM's own"),
        ({"schedule": "v-zb", "timeout_seconds": 0}, "timeout_seconds 0 is not above 0"),
    ],
)
def test_bad_options_are_refused_at_once(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        megatron_vshape.register(**options)


def test_a_limit_leaves_room_for_what_the_rank_holds_besides(farm: Farm, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(Costs.uniform(RANKS, 2 * RANKS, 100, 120, 90, 5).to_json())
    options = {"costs_file": str(costs), "memory_limit_gib": 1e-9}
    with pytest.raises(AssertionError, match="nothing fits --pipeline-memory-limit 1e-09: rank 0"):
        run(farm, tmp_path, "areal", "auto", **options)
    losses, _, chunks = run(farm, tmp_path, "bridge", "auto", **options | {"memory_limit_gib": 8.0})
    assert chunks == 2
    assert len(losses) == 1
