"""Checkpoints by ranks: the default state of distributed optimizers, and --ckpt-format torch."""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mcore.farm import Ended, Farm
from mcore.parity import UNTIED, assert_same_tensors
from mcore.test_bad_input import rejection_text
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_vshape.mcore.frameworks.bridge import FRAMEWORK
from megatron_vshape.mcore.hooks.checkpoints import (
    RECORD,
    check_optimizer_state,
    has_state_by_rank,
    layers_of_megatron,
    layers_of_stages,
    saved_layers,
)
from megatron_vshape.mcore.layout.stage_map import StageMap
from megatron_vshape.mcore.refusals import UnsupportedError

V_HALF = "--pipeline-schedule v-half"
LOOPING = [[[0, 1, 2], [5, 6]], [[3, 4], [7, 8, -1]]]


def saved_arguments(**changed: object) -> Namespace:
    settings = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "num_layers": 8,
    }
    return Namespace(**(settings | changed))


def test_megatron_checkpoints_use_megatrons_layer_order() -> None:
    assert saved_layers(saved_arguments()) == LOOPING
    assert saved_layers(saved_arguments(pipeline_schedule="interleaved-1f1b")) == LOOPING
    one = saved_arguments(virtual_pipeline_model_parallel_size=None)
    assert saved_layers(one) == [[[0, 1, 2, 3, 4]], [[5, 6, 7, 8, -1]]]


def test_recorded_layers_have_priority() -> None:
    layers = [[[0, 1], [8, -1]], [[2, 3, 4], [5, 6, 7]]]
    assert saved_layers(saved_arguments(pipeline_schedule="v-half", **{RECORD: layers})) == layers


def test_layers_of_a_checkpoint_without_a_record_are_unknown() -> None:
    without_record = saved_arguments(pipeline_schedule="v-half")  # of an older version
    assert saved_layers(without_record) is None
    assert saved_layers(saved_arguments(num_layers=7)) is None  # not a split of Megatron


def test_layouts_and_patterns_order_layers_by_chunk_then_rank() -> None:
    layout = saved_arguments(pipeline_model_parallel_layout="Et|tt|tttt|tmL", mtp_num_layers=1)
    ranks = [[[0, 1], [4, 5, 6, 7]], [[2, 3], [8, 9, -1]]]
    assert saved_layers(layout) == ranks
    pattern = saved_arguments(
        hybrid_layer_pattern="*|-*|-*-*|-/*", virtual_pipeline_model_parallel_size=None
    )
    assert saved_layers(pattern) == ranks


FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
COUNTED = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


@pytest.mark.parametrize("chunks", [None, 2])
@pytest.mark.parametrize(
    ("num_layers", "options"),
    [
        (16, {}),
        (16, {FIRST: 2, LAST: 2}),
        (12, {FIRST: 6}),
        (10, {LAST: 4}),
        (14, dict.fromkeys(COUNTED, True)),
        (15, {COUNTED[0]: True}),
    ],
)
def test_layers_equal_those_built_by_megatron(
    num_layers: int, options: dict[str, Any], chunks: int | None
) -> None:
    config: Any = SimpleNamespace(
        num_layers=num_layers,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=chunks,
        pipeline_model_parallel_layout=None,
        **({FIRST: None, LAST: None} | dict.fromkeys(COUNTED, False) | options),
    )

    def built(rank: int, chunk: int | None) -> list[int]:
        offset = get_transformer_layer_offset(config, chunk, rank)
        count = get_num_layers_to_build(config, chunk, rank)
        return list(range(offset + 1, offset + count + 1))

    layers = layers_of_megatron(config)
    assert layers is not None
    ends = {0, -1}
    assert [
        [[layer for layer in chunk if layer not in ends] for chunk in rank] for rank in layers
    ] == [
        [built(rank, chunk) for chunk in ([None] if chunks is None else range(chunks))]
        for rank in range(4)
    ]


def test_vocabulary_parallelism_adds_rows_to_all_ranks() -> None:
    stage_map = StageMap((0, 1, 1, 0), (2, 2, 2, 2))
    expected = [[[0, 1, 2], [7, 8, -1]], [[3, 4], [5, 6]]]
    assert layers_of_stages(stage_map) == expected
    rows = layers_of_stages(stage_map, has_vocabulary_rows=True)
    assert rows == [[[0, 1, 2, -2], [7, 8, -1, -2]], [[3, 4, -2], [5, 6, -2]]]
    with pytest.raises(UnsupportedError, match="and has embedding, 1, 2, vocabulary rows | 7"):
        check_optimizer_state(expected, rows, "/folder")


def test_optimizer_state_by_rank_is_found_among_several_optimizers() -> None:
    assert not has_state_by_rank({"model": {}, "optimizer": {"state": {}}})
    for form, is_by_rank in (("dp_reshardable", True), ("fully_reshardable", False)):
        dense, experts = {"param_state": {}}, {"param_state_sharding_type": form}
        assert has_state_by_rank({"optimizer": {0: dense, 1: experts}}) == is_by_rank


def test_optimizer_state_of_unknown_layers_is_rejected() -> None:
    with pytest.raises(UnsupportedError, match="does not state which rank had which layers"):
        check_optimizer_state(None, LOOPING, "/folder")
    check_optimizer_state(LOOPING, LOOPING, "/folder")


def test_layers_are_read_from_the_saved_megatron_bridge_config(tmp_path: Path) -> None:
    sizes = "num_layers: 8, pipeline_model_parallel_size: 2"
    for model, layers in (
        (f"{sizes}, virtual_pipeline_model_parallel_size: 2", LOOPING),
        (f"{sizes}, pipeline_model_parallel_layout: Etttt|ttttL", None),  # may be a V
    ):
        (tmp_path / "run_config.yaml").write_text(f"model: {{{model}}}")
        assert saved_layers(FRAMEWORK.saved_options(str(tmp_path))) == layers
    assert saved_layers(FRAMEWORK.saved_options(str(tmp_path / "none"))) is None


def test_error_names_the_different_layers() -> None:
    current_layers = [[[0], [7, 8, -1]], [[1, 2, 3, 4], [5, 6]]]
    with pytest.raises(UnsupportedError) as rejected:
        check_optimizer_state(LOOPING, current_layers, "/folder")
    message = "rank 0 had embedding, 1, 2 | 5, 6 and has embedding | 7, 8, output here"
    assert message in str(rejected.value)
    with pytest.raises(UnsupportedError, match="it has 2 pipeline ranks and this run 1"):
        check_optimizer_state(LOOPING, current_layers[:1], "/folder")


BY_RANK = ("--ckpt-format", "torch", "--train-iters", "3", "--save-interval", "2")


def test_schedule_with_several_chunks_rejects_checkpoints_by_ranks(
    farm: Farm, tmp_path: Path
) -> None:
    """Megatron loads them even if --ckpt-format is torch_dist, by the numbers of the chunks."""
    saves = (*BY_RANK, "--exit-interval", "2", "--save", str(tmp_path))
    farm.run(2, *TWO_CHUNKS.split(), *saves, stock=True).check()
    for flags, message in (
        ((), "does not work with --pipeline-schedule v-half: the checkpoint was saved"),
        (BY_RANK, "does not work with --ckpt-format torch: it stores layers by rank and chunk"),
    ):
        loads = ("--load", str(tmp_path), "--no-load-optim")
        text = rejection_text(farm, *V_HALF.split(), *flags, *loads, ranks=2, timeout_s=60)
        assert message in text


def test_schedule_with_one_chunk_loads_checkpoints_by_ranks(farm: Farm, tmp_path: Path) -> None:
    farm.run(2, *BY_RANK, "--exit-interval", "2", "--save", str(tmp_path), stock=True).check()
    flags = ("--pipeline-schedule", "zb-h1", *BY_RANK, "--load", str(tmp_path), "--no-load-optim")
    run = farm.run(2, *flags).check()
    (step,) = run.record["losses"]
    assert step["lm loss"] > 0


TWO_CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"
STATE = ("--use-distributed-optimizer", "--bf16", *UNTIED.split(), "--train-iters", "2")
ADAM = "fused_adam"


def save_state(farm: Farm, folder: Path, *flags: str, stock: bool = False) -> Ended:
    saves = ("--save", str(folder), "--save-interval", "2")
    return farm.run(2, *STATE, *flags, *saves, stock=stock, plugin=ADAM).check()


def load_state(farm: Farm, folder: Path, *flags: str) -> Ended:
    return farm.run(2, *STATE, *flags, "--load", str(folder), plugin=ADAM).check()


@pytest.fixture(scope="module")
def v_half_state(farm: Farm, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    path = tmp_path_factory.mktemp("state")
    return path, save_state(farm, path, *V_HALF.split())


@pytest.fixture(scope="module")
def stock_state(farm: Farm, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    path = tmp_path_factory.mktemp("state")
    return path, save_state(farm, path, stock=True)


def assert_state_equal(loaded: Ended, saved: Ended) -> None:
    assert loaded.record["losses"] == []
    for key in ("parameters", "moments"):
        assert_same_tensors(loaded.by_place(key), saved.by_place(key))


def test_default_optimizer_state_loads_with_the_same_layers(
    farm: Farm, v_half_state: tuple[Path, Ended], stock_state: tuple[Path, Ended]
) -> None:
    for (folder, saved_run), schedule in ((v_half_state, "v-zb"), (stock_state, "zb-h1")):
        loaded = load_state(farm, folder, "--pipeline-schedule", schedule)
        assert_state_equal(loaded, saved_run)


def assert_rejects_state(farm: Farm, folder: Path, flags: str, *texts: str) -> None:
    loads = (*STATE, *flags.split(), "--load", str(folder))
    text = rejection_text(farm, *loads, ranks=2, plugin=ADAM, timeout_s=120)
    assert "the distributed optimizer saved it by rank" in text
    assert "--dist-ckpt-optim-fully-reshardable" in text
    assert all(part in text for part in texts)


@pytest.mark.parametrize(
    ("flags", "placement"),
    [
        # Equal parameter counts per rank and chunk: Megatron would load the state of other layers.
        (f"{V_HALF} --pipeline-layer-split 3,1,3,1", "has embedding, 1, 2, 3 | 8, output here"),
        (f"{V_HALF} --pipeline-vocab-parallel", "7, 8, output, vocabulary rows here"),
        ("", "has embedding, 1, 2, 3, 4 here"),  # stock Megatron with this package registered
    ],
)
def test_default_optimizer_state_of_other_layers_is_rejected(
    farm: Farm, v_half_state: tuple[Path, Ended], flags: str, placement: str
) -> None:
    layers = "rank 0 had embedding, 1, 2 | 7, 8, output"
    assert_rejects_state(farm, v_half_state[0], flags, layers, placement)


def test_default_optimizer_state_of_stock_megatron_is_rejected_under_a_v(
    farm: Farm, stock_state: tuple[Path, Ended]
) -> None:
    folder, saved_run = stock_state
    layers = "had embedding, 1, 2, 3, 4 and has embedding, 1, 2 | 7, 8, output"
    assert_rejects_state(farm, folder, V_HALF, layers)
    weights = load_state(farm, folder, *V_HALF.split(), "--no-load-optim")
    assert_same_tensors(weights.whole("parameters"), saved_run.whole("parameters"))


@pytest.mark.slow
def test_fixes_for_default_optimizer_state_work(farm: Farm, tmp_path: Path) -> None:
    """Interleaved layers load under the same placement, and convert to those of a V."""
    saved_run = save_state(farm, tmp_path / "default", *TWO_CHUNKS.split(), stock=True)
    grouped = ("--pipeline-schedule", "grouped-interleaved-1f1b")
    assert_state_equal(load_state(farm, tmp_path / "default", *grouped), saved_run)
    flags = ("--train-iters", "3", "--dist-ckpt-optim-fully-reshardable")
    flags += ("--override-opt_param-scheduler",)
    saves = ("--save", str(tmp_path / "full"), "--save-interval", "3")
    converted = load_state(farm, tmp_path / "default", *TWO_CHUNKS.split(), *flags, *saves)
    loaded = load_state(farm, tmp_path / "full", *V_HALF.split(), *flags)
    converted.record["losses"].clear()
    assert_state_equal(loaded, converted)


def test_fully_reshardable_state_of_several_padded_buckets(farm: Farm, tmp_path: Path) -> None:
    """Megatron up to 0.19 saves the state of neighboring parameters; see `hooks.checkpoints`."""
    full = "--dist-ckpt-optim-fully-reshardable"
    buckets = ("--overlap-grad-reduce", "--ddp-bucket-size", "4000")
    saved_run = save_state(farm, tmp_path, *V_HALF.split(), full, *buckets)
    assert_state_equal(load_state(farm, tmp_path, "--pipeline-schedule", "zb-h1", full), saved_run)
