"""Translation of options for Megatron's schedules."""

import json
import logging
import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.placement import linear, looping, v_shape
from megatron_vshape.mcore.layout.given_layout import layers_in, layout_of, nearest, regrouped
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.setup.translate import (
    TRANSLATIONS,
    Treatment,
    check_splits_nothing_else,
    log_translated,
    translate,
)

RECIPES = Path(__file__).parents[1] / "data" / "bridge_recipes.json"


def layouts_of_recipes() -> dict[str, tuple[Any, int]]:
    """Return every layout of the published recipes with its number of pipeline ranks."""
    layouts_by_name = {}
    for recipe in json.loads(RECIPES.read_text())["recipes"]:
        layout = recipe["options"].get("pipeline_model_parallel_layout")
        if layout is not None:
            ranks = recipe["options"]["pipeline_model_parallel_size"]
            layouts_by_name[f"{ranks} {layout}"] = layout, ranks
    return layouts_by_name


def layer_counts(layers: str) -> tuple[int, ...]:
    """Return the layer counts of a short form; 5,14*6,5 contains 14 stages of 6 layers."""
    stages: list[int] = []
    for part in layers.split(","):
        times, _, count = part.rpartition("*")
        stages += [int(count)] * int(times or 1)
    return tuple(stages)


class TestLayouts:
    def test_recipes_have_layouts(self) -> None:
        assert len(layouts_of_recipes()) >= 19

    @pytest.mark.parametrize("name", layouts_of_recipes())
    def test_layout_is_parsed_like_megatron(self, name: str) -> None:
        layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
        layout, ranks = layouts_of_recipes()[name]
        megatron_layout = layouts.PipelineParallelLayerLayout(layout, ranks)
        chunks = range(megatron_layout.virtual_pipeline_model_parallel_size)
        stages = [megatron_layout.layout[rank][chunk] for chunk in chunks for rank in range(ranks)]
        layers = tuple(stage.count(layouts.LayerType.decoder) for stage in stages)
        expected = layers, megatron_layout.flatten_layout.count(layouts.LayerType.mtp)
        assert layers_in(layout) == expected
        assert layers_in(megatron_layout) == expected  # Megatron's object

    @pytest.mark.parametrize("layers", [(3, 4, 4, 2), (0, 5, 5, 0), (2,) * 16, (1, 2, 3, 3, 3, 0)])
    def test_written_layout_is_parsed_by_megatron(self, layers: tuple[int, ...]) -> None:
        layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
        for predicting in (0, 1):
            layout_text = layout_of(layers, predicting)
            assert layers_in(layout_text) == (layers, predicting)
            megatron_layout = layouts.PipelineParallelLayerLayout.from_str(
                layout_text, len(layers) // 2
            )
            assert layers_in(megatron_layout) == (layers, predicting)

    def test_some_layouts_have_multi_token_prediction(self) -> None:
        counts = [layers_in(layout)[1] for layout, _ in layouts_of_recipes().values()]
        assert {0, 1} <= set(counts)

    @pytest.mark.parametrize(
        ("layout", "placement", "expected"),
        [
            ("Et|tt|tt|ttL", v_shape(2), "1,2,2,2"),
            ("Et*3|(tt|)*2,t*4L", looping(2, 2), "3,2,2,4"),
            ("Et|(tt|)*30L", v_shape(8), "3,14*4,2"),  # 32 stages; 2 become one
            ("Et|(tt|)*30L", linear(8), "7,6*8,6"),
            ("Et|(tt|)*30L", v_shape(16), "1,30*2,0"),
            ("Et*4|(t*4|)*14tL", v_shape(16), "30*2,1,0"),
            ("Et*3|t*5|t*5|t*3L", v_shape(4), "1,2,3,2,3,2,2,1"),  # 4 stages, each split in two
            ("E|tt|tt|L", v_shape(2), "0,2,2,0"),
            ("E|t|t|t|t|t|t|L", v_shape(2), "1,2,2,1"),
            ("Et*4|(t*4|)*14tmL", v_shape(8), "15*4,1"),
            ([["embedding", "decoder"], ["decoder", "decoder", "loss"]], linear(2), "1,2"),
            ([["Embedding "], ["decoder"] * 2, ["decoder"], ["loss"]], v_shape(2), "0,2,1,0"),
            # neither: balanced, with shorter first and last stages as in the layout
            ("Et|ttt|ttt|ttt|ttt|tL", v_shape(4), "0,5*2,3,1"),
            ("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL", v_shape(8), "14*5,6,4"),
            ("Et|tt|tt|ttL", v_shape(4), "0,7*1"),
        ],
    )
    def test_layout_becomes_a_layer_split(
        self, layout: Any, placement: tuple[int, ...], expected: str
    ) -> None:
        options = Namespace(pipeline_model_parallel_layout=layout, num_layers=None)
        translated = translate(options, placement)
        assert translated.layer_split == ",".join(map(str, layer_counts(expected)))
        assert options.pipeline_model_parallel_layout is None
        (notice,) = translated.notices
        assert notice.outcome == Treatment.TRANSLATED
        assert str(notice).endswith(f": layers per stage {translated.layer_split}")

    def test_layout_that_cannot_be_regrouped_is_balanced(self) -> None:
        options = Namespace(
            pipeline_model_parallel_layout="Et|tt|ttL",
            num_layers=5,
            vocab_size=1000,
            group_query_attention=False,
        )
        translated = translate(options, v_shape(2))
        assert translated.layer_split == "auto"
        assert [str(notice) for notice in translated.notices] == [
            "pipeline_model_parallel_layout Et|tt|ttL: its 3 stages are no multiple or part of the "
            "schedule's 4; --pipeline-layer-split auto instead: layers per stage auto"
        ]

    def test_layout_with_an_empty_inner_stage_is_not_translated(self) -> None:
        assert regrouped((1, 0, 3, 3), 4) is None
        options = Namespace(pipeline_model_parallel_layout="Et||tt|ttL", num_layers=5)
        (notice,) = translate(options, v_shape(2)).notices
        assert "an inner stage of the schedule's 4 would have no layers" in notice.said

    @pytest.mark.parametrize(
        ("layout", "message"),
        [
            ("Ettt", "must begin with the embedding and end with the loss"),
            ("ttL", "must begin with the embedding and end with the loss"),
            ("tE|tL", "must begin with the embedding and end with the loss"),
            ("Et|xL", "has 'x': a layout is made of E, t, m, L and |"),
            ("Et|(ttL", "has '(': a layout is made of"),
            ("Et|ttL", "has 3 layers and the model 4"),
            ([["embedding", "encoder"], ["decoder"] * 4, ["loss"]], "must begin with the embed"),
        ],
    )
    def test_invalid_layout_is_rejected(self, layout: Any, message: str) -> None:
        options = Namespace(pipeline_model_parallel_layout=layout, num_layers=4)
        with pytest.raises(ScheduleError) as error:
            translate(options, v_shape(2))
        assert message in str(error.value)

    @pytest.mark.parametrize("layout", ["Et|ttmL", "Et|tt|m|L", [["embedding"], ["mtp", "loss"]]])
    def test_layout_with_another_number_of_mtp_layers_is_rejected(self, layout: Any) -> None:
        layers, predicting = layers_in(layout)
        assert predicting == 1
        options = {"pipeline_model_parallel_layout": layout, "num_layers": sum(layers)}
        with pytest.raises(ScheduleError, match="mtp_num_layers is 0: make them agree"):
            translate(Namespace(**options, mtp_num_layers=None), linear(2))
        options["num_layers"] = None  # not yet known, as in a recipe
        with pytest.raises(ScheduleError, match="mtp_num_layers is 2: make them agree"):
            translate(Namespace(**options, mtp_num_layers=2), linear(2))
        translate(Namespace(**options, mtp_num_layers=None), linear(2))

    def test_multi_token_prediction_without_the_loss_goes_to_the_last_stage(self) -> None:
        options = Namespace(pipeline_model_parallel_layout="Et|tt|m|L", mtp_num_layers=1)
        (notice,) = translate(options, linear(2)).notices
        assert str(notice).endswith(": its 4 stages as the schedule's 2: layers per stage 3,0")

    def test_layout_of_this_package_is_unchanged(self) -> None:
        stage_layout = SimpleNamespace(stage_map=object())
        options = Namespace(pipeline_model_parallel_layout=stage_layout)
        assert translate(options, v_shape(2)).notices == ()
        assert options.pipeline_model_parallel_layout is stage_layout


class TestFirstAndLastStages:
    @pytest.mark.parametrize(
        ("layers", "placement", "ends", "expected"),
        [
            (94, v_shape(8), (True, True), "5,14*6,5"),  # Qwen3-235B
            (126, v_shape(8), (True, True), "7,14*8,7"),  # Llama-3.1-405B
            (126, v_shape(16), (True, True), "3,30*4,3"),
            (94, linear(8), (True, True), "11,6*12,11"),
            (15, v_shape(4), (False, True), "7*2,1"),
            (15, looping(4, 2), (True, False), "1,7*2"),
            (8, v_shape(4), (True, True), "0,5*1,2,1"),  # 10 does not divide by 8
        ],
    )
    def test_embedding_and_loss_counted_as_layers(
        self, layers: int, placement: tuple[int, ...], ends: tuple[bool, bool], expected: str
    ) -> None:
        options = Namespace(
            num_layers=layers,
            account_for_embedding_in_pipeline_split=ends[0],
            account_for_loss_in_pipeline_split=ends[1],
        )
        translated = translate(options, placement)
        assert translated.layer_split == ",".join(map(str, layer_counts(expected)))
        (notice,) = translated.notices
        divides = (layers + sum(ends)) % len(placement) == 0
        assert ("which do not divide, so the nearest split" in notice.said) is not divides
        assert not options.account_for_embedding_in_pipeline_split
        assert not options.account_for_loss_in_pipeline_split

    @pytest.mark.parametrize(
        ("layers", "placement", "first", "last", "expected"),
        [
            (46, linear(4), 11, 11, "11,12,12,11"),
            (92, linear(8), 10, 10, "10,6*12,10"),
            (28, linear(4), None, 4, "8,8,8,4"),
            (40, linear(2), 17, 23, "17,23"),
            # In a V, rank 0 has the first and the last stage, which are shorter by the same number.
            (94, v_shape(8), 10, 12, "4,14*6,6"),
            (46, v_shape(4), 11, 11, "5,6*6,5"),
            (78, looping(6, 2), 14, 16, "6*6,6*7"),
            # longer first and last rank, without inner ranks: no translation
            (40, v_shape(2), 17, 23, "4*10"),
            (13, v_shape(3), 5, 5, "5*2,3"),
        ],
    )
    @pytest.mark.parametrize("config", [False, True])
    def test_layers_of_the_first_and_last_rank(
        self,
        layers: int,
        placement: tuple[int, ...],
        first: int | None,
        last: int | None,
        expected: str,
        config: bool,
    ) -> None:
        names = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
        if config:  # names in TransformerConfig and Megatron-Bridge
            names = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        options = SimpleNamespace(num_layers=layers, **dict(zip(names, (first, last), strict=True)))
        translated = translate(options, placement)
        assert translated.layer_split == ",".join(map(str, layer_counts(expected)))
        assert [getattr(options, name) for name in names] == [None, None]
        assert len(translated.notices) == 1

    def test_split_without_layers_for_inner_ranks_is_rejected(self) -> None:
        options = Namespace(num_layers=8, decoder_first_pipeline_num_layers=7)
        with pytest.raises(ScheduleError, match="7 on the first and None on the last of 4 pipe"):
            translate(options, linear(4))

    def test_nearest_layer_split(self) -> None:
        assert nearest(4, 4) == (1, 1, 1, 1)
        assert nearest(2, 4, 1, 1) == (0, 1, 1, 0)
        with pytest.raises(ScheduleError, match="1 layer is too few for 4 stages"):
            nearest(1, 4)


class TestOtherOptions:
    @pytest.mark.parametrize(
        ("name", "value", "off", "message"),
        [
            ("num_layers_per_virtual_pipeline_stage", 2, None, "defines the chunks per rank"),
            ("num_virtual_stages_per_pipeline_rank", 4, None, "defines the chunks per rank"),
            ("virtual_pipeline_model_parallel_size", 12, None, "defines the chunks per rank"),
            ("microbatch_group_size_per_vp_stage", 4, None, "it affects Megatron's schedules only"),
            ("overlap_p2p_comm_warmup_flush", True, False, "it affects Megatron's schedules only"),
            ("defer_embedding_wgrad_compute", True, False, "W computes the output"),
            ("overlap_dispatch_backward_with_experts_wgrad", True, False, "W computes the experts"),
        ],
    )
    @pytest.mark.parametrize("kind", [Namespace, SimpleNamespace])
    def test_options_of_megatron_schedules_are_ignored(
        self, kind: type, name: str, value: Any, off: Any, message: str
    ) -> None:
        options = kind(num_layers=8, **{name: value})
        translated = translate(options, v_shape(4))
        (notice,) = translated.notices
        assert str(notice).startswith(name if value is True else f"{name} {value}: ")
        assert notice.outcome == Treatment.SET_ASIDE
        assert re.search(message, notice.said)
        assert getattr(options, name) is off
        assert translated.layer_split is None
        assert translate(options, v_shape(4)).notices == ()  # the second call has no notices

    def test_fine_grained_offloading_enables_offloading_of_the_plan(self) -> None:
        name = "fine_grained_activation_offloading"
        options = Namespace(**{name: True}, offload_modules=["core_attn"])
        translated = translate(options, v_shape(4))
        assert "offload" in translated.enabled
        (notice,) = translated.notices
        assert str(notice).startswith(f"{name}: translated to offloading of whole stages")
        assert notice.outcome == Treatment.TRANSLATED
        assert getattr(options, name) is False
        assert not translate(options, v_shape(4)).enabled

    @pytest.mark.parametrize("overlaps", [True, False])
    def test_userbuffer_overlap_with_wgrad_is_disabled(self, overlaps: bool) -> None:
        options = Namespace(tp_comm_overlap=overlaps, tp_comm_bulk_wgrad=True)
        notices = translate(options, v_shape(4)).notices
        assert options == Namespace(tp_comm_overlap=overlaps, tp_comm_bulk_wgrad=not overlaps)
        assert ["overlaps of tp_comm_overlap stay" in str(notice) for notice in notices] == (
            [True] * overlaps
        )

    def test_matching_number_of_chunks_is_not_logged(self) -> None:
        options = Namespace(num_virtual_stages_per_pipeline_rank=2)
        assert translate(options, v_shape(4)).notices == ()
        assert options.num_virtual_stages_per_pipeline_rank is None

    def test_default_microbatch_group_size_is_unchanged(self) -> None:
        options = Namespace(microbatch_group_size_per_vp_stage=4, pipeline_model_parallel_size=4)
        assert translate(options, v_shape(4)).notices == ()
        assert options.microbatch_group_size_per_vp_stage == 4

    def test_early_optimizer_step_requires_several_chunks(self) -> None:
        name = "overlap_param_gather_with_optimizer_step"
        for placement, stays in ((v_shape(2), True), (looping(2, 2), True), (linear(2), False)):
            options = Namespace(**{name: True})
            notices = translate(options, placement).notices
            assert getattr(options, name) is stays
            assert len(notices) == (not stays)

    def test_old_name_of_the_layer_pattern(self) -> None:
        options = Namespace(hybrid_override_pattern="M*M*M*M*", hybrid_layer_pattern=None)
        (notice,) = translate(options, v_shape(2)).notices
        assert str(notice) == ("hybrid_override_pattern M*M*M*M*: renamed to hybrid_layer_pattern")
        assert (options.hybrid_override_pattern, options.hybrid_layer_pattern) == (None, "M*M*M*M*")
        options.hybrid_override_pattern = "M*"
        with pytest.raises(UnsupportedError, match="is the old name of hybrid_layer_pattern, and"):
            translate(options, v_shape(2))

    def test_layer_pattern_defines_the_number_of_layers(self) -> None:
        options = Namespace(
            num_layers=None,
            vocab_size=100,
            group_query_attention=False,
            hybrid_layer_pattern="M*M*M*M",
            account_for_loss_in_pipeline_split=True,
        )
        assert translate(options, v_shape(2)).layer_split == "2,2,2,1"
        # A pattern with stage marks has priority over the other options.
        options.hybrid_layer_pattern = "M|*M|*M|*M"
        options.account_for_loss_in_pipeline_split = True
        translated = translate(options, v_shape(2))
        assert translated.layer_split == "1,2,2,2"
        assert "--hybrid-layer-pattern defines the layers of each" in translated.notices[0].said

    def test_layer_split_has_priority_over_other_options(self) -> None:
        options = Namespace(
            num_layers=8,
            pipeline_model_parallel_layout="nonsense",
            decoder_last_pipeline_num_layers=1,
        )
        translated = translate(options, v_shape(2), "2,3,2,1")
        assert translated.layer_split == "2,3,2,1"
        assert [str(notice) for notice in translated.notices] == [
            f"{option}: ignored, --pipeline-layer-split defines the layers of each stage"
            for option in (
                "pipeline_model_parallel_layout nonsense",
                "decoder_last_pipeline_num_layers 1",
            )
        ]
        assert {notice.outcome for notice in translated.notices} == {Treatment.SET_ASIDE}

    def test_two_options_that_define_the_split_are_rejected(self) -> None:
        options = Namespace(
            num_layers=8,
            pipeline_model_parallel_layout="Et*4|t*4L",
            account_for_loss_in_pipeline_split=True,
        )
        with pytest.raises(UnsupportedError) as error:
            translate(options, v_shape(2))
        assert str(error.value) == (
            "account_for_loss_in_pipeline_split and pipeline_model_parallel_layout Et*4|t*4L each "
            "define the layers of each stage: remove all but one"
        )

    def test_number_of_layers_is_required(self) -> None:
        options = Namespace(account_for_loss_in_pipeline_split=True)
        with pytest.raises(ScheduleError, match="needs the number of layers: add --num-layers"):
            translate(options, v_shape(2))

    def test_every_line_is_logged_once(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options = Namespace(defer_embedding_wgrad_compute=True)
        translated = translate(options, v_shape(2))
        with caplog.at_level(logging.INFO):
            monkeypatch.setenv("RANK", "1")
            log_translated(translated)
            assert caplog.messages == []
            monkeypatch.setenv("RANK", "0")
            log_translated(translated)
        assert caplog.messages == [
            "defer_embedding_wgrad_compute: turned off, W computes the output layer's weight "
            "gradient already"
        ]

    def test_megatron_schedules_accept_only_the_layer_split(self) -> None:
        check_splits_nothing_else(Namespace(num_virtual_stages_per_pipeline_rank=2), "1f1b")
        for rule in TRANSLATIONS:
            # a pattern has a separate rule
            if rule.layers is not None and rule.value_after is None:
                with pytest.raises(UnsupportedError, match=f"does not support {rule.names[0]}"):
                    check_splits_nothing_else(Namespace(**{rule.names[0]: 3}), "1f1b")


@pytest.mark.parametrize(
    ("settings", "expected", "lines"),
    [
        ({"pipeline_model_parallel_layout": "Et|(tt|)*6tL"}, "1,2,2,2,2,2,2,1", 1),
        (
            {
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
                "virtual_pipeline_model_parallel_size": 4,
                "microbatch_group_size_per_vp_stage": 8,
                "defer_embedding_wgrad_compute": True,
                "overlap_p2p_comm_warmup_flush": True,
            },
            "1,2,2,2,2,2,2,1",
            5,
        ),
        (
            {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 2},
            "0,2,2,2,2,3,3,0",
            1,
        ),
    ],
    ids=["layout", "counted ends", "first and last"],
)
def test_config_of_a_provider_before_validation(
    settings: dict[str, Any], expected: str, lines: int
) -> None:
    """A library's provider is a TransformerConfig that Megatron has not validated yet."""
    transformer = pytest.importorskip("megatron.core.transformer")
    from megatron_vshape.mcore.layout.stage_map import StageMap
    from megatron_vshape.mcore.setup.configure import StageLayout

    class Provider(transformer.TransformerConfig):  # type: ignore[misc, name-defined]
        def __post_init__(self) -> None:
            self.translated = translate(self, v_shape(4))
            layers = layer_counts(self.translated.layer_split or "")
            self.virtual_pipeline_model_parallel_size = 2
            self.pipeline_model_parallel_layout = StageLayout(StageMap(v_shape(4), layers))
            super().__post_init__()

    config = Provider(
        num_layers=14,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=4,
        pipeline_dtype=torch.float32,
        **settings,
    )
    assert config.translated.layer_split == expected
    assert len(config.translated.notices) == lines
    assert not config.account_for_loss_in_pipeline_split
    assert not config.defer_embedding_wgrad_compute
    assert config.num_layers_in_first_pipeline_stage is None
