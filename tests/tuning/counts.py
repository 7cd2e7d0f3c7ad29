"""Invented counts of the sample model, so that tests of a sweep need no dry runs."""

from collections.abc import Iterable
from typing import Any

from megatron_vshape.core.model.pieces import Pieces
from megatron_vshape.core.model.stage_costs import StageCosts
from megatron_vshape.rehearsal.configuration_costs import CountedCosts
from megatron_vshape.rehearsal.step_time import Rates
from megatron_vshape.tuning import predictor
from megatron_vshape.tuning.configurations import FULL, Configuration, Subject
from megatron_vshape.tuning.files import Loaded
from megatron_vshape.tuning.machine import Machine
from megatron_vshape.tuning.predictor import Predictor

MIB = 2.0**20


def counted(config: Configuration, vocabulary: int = 1024, mtp_layers: int = 0) -> CountedCosts:
    """Return costs of the layers that are proportional to the number of tokens."""
    tokens = config.sequence_length * config.microbatch_size / config.context_parallel
    share = tokens / config.tensor_parallel / 64
    recomputations = 1.0 if config.recompute == FULL else 0.0
    work = {
        "forward_work_bytes": 0.5 * MIB,
        "backward_work_bytes": 0.5 * MIB,
        "whole_work_bytes": 0.5 * MIB,
    }
    layer = StageCosts.of(
        900.0 * share,
        (1000.0 + 900.0 * recomputations) * share,
        700.0 * share,
        (0.1 if recomputations else 2.0) * MIB * share,
        (0.1 if recomputations else 2.5) * MIB * share,
        forward_exchange_us=20.0 * (config.tensor_parallel - 1),
        backward_exchange_us=20.0 * (config.tensor_parallel - 1),
        state_bytes=12.0 * MIB / config.tensor_parallel,
        **work,
    )
    head = vocabulary / 1024
    first = StageCosts.of(10.0, 10.0, 5.0, 0.1 * MIB, 0.0, state_bytes=4.0 * MIB * head)
    last = StageCosts.of(
        200.0 * head * share,
        200.0 * head * share,
        150.0 * head * share,
        1.5 * MIB * head * share,
        0.5 * MIB * head * share,
        state_bytes=4.0 * MIB * head,
    )
    pieces = Pieces(layer, first, last, 100.0, device_bytes=64 * MIB)
    if not config.vocab_parallel:
        pieces = pieces.predicting(mtp_layers)
    return CountedCosts(pieces, 1e-12, 0.0, Rates(), 1e9, 1e9)


def predictor_of(loaded: Loaded) -> Predictor:
    """Return a predictor that uses these counts."""
    subject = loaded.subject
    machine = Machine.of(loaded.cluster)
    return Predictor(subject, machine, Fake(subject, machine), loaded.sweep.post_validation)


class Fake:
    """Replacement of `Counts` without dry runs."""

    def __init__(self, subject: Subject, machine: Machine, *checkouts: object) -> None:
        self.subject = subject

    def count(self, combinations: Iterable[Configuration], progress: Any) -> tuple[int, int]:
        """Count nothing."""
        return 0, 0

    def costs_of(self, config: Configuration) -> CountedCosts:
        """Return the invented costs of a configuration."""
        return counted(config, self.subject.vocabulary, self.subject.mtp_layers)


def install() -> None:
    """Replace `Counts` for the sweeps of this process."""
    module: Any = predictor
    module.Counts = Fake
