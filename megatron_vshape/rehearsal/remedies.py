"""Flags of this package that lower the peak memory of a training command.

Candidates are ranked by peaks from one counted layer (`configuration_costs`), as in `advise`, which
are within about 1% of an estimate of all layers. A dry run of all layers confirms the first ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_vshape.core.check.simulate import peak_held
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.layers import even_layers
from megatron_vshape.core.model.pieces import Pieces
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.planner.lighter import lighter_layers
from megatron_vshape.core.planner.vocabulary import (
    estimate_logits_bytes,
    shared_pieces,
    with_vocabulary_passes,
)
from megatron_vshape.rehearsal import report
from megatron_vshape.rehearsal.command import SCHEDULE, Command, Sizes, flags_of
from megatron_vshape.rehearsal.configuration_costs import (
    costs_of_counted_ranks,
    reports_of_commands,
)
from megatron_vshape.rehearsal.rank_report import RankReport
from megatron_vshape.rehearsal.ranks import PER_RANK, DryRunConfig, rehearse_all

NAMES = ("v-half", "v-min")
"""Schedules to try: the one with the smaller bubble first."""

_MAX_RANKS = 8
"""Pipeline ranks up to which a layer split is searched for (minutes above)."""

_MIN_SAVED = 0.03
"""Share of the peak: less is within the error of the estimate."""


_MAX_TRIED = 3
"""Remedies that a dry run of all layers estimates, until one starts and lowers the peak."""

VOCABULARY = "--pipeline-vocab-parallel"


@dataclass(frozen=True, slots=True)
class Remedy:
    """Flags, and the estimated peak of every pipeline rank with them."""

    flags: dict[str, Any]  # arguments of `Command.having`
    peak_bytes: tuple[float, ...]

    @property
    def text(self) -> str:
        """Return the flags as on a command line."""
        return " ".join(flags_of(self.flags))

    @property
    def most_bytes(self) -> float:
        """Return the peak of the largest rank."""
        return max(self.peak_bytes)

    @property
    def largest(self) -> int:
        """Return the rank with the largest peak."""
        return self.peak_bytes.index(self.most_bytes)


def remedy_lines(
    command: Command,
    config: DryRunConfig,
    sizes: Sizes,
    mine: Sequence[RankReport],
    headroom_bytes: float,
) -> list[str]:
    """Format the flags that lower the peak of the command; empty if its layers are not counted.

    Args:
        command: the training command.
        config: programs and GPU of the dry runs.
        sizes: parallel sizes of the command.
        mine: reports of its ranks.
        headroom_bytes: memory of each GPU to keep free.
    """
    if sizes.pipeline < 2 or not command.layers:
        return []
    (reports,) = reports_of_commands(config, [command], lambda *_: None)
    if isinstance(reports, str):  # this model cannot be counted by layers
        return []
    pieces = costs_of_counted_ranks(
        reports, command, config.gpu, sizes.world, sizes.pipeline
    ).pieces
    can_share = not command.mtp_layers and 2 * sizes.pipeline <= command.layers
    microbatches = mine[0].step.microbatches
    candidates = remedies(pieces, command.layers, sizes.pipeline, microbatches, can_share)
    peak = max(report.memory.peak_bytes for report in mine)
    communicators = max(report.communicators for report in mine)
    limit = config.gpu.allocatable_bytes(communicators, headroom_bytes)
    lines = []
    for remedy in useful_remedies(candidates, peak, limit)[:_MAX_TRIED]:
        job = config.job(command.of_megatron().having(**remedy.flags), sizes, remedy.largest, "")
        (result,) = rehearse_all(config.programs, [job])
        if isinstance(result, RankReport) and result.memory.peak_bytes < peak:
            fit = config.gpu.fit_of(result.memory.peak_bytes, result.communicators, headroom_bytes)
            text = report.remedy_line(result.memory.peak_bytes, peak, fit)
            lines.append(f"Less memory with {remedy.text}: {text}.")
            break
    if not lines and peak > limit:
        larger_size = ", or a larger --tensor-model-parallel-size"
        lines.append(
            "No schedule of this package lowers the peak: consider recomputation"
            + larger_size * (2 * sizes.tensor <= config.gpu.node)
            + "."
        )
    v_half = next((remedy for remedy in candidates if remedy.text == f"{SCHEDULE} v-half"), None)
    has_neither = not (command.value(SCHEDULE) or command.has(VOCABULARY))
    if has_neither and v_half is not None and v_half.most_bytes > peak:
        fit = config.gpu.fit_of(v_half.most_bytes, communicators, headroom_bytes)
        text = report.remedy_line(v_half.most_bytes, peak, fit)
        why = ", because rank 0 then has embedding and output layer" if not v_half.largest else ""
        lines.append(f"{v_half.text} alone does not help: {text}{why}.")
    return lines


def remedies(
    pieces: Pieces, num_layers: int, ranks: int, microbatches: int, can_share: bool
) -> list[Remedy]:
    """Estimate the peaks of flags that could lower it, in the order in which a user would try them.

    `can_share` allows vocabulary parallelism; without it layers are moved between ranks.
    """
    microbatches = min(microbatches, PER_RANK * ranks)
    candidates: list[Remedy] = []
    for name in NAMES:
        try:
            schedule = make(name, ranks, microbatches)
            candidates += _of_schedule(name, schedule, pieces, num_layers, can_share)
        except ScheduleError:  # too few layers or microbatches
            continue
    return candidates


def _of_schedule(
    name: str, schedule: Schedule, pieces: Pieces, num_layers: int, can_share: bool
) -> Iterator[Remedy]:
    ranks, flags = schedule.num_devices, {"pipeline_schedule": name}
    layers = _layers(pieces, num_layers, schedule)
    costs = pieces.costs(layers)
    yield Remedy(flags | _split_flags(layers), tuple(peak_held(schedule, costs)))
    if can_share:
        shared = shared_pieces(pieces, ranks, pieces.send_us, estimate_logits_bytes(pieces, ranks))
        layers = _layers(shared, num_layers, schedule)
        costs = shared.costs(layers)
        peaks = peak_held(with_vocabulary_passes(schedule, costs), costs)
        yield Remedy(flags | {"pipeline_vocab_parallel": True} | _split_flags(layers), tuple(peaks))
    elif ranks <= _MAX_RANKS:
        layers, _ = lighter_layers(make(name, ranks, 2 * ranks), costs, pieces.shares)
        yield Remedy(flags | _split_flags(layers), tuple(peak_held(schedule, pieces.costs(layers))))


def _layers(pieces: Pieces, num_layers: int, schedule: Schedule) -> tuple[int, ...]:
    """Return the layers per stage: even, or balanced if they do not divide."""
    if num_layers % schedule.num_stages:
        return pieces.balanced(num_layers, schedule.placement)
    return even_layers(num_layers, schedule.placement)


def _split_flags(layers: Sequence[int]) -> dict[str, Any]:
    if len(set(layers)) == 1:
        return {}
    return {"pipeline_layer_split": ",".join(map(str, layers))}


def useful_remedies(
    candidates: Sequence[Remedy], peak_bytes: float, limit_bytes: float
) -> list[Remedy]:
    """Return the remedies that lower the peak, most useful first.

    If the run does not fit: those that fit, simplest first, then the smallest. If it fits: of the
    first schedule that helps, the smallest first.
    """
    lower = [remedy for remedy in candidates if remedy.most_bytes <= (1 - _MIN_SAVED) * peak_bytes]
    if peak_bytes > limit_bytes:
        return sorted(lower, key=lambda remedy: (max(0.0, remedy.most_bytes - limit_bytes),))
    return sorted(
        lower,
        key=lambda remedy: (NAMES.index(remedy.flags["pipeline_schedule"]), remedy.most_bytes),
    )
