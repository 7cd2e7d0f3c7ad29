"""Sweeps of a training command: the grid, the flags and the counted sizes."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from tuning.samples import write_sweep

from megatron_vshape.tuning.configurations import SweepError
from megatron_vshape.tuning.files import Loaded, load_sweep
from megatron_vshape.tuning.grid import expand_grid
from megatron_vshape.tuning.predictor import key_of_count
from megatron_vshape.tuning.trainer_flags import trainer_command

EXPERTS = """
    --num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 1023
    --micro-batch-size 2 --global-batch-size 16 --tensor-model-parallel-size 2 --num-experts 8
    --moe-router-topk 2 --moe-ffn-hidden-size 128 --expert-tensor-parallel-size 1 --bf16
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --num-layers-per-virtual-pipeline-stage 1 --data-path mine
""".split()
EIGHT = {"devices_per_node": 8}


def swept(folder: Path, *words: str, **grid: Any) -> Loaded:
    sweep = {"grid": {"schedule": ["1f1b"], "pipeline_parallel": [2], **grid}}
    path = write_sweep(folder, sweep=sweep, cluster=EIGHT)
    settings = yaml.safe_load(path.read_text())
    del settings["workloads"], settings["model"]
    path.write_text(yaml.safe_dump(settings))
    return load_sweep(path, words)


def test_omitted_grid_keys_default_to_the_command(tmp_path: Path) -> None:
    loaded = swept(tmp_path, "pretrain_gpt.py", *EXPERTS)
    (config,) = expand_grid(loaded).possible
    assert (config.sequence_length, config.global_batch_size, config.microbatch_size) == (
        128,
        16,
        2,
    )
    assert (config.tensor_parallel, config.data_parallel, config.recompute) == (2, 2, "given")
    command = trainer_command(loaded, config)
    assert command[command.index("--recompute-granularity") + 1] == "full"
    assert command[command.index("--data-path") + 1] == "mine"
    assert "--mock-data" not in command
    assert not any(word.startswith("--num-layers-per-virtual") for word in command)


def test_experts_stages_recompute_and_formats_are_in_the_grid(tmp_path: Path) -> None:
    grid = {
        "schedule": ["interleaved-1f1b", "v-half"],
        "vpp": [1, 2],
        "expert_parallel": [2, 3],
        "recompute": ["none", "layernorm,moe_act"],
        "format": ["given", "mxfp8"],
    }
    loaded = swept(tmp_path, "pretrain_gpt.py", *EXPERTS, **grid)
    expanded = expand_grid(loaded)
    names = {config.schedule for config in expanded.possible}
    assert names == {"1f1b", "interleaved-1f1b:2", "v-half"}
    assert {config.expert_parallel for config in expanded.possible} == {2}
    assert any(
        "EP 3 does not divide 8 experts" in rejection.reason for rejection in expanded.dropped
    )
    assert len({key_of_count(config) for config in expanded.possible}) == 4
    config = expanded.possible[-1]
    assert str(config).endswith("ep2 mbs2 auto recompute-layernorm,moe_act mxfp8")
    flags = config.command(loaded.subject).flags
    index = flags.index("--recompute-modules")
    assert flags[index : index + 3] == ("--recompute-modules", "layernorm", "moe_act")
    assert "--recompute-method" not in flags
    assert flags[flags.index("--fp8-recipe") + 1] == "mxfp8"
    assert flags.count("--bf16") == 1


def test_a_model_may_be_a_file_of_arguments(tmp_path: Path) -> None:
    (tmp_path / "flags.txt").write_text(" ".join(EXPERTS))
    loaded = load_sweep(write_sweep(tmp_path, sweep={"model": "flags.txt"}, cluster=EIGHT))
    assert (loaded.subject.name, loaded.subject.experts) == ("flags", 8)
    assert {config.data_parallel for config in expand_grid(loaded).possible} == {2}


def test_without_a_model_the_command_must_follow(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="model is missing: name a model file or a file of argume"):
        swept(tmp_path)
