"""Functions of Megatron and of libraries that support one model chunk per rank, with several."""

import copy
import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mcore.farm import Ended, Farm, Train
from mcore.parity import UNTIED, assert_same_training, losses

from megatron_vshape.core.model.placement import v_shape
from megatron_vshape.mcore.hooks import core_hooks
from megatron_vshape.mcore.hooks.session import Session
from megatron_vshape.mcore.layout.built_layers import _check_kinds
from megatron_vshape.mcore.layout.stage_map import StageMap
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.setup.configure import StageLayout

SETS = (
    "--multiple-validation-sets --full-validation --eval-interval 2 --train-iters 2 --split 50,50,0"
).split()


def evaluate_sets(farm: Farm, ranks: int, schedule: str, everywhere: bool) -> Ended:
    flags = ("--pipeline-schedule", schedule, *SETS)
    return farm.run(ranks, *flags, plugin="plugins:several_sets", argument=everywhere).check()


@pytest.fixture(scope="module")
def losses_of_sets(farm: Farm) -> Ended:
    run = evaluate_sets(farm, 2, "1f1b", everywhere=True)
    first, second, *end = [evaluation["lm loss"] for evaluation in run.record["evaluations"]]
    assert first != pytest.approx(second, rel=1e-4)
    assert end == [first, second]
    return run


@pytest.mark.parametrize("everywhere", [True, False], ids=["data everywhere", "data at ends"])
@pytest.mark.parametrize(
    ("ranks", "schedule"),
    [
        (2, "v-half"),
        pytest.param(4, "v-half", marks=pytest.mark.slow),
        pytest.param(2, "interleaved-1f1b", marks=pytest.mark.slow),
        pytest.param(4, "zb-h1", marks=pytest.mark.slow),
    ],
)
def test_losses_of_validation_sets_equal_1f1b(
    farm: Farm, losses_of_sets: Ended, ranks: int, schedule: str, everywhere: bool
) -> None:
    assert_same_training(evaluate_sets(farm, ranks, schedule, everywhere), losses_of_sets)


HAS_BUILDERS = find_spec("megatron.training.models") is not None
needs_builders = pytest.mark.skipif(
    not HAS_BUILDERS, reason="Megatron-LM builds heterogeneous layers in a script before 0.19"
)


def heterogeneous_flags(layers: str) -> list[str]:
    """Return flags for layers: f full, a without attention, m without MLP, x without both."""
    blocks = [
        {
            "attention": {"no_op": kind in "ax", "n_heads_in_group": None if kind in "ax" else 2},
            "ffn": {"no_op": kind in "mx", "ffn_mult": None if kind in "mx" else 2.0},
        }
        for kind in layers
    ]
    sizes = {"num_hidden_layers": 8, "hidden_size": 32, "num_attention_heads": 4}
    rope = {"rope_theta": 10000, "rope_scaling": {"factor": 8.0}, "tie_word_embeddings": False}
    config = {"hidden_act": "silu", **sizes, **rope, "block_configs": blocks}
    flags = (
        "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 "
        "--use-rotary-position-embeddings --use-rope-scaling --disable-bias-linear "
        "--train-iters 2 --heterogeneous-layers-config-path"
    )
    return [UNTIED, *flags.split(), json.dumps(config)]


@needs_builders
@pytest.mark.parametrize("schedule", ["v-half", pytest.param("v-zb", marks=pytest.mark.slow)])
def test_heterogeneous_layers_equal_1f1b(train: Train, tmp_path: Path, schedule: str) -> None:
    *flags, text = heterogeneous_flags("famxffmf")
    file = tmp_path / "layers.json"
    file.write_text(text)
    expected, run = (
        train(2, "--pipeline-schedule", name, *flags, str(file)) for name in ("1f1b", schedule)
    )
    assert len(losses(expected)) == 2
    assert_same_training(run, expected)


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-layer-freq [0]*2+[1]*6 --disable-bias-linear"
).split()


@needs_builders
@pytest.mark.parametrize(
    ("name", "flags", "text"),
    [
        (
            "get_gpt_decoder_block_spec",
            EXPERTS,
            "chunk 1 is stage 3 and was built with the kinds of layers that moe_layer_freq gives "
            "to chunk 0 (stage 0)",
        ),
        ("GPTModel", [UNTIED], "chunk 1 is stage 3 and was built with the layers [1, 2], not with"),
    ],
)
def test_layers_of_another_chunk_are_rejected(
    farm: Farm, name: str, flags: list[str], text: str
) -> None:
    flags = ["--pipeline-schedule", "v-half", *flags]
    run = farm.run(2, *flags, plugin="plugins:wrong_chunks", argument=name)
    assert 0 not in run.codes
    assert text in "".join(run.output)


DENSE, EXPERTS_ONLY = [False, False], [True, True]


@pytest.mark.parametrize(
    ("expected", "built"),
    [
        ([EXPERTS_ONLY, EXPERTS_ONLY], [DENSE, DENSE]),
        ([EXPERTS_ONLY, EXPERTS_ONLY], [EXPERTS_ONLY, DENSE]),
        ([DENSE, EXPERTS_ONLY], [EXPERTS_ONLY, EXPERTS_ONLY]),
        ([DENSE, EXPERTS_ONLY], [DENSE, [False, True]]),
        ([DENSE, EXPERTS_ONLY], [[None, None], [None, None]]),  # layers of other classes
    ],
)
def test_specs_that_differ_from_the_option_are_accepted(
    expected: list[list[bool]], built: list[list[bool | None]]
) -> None:
    _check_kinds("moe_layer_freq", (0, 3), built, expected)


def test_linear_attention_of_another_chunk_is_rejected() -> None:
    expected = [[True, True], [True, False]]
    with pytest.raises(UnsupportedError, match="linear_attention_freq gives to chunk 0"):
        _check_kinds("linear_attention_freq", (0, 3), [expected[0], expected[0]], expected)


def test_layers_of_a_chunk_and_of_an_encoder() -> None:
    """Layers built without a vp_stage are those of the chunk; an encoder is on one rank."""
    config = SimpleNamespace(
        pipeline_model_parallel_layout=StageLayout(StageMap(v_shape(2), (2, 2, 2, 2))),
        pipeline_model_parallel_size=2,
        num_layers=8,
    )
    pipeline: Any = object()
    session, calls = Session(pipeline=pipeline), []

    def original(block: Any, config: Any, vp_stage: int | None = None) -> None:
        calls.append((config.num_layers, config.pipeline_model_parallel_layout, vp_stage))

    build, layout = core_hooks.block_init(session, original), config.pipeline_model_parallel_layout
    with session.build.setting(provided_chunk=1):
        build(None, config)
    session.build.queried_chunk = 0
    build(None, config)
    build(None, config, vp_stage=1)
    encoder = copy.deepcopy(config)
    encoder.pipeline_model_parallel_size, encoder.num_layers = 1, 3
    build(None, encoder)
    assert calls == [(8, layout, 1), (8, layout, 0), (8, layout, 1), (3, None, None)]
    encoder = copy.deepcopy(config)
    encoder.num_layers = 6
    with pytest.raises(UnsupportedError, match="an encoder of 6 layers on 2 pipeline ranks"):
        build(None, encoder)
