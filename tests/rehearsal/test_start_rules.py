"""Arithmetic of commands: rules of stock Megatron, and the nearest values that fulfill them."""

from __future__ import annotations

import sys
import time

import pytest

from megatron_vshape.cli.main import main
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.command import Command, sizes_of
from megatron_vshape.rehearsal.command_reader import read_command
from megatron_vshape.rehearsal.start_rules import check_batch, check_model, violations_of

PP, TP = "--pipeline-model-parallel-size", "--tensor-model-parallel-size"
VP, BATCH = "--num-virtual-stages-per-pipeline-rank", "--global-batch-size"
LAYOUT = "--pipeline-model-parallel-layout"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
WITH_ENDS = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
SIZES = "--hidden-size 64 --num-attention-heads 8"


def command_of(flags: str) -> Command:
    return read_command(["pretrain_gpt.py", *SIZES.split(), *flags.split()])


def violations(flags: str, gpus: int | None = None) -> list[str]:
    command = command_of(flags)
    return [str(violation) for violation in violations_of(command, sizes_of(command, gpus))]


@pytest.mark.parametrize(("pattern", "has_place"), [("M-M-*-", False), ("MEME*E", True)])
def test_experts_need_a_layer_of_the_pattern(pattern: str, has_place: bool) -> None:
    """Qwen3-Next of Pai-Megatron-Patch has experts in MLP layers: its 80B were estimated as 20B."""
    command = command_of(f"--hybrid-override-pattern {pattern} --num-experts 8")
    if has_place:
        check_model(command)
    else:
        with pytest.raises(ScheduleError, match=r"no layer of experts \(E\)"):
            check_model(command)


RECIPES = {
    f"--num-layers 46 {PP} 4": f"11, 12, 12, 11: {WITH_ENDS}",
    f"--num-layers 92 {PP} 8": f"12, 12, 11: {LAYOUT} 'Et*10|t*11|(t*12|)*5t*11L'",
    f"--num-layers 60 {PP} 8": f"6, 7, 8, 8, 8, 8, 8, 7: {LAYOUT} 'Et*6|t*7|(t*8|)*5t*7L'",
    f"--num-layers 40 {PP} 2 {VP} 12": f"{'2, ' * 19}2: {VP} 10",
    f"--num-layers 48 {PP} 8 {VP} 4": f"{'2, ' * 23}2: {VP} 3",
    f"--num-layers 46 {PP} 2 {FIRST} 11 {LAST} 11": f"remove {FIRST} and remove {LAST}",
    f"--num-layers 92 {PP} 2 {FIRST} 10 {LAST} 10": f"remove {FIRST} and remove {LAST}",
    f"--num-layers 27 {PP} 2": f"13, 14: {LAYOUT} 'Et*13|t*14L'",
    f"--num-layers 46 {PP} 16 {LAYOUT} Et*5|(t*6|)*6t*5L": f"3, 2: {WITH_ENDS} and remove {LAYOUT}",
    f"--num-layers 46 {PP} 8 {LAYOUT} Et*5|(t*6|)*6t*4L": f"{WITH_ENDS} and remove {LAYOUT}",
}
"""Layers and ranks of published recipes that aborted before the first step (Megatron-Bridge #5551,
#5884, #5893, #4604, #5581, #5708, #5578), and flags with which they start."""


@pytest.mark.parametrize(("flags", "fix"), RECIPES.items())
def test_layers_that_do_not_divide_have_a_nearest_layout_that_starts(flags: str, fix: str) -> None:
    (violation,) = violations(f"{flags} {BATCH} 64")
    assert "The nearest layer split is" in violation
    assert fix in violation
    changes = violation.rpartition(": ")[2].replace("'", "").split(" and ")
    removed = [change.split()[1] for change in changes if change.startswith("remove ")]
    added = [change.split() for change in changes if not change.startswith("remove ")]
    words = [*command_of(f"{flags} {BATCH} 64").without(removed.__contains__).flags]
    words += [word for change in added for word in change]
    command = read_command(["pretrain_gpt.py", *words])
    assert violations_of(command, sizes_of(command, None)) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{TP} 3", f"--num-attention-heads 8 is not a multiple of {TP} 3. Set {TP} 2"),
        (
            "--num-experts 12 --expert-model-parallel-size 8",
            "--num-experts 12 is not a multiple of --expert-model-parallel-size 8. Set "
            "--expert-model-parallel-size 6",
        ),
        (
            "--seq-length 96 --context-parallel-size 32",
            "--seq-length 96 is not a multiple of 2 x --context-parallel-size 32. Set "
            "--context-parallel-size 24",
        ),
        (
            f"--num-experts 8 {TP} 2",
            "experts with tensor parallelism require sequence parallelism in training. Add "
            "--sequence-parallel",
        ),
        (f"--num-experts 8 {TP} 2 --sequence-parallel", None),
        ("--num-experts 8 --expert-model-parallel-size 8 --seq-length 96", None),
    ],
)
def test_sizes_that_do_not_fit_the_model(flags: str, message: str | None) -> None:
    expected = [] if message is None else [message]
    assert violations(f"--num-layers 4 {BATCH} 96 {flags}") == expected


@pytest.mark.parametrize(
    ("flags", "gpus", "problem"),
    [
        (
            f"--num-layers 48 {PP} 4 {VP} 2 {BATCH} 6",
            4,
            "6 microbatches are not a multiple of 4, which virtual stages on 4 pipeline ranks "
            f"require. The nearest batch is {BATCH} 8",
        ),
        (
            f"--num-layers 8 {PP} 2 {VP} 2 {BATCH} 8 --micro-batch-size 2 "
            "--microbatch-group-size-per-virtual-pipeline-stage 3",
            2,
            f"4 microbatches are not a multiple of 3, which virtual stages on 2 pipeline ranks "
            f"require. The nearest batch is {BATCH} 10",
        ),
        (
            f"--num-layers 8 {PP} 4 {VP} 2 {BATCH} 8 "
            "--microbatch-group-size-per-virtual-pipeline-stage 2",
            4,
            "--microbatch-group-size-per-virtual-pipeline-stage 2 is below the 4 pipeline ranks",
        ),
        (
            f"--num-layers 8 {PP} 2 {BATCH} 100 --micro-batch-size 4",
            12,
            f"4 on 6 data-parallel ranks. The nearest batch is {BATCH} 96",
        ),
        (
            f"--num-layers 96 {TP} 2 {BATCH} 192",  # Megatron-Bridge #6024
            256,
            f"192 does not divide into microbatches of 1 on 128 data-parallel ranks. The nearest "
            f"batch is {BATCH} 256",
        ),
        (f"--num-layers 8 {VP} 2", None, f"more than 1 pipeline rank. Remove {VP}"),
    ],
)
def test_numbers_that_do_not_divide_are_rejected(
    flags: str, gpus: int | None, problem: str
) -> None:
    (violation,) = violations(flags, gpus)
    assert problem in violation


@pytest.mark.parametrize(
    ("flags", "gpus"),
    [
        (f"--num-layers 48 {PP} 4 {VP} 2 {BATCH} 8", 4),
        (f"--num-layers 40 {PP} 2 {FIRST} 17 {LAST} 23 {BATCH} 8", 2),
        (f"--num-layers 46 {PP} 4 {WITH_ENDS} {BATCH} 6", 4),
        (f"--num-layers 46 {PP} 4 --pipeline-schedule v-half {BATCH} 6", 4),
        (f"--hybrid-layer-pattern M-|M-|M-|M- {PP} 2 {BATCH} 4", 2),
        (
            f"--num-layers 8 {PP} 2 {VP} 2 {BATCH} 5 "
            "--microbatch-group-size-per-virtual-pipeline-stage 3",
            2,
        ),
    ],
)
def test_commands_that_start_violate_no_rule(flags: str, gpus: int) -> None:
    assert violations(flags, gpus) == []


def test_all_violations_are_reported() -> None:
    assert len(violations(f"--num-layers 46 {PP} 4 {TP} 3 {BATCH} 7 --micro-batch-size 2")) == 3


def test_a_batch_that_does_not_divide_is_an_error_of_every_schedule() -> None:
    command = command_of(f"--num-layers 8 {PP} 2 --pipeline-schedule v-half {BATCH} 7")
    with pytest.raises(ScheduleError, match=f"nearest batch is {BATCH} 8"):
        check_batch(command, sizes_of(command, 4))


@pytest.mark.parametrize("option", ["--check", "--alone"])
def test_rules_are_checked_before_a_model_is_built(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    loaded = set(sys.modules)
    start_s = time.process_time()
    flags = f"{SIZES} --num-layers 46 {PP} 4 {BATCH} 8".split()
    status = main(["rehearse", option, "--", "pretrain_gpt.py", *flags])
    printed = capsys.readouterr()
    assert status == (1 if option == "--check" else 2)
    assert "46 layers do not divide among 4 pipeline ranks" in printed.out + printed.err
    assert not [name for name in {*sys.modules} - loaded if name.startswith("megatron.")]
    assert time.process_time() - start_s < 2.0


@pytest.mark.parametrize("command", ["rehearse", "advise --gpus 8xh100"])
@pytest.mark.parametrize("flags", ["--num-layers 4", "--hidden-size 64", PP + " 2"])
def test_a_command_without_layers_or_sizes_is_rejected(
    command: str, flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    assert main([*command.split(), "--", "pretrain_gpt.py", *flags.split()]) == 2
    assert "so the model is unknown: give the model with --model NAME" in capsys.readouterr().err
