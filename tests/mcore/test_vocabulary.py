"""Vocabulary parallelism over pipeline ranks: training equals Megatron's 1F1B."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mcore.farm import Farm, Train
from mcore.other_trainer import DeferredConfig
from mcore.parity import SHARED, UNTIED, assert_same_training, join_rows, losses
from mcore.test_library import RunResults, assert_equal_outputs, assert_equal_results, run_library
from shared_costs import shared_costs

from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import HEAD_WEIGHT, LOGITS, ScheduleError
from megatron_vshape.core.model.passes import Pass
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.model.stage_costs import StageCosts
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.planner.vocabulary import share_vocabulary
from megatron_vshape.mcore.features.vocabulary import check_model_options
from megatron_vshape.mcore.options import options_from
from megatron_vshape.mcore.refusals import UnsupportedError
from megatron_vshape.mcore.setup.configure import pipeline_from_config

STEPS = ("--train-iters", "3", "--eval-interval", "3", "--eval-iters", "1")


def test_every_rank_has_vocabulary_rows(train: Train) -> None:
    run = train(4, "--pipeline-schedule", "v-half", SHARED, *STEPS, UNTIED)
    names = ("embedding.word_embeddings.weight", "output_layer.weight")
    for rank, record in enumerate(run.records):
        for name in names:
            assert record["rows"][name] == 32 * rank
            assert len(record["parameters"][name]) == 32
    assert "S" in run.output[0].partition("pipeline schedule v-half")[2]


@pytest.mark.slow
def test_vocabulary_passes_of_a_schedule_file_run(train: Train, tmp_path: Path) -> None:
    """Vocabulary passes run at their positions in the file, or are inserted if missing."""
    plain = make("1f1b-v", 4, 8)
    stages = Costs.uniform(4, plain.num_stages)
    nothing, head = StageCosts.of(0, 0, 0), StageCosts.of(1, 1, 1, 0, 0)
    shared_schedule = share_vocabulary(
        plain, shared_costs(stages, nothing, head, 4, 0.1), additional=2.0
    )
    runs = []
    for name, schedule, flags in (("shared", shared_schedule, ()), ("plain", plain, (SHARED,))):
        file = tmp_path / f"{name}.json"
        file.write_text(schedule.to_json())
        runs.append(train(4, "--pipeline-schedule", str(file), *STEPS, UNTIED, *flags))
        assert runs[-1].records[2]["rows"]
    assert losses(runs[0]) == losses(runs[1])
    assert_same_training(runs[0], runs[1])


def swap_passes(schedule: Schedule, first: Pass, second: Pass) -> Schedule:
    """Return the schedule with two passes swapped on every rank that has both."""
    names = {first: second, second: first}
    rows = tuple(
        tuple(names.get(work, work) if {first, second} <= set(row) else work for work in row)
        for row in schedule.order
    )
    return replace(schedule, order=rows)


def test_schedule_file_with_misplaced_vocabulary_passes_is_rejected() -> None:
    plain = make("v-half", 2, 4)
    head = StageCosts.of(1, 1, 1, 0, 0)
    costs = shared_costs(Costs.uniform(2, 4), StageCosts.of(0, 0, 0), head, 2, 0.1)
    shared_schedule = share_vocabulary(plain, costs)
    verify(shared_schedule)
    early_logits = swap_passes(shared_schedule, Pass(LOGITS, 0, 1), Pass(HEAD_WEIGHT, 0, 0))
    with pytest.raises(ScheduleError, match=r"T0\.0 runs before S0\.1 on device 0, and must"):
        verify(early_logits)
    lacking = tuple(
        tuple(work for work in row if work.kind != "J") for row in shared_schedule.order
    )
    with pytest.raises(ScheduleError, match="J of microbatch 0 runs no times on device 0"):
        verify(replace(shared_schedule, order=lacking))


@pytest.mark.parametrize("flags", [SHARED, "--pipeline-slices 2"])
def test_loss_function_sees_the_last_stage(farm: Farm, flags: str) -> None:
    """Rank 0 has the last stage of a V; the loss is computed after the pass."""
    plugin = "plugins:loss_queries_stage"
    schedule = ("--pipeline-schedule", "v-half", *flags.split())
    ended = farm.run(2, *schedule, *STEPS, UNTIED, plugin=plugin).check()
    assert len(losses(ended)) == 3


@pytest.mark.parametrize("values", ["dgrads", "activations"])
def test_saving_tensors_of_the_output_layer_is_rejected(values: str) -> None:
    text = f"^{SHARED} does not work with --save-{values}-interval: it saves tensors"
    with pytest.raises(UnsupportedError, match=text):
        check_model_options(Namespace(**{f"save_{values}_interval": 2}))


def test_mcore_bridge_model_is_rejected() -> None:
    options = options_from({"schedule": "v-half", "vocab_parallel": True})
    config = DeferredConfig(num_layers=8, hidden_size=32, num_attention_heads=4)
    config.pipeline_model_parallel_size = 2
    assert pipeline_from_config(config, options).choice.shards_output_layer
    swift = type("ModelConfig", (DeferredConfig,), {"__module__": "mcore_bridge.config"})
    config = swift(num_layers=8, hidden_size=32, num_attention_heads=4)
    config.pipeline_model_parallel_size = 2
    with pytest.raises(UnsupportedError, match=f"^{SHARED} does not work with a model of mcore_br"):
        pipeline_from_config(config, options)


def test_vocabulary_is_padded_to_a_multiple_of_the_ranks(farm: Farm) -> None:
    flags = ("--num-layers", "12", "--global-batch-size", "4", UNTIED)
    ended = farm.run(3, "--pipeline-schedule", "v-half", SHARED, *STEPS, *flags).check()
    assert "pads the vocabulary to a multiple of 192, not of 64" in ended.output[0]
    rows = [len(record["parameters"]["output_layer.weight"]) for record in ended.records]
    assert rows == [64] * 3


def join_library_rows(run: RunResults) -> RunResults:
    """Return a library's run with concatenated vocabulary rows."""
    return run._replace(gradients=join_rows(run.gradients), parameters=join_rows(run.parameters))


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["bridge", "areal"])
def test_library_training_equals_its_1f1b(farm: Farm, shape: str) -> None:
    plain = run_library(farm, shape, None)
    for schedule in ("v-half", "zb-h1"):
        package_run = run_library(farm, shape, schedule, options={"vocab_parallel": True})
        assert "embedding.word_embeddings.weight@0032" in package_run.parameters
        assert_equal_results(join_library_rows(package_run), plain)


VARIABLE = {
    "lengths": {},
    "lengths, tied": {"ties": True},
    "numbers of sequences": {"sequences": [1, 2]},
    "lengths and numbers of sequences, MTP": {"sequences": [2, 1], "predicting": 1},
}
"""Microbatches of 24, 7 and 16 tokens; labels are passed to the model."""


@pytest.mark.parametrize(
    ("case", "schedule"),
    [
        *((case, "v-half") for case in VARIABLE),
        ("lengths and numbers of sequences, MTP", "zb-h1"),
        *(
            pytest.param(case, "zb-h1", marks=pytest.mark.slow)
            for case in ("lengths", "lengths, tied", "numbers of sequences")
        ),
    ],
)
def test_variable_length_microbatches_equal_megatron(farm: Farm, case: str, schedule: str) -> None:
    run_options = VARIABLE[case]
    plain = run_library(farm, "verl", None, ranks=2, **run_options)
    options = {"vocab_parallel": True}
    package_run = run_library(farm, "verl", schedule, options=options, ranks=2, **run_options)
    assert_equal_results(join_library_rows(package_run), join_library_rows(plain))


OF_LOGITS = {
    "where it is called": {"reads_logits": "call"},
    "in the loss": {"reads_logits": "loss"},
    "tensor parallel": {"reads_logits": "call", "tensor": 2, "pipeline": 2, "ranks": 4},
    "two replicas": {"reads_logits": "loss", "pipeline": 2},
}
"""Place and parallelism of the log-probabilities that a library computes from logits."""


@pytest.mark.parametrize(
    "run_options",
    [
        pytest.param(run_options, id=name, marks=[pytest.mark.slow] * bool(number))
        for number, (name, run_options) in enumerate(OF_LOGITS.items())
    ],
)
def test_library_loss_from_logits_equals_megatron(farm: Farm, run_options: dict[str, Any]) -> None:
    """Log-probabilities, entropy and a policy loss of variable-length microbatches."""
    plain = run_library(farm, "verl", None, **run_options)
    for schedule in ("v-half", "zb-h1"):
        package_run = run_library(
            farm, "verl", schedule, options={"vocab_parallel": True}, **run_options
        )
        assert "output_layer.weight" not in package_run.parameters  # each rank has some rows
        assert_equal_results(join_library_rows(package_run), join_library_rows(plain))
        assert_equal_outputs(package_run, plain, ("log_probs", "entropy", "branched", "tuned"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run_options", "message"),
    [
        ({"reads_other_data": 0}, "rank 0 has read another microbatch than the first stage"),
        ({"predicting": 1}, "multi-token prediction learns from labels"),
        ({"smoothing": 0.1}, "does not support label_smoothing 0.1"),
    ],
)
def test_unsupported_losses_from_logits_are_rejected(
    farm: Farm, run_options: dict[str, Any], message: str
) -> None:
    options = {"vocab_parallel": True}
    with pytest.raises(AssertionError, match=message):
        run_library(farm, "verl", "v-half", options=options, reads_logits="call", **run_options)


def test_extended_embedding_and_output_layer_without_vocabulary_parallelism(farm: Farm) -> None:
    """Megatron-Bridge extends the embedding and output layer of Gemma 2 after construction."""
    plain = run_library(farm, "bridge", None, ranks=2)
    extends = ["scaled", "capped"]
    extended = run_library(farm, "bridge", None, ranks=2, extends=extends)
    assert abs(extended.losses[0][0] - plain.losses[0][0]) > 1e-3
    for schedule in ("v-half", "zb-h1"):
        package_run = run_library(farm, "bridge", schedule, ranks=2, extends=extends)
        assert_equal_results(package_run, extended)


def test_scaled_embedding_with_vocabulary_parallelism(farm: Farm) -> None:
    extended = run_library(farm, "bridge", None, ranks=2, extends=["scaled"])
    for schedule in ("v-half", "zb-h1"):
        options, run_options = {"vocab_parallel": True}, {"extends": ["scaled"]}
        package_run = run_library(farm, "bridge", schedule, options=options, ranks=2, **run_options)
        assert_equal_results(join_library_rows(package_run), extended)


CHANGED = {
    "capped": "changes its output layer by Capped",
    "critic": "does not support a model with Linear as its output layer",
    "replaced": "does not support a model with VocabParallelEmbedding as its word embedding",
    "hooked": "changes its output layer by a hook",
    "other loss": "changes its loss by a compute_language_model_loss of its own",
    "doubled": "changes its word embedding by Doubled",
    "shifted": "looks up other tokens in its word embedding than the input_ids",
}


@pytest.mark.parametrize("schedule", ["v-half", "zb-h1"])
@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=[pytest.mark.slow] * (what not in ("capped", "shifted")))
        for what in CHANGED
    ],
)
def test_changed_embedding_or_output_layer_is_rejected(
    farm: Farm, what: str, schedule: str
) -> None:
    """All ranks report one message, even if only the rank of the last stage found the change."""
    options = {"vocab_parallel": True}
    with pytest.raises(AssertionError, match=CHANGED[what]) as failed:
        run_library(farm, "bridge", schedule, options=options, ranks=2, extends=[what])
    message = str(failed.value)
    assert [f"rank {rank}: exit code 1" in message for rank in range(2)] == [True] * 2
    if what != "shifted":  # detected during a step
        assert message.count(CHANGED[what]) == 1
        assert "Traceback" not in message
