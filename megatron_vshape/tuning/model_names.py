"""Find the model of a name: a file, a preset, or config.json of a repository on Hugging Face."""

import re
from pathlib import Path

from megatron_vshape.tuning.configurations import SweepError

_RELEASE = re.compile(
    "instruct|base|chat|it|hf|fp8|bf16|thinking|preview|meta|nvidia|coder|math|1m|[0-9]{4}"
)
"""Words of a model's name without effect on its sizes: kind of training, format, date."""

_SIZE = re.compile(r"a?\d+[bm]|\d+e")
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w.-]+")

_EQUAL_SIZES = {
    "deepseekr1": "deepseek_v3",
    "deepseekr1distillllama8b": "llama_3_1_8b",
    "deepseekr1distillllama70b": "llama_3_1_70b",
    "deepseekr1distillqwen7b": "qwen2_5_7b",
    "deepseekr1distillqwen14b": "qwen2_5_14b",
    "deepseekr1distillqwen32b": "qwen2_5_32b",
    "deepseekv31": "deepseek_v3",
    "glm47": "glm_4_5",
    "llama38b": "llama_3_1_8b",
    "llama370b": "llama_3_1_70b",
    "llama3370b": "llama_3_1_70b",
    "minimaxm25": "minimax_m2",
    "qwen25omni7b": "qwen2_5_vl_7b",
    "qwen27b": "qwen2_5_7b",
    "qwen3600m": "qwen3_0_6b",
    "qwen3635ba3b": "qwen3_5_35b_a3b",
}
"""Presets of models that differ from another only in values without effect on memory or time."""


def find_model(name: str) -> Path:
    """Return the file of a model: that path, config.json in that folder, a preset, or a download.

    The name of a preset may have dashes, dots, an owner before a slash and words such as Instruct,
    in any case. For other names with an owner, huggingface_hub returns config.json of its cache, or
    downloads it.

    Raises:
        SweepError: there is no such file and no such preset, and the download failed.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        return path
    presets = _presets()
    for part in reversed(path.parts):
        words = [word for word in re.split("[^a-z0-9]+", part.lower()) if word]
        words = [word for word in words if not _RELEASE.fullmatch(word)]
        family = [word for word in words if not _SIZE.fullmatch(word)]
        preset = presets.get("".join(words)) or presets.get("".join(family))
        # Another folder of the path names a model only with its size.
        if preset is not None and (part == path.name or words != family):
            return preset
    if _REPOSITORY.fullmatch(name):
        return _download_config(name)
    raise SweepError(
        f"the model {name:.100} is no config.json, no folder with one, and no preset: give one of "
        f"them with --model. Presets: {', '.join(sorted({file.stem for file in presets.values()}))}"
    )


def name_of(path: Path) -> str:
    """Return the name of a model by its file: of its repository, of its folder, or the stem."""
    if path.name != "config.json":
        return path.stem
    repository = next((part for part in path.parts if part.startswith("models--")), "")
    return repository.rpartition("--")[2] or path.parent.resolve().name


def _presets() -> dict[str, Path]:
    """Return the files of all presets by their names without underscores."""
    package = Path(__file__).parents[1]
    folders = (package / "examples", package.parent)  # installed, checkout
    files = [file for folder in folders for file in sorted(folder.glob("configs/models/*.yaml"))]
    presets = {file.stem: file for file in files}
    names = {stem.replace("_", ""): file for stem, file in presets.items()}
    return names | {name: presets[stem] for name, stem in _EQUAL_SIZES.items()}


def _download_config(name: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise SweepError(
            f"the model {name:.100} is no preset. To download its config.json, pip install "
            "huggingface_hub; or give the file: --model config.json"
        ) from None
    try:
        return Path(hf_hub_download(name, "config.json"))
    except (OSError, ValueError) as error:  # no connection, no such repository, no access
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SweepError(
            f"the model {name:.100} is no preset, and its config.json was not downloaded from "
            f"Hugging Face ({reason:.300}): give the file with --model config.json"
        ) from None
