"""What every rank needs at its peak: planned from one costs file, beside rehearsed.

    python scripts/peaks_table.py --megatron ../Megatron-LM --te ../TransformerEngine \
        --folder peaks -- pretrain_gpt.py FLAGS...

FLAGS are of a GPT without a schedule, its layers a multiple of twice the pipeline's ranks. The
costs are counted once (`rehearse --costs`), under V-ZB and 1F1B-V; all that is planned follows from
them: other schedules, other numbers of stages, other layers, multi-token prediction, a vocabulary
that is shared. What is in FOLDER already is not rehearsed again. A rank takes 10 to 60 s.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_vshape import Costs, Schedule, make, peak_held
from megatron_vshape.core.ask import AUTO, Question, best_order
from megatron_vshape.core.model.costs import regroup
from megatron_vshape.core.model.layers import Pieces, even_layers
from megatron_vshape.core.model.placement import looping, v_shape
from megatron_vshape.core.planner.lighter import lighter_layers
from megatron_vshape.core.planner.vocabulary import (
    held_logits,
    share_vocabulary,
    shared_pieces,
)

GIB = 2**30
SUM_US = 200.0
"""A sum over all ranks, for the order of a shared vocabulary; no peak depends on it."""


class Case(NamedTuple):
    """What is rehearsed: flags, and the schedule with the costs of its stages."""

    name: str
    flags: list[str]
    schedule: Schedule
    costs: Costs
    as_file: bool = False


class Model(NamedTuple):
    """The sizes, and what was counted of twice as many stages as ranks."""

    devices: int
    microbatches: int
    layers: int
    costs: Costs

    @property
    def pieces(self) -> Pieces:
        """Return what a layer and the model's ends need."""
        return Pieces.of(self.costs, even_layers(self.layers, v_shape(self.devices)))


def named(model: Model, name: str) -> Case:
    """Return a schedule of the catalogue, by its name; 1F1B is Megatron's own."""
    schedule = make(name, model.devices, model.microbatches)
    own = [] if name == "1f1b" else ["--pipeline-schedule", name]
    return Case(name, own, schedule, regroup(model.costs, schedule.num_stages, name))


def interleaved(model: Model) -> Case:
    """Return Megatron's own, of as many stages as layers."""
    chunks = model.layers // model.devices
    schedule = make("interleaved-1f1b", model.devices, model.microbatches, num_chunks=chunks)
    costs = model.pieces.costs(even_layers(model.layers, looping(model.devices, chunks)))
    flags = ["--num-layers-per-virtual-pipeline-stage", "1"]
    return Case(f"interleaved-1f1b:{chunks}", flags, schedule, costs)


def split(model: Model) -> Case:
    """Return V-Half with the layers with which its largest rank needs least."""
    schedule = make("v-half", model.devices, model.microbatches)
    even = model.pieces.costs(even_layers(model.layers, v_shape(model.devices)))
    layers, _ = lighter_layers(schedule, even)
    told = ",".join(map(str, layers))
    flags = ["--pipeline-schedule", "v-half", "--pipeline-layer-split", told]
    return Case(f"v-half, layers {told}", flags, schedule, model.pieces.costs(layers))


def predicting(model: Model) -> Case:
    """Return V-Half with a layer of multi-token prediction in the last stage."""
    flags = ["--pipeline-schedule", "v-half", "--mtp-num-layers", "1"]
    flags += ["--position-embedding-type", "rope"]  # Megatron refuses learned positions
    layers = even_layers(model.layers, v_shape(model.devices))
    schedule = make("v-half", model.devices, model.microbatches)
    return Case("v-half, MTP", flags, schedule, model.pieces.predicting(1).costs(layers))


def shared(model: Model) -> Case:
    """Return V-Half with a vocabulary that all ranks share."""
    pieces, devices = model.pieces, model.devices
    costs = shared_pieces(pieces, devices, SUM_US, held_logits(pieces, devices)).costs(
        even_layers(model.layers, v_shape(devices))
    )
    schedule = share_vocabulary(make("v-half", devices, model.microbatches), costs)
    flags = ["--pipeline-vocab-parallel"]
    return Case("v-half, shared vocabulary", flags, schedule, costs, as_file=True)


def copied(model: Model) -> Case:
    """Return a plan with copies, within less than V-Half needs: halfway to V-Min."""
    costs, sizes = model.costs.with_copies(1.0), (model.devices, model.microbatches)
    limit = sum(max(peak_held(make(name, *sizes), costs)) for name in ("v-half", "v-min")) / 2
    question = Question(
        AUTO,
        model.devices,
        model.microbatches,
        costs,
        limit=limit,
        placements=(v_shape(model.devices),),
        holds_less=False,
    )
    answer = best_order(question)
    return Case("plan with copies", [], answer.schedule, answer.costs, as_file=True)


CASES: dict[str, Callable[[Model], Case]] = {
    **{
        name: lambda model, name=name: named(model, name)  # type: ignore[misc]
        for name in ("1f1b", "v-half", "v-zb", "v-min", "zb-h1")
    },
    "interleaved": interleaved,
    "split": split,
    "mtp": predicting,
    "shared": shared,
    "copies": copied,
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--megatron", required=True)
    parser.add_argument("--te", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gpus", required=True)
    parser.add_argument("--ranks", default="all", help="as rehearse has it")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / "costs.json"
    if not file.exists():
        rehearse(options, ["--costs", str(file)], [])
    costs, found = Costs.load(file), value_of(options.command)
    devices = int(found["--pipeline-model-parallel-size"])
    replicas = int(options.gpus) // devices // int(found.get("--tensor-model-parallel-size", 1))
    per_step = int(found["--global-batch-size"]) // int(found["--micro-batch-size"])
    model = Model(devices, per_step // replicas, int(found["--num-layers"]), costs)
    print("GiB of every rank, planned / rehearsed, and the worst difference", flush=True)
    for key in options.cases:
        print_case(options, key, CASES[key](model))


def value_of(command: Sequence[str]) -> dict[str, str]:
    """Return what follows each flag."""
    return dict(zip(command, command[1:], strict=False))


def rehearse(options: argparse.Namespace, outputs: list[str], flags: list[str]) -> None:
    """Run `rehearse` of the command with these flags."""
    own = ["--megatron", options.megatron, "--te", options.te, "--gpus", options.gpus]
    program = [sys.executable, "-m", "megatron_vshape", "rehearse", *own, "--alone", "--jobs", "1"]
    program += ["--ranks", options.ranks] if "--costs" not in outputs else []
    subprocess.run(
        [*program, *outputs, "--", *options.command, *flags],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def print_case(options: argparse.Namespace, key: str, case: Case) -> None:
    """Rehearse the case unless that is done, and print what was planned beside it."""
    made, flags = options.folder / f"{key}.json", case.flags
    if not made.exists():
        if case.as_file:
            plan = options.folder / f"{key}-plan.json"
            plan.write_text(case.schedule.to_json())
            flags = [*flags, "--pipeline-schedule", str(plan)]
        rehearse(options, ["--json", str(made)], flags)
    ranks = json.loads(made.read_text())["ranks"]
    planned = peak_held(case.schedule, case.costs)
    pairs = [(planned[rank["rank"]], rank["peak_bytes"]) for rank in ranks]
    cells = [
        f"  {rank['rank']}: {plan / GIB:.2f} / {there / GIB:.2f}"
        for rank, (plan, there) in zip(ranks, pairs, strict=True)
    ]
    worst = max((plan / there - 1 for plan, there in pairs), key=abs)
    print(f"{case.name:30}{''.join(cells)}  {100 * worst:+.1f} %", flush=True)


if __name__ == "__main__":
    main()
