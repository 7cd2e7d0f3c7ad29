"""Router replay: recorded and replayed routing choices reach the right layer and microbatch.

`router_replay_utils` sorts and gathers like verl: by Megatron's get_schedule_table, imported by
name, and by the placement of Megatron's interleaved schedule.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from mcore.farm import Farm
from mcore.parity import assert_close_tensors, join_rows
from megatron.core.pipeline_parallel import schedules

import megatron_vshape
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.mcore.frameworks.verl import FRAMEWORK, moe_layers_of_stages
from megatron_vshape.mcore.hooks import session as hooks
from megatron_vshape.mcore.hooks.session import Session
from megatron_vshape.mcore.layout.stage_map import StageMap
from megatron_vshape.mcore.refusals import UnsupportedError

V_HALF: Any = SimpleNamespace(stage_map=StageMap((0, 1, 1, 0), (2, 2, 2, 2)))
SIZES = (4, 2, 2)  # microbatches, chunks, microbatches per group


@pytest.fixture
def client() -> Iterator[ModuleType]:
    """Return a module that imported the function before the schedules were registered."""
    megatron_vshape.unregister()
    module: Any = ModuleType("a_client")
    module.get_schedule_table = schedules.get_schedule_table
    sys.modules["a_client"] = module
    megatron_vshape.register()
    yield module
    megatron_vshape.unregister()
    del sys.modules["a_client"]


def test_imported_function_uses_megatrons_order_without_a_schedule(
    client: ModuleType,
) -> None:
    assert client.get_schedule_table is schedules.get_schedule_table
    assert client.get_schedule_table.__wrapped__ is not client.get_schedule_table
    assert client.get_schedule_table(*SIZES)[:4] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_sorting_before_the_step_that_records_is_rejected() -> None:
    session = Session(pipeline=V_HALF)
    table = hooks.get_schedule_table(session, lambda *sizes: list(sizes))
    with pytest.raises(UnsupportedError, match="the last step had 0 forward calls"):
        table(*SIZES)
    session.pipeline = SimpleNamespace(stage_map=StageMap((0, 1, 1, 0), (3, 3, 2, 0)))
    with pytest.raises(UnsupportedError, match="stages 3 of layer split 3,3,2,0 have no layers"):
        table(*SIZES)
    assert table(4, 1, 2) == [4, 1, 2]  # one chunk runs microbatches in order
    session.training.is_capturing = True
    assert table(*SIZES) == list(SIZES)


def test_dense_layers_have_no_choices() -> None:
    config = SimpleNamespace(moe_layer_freq=2)
    assert moe_layers_of_stages(config, (1, 2, 3, 2)) == [1, 1, 1, 1]
    config.moe_layer_freq = [0, 0, 0, 1, 1, 1, 1, 1]
    assert moe_layers_of_stages(config, (1, 2, 3, 2)) == [0, 0, 3, 2]


def test_gather_is_replaced_in_a_renamed_module() -> None:
    """Forks of verl and ROLL move the functions of router_replay_utils."""
    fork: Any = ModuleType("replay_of_a_fork")
    exec("def pp_gather(local_layers_router_map, tf_config): ...", vars(fork))
    unrelated: Any = ModuleType("unrelated")
    exec("def pp_gather(obj): ...", vars(unrelated))
    originals = fork.pp_gather, unrelated.pp_gather
    session = Session(pipeline=V_HALF)
    sys.modules |= {"replay_of_a_fork": fork, "unrelated": unrelated}
    try:
        FRAMEWORK.adapt(session, None)
        assert fork.pp_gather.__wrapped__ is originals[0]
        assert unrelated.pp_gather is originals[1]
    finally:
        session.process.replaced.undo()
        del sys.modules["replay_of_a_fork"], sys.modules["unrelated"]
    assert fork.pp_gather is originals[0]


CONFIG = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_enable_routing_replay": True,
    "add_bias_linear": False,
}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def run_replay(
    farm: Farm, schedule: str | None, ranks: int, config: dict[str, Any], **options: Any
) -> list[dict[str, Any]]:
    settings = {"schedule": schedule, "options": options, "config": CONFIG | config}
    return farm.run(ranks, plugin="replays_routers", given=settings).check().records


def assert_equal_ranks(
    package_ranks: list[dict[str, Any]], megatron_ranks: list[dict[str, Any]]
) -> None:
    wrong = (package_ranks[-1]["choices"] != megatron_ranks[-1]["choices"]).sum()
    assert wrong == 0, f"{wrong} of {package_ranks[-1]['choices'].numel()} choices are of another"
    assert package_ranks[-1]["recorded"] == pytest.approx(megatron_ranks[-1]["recorded"], abs=1e-6)
    assert package_ranks[-1]["losses"] == pytest.approx(megatron_ranks[-1]["losses"], abs=1e-6)
    package_gradients, megatron_gradients = (
        {name: value for rank in ranks for name, value in rank["gradients"].items()}
        for ranks in (package_ranks, megatron_ranks)
    )
    gradients = {
        name: value[: len(megatron_gradients[name])]  # without the padding of the vocabulary
        for name, value in join_rows(package_gradients).items()
    }
    assert_close_tensors(gradients, megatron_gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "ranks", "config", "options"),
    [
        ("v-half", 2, {}, {}),
        ("v-half", 2, RECOMPUTE, {"vocab_parallel": True}),
        pytest.param("v-half", 2, RECOMPUTE, {}, marks=pytest.mark.slow),
        pytest.param("v-half", 4, {}, {}, marks=pytest.mark.slow),
        pytest.param("v-min", 4, RECOMPUTE, {}, marks=pytest.mark.slow),
        pytest.param(
            "v-zb", 2, {"num_layers": 8}, {"layer_split": "1,3,2,2"}, marks=pytest.mark.slow
        ),
        pytest.param("grouped-interleaved-1f1b", 2, {}, {}, marks=pytest.mark.slow),
        pytest.param("v-half", 4, RECOMPUTE, {"vocab_parallel": True}, marks=pytest.mark.slow),
    ],
)
def test_routing_choices_reach_the_right_layer_and_microbatch(
    farm: Farm,
    schedule: str,
    ranks: int,
    config: dict[str, Any],
    options: dict[str, Any],
) -> None:
    megatron_ranks = run_replay(farm, None, ranks, config)
    assert megatron_ranks[-1]["losses"] != pytest.approx(megatron_ranks[-1]["recorded"], abs=1e-3)
    package_ranks = run_replay(farm, schedule, ranks, config, **options)
    assert package_ranks[0]["chunks"] == 2
    assert_equal_ranks(package_ranks, megatron_ranks)
    # Recomputation in B consumes each replayed choice once.
    assert {remaining for record in package_ranks for remaining in record["left"]} == {
        0 if config is RECOMPUTE else 7
    }


@pytest.mark.slow
def test_choices_of_reordered_microbatches(farm: Farm, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(Costs.uniform(2, 4, 100, 120, 90, 5).to_json())
    megatron_ranks = run_replay(farm, None, 2, RECOMPUTE)
    package_ranks = run_replay(farm, "auto", 2, RECOMPUTE, costs_file=str(costs))
    assert all(record["order"] for record in package_ranks)
    assert_equal_ranks(package_ranks, megatron_ranks)
