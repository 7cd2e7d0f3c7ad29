"""Estimate the memory of measured runs, and write benchmarks/evidence/rehearsed.csv.

    python benchmarks/rehearse_rows.py ROWS.json --megatron CHECKOUT --te DIRECTORY [--only TEXT]

ROWS.json contains {"rows": [{"case", "platform", "gpus", "nodes", "peak_bytes", "held_bytes",
"step_s"}]}: golden values of Megatron-LM's functional tests, whose flags are read from CHECKOUT.
Rows that are in the file already are skipped; `benchmarks/evidence.py` prints the table.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_vshape.core.model.kinds import ScheduleError
from megatron_vshape.rehearsal.command import Command, sizes_of
from megatron_vshape.rehearsal.command_reader import read_command
from megatron_vshape.rehearsal.dry_run_flags import environment_of, without_files
from megatron_vshape.rehearsal.gpus import GPUS
from megatron_vshape.rehearsal.rank_job import RankJob
from megatron_vshape.rehearsal.rank_report import FailedRank, RankReport
from megatron_vshape.rehearsal.ranks import Programs, rehearse_all

OUT = Path(__file__).resolve().parents[1] / "benchmarks" / "evidence" / "rehearsed.csv"
COLUMNS = (
    "case platform gpus gpus_from measured_peak rehearsed_peak measured_held rehearsed_held "
    "measured_s counted_s process_s host_mib error"
).split()

NOT_RUN = {
    "bert/": "BERT: rejected at start",
    "t5/": "T5: rejected at start",
    "multimodal-llava/": "a vision-language model: another entry script",
    "mimo/": "a vision-language model: another entry script",
    "ep4_etp1_fine_grained_offloading": "Megatron's own assertion fails in its second step, Chunk "
    "mismatch: the last chunk's groups all stay and count as over; its CI marks the case broken",
    "flextron": "Flextron: a script of its own, which needs NVIDIA's ModelOpt installed",
    "grpo": "reinforcement learning: what a rollout holds is not a training step's",
}

FITTED = {
    "gpt3_15b_8t_release_sm_gb200": 128,
    "gpt3_15b": 256,
    "mixtral_8x7b": 64,
    "mixtral_8x22b": 128,
    "tp1pp4emp16": 64,
    "gb_200_release": 32,
    "nemotron3_super": 64,
}
"""GPUs of runs that do not specify them: the power of two at which the memory between steps fits.

Only the peak of these rows is a prediction.
"""

OLDER_TORCH = (
    "15b_8t_release_sm gb200",
    "cp2_calculate_per_token_loss_nondeterministic_1node",
    "cp2_etp4_calculate_per_token_loss_nondeterministic_dp_last_1node",
    "cp2_etp4_nondeterministic_dp_last gb200",
    "cp2_etp4_nondeterministic_dp_last_1node",
    "cp2_nondeterministic_1node",
    "cross_entropy_loss_fusion_1node",
    "gb_200_release",
)
HOPPER_ALONE = ":4096:2:16:8"
"""Variable of the cuBLAS workspace for Blackwell's golden values from before May 2026.

They were measured (`git log` of their files) with a torch that gave cuBLAS 32 MiB on Hopper alone;
later ones with a torch that does so on Blackwell too, as today's. The variable sets the workspace
of the older torch (aten/src/ATen/cuda/CublasHandlePool.cpp).
"""

NOT_YET = "not run yet"

NODE = 8
"""GPUs of the small cases that do not specify them: one node."""

VOCABULARY = {"nemotron3_super": 131072}


def main() -> None:
    """Estimate the missing rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--megatron", type=Path, required=True)
    parser.add_argument("--te", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    there = known()
    rows = {f"{row['case']} {row['platform']}": row for row in _rows(options.rows)}
    missing = {
        name: row for name, row in rows.items() if name not in there and options.only in name
    }
    jobs = []
    for name, row in missing.items():
        try:
            jobs.append(job_of(row, options.megatron))
        except ScheduleError as error:
            there[name] = record(row, str(error))
    pending = {name: record(row, NOT_YET) for name, row in rows.items()}
    for report in rehearse_all(Programs(options.megatron, options.te, options.jobs), jobs):
        result = report.error if isinstance(report, FailedRank) else report
        there[report.name] = record(rows[report.name], result)
        write(pending | there)
    write(pending | there)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    yield from json.loads(path.read_text())["rows"]


def known() -> dict[str, dict[str, str]]:
    """Return the rows of the file."""
    if not OUT.is_file():
        return {}
    with OUT.open() as stream:
        rows = {f"{row['case']} {row['platform']}": row for row in csv.DictReader(stream)}
    return {name: row for name, row in rows.items() if row["error"] != NOT_YET}


def write(rows: dict[str, dict[str, str]]) -> None:
    """Write the rows in the order of their names."""
    with OUT.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[name] for name in sorted(rows))


def gpus_of(row: dict[str, Any]) -> tuple[int, str]:
    """Return how many GPUs a run had, and where that comes from."""
    if row.get("gpus") and row.get("nodes"):
        return row["gpus"] * row["nodes"], "given"
    for part, number in FITTED.items():
        if part in row["case"]:
            return number, "fitted"
    return NODE, "assumed"


def command_of(row: dict[str, Any], megatron: Path) -> Command:
    """Return the command of a row.

    Raises:
        ScheduleError: it is no GPT's or hybrid model's.
    """
    for part, reason in NOT_RUN.items():
        if part in row["case"]:
            raise ScheduleError(reason)
    config = megatron / "tests" / "functional_tests" / "test_cases" / row["case"]
    command = read_command([str(config / "model_config.yaml")])
    if row["case"].startswith(("hybrid/", "nemotron/")):
        command = replace(command, script="pretrain_hybrid.py")
    return command


def job_of(row: dict[str, Any], megatron: Path) -> RankJob:
    """Return the job of the last rank, which is the one that logs."""
    command = command_of(row, megatron)
    sizes = sizes_of(command, gpus_of(row)[0])
    name = f"{row['case']} {row['platform']}"
    environment = environment_of(command)
    if row["platform"] == "gb200" and any(part in name for part in OLDER_TORCH):
        environment["CUBLAS_WORKSPACE_CONFIG"] = HOPPER_ALONE
    vocabulary = next((n for part, n in VOCABULARY.items() if part in row["case"]), None)
    return RankJob(
        script=str((megatron / command.script).resolve()),
        flags=without_files(command, vocabulary),
        gpu=GPUS[row["platform"]],
        world=sizes.world,
        rank=sizes.world - 1,
        environment=environment,
        stage=sizes.pipeline - 1,
        name=name,
    )


def record(row: dict[str, Any], outcome: RankReport | str) -> dict[str, str]:
    """Return the row of the file: bytes and seconds, or the error."""
    gpus, known_from = gpus_of(row)
    values: dict[str, Any] = {
        "case": row["case"],
        "platform": row["platform"],
        "gpus": gpus,
        "gpus_from": known_from,
        "measured_peak": round(row["peak_bytes"]),
        "measured_held": round(row["held_bytes"]),
        "measured_s": row["step_s"],
        "error": outcome if isinstance(outcome, str) else "",
    }
    if isinstance(outcome, RankReport):
        values |= {
            "rehearsed_peak": outcome.memory.peak_bytes,
            "rehearsed_held": outcome.memory.held_bytes,
            "counted_s": round(outcome.step.time["step_s"], 4),
            "process_s": outcome.provenance.seconds,
            "host_mib": outcome.provenance.host_bytes >> 20,
        }
    return {name: str(values.get(name, "")) for name in COLUMNS}


if __name__ == "__main__":
    main()
