#!/usr/bin/env python3
"""Print what an output layer costs that one rank has, and what one costs that all ranks share.

    python scripts/vocabulary_table.py [--vocabulary V ...] [--predicting N]

A GPT of 32 layers (h = s = 4096) on 8 devices, 32 microbatches of one sequence: the step in passes
of two layers (F = B = W = 1, a message 0), and GiB of the rank that holds most, activations and
what belongs to parameters (18 bytes each). `even` has two layers in every stage, `balanced` what
--pipeline-layer-split auto makes of it, in the published order; `shared` has embedding and output
layer cut into 8 parts (`planner.vocabulary`), whose sums take 0.1, and the layers dealt out without
them. With --predicting the last stage has so many layers of multi-token prediction, each with an
output layer of its own.
"""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron_vshape.core.check.simulate import peak_held, simulate
from megatron_vshape.core.check.verify import verify
from megatron_vshape.core.model.costs import Costs, Piece
from megatron_vshape.core.model.layers import Pieces, Widths
from megatron_vshape.core.model.placement import Placement, stages_of
from megatron_vshape.core.model.schedule import Schedule
from megatron_vshape.core.paper.catalogue import make
from megatron_vshape.core.planner.vocabulary import MORE, share_vocabulary, shared_costs
from megatron_vshape.core.program.lowering import lower
from megatron_vshape.view.names import display_name

GIB = 2.0**30
DEVICES, MICROBATCHES, LAYERS, HIDDEN, TOKENS = 8, 32, 32, 4096, 4096
VOCABULARIES = (32 * 1024, 128 * 1024, 256 * 1024)
NAMES = ("1f1b", "zb-h1", "v-min", "v-half", "v-zb")
SUM = 0.1
STATE_BYTES = 18  # of a parameter: 16 bits, gradient and master copy of 32, two moments
LAYER_BYTES = 34 * TOKENS * HIDDEN  # of a microbatch, nothing computed twice
LAYER_PARAMETERS = 12 * HIDDEN**2
LOGITS_BYTES = (6, 2)  # of one: 16 bits and softmax in 32 until B, the gradient in 16 until W


@dataclass(frozen=True, slots=True)
class Cell:
    """A step and the GiB of the rank that holds most."""

    step: float
    gib: float

    def __str__(self) -> str:
        return f"{self.step:7.1f} {self.gib:6.1f}"


def pieces_of(vocabulary: int, predicting: int) -> Pieces:
    """Return a layer and the ends in chunk passes and bytes."""
    widths = Widths(HIDDEN, HIDDEN, 2 * HIDDEN, 4 * HIDDEN, False, TOKENS, vocabulary)
    layer = Piece(0.5, 0.5, 0.5, LAYER_BYTES, LAYER_BYTES)
    heads = layer.times((1 + predicting) * widths.head_in_layers)
    kept, left = (size * (1 + predicting) * TOKENS * vocabulary for size in LOGITS_BYTES)
    heads = replace(heads, held_after_forward_bytes=kept, held_after_backward_bytes=left)
    return Pieces(layer, layer.times(0), heads, 0.0)


def further(pieces: Pieces, predicting: int) -> Pieces:
    """Return the pieces with the layers of multi-token prediction in the last stage."""
    merging = 2 * HIDDEN**2 / (LAYER_PARAMETERS + TOKENS * HIDDEN)
    layers = pieces.layer.times(predicting)
    longer = replace(
        layers.times(1 + merging),
        held_after_forward_bytes=layers.held_after_forward_bytes,
        held_after_backward_bytes=layers.held_after_backward_bytes,
    )
    return replace(pieces, last=pieces.last.plus(longer))


def measured(schedule: Schedule, costs: Costs, parameters: Iterable[float]) -> Cell:
    """Return the cell of a schedule at these costs; `parameters` are every device's."""
    held = peak_held(schedule, costs)
    most = max(a + STATE_BYTES * p for a, p in zip(held, parameters, strict=True))
    return Cell(simulate(schedule, costs).makespan, most / GIB)


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
    plain = make(name, DEVICES, MICROBATCHES)
    bare = pieces_of(vocabulary, predicting)
    pieces = further(bare, predicting)
    each = LAYERS // plain.num_stages
    even = (each,) * plain.num_stages
    balanced = pieces.balanced(LAYERS, plain.placement)
    cells = [
        measured(
            plain,
            pieces.costs(layers),
            parameters_of(plain.placement, layers, vocabulary, predicting, shared=False),
        )
        for layers in (even, balanced)
    ]
    logits_bytes = TOKENS * (2 * vocabulary / DEVICES + 2 * HIDDEN) * (1 + predicting)
    alone = further(replace(bare, last=bare.first), predicting)  # without output layers
    layers = alone.balanced(LAYERS, plain.placement)
    ends = bare.first, bare.last
    costs = shared_costs(alone.costs(layers), *ends, DEVICES, SUM, logits_bytes)
    own = parameters_of(plain.placement, layers, vocabulary, predicting, shared=True)
    made = share_vocabulary(plain, costs, MORE.get(name, 0) * each * LAYER_BYTES)
    verify(made)
    lower(made, kernels=True)  # proved to end
    return [*cells, measured(made, costs, own)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--predicting", type=int, default=0, help="Default: %(default)s")
    options = parser.parse_args()
    print(
        "vocabulary schedule  even: step    GiB   balanced    GiB     shared    GiB  "
        "even/shared  balanced/shared"
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


if __name__ == "__main__":
    main()
