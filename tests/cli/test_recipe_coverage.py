"""The published recipes against the tables that a run goes by."""

import json

import recipe_coverage
from recipes import DEVICES, examine, package_options_of

from megatron_vshape.mcore.setup.translate import TRANSLATIONS

RECIPES = json.loads(recipe_coverage.RECIPES.read_text())["recipes"]


def test_the_ladder() -> None:
    assert len(RECIPES) == 304
    needs = recipe_coverage.needs_of(RECIPES, "v-half")
    rungs = recipe_coverage.ladder(needs)
    counts = [count for _, count in rungs]
    assert counts == sorted(counts)
    assert counts[-1] == 304
    rules = {", ".join(rule.names) for rule in TRANSLATIONS}
    assert sum(options <= rules for options in needs) == 262
    assert 262 in counts
    assert sum(recipe_coverage.SPLIT in options for options in needs) == 18


def test_recipes_whose_graphs_are_split() -> None:
    counts = recipe_coverage.graphs_of(RECIPES)
    assert counts.total() == 87
    assert counts["split"] == 29
    assert counts["--fp8-recipe other than delayed, tensorwise and blockwise"] == 14


def test_counts_of_models_with_known_layers() -> None:
    splits: dict[str, set[str | None]] = {}
    for recipe in RECIPES:
        options = recipe["options"]
        if options.get("account_for_loss_in_pipeline_split") and options[DEVICES] == 8:
            split = examine(options, package_options_of(options, "v-half"), defaults={}).layer_split
            splits.setdefault(recipe["recipe"].partition("_pretrain")[0], set()).add(split)
    assert splits["qwen3_235b_a22b"] == {f"5,{'6,' * 14}5"}
    assert splits["llama31_405b"] == {f"7,{'8,' * 14}7"}
