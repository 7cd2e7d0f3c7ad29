"""The published recipes against the tables that a run goes by."""

import importlib.util
import json
import subprocess
import sys
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


RECIPES_OF_A_CHECKOUT = """
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import ConfigContainer, TrainingConfig

def _common(name: str, **sizes: int) -> ConfigContainer:
    cfg = ConfigContainer(train=TrainingConfig(global_batch_size=64, micro_batch_size=1))
    cfg.model = AutoBridge.from_hf_pretrained(name).to_megatron_provider(load_weights=False)
    cfg.model.pipeline_dtype = torch.bfloat16
    cfg.comm_overlap.tp_comm_overlap = False
    for name, size in sizes.items():
        setattr(cfg.model, name, size)
    return cfg

def even_16gpu_config() -> ConfigContainer:
    return _common("zai-org/GLM-4.5", pipeline_model_parallel_size=4)

def uneven_16gpu_config() -> ConfigContainer:
    return _common("zai-org/GLM-4.5-Air", pipeline_model_parallel_size=4)

def layout_config() -> ConfigContainer:
    cfg = _common("moonshotai/Moonlight-16B-A3B", pipeline_model_parallel_size=2)
    stages = [["embedding", *["decoder"] * 13], [*["decoder"] * 14, "loss"]]
    cfg.model.pipeline_model_parallel_layout = stages
    return cfg

def batch_48gpu_config() -> ConfigContainer:
    return _common("an/unknown-model", tensor_model_parallel_size=2)

def broken_config() -> ConfigContainer:
    raise NotImplementedError("not supported yet")

def with_argument_config(name: str) -> ConfigContainer:
    return _common(name)
"""


def test_recipes_of_a_checkout_that_cannot_start(tmp_path: Path) -> None:
    """In a process of its own, since the script replaces torch and Megatron."""
    folder = tmp_path / "src" / "megatron" / "bridge" / "recipes"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "models.py").write_text(RECIPES_OF_A_CHECKOUT)
    script = ROOT / "scripts" / "recipe_coverage.py"
    run = subprocess.run(
        [sys.executable, script, "--checkout", tmp_path], capture_output=True, text=True, check=True
    )
    *lines, summary = run.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "batch_48gpu_config",
        "broken_config is not evaluated",
        "uneven_16gpu_config",
    ]
    assert "64 does not divide into microbatches of 1 on 24 data-parallel ranks" in lines[0]
    assert "The nearest layer split is 11, 12, 12, 11: --account-for-embedding" in lines[2]
    assert summary.startswith("5 recipes, 1 without known layers (only batch and GPUs checked), 2 ")
