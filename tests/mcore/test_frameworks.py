"""Adapters of libraries: router replay (verl), providers (Megatron-Bridge), converters (ROLL).

Recorded and replayed routing choices reach the right layer and microbatch. `router_replay_utils`
sorts and gathers like verl: by Megatron's get_schedule_table, imported by name, and by the
placement of Megatron's interleaved schedule.
"""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from mcore.conftest import needs_hybrid
from mcore.farm import Farm
from mcore.parity import assert_close_tensors, join_rows
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from torch import nn

import megatron_vshape
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.mcore.frameworks import adapt_frameworks, nemo_rl, roll
from megatron_vshape.mcore.frameworks.verl import FRAMEWORK, moe_layers_of_stages
from megatron_vshape.mcore.hook import Replaced
from megatron_vshape.mcore.hooks import core_hooks
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
    return farm.run(ranks, plugin="replays_routers", argument=settings).check().records


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


class Model:
    def __init__(self, config, pre_process=True, post_process=True, vp_stage=None):
        self.seen = pre_process, post_process, vp_stage, config.virtual_pipeline_model_parallel_size


class Provider:
    is_hybrid_model = True
    virtual_pipeline_model_parallel_size: int | None = 2

    def provide(self, pre_process=None, post_process=None, vp_stage=None):
        assert self.virtual_pipeline_model_parallel_size is None
        assert vp_stage is None
        return Model(config=self, pre_process=pre_process, post_process=post_process)


class LanguageProvider(Provider):
    """A provider whose model builds an encoder by `pre_process`, and does not get its chunk."""

    is_hybrid_model = False

    def provide(self, pre_process=None, post_process=None, vp_stage=None):
        return pre_process, post_process, Model(self, pre_process, post_process).seen


def test_provider_gets_the_ends_of_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    session, ranks = Session(), []
    choice = SimpleNamespace(shards_output_layer=False)
    stage_map = StageMap((1, 0, 0, 1), (1, 1, 1, 1))
    ends = lambda rank, chunk: (rank == 1 and not chunk, rank == 1 and chunk == 1)  # noqa: E731
    pipeline: Any = SimpleNamespace(stage_map=stage_map, ends=ends, choice=choice)
    session.pipeline = pipeline
    monkeypatch.setattr(Model, "__init__", core_hooks.model_init(session, Model.__init__))
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: ranks[-1])
    config: Any = LanguageProvider()
    adapt_frameworks(session, config)
    try:
        for rank, chunk, expected in (
            (1, 0, (True, False)),
            (1, 1, (False, True)),
            (0, 0, (False, False)),
        ):
            ranks.append(rank)
            # The caller derives the ends from the position of the rank.
            *outer_ends, seen = config.provide(rank == 0, rank == 1, vp_stage=chunk)
            assert tuple(outer_ends) == expected
            assert seen == (*expected, chunk, 2)
    finally:
        session.process.replaced.undo()


def test_provider_sees_no_chunks_and_its_model_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stage_map = StageMap((0, 1, 1, 0), (1, 1, 1, 1))
    ends = lambda rank, chunk: (not rank and not chunk, not rank and chunk == 1)  # noqa: E731
    session, original = Session(), Provider.provide
    choice = SimpleNamespace(shards_output_layer=False)
    pipeline: Any = SimpleNamespace(stage_map=stage_map, ends=ends, choice=choice)
    session.pipeline = pipeline
    monkeypatch.setattr(Model, "__init__", core_hooks.model_init(session, Model.__init__))
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    config: Any = Provider()
    for _ in range(2):  # of each config of the class; the class is taught once
        adapt_frameworks(session, config)
    try:
        # Libraries ask Megatron which rank is first and last: the answer follows the ranks' order.
        assert config.provide(True, False, vp_stage=0).seen == (True, False, 0, 2)
        assert config.provide(False, False, vp_stage=1).seen == (False, True, 1, 2)
        assert config.virtual_pipeline_model_parallel_size == 2
        assert session.build.provided_chunk is None
    finally:
        session.process.replaced.undo()
    assert Provider.provide is original


@needs_hybrid
def test_the_stages_of_a_pattern_that_a_library_gives_its_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They become the schedule's, with one line of the log, as those of flags and configs do."""
    from megatron.core.models.hybrid.hybrid_layer_allocation import select_pipeline_segment

    session = Session()
    stage_map = StageMap((0, 1, 1, 0), (1, 2, 2, 1))
    session.pipeline = cast(Any, SimpleNamespace(stage_map=stage_map))
    select = core_hooks.select_pipeline_segment(session, select_pipeline_segment)
    layers_by_offset = {}
    with caplog.at_level(logging.INFO):
        for rank in range(2):
            for chunk in range(2):
                layers, offset = select("*-*|-*-", SimpleNamespace(rank=lambda r=rank: r), chunk)
                layers_by_offset[offset] = "".join(layers)
    assert layers_by_offset == {0: "*", 1: "-*", 3: "-*", 5: "-"}
    (line,) = [record.getMessage() for record in caplog.records if "stages" in record.getMessage()]
    assert line == (
        "hybrid_layer_pattern *-*|-*-: its 2 stages as the schedule's 4: layers per stage 1,2,2,1"
    )


EMBEDDING = "embedding.word_embeddings.weight"
RANKS, CHUNKS, LAYERS = 2, 2, 5


class DistConverter:
    """A converter that orders stages by chunk, then rank, and has tied embeddings twice."""

    revert = False

    def __init__(self, rank: int) -> None:
        self.pipeline_model_parallel_rank = rank

    def _get_layer_info(self, layer: int) -> tuple[int, int, int]:
        return 0, layer % RANKS, layer // RANKS

    def is_pipeline_first_stage(self, vp_stage: int) -> bool:
        return (self.pipeline_model_parallel_rank, vp_stage) == (0, 0)

    def is_pipeline_last_stage(self, vp_stage: int) -> bool:
        return (self.pipeline_model_parallel_rank, vp_stage) == (RANKS - 1, CHUNKS - 1)

    def is_on_this_rank(self, weight_name: str, vp_stage: int | None = None) -> bool:
        chunk = vp_stage or 0
        if weight_name == EMBEDDING:
            return self.is_pipeline_first_stage(chunk) or self.is_pipeline_last_stage(chunk)
        layer = int(weight_name.split(".")[2])
        place = self.pipeline_model_parallel_rank, chunk
        return self._get_layer_info(layer)[1:] == place


def expected_places(name: str) -> list[tuple[int, int]]:
    """Return the ranks and chunks on which a weight is expected."""
    every = [(rank, chunk) for rank in range(RANKS) for chunk in range(CHUNKS)]
    return [place for place in every if DistConverter(place[0]).is_on_this_rank(name, place[1])]


def test_weights_are_loaded_on_the_rank_of_their_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType(roll.CONVERTER)
    module.DistConverter = DistConverter
    monkeypatch.setitem(sys.modules, roll.CONVERTER, module)
    stage_map = StageMap((1, 0, 0, 1), (2, 1, 1, 1))
    last = stage_map.last_stage
    pipeline: Any = SimpleNamespace(
        stage_map=stage_map,
        ends=lambda *place: tuple(stage_map.stage(*place) == end_stage for end_stage in (0, last)),
    )
    session = Session(pipeline=pipeline)
    try:
        for _ in range(2):  # once per chunk; the class is patched only once
            roll.FRAMEWORK.adapt(session, None)
        places = [expected_places(f"decoder.layers.{layer}.weight") for layer in range(LAYERS)]
        assert places == [[(1, 0)], [(1, 0)], [(0, 0)], [(0, 1)], [(1, 1)]]
        assert [DistConverter(0)._get_layer_info(layer)[0] for layer in range(3)] == [0, 1, 0]
        assert expected_places(EMBEDDING) == [(1, 0)]  # tied embeddings on one rank are one weight
        assert DistConverter(1).is_pipeline_last_stage(1)
    finally:
        session.process.replaced.undo()
    assert expected_places(EMBEDDING) == [(0, 0), (1, 1)]


@pytest.mark.parametrize(("is_loaded", "names"), [(True, ["0.weight", "1.weight"]), (False, [])])
def test_reference_of_nemo_rl_has_the_weights_of_all_chunks(
    is_loaded: bool, names: list[str]
) -> None:
    chunks: list[Any] = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    for chunk in chunks:
        chunk.config = chunk.pg_collection = None
    setup: Any = SimpleNamespace(get_model=lambda: chunks)

    def setup_reference_model_state() -> dict[str, Any]:
        first_chunk = setup.get_model()[0]
        return dict(first_chunk.state_dict()) if is_loaded else {}

    worker: Any = SimpleNamespace(
        setup_model_and_optimizer=lambda policy: None,
        setup_reference_model_state=setup_reference_model_state,
    )
    session: Any = SimpleNamespace(process=SimpleNamespace(replaced=Replaced()))
    nemo_rl._keep_built_chunks(session, worker, setup)
    assert list(worker.setup_reference_model_state()) == names
