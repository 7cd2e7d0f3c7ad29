"""HybridModel, whose layers are a pattern of symbols: its stages, and the numbers of 1F1B."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from mcore.conftest import UNTIED, needs_hybrid
from mcore.farm import Ended, Farm
from mcore.test_training import assert_equal_training

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import linear, v_shape
from megatron_vshape.mcore.layout.hybrid import cut, layers_of_stages
from megatron_vshape.mcore.refusals import UnsupportedError

Train = Callable[..., Ended]

STEPS = ("--train-iters", "2", "--eval-interval", "2", "--eval-iters", "1")
PATTERN = "*-*-*-*-*-"
EXPERTS = (
    "--num-experts 4 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
    f"--disable-bias-linear {UNTIED}"
)
RUNS = {
    "tied, split by the flag": ("v-half", PATTERN, "--pipeline-layer-split 0,2,1,2,2,2,1,0"),
    "untied, split by the pattern": ("v-zb", "*|-|*-|*|-*|-|*|-", UNTIED),
    "evenly": ("v-min", "*-*-*-*-", ""),
    "one chunk": ("zb-h1", "*-|*-*|-*-|*-", ""),
    "interleaved": ("interleaved-1f1b", "*-*-*-*-", ""),
    "experts": ("v-half", "*|E|*-|*|E*|-|*|E", EXPERTS),
}
FAST = {"tied, split by the flag"}


@needs_hybrid
@pytest.mark.parametrize(
    ("schedule", "pattern", "flags"),
    [
        pytest.param(*run, id=name, marks=[pytest.mark.slow] * (name not in FAST))
        for name, run in RUNS.items()
    ],
)
def test_training_equals_megatrons_1f1b(
    train: Train, schedule: str, pattern: str, flags: str
) -> None:
    model = pattern.replace("|", "")
    ends = () if "--pipeline-layer-split" in flags else flags.split()
    theirs = train(2, "--pipeline-schedule", "1f1b", "--hybrid-layer-pattern", model, *STEPS, *ends)
    given = ("--hybrid-layer-pattern", pattern, *STEPS, *flags.split())
    ours = train(4, "--pipeline-schedule", schedule, *given)
    assert any("decoder.final_norm" in name for name in ours.merged("parameters"))  # not a GPT
    assert_equal_training(ours, theirs)


@needs_hybrid
@pytest.mark.parametrize(
    ("schedule", "predicting"),
    [
        ("v-half", "*E"),
        pytest.param("v-half", "*-/*-", marks=pytest.mark.slow),
        pytest.param("zb-h1", "*E/*E", marks=pytest.mark.slow),
    ],
)
def test_experts_beside_multi_token_prediction(
    train: Train, schedule: str, predicting: str
) -> None:
    flags = f"--hybrid-layer-pattern *-*-*-*E/{predicting} --moe-z-loss-coeff 1e-3 {EXPERTS}"
    # Megatron's own 1F1B crashes with these flags, with or without multi-token prediction.
    theirs = train(1, *flags.split(), *STEPS)
    ours = train(2, "--pipeline-schedule", schedule, *flags.split(), *STEPS)
    assert_equal_training(ours, theirs)
    for name in ("load_balancing_loss", "z_loss", "mtp_1 loss"):
        assert logged(ours, name) == pytest.approx(logged(theirs, name), rel=1e-5)


def logged(run: Ended, name: str) -> list[float]:
    """Return the values of a metric in the log of the last rank, one per step."""
    values = re.findall(rf"{name}: ([0-9.E+-]+)", run.output[-1])
    assert len(values) == 2, run.output[-1]
    return [float(value) for value in values]


@pytest.mark.slow
@needs_hybrid
def test_mamba_layers(farm: Farm) -> None:
    flags = (
        *("--hybrid-layer-pattern", "M*-MM*-M", *STEPS),
        *("--mamba-head-dim", "16", "--mamba-state-dim", "8", "--mamba-num-groups", "2"),
    )
    plugin = Path(__file__).with_name("mamba_on_cpu.py")
    theirs = farm.run(2, "--pipeline-schedule", "1f1b", *flags, plugin=plugin).check()
    ours = farm.run(4, "--pipeline-schedule", "v-half", *flags, plugin=plugin).check()
    assert any("mixer.A_log" in name for record in ours.records for name in record["parameters"])
    assert_equal_training(ours, theirs)


def test_the_pattern_or_the_flag_says_where_stages_begin() -> None:
    assert layers_of_stages("M*-M", v_shape(2), None) == (1, 1, 1, 1)
    assert layers_of_stages("|M*|-M|", v_shape(2), None) == (0, 2, 2, 0)
    assert layers_of_stages("M*-M", linear(2), "1,3") == (1, 3)
    assert cut("M*-M", (0, 2, 2, 0)) == "|M*|-M|"
    assert cut("M|*-M", (3, 1)) == "M*-|M"


def test_multi_token_prediction_comes_after_the_stages() -> None:
    assert layers_of_stages("M*-M/M*/M*", v_shape(2), None) == (1, 1, 1, 1)
    assert cut("M*-M/M*/M*", (0, 2, 2, 0)) == "|M*|-M|/M*/M*"


@pytest.mark.parametrize(
    ("pattern", "split", "said"),
    [
        ("M*|-M", None, "has 2 parts and the schedule 4 stages: put 3 times | into it, or none"),
        ("M*||-|M", None, "leaves stage 1 without layers"),
        ("M|*|-|M", "1,1,1,1", "as --pipeline-layer-split does: remove one of them"),
        ("M*-M", "auto", "mark the start of each stage in the pattern with |"),
        ("M*-M*", None, "5 layers do not divide among 4 stages"),
        ("M*-M*", "1,1,1,1", "adds up to 4 layers and the model has 5"),
    ],
)
def test_patterns_that_do_not_fit(pattern: str, split: str | None, said: str) -> None:
    with pytest.raises((ScheduleError, UnsupportedError)) as refused:
        layers_of_stages(pattern, v_shape(2), split)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
