"""A provider of hybrid models that rejects chunks, as Megatron-Bridge's does."""

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mcore.conftest import needs_hybrid
from megatron.core import parallel_state

from megatron_vshape.mcore.frameworks import adapt_frameworks
from megatron_vshape.mcore.hooks import core_hooks
from megatron_vshape.mcore.hooks.session import Session
from megatron_vshape.mcore.layout.stage_map import StageMap


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
        # What a library believes of the ends is that of the ranks' order.
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
