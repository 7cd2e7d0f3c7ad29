"""Record results of the package for several hundred seeded requests, to compare two versions.

`python tests/gold/record.py NEW.json [--against OLD.json]` runs the command line, the trainer's
planner and the sweep, and records their results: plans with values, bounds and peaks,
schedule files, programs of every rank, costs files, errors. Searches are limited by a small number
of steps, so that equal versions give equal results; `--against` prints the differences from another
version and returns 1. With `--runs` it records training runs instead (runs.py).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_vshape.cli.main import main
from megatron_vshape.core import plan as planning
from megatron_vshape.core.check.simulate import peak_held
from megatron_vshape.core.evaluation import evaluate_schedule
from megatron_vshape.core.model.amounts import GIB
from megatron_vshape.core.model.costs import Costs
from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.core.model.pieces import Pieces, recut, regroup
from megatron_vshape.core.model.schedule import Objective, Schedule, load_schedule
from megatron_vshape.core.paper.catalogue import EVERY_NAME
from megatron_vshape.core.planner import search
from megatron_vshape.core.request import PlanRequest
from megatron_vshape.mcore.options import Options
from megatron_vshape.mcore.setup.choice import resolve_schedule
from megatron_vshape.mcore.setup.plans import Planner
from megatron_vshape.mcore.setup.run_config import ScheduleChoice
from megatron_vshape.tuning.configurations import ADAPTIVE, Configuration
from megatron_vshape.tuning.files import load_sweep
from megatron_vshape.tuning.grid import expand_grid
from megatron_vshape.tuning.predictor import Predictor

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tuning")]
import samples  # noqa: E402
from gold.runs import record_runs  # noqa: E402
from tuning.counts import predictor_of  # noqa: E402

STEPS = 2_000
"""Steps per round of the search."""

Record = dict[str, str]

FAMILIES = ("plain", "whole", "exchange", "copies", "recompute", "joint", "shared", "layers", "all")


def costs_data(draw: random.Random, family: str, stages: int) -> dict[str, Any]:
    """Return a costs file of a family; all have F, B and W."""

    def values(low: float, high: float) -> list[float]:
        is_uniform = draw.random() < 0.3
        first = round(draw.uniform(low, high), 3)
        return [first if is_uniform else round(draw.uniform(low, high), 3) for _ in range(stages)]

    data: dict[str, Any] = {
        "forward_us": values(80, 120),
        "backward_us": values(90, 140),
        "weight_us": values(60, 100),
        "send_us": round(draw.uniform(0, 30), 2),
        "held_after_forward_bytes": values(0.8 * 2**30, 1.2 * 2**30),
        "held_after_backward_bytes": values(0.3 * 2**30, 0.7 * 2**30),
    }
    is_complete = family == "all"
    if is_complete or family == "layers" or draw.random() < 0.2:
        data["layers"] = [2] * stages
    if is_complete or draw.random() < 0.3:
        data["host_us"] = round(draw.uniform(0, 8), 2)
    if is_complete or family in ("whole", "recompute"):
        data["whole_backward_us"] = values(140, 190)
    if is_complete or family in ("exchange", "joint"):
        data["forward_exchange_us"] = values(20, 40)
        data["backward_exchange_us"] = values(20, 40)
        if draw.random() < 0.5:
            data["whole_exchange_us"] = values(5, 20)
    if family == "joint":
        data["hidden_share"] = round(draw.random(), 2)
        pairs = [(draw.randrange(stages), draw.randrange(stages)) for _ in range(stages)]
        data["joint"] = {f"F{f}&B{'W' * draw.randrange(2)}{b}": 220.5 for f, b in pairs}
    if is_complete or family == "copies":
        data["copy_out_us"] = values(40, 160)
        data["offloaded_bytes"] = data["held_after_forward_bytes"]
        data["copy_back_us"] = values(40, 160)
        data["half_duplex"] = draw.random() < 0.4  # of 0.2.0: ignored
    if is_complete or family == "recompute":
        full = {
            "backward_us": values(180, 240),
            "weight_us": data["weight_us"],
            "whole_backward_us": values(240, 300),
            "held_after_forward_bytes": values(0.05 * 2**30, 0.2 * 2**30),
        }
        data["recompute"] = {"full": full}  # of 0.2.0: ignored
    return data | (_shared(draw, stages) if family == "shared" else {})


def _shared(draw: random.Random, stages: int) -> dict[str, Any]:
    """Return the fields of a costs file for vocabulary parallelism."""
    names = ("lookup", "lookup_sum", "logits", "logits_sum", "head_weight", "lookup_weight")
    data = {f"{name}_us": [round(draw.uniform(2, 60), 2)] * stages for name in names}
    return data | {"logits_bytes": [draw.choice((0.0, 2.0**26, 2.0**28))] * stages}


def text_or_error(action: Callable[[], str]) -> str:
    """Return the text of the action, or its error."""
    try:
        return action()
    except ScheduleError as error:
        return f"{type(error).__name__}: {error}"


def run_command(*arguments: str) -> str:
    """Return the output of the command line and its exit code."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: object = main(list(arguments))
        except SystemExit as end:
            code = end.code
    error_output = err.getvalue() if code else ""
    return f"{code}\n{out.getvalue()}{error_output}"


class Recorder:
    """Runs requests and records the results by name."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.answers: Record = {}

    def random(self, kind: str, index: int) -> random.Random:
        """Return a random generator of one request, so that a new draw changes only it."""
        return random.Random(f"{self.seed} {kind} {index}")

    def record(self, name: str, text: str) -> None:
        """Record a text without the folder of this run."""
        assert name not in self.answers, name
        self.answers[name] = text.replace(str(self.folder), "FOLDER")

    def file(self, name: str, data: object) -> Path:
        """Write a JSON file of this run and return its path."""
        path = self.folder / name
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return path

    def plan_by_command(self, index: int) -> None:
        """Record the output of `plan` and the exported schedule, for sizes or a costs file."""
        draw, export = self.random("plan_by_command", index), self.folder / f"plan{index}.json"
        devices, microbatches = draw.choice((2, 3, 4)), draw.randrange(3, 10)
        arguments = ["plan", "--devices", str(devices), "--microbatches", str(microbatches)]
        family, limit = "cost", f"{draw.uniform(0.7, 2.2) * devices:.2f}"
        if index % 3:
            family = FAMILIES[index // 3 % len(FAMILIES)]
            stages = devices * draw.choice((2, 2, 4))
            path = self.file(f"costs{index}.json", costs_data(draw, family, stages))
            arguments += ["--costs", str(path)]
            limit = f"{draw.uniform(0.7, 2.2) * devices * stages / 2 / devices:.2f}GiB"
        else:
            arguments += ["--cost", draw.choice(("1,1,1,0", "1,1.15,.85,.05", "1,2,1,.1"))]
            arguments += draw.choice(([], ["--offload", draw.choice(("0.5", "1"))]))
            if draw.random() < 0.4:
                arguments += ["--layers", str(4 * devices), "--head", "3"]
                arguments += draw.choice(([], ["--layer-split", "auto"], ["--vocab-parallel"]))
        if draw.random() < 0.8:
            arguments += ["--memory-limit", draw.choice((limit, limit, "v-half", "1f1b"))]
        if draw.random() < 0.3:
            arguments += ["--objective", "span"]
        arguments += ["--chunks", "2", "--export", str(export)]
        name = f"plan/{index}/{family}"
        self.record(name, " ".join(arguments) + "\n" + run_command(*arguments))
        if export.exists():
            self.record(name + "/schedule", export.read_text())

    def plan_in_training(self, index: int) -> None:
        """Record the trainer's plan, the program of every rank, and the peaks."""
        draw = self.random("plan_in_training", index)
        devices, microbatches = draw.choice((2, 3, 4)), draw.randrange(3, 10)
        family = FAMILIES[index % len(FAMILIES)]
        stages = devices * draw.choice((2, 2, 4))
        costs = Costs.from_json(json.dumps(costs_data(draw, family, stages)))
        name = draw.choice(("auto", "auto", "v-half+", "v-min", "1f1b", "zb-h1", "v-zb"))
        choice = ScheduleChoice(
            devices,
            name,
            costs=None if draw.random() < 0.2 and name != "auto" else costs,
            limit_bytes=draw.choice((None, draw.uniform(1, 2.4) * stages / 2 * GIB)),
            shards_output_layer=family == "shared"
            or (draw.random() < 0.2 and family in ("plain", "whole")),
            may_overlap=family == "joint",
            kernels=draw.random() < 0.5,
            keeps_full_backward=draw.random() < 0.1,
        )

        def plan() -> str:
            planner = Planner(choice)
            step = planner.plan_step(microbatches)
            programs = [step.program.text(), planner.evaluation_program(microbatches).text()]
            peaks = peak_held(step.schedule, step.costs)
            return "\n".join(
                (step.schedule.to_json(), f"{step.timeline.makespan!r} {peaks!r}", *programs)
            )

        self.record(f"train/{index}/{family}/{name}", text_or_error(plan))

    def ask_directly(self, index: int) -> None:
        """Record a plan of the core with value, bounds and peaks, as in the playground."""
        draw = self.random("ask_directly", index)
        devices, microbatches = draw.choice((2, 3, 4)), draw.randrange(3, 12)
        family = FAMILIES[index % len(FAMILIES)]
        costs = Costs.from_json(json.dumps(costs_data(draw, family, 2 * devices)))
        request = PlanRequest(
            draw.choice((*("auto",) * 12, "v-min+", "v-zb+", *EVERY_NAME)),
            devices,
            microbatches,
            costs,
            limit=draw.choice((None, draw.uniform(0.8, 2) * devices * GIB)),
            objective=draw.choice(tuple(Objective)),
        )

        def answer() -> str:
            result = planning.plan_request(request)
            evaluated = evaluate_schedule(result.schedule, result.costs)
            times = evaluated.timeline.makespan, evaluated.timeline.span
            lines = [result.schedule.to_json(), f"{times!r} {evaluated.peak!r}"]
            if result.searched is not None:
                plan = result.plan
                lines.append(f"{plan.value!r} {plan.lower_bound!r} {plan.source} {plan.steps}")
                lines.append(f"{result.searched_bound!r} {plan.baseline}")
                lines += [
                    f"{baseline.baseline} {baseline.timeline.makespan!r}"
                    for baseline in result.baselines
                ]
            return "\n".join(lines)

        self.record(f"ask/{index}/{family}/{request.name}", text_or_error(answer))

    def costs_in_other_forms(self, index: int) -> None:
        """Record costs regrouped, for another stage count, as pieces, and with invalid changes."""
        draw = self.random("costs_in_other_forms", index)
        devices = draw.choice((2, 3))
        family = FAMILIES[index % len(FAMILIES)]
        data = costs_data(draw, family, 4 * devices)
        costs = Costs.from_json(json.dumps(data))
        name = f"costs/{index}/{family}/"
        self.record(name + "same", costs.to_json())
        self.record(name + "coarser", regroup(costs, 2 * devices, "it").to_json())
        layered = costs.layers or (2,) * costs.num_stages
        self.record(
            name + "recut",
            text_or_error(lambda: recut(costs, 3 * devices, devices, "it", 24).to_json()),
        )
        pieces = Pieces.of(costs, layered)
        self.record(name + "pieces", pieces.costs((3, *(2,) * (2 * devices - 2), 1)).to_json())
        self.record(name + "whole", costs.with_source("measured here").to_json())
        incomplete = {key: amount for key, amount in data.items() if key != draw.choice(list(data))}
        self.record(
            name + "lacking",
            text_or_error(lambda: Costs.from_json(json.dumps(incomplete)).to_json()),
        )
        invalid = dict(data)
        invalid[draw.choice(list(data))] = draw.choice((-1, "x", [1, 2], [0.0] * 4 * devices, None))
        self.record(
            name + "wrong", text_or_error(lambda: Costs.from_json(json.dumps(invalid)).to_json())
        )

    def changed_schedules(self, index: int) -> None:
        """Record the output of command line and trainer for files with a few changes."""
        draw = self.random("refusals", index)
        name = self.folder / f"plan{index}.json"
        if not name.exists():  # the request had no plan
            return
        schedule, costs = load_schedule(name), self.folder / name.name.replace("plan", "costs")
        rows = [list(row) for row in schedule.order]
        for _ in range(draw.randrange(0, 3)):
            row = draw.choice(rows)
            first, second = draw.randrange(len(row)), draw.randrange(len(row))
            match draw.randrange(8):
                case 0:
                    row[first], row[second] = row[second], row[first]
                case 1:
                    del row[first]
                case 2:
                    row.insert(second, row.pop(first))
                case _ if first + 1 < len(row):
                    row[first], row[first + 1] = row[first + 1], row[first]
        changed = replace(schedule, order=tuple(map(tuple, rows)))
        path = self.file(f"changed{index}.json", changed.to_json())
        cost_options = ("--costs", str(costs)) if costs.exists() else ()
        self.record(f"file/{index}/schedule", run_command("schedule", str(path), *cost_options))
        self.record(
            f"file/{index}/train", text_or_error(lambda: self._training_text(path, schedule))
        )

    def _training_text(self, path: Path, schedule: Schedule) -> str:
        planner = Planner(resolve_schedule(Options(schedule=str(path)), schedule.num_devices))
        step = planner.plan_step(schedule.num_microbatches)
        return f"{step.timeline.makespan!r}\n{step.program.text()}"

    def predict(self, index: int) -> None:
        """Record the predictions of the sweep for the combinations of the sample."""
        draw, folder = self.random("predict", index), self.folder / f"sweep{index}"
        folder.mkdir()
        model = {
            "mtp_layers": draw.choice((0, 0, 1)),
            "vocabulary_size": draw.choice((1024, 32768)),
        }
        grid = dict(samples.SWEEP["grid"]) | {"schedule": ["1f1b", "v-half", "adaptive"]}
        grid |= {"vocab_parallel": [False, True]} if draw.random() < 0.7 else {}
        loaded = load_sweep(samples.write_sweep(folder, {"grid": grid}, model))
        predictor = predictor_of(loaded)
        for number, config in enumerate(expand_grid(loaded).possible):
            prediction = text_or_error(partial(self._prediction_text, predictor, config))
            self.record(f"sweep/{index}/{number}", f"{config}\n{prediction}")

    def _prediction_text(self, predictor: Predictor, config: Configuration) -> str:
        prediction = predictor(config)
        schedule_text = (
            prediction.schedule.to_json()
            if config.schedule == ADAPTIVE and prediction.schedule
            else ""
        )
        return f"{replace(prediction, schedule=None)!r}\n{schedule_text}"

    def record_all(self, count: int) -> Record:
        """Return the results of `count` requests."""
        for name in EVERY_NAME:
            for sizes in ((2, 4), (4, 8)):
                arguments = ("--devices", str(sizes[0]), "--microbatches", str(sizes[1]))
                self.record(f"name/{name}/{sizes}", run_command("schedule", name, *arguments))
        for index in range(count * 2 // 5):
            self.plan_by_command(index)
        for index in range(count // 5):
            self.plan_in_training(index)
        for index in range(count // 5):
            self.ask_directly(index)
        for index in range(count // 10):
            self.costs_in_other_forms(index)
        for index in range(count // 3):
            self.changed_schedules(index)
        for index in range(3):
            self.predict(index)
        self.record("doctor", run_command("doctor"))
        return self.answers


def differences(old: Record, new: Record) -> Iterator[str]:
    """Yield the names of different results, with the first difference."""
    for name in sorted(old.keys() | new.keys()):
        old_text, new_text = old.get(name, "(nothing)"), new.get(name, "(nothing)")
        if old_text != new_text:
            start = max(0, len(os.path.commonprefix([old_text, new_text])) - 60)
            old_excerpt, new_excerpt = old_text[start : start + 220], new_text[start : start + 220]
            yield f"{name}\n  was ...{old_excerpt!r}\n  is  ...{new_excerpt!r}"


def _few_steps(problem: Any) -> int:
    return STEPS


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--runs", action="store_true", help="record training runs (see runs.py)")
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--seed", type=int, default=38)
    options = parser.parse_args()
    search.default_steps = _few_steps
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        answers = (
            record_runs(Path(folder))
            if options.runs
            else Recorder(Path(folder), options.seed).record_all(options.questions)
        )
    options.output.write_text(json.dumps(answers, indent=0))
    print(f"{len(answers)} answers in {time.monotonic() - started:.0f} s")
    if options.against is not None:
        changes = list(differences(json.loads(options.against.read_text()), answers))
        print("\n".join(changes) or "all as before")
        sys.exit(bool(changes))
