"""Sliced microbatches: losses and gradients equal unsliced ones and 1F1B to rounding."""

import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mcore.farm import Farm, Train
from mcore.parity import TWO, UNTIED, assert_same_training, gradients_by_parameter
from mcore.rejections import megatron_choices
from mcore.test_memory import FLAGS, memory_figures
from megatron.core.enums import Fp8Recipe
from torch import Tensor

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
from megatron_vshape.mcore.setup.run_config import ScheduleChoice, Settings
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

GROUPED = {"num_query_groups": 2}
PER_TOKEN = {"calculate_per_token_loss": True}


def case(schedule: str, slices: int, **options: Any) -> dict[str, Any]:
    """Return a case of `sliced_steps`: 4 layers on 2 pipeline ranks, unless it has others."""
    config = {"num_layers": 4} | options.pop("config", {})
    return {"schedule": schedule, "options": {"slices": slices}, "config": config} | options


CASES = {
    "v-zb": case("v-zb", 4),
    "1f1b, grouped queries, ragged": case("1f1b", 2, ragged=True, config=GROUPED | PER_TOKEN),
    "one slice": case("v-half", 1),
    "learned positions": case("zb-h1", 4, position="learned_absolute"),
    "given mask, recompute": case("v-min", 4, mask=True, config=CORE),
    "experts": case("v-zb", 4, config=EXPERTS),
    "further tokens": case("v-zb", 4, predicting=2, ragged=True),
}

MORE = {
    f"{name}, {slices}": case(name, slices, ranks=4, config={"num_layers": 8})
    for name in NAMES
    for slices in (1, 2, 4, 8)
    if slices > 1 or name not in MEGATRONS_OWN  # a library runs them without this package
} | {
    "tensor-parallel": case("v-zb", 2, tensor=2),
    "grouped, tensor-parallel": case("v-half", 4, tensor=2, config=GROUPED),
    "recompute": case("v-zb", 4, config=FULL),
    "window": case("v-zb", 4, config={"window_size": [5, 0]}),
    "ragged": case("v-half", 4, ragged=True),
    "per token": case("v-half", 4, ragged=True, config=PER_TOKEN),
    "one slice of experts": case("v-half", 1, config=EXPERTS),
    "experts per token": case("v-half", 2, config=EXPERTS | PER_TOKEN),
    "sequences": case("v-half", 2, config=SEQUENCES),
    "sequences per token": case("1f1b", 4, config=SEQUENCES | PER_TOKEN),
    "global": case("v-zb", 4, config=GLOBAL),
    "experts, tensor-parallel": case("v-zb", 2, tensor=2, config=EXPERTS),
    "further tokens per token": case("zb-h1", 4, predicting=2, ragged=True, config=PER_TOKEN),
    "further tokens, tensor-parallel, recompute": case(
        "v-half", 2, predicting=1, tensor=2, config=FULL
    ),
    "further tokens of experts": case("v-half", 2, predicting=1, config=EXPERTS),
}

MUTANTS = {name: case("v-zb", 4, mutant=name) for name in ("stale", "lost", "early")} | {
    "balanced apart": case("v-zb", 4, mutant="balanced apart", config=EXPERTS),
    "tokens apart": case("v-zb", 4, mutant="tokens apart", predicting=1),
}

Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def run_case(farm: Farm) -> Callable[..., Records]:
    """Return a function that runs a case, and runs without this package once for each model."""
    stock_runs: dict[str, Records] = {}

    def run(options: dict[str, Any], pipeline: int = 0, stock: bool = False) -> Records:
        ranks = (pipeline or options.get("ranks", 2)) * options.get("tensor", 1)
        if not stock:
            return farm.run(ranks, plugin="sliced_steps", argument=options).check().records
        argument = options | {"schedule": None, "options": {}}
        argument.pop("mutant", None)
        key = f"{ranks} {argument}"
        if key not in stock_runs:
            run = farm.run(ranks, plugin="sliced_steps", argument=argument)
            stock_runs[key] = run.check().records
        return stock_runs[key]

    return run


def losses_of(ranks: Records) -> list[float]:
    return next(rank["losses"] for rank in ranks if rank["losses"])


def balance_of(ranks: Records) -> dict[str, Tensor]:
    """Return the further losses of all ranks together."""
    totals: dict[str, Tensor] = {}
    for rank in ranks:
        for name, values in rank["balance"].items():
            totals[name] = totals.get(name, torch.tensor(0.0)) + values
    return totals


def gradient_difference(ranks: Records, expected_ranks: Records) -> float:
    """Return the largest difference of gradients, as a share of the largest gradient."""
    gradients, expected = map(gradients_by_parameter, (ranks, expected_ranks))
    assert gradients.keys() == expected.keys()
    largest = max(value.abs().max() for value in expected.values())
    differences = [(gradients[key] - value).abs().max() for key, value in expected.items()]
    return float(max(differences) / largest)


def check_case(run_case: Callable[..., Records], name: str, options: dict[str, Any]) -> None:
    """Compare with Megatron without a pipeline, and with its 1F1B."""
    ranks = run_case(options)
    assert sum(rank["kept"] for rank in ranks) == 0
    max_difference = 0.0 if options["options"]["slices"] == 1 else MOST
    if name == "global":  # Megatron computes that mean in 32 bits
        max_difference = 1e-6
    for pipeline in (1, 0):
        expected = run_case(options, pipeline, stock=True)
        assert gradient_difference(ranks, expected) <= max_difference
        assert losses_of(ranks) == pytest.approx(losses_of(expected), rel=MOST)
        balance, expected_balance = balance_of(ranks), balance_of(expected)
        assert balance.keys() == expected_balance.keys()
        for key, values in expected_balance.items():
            differences = (balance[key] - values).abs() / values.abs().clamp(min=1e-3)
            assert differences.max() <= 1e-6, key


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_sliced_gradients_and_losses_equal_unsliced(
    run_case: Callable[..., Records], name: str
) -> None:
    """Equal to rounding; one slice on the same path is bitwise equal."""
    check_case(run_case, name, (CASES | MORE)[name])


@pytest.mark.parametrize("name", MUTANTS)
def test_faults_between_slices_are_detected(run_case: Callable[..., Records], name: str) -> None:
    options = MUTANTS[name]
    expected = run_case(options, pipeline=1, stock=True)
    assert gradient_difference(run_case(options), expected) > 1e-3


def test_slices_out_of_turn_end_the_run(farm: Farm) -> None:
    """Later slices have no call to slice."""
    run = farm.run(2, plugin="sliced_steps", argument=case("v-zb", 4, mutant="out of turn"))
    assert run.codes == [1, 1]
    assert any("KeyError" in text for text in run.output)


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
    choice = resolve_schedule(package_options, 2)
    choice = check_features(Settings(Namespace(seq_length=48), choice, package_options))
    assert choice.slices == (1, 2, 4, 8)
    schedule = Planner(choice).plan_step(2).schedule
    assert (schedule.slices, schedule.num_microbatches) == (chosen, 2 * chosen)


def test_auto_searches_only_valid_slice_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    package_options = auto_options(tmp_path, 1.0)
    choice = resolve_schedule(package_options, 2)

    def checked(**model: object) -> ScheduleChoice:
        return check_features(Settings(Namespace(**model), choice, package_options))

    parts = {"sequence_parallel": True, "tensor_model_parallel_size": 2}
    assert checked(seq_length=24, **parts).slices == (1, 2, 4)
    planner = Planner(checked())
    planner.narrow_slices((1, 2))
    assert planner.plan_step(2).schedule.slices == 2
    caplog.set_level("INFO")
    assert checked(context_parallel_size=2).slices == 1
    assert "microbatches stay whole: --pipeline-slices does not work with" in caplog.text


def test_planned_run_uses_one_slice_count(tmp_path: Path) -> None:
    package_options = auto_options(tmp_path, 1.0, slices=4)
    assert Planner(resolve_schedule(package_options, 2)).plan_step(2).schedule.slices == 4
    file = tmp_path / "mine.json"
    file.write_text(make("v-zb", 2, 3, slices=4).to_json())
    assert resolve_schedule(slice_options(schedule=str(file), slices="auto"), 2).slices == 4
    assert options_in("schedule=auto,slices=auto") == {"schedule": "auto", "slices": "auto"}


class Plain(torch.nn.Module):
    def forward(self, input_ids: Tensor, labels: Any = None) -> Tensor:
        return input_ids


@pytest.mark.parametrize(
    ("change", "inputs", "message"),
    [
        (1, {}, "must call the model once and return its"),
        (0, {"labels": torch.zeros(1, 6)}, r"cannot slice labels, \(1, 6\), with which"),
        (0, {"labels": "whole"}, "cannot slice labels, str, with which the model was called for 8"),
    ],
)
def test_forward_steps_that_cannot_be_sliced_are_rejected(
    change: int, inputs: dict[str, Any], message: str
) -> None:
    def step(iterator: Any, model: Any) -> Any:
        output = model(torch.zeros(1, 8), **inputs)
        return output + 1 if change else output, None

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
