"""What backwards compute again, set per stage: the same numbers from less memory."""

import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mcore.conftest import UNTIED
from mcore.farm import Ended, Farm
from mcore.test_composition import EXPERT_PARALLEL
from mcore.test_memory import figures
from mcore.test_offload import STEPS, assert_same_bits, trained
from mcore.test_training import losses
from offloaded import every_third, offloaded
from torch import nn

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.setup import recompute_checks
from megatron_vshape.mcore.setup.recompute import Recompute
from megatron_vshape.mcore.setup.recompute_checks import check_copies, check_recompute

Train = Callable[..., Ended]

NO_BIAS = ("--disable-bias-linear", UNTIED)
MIXED = ("none", "mlp", "full", "core_attn", "core_attn,mlp", "full", "mlp", "none")


@pytest.mark.parametrize("name", ["v-half", "1f1b-v"])
def test_settings_by_stage_change_no_bit(
    train: Train, farm: Farm, tmp_path: Path, name: str
) -> None:
    theirs = train(4, "--pipeline-schedule", name, *STEPS, *NO_BIAS)
    schedule = replace(make(name, 4, 8), recompute=MIXED)
    ours = trained(farm, tmp_path, schedule, *STEPS, *NO_BIAS)
    assert_same_bits(ours, theirs)
    assert f"recomputation by stage: {', '.join(MIXED)}" in ours.output[0]
    measured, predicted = figures(ours)
    assert measured == pytest.approx(predicted, rel=0.05)
    assert sum(measured) < sum(figures(theirs)[0])


def test_settings_beside_a_shared_vocabulary(train: Train, farm: Farm, tmp_path: Path) -> None:
    flags = (*STEPS, *NO_BIAS, "--pipeline-vocab-parallel")
    theirs = train(2, "--pipeline-schedule", "v-half", *flags)
    schedule = replace(make("v-half", 2, 8), recompute=("mlp", "full", "none", "core_attn"))
    assert_same_bits(trained(farm, tmp_path, schedule, *flags, ranks=2), theirs)


@pytest.mark.parametrize("name", ["1f1b-v", pytest.param("zb-h1", marks=pytest.mark.slow)])
def test_what_there_is_room_for_is_not_computed_again(
    train: Train, farm: Farm, tmp_path: Path, name: str
) -> None:
    """By the costs' prices, within the memory of the device that holds most: Megatron's bits."""
    stages = len(make(name, 2, 8).placement)
    each, held = (100.0,) * stages, (1e5,) * stages
    own = Costs(each, each, each, 5.0, held, held, (8 // stages,) * stages)
    own = own.having(whole_backward_us=(200.0,) * stages, whole_work_bytes=(1e4,) * stages)
    prices = {
        "whole_backward_us": (300.0,) * stages,
        "backward_us": (200.0,) * stages,
        "held_after_forward_bytes": (1e4,) * stages,
        "whole_work_bytes": (6e4,) * stages,
    }
    file = tmp_path / "costs.json"
    file.write_text(replace(own, recompute=(("full", own.with_prices("full", prices)),)).to_json())
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    flags = (*STEPS, UNTIED, *full.split())
    theirs = train(2, *flags)
    given = ("--pipeline-schedule", name, "--pipeline-costs", str(file))
    ours = farm.run(2, *given, *flags).check()
    assert losses(ours) == losses(theirs)
    mine, yours = ours.merged("parameters"), theirs.merged("parameters")
    assert [each for each in yours if not torch.equal(mine[each], yours[each])] == []
    (line,) = re.findall(r"recomputation by stage: (.*)", ours.output[0])
    assert "full_but_last (--recompute-granularity: only where memory is short" in line
    assert line.startswith("full, ")


@pytest.mark.slow
def test_settings_beside_experts_and_copies(train: Train, farm: Farm, tmp_path: Path) -> None:
    flags = (*STEPS, "--pipeline-model-parallel-size", "2", *EXPERT_PARALLEL.split())
    flags = (*flags, "--global-batch-size", "16")  # twice data-parallel
    theirs = train(4, "--pipeline-schedule", "v-half", *flags)
    schedule = offloaded(make("v-half", 2, 8), every_third)
    schedule = replace(schedule, recompute=("moe", "full", "none", "core_attn,moe"))
    assert_same_bits(trained(farm, tmp_path, schedule, *flags), theirs)


@pytest.mark.slow
def test_the_plans_settings_win_over_the_flags(train: Train, farm: Farm, tmp_path: Path) -> None:
    flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    schedule = replace(make("v-half", 2, 8), recompute=("none",) * 4)
    steps = (*STEPS, *NO_BIAS)
    theirs = train(2, "--pipeline-schedule", "v-half", *steps)
    ours = trained(farm, tmp_path, schedule, *steps, *flags.split(), ranks=2)
    assert_same_bits(ours, theirs)
    assert figures(ours)[0] == pytest.approx(figures(theirs)[0], rel=1e-3)
    assert "backward passes are not split" not in ours.output[0]


def test_a_stage_that_has_nothing_of_the_kind_ends_all_ranks(farm: Farm, tmp_path: Path) -> None:
    file = tmp_path / "schedule.json"
    file.write_text(
        replace(make("v-half", 2, 8), recompute=("none", "none", "moe", "none")).to_json()
    )
    run = farm.run(2, "--pipeline-schedule", str(file), UNTIED)
    assert run.codes == [1, 1]
    assert "stage 2 is to recompute moe, which none of its layers supports" in run.output[0]


def model(**options: Any) -> Namespace:
    return Namespace(**{"add_bias_linear": False, "fp8": None, "moe_grouped_gemm": True} | options)


@pytest.mark.parametrize(
    ("setting", "options", "why"),
    [
        ("mlp", {"add_bias_linear": True}, "recomputes mlp, which requires --disable-bias-linear"),
        ("moe_act", {"moe_grouped_gemm": False}, "moe_act, which only grouped experts have"),
        ("layernorm", {"fp8": "hybrid"}, "layernorm, which FP8 and FP4 support only for all"),
        ("mlp,moe_act", {"fp4": "e2m1"}, "moe_act, which FP8 and FP4 support only for all"),
        (
            "shared_experts",
            {"moe_shared_expert_overlap": True},
            "shared_experts, which excludes overlap: remove --moe-shared-expert-over",
        ),
    ],
)
def test_what_a_model_cannot_compute_again_is_refused(
    monkeypatch: pytest.MonkeyPatch, setting: str, options: dict[str, Any], why: str
) -> None:
    monkeypatch.setattr(recompute_checks, "has_transformer_engine", lambda: True)
    check_recompute(("none", setting, "full"), model(), "plan.json")
    with pytest.raises(UnsupportedError, match=why):
        check_recompute(("none", setting), model(**options), "plan.json")


def test_what_graphs_have_captured_is_left_alone() -> None:
    options = model(cuda_graph_impl="transformer_engine")
    check_recompute(("none", "none"), options, "plan.json")
    with pytest.raises(
        UnsupportedError, match="recomputes by stage, which CUDA graphs do not support"
    ):
        check_recompute(("none", "core_attn"), options, "plan.json")
    check_copies(True, model(), "plan.json")
    check_copies(False, options, "plan.json")
    with pytest.raises(UnsupportedError, match="offloads activations, which CUDA graphs do not"):
        check_copies(True, options, "plan.json")


def test_discarded_outputs_need_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute_checks, "has_transformer_engine", lambda: False)
    with pytest.raises(
        UnsupportedError, match="recomputes layernorm, .* is not installed: install"
    ):
        check_recompute(("core_attn,layernorm",), model(), "plan.json")


def test_a_module_that_megatron_has_not_is_named() -> None:
    with pytest.raises(
        ScheduleError, match="recompute has 'mlps'; a setting is none, full, full_b"
    ):
        check_recompute(("mlps",), model(), "plan.json")


class TransformerBlock(nn.Module):
    """Goes by the name of Megatron's."""

    def __init__(self, config: Namespace, layers: list[nn.Module]) -> None:
        super().__init__()
        self.config, self.layers = config, nn.ModuleList(layers)


class Layer(nn.Module):
    """Has the switches of a layer that was built to compute its norms again."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.pre_mlp_layernorm = nn.LayerNorm(2), IdentityOp()
        self.recompute_input_layernorm, self.recompute_pre_mlp_layernorm = True, False
        self.recompute_mlp = self.is_moe_layer = False


class IdentityOp(nn.Module):
    """Goes by the name of Megatron's."""


def test_each_stack_has_a_config_of_its_own_and_goes_back_to_it() -> None:
    config = Namespace(recompute_granularity="selective", recompute_method=None)
    stacks = [TransformerBlock(config, [Layer(), Layer()]) for _ in range(2)]
    one, other = map(Recompute, stacks)
    first = stacks[0].layers[0]

    def switched() -> tuple[bool, ...]:
        assert isinstance(first, Layer)
        switches = first.recompute_input_layernorm, first.recompute_pre_mlp_layernorm
        return *switches, first.recompute_mlp

    one.set("full")
    assert stacks[0].config.recompute_granularity == "full"
    assert stacks[1].config is config
    assert switched() == (False, False, False)
    one.set("full_but_last")
    config_of = stacks[0].config
    assert (config_of.recompute_method, config_of.recompute_num_layers) == ("block", 1)
    one.set("layernorm,mlp")
    assert stacks[0].config.recompute_granularity is None
    assert switched() == (True, False, True)
    one.set("none")
    assert switched() == (False, False, False)
    one.set(None)
    assert stacks[0].config is config
    assert switched() == (True, False, False)
    other.set("none")
    with pytest.raises(
        UnsupportedError, match="^stage 3 is to recompute moe_act, which none of its"
    ):
        other.set("moe_act", "stage 3")
