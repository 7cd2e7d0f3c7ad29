"""A library that computes the stage of a weight, like ROLL's mcore_adapter."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_vshape.mcore.frameworks import roll
from megatron_vshape.mcore.hooks.session import Session
from megatron_vshape.mcore.layout.stage_map import StageMap

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
