"""Count the work of published runs into benchmarks/evidence/counted.json, each one once.

    python benchmarks/count_runs.py --megatron CHECKOUT --te DIRECTORY [--only TEXT]
                                    [--add EVIDENCE]

The runs are in benchmarks/evidence/runs.csv, to which `--add` adds the runs of a folder with
bridge_performance.json, mlperf.json and kwai.json. Counts do not depend on the rates of a GPU, so
`benchmarks/fit_rates.py` and `benchmarks/evidence.py` need not count again. Ranks with one and with
two layers are counted; every further layer has the counts that the second layer adds.
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

from megatron_vshape.rehearsal.gpus import GPUS
from megatron_vshape.rehearsal.rank_job import RankJob
from megatron_vshape.rehearsal.rank_report import FailedRank, RankReport
from megatron_vshape.rehearsal.ranks import Programs, rehearse_all
from megatron_vshape.rehearsal.work import is_once


def main() -> None:
    """Count the runs that are missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--add", type=Path, metavar="EVIDENCE")
    parser.add_argument("--megatron", type=Path, required=True)
    parser.add_argument("--te", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    if options.add:
        _add(list(_found_in(options.add)))
    counts = counted()
    jobs = {}
    for row in published():
        name = key_of(row)
        if options.only in name and name not in counts:
            for stage in stages_of(row["pp"]):
                for layers in LAYERS:
                    job = job_of(row, stage, layers, options.megatron)
                    jobs[job.name] = job
    for report in rehearse_all(Programs(options.megatron, options.te, options.jobs), jobs.values()):
        name, _, stages = report.name.rpartition(" @")
        failed = isinstance(report, FailedRank)
        counts.setdefault(name, {})[stages] = (
            {"error": report.error} if failed else summary_of(report)
        )
        print(report.name, report.error if failed else f"{report.provenance.seconds} s", flush=True)
        lines = [f"{json.dumps(key)}: {json.dumps(count)}" for key, count in sorted(counts.items())]
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
    model_names = models()["models"]
    for row in _rows(folder / "bridge_performance.json"):
        if row["model"] in model_names and row["kind"] == "Pre-Training" and not row.get("fsdp"):
            tokens = float(str(row["tokens_per_s_gpu"]).split()[0])
            step = row["global_batch"] * row["sequence"] / (tokens * row["gpus"])
            settings = {"set": "Bridge", "gpu": row["system"][4:].lower(), "step_s": step}
            yield row | settings | {"precision": row.get("precision") or "FP8-CS"}
    for row in _rows(folder / "mlperf.json"):
        step = sorted(row["step_s"])[len(row["step_s"]) // 2]
        products = "FP8" if row["products"] == "fp8" else "NVFP4"
        settings = {
            "set": "MLPerf",
            "model": "LLAMA3.1_405B",
            "precision": products,
            "step_s": step,
        }
        yield row | settings | {"gpu": row["gpu"].lower()}
    kwai = json.loads((folder / "kwai.json").read_text())
    for row in kwai["throughput"]:
        if row["alpha"] == 0 and row["recompute"] == "no":
            yield _of_kwai(row, kwai["models"][row["model"]]["layers"])


def _rows(path: Path) -> list[Row]:
    rows: list[Row] = json.loads(path.read_text())["rows"]
    return rows


def _of_kwai(row: Row, layers: int) -> Row:
    step = row["global_batch"] * row["sequence"] / row["tokens_per_s"]
    vpp = layers // (row["pp"] * row["layers_per_chunk"])
    settings = {"set": "Kwai", "gpu": "h800", "system": "H800", "vpp": vpp}
    return row | settings | {"micro_batch": 1, "precision": "BF16", "step_s": step}


def job_of(row: Row, stage: int, layers: int, megatron: Path) -> RankJob:
    """Return the rehearsal of one rank."""
    replicas = row["gpus"] // row["pp"]
    return RankJob(
        script=str(megatron / "pretrain_gpt.py"),
        flags=[*flags_of(row, layers), "--mock-data"],
        gpu=GPUS[row["gpu"]],
        world=row["gpus"],
        rank=(stage + 1) * replicas - 1,
        stage=stage,
        name=f"{key_of(row)} @{stage}/{layers}",
    )


def summary_of(report: RankReport) -> Row:
    """Return the work of a microbatch, and work that occurs once per step."""
    rank_work = report.step.work.plain()
    sums = {"bytes_moved": 0.0, "kernels": 0, "captured": 0, "captured_gemms": 0}
    attention: dict[str, float] = {}
    exchanges = [exchange for exchange in rank_work["exchanges"] if is_once(exchange["group"])]
    products: list[list[Any]] = []
    for kind in report.step.kinds:
        work = kind.work.plain()
        for name in ("bytes_moved", "kernels", "captured", "captured_gemms"):
            sums[name] += work[name]
        for name, flops in work["attention_flops"].items():
            attention[name] = attention.get(name, 0.0) + flops
        exchanges += [exchange for exchange in work["exchanges"] if not is_once(exchange["group"])]
        products += work["products"]
    sums |= {name: rank_work[name] for name in ("optimizer_bytes", "once_bytes")}
    lists = {"exchanges": _added(exchanges), "products": products}
    return sums | {"attention_flops": attention} | lists


def _added(exchanges: list[Row]) -> list[Row]:
    sums: dict[tuple[Any, ...], Row] = {}
    for exchange in exchanges:
        key = tuple(exchange[name] for name in ("kind", "group", "ranks", "span"))
        total = sums.setdefault(key, exchange | {"number": 0, "bytes": 0})
        total["number"] += exchange["number"]
        total["bytes"] += exchange["bytes"]
    return list(sums.values())


if __name__ == "__main__":
    main()
