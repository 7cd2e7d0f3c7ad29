"""Stages on ranks and chunks, and the layout that Megatron reads."""

from types import SimpleNamespace

import pytest
from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import even_layers
from megatron_vshape.core.model.placement import Placement, linear, looping, v_shape
from megatron_vshape.mcore.hooks.core_hooks import embedding_ranks
from megatron_vshape.mcore.layout import stage_map
from megatron_vshape.mcore.layout.stage_map import StageMap, megatrons_text
from megatron_vshape.mcore.setup.choice import known_to_lose
from megatron_vshape.mcore.setup.configure import StageLayout
from megatron_vshape.mcore.setup.run_config import ScheduleChoice


def split_layers(num_layers: int, placement: Placement) -> StageMap:
    return StageMap(placement, even_layers(num_layers, placement))


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Megatron believe that there are chunks; it asks its global state for that."""
    name = "get_virtual_pipeline_model_parallel_world_size"
    monkeypatch.setattr(parallel_state, name, lambda: 2)


def first_layers(layout: PipelineParallelLayerLayout, ranks: int) -> list[list[int]]:
    return [
        [layout.get_layer_offset(vp_stage=chunk, pp_rank=rank) for chunk in (0, 1)]
        for rank in range(ranks)
    ]


def test_a_v_numbers_layers_there_and_back() -> None:
    layout = StageLayout(split_layers(16, v_shape(4)))
    assert first_layers(layout, 4) == [[0, 14], [2, 12], [4, 10], [6, 8]]
    assert layout.get_num_layers_to_build(vp_stage=1, pp_rank=0) == 2
    assert layout.get_layer_id_list(vp_stage=1, pp_rank=3) == [8, 9]
    assert layout.layout[0][0][0] is LayerType.embedding
    assert layout.layout[0][1][-1] is LayerType.loss
    assert not layout.validate_layer_layout(16, None)


def test_looping_placement_equals_megatron() -> None:
    text = PipelineParallelLayerLayout("Ett|tt|tt|ttL", 2)
    layout = StageLayout(split_layers(8, looping(2, 2)))
    assert first_layers(layout, 2) == first_layers(text, 2)
    assert layout.layout == text.layout


def test_multi_token_prediction_is_in_the_last_stage() -> None:
    layout = StageLayout(StageMap(v_shape(2), (2, 2, 2, 1), 2))
    assert [len(stage) for stage in layout.layout[0]] == [3, 4]
    assert layout.get_num_layers_to_build(LayerType.mtp, vp_stage=1, pp_rank=0) == 2
    assert layout.get_layer_offset(LayerType.mtp, vp_stage=1, pp_rank=0) == 0
    layout.validate_layer_layout(7, 2)
    assert layout.input_data == "Ett|tt|tt|tmmL"


def test_layout_text_equals_megatron() -> None:
    layers = (0, 3, 2, 1)
    layout = StageLayout(StageMap(looping(2, 2), layers))
    assert megatrons_text(layers) == "E|ttt|tt|tL"
    assert layout.layout == PipelineParallelLayerLayout(megatrons_text(layers), 2).layout


def test_layers_may_differ_between_stages() -> None:
    layout = StageLayout(StageMap(v_shape(2), (1, 3, 3, 2)))
    assert first_layers(layout, 2) == [[0, 7], [1, 4]]
    assert layout.get_num_layers_to_build(vp_stage=0, pp_rank=1) == 3
    assert not layout.validate_layer_layout(9, None)
    assert layout.input_data == "Et|ttt|ttt|ttL"  # which checkpoints have
    read = PipelineParallelLayerLayout(layout.input_data, 2)
    assert read.flatten_layout == layout.flatten_layout


def test_layers_that_route_by_tokens_stay_with_the_embedding() -> None:
    stage_map.check_hash_layers(StageMap(v_shape(2), (3, 1, 3, 2)), 3)
    with pytest.raises(
        ScheduleError, match="moe_n_hash_layers 3 needs that many layers in the first"
    ):
        stage_map.check_hash_layers(StageMap(v_shape(2), (2, 3, 3, 1)), 3)


LEVELS = SimpleNamespace(deepstack_visual_indexes=[8, 16, 24])


@pytest.mark.parametrize(
    "model",
    [
        SimpleNamespace(vision_config=LEVELS),  # Megatron-Bridge
        SimpleNamespace(hf_config=SimpleNamespace(vision_config=LEVELS)),  # mcore-bridge
        LEVELS,  # mbridge
    ],
)
def test_deepstack_layers_are_on_the_first_stage(model: SimpleNamespace) -> None:
    stage_map.check_deepstack(StageMap(v_shape(2), (3, 1, 1, 3)), model)
    with pytest.raises(ScheduleError, match="has 3 levels, .* the stages have 2,2,2,2 layers"):
        stage_map.check_deepstack(StageMap(v_shape(2), (2, 2, 2, 2)), model)


@pytest.mark.parametrize(
    "model",
    [
        SimpleNamespace(language_model_only=True, vision_config=LEVELS),
        # The field of the encoder overrides a default of the model (Megatron-Bridge's Qwen3.5-VL).
        SimpleNamespace(vision_config=SimpleNamespace(deepstack_visual_indexes=[]), **vars(LEVELS)),
    ],
)
def test_models_without_deepstack_need_no_layers(model: SimpleNamespace) -> None:
    stage_map.check_deepstack(StageMap(v_shape(2), (2, 2, 2, 2)), model)


@pytest.mark.parametrize(("granularity", "count"), [("full", 1), ("selective", 0), (None, 0)])
def test_deepstack_with_full_recompute_is_logged(granularity: str | None, count: int) -> None:
    model = SimpleNamespace(vision_config=LEVELS, recompute_granularity=granularity)
    warnings = "".join(known_to_lose(model, ScheduleChoice(2, "v-half")))
    assert warnings.count("deepstack mergers get no gradients") == count


def test_stage_map_knows_its_ends() -> None:
    v, line = split_layers(8, v_shape(4)), split_layers(8, linear(4))
    assert (v.num_ranks, v.num_chunks, v.last_stage, v.loss_rank) == (4, 2, 7, 0)
    assert (line.num_ranks, line.num_chunks, line.last_stage, line.loss_rank) == (4, 1, 3, 3)
    assert v.ends_meet
    assert not line.ends_meet
    assert [v.stage(rank, 1) for rank in range(4)] == [7, 6, 5, 4]
    assert line.stage(2, None) == 2
    assert v.chunk(5) == 1


def test_embedding_ranks() -> None:
    assert embedding_ranks(v_shape(4), [3, 7, 11, 15]) == [3]
    assert embedding_ranks(linear(4), [3, 7, 11, 15]) == [3, 15]


def test_one_end_must_be_on_rank_0() -> None:
    stage_map.check_ends(split_layers(4, (3, 1, 2, 0)))
    with pytest.raises(ScheduleError, match="needs one of the two on rank 0"):
        stage_map.check_ends(split_layers(4, (3, 0, 1, 2)))


def test_ends_that_megatron_cannot_tie() -> None:
    stage_map.check_tied_embeddings(split_layers(4, (0, 1, 2, 3)))
    stage_map.check_tied_embeddings(split_layers(4, (1, 0, 0, 1)))
    with pytest.raises(ScheduleError, match="on rank 1 and the last on rank 3"):
        stage_map.check_tied_embeddings(split_layers(4, (1, 0, 2, 3)))
