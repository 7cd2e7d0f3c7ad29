"""Stages with different layers: losses equal Megatron's 1F1B, and plans for these stages."""

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from mcore.farm import Train
from mcore.parity import assert_same_training

from megatron_vshape.core.check.simulate import peak_held
from megatron_vshape.core.model.amounts import STATE_BYTES
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import TIMES, ScheduleError
from megatron_vshape.core.model.pieces import Encoder, Pieces
from megatron_vshape.core.model.placement import linear, looping, v_shape
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.mcore.layout.shared_vocabulary import SharedEnds
from megatron_vshape.mcore.layout.stage_map import StageMap, better_split, split_layers
from megatron_vshape.mcore.options import Options, UnsupportedError
from megatron_vshape.mcore.setup.configure import _limit_bytes
from megatron_vshape.mcore.setup.run_config import ScheduleChoice


@pytest.mark.slow
def test_auto_profiles_uneven_stages_and_reads_its_costs_again(
    train: Train, tmp_path: Path
) -> None:
    flags = ("--num-layers", "7", "--train-iters", "6")
    one_rank_run = train(1, *flags)
    first = train(
        *(2, "--pipeline-schedule", "auto", "--pipeline-layer-split", "2,1,3,1", *flags),
        *("--pipeline-profile-iterations", "2:4", "--pipeline-trace", str(tmp_path)),
    )
    assert_same_training(first, one_rank_run)
    file = tmp_path / "costs.json"
    assert json.loads(file.read_text())["layers"] == [2, 1, 3, 1]
    second = train(
        *(2, "--pipeline-schedule", "v-half+", "--pipeline-layer-split", "auto", *flags),
        *("--pipeline-costs", str(file)),
    )
    assert_same_training(second, one_rank_run)
    assert "; costs: as given" in second.output[0]
    balanced = Pieces.of(Costs.load(file), (2, 1, 3, 1)).balanced(7, v_shape(2))
    assert f"in model order: {','.join(map(str, balanced))}\n" in second.output[0]


def model_arguments(**changed: object) -> Namespace:
    options: dict[str, object] = {
        "num_layers": 31,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "kv_channels": None,
        "group_query_attention": False,
        "ffn_hidden_size": None,
        "swiglu": False,
        "seq_length": 64,
        "vocab_size": 64 * 25,
        "num_experts": None,
    }
    return Namespace(**(options | changed))


def test_auto_by_the_sizes_of_the_model() -> None:
    # A layer's products are 13 h^2 wide, the head's 25.
    split = split_layers(model_arguments(), v_shape(4), "auto", None)
    assert split.layers == (4, 4, 4, 4, 4, 4, 4, 3)
    assert split.costs is None
    assert split.estimate is not None
    assert split.estimate.forward_us[-1] == pytest.approx((3 + 25 / 13) * 8 / 31)
    moe = model_arguments(
        num_experts=8, moe_router_topk=2, moe_layer_freq=[1, 0], moe_ffn_hidden_size=64
    )
    assert split_layers(moe, linear(4), "auto", None).layers == (8, 8, 9, 6)


ONE_LAYER_HEAD = {"num_layers": 32, "vocab_size": 64 * 13}


@pytest.mark.parametrize(
    ("encoder", "changed", "layers"),
    [
        (None, {}, (4, 4, 4, 4, 4, 4, 5, 3)),
        # As `plan --layers 32 --layer-split auto --embedding 3.2 --head 1`.
        (Encoder(3.2), {}, (1, 4, 4, 4, 5, 5, 5, 4)),
        (Encoder(9.6, is_frozen=True), {}, (1, 4, 4, 4, 5, 5, 5, 4)),
        (Encoder(3.2), {"deepstack_visual_indexes": [8, 16, 24]}, (3, 4, 4, 4, 5, 5, 5, 2)),
    ],
)
def test_auto_with_an_encoder(
    encoder: Encoder | None, changed: dict[str, object], layers: tuple[int, ...]
) -> None:
    model = model_arguments(**ONE_LAYER_HEAD, **changed)
    split = split_layers(model, v_shape(4), "auto", None, encoder=encoder)
    assert split.layers == layers


def test_prediction_with_an_encoder_and_even_layers() -> None:
    model = model_arguments(**ONE_LAYER_HEAD)
    assert split_layers(model, v_shape(4), None, None).estimate is None
    trained = split_layers(model, v_shape(4), None, None, encoder=Encoder(2.0)).estimate
    frozen = split_layers(
        model, v_shape(4), None, None, encoder=Encoder(2.0, is_frozen=True)
    ).estimate
    assert trained is not None
    assert frozen is not None
    assert trained.forward_us[:2] == frozen.forward_us[:2] == pytest.approx((1.5, 1))
    assert trained.backward_us[0] == trained.weight_us[0] == pytest.approx(1.5)
    assert frozen.backward_us[0] == frozen.weight_us[0] == pytest.approx(1)


@pytest.mark.parametrize(
    ("text", "encoder"),
    [("3.2", Encoder(3.2)), ("12:frozen", Encoder(12, is_frozen=True)), ("0", Encoder(0))],
)
def test_encoder_option(text: str, encoder: Encoder) -> None:
    options = Options(schedule="v-half", encoder_layers=text)
    options.check()
    assert options.encoder == encoder
    assert Options(encoder_layers=encoder.layers).encoder == Encoder(encoder.layers)


@pytest.mark.parametrize("text", ["", "-1", "3.2:trained", "3,2", "nan"])
def test_invalid_encoder_option_is_rejected(text: str) -> None:
    with pytest.raises(UnsupportedError, match="encoder-layers .* is not a number of layers"):
        Options(schedule="v-half", encoder_layers=text).check()


def test_better_split_of_measured_costs() -> None:
    """A first stage that is twice as long as the others, as with an encoder."""
    stage_map = StageMap(v_shape(2), (4, 4, 4, 4))
    even = Costs.uniform(2, 4, 100, 100, 100, 5)
    assert better_split(even, stage_map, ()) is None
    costs = even.having(dict.fromkeys(TIMES, (200.0, 100.0, 100.0, 100.0)))
    assert better_split(costs, stage_map, ()) == (1, 5, 5, 5)


def test_limit_in_gib_splits_layers_by_the_total_memory_of_a_rank() -> None:
    """Only if the costs know it."""
    plain = Pieces.estimated(0.0, 3.0, (1, 1, 1, 0))
    layer, last = (
        part.changed({STATE_BYTES: size}) for part, size in ((plain.layer, 2.0), (plain.last, 14.0))
    )
    costs = replace(plain, layer=layer, last=last).costs((3, 3, 3, 3))
    options = Options(schedule="auto", layer_split="auto")
    choice = ScheduleChoice(2, "auto", costs=costs, limit_bytes=24.0)
    assert _limit_bytes(replace(choice, costs=plain.costs((3, 3, 3, 3))), options) is None
    limit = _limit_bytes(choice, options)
    assert limit == 24
    split = split_layers(model_arguments(num_layers=12), v_shape(2), "auto", costs, limit)
    assert split.costs is not None
    request = PlanRequest("auto", 2, 6, limit=limit, placements=(v_shape(2),), steps=1_000)
    answer = plan_request(replace(request, costs=split.costs))
    assert max(peak_held(answer.schedule, split.costs)) <= 24
    with pytest.raises(ScheduleError):
        plan_request(replace(request, costs=costs))


def test_further_layers_stay_where_the_vocabulary_is_shared() -> None:
    """And their output layers are shared, whether costs are measured or estimated."""
    args, place = model_arguments(num_layers=8, mtp_num_layers=2), linear(4)
    merging = 2 / 13
    plain = split_layers(args, place, "2,2,2,2", None).estimate
    assert plain is not None
    for measured_costs in (None, plain):
        split = split_layers(args, place, "2,2,2,2", measured_costs, ends=SharedEnds())
        costs = split.estimate if measured_costs is None else split.costs
        assert costs is not None
        assert costs.forward_us[-1] == pytest.approx(1 + 2 * (1 + merging) / 2)
        assert costs.lists()["head_weight_us"][0] == pytest.approx(3 * 25 / 13 / 2 / 4)
    balanced = split_layers(args, place, "auto", None, ends=SharedEnds())
    assert balanced.layers == (2, 3, 3, 0)


def test_costs_of_known_layers_serve_any_split() -> None:
    measured = split_layers(model_arguments(num_layers=8), linear(4), "1,2,3,2", None).estimate
    assert measured is not None
    split = split_layers(model_arguments(num_layers=8), looping(2, 2), None, measured)
    assert split.layers == (2, 2, 2, 2)
    assert split.estimate is None
    assert split.costs is not None
    assert split.costs.forward_us[:3] == pytest.approx((1.0, 1.0, 1.0))
    assert split.costs.forward_us[3] == pytest.approx(measured.forward_us[3])
    resplit = split_layers(model_arguments(num_layers=8), linear(4), "1,2,3,2", measured)
    assert resplit.costs is measured


def test_costs_without_layers_apply_to_this_split_unless_balanced() -> None:
    measured_costs = Costs.of((1, 2, 2, 3), (1, 2, 2, 3), (1, 2, 2, 3), 0.0, (1.0,) * 4, (1.0,) * 4)
    local_split = split_layers(model_arguments(num_layers=8), v_shape(2), "1,2,3,2", measured_costs)
    assert local_split.costs is measured_costs
    balanced = split_layers(model_arguments(num_layers=8), v_shape(2), "auto", measured_costs)
    assert balanced.layers == (2, 2, 3, 1)  # the last has 1.5 layers' worth of a head
    assert balanced.costs is not None


def test_the_vocabulary_must_be_known() -> None:
    with pytest.raises(ValueError, match="add --vocab-size"):
        split_layers(model_arguments(vocab_size=None), v_shape(4), "auto", None)
    split = split_layers(model_arguments(vocab_size=None), linear(2), "15,16", None)
    assert split.estimate is not None
    assert split.estimate.forward_us == pytest.approx((30 / 31, 32 / 31))
