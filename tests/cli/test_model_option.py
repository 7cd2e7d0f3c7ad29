"""--model of rehearse and advise: flags in front of the command's, defaults, and conflicts."""

import json
import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest

from megatron_vshape.cli.dry_run import command_with_model, with_batch
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.command import Command
from megatron_vshape.tuning.files import load_model
from megatron_vshape.tuning.model_names import find_model

pytest.importorskip("pydantic")

MODELS = Path(__file__).parents[2] / "configs" / "models"


def command_of(model: str | None, text: str) -> Command:
    return command_with_model(Namespace(model=model, command=shlex.split(text)))


def test_the_flags_of_the_model_are_printed_and_come_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = command_of("qwen3-30b-a3b", "--tensor-model-parallel-size 2")
    assert (command.script, command.layers) == ("pretrain_gpt.py", 48)
    assert command.value("--tensor-model-parallel-size") == "2"
    assert command.value("--seq-length") == "4096"
    assert command.has("--bf16")
    printed = capsys.readouterr().out
    assert "qwen3_30b_a3b: 30.5B parameters, 3.3B active" in printed
    # They can be pasted: a shell reads the lines as one command.
    flags = shlex.split(printed.partition(":\n")[2].replace("\\\n", " "))
    assert flags == list(command.flags[: len(flags)])


def test_flags_of_the_command_replace_defaults() -> None:
    command = command_of("llama-3.1-8b", "torchrun --nnodes 2 train.py --seq-length 8192 --fp16")
    assert (command.script, command.launched) == ("train.py", {"--nnodes": "2"})
    assert command.value("--seq-length") == "8192"
    assert not command.has("--bf16")
    assert command_of(None, "train.py --fp16").flags == ("--fp16",)


def test_a_hybrid_model_has_its_script() -> None:
    command = command_of("nemotron-h-47b", "--micro-batch-size 1")
    assert (command.script, command.layers) == ("pretrain_hybrid.py", 98)


def test_two_models_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"--model qwen3-8b and the command both have a model"):
        command_of("qwen3-8b", "--num-layers 4")
    assert command_of("qwen3-8b", "").layers == 36


def test_a_framework_file_without_sizes_gets_the_model(tmp_path: Path) -> None:
    words = "megatron sft --model Qwen/Qwen3-8B --tuner_type full --tensor_model_parallel_size 2"
    command = command_of("qwen3-8b", words)
    assert command.layers == 36
    assert command.value("--tensor-model-parallel-size") == "2"


def test_the_model_that_a_framework_names() -> None:
    words = "megatron sft --model Qwen/Qwen3-8B-Base --tensor_model_parallel_size 2"
    command = command_of(None, words)
    assert (command.layers, command.value("--hidden-size")) == (36, "4096")
    assert command.value("--tensor-model-parallel-size") == "2"
    assert command.notes == ("Sequences of 4,096 tokens are assumed: set --seq-length.",)
    assert command_of(None, f"{words} --max_length 2048").notes == ()
    assert command_of("llama-3.1-8b", words).layers == 32  # --model replaces it
    assert command_of(None, f"{words} --num_layers 4").layers == 4
    # A framework's command has to ask for multi-token prediction and for this fusion.
    words = "megatron sft --model zai-org/GLM-4.5-Air"
    command = command_of(None, words)
    assert not command.has("--mtp-num-layers")
    assert not command.has("--moe-permute-fusion")
    assert command_of(None, f"{words} --mtp_num_layers 1").number("--mtp-num-layers", 0) == 1
    with pytest.raises(ScheduleError, match="the model example/none is no preset"):
        command_of(None, "megatron sft --model example/none")


def test_the_default_batch_divides_among_replicas() -> None:
    command = command_of("qwen3-8b", "--micro-batch-size 2")
    assert with_batch(command, 16).value("--global-batch-size") == "128"
    assert with_batch(command.having(seq_length=131072), 16).value("--global-batch-size") == "32"
    command = command.having(global_batch_size=96)
    assert with_batch(command, 16).value("--global-batch-size") == "96"


def test_megatron_knows_the_flags_of_every_preset() -> None:
    arguments = pytest.importorskip("megatron.training.arguments")
    parser = arguments.add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    for file in MODELS.glob("*.yaml"):
        command = load_model(file).command
        parsed, unknown = parser.parse_known_args(command.flags)
        assert not unknown, file
        assert parsed.hidden_size == command.number("--hidden-size", 0)


def test_a_config_json_in_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64}
    values |= {"num_attention_heads": 4, "vocab_size": 100, "intermediate_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert find_model(str(tmp_path)) == tmp_path / "config.json"
    command = command_of(str(tmp_path), "--seq-length 8192")
    assert command.layers == 2
    assert command.value("--max-position-embeddings") == "8192"  # which Megatron requires
