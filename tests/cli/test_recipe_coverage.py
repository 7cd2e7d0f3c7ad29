"""The published recipes against the tables that a run goes by."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from recipes import DEVICES, examine, package_options_of

from megatron_vshape.mcore.setup.translate import TRANSLATIONS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("c", ROOT / "scripts" / "recipe_coverage.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_ladder(script: ModuleType) -> None:
    recipes = json.loads(script.RECIPES.read_text())["recipes"]
    assert len(recipes) == 304
    needs = script.needs_of(recipes, "v-half")
    rungs = script.ladder(needs)
    counts = [count for _, count in rungs]
    assert counts == sorted(counts)
    assert counts[-1] == 304
    rules = {", ".join(rule.names) for rule in TRANSLATIONS}
    assert sum(options <= rules for options in needs) == 262
    assert 262 in counts
    assert sum(script.SPLIT in options for options in needs) == 18


def test_recipes_whose_graphs_are_split(script: ModuleType) -> None:
    counts = script.graphs_of(json.loads(script.RECIPES.read_text())["recipes"])
    assert counts.total() == 87
    assert counts["split"] == 29
    assert counts["--fp8-recipe other than delayed, tensorwise and blockwise"] == 14


def test_counts_of_models_with_known_layers(script: ModuleType) -> None:
    splits: dict[str, set[str | None]] = {}
    for recipe in json.loads(script.RECIPES.read_text())["recipes"]:
        options = recipe["options"]
        if options.get("account_for_loss_in_pipeline_split") and options[DEVICES] == 8:
            split = examine(options, package_options_of(options, "v-half"), defaults={}).layer_split
            splits.setdefault(recipe["recipe"].partition("_pretrain")[0], set()).add(split)
    assert splits["qwen3_235b_a22b"] == {f"5,{'6,' * 14}5"}
    assert splits["llama31_405b"] == {f"7,{'8,' * 14}7"}
