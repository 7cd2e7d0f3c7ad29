"""Read configurations of FlagScale, which passes the settings of three sections as flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.command import NODES, PROCESSES, Command
from megatron_vshape.rehearsal.rank_job import LoraConfig
from megatron_vshape.rehearsal.yaml_files import number, section, with_references

_SECTIONS = ("system", "model", "data")

_REJECTED = {
    "hetero_process_meshes": "parallel sizes that differ between GPUs",
    "use_dualpipev": "FlagScale's DualPipeV",
    "recompute_granularity_per_stage_micro_batch": "another recomputation for each microbatch",
}
"""Settings that Megatron does not have and that change the memory of a rank."""


def command_of_flagscale(path: Path, content: Mapping[str, Any]) -> Command | None:
    """Return the command of an experiment, or of the file with its training; None for others.

    Raises:
        ScheduleError: The run does not train with Megatron, or has settings that are not estimated.
    """
    training = content.get("train", content)
    if not isinstance(training, dict) or not {"system", "model"} <= training.keys():
        return None
    experiment = with_references(section(content, "experiment"), content)
    task = section(experiment, "task")
    backend, script = task.get("backend", "megatron"), str(task.get("entrypoint") or "")
    if backend != "megatron":
        raise ScheduleError(
            f"{path} trains with {backend} in FlagScale: only Megatron is estimated"
        )
    if script and Path(script).stem != "train_gpt":
        kind = Path(script).stem.removeprefix("train_")
        raise ScheduleError(
            f"{path} trains a {kind} model ({script}): of FlagScale, only train_gpt.py is estimated"
        )
    settings: dict[str, Any] = {}
    for name in _SECTIONS:
        settings |= _settings(with_references(section(training, name), content))
    for name, meaning in _REJECTED.items():
        if settings.get(name):
            raise ScheduleError(
                f"{path} sets {name}: {meaning} cannot be estimated. Remove it to estimate the "
                "other settings"
            )
    if "ffn_hidden_size" not in settings and number(settings, "multiple_of"):
        settings["ffn_hidden_size"] = _ffn_hidden_size(settings)
    lora = None
    if settings.pop("peft_type", None) == "lora":
        targets = settings.get("lora_target_modules") or ()
        lora = LoraConfig(number(settings, "lora_dim", 32), tuple(targets))
    runner = section(experiment, "runner")
    return Command(
        "pretrain_gpt.py",
        tuple(_words(settings)),
        {name: str(value) for name, value in section(experiment, "envs").items()},
        {
            NODES: str(number(runner, "nnodes", 1)),
            PROCESSES: str(number(runner, "nproc_per_node") or ""),
        },
        lora=lora,
    )


def _settings(section_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a section and of those in it, without those that are null."""
    settings: dict[str, Any] = {}
    for name, value in section_settings.items():
        settings |= _settings(value) if isinstance(value, dict) else {name: value}
    return {name: value for name, value in settings.items() if value is not None}


def _words(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the flags of settings; of switches, those that are on."""
    for name, value in settings.items():
        if name in _READ or name.startswith("lora_") or value is False:
            continue
        yield "--" + name.replace("_", "-")
        if value is not True:
            yield from map(str, value if isinstance(value, list) else [value])


_READ = {
    "multiple_of",
    "hidden_dim_multiplier",
    "enable_hetero",
    "tokenizer_path",
    "no_shared_fs",
}
"""Settings of FlagScale that are read, or have no effect on memory and time."""


def _ffn_hidden_size(settings: Mapping[str, Any]) -> int:
    """Return the width of the MLP as Llama's code computes it (auto_tuner/utils.py).

    Raises:
        ScheduleError: The multiplier is no number.
    """
    width, multiple = 4 * number(settings, "hidden_size"), number(settings, "multiple_of")
    if not settings.get("swiglu"):
        return width
    multiplier = settings.get("hidden_dim_multiplier", 1)
    if not isinstance(multiplier, int | float):
        raise ScheduleError(f"hidden_dim_multiplier: {multiplier!r:.40} is no number")
    return -(-int(int(width * 2 / 3) * multiplier) // multiple) * multiple
