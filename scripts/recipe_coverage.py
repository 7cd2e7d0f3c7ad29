#!/usr/bin/env python3
"""Count the published recipes with pipeline parallelism that start with a schedule, and the missing
support of the others.

    python scripts/recipe_coverage.py [--schedule v-half] [--file tests/data/bridge_recipes.json]
    python scripts/recipe_coverage.py --graphs      recipes with CUDA graphs
    python scripts/recipe_coverage.py --checkout DIR    recipes of a Megatron-Bridge checkout that
                                                        cannot start with stock Megatron

The checks of a run (`mcore/setup/choice.py`) examine the options of every recipe, as if
Transformer Engine were installed. The ladder begins with recipes that need no translation,
adds the recipes that each translation rule permits, and ends with the missing support of
the others, the most helpful first. A recipe belongs to a library, so all require
`megatron_vshape.register(schedule=...)`.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

from bridge_checkout import Recipe, recipes_of
from recipes import examine, package_options_of

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.mcore.refusals import (
    UnsupportedError,
    captures_graphs,
    check_split_graphs,
    graph_scope,
)
from megatron_vshape.mcore.setup.translate import TRANSLATIONS
from megatron_vshape.rehearsal.command import sizes_of
from megatron_vshape.rehearsal.start_rules import violations_of

SPLIT = "a layer_split, where the layers do not divide"
RECIPES = Path(__file__).parents[1] / "tests" / "data" / "bridge_recipes.json"


def needs_of(recipes: Iterable[dict], schedule: str) -> list[set[str]]:
    """Return the requirements of every recipe: translation rules and rejected options."""
    needs = []
    for recipe in recipes:
        options = recipe["options"]
        examined = examine(options, package_options_of(options, schedule), defaults={})
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
    """Return the rungs with the number of recipes that start at each of them."""
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
    """Return the number of recipes that it enables, and of recipes that require it."""
    return _count(needs, supported | {requirement}), sum(
        requirement in recipe_needs for recipe_needs in needs
    )


def graphs_of(recipes: Iterable[dict]) -> Counter[str]:
    """Count the recipes with CUDA graphs by the reason that keeps weight gradients in B, if any."""
    counts: Counter[str] = Counter()
    for options in (recipe["options"] for recipe in recipes):
        if options.get("cuda_graph_impl") == "full_iteration":
            counts["one graph of the iteration"] += 1
        if not captures_graphs(SimpleNamespace(**options)):
            continue
        config = SimpleNamespace(**options | _precision(options.get("mixed_precision") or ""))
        # The recipe does not specify the number of experts.
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
    """Return Megatron-Bridge's options for a mixed precision, as far as graphs depend on them."""
    recipes = {"current_scaling": "tensorwise", "mxfp8": "mxfp8", "subchannel": "blockwise"}
    recipe = next((fp8_recipe for part, fp8_recipe in recipes.items() if part in name), "delayed")
    return {
        "fp4": "e2m1" if "nvfp4" in name else None,
        "fp8": "hybrid" if "fp8" in name else None,
        "fp8_recipe": recipe,
    }


def print_rejections(recipes: Iterable[Recipe]) -> None:
    """Print the recipes that cannot start with the layout that can, then the counts."""
    start_s = time.perf_counter()
    counts: Counter[str] = Counter()
    for name, command, gpus, error in recipes:
        counts["recipes"] += 1
        if command is None:
            counts["not evaluated"] += 1
            print(f"{name} is not evaluated: {error}")
            continue
        counts["without known layers (only batch and GPUs checked)"] += not command.layers
        try:
            sizes = sizes_of(command, gpus)
        except ScheduleError as error_of_gpus:
            # The number of GPUs is only in the name of the recipe.
            counts["do not fit the GPUs of their name"] += 1
            print(f"{name}: {error_of_gpus}")
            sizes = sizes_of(command, None)
        violations = violations_of(command, sizes)
        counts["cannot start"] += bool(violations)
        for violation in violations:
            print(f"{name}: {violation}")
    print(", ".join(f"{count} {label}" for label, count in counts.items()), end="")
    print(f"; {time.perf_counter() - start_s:.1f} s")


def main() -> None:
    """Print the ladder, the counts or the recipes that cannot start."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", default="v-half", help="Default: %(default)s")
    parser.add_argument("--file", type=Path, default=RECIPES, help="Default: %(default)s")
    parser.add_argument("--graphs", action="store_true", help="count those with CUDA graphs")
    parser.add_argument("--checkout", type=Path, help="Megatron-Bridge checkout to check")
    options = parser.parse_args()
    if options.checkout is not None:
        print_rejections(recipes_of(options.checkout))
        return
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
