"""The estimate without a pipeline: sharded memory, exchanges of every microbatch, the sentence."""

from dataclasses import replace

import pytest
from tuning.test_advice import LAYERS_36, NOTHING, make_advice, subject

from megatron_vshape.core.model.amounts import STATE_BYTES
from megatron_vshape.core.model.kinds import TIMES, Kind
from megatron_vshape.core.model.pieces import Pieces
from megatron_vshape.core.model.stage_costs import StageCosts
from megatron_vshape.rehearsal import accuracy
from megatron_vshape.rehearsal.gpus import GIB, GPUS, Fit
from megatron_vshape.rehearsal.step_time import Rates, rates_of
from megatron_vshape.tuning import fsdp
from megatron_vshape.tuning.advice import Advice
from megatron_vshape.tuning.machine import Machine
from megatron_vshape.tuning.predictor import FixedCosts

BILLION = 1e9
LAYER = StageCosts.of(4e3, 4e3, 4e3, GIB / 64, 0.0, state_bytes=18 * BILLION / 36)


def without_pipeline(number: int, layer: StageCosts = LAYER) -> tuple[Advice, float, float]:
    """Return an advice for this number of H100, and the step and peak of FSDP2."""
    words = LAYERS_36.replace("global-batch-size 32", "global-batch-size 256") + " --bf16"
    advice = make_advice(subject(words), Pieces(layer, NOTHING, NOTHING, 0.0))
    predictor = replace(advice.predictor, machine=Machine(GPUS["h100"], number))
    advice.predictor = predictor
    row = fsdp.best(predictor, advice.command_config)
    assert row.step_s is not None
    assert row.configuration.data_parallel == number
    return advice, row.step_s, row.ranks[0].allocated


def test_states_are_sharded_and_layers_are_gathered() -> None:
    """Of a billion parameters, 18 bytes are sharded; a 36th of them is gathered, twice."""
    peaks = {number: without_pipeline(number)[2] for number in (8, 64)}
    gathered = BILLION / 36 * (2 * 2 + 4)
    activations = 36 * GIB / 64
    for number, peak in peaks.items():
        assert peak == pytest.approx(18 * BILLION / number + gathered + activations, rel=1e-3)


def test_retained_inputs_are_neither_sharded_nor_gathered() -> None:
    """A layer with recomputed experts keeps inputs between steps, in addition to its states."""
    advice, step_s, peak = without_pipeline(8)
    counted = advice.predictor.counts.costs_of(advice.command_config)
    layer = LAYER.increased({STATE_BYTES: GIB / 64})
    counted_inputs = replace(counted, pieces=replace(counted.pieces, layer=layer))
    row = fsdp.best(
        replace(advice.predictor, counts=FixedCosts(counted_inputs)), advice.command_config
    )
    assert row.step_s == step_s
    assert row.ranks[0].allocated == pytest.approx(peak + 36 * GIB / 64)


def test_exchanges_are_exposed_where_the_network_is_slower_than_the_computation() -> None:
    """Two gathers and a reduction in every microbatch: 4 + 4 bytes of each parameter."""
    gpu, rates = GPUS["h100"], rates_of(GPUS["h100"])
    computes_s = 36 * 12e-3
    _, near_s, _ = without_pipeline(8)
    sent_bytes = 8 * BILLION * 7 / 8
    exchange_s = sent_bytes / gpu.near_rate / rates.wire + 36 * 3 * 1e-6 * rates.exchange_us
    hidden = Rates().replicas_exposed * exchange_s  # the first and last layers are not overlapped
    assert near_s == pytest.approx(256 / 8 * (computes_s + hidden), rel=1e-3)
    quick = LAYER.changed(dict.fromkeys(TIMES, 10.0))
    _, exposed_s, _ = without_pipeline(8, quick)
    assert exposed_s == pytest.approx(256 / 8 * exchange_s, rel=0.05)


def test_a_gain_is_reported_if_it_is_larger_than_the_error() -> None:
    advice, _, _ = without_pipeline(8)
    row = fsdp.best(advice.predictor, advice.command_config)
    within = accuracy.threshold(advice.case)
    for factor, words in (
        (1 / (1 - within) + 0.05, "faster than the best pipeline, more than the error"),
        (1.0, "within the error"),
        (0.5, "slower"),
    ):
        baseline = replace(row, step_s=factor * row.step_s)
        assert words in fsdp.format_comparison(row, baseline, advice.case)
    too_much = replace(row, verdict=row.verdict.OUT_OF_MEMORY, fit=Fit.TOO_LARGE)
    assert fsdp.format_comparison(too_much, row, advice.case).endswith("does not fit.")
    assert not fsdp.format_comparison(None, row, advice.case)


def test_a_model_that_does_not_fit_is_the_smallest_or_none() -> None:
    """States that do not fit need no dry run; too many activations are tried with recompute."""
    _, _, peak = without_pipeline(8, LAYER.changed({Kind.F.allocated: 4.0 * GIB}))
    assert peak > 80 * GIB
    many = LAYER.changed({STATE_BYTES: 18 * 60 * BILLION / 36})  # 135 GB on each of 8 ranks
    advice = make_advice(subject(LAYERS_36), Pieces(many, NOTHING, NOTHING, 0.0))
    predictor = replace(advice.predictor, machine=Machine(GPUS["h100"], 8))
    assert fsdp.best(predictor, advice.command_config) is None
