"""Count the work of published runs into benchmarks/evidence/counted.json, each one once.

    python benchmarks/count_runs.py --megatron CHECKOUT --te DIRECTORY [--only TEXT]
                                    [--add EVIDENCE]

The runs stand in benchmarks/evidence/runs.csv, where `--add` puts those of a folder that holds
bridge_performance.json, mlperf.json and kwai.json. What is counted does not depend on a GPU's
rates, so that `benchmarks/fit_rates.py` and `benchmarks/evidence.py` need not rehearse again.
Ranks with one and with two layers are rehearsed; every further layer counts what the second added.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from published_runs import (
    COLUMNS,
    COUNTED,
    LAYERS,
    RUNS,
    Row,
    counted,
    flags_of,
    key_of,
    models,
    published,
    stages_of,
)

from megatron_vshape.rehearsal.rank_report import FailedRank, RankReport
from megatron_vshape.rehearsal.ranks import Programs, rehearse_all
from megatron_vshape.rehearsal.work import is_once


def main() -> None:
    """Count what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--add", type=Path, metavar="EVIDENCE")
    parser.add_argument("--megatron", type=Path, required=True)
    parser.add_argument("--te", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    if options.add:
        _add(list(_found_in(options.add)))
    made = counted()
    jobs = {}
    for row in published():
        name = key_of(row)
        if options.only in name and name not in made:
            for stage in stages_of(row["pp"]):
                for layers in LAYERS:
                    job = job_of(row, stage, layers, options.megatron)
                    jobs[job["name"]] = job
    for found in rehearse_all(Programs(options.megatron, options.te, options.jobs), jobs.values()):
        name, _, rest = found.name.rpartition(" @")
        failed = isinstance(found, FailedRank)
        made.setdefault(name, {})[rest] = {"error": found.error} if failed else kept(found)
        print(found.name, found.error if failed else f"{found.seconds} s", flush=True)
        lines = [f"{json.dumps(key)}: {json.dumps(each)}" for key, each in sorted(made.items())]
        COUNTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _add(rows: list[Row]) -> None:
    for row in rows:
        for name in ("vpp", "cp", "ep"):
            row[name] = row.get(name) or 1
        row["step_s"] = f"{row['step_s']:.4g}"
    with RUNS.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _found_in(folder: Path) -> Iterator[Row]:
    """Yield the published runs that have a model here, in one form."""
    known = models()["models"]
    for row in _rows(folder / "bridge_performance.json"):
        if row["model"] in known and row["kind"] == "Pre-Training" and not row.get("fsdp"):
            tokens = float(str(row["tokens_per_s_gpu"]).split()[0])
            step = row["global_batch"] * row["sequence"] / (tokens * row["gpus"])
            given = {"set": "Bridge", "gpu": row["system"][4:].lower(), "step_s": step}
            yield row | given | {"precision": row.get("precision") or "FP8-CS"}
    for row in _rows(folder / "mlperf.json"):
        step = sorted(row["step_s"])[len(row["step_s"]) // 2]
        products = "FP8" if row["products"] == "fp8" else "NVFP4"
        given = {"set": "MLPerf", "model": "LLAMA3.1_405B", "precision": products, "step_s": step}
        yield row | given | {"gpu": row["gpu"].lower()}
    kwai = json.loads((folder / "kwai.json").read_text())
    for row in kwai["throughput"]:
        if row["alpha"] == 0 and row["recompute"] == "no":
            yield _of_kwai(row, kwai["models"][row["model"]]["layers"])


def _rows(path: Path) -> list[Row]:
    found: list[Row] = json.loads(path.read_text())["rows"]
    return found


def _of_kwai(row: Row, layers: int) -> Row:
    step = row["global_batch"] * row["sequence"] / row["tokens_per_s"]
    vpp = layers // (row["pp"] * row["layers_per_chunk"])
    given = {"set": "Kwai", "gpu": "h800", "system": "H800", "vpp": vpp}
    return row | given | {"micro_batch": 1, "precision": "BF16", "step_s": step}


def job_of(row: Row, stage: int, layers: int, megatron: Path) -> Row:
    """Return the rehearsal of one rank."""
    replicas = row["gpus"] // row["pp"]
    return {
        "script": str(megatron / "pretrain_gpt.py"),
        "flags": [*flags_of(row, layers), "--mock-data"],
        "gpu": row["gpu"],
        "world": row["gpus"],
        "rank": (stage + 1) * replicas - 1,
        "microbatches": 2,
        "stage": stage,
        "name": f"{key_of(row)} @{stage}/{layers}",
    }


def kept(found: RankReport) -> Row:
    """Return the work of the last microbatch, and work that occurs once per step."""
    whole = found.work.plain()
    sums = {"bytes_moved": 0.0, "kernels": 0, "optimizer_bytes": whole["optimizer_bytes"]}
    attention: dict[str, float] = {}
    exchanges = [each for each in whole["exchanges"] if is_once(each["group"])]
    products: list[list[Any]] = []
    for each in found.kinds:
        work = each.work.plain()
        for name in ("bytes_moved", "kernels"):
            sums[name] += work[name]
        for name, flops in work["attention_flops"].items():
            attention[name] = attention.get(name, 0.0) + flops
        exchanges += [given for given in work["exchanges"] if not is_once(given["group"])]
        products += work["products"]
    lists = {"exchanges": _added(exchanges), "products": products}
    return sums | {"attention_flops": attention} | lists


def _added(exchanges: list[Row]) -> list[Row]:
    made: dict[tuple[Any, ...], Row] = {}
    for each in exchanges:
        key = tuple(each[name] for name in ("kind", "group", "ranks", "span"))
        known = made.setdefault(key, each | {"number": 0, "bytes": 0})
        known["number"] += each["number"]
        known["bytes"] += each["bytes"]
    return list(made.values())


if __name__ == "__main__":
    main()
