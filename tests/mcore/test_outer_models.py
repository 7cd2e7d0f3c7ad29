"""Models with an image encoder on their first stage equal Megatron's 1F1B, bit by bit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from mcore.farm import Farm
from torch import nn

pytest.importorskip("megatron.training")

from megatron.core.models.common.language_module.language_module import LanguageModule

from megatron_vshape.mcore.features import overlap
from megatron_vshape.mcore.refusals import UnsupportedError

PLUGIN = Path(__file__).with_name("outer_model.py")
RANKS = 2
WARNING = "OuterModel has an encoder on the first stage, and all stages have"


class Trained(NamedTuple):
    """The results of a run."""

    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    encoders: list[list[int]]  # numbers of the layers of each encoder
    output: str


def train(farm: Farm, folder: Path, ranks: int = RANKS, **options: Any) -> Trained:
    """Train, and return the results of all ranks."""
    folder = folder / str(len(list(folder.iterdir())))
    folder.mkdir()
    # Imported, as a library is: the hooks find names only in modules.
    trainer = folder / "trainer.py"
    trainer.write_text("from outer_model import start")
    options = {"library": "bridge", "directory": str(folder)} | options
    output = farm.run(ranks, plugin=trainer, given=options).check().output
    records = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
    return Trained(
        losses=[loss for record in records for loss in record["losses"]],
        gradients={
            name: value for record in records for name, value in record["gradients"].items()
        },
        encoders=[layers for record in records for layers in record["encoders"]],
        output="".join(output),
    )


def assert_equal(run: Trained, expected: Trained) -> None:
    assert run.encoders == expected.encoders == [[1, 2, 3]]
    assert len(expected.losses) == 16
    assert run.losses == expected.losses
    assert run.gradients.keys() == expected.gradients.keys()
    unequal = [
        name for name, value in run.gradients.items() if not value.equal(expected.gradients[name])
    ]
    assert not unequal


@pytest.fixture(scope="module")
def stock(farm: Farm, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(farm, tmp_path_factory.mktemp("stock"), schedule=None)


@pytest.mark.parametrize(
    ("library", "schedule"),
    [
        *(("bridge", schedule) for schedule in ("v-half", "v-zb", "1f1b-v", "zb-h1")),
        ("rebuilding", "v-half"),
        ("mbridge", "v-half"),
        ("mbridge", "zb-h1"),
        pytest.param("rebuilding", "v-zb", marks=pytest.mark.slow),
        pytest.param("mbridge", "v-zb", marks=pytest.mark.slow),
    ],
)
def test_gradients_equal_1f1b(
    farm: Farm, tmp_path: Path, stock: Trained, library: str, schedule: str
) -> None:
    run = train(farm, tmp_path, library=library, schedule=schedule)
    assert_equal(run, stock)
    assert run.output.count(WARNING) == 1
    encoder = [name for name in stock.gradients if not name.startswith("language_model")]
    assert len(encoder) == 2 * (2 + 3 * 12 + 2)  # patches, three layers, final norm; two steps
    assert all(stock.gradients[name].any() for name in encoder)


def test_balanced_layers_equal_1f1b(farm: Farm, tmp_path: Path) -> None:
    options = {"layer_split": "auto", "encoder_layers": 2}
    run = train(farm, tmp_path, 4, schedule="v-half", options=options)
    assert_equal(run, train(farm, tmp_path, 4, schedule=None))
    assert "layers per stage, in model order: 0,1,1,1,1,2,2,0" in run.output
    assert WARNING not in run.output


@pytest.mark.parametrize("schedule", ["v-half", "v-zb"])
@pytest.mark.parametrize("frozen", ["encoder", "language"])
def test_frozen_parts_equal_1f1b(farm: Farm, tmp_path: Path, frozen: str, schedule: str) -> None:
    expected = train(farm, tmp_path, schedule=None, frozen=frozen)
    is_language = {name.startswith("language_model") for name in expected.gradients}
    assert is_language == {frozen == "encoder"}
    assert_equal(train(farm, tmp_path, schedule=schedule, frozen=frozen), expected)


@pytest.mark.parametrize("images", [[0], [2]])
def test_images_per_microbatch_equal_1f1b(farm: Farm, tmp_path: Path, images: list[int]) -> None:
    expected = train(farm, tmp_path, schedule=None, images=images)
    assert_equal(train(farm, tmp_path, schedule="v-half", images=images), expected)


def test_full_recompute_equals_1f1b(farm: Farm, tmp_path: Path) -> None:
    config = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    expected = train(farm, tmp_path, schedule=None, config=config)
    assert_equal(train(farm, tmp_path, schedule="v-half", config=config), expected)


@pytest.mark.parametrize(
    ("options", "config", "text"),
    [
        ({"vocab_parallel": True}, {}, "vocab_parallel does not support the encoder of OuterModel"),
        ({"slices": 2}, {}, "slices does not support the encoder of OuterModel"),
    ],
)
def test_features_without_encoder_are_rejected(
    farm: Farm, tmp_path: Path, options: dict[str, Any], config: dict[str, Any], text: str
) -> None:
    trainer = tmp_path / "trainer.py"
    trainer.write_text("from outer_model import start")
    given = {"library": "bridge", "directory": str(tmp_path), "schedule": "v-half"}
    given |= {"options": options, "config": config}
    run = farm.run(RANKS, plugin=trainer, given=given)
    assert 0 not in run.codes
    output = "".join(run.output)
    assert text in output
    assert "Traceback" not in output


def test_layer_plans_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """They call the language model's layers, without the outer model and its encoder."""
    monkeypatch.setattr(LanguageModule, "__init__", nn.Module.__init__)
    pipeline: Any = SimpleNamespace(choice=SimpleNamespace(may_overlap=True))
    language_model = LanguageModule()
    overlap.FEATURE.check_chunks(pipeline, 0, [language_model])
    chunk = nn.ModuleDict({"language_model": language_model, "encoder": nn.Linear(1, 1)})
    with pytest.raises(UnsupportedError, match="does not support the encoder of ModuleDict"):
        overlap.FEATURE.check_chunks(pipeline, 0, [chunk])
    pipeline.choice.may_overlap = False
    overlap.FEATURE.check_chunks(pipeline, 0, [chunk])
