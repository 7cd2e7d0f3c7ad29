#!/usr/bin/env python3
"""How many of the published recipes with pipeline parallelism start with a schedule, and what the
others wait for.

    python scripts/recipe_coverage.py [--schedule v-half] [--file tests/data/bridge_recipes.json]
    python scripts/recipe_coverage.py --graphs      whose CUDA graphs have weight gradients apart

Every recipe's options go through the checks that a run begins with (`mcore/setup/choice.py`), as if
Transformer Engine were installed. The ladder begins with recipes of which nothing has to be
translated, then counts in what each rule of translation lets through, and ends with what keeps the
others out, first that whose support would help most. A recipe is a library's, so all count on
`megatron_vshape.register(schedule=...)`.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

from recipes import examine, own_options

from megatron_vshape.mcore.refusals import (
    UnsupportedError,
    captures_graphs,
    check_split_graphs,
    graph_scope,
)
from megatron_vshape.mcore.setup.translate import TRANSLATIONS

SPLIT = "a layer_split, where the layers do not divide"
RECIPES = Path(__file__).parents[1] / "tests" / "data" / "bridge_recipes.json"


def needs_of(recipes: Iterable[dict], schedule: str) -> list[set[str]]:
    """Return what every recipe needs: rules of translation, and support of what is refused."""
    needs = []
    for recipe in recipes:
        options = recipe["options"]
        examined = examine(options, own_options(options, schedule), defaults={})
        rules = {", ".join(notice.rule.names) for notice in examined.notices}
        missing = {
            f"support of {name}" if name else SPLIT
            for rejection in examined.refused
            for name in rejection.names or (None,)
        }
        if not examined.counts_layers:
            missing.add("a num_layers, which the recipes do not say")
        needs.append(rules | missing)
    return needs


def ladder(needs: list[set[str]]) -> list[tuple[str, int]]:
    """Return the rungs, each with how many recipes start once it and those before it are there."""
    supported: set[str] = set()
    rungs = [("nothing to translate", _count(needs, supported))]
    for rule in TRANSLATIONS:
        supported.add(", ".join(rule.names))
        rungs.append((", ".join(rule.names), _count(needs, supported)))
    remaining = set().union(*needs) - supported
    while remaining:
        best = max(sorted(remaining), key=lambda requirement: _gain(needs, supported, requirement))
        supported.add(best)
        remaining.remove(best)
        rungs.append((best, _count(needs, supported)))
    return rungs


def _count(needs: list[set[str]], supported: set[str]) -> int:
    return sum(recipe_needs <= supported for recipe_needs in needs)


def _gain(needs: list[set[str]], supported: set[str], requirement: str) -> tuple[int, int]:
    """Return how many more start with it, and of how many it is one thing that is missing."""
    return _count(needs, supported | {requirement}), sum(
        requirement in recipe_needs for recipe_needs in needs
    )


def graphs_of(recipes: Iterable[dict]) -> Counter[str]:
    """Count the recipes with CUDA graphs, by what keeps weight gradients of these in B, if any."""
    counts: Counter[str] = Counter()
    for options in (recipe["options"] for recipe in recipes):
        if options.get("cuda_graph_impl") == "full_iteration":
            counts["one graph of the iteration"] += 1
        if not captures_graphs(SimpleNamespace(**options)):
            continue
        config = SimpleNamespace(**options | _precision(options.get("mixed_precision") or ""))
        # A recipe does not say how many experts its model has.
        config.num_moe_experts = options.get("expert_model_parallel_size", 1) > 1
        try:
            check_split_graphs(config)
        except UnsupportedError as error:
            counts[str(error).partition("work with ")[2].partition(":")[0]] += 1
            continue
        has_linear = graph_scope(config) - {"moe_router", "moe_preprocess"}
        counts["split" if has_linear else "no linear layer in graphs"] += 1
    return counts


def _precision(name: str) -> dict[str, str | None]:
    """Return what Megatron-Bridge makes of a mixed precision, as far as graphs depend on it."""
    recipes = {"current_scaling": "tensorwise", "mxfp8": "mxfp8", "subchannel": "blockwise"}
    recipe = next((fp8_recipe for part, fp8_recipe in recipes.items() if part in name), "delayed")
    return {
        "fp4": "e2m1" if "nvfp4" in name else None,
        "fp8": "hybrid" if "fp8" in name else None,
        "fp8_recipe": recipe,
    }


def main() -> None:
    """Print the ladder, or the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", default="v-half", help="Default: %(default)s")
    parser.add_argument("--file", type=Path, default=RECIPES, help="Default: %(default)s")
    parser.add_argument("--graphs", action="store_true", help="count those with CUDA graphs")
    options = parser.parse_args()
    if options.graphs:
        counts = graphs_of(json.loads(options.file.read_text())["recipes"])
        for label, count in counts.most_common():
            print(f"{count:4d} of {counts.total()}  {label}")
        return
    needs = needs_of(json.loads(options.file.read_text())["recipes"], options.schedule)
    supported = len(TRANSLATIONS)
    for number, (label, count) in enumerate(ladder(needs)):
        if number == supported + 1:
            print(f"\nwould start with, besides (not with {options.schedule} alone):")
        print(f"{count:4d} of {len(needs)}  {'+ ' if number else ''}{label}")
        if number == supported:
            print(f"\n{count} of {len(needs)} recipes start with {options.schedule}")


if __name__ == "__main__":
    main()
