"""Sliced microbatches: losses and gradients equal unsliced ones and 1F1B to rounding."""

import json
import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mcore.farm import Farm, Train
from mcore.parity import TWO, UNTIED, assert_same_training
from mcore.rejections import megatron_choices
from mcore.test_memory import FLAGS, memory_figures
from megatron.core.enums import Fp8Recipe

from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.paper.catalogue import NAMES, make
from megatron_vshape.core.schedule_names import MEGATRONS_OWN
from megatron_vshape.mcore.features.slices import check_slices
from megatron_vshape.mcore.features.slices import router as sliced_router
from megatron_vshape.mcore.features.slices.attention import KeysValues
from megatron_vshape.mcore.features.slices.step import Slices
from megatron_vshape.mcore.options import Options, options_in
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.setup.choice import check_features, resolve_schedule
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.setup.run_config import Settings
from megatron_vshape.mcore.step_state import TokenRange

MOST = 1e-12
"""Maximum difference in 64 bits, of gradients as a share of the largest."""

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}

EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_router_dtype": "fp64",
    "add_bias_linear": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_aux_loss_coeff": 1.0,
    "moe_z_loss_coeff": 0.5,
}
SEQUENCES = EXPERTS | {"moe_router_load_balancing_type": "seq_aux_loss"}
GLOBAL = EXPERTS | {
    "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [1.0, 2.0],
}

CASES: dict[str, dict[str, Any]] = {
    "v-zb": {"schedule": "v-zb", "slices": 4},
    "1f1b, grouped queries, ragged": {
        "schedule": "1f1b",
        "slices": 2,
        "groups": 2,
        "ragged": True,
        "per_token": True,
    },
    "one slice": {"schedule": "v-half", "slices": 1},
    "learned positions": {"schedule": "zb-h1", "slices": 4, "position": "learned_absolute"},
    "given mask, recompute": {"schedule": "v-min", "slices": 4, "mask": True, "recompute": CORE},
    "experts": {"schedule": "v-zb", "slices": 4, "experts": EXPERTS},
    "further tokens": {"schedule": "v-zb", "slices": 4, "predicting": 2, "ragged": True},
}

MORE: dict[str, dict[str, Any]] = {
    f"{name}, {slices}": {"schedule": name, "slices": slices, "ranks": 4, "layers": 8}
    for name in NAMES
    for slices in (1, 2, 4, 8)
    if slices > 1 or name not in MEGATRONS_OWN  # a library runs them without this package
} | {
    "tensor-parallel": {"schedule": "v-zb", "slices": 2, "tensor": 2},
    "grouped, tensor-parallel": {"schedule": "v-half", "slices": 4, "tensor": 2, "groups": 2},
    "recompute": {"schedule": "v-zb", "slices": 4, "recompute": FULL},
    "window": {"schedule": "v-zb", "slices": 4, "window": [5, 0]},
    "ragged": {"schedule": "v-half", "slices": 4, "ragged": True},
    "per token": {"schedule": "v-half", "slices": 4, "ragged": True, "per_token": True},
    "one slice of experts": {"schedule": "v-half", "slices": 1, "experts": EXPERTS},
    "experts per token": {
        "schedule": "v-half",
        "slices": 2,
        "per_token": True,
        "experts": EXPERTS,
    },
    "sequences": {"schedule": "v-half", "slices": 2, "experts": SEQUENCES},
    "sequences per token": {
        "schedule": "1f1b",
        "slices": 4,
        "per_token": True,
        "experts": SEQUENCES,
    },
    "global": {"schedule": "v-zb", "slices": 4, "experts": GLOBAL},
    "experts, tensor-parallel": {"schedule": "v-zb", "slices": 2, "tensor": 2, "experts": EXPERTS},
    "further tokens per token": {
        "schedule": "zb-h1",
        "slices": 4,
        "predicting": 2,
        "ragged": True,
        "per_token": True,
    },
    "further tokens, tensor-parallel, recompute": {
        "schedule": "v-half",
        "slices": 2,
        "predicting": 1,
        "tensor": 2,
        "recompute": FULL,
    },
    "further tokens of experts": {
        "schedule": "v-half",
        "slices": 2,
        "predicting": 1,
        "experts": EXPERTS,
    },
}

MUTANTS = {
    name: {"schedule": "v-zb", "slices": 4, "mutant": name}
    for name in ("stale", "lost", "early", "out of turn")
} | {
    "balanced apart": {
        "schedule": "v-zb",
        "slices": 4,
        "experts": EXPERTS,
        "mutant": "balanced apart",
    },
    "tokens apart": {"schedule": "v-zb", "slices": 4, "predicting": 1, "mutant": "tokens apart"},
}


def run_cases(farm: Farm, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the reports of `sliced_steps` for these cases."""
    (text,) = farm.run(1, plugin="sliced_steps", given=cases, timeout_s=1800).check().output
    reports = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert [report["case"] for report in reports] == list(cases)
    return {report["case"]: report for report in reports}


def assert_equal(reports: dict[str, dict[str, Any]], slices: dict[str, int]) -> None:
    for name, report in reports.items():
        for against in ("whole", "1f1b"):
            difference = report[against]
            assert "error" not in difference, (name, difference["error"])
            assert difference["kept"] == 0, name
            max_difference = 0 if slices[name] == 1 else MOST
            if name == "global":  # Megatron computes that mean in 32 bits
                max_difference = 1e-6
            assert difference["gradients"] <= max_difference, (name, against, difference)
            assert difference["losses"] <= MOST, (name, against, difference)
            assert difference["balance"] <= 1e-6, (name, against, difference)


@pytest.fixture(scope="module")
def reports(farm: Farm) -> dict[str, dict[str, Any]]:
    return run_cases(farm, CASES | MUTANTS)


def test_sliced_gradients_and_losses_equal_unsliced(
    reports: dict[str, dict[str, Any]],
) -> None:
    """Equal to rounding; one slice on the same path is bitwise equal."""
    case_reports = {name: reports[name] for name in CASES}
    assert_equal(case_reports, {name: case["slices"] for name, case in CASES.items()})


def test_gradients_of_keys_and_values_are_summed_in_one_buffer() -> None:
    """In 32 bits, bitwise equal to one sum per slice, without another copy."""
    count, slice_tokens = 4, 3
    total = count * slice_tokens
    keys_values = KeysValues([torch.empty(slice_tokens, 1, 2, 5, dtype=torch.bfloat16)], total)
    drawn = [
        torch.randn(end, 1, 2, 5).bfloat16() for end in range(slice_tokens, total + 1, slice_tokens)
    ]
    gradients, buffers = [], set()
    for index in reversed(range(count)):
        (gradient,) = keys_values.add(
            TokenRange(0, index * slice_tokens, (index + 1) * slice_tokens, total), [drawn[index]]
        )
        gradients.insert(0, gradient)
        buffers.add((keys_values.gradients[0].data_ptr(), keys_values.gradients[0].shape[0]))
    assert buffers == {(keys_values.gradients[0].data_ptr(), total - slice_tokens)}
    assert keys_values.gradients[0].dtype == torch.float32
    for index, gradient in enumerate(gradients):
        expected = torch.zeros(slice_tokens, 1, 2, 5)
        for later in reversed(drawn[index:]):
            expected += later[index * slice_tokens : (index + 1) * slice_tokens].float()
        assert torch.equal(gradient, expected.bfloat16())
        assert gradient.untyped_storage().nbytes() == gradient.nbytes


@pytest.mark.slow
def test_every_named_schedule_and_option(farm: Farm) -> None:
    slices = {name: case["slices"] for name, case in MORE.items()}
    assert_equal(run_cases(farm, MORE), slices)


def test_faults_between_slices_are_detected(reports: dict[str, dict[str, Any]]) -> None:
    for name in MUTANTS:
        difference = reports[name]["whole"]
        if name == "out of turn":  # later slices have no call to slice
            assert "KeyError" in difference["error"]
        else:
            assert difference["gradients"] > 1e-3, (name, difference)


@pytest.mark.slow
def test_planned_slices_train_like_1f1b(train: Train, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(Costs.uniform(4, 8, 100, 120, 90, 5, host=1.0).to_json())
    megatron_run = train(4, "--pipeline-schedule", "1f1b", *TWO.split(), UNTIED)
    planned = ("--pipeline-schedule", "auto", "--pipeline-costs", str(file))
    package_run = train(4, *planned, "--pipeline-slices", "auto", *TWO.split(), UNTIED)
    assert_same_training(package_run, megatron_run)
    # 2 and 4 slices differ by 0.3% here
    assert any(re.search(r" microbatches of [24] slices", text) for text in package_run.output)


GIVEN = {
    "context_parallel_size": 2,
    "moe_expert_capacity_factor": 1.0,
    "save_dgrads_interval": 2,
    "save_activations_interval": 2,
    "save_tokens_per_expert_interval": 2,
    "mtp_use_repeated_layer": True,
    "mtp_hsm": True,
    "cuda_graph_impl": "transformer_engine",
    "variable_seq_lengths": True,
    "hybrid_layer_pattern": "M*-",
    "reset_attention_mask": True,
    "moe_enable_routing_replay": True,
    "use_routing_replay": True,
}


@pytest.mark.parametrize("name", GIVEN)
def test_options_unsupported_with_slices_are_rejected(name: str) -> None:
    check_slices(1, Namespace(**{name: GIVEN[name]}))
    with pytest.raises(UnsupportedError, match="--pipeline-slices does not work with "):
        check_slices(2, Namespace(**{name: GIVEN[name]}))


FULL_RECOMPUTE = {"recompute_granularity": "full"}


def selective_recompute(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


@pytest.mark.parametrize("recipe", ["delayed", Fp8Recipe.delayed, None, "custom"])
@pytest.mark.parametrize("recompute", [FULL_RECOMPUTE, selective_recompute("core_attn", "mlp")])
def test_delayed_fp8_scaling_of_recomputed_layers_is_rejected(
    recipe: Any, recompute: dict[str, Any]
) -> None:
    options = Namespace(fp8="hybrid", fp8_recipe=recipe, **recompute)
    with pytest.raises(UnsupportedError, match="--fp8-recipe delayed or custom with recomp"):
        check_slices(2, options)


@pytest.mark.parametrize(
    "options",
    [
        {"fp8": None, "fp8_recipe": "delayed"} | FULL_RECOMPUTE,
        {"fp8": "hybrid", "fp8_recipe": "tensorwise"} | FULL_RECOMPUTE,
        {"fp8": "hybrid", "fp8_recipe": "delayed"} | selective_recompute("core_attn"),
        {"fp8": "hybrid", "fp8_recipe": "delayed", "recompute_granularity": None},
    ],
)
def test_other_fp8_scaling_and_recompute_are_supported(options: dict[str, Any]) -> None:
    check_slices(2, Namespace(**options))


SUPPORTED_BALANCING = {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"}
"""Types whose losses are sums over tokens, which the slices of a microbatch add up."""
REJECTED_BALANCING = {"sinkhorn", "quantile_balancing"}


@pytest.mark.parametrize("value", sorted(REJECTED_BALANCING))
@pytest.mark.parametrize("is_list", [False, True])
def test_balancing_per_call_is_rejected(value: str, is_list: bool) -> None:
    options = Namespace(moe_router_load_balancing_type=["aux_loss", value] if is_list else value)
    text = f"--moe-router-load-balancing-type .*{value}.*: it would be computed per slice"
    with pytest.raises(UnsupportedError, match=text):
        check_slices(2, options)


def test_all_balancing_types_of_megatron_are_reviewed() -> None:
    """A new type is rejected or supported only after a review of its statistics."""
    choices = set(megatron_choices("--moe-router-load-balancing-type"))
    assert choices <= SUPPORTED_BALANCING | REJECTED_BALANCING
    for value in SUPPORTED_BALANCING:
        check_slices(2, Namespace(moe_router_load_balancing_type=value))


@pytest.mark.parametrize("pattern", ["*-|*E/*-", None])
def test_plain_model_is_accepted(pattern: str | None) -> None:
    plain = {"context_parallel_size": 1, "num_experts": None, "cuda_graph_impl": "none"}
    plain |= {"hybrid_layer_pattern": pattern}
    supported_arguments = {"position_embedding_type": "rope", "mtp_num_layers": 2}
    check_slices(4, Namespace(seq_length=4096, **supported_arguments, **plain))


@pytest.mark.parametrize(
    ("slices", "length", "tensor", "message"),
    [
        (3, 32, 1, "3 does not divide 32 tokens into equal slices. Use --pipeline-slices 2"),
        (
            16,
            32,
            4,
            "16 does not divide 32 tokens into equal slices, each a multiple of 4 tensor-parallel "
            "ranks. Use --pipeline-slices 8",
        ),
    ],
)
def test_slices_must_have_equal_lengths(
    slices: int, length: int, tensor: int, message: str
) -> None:
    options = Namespace(
        seq_length=length, tensor_model_parallel_size=tensor, sequence_parallel=tensor > 1
    )
    with pytest.raises(UnsupportedError) as error:
        check_slices(slices, options)
    assert str(error.value) == f"--pipeline-slices {message}"


def slice_options(**settings: Any) -> Options:
    return Options(**{"schedule": "v-zb", "timeout_seconds": 9.0, "slices": 4} | settings)


def test_schedule_file_defines_its_slices(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(make("v-zb", 2, 3, slices=4).to_json())
    choice = resolve_schedule(slice_options(schedule=str(file), slices=1), 2)
    assert (choice.slices, Planner(choice).plan_step(3).schedule.num_microbatches) == (4, 12)
    with pytest.raises(ScheduleError, match="has 4 slices per microbatch, not the 2 of"):
        resolve_schedule(slice_options(schedule=str(file), slices=2), 2)
    with pytest.raises(ScheduleError, match="is for 3 microbatches, this run has 12 in a step"):
        Planner(choice).plan_step(12)


def test_named_schedule_rejects_automatic_slices() -> None:
    with pytest.raises(ScheduleError, match="auto requires --pipeline-schedule auto: with v-zb"):
        resolve_schedule(slice_options(slices="auto"), 2)


def auto_options(tmp_path: Path, host: float, **settings: Any) -> Options:
    """Return the options of a planned run with `host` microseconds of launch overhead per pass."""
    file = tmp_path / "costs.json"
    file.write_text(Costs.uniform(2, 4, 100, 120, 90, 5, host=host).to_json())
    return slice_options(
        **{"schedule": "auto", "slices": "auto", "costs_file": str(file)} | settings
    )


@pytest.mark.parametrize(("host", "chosen"), [(1.0, 4), (60.0, 1)])
def test_auto_chooses_slices_for_a_run(tmp_path: Path, host: float, chosen: int) -> None:
    package_options = auto_options(tmp_path, host)
    choice = check_features(
        Settings(Namespace(seq_length=48), resolve_schedule(package_options, 2), package_options)
    )
    assert choice.slices == (1, 2, 4, 8)
    schedule = Planner(choice).plan_step(2).schedule
    assert (schedule.slices, schedule.num_microbatches) == (chosen, 2 * chosen)


def test_auto_searches_only_valid_slice_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    package_options = auto_options(tmp_path, 1.0)
    choice = resolve_schedule(package_options, 2)
    parts = {"sequence_parallel": True, "tensor_model_parallel_size": 2}
    assert check_features(
        Settings(Namespace(seq_length=24, **parts), choice, package_options)
    ).slices == (1, 2, 4)
    planner = Planner(check_features(Settings(Namespace(), choice, package_options)))
    planner.narrow_slices((1, 2))
    assert planner.plan_step(2).schedule.slices == 2
    caplog.set_level("INFO")
    assert (
        check_features(Settings(Namespace(context_parallel_size=2), choice, package_options)).slices
        == 1
    )
    assert "microbatches stay whole: --pipeline-slices does not work with" in caplog.text


def test_planned_run_uses_one_slice_count(tmp_path: Path) -> None:
    package_options = auto_options(tmp_path, 1.0, slices=4)
    assert Planner(resolve_schedule(package_options, 2)).plan_step(2).schedule.slices == 4
    file = tmp_path / "mine.json"
    file.write_text(make("v-zb", 2, 3, slices=4).to_json())
    assert resolve_schedule(slice_options(schedule=str(file), slices="auto"), 2).slices == 4
    assert options_in("schedule=auto,slices=auto") == {"schedule": "auto", "slices": "auto"}


def test_forward_step_must_return_the_model_output() -> None:
    def step(iterator: Any, model: Any) -> Any:
        return model(torch.zeros(1, 8)) + 1, None

    with pytest.raises(UnsupportedError, match="must call the model once and return its"):
        Slices(2, 8).forward(0, False, 0, step)(None, Plain())


class Plain(torch.nn.Module):
    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> torch.Tensor:
        return input_ids


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"labels": torch.zeros(1, 6)}, r"cannot slice labels, \(1, 6\), with which"),
        ({"labels": "whole"}, "cannot slice labels, str, with which the model was called for 8 "),
    ],
)
def test_inputs_that_cannot_be_sliced_are_rejected(inputs: dict[str, Any], message: str) -> None:
    def step(iterator: Any, model: Any) -> Any:
        return model(torch.zeros(1, 8), **inputs), None

    with pytest.raises(UnsupportedError, match=message):
        Slices(2, 8).forward(0, False, 0, step)(None, Plain())


@pytest.mark.parametrize("slices", ["4", *(pytest.param(k, marks=pytest.mark.slow) for k in "128")])
def test_live_memory_equals_the_planned_memory(farm: Farm, slices: str) -> None:
    """Including the keys, values and gradients shared between slices."""
    sizes = ("--hidden-size", "64", "--seq-length", "64", "--max-position-embeddings", "64")
    few = ("--global-batch-size", "8", "--vocab-size", "2047", "--pipeline-slices", slices)
    flags = (*FLAGS, *sizes, *few)
    run = farm.run(4, *flags, "--pipeline-schedule", "v-zb", live=True).check()
    _, predicted = memory_figures(run)
    message_bytes = 64 // int(slices) * 64 * 4
    for record, activations_mib in zip(run.records, predicted, strict=True):
        model = activations_mib * 2**20 + (record["most_posted"] + 1) * message_bytes
        assert record["live_bytes"] == pytest.approx(model, rel=0.05)
        assert record["left_bytes"] <= 8 * message_bytes + 48_000  # of gloo and of the reports


def test_recomputed_load_balancing_loss_is_rejected() -> None:
    """Recomputation computes the loss in the backward, before other slices' tokens are known."""
    router = SimpleNamespace(
        config=SimpleNamespace(recompute_granularity="full", recompute_modules=None),
        is_aux_loss_enabled=lambda: True,
    )
    with pytest.raises(UnsupportedError, match="a load-balancing loss and --recompute"):
        sliced_router._check_router(router)
    router.is_aux_loss_enabled = lambda: False
    sliced_router._check_router(router)
