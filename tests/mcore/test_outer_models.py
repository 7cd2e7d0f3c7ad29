"""Models with an image encoder on their first stage equal Megatron's 1F1B, bit by bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from mcore.farm import Farm
from mcore.parity import assert_same_tensors
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import nn

from megatron_vshape.mcore.features import overlap
from megatron_vshape.mcore.refusals import UnsupportedError

RANKS = 2
slow = pytest.mark.slow
WARNING = "OuterModel has an encoder on the first stage, and all stages have"


class Trained(NamedTuple):
    """The results of a run."""

    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    encoders: list[list[int]]  # numbers of the layers of each encoder
    output: str


def train(farm: Farm, ranks: int = RANKS, **options: Any) -> Trained:
    """Train, and return the results of all ranks."""
    run = farm.run(ranks, plugin="outer_model", argument={"library": "bridge"} | options).check()
    records = run.records
    return Trained(
        losses=[loss for record in records for loss in record["losses"]],
        gradients={
            name: value for record in records for name, value in record["gradients"].items()
        },
        encoders=[layers for record in records for layers in record["encoders"]],
        output="".join(run.output),
    )


def assert_equal(run: Trained, expected: Trained) -> None:
    assert run.encoders == expected.encoders == [[1, 2, 3]]
    assert len(expected.losses) == 16
    assert run.losses == expected.losses
    assert_same_tensors(run.gradients, expected.gradients)


@pytest.fixture(scope="module")
def stock(farm: Farm) -> Trained:
    return train(farm, schedule=None)


@pytest.mark.parametrize(
    ("library", "schedule"),
    [
        *(("bridge", schedule) for schedule in ("v-half", "v-zb", "zb-h1")),
        ("rebuilding", "v-half"),
        ("mbridge", "v-half"),
        pytest.param("bridge", "1f1b-v", marks=slow),
        pytest.param("rebuilding", "v-zb", marks=slow),
        *(pytest.param("mbridge", schedule, marks=slow) for schedule in ("v-zb", "zb-h1")),
    ],
)
def test_gradients_equal_1f1b(farm: Farm, stock: Trained, library: str, schedule: str) -> None:
    run = train(farm, library=library, schedule=schedule)
    assert_equal(run, stock)
    assert run.output.count(WARNING) == 1
    encoder = [name for name in stock.gradients if not name.startswith("language_model")]
    assert len(encoder) == 2 * (2 + 3 * 12 + 2)  # patches, three layers, final norm; two steps
    assert all(stock.gradients[name].any() for name in encoder)


def test_balanced_layers_equal_1f1b(farm: Farm) -> None:
    options = {"layer_split": "auto", "encoder_layers": 2}
    run = train(farm, 4, schedule="v-half", options=options)
    assert_equal(run, train(farm, 4, schedule=None))
    assert "layers per stage, in model order: 0,1,1,1,1,2,2,0" in run.output
    assert WARNING not in run.output


@pytest.mark.parametrize(
    ("frozen", "schedule"),
    [
        ("encoder", "v-half"),
        ("language", "v-zb"),
        pytest.param("encoder", "v-zb", marks=slow),
        pytest.param("language", "v-half", marks=slow),
    ],
)
def test_frozen_parts_equal_1f1b(farm: Farm, frozen: str, schedule: str) -> None:
    expected = train(farm, schedule=None, frozen=frozen)
    is_language = {name.startswith("language_model") for name in expected.gradients}
    assert is_language == {frozen == "encoder"}
    assert_equal(train(farm, schedule=schedule, frozen=frozen), expected)


@pytest.mark.parametrize("images", [[0], [2]])
def test_images_per_microbatch_equal_1f1b(farm: Farm, images: list[int]) -> None:
    expected = train(farm, schedule=None, images=images)
    assert_equal(train(farm, schedule="v-half", images=images), expected)


def test_full_recompute_equals_1f1b(farm: Farm) -> None:
    config = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    expected = train(farm, schedule=None, config=config)
    assert_equal(train(farm, schedule="v-half", config=config), expected)


@pytest.mark.parametrize(
    ("options", "config", "text"),
    [
        ({"vocab_parallel": True}, {}, "vocab_parallel does not support the encoder of OuterModel"),
        ({"slices": 2}, {}, "slices does not support the encoder of OuterModel"),
    ],
)
def test_features_without_encoder_are_rejected(
    farm: Farm, options: dict[str, Any], config: dict[str, Any], text: str
) -> None:
    argument = {"library": "bridge", "schedule": "v-half", "options": options, "config": config}
    run = farm.run(RANKS, plugin="outer_model", argument=argument)
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
