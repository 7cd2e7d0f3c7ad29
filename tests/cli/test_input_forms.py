"""One syntax in all commands: GPUs, names of schedules, units; a wrong form names the right one."""

from argparse import ArgumentTypeError
from pathlib import Path

import pytest
from cli.conftest import Output

from megatron_vshape import Costs, ScheduleError
from megatron_vshape.cli.dry_run import GpuCount
from megatron_vshape.core.paper.catalogue import canonical_name
from megatron_vshape.rehearsal.command import Command
from megatron_vshape.rehearsal.command_reader import read_command
from megatron_vshape.rehearsal.start_rules import check_model, check_required_flags

GIB = 2.0**30
SIZES = ["--devices", "4", "--microbatches", "8"]


@pytest.mark.parametrize("text", ["V-Half", "V_HALF"])
def test_names_are_read_in_any_case_and_with_underscores(text: str, output_of: Output) -> None:
    assert canonical_name(text) == "v-half"
    output = output_of("schedule", text, *SIZES)
    assert output == output_of("schedule", "v-half", *SIZES)


def test_other_texts_than_names_are_unchanged() -> None:
    assert canonical_name("Plans/V_Half.json") == "Plans/V_Half.json"
    assert canonical_name("V-Half+") == "v-half+"
    assert canonical_name("Interleaved_1F1B:4") == "interleaved-1f1b:4"


@pytest.mark.parametrize("text", ["128xH100", "128xh100", "H100x128"])
def test_gpus_are_a_number_and_a_type(text: str) -> None:
    assert GpuCount.of(text) == GpuCount(128, "h100")
    assert GpuCount.of("128") == GpuCount(128)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("128xH1000", "'h1000' is no supported GPU: a100, "),
        ("0xH100", "as in 128xH100"),
        ("H100", "as in 128xH100"),
    ],
)
def test_invalid_gpus_are_rejected(text: str, message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        GpuCount.of(text)


def test_advise_requires_the_type_of_gpu(error_of: Output) -> None:
    assert "--gpus 128 has no type of GPU, as in 128xH100" in error_of(
        "advise", "--gpus", "128", "--", "pretrain_gpt.py", "--num-layers", "4"
    )


def test_two_types_of_gpu_are_rejected(error_of: Output) -> None:
    sizes = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
    sizes += " --max-position-embeddings 64 --micro-batch-size 1"
    command = ["--", "pretrain_gpt.py", *sizes.split()]
    assert "--gpu h200 and --gpus both have a type" in error_of(
        "rehearse", "--gpu", "H200", "--gpus", "2xH100", "--fetch", *command
    )


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("60", "60 has no unit: use 60GiB, or 60chunks of activations, which are 60.0 GiB"),
        ("60GB", "Use 60GiB: a GiB is 2^30 bytes"),
        ("0", "is neither chunks above 0"),
    ],
)
def test_memory_limits_of_bytes_require_a_binary_unit(
    limit: str, message: str, tmp_path: Path, error_of: Output
) -> None:
    path = tmp_path / "costs.json"
    memory = {"held_after_forward_bytes": (GIB,) * 8, "held_after_backward_bytes": (GIB,) * 8}
    path.write_text(Costs.uniform(4, 8, 1.0, 1.0, 1.0, 0.0).having(**memory).to_json())
    assert message in error_of("plan", *SIZES, "--costs", str(path), "--memory-limit", limit)
    options = ["--memory-limit", "6GiB", "--headroom", "2GB"]
    assert "unsupported unit. Use 2GiB" in error_of("plan", *SIZES, "--costs", str(path), *options)


def test_a_shell_before_a_script_is_ignored(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("torchrun pretrain_gpt.py --num-layers $1\n")
    for words in (["bash"], ["sbatch", "--nodes", "4"], ["sh", "-e"]):
        assert read_command([*words, str(script), "8"]).layers == 8


def test_several_trainings_of_a_script_are_reported(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    lines = [f"torchrun pretrain_gpt.py --num-layers {layers} --bf16\n" for layers in (8, 8, 16)]
    script.write_text("".join(lines))
    (note,) = read_command([str(script)]).notes
    assert "starts 2 different trainings" in note
    script.write_text("".join(lines[:2]))
    assert read_command([str(script)]).notes == ()


def test_all_missing_flags_are_in_one_message() -> None:
    with pytest.raises(ScheduleError, match=r"no --hidden-size, --num-att.*, --micro-batch-size, "):
        check_model(Command("pretrain_gpt.py", ("--num-layers", "4")))
    with pytest.raises(
        ScheduleError, match=r"train.py has none of Megatron's flags .* without Meg"
    ):
        check_model(Command("train.py", ("--model", "a", "--deepspeed", "b.json")))
    with pytest.raises(ScheduleError, match="no --num-attention-heads, --seq-length, "):
        check_required_flags(Command("pretrain_gpt.py", ("--num-layers", "4")))
