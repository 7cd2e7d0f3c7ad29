"""Print the peak memory of every rank: planned from one costs file, and estimated by rehearse.

    python benchmarks/peaks_table.py --megatron ../Megatron-LM --te ../TransformerEngine \
        --folder peaks -- pretrain_gpt.py FLAGS...

FLAGS describe a GPT without a schedule. Its layers are a multiple of 2 x PP;
--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split count as one
layer each. The costs are counted once (`rehearse --costs`, V-ZB and 1F1B-V). All plans use them:
other schedules, stages, layer splits, multi-token prediction and vocabulary parallelism. Results
in FOLDER are reused. A rank needs 10 to 60 s.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_vshape import Costs, Schedule, make, peak_held
from megatron_vshape.core.check.simulate import simulate
from megatron_vshape.core.model.costs import with_copies
from megatron_vshape.core.model.layers import even_layers
from megatron_vshape.core.model.pieces import Pieces, regroup, under_megatron
from megatron_vshape.core.model.placement import Placement, looping, v_shape
from megatron_vshape.core.plan import plan_request
from megatron_vshape.core.planner.lighter import lighter_layers
from megatron_vshape.core.planner.vocabulary import (
    estimate_logits_bytes,
    share_vocabulary,
    shared_pieces,
)
from megatron_vshape.core.program.lowering import fuse
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.core.schedule_names import AUTO
from megatron_vshape.rehearsal.command import Command, Sizes, parse_ranks, sizes_of
from megatron_vshape.rehearsal.command_reader import read_command
from megatron_vshape.rehearsal.gpus import GPUS
from megatron_vshape.rehearsal.rank_report import FailedRank
from megatron_vshape.rehearsal.ranks import DryRunConfig, rehearse_all

GIB = 2**30
SUM_US = 200.0
"""A sum over all ranks, for the order of a shared vocabulary; no peak depends on it."""


class Case(NamedTuple):
    """An estimated case: flags, and the schedule with the costs of its stages."""

    name: str
    flags: list[str]
    schedule: Schedule
    costs: Costs
    as_file: bool = False


class Model(NamedTuple):
    """The sizes, and the counts of twice as many stages as ranks."""

    devices: int
    microbatches: int
    layers: int
    ends: tuple[int, int]  # layers that embedding and loss count as
    costs: Costs

    @property
    def pieces(self) -> Pieces:
        """Return the costs of a layer, and of embedding and output layer."""
        return Pieces.of(self.costs, self.even(v_shape(self.devices)))

    def even(self, placement: Placement) -> tuple[int, ...]:
        """Return the layers per stage, balanced with the costs of embedding and output layer."""
        layers = list(even_layers(self.layers + sum(self.ends), placement))
        layers[0] -= self.ends[0]
        layers[-1] -= self.ends[1]
        return tuple(layers)


def named(model: Model, name: str) -> Case:
    """Return a schedule of the catalogue, by its name; 1F1B is Megatron's."""
    schedule = make(name, model.devices, model.microbatches)
    costs = regroup(model.costs, schedule.num_stages, name)
    if name == "1f1b":
        return Case(name, [], schedule, under_megatron(costs))
    return Case(name, ["--pipeline-schedule", name], schedule, costs)


def interleaved(model: Model) -> Case:
    """Return Megatron's interleaved schedule, with a stage per layer."""
    chunks = (model.layers + sum(model.ends)) // model.devices
    schedule = make("interleaved-1f1b", model.devices, model.microbatches, num_chunks=chunks)
    costs = model.pieces.costs(model.even(looping(model.devices, chunks)))
    flags = ["--num-layers-per-virtual-pipeline-stage", "1"]
    return Case(f"interleaved-1f1b:{chunks}", flags, schedule, under_megatron(costs))


def split(model: Model) -> Case:
    """Return V-Half with the layer split that minimizes the largest peak."""
    schedule = make("v-half", model.devices, model.microbatches)
    even = model.pieces.costs(model.even(v_shape(model.devices)))
    layers, _ = lighter_layers(schedule, even)
    layer_split = ",".join(map(str, layers))
    flags = ["--pipeline-schedule", "v-half", "--pipeline-layer-split", layer_split]
    return Case(f"v-half, layers {layer_split}", flags, schedule, model.pieces.costs(layers))


def predicting(model: Model) -> Case:
    """Return V-Half with one layer of multi-token prediction in the last stage."""
    flags = ["--pipeline-schedule", "v-half", "--mtp-num-layers", "1"]
    flags += ["--position-embedding-type", "rope"]  # Megatron rejects learned positions
    layers = model.even(v_shape(model.devices))
    schedule = make("v-half", model.devices, model.microbatches)
    return Case("v-half, MTP", flags, schedule, model.pieces.predicting(1).costs(layers))


def shared(model: Model) -> Case:
    """Return V-Half with a vocabulary that all ranks share."""
    pieces, devices = model.pieces, model.devices
    costs = shared_pieces(pieces, devices, SUM_US, estimate_logits_bytes(pieces, devices)).costs(
        model.even(v_shape(devices))
    )
    schedule = share_vocabulary(make("v-half", devices, model.microbatches), costs)
    flags = ["--pipeline-vocab-parallel"]
    return Case("v-half, shared vocabulary", flags, schedule, costs, as_file=True)


def copied(model: Model) -> Case:
    """Return a plan with copies, within less than V-Half needs: halfway to V-Min."""
    costs, sizes = with_copies(model.costs, 1.0), (model.devices, model.microbatches)
    limit = sum(max(peak_held(make(name, *sizes), costs)) for name in ("v-half", "v-min")) / 2
    question = PlanRequest(
        AUTO,
        model.devices,
        model.microbatches,
        costs,
        limit=limit,
        placements=(v_shape(model.devices),),
    )
    answer = plan_request(question)
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
    parser.add_argument("--megatron", type=Path, required=True)
    parser.add_argument("--te", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--ranks", default="all", help="as rehearse has it")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--jobs", type=int, default=1, help="ranks side by side")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    command = read_command(options.command)
    sizes = sizes_of(command, options.gpus)
    model = model_of(command, sizes, counted(options))
    cases = {key: CASES[key](model) for key in options.cases}
    stages = parse_ranks(options.ranks, sizes.pipeline)
    rehearse(options, sizes, cases, stages)
    print("GiB of every rank, planned / estimated, and the largest difference")
    for key, case in cases.items():
        print_case(options.folder, key, case, stages)


def counted(options: argparse.Namespace) -> Costs:
    """Return the costs of the stages; inner ranks, which are equal, are counted as one."""
    file = options.folder / "costs.json"
    if not file.exists():
        arguments = ["--megatron", options.megatron, "--te", options.te, "--gpus", options.gpus]
        arguments += ["--costs", file, "--ranks", "first,1,last", "--jobs", options.jobs]
        program = [sys.executable, "-m", "megatron_vshape", "rehearse", *map(str, arguments)]
        subprocess.run([*program, "--", *options.command], check=True, stdout=subprocess.DEVNULL)
    return Costs.load(file)


def model_of(command: Command, sizes: Sizes, costs: Costs) -> Model:
    """Return the sizes of the command, with the costs."""
    account = "--account-for-{}-in-pipeline-split"
    first, last = (int(command.has(account.format(end))) for end in ("embedding", "loss"))
    per_step = command.number("--global-batch-size", 0) // command.number("--micro-batch-size", 1)
    layers = command.number("--num-layers", 0)
    return Model(sizes.pipeline, per_step // sizes.replicas, layers, (first, last), costs)


def rehearse(
    options: argparse.Namespace, sizes: Sizes, cases: Mapping[str, Case], stages: Sequence[int]
) -> None:
    """Rehearse the ranks of the cases that are not in the folder yet, all from one process."""
    jobs = []
    for key, case in cases.items():
        flags = case.flags
        if case.as_file:
            plan = options.folder.resolve() / f"{key}-plan.json"
            plan.write_text(case.schedule.to_json())
            flags = [*flags, "--pipeline-schedule", str(plan)]
        command = read_command([*options.command, *flags])
        config = DryRunConfig.of(command, GPUS["h100"], options.megatron, options.te, options.jobs)
        missing_stages = [
            stage for stage in stages if not report_file(options.folder, key, stage).exists()
        ]
        jobs += [config.job(command, sizes, stage, key) for stage in missing_stages]
    for report in rehearse_all(config.programs, jobs) if jobs else ():
        if isinstance(report, FailedRank):
            print(f"{report.name}: {report.error}", file=sys.stderr, flush=True)
        else:
            file = report_file(options.folder, report.name, report.stage)
            file.write_text(json.dumps(report.to_json()))


def report_file(folder: Path, key: str, stage: int) -> Path:
    """Return the file with the estimate of a rank."""
    return folder / f"{key}-{stage}.json"


def print_case(folder: Path, key: str, case: Case, stages: Sequence[int]) -> None:
    """Print the planned and the estimated peaks of a case."""
    run = fuse(simulate(case.schedule, case.costs))
    planned, cells, off = peak_held(run, case.costs), [], []
    for stage in stages:
        file, rehearsed_gib = report_file(folder, key, stage), "-"
        if file.exists():
            there = json.loads(file.read_text())["peak_bytes"]
            off.append(planned[stage] / there - 1)
            rehearsed_gib = f"{there / GIB:.2f}"
        cells.append(f"  {stage}: {planned[stage] / GIB:.2f} / {rehearsed_gib}")
    worst = f"  {100 * max(off, key=abs):+.1f} %" if off else ""
    print(f"{case.name:30}{''.join(cells)}{worst}", flush=True)


if __name__ == "__main__":
    main()
