#!/usr/bin/env python3
"""Print step time and memory with the output layer on one rank, and with vocabulary parallelism.

    python benchmarks/vocabulary_table.py [--vocabulary V ...] [--predicting N]
    python benchmarks/vocabulary_table.py --algorithms [--vocabulary V ...]

Model: GPT of 32 layers (h = s = 4096), 8 ranks, 32 microbatches of one sequence. The step time is
in passes of two layers (F = B = W = 1, messages 0). GiB is the rank with the highest peak:
activations, and 18 bytes per parameter. `even` has two layers per stage, `balanced` the layer
split of --pipeline-layer-split auto. `parallel` has 1/8 of embedding and output layer on each rank
(`planner.vocabulary`), all-reduces of 0.1 and equal layers. --predicting N adds N layers of
multi-token prediction to the last stage, each with an output layer. --algorithms compares
algorithm 2, which the package uses, with algorithm 1, whose passes need the same time together or,
as published for one host (7.9 ms instead of 8.4 ms), less.
"""

import argparse
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import HEAD_WEIGHT, LOGITS, LOOKED_UP, LOSS, Kind
from megatron_vshape.core.model.layers import Widths
from megatron_vshape.core.model.pieces import Pieces
from megatron_vshape.core.model.placement import Placement, stages_of
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.model.stage_costs import StageCosts
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.planner.vocabulary import (
    ADDITIONAL_MICROBATCHES,
    DELAY_FRACTIONS,
    PENDING_LOGITS,
    _Action,
    _CollectivePass,
    _PassInserter,
    share_vocabulary,
    shared_pieces,
)
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.view.names import display_name

GIB = 2.0**30
DEVICES, MICROBATCHES, LAYERS, HIDDEN, TOKENS = 8, 32, 32, 4096, 4096
VOCABULARIES = (32 * 1024, 128 * 1024, 256 * 1024)
NAMES = ("1f1b", "zb-h1", "v-min", "v-half", "v-zb")
SUM = 0.1
SAVED = 0.06  # of S and T, by Algorithm 1
STATE_BYTES = 18  # of a parameter: 16 bits, gradient and master copy of 32, two moments
LAYER_BYTES = 34 * TOKENS * HIDDEN  # of a microbatch, nothing computed twice
LAYER_PARAMETERS = 12 * HIDDEN**2
LOGITS_BYTES = (6, 2)  # of one: 16 bits and softmax in 32 until B, the gradient in 16 until W


@dataclass(frozen=True, slots=True)
class Cell:
    """A step time and the largest memory of a rank, in GiB."""

    step: float
    gib: float

    def __str__(self) -> str:
        return f"{self.step:7.1f} {self.gib:6.1f}"


def widths_of(vocabulary: int) -> Widths:
    """Return the model's widths."""
    return Widths(HIDDEN, HIDDEN, 2 * HIDDEN, 4 * HIDDEN, False, TOKENS, vocabulary)


def pieces_of(vocabulary: int) -> Pieces:
    """Return the costs of a layer and of embedding and output layer, in chunk passes and bytes."""
    layer = StageCosts.of(0.5, 0.5, 0.5, LAYER_BYTES, LAYER_BYTES)
    head = layer.times(widths_of(vocabulary).head_in_layers)
    after_forward, after_backward = (size * TOKENS * vocabulary for size in LOGITS_BYTES)
    head = head.changed({Kind.F.allocated: after_forward, Kind.B.retained: after_backward})
    return Pieces(layer, layer.times(0), head, 0.0)


def shared_of(vocabulary: int, predicting: int) -> Pieces:
    """Return the same with embedding and output layer split over all devices."""
    logits_bytes = TOKENS * (2 * vocabulary / DEVICES + 2 * HIDDEN) * (1 + predicting)
    return shared_pieces(pieces_of(vocabulary), DEVICES, SUM, logits_bytes, predicting)


def measured(schedule: Schedule, costs: Costs, parameters: Iterable[float]) -> Cell:
    """Return the cell of a schedule at these costs; `parameters` are every device's."""
    activations = peak_held(schedule, costs)
    peak_bytes = max(a + STATE_BYTES * p for a, p in zip(activations, parameters, strict=True))
    return Cell(simulate(schedule, costs).makespan, peak_bytes / GIB)


def parameters_of(
    placement: Placement, layers: tuple[int, ...], vocabulary: int, predicting: int, shared: bool
) -> list[float]:
    """Return how many parameters every device has."""
    ends = 2 * vocabulary * HIDDEN
    counts = [
        float(LAYER_PARAMETERS * sum(layers[stage] for stage in stages))
        for stages in stages_of(placement, DEVICES)
    ]
    counts[placement[-1]] += predicting * (LAYER_PARAMETERS + 2 * HIDDEN**2)
    if shared:
        return [count + ends / DEVICES for count in counts]
    counts[placement[0]] += ends / 2
    counts[placement[-1]] += ends / 2
    return counts


def row(name: str, vocabulary: int, predicting: int) -> list[Cell]:
    """Return the cells of a schedule: even, balanced, shared."""
    plain, merging = make(name, DEVICES, MICROBATCHES), widths_of(vocabulary).merging_in_layers
    pieces = pieces_of(vocabulary).predicting(predicting, merging)
    layers_per_stage = LAYERS // plain.num_stages
    even = (layers_per_stage,) * plain.num_stages
    balanced = pieces.balanced(LAYERS, plain.placement)
    cells = [
        measured(
            plain,
            pieces.costs(layers),
            parameters_of(plain.placement, layers, vocabulary, predicting, shared=False),
        )
        for layers in (even, balanced)
    ]
    alone = shared_of(vocabulary, predicting).predicting(predicting, merging)
    layers = alone.balanced(LAYERS, plain.placement)
    costs = alone.costs(layers)
    local_parameters = parameters_of(plain.placement, layers, vocabulary, predicting, shared=True)
    shared_schedule = share_vocabulary(
        plain, costs, ADDITIONAL_MICROBATCHES.get(name, 0) * layers_per_stage * LAYER_BYTES
    )
    verify(shared_schedule)
    lower(shared_schedule, kernels=True)  # proved to end
    return [*cells, measured(shared_schedule, costs, local_parameters)]


class FirstAlgorithm(_PassInserter):
    """Algorithm 1: T also computes the gradient of the logits' input, and B waits for its sum.

    S computes logits alone. All devices start T when the sums over the vocabulary are available,
    which needs no time here: this favors Algorithm 1.
    """

    def step(self) -> float:
        """Return the step time."""
        self.insert_passes()
        return max(self.clock_us)

    def _next_filler(self, device: int, now: float) -> None:
        return None

    def _run_action(self, action: _Action, device: int) -> None:
        super()._run_action(action, device)
        if action.work.kind is HEAD_WEIGHT:
            self.collective_index[device] += 1
            self._end_collective(
                HEAD_WEIGHT, self.last, action.work.microbatch, self.clock_us[device], device
            )

    def _end_collective(
        self, kind: Kind, stage: int, microbatch: int, end: float, device: int
    ) -> None:
        if kind is LOOKED_UP:
            return super()._end_collective(kind, stage, microbatch, end, device)
        home = self.schedule.placement[stage]
        parts = self.parts.setdefault((kind, microbatch), [])
        parts.append(self._arrival_us(end, device, home))
        if len(parts) < self.schedule.num_devices:
            return None
        if kind is LOSS:
            insort(self.collectives, _CollectivePass(max(parts), microbatch, HEAD_WEIGHT, home))
            return None
        ends = max(*parts, self.collectives_us[home]) + self.costs.time_us(LOSS, stage)
        self.done_us[LOSS, stage, microbatch] = self.collectives_us[home] = ends  # B waits here
        return None


def by_first_algorithm(name: str, vocabulary: int, saved: float) -> tuple[float, float]:
    """Return the step by Algorithm 2, and by 1 if its S and T need less, as a share."""
    plain = make(name, DEVICES, MICROBATCHES)
    layers_per_stage = LAYERS // plain.num_stages
    costs = shared_of(vocabulary, 0).costs((layers_per_stage,) * plain.num_stages)
    additional_bytes = ADDITIONAL_MICROBATCHES.get(name, 0) * layers_per_stage * LAYER_BYTES
    second = simulate(share_vocabulary(plain, costs, additional_bytes), costs).makespan
    head = pieces_of(vocabulary).last.times((1 - saved) / DEVICES)
    times = {
        LOGITS.time: head[Kind.F.time],
        HEAD_WEIGHT.time: head[Kind.B.time] + head[Kind.W.time],
    }
    costs = costs.having({amount: (us,) * plain.num_stages for amount, us in times.items()})
    limits = [peak + additional_bytes for peak in peak_held(plain, costs)]
    ways = (
        FirstAlgorithm(plain, costs, limits, PENDING_LOGITS[0], delay) for delay in DELAY_FRACTIONS
    )
    return second, min(algorithm.step() for algorithm in ways)


def print_algorithms(vocabularies: Iterable[int]) -> None:
    """Print the step time with both algorithms."""
    print("vocabulary schedule   Algorithm 2  Algorithm 1  2 / 1  passes 6% shorter      2 / 1")
    for vocabulary in vocabularies:
        for name in NAMES:
            second, first = by_first_algorithm(name, vocabulary, 0.0)
            _, less = by_first_algorithm(name, vocabulary, SAVED)
            print(
                f"{vocabulary:10d} {display_name(name):10s} {second:11.1f}  {first:11.1f}"
                f"  {second / first:5.3f}  {less:21.1f}  {second / less:5.3f}"
            )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--predicting", type=int, default=0, help="Default: %(default)s")
    parser.add_argument(
        "--algorithms", action="store_true", help="compare Algorithms 1 and 2 of arXiv 2411.05288"
    )
    options = parser.parse_args()
    if options.algorithms:
        return print_algorithms(options.vocabulary)
    print(
        "vocabulary schedule  even: step    GiB   balanced    GiB   parallel    GiB  "
        "even/parallel  balanced/parallel"
    )
    for vocabulary in options.vocabulary:
        for name in NAMES:
            even, balanced, shared = cells = row(name, vocabulary, options.predicting)
            print(
                f"{vocabulary:10d} {display_name(name):10s}",
                *cells,
                f"{even.step / shared.step:10.2f} {balanced.step / shared.step:10.2f}",
                sep="  ",
            )
    return None


if __name__ == "__main__":
    main()
