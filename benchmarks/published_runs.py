"""Published measurements of runs, in one form, and predictions of their step times.

In benchmarks/evidence, `models.yaml` has their flags, and `counted.json` the work of a microbatch
on a rank with one and with two layers, counted by `benchmarks/count_runs.py`.
"""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megatron_vshape.rehearsal import accuracy
from megatron_vshape.rehearsal.gpus import GPUS
from megatron_vshape.rehearsal.step_time import Rates, Scale, step_time
from megatron_vshape.rehearsal.work import SUMS, Work

EVIDENCE = Path(__file__).resolve().parent / "evidence"
COUNTED, RUNS = EVIDENCE / "counted.json", EVIDENCE / "runs.csv"
NUMBERS = "gpus tp pp vpp cp ep micro_batch global_batch sequence".split()
COLUMNS = ["set", "model", "system", "gpu", "release", "precision", *NUMBERS, "step_s", "settings"]
SIZES = "tp pp cp ep micro_batch sequence precision".split()
LAYERS = (1, 2)
"""Of a rank, in the two rehearsals."""

Row = dict[str, Any]


@cache
def published() -> tuple[Row, ...]:
    """Return the published runs."""
    with RUNS.open() as stream:
        return tuple(map(_typed, csv.DictReader(stream)))


def _typed(columns: Mapping[str, str]) -> Row:
    numbers = {name: int(columns[name]) for name in NUMBERS}
    return {**columns, **numbers, "step_s": float(columns["step_s"])}


@cache
def models() -> Row:
    """Return the flags of models and runs."""
    models: Row = yaml.safe_load((EVIDENCE / "models.yaml").read_text())
    return models


def key_of(row: Row) -> str:
    """Return the key of a count: the model, its sizes, the type of node, and settings."""
    kind = "wide" if row["gpu"].startswith("g") else row["gpu"]
    sizes = " ".join(f"{name}={row[name]}" for name in SIZES)
    settings = [word for word in row["settings"].split() if "flags" in models()["settings"][word]]
    return " ".join([row["model"], sizes, f"gpus={row['gpus']}", kind, *settings])


def stages_of(pp: int) -> list[int]:
    """Return the ranks of the pipeline that may be the busiest: a middle one and the last."""
    return {1: [0], 2: [0, 1]}.get(pp, [pp // 2, pp - 1])


def layers_of(row: Row) -> list[int]:
    """Return how many layers the ranks have."""
    known_models = models()
    if row["model"] in known_models["layers"]:
        return list(known_models["layers"][row["model"]][row["pp"]])
    words = known_models["models"][row["model"]].split()
    total = int(words[words.index("--num-layers") + 1])
    ends = 2 if row["model"] in known_models["ends_are_layers"] and row["pp"] > 1 else 0
    layers_per_rank, remainder = divmod(total + ends, row["pp"])
    layers = [layers_per_rank + (rank < remainder) for rank in range(row["pp"])]
    layers[0] -= ends // 2
    layers[-1] -= ends // 2
    return layers


def _rules_of(row: Row) -> Iterator[Row]:
    for rule in models()["runs"]:
        if all(row.get(name) in rule[name] for name in rule if name != "flags"):
            yield rule
    for word in row["settings"].split():
        yield models()["settings"][word]


def flags_of(row: Row, layers: int) -> list[str]:
    """Return the run's flags with a number of layers per rank, and without virtual stages."""
    known_models = models()
    text = f"{known_models['every']} {known_models['models'][row['model']]}"
    for rule in _rules_of(row):
        text += " " + rule.get("flags", "")
    text = re.sub(r"--num-layers \d+", f"--num-layers {layers * row['pp']}", text)
    many = {
        "--seq-length": row["sequence"],
        "--max-position-embeddings": row["sequence"],
        "--micro-batch-size": row["micro_batch"],
        "--global-batch-size": row["global_batch"],
        "--tensor-model-parallel-size": row["tp"],
        "--pipeline-model-parallel-size": row["pp"],
        "--context-parallel-size": row["cp"],
        "--expert-model-parallel-size": row["ep"],
    }
    words = shlex.split(text) + [str(word) for pair in many.items() for word in pair]
    if "--num-experts" in text:
        words += ["--expert-tensor-parallel-size", "1"]
    return words + (["--sequence-parallel"] if row["tp"] > 1 else [])


@cache
def counted() -> Row:
    """Return the counts by the rows' keys."""
    counts: Row = json.loads(COUNTED.read_text()) if COUNTED.is_file() else {}
    return counts


def predicted(row: Row, rates: Rates | None = None) -> dict[str, float]:
    """Estimate the step of the slowest counted rank by part, and `step_s`."""
    gpu = GPUS[row["gpu"]]
    scale = _scale(row)
    stage_times = [
        step_time(work_of(row, stage), gpu, scale, rates) for stage in stages_of(row["pp"])
    ]
    return max(stage_times, key=lambda parts: parts["step_s"])


def _scale(row: Row) -> Scale:
    shards = row["tp"] * row["pp"] * (row["cp"])
    microbatches = row["global_batch"] * shards // (row["gpus"] * row["micro_batch"])
    settings = {rule["scale"]: True for rule in _rules_of(row) if "scale" in rule}
    return Scale(microbatches, 1, row["pp"], row["vpp"], **settings)


def has_experts(row: Row) -> bool:
    """Return whether the row's model has experts."""
    return "--num-experts" in models()["models"][row["model"]]


def case_of(row: Row) -> str:
    """Return the case that the row's error counts for: a key of `fitted.LEFT_OUT`."""
    ranks = row["ep"]
    return accuracy.case_of(has_experts(row), ranks, ranks, GPUS[row["gpu"]])


def is_counted(row: Row) -> bool:
    """Return whether there is something to predict the row from."""
    counts = counted().get(key_of(row), {"": {"error": ""}})
    return not any("error" in count for count in counts.values())


_works: dict[tuple[str, int, int], Work] = {}


def work_of(row: Row, stage: int) -> Work:
    """Return the work of a microbatch on a rank of the pipeline, with all its layers."""
    layers = layers_of(row)[stage]
    key = key_of(row), stage, layers
    if key not in _works:
        counts = counted()[key[0]]
        one, two = (_plain(counts[f"{stage}/{number}"]) for number in LAYERS)
        sums = {name: one.get(name, 0.0) for name in {*one, *two}}
        for name in sums:
            sums[name] += (layers - 1) * (two.get(name, 0.0) - one.get(name, 0.0))
        _works[key] = _work(sums)
    return _works[key]


def _plain(work: Mapping[str, Any]) -> dict[Any, float]:
    """Return every count by a name."""
    amounts: dict[Any, float] = {name: work.get(name, 0) for name in SUMS}
    amounts |= {("attention", name): flops for name, flops in work["attention_flops"].items()}
    amounts |= {("product", *shape[:5]): shape[5] for shape in work["products"]}
    for exchange in work["exchanges"]:
        key = exchange["kind"], exchange["group"], exchange["ranks"], exchange["span"]
        amounts["number", *key] = exchange["number"]
        amounts["bytes", *key] = exchange["bytes"]
    return amounts


def _work(sums: Mapping[Any, float]) -> Work:
    work = Work()
    for name, value in sums.items():
        if isinstance(name, str):
            setattr(work, name, value)
        elif name[0] == "attention":
            work.attention_flops[name[1]] = value
        elif name[0] == "product":
            work.products[name[1:]] = value  # type: ignore[assignment]
        else:
            entry = work.exchanges.setdefault(name[1:], [0, 0])
            entry[name[0] == "bytes"] = value
    return work
