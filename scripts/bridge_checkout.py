"""Run the recipe functions of a Megatron-Bridge checkout without its dependencies.

Only the recipes' own modules are imported. Every other package (Megatron, torch, transformers) is
replaced by records that keep assigned settings, so a recipe runs in microseconds. The number of
layers of a Hugging Face model comes from a table, because its config.json is not in the checkout.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from megatron_vshape.mcore.layout.given_layout import LETTERS
from megatron_vshape.rehearsal.command import Command, flags_of

RECIPES = ("megatron.bridge.recipes", "megatron.bridge.perf_recipes")
REPLACED = {"megatron", "torch", "transformers", "numpy", "nemo_run", "omegaconf", "modelopt"}

LAYERS = {
    r"llama-?2-7b": 32,
    r"llama-3(\.1)?-8b": 32,
    r"llama-3(\.1)?-70b": 80,
    r"llama-3\.1-405b": 126,
    r"llama-3\.2-1b": 16,
    r"llama-3\.2-3b": 28,
    r"qwen2(\.5)?-0\.5b": 24,
    r"qwen2(\.5)?-(1\.5b|7b)": 28,
    r"qwen2\.5-14b": 48,
    r"qwen2\.5(-vl)?-32b": 64,
    r"qwen2(\.5)?(-vl)?-72b": 80,
    r"qwen2\.5-vl-3b": 36,
    r"qwen2\.5-vl-7b": 28,
    r"qwen3-(0\.6b|1\.7b)": 28,
    r"qwen3(-vl)?-(4b|8b)": 36,
    r"qwen3-14b": 40,
    r"qwen3(-vl)?-32b": 64,
    r"qwen3(-vl)?-30b": 48,
    r"qwen3(-vl)?-235b": 94,
    r"qwen3-next-80b": 48,
    r"qwen3\.[56]-35b": 40,
    r"qwen3\.5-122b": 48,
    r"qwen3\.5-397b": 60,
    r"gemma-2-2b": 26,
    r"gemma-2-9b": 42,
    r"gemma-2-27b": 46,
    r"gemma-3-1b": 26,
    r"gemma-3-4b": 34,
    r"gemma-3-12b": 48,
    r"gemma-3-27b": 62,
    r"deepseek-v2-lite": 27,
    r"deepseek-v2$": 60,
    r"deepseek-v3": 61,
    r"kimi-k2": 61,
    r"moonlight-16b": 27,
    r"glm-4\.5(-air|v)": 46,
    r"glm-4\.5$": 92,
    r"gpt-oss-20b": 24,
    r"gpt-oss-120b": 36,
    r"olmoe": 16,
}
"""Decoder layers in public config.json files, by patterns of names in lower case."""

_FLAGS = {
    "num_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "tensor_model_parallel_size": "tensor_model_parallel_size",
    "pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "context_parallel_size": "context_parallel_size",
    "expert_model_parallel_size": "expert_model_parallel_size",
    "expert_tensor_parallel_size": "expert_tensor_parallel_size",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split": "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split": "account_for_loss_in_pipeline_split",
    "hybrid_layer_pattern": "hybrid_layer_pattern",
    "mtp_num_layers": "mtp_num_layers",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
}
"""Flags of Megatron for settings of a model that the arithmetic reads."""


class _Replaced(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Record()


class Record(metaclass=_Replaced):
    """An object of a package that is not imported: keeps its settings, and is false without."""

    def __init__(self, *unused: Any, **settings: Any) -> None:
        vars(self).update(settings)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        vars(self)[name] = Record()
        return vars(self)[name]

    def __call__(self, *unused: Any, **settings: Any) -> Record:
        return Record(**settings)

    def __bool__(self) -> bool:
        return bool(vars(self))

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __float__(self) -> float:
        return 0.0

    def __gt__(self, value: Any) -> bool:
        return False

    def __getitem__(self, name: Any) -> Any:
        return getattr(self, str(name))


class Model(Record):
    """A model provider, with the defaults that recipes compare with None."""

    def __init__(self, *names: Any, **settings: Any) -> None:
        defaults = dict.fromkeys((*_FLAGS, "pipeline_model_parallel_layout"))
        sizes = ("tensor_model", "pipeline_model", "context", "expert_model")
        defaults |= {f"{size}_parallel_size": 1 for size in sizes}
        name = str(names[0]).rpartition("/")[2].lower() if names else ""
        layers = (
            count for pattern, count in LAYERS.items() if re.match(f"(meta-)?{pattern}", name)
        )
        super().__init__(**defaults | {"num_layers": next(layers, None)} | settings)


class AutoBridge(Record):
    """Gives the model of a Hugging Face name."""

    @staticmethod
    def from_hf_pretrained(name: str, *unused: Any, **settings: Any) -> Record:
        """Return an object whose methods return the model."""
        model = lambda *unused, **settings: Model(name)  # noqa: E731
        return Record(to_megatron_provider=model, get_model_config=model)


class _Finder(MetaPathFinder, Loader):
    """Imports the recipes of a checkout, and records in place of all other packages."""

    def __init__(self, source: Path) -> None:
        self._source = source

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        package, _, _ = name.rpartition(".")
        if name.startswith(RECIPES):
            return PathFinder.find_spec(name, [str(self._source / package.replace(".", "/"))])
        replaced = name.partition(".")[0] in REPLACED
        return ModuleSpec(name, self, is_package=True) if replaced else None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = _replacement


def _replacement(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "AutoBridge":
        return AutoBridge
    return type(name, (Model if name.endswith("ModelProvider") else Record,), {})


class Recipe(NamedTuple):
    """A recipe function and the command of its model, or the error that it raised."""

    name: str
    command: Command | None
    gpus: int | None
    error: str = ""


def recipes_of(checkout: Path) -> Iterator[Recipe]:
    """Run all recipe functions of a checkout."""
    source = checkout / "src"
    sys.meta_path.insert(0, _Finder(source))
    for root in RECIPES:
        for file in sorted((source / root.replace(".", "/")).rglob("*.py")):
            name = ".".join(file.relative_to(source).with_suffix("").parts)
            try:
                module = import_module(name.removesuffix(".__init__"))
            except Exception as error:  # recipes run arbitrary code
                yield Recipe(name, None, None, f"{type(error).__name__}: {error}")
                continue
            for function_name, function in inspect.getmembers(module, inspect.isfunction):
                is_recipe = function_name.endswith("_config") and not function_name.startswith("_")
                parameters = inspect.signature(function).parameters.values()
                is_recipe &= all(
                    parameter.default is not parameter.empty for parameter in parameters
                )
                if is_recipe and function.__module__ == module.__name__:
                    yield _run_recipe(function_name, function)


def _run_recipe(name: str, function: Any) -> Recipe:
    try:
        config = function()
        command = _command_of(config)
    except Exception as error:  # recipes run arbitrary code
        return Recipe(name, None, None, f"{type(error).__name__}: {error}")
    gpus = re.search(r"_(\d+)gpu_", name)
    return Recipe(name, command, int(gpus[1]) if gpus else None)


def _command_of(config: Any) -> Command:
    """Return the flags of a recipe's model and batch that the arithmetic reads."""
    model, train = vars(config.model), config.train
    values = {flag: model.get(name) for name, flag in _FLAGS.items()}
    layout = model.get("pipeline_model_parallel_layout")
    if layout and not isinstance(layout, Record):
        stages = [[stage] if isinstance(stage, str) else stage for stage in layout]
        letters = {name: letter for letter, name in LETTERS.items()}
        text = "|".join(
            "".join(letters.get(str(name), str(name)) for name in stage) for stage in stages
        )
        values["pipeline_model_parallel_layout"] = layout if isinstance(layout, str) else text
        values["num_virtual_stages_per_pipeline_rank"] = None
    if values["num_virtual_stages_per_pipeline_rank"] == 1:
        values["num_virtual_stages_per_pipeline_rank"] = None
    # Without this size, Bridge's experts have no tensor parallelism.
    values["expert_tensor_parallel_size"] = values["expert_tensor_parallel_size"] or 1
    values |= {name: getattr(train, name) for name in ("global_batch_size", "micro_batch_size")}
    plain = {name: value for name, value in values.items() if not isinstance(value, Record)}
    return Command("pretrain_gpt.py", tuple(flags_of(plain)))
