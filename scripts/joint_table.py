#!/usr/bin/env python3
"""Print what forwards beside backwards gain, against Megatron's own overlap and DualPipeV.

    python scripts/joint_table.py [--devices D] [--microbatches M ...] [--exchange SHARE ...]
        [--hidden SHARE] [--send T] [--steps N]
    python scripts/joint_table.py --figure FILE.svg

Equal stages, F = B = 1 per chunk of 1 / (2 D) of the model, of which a share is exchange between
the experts' ranks; W computes as F does. An exchange is exposed in a pass that runs alone, and what
--hidden says of it (all) is not in a joint pass. A cell is the step, in F, and in brackets the same
over the computing of a step, all exchanges hidden and no device idle. Plans are at the memory of
Megatron's overlap with 4 stages a device, and of two stages a device at that of the same with two,
DualPipeV, 1F1B, three quarters of that and V-Half, with a chunk more and without; `nothing joint`
is the best plan without. --figure draws what 4 devices do of 10 microbatches at the first of the
shares.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron_vshape.core.ask import Question, best_order, known_as
from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.costs import Costs, regroup
from megatron_vshape.view.numbers import fixed, note, numbers_of, table

CHUNKS = 4
"""Stages a device, at most: the costs are of so many, and of fewer by adding up."""

FINER = "Megatron's of 4 a device"
"""The limit at which a plan may have `CHUNKS` stages a device."""

KNOWN = (
    "1f1b",
    "interleaved-1f1b:2",
    "overlapped-interleaved-1f1b:2",
    "interleaved-1f1b:4",
    "overlapped-interleaved-1f1b:4",
    "v-half",
    "v-zb",
    "dualpipev",
)


def costs_of(devices: int, exchange: float, hidden: float, send: float) -> Costs:
    """Return the costs of `CHUNKS` stages a device."""
    stages, compute = CHUNKS * devices, 1 - exchange
    waits = (exchange * 2 / CHUNKS,) * stages
    equal = Costs.uniform(devices, stages, compute, compute, compute, send)
    return replace(
        equal, forward_exchange_us=waits, backward_exchange_us=waits, hidden_share=hidden
    )


def limits(devices: int) -> dict[str, float]:
    """Return at how many chunks a plan is looked for."""
    return {
        FINER: 2.5 * devices,
        "Megatron's of 2 a device": 3.0 * devices,
        "DualPipeV's": 2.0 * devices + 1,
        "1F1B's": 2.0 * devices,
        "3/4": 1.5 * devices,
        "V-Half's + 1": devices + 3.0,
        "V-Half's": devices + 2.0,
    }


def rows(args: argparse.Namespace) -> Iterator[list[str]]:
    """Yield a heading and a row for every schedule."""
    cells = [(m, share) for share in args.exchange for m in args.microbatches]
    yield ["schedule", "peak", *(f"m={m}, {share:.0%}" for m, share in cells)]
    found: dict[str, list[tuple[float, float]]] = {}
    for m, share in cells:
        ideal = 6 * (1 - share) * m
        costs = costs_of(args.devices, share, args.hidden, args.send)
        asked = Question("auto", args.devices, m, costs)
        for name in KNOWN:
            known = known_as(name, asked)
            found.setdefault(name, []).append((known.timeline.makespan / ideal, max(known.peak)))
        coarse = regroup(costs, 2 * args.devices, "a plan")
        for joins, label in ((True, "plan"), (False, "nothing joint")):
            for limit, chunks in limits(args.devices).items():
                own = costs if limit == FINER else coarse
                own = own if joins else own.never_joined()
                plan = best_order(
                    replace(asked, costs=own, limit=chunks, steps=args.steps, holds_less=False)
                ).plan
                name = f"{label}, {limit} memory"
                found.setdefault(name, []).append((plan.value / ideal, max(plan.peak)))
    for name, values in found.items():
        peak = fixed(max(held for _, held in values))
        steps = [
            f"{over * 6 * (1 - share) * m:.1f} ({over:.2f})"
            for (over, _), (m, share) in zip(values, cells, strict=True)
        ]
        yield [name, peak, *steps]


def draw(args: argparse.Namespace) -> None:
    """Draw the published order and plans on one time axis."""
    from megatron_vshape.view.figure import comparison_figure, save

    costs = regroup(costs_of(4, args.exchange[0], args.hidden, args.send), 8, "a plan")
    asked = Question("auto", 4, 10, costs, steps=args.steps, holds_less=False)
    shown = {"dualpipev": known_as("dualpipev", asked).timeline}
    for limit in ("1F1B's", "V-Half's"):
        answer = best_order(replace(asked, limit=limits(4)[limit]))
        shown[f"plan at {limit} memory"] = simulate(answer.schedule, answer.costs)
    notes = [note(numbers_of(each)) for each in shown.values()]
    save(comparison_figure(list(shown.values()), list(shown), notes), args.figure)


def main() -> None:
    """Print the table, or draw."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--exchange", type=float, nargs="+", default=[0.3, 0.4])
    parser.add_argument("--hidden", type=float, default=1.0)
    parser.add_argument("--send", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=None, help="of each search")
    parser.add_argument("--figure", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.figure is not None:
        draw(args)
    else:
        print(table(list(rows(args))))


if __name__ == "__main__":
    main()
